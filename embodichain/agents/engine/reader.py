"""``StreamReader``: the sampling side of the engine, for any process that reads from the buffer."""

import fcntl
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from embodichain.agents.engine.config import OnlineDataEngineCfg
from embodichain.agents.engine.offsets import Offsets, OffsetSampler
from embodichain.agents.engine.sampling import OutputPool, OutputRing, WindowSampler
from embodichain.agents.engine.shared_buffer import MAX_READERS, Control, Floats, Ints, Read, SharedBuffer, State
from embodichain.agents.processes.failure import ENGINE, FailureReport
from embodichain.errors import ChunkSizeError, EngineStateError, StreamStalledError

Generator = np.random.Generator | torch.Generator

_STATE, _SAMPLES = int(Control.STATE), int(Read.SAMPLES)  # indexing NumPy arrays with an enum is ten times slower
_POLL_SECONDS = 0.001
_AGE_EVERY = 16
"""Episode ages are measured on every 16th batch only, to keep sampling cheap."""


class Forks:
    """Detects that an object was inherited by a fork, at a fraction of the cost of ``os.getpid``."""

    count = 0
    """Number of forks between the first process and this one."""
    lock = threading.Lock()
    """Protects this process's reader slot from its threads; a forked child gets a new lock."""

    @classmethod
    def after_in_child(cls) -> None:
        cls.count += 1
        cls.lock = threading.Lock()


os.register_at_fork(after_in_child=Forks.after_in_child)


class ReaderSlot:
    """The counters of this process in the shared buffer; no other process writes them.

    A slot is claimed on first use and after a fork. The slot of a process that has exited is reused along with its
    counts, so that the sum over all slots never decreases.
    """

    def __init__(self, buffer: SharedBuffer) -> None:
        self._buffer = buffer
        self._counters: Floats = buffer.readers[0]
        self._index = 0
        self._forks = -1

    def add(self, samples: int, redrawn: int, ages: tuple[float, float] | None = None) -> None:
        """Count one batch, with its mean age ``(seconds, episodes)`` if measured."""
        with Forks.lock:
            counters = self._claimed()
            counters[_SAMPLES] += samples
            if redrawn:
                counters[Read.REDRAWN] += redrawn
            if ages is not None:
                counters[Read.AGED] += 1
                counters[Read.AGE_SECONDS] += ages[0]
                counters[Read.AGE_EPISODES] += ages[1]

    def new_stream(self, seed: int) -> np.random.SeedSequence:
        """Return a seed sequence that no other thread or process gets."""
        with Forks.lock:
            counters = self._claimed()
            counters[Read.STREAMS] += 1
            return np.random.SeedSequence(seed, spawn_key=(self._index, int(counters[Read.STREAMS])))

    def _claimed(self) -> Floats:
        """Return the counters of this process, claiming a slot that is free or whose process has exited if needed."""
        if self._forks == Forks.count:
            return self._counters
        buffer, pid = self._buffer, os.getpid()
        # A POSIX record lock belongs to the process, not to the file descriptor, which all processes share.
        fcntl.lockf(buffer.segment.fd, fcntl.LOCK_EX, 1, 0)
        try:
            for index, owner in enumerate(buffer.owners.tolist()):
                if owner in (0, pid) or not os.path.exists(f"/proc/{owner}"):
                    buffer.owners[index] = pid
                    self._index, self._counters, self._forks = index, buffer.readers[index], Forks.count
                    return self._counters
            raise EngineStateError(f"more than {MAX_READERS} processes sample from one engine: use fewer")
        finally:
            fcntl.lockf(buffer.segment.fd, fcntl.LOCK_UN, 1, 0)


class _PerThread:
    """Sampling state of one thread."""

    def __init__(self, buffer: SharedBuffer, seed: np.random.SeedSequence, check_state: Callable[[], None]) -> None:
        self.forks = Forks.count
        self.generator = np.random.default_rng(seed)
        self.sampler = WindowSampler(buffer, check_state)
        self.pool = OutputPool(buffer.layout)
        self.ring = OutputRing(OutputPool(buffer.layout).get)
        self.offset_samplers: dict[str, OffsetSampler] = {}
        self.batches = 0


