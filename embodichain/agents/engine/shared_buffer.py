"""Episodes in shared memory: rows ``[num_rows, max_steps, ...]`` with a header each, and the counters of all processes.

Every word has a single writer, so frames are read and written without locks: rows and worker records belong to their
worker, a reader slot to the process that claimed it, the control words to the creator of the engine.

Each row is protected by a sequence lock: ``sequence`` is odd during a write. A reader whose row has changed during its
copy discards the copy and draws again.
"""

import enum
import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from embodichain.agents.datasets.frames import Episode, EpisodeInfo, FrameLayout, Key, unflatten
from embodichain.agents.engine.config import OnlineDataEngineCfg
from embodichain.agents.processes.failure import REPORT_BYTES
from embodichain.agents.processes.shared_memory import Segment, fence
from embodichain.envs.multi_task import shares_of
from embodichain.errors import StreamStalledError
from embodichain.utils.tensor_tree import BlockLayout

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

MAX_READERS = 512
_FENCED_READ_SECONDS = 10.0


class State(enum.IntEnum):
    """State of the engine, read by every process."""

    STARTING = 0
    RUNNING = 1
    FAILED = 2
    STOPPED = 3


class Control(enum.IntEnum):
    """Indices of the control words, written by the creator."""

    STATE = 0
    READY = 1
    RESTARTS = 2
    FAILURE_LENGTH = 3
    STEP_NANOSECONDS = 4  # 0 if unknown


class Work(enum.IntEnum):
    """Indices into a worker's record, written by that worker and continued by its replacement.
    ``JUDGED`` counts the finished episodes that report success or failure. ``TARGET`` and ``SERVED`` are the state of
    the refill policy. ``IDLE`` is 1 while no episode is due."""

    WRITTEN = 0
    FINISHED = 1
    JUDGED = 2
    SUCCEEDED = 3
    FRAMES = 4
    TARGET = 5
    SERVED = 6
    IDLE = 7
    STEPS = 8


WORK_WORDS = 16
"""Length of a record: whole cache lines, so that no two workers write to the same line."""


class Read(enum.IntEnum):
    """Indices into a reader slot; the totals of the engine are the sums over all slots."""

    SAMPLES = 0
    REDRAWN = 1
    AGED = 2
    AGE_SECONDS = 3
    AGE_EPISODES = 4
    STREAMS = 5


def count_finished(episode: Episode, record: Ints) -> None:
    """Count a finished episode in a ``Work`` record."""
    record[Work.FINISHED] += 1
    record[Work.FRAMES] += episode.length
    if episode.success is not None:
        record[Work.JUDGED] += 1
        record[Work.SUCCEEDED] += int(episode.success)


def task_weights(cfg: OnlineDataEngineCfg) -> tuple[float, ...]:
    """Return the weight of each task of a stream; ``(1.0,)`` for a single environment."""
    return tuple(entry.weight for entry in cfg.tasks()) or (1.0,)