class StreamReader:
    """Samples batches from a shared buffer, in any number of threads and processes."""

    def __init__(self, buffer: SharedBuffer, cfg: OnlineDataEngineCfg) -> None:
        self.buffer = buffer
        self._cfg = cfg
        self._slot = ReaderSlot(buffer)
        self._local = threading.local()
        self._forks = Forks.count
        self._limit = cfg.max_samples_per_episode

    def __reduce__(self) -> tuple[Any, ...]:
        return StreamReader, (self.buffer, self._cfg)

    def sample(
        self, batch_size: int, chunk_size: int, generator: Generator | None = None, reuse_outputs: bool = False
    ) -> TensorDict:
        """Sample chunks ``[batch_size, chunk_size]``; see ``OnlineDataEngine.sample_batch``."""
        self.prepare(batch_size, chunk_size)
        own = self._own()
        source = own.generator if generator is None else self.generator(generator)
        output = (own.ring if reuse_outputs else own.pool).get(batch_size, chunk_size)
        windows, redrawn = own.sampler.draw(source, output, batch_size, chunk_size)
        self.count(batch_size, redrawn, lambda: windows // self.buffer.max_steps)
        return output.batch

    def sample_frames(self, batch_size: int, offsets: Offsets, generator: Generator | None = None) -> TensorDict:
        """Sample frames ``[batch_size]`` and those at the given offsets; see ``OnlineDataEngine.sample_frames``."""
        self.prepare(batch_size, offsets.span)
        own = self._own()
        key = repr(offsets)
        if key not in own.offset_samplers:
            own.offset_samplers[key] = OffsetSampler(own.sampler, offsets)
        source = own.generator if generator is None else self.generator(generator)
        batch, drawn, redrawn = own.offset_samplers[key].draw(source, batch_size)
        self.count(batch_size, redrawn, lambda: drawn // self.buffer.max_steps)
        return batch

    def generator(self, given: Generator | None) -> np.random.Generator:
        """Return a NumPy generator: the given one, one seeded by the given torch generator, or this thread's own."""
        if isinstance(given, torch.Generator):
            seed = torch.empty((), dtype=torch.int64, device=given.device).random_(generator=given)
            return np.random.default_rng(int(seed))
        if given is not None and not isinstance(given, np.random.Generator):
            raise TypeError(
                f"generator must be numpy's or torch's, got {given!r}; np.random.default_rng(seed) makes one"
            )
        return self._own().generator if given is None else given

    def prepare(self, batch_size: int, chunk_size: int) -> None:
        """Validate the request, check the engine's state, and wait while ``max_samples_per_episode`` is reached."""
        self._check_request(batch_size, chunk_size)
        if self._limit is not None:
            self._wait_for_episodes(batch_size, self._limit)

    def check_chunk_size(self, chunk_size: int) -> None:
        """Raise ``ChunkSizeError`` unless a stored episode has at least ``chunk_size`` steps."""
        self._check_request(1, chunk_size)
        self._own().sampler.pick(np.random.default_rng(0), 1, chunk_size)

    def _check_request(self, batch_size: int, chunk_size: int) -> None:
        for name, size in (("batch_size", batch_size), ("chunk_size", chunk_size)):
            if (type(size) is not int and not isinstance(size, np.integer)) or size < 1:
                raise ChunkSizeError(f"{name} must be an integer >= 1, got {size!r}")
        if chunk_size > self.buffer.max_steps:
            raise ChunkSizeError(f"chunk_size is {chunk_size}, but max_episode_steps is {self.buffer.max_steps}")
        self.check_state()

    def _wait_for_episodes(self, batch_size: int, limit: float) -> None:
        """Wait until ``batch_size`` more samples stay within ``limit`` per episode; raise if they never will."""
        buffer, timeout = self.buffer, self._cfg.worker_timeout
        if batch_size > limit * buffer.num_rows:
            raise StreamStalledError(
                f"a batch of {batch_size} can never be drawn: the limit of {limit:g} samples per episode and "
                f"{buffer.num_rows} rows allow {int(limit * buffer.num_rows)} at a time; raise max_samples_per_episode "
                "or buffer_size"
            )
        before, started = buffer.episodes_written, time.monotonic()
        while limit * buffer.episodes_written - buffer.samples < batch_size:
            self.check_state()
            if time.monotonic() - started > timeout:
                raise StreamStalledError(
                    f"a batch of {batch_size} waited {timeout:g} s for new episodes, but the workers wrote "
                    f"{buffer.episodes_written - before} in that time: raise max_samples_per_episode or num_workers"
                )
            time.sleep(_POLL_SECONDS)

    def check_state(self) -> None:
        """Raise unless the engine is running and its buffer is filled."""
        state = int(self.buffer.control[_STATE])
        if state == State.RUNNING:
            return
        if state == State.FAILED:
            report = FailureReport.from_json(self.buffer.failure_report)
            raise report.as_user_error() if report.worker == ENGINE else report.as_error()
        if state == State.STOPPED:
            raise EngineStateError("the engine was stopped: nothing can be sampled any more")
        raise EngineStateError("the buffer is still being filled for the first time: wait until is_init is True")

    def count(self, samples: int, redrawn: int, rows: Callable[[], Ints]) -> None:
        """Count a batch of samples. ``rows()`` returns the sampled rows; it is called when ages are measured."""
        own = self._own()
        own.batches += 1
        if own.batches % _AGE_EVERY != 1:
            self._slot.add(samples, redrawn)
            return
        written_at, order = self.buffer.stamps[rows()].mean(axis=0).tolist()
        self._slot.add(samples, redrawn, (time.time() - written_at, self.buffer.episodes_written - order))

    def _own(self) -> _PerThread:
        own: _PerThread | None = getattr(self._local, "own", None)
        if own is None or own.forks != Forks.count:
            if self._forks != Forks.count:
                # torch's thread pool does not survive a fork: the child's first parallel operation would hang.
                torch.set_num_threads(1)
                self._forks = Forks.count
            own = self._local.own = _PerThread(self.buffer, self._slot.new_stream(self._cfg.seed), self.check_state)
        return own