class SharedBuffer:
    """All shared state of one engine; pickling or forking attaches another process to the same memory."""

    def __init__(
        self,
        layout: FrameLayout,
        num_rows: int,
        max_steps: int,
        num_workers: int,
        segment: Segment | None = None,
        weights: tuple[float, ...] = (1.0,),
    ) -> None:
        """Map the memory of an existing buffer, or allocate one (``segment=None``); ``SharedMemoryError`` if it does
        not fit. The rows of every worker are divided among tasks in proportion to their ``weights``."""
        arrays: dict[str | Key, tuple[torch.dtype, tuple[int, ...]]] = {
            "control": (torch.int64, (8,)),
            "failure": (torch.uint8, (REPORT_BYTES,)),
            "workers": (torch.int64, (num_workers, WORK_WORDS)),
            "owners": (torch.int64, (MAX_READERS,)),
            "readers": (torch.float64, (MAX_READERS, 8)),
            "sequence": (torch.int64, (num_rows,)),
            "length": (torch.int64, (num_rows,)),
            "stamps": (torch.float64, (num_rows, 2)),
            "origins": (torch.int64, (num_rows, 5)),
            "tasks": (torch.int64, (num_workers, len(weights), WORK_WORDS)),
        }
        arrays |= {leaf.key: (leaf.dtype, (num_rows, max_steps, *leaf.shape)) for leaf in layout.leaves}
        block = BlockLayout((name, dtype, shape) for name, (dtype, shape) in arrays.items())
        if segment is None:
            what = f"a buffer of {num_rows} episodes x {max_steps} steps x {layout.nbytes} bytes"
            segment = Segment.create(block.nbytes, what)
        self.segment, self.layout, self.weights = segment, layout, weights
        self.num_rows, self.max_steps, self.num_workers = num_rows, max_steps, num_workers
        views = block.views(segment.bytes)
        self.control: Ints = views["control"].numpy()
        self.failure: NDArray[np.uint8] = views["failure"].numpy()
        self.workers: Ints = views["workers"].numpy()
        self.owners: Ints = views["owners"].numpy()
        self.readers: Floats = views["readers"].numpy()
        self.sequence: Ints = views["sequence"].numpy()
        self.length: Ints = views["length"].numpy()
        self.stamps: Floats = views["stamps"].numpy()
        """``[num_rows, 2]``: Unix time of the write, and the engine's count of episodes at that time."""
        self.origins: Ints = views["origins"].numpy()
        """``[num_rows, 5]``: worker, episode seed, policy version, success (-1 unknown), task."""
        self.tasks: Ints = views["tasks"].numpy()
        """``[num_workers, num_tasks, WORK_WORDS]``: a record per worker and task; ``workers`` has the sums."""
        self.frames: dict[Key, Tensor] = {leaf.key: views[leaf.key] for leaf in layout.leaves}
        nested = TensorDict(unflatten(self.frames), batch_size=[num_rows, max_steps])
        self.tensordict = nested.share_memory_()

    def __reduce__(self) -> tuple[Any, ...]:
        sizes = (self.num_rows, self.max_steps, self.num_workers)
        return SharedBuffer, (self.layout, *sizes, self.segment, self.weights)

    def rows_of(self, worker: int) -> range:
        """Return the rows that belong to a worker; rows are divided as evenly as possible."""
        return range(*(index * self.num_rows // self.num_workers for index in (worker, worker + 1)))

    def rows_of_task(self, worker: int, task: int) -> range:
        """Return the rows of a worker that belong to one of several tasks."""
        rows, ends = self.rows_of(worker), [0]
        for share in shares_of(self.weights, len(rows)):
            ends.append(ends[-1] + share)
        return rows[ends[task] : ends[task + 1]]

    def write(self, row: int, worker: int, episode: Episode) -> None:
        """Replace the episode in a row; readers that are copying from it detect this and draw again."""
        # A worker killed during a write leaves an odd number, which its replacement keeps.
        busy = int(self.sequence[row]) | 1
        self.sequence[row] = busy
        fence()
        for key, pieces in episode.frames.items():
            target, start = self.frames[key].select(0, row), 0  # select and narrow take half the time of indexing
            for piece in pieces:
                target.narrow(0, start, len(piece)).copy_(piece)
                start += len(piece)
        success = -1 if episode.success is None else int(episode.success)
        self.length[row] = episode.length
        self.origins[row] = (worker, episode.seed, episode.policy_version, success, episode.task_index)
        self.stamps[row] = (time.time(), self.episodes_written)
        fence()
        self.sequence[row] = busy + 1

    def info(self, row: int) -> EpisodeInfo:
        """Return a consistent copy of a row's header."""
        deadline = time.monotonic() + _FENCED_READ_SECONDS
        while time.monotonic() < deadline:
            sequence = int(self.sequence[row])
            fence()
            length, stamp, origin = int(self.length[row]), float(self.stamps[row, 0]), self.origins[row].tolist()
            fence()
            if sequence % 2 == 0 and sequence == int(self.sequence[row]):
                worker, seed, version, success, task = origin if length else (-1, -1, -1, -1, 0)
                known = None if success < 0 else bool(success)
                return EpisodeInfo(row, length, sequence, worker, seed, version, known, stamp, task)
            time.sleep(0.001)
        raise StreamStalledError(f"row {row} has been half-written for {_FENCED_READ_SECONDS:.0f} s")

    @property
    def episodes_written(self) -> int:
        """Episodes written by all workers so far."""
        return int(self.workers[:, Work.WRITTEN].sum())

    @property
    def samples(self) -> int:
        """Chunks sampled by all processes so far."""
        return int(self.readers[:, Read.SAMPLES].sum())

    def fail(self, report: str) -> None:
        """Make every process that samples raise ``report``, a ``FailureReport`` as JSON."""
        text = report.encode()
        self.failure[: len(text)] = np.frombuffer(text, dtype=np.uint8)
        self.control[Control.FAILURE_LENGTH] = len(text)
        fence()
        self.control[Control.STATE] = State.FAILED

    @property
    def failure_report(self) -> str:
        """The report passed to ``fail``."""
        return self.failure[: int(self.control[Control.FAILURE_LENGTH])].tobytes().decode()
