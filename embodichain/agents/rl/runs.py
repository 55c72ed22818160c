"""What surrounds the training loop of a run: its folder and the lock on it, its logs, signals that stop it.

The folder of a run::

    train_config.json           the resolved config: it starts the same run again
    metrics.jsonl               every logged scalar, one line per iteration or evaluation
    events.out.tfevents...      the same for TensorBoard
    checkpoints/step_.../       the latest checkpoints; the links ``latest`` and ``best`` name two of them
    videos/step_....mp4         one episode of each evaluation
    failure/                    batch, policy and simulation at the first NaN (of other ranks: failure_rank_...)
    run.lock                    host and process that train in this folder; locked as long as they do
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import math
import os
import shutil
import signal
import socket
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, Self

from embodichain.agents.rl.checkpoint import (
    BEST,
    CHECKPOINTS,
    STATE_FILE,
    checkpoint_step,
    list_checkpoints,
    restore_former,
    save_checkpoint,
)
from embodichain.agents.rl.config import TrainCfg, TrainerCfg
from embodichain.agents.rl.utils.distributed import Ranks, is_launched, is_torchrun, local_count
from embodichain.config import save_config
from embodichain.errors import CheckpointError, ConfigError, OutputError, RankError, TrainingStateError
from embodichain.extras import require

CONFIG_FILE = "train_config.json"
LOCK_FILE = "run.lock"
LATEST = "latest"
WANDB_FILE = "wandb_run.txt"
_LOCK_BYTES = 4096
_STDERR = 2
_LOG = logging.getLogger(__name__)


class RunLock:
    """Keeps other processes out of the folder of a run, until it is released or its process ends, however it does.

    The operating system holds the lock (``flock``), so that a killed process leaves none behind; the file says who has
    it. Children do not inherit it.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK_FILE
        self._file: BinaryIO | None = None
        _locks.add(self)

    def acquire(self) -> None:
        """Take the lock; ``TrainingStateError`` says who has it. Taking it twice is fine."""
        if self._file is not None:
            return
        folder = self._path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = self._open()
            former, holder = _read_holder(file), {"host": socket.gethostname(), "pid": os.getpid()}
            self._write(file, json.dumps(holder | {"since": time.strftime("%Y-%m-%d %H:%M:%S %z")}) + "\n")
        except OSError as error:
            raise _no_folder(folder, error) from error
        self._file = file
        if former and former["host"] != holder["host"]:
            _LOG.warning(
                "%s was left by process %s on %s, which has not ended in an orderly way. If it still runs, stop it: "
                "not all file systems that machines share lock files for all of them",
                folder,
                former["pid"],
                former["host"],
            )

    def release(self) -> None:
        """Give the lock back; releasing it twice is fine."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # the disk is full or gone: the file says less, but is free
                self._write(self._file, "")
            self.forget()

    def forget(self) -> None:
        """Close the file, as a forked child does: the lock stays with the parent."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> BinaryIO:
        """Return the file, locked."""
        while True:
            file = os.fdopen(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    with file:
                        self._refuse(_read_holder(file))
                _LOG.warning(
                    "the file system of %s has no locks (%s): make sure that no other process trains in this folder",
                    self._path.parent,
                    error.strerror,
                )
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), os.stat(self._path)):
                    return file
            file.close()  # somebody removed the folder meanwhile

    def _refuse(self, holder: dict[str, Any] | None) -> None:
        """Raise the error that says who has the lock."""
        who, how = "another process", "stop it"
        if holder is not None:
            own = " (this one)" if (holder["host"], holder["pid"]) == (socket.gethostname(), os.getpid()) else ""
            who = f"process {holder['pid']} on {holder['host']}{own}, since {holder['since']}"
            how = f"stop it there with 'kill {holder['pid']}', which saves a checkpoint"
        folder = self._path.parent
        raise TrainingStateError(
            f"{folder} is in use by {who}: wait until it has ended, or {how}; then continue with --resume {folder}"
        )

    @staticmethod
    def _write(file: BinaryIO, text: str) -> None:
        file.truncate(0)
        file.seek(0)
        file.write(text.encode())


_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)
"""What file systems answer that cannot lock files."""
_locks: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _forget_locks() -> None:
    for lock in _locks:
        lock.forget()


os.register_at_fork(after_in_child=_forget_locks)


def _read_holder(file: BinaryIO) -> dict[str, Any] | None:
    """Return who wrote a lock file and has not emptied it, if that can be read."""
    file.seek(0)
    with contextlib.suppress(ValueError):
        holder = json.loads(file.read(_LOCK_BYTES))
        if isinstance(holder, dict) and {"host", "pid", "since"} <= holder.keys():
            return holder
    return None


class RunFolder:
    """Where a run's files are, which process may write them, and which checkpoints stay."""

    def __init__(self, path: Path, keep: int = 2) -> None:
        self.path = path
        self.keep = keep
        self.checkpoints = path / CHECKPOINTS
        self.metrics = path / "metrics.jsonl"
        self.lock = RunLock(path)

    @classmethod
    def create(cls, cfg: TrainCfg) -> RunFolder:
        """Make the folder of a new run and lock it; ``TrainingStateError`` if there is a checkpoint in it already."""
        name, number = f"{cfg.trainer.exp_name}_{time.strftime('%Y%m%d-%H%M%S')}", 1
        path = Path(cfg.trainer.run_dir or Path(cfg.trainer.output_dir) / name)
        while cfg.trainer.run_dir is None and not _is_new(path):  # a run of this name was started in the same second
            number += 1
            path = path.with_name(f"{name}-{number}")
        folder = cls(path)
        folder.lock.acquire()
        try:
            if list_checkpoints(folder.checkpoints):
                raise TrainingStateError(
                    f"{path} holds a run already: continue it with --resume {path}, or choose another --trainer.run_dir"
                )
            folder.begin(cfg)
        except BaseException:
            folder.lock.release()
            raise
        return folder

    def begin(self, cfg: TrainCfg) -> None:
        """Write the config of a new run, and remove what one without a checkpoint has left."""
        if (self.path / CONFIG_FILE).exists():
            _LOG.warning("%s holds a run without a checkpoint: the run begins anew", self.path)
        self.configure(cfg)
        for old in (self.metrics, *self.path.glob("events.out.tfevents.*")):
            old.unlink(missing_ok=True)

    def configure(self, cfg: TrainCfg) -> None:
        """Write the config into the folder, and keep as many checkpoints as it says."""
        self.keep = cfg.trainer.keep_checkpoints
        try:
            save_config(cfg, self.path / CONFIG_FILE)
        except OSError as error:
            raise _no_folder(self.path, error) from error

    def save(self, step: int, state: Mapping[str, Any], best: bool = False) -> Path:
        """Write a checkpoint, let ``latest`` (and ``best``) point at it, and remove those that nothing points at."""
        saved = save_checkpoint(self.checkpoints / f"step_{step:012d}", state)
        for name in (LATEST, BEST) if best else (LATEST,):  # at any time a link points at the old one or the new one
            fresh = self.checkpoints / f".{name}.{os.getpid()}"
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(saved.name)
            os.replace(fresh, self.checkpoints / name)
        kept = (self.checkpoints / BEST).resolve()
        for old in list_checkpoints(self.checkpoints)[: -self.keep]:
            if old.resolve() != kept:
                _remove(old)
        return saved

    def forget_after(self, step: int) -> None:
        """Remove what an interrupted run left unfinished, and checkpoints of steps that are about to be made again."""
        self.lock.acquire()
        restore_former(self.checkpoints)
        for partial in self.checkpoints.glob(".step_*"):
            _remove(partial)
        for checkpoint in list_checkpoints(self.checkpoints):
            if checkpoint_step(checkpoint) > step:
                _remove(checkpoint)


def _is_new(path: Path) -> bool:
    """Make a folder; tell whether nobody was quicker."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        return False
    except OSError as error:
        raise _no_folder(path, error) from error
    return True


def _no_folder(path: Path, error: OSError) -> OutputError:
    return OutputError(f"cannot write to the folder {path}: {error.strerror}. Choose another one.")


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint that nobody needs; one that is gone, or cannot be removed, ends no training."""
    shutil.rmtree(checkpoint, ignore_errors=True)
    if checkpoint.exists():
        _LOG.warning("%s is not needed any more, but cannot be removed", checkpoint)


@contextmanager
def locked_run(given: str | os.PathLike[str], ranks: Ranks) -> Iterator[RunFolder]:
    """Keep other processes out of the folder of a run that is to be continued; ``given`` may be a checkpoint of it."""
    path = Path(given)
    with ranks.together("locking the folder of the run"):
        if ranks.is_first:
            if (path / STATE_FILE).is_file() and (path := path.resolve()).parent.name != CHECKPOINTS:
                raise TrainingStateError(f"{path} is not in the folder of a run, which is needed to continue it")
            if (path / STATE_FILE).is_file():
                path = path.parent.parent
            if not (path / CHECKPOINTS).is_dir() and not (path / CONFIG_FILE).is_file():
                raise CheckpointError(f"{path}: expected a checkpoint or a run with a checkpoint in it, found neither")
            folder = RunFolder(path)
            folder.lock.acquire()
    path = Path(ranks.from_first(str(path)))
    folder = folder if ranks.is_first else RunFolder(path)
    try:
        yield folder
    finally:
        folder.lock.release()


def open_folder(cfg: TrainCfg, folder: RunFolder | None, ranks: Ranks) -> RunFolder:
    """Return the folder of a run, which the first rank makes; the others may be on machines that do not have it."""
    made = ""
    with ranks.together("making the folder of the run"):
        if ranks.is_first:
            if folder is None:
                folder = RunFolder.create(cfg)
            else:
                folder.configure(cfg)
            made = str(folder.path)
    made = ranks.from_first(made)
    return folder if ranks.is_first and folder is not None else RunFolder(Path(made), cfg.trainer.keep_checkpoints)


def run_to_continue(trainer: TrainerCfg, ranks: Ranks) -> Path | None:
    """Return the folder of the run if torchrun starts the ranks and it has a checkpoint there; ``None`` for a new run.

    The first rank decides. If another one has a checkpoint and it has none, a machine was lost: ``RankError``.
    """
    saved: list[Path] = []
    with ranks.together("looking for a checkpoint"):
        if is_torchrun() and trainer.run_dir is not None:
            saved = list_checkpoints(Path(trainer.run_dir) / CHECKPOINTS)
        elif is_torchrun() and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")):
            problem = "expected a folder, as torchrun has to find the run again after a restart, got none"
            raise ConfigError(f"trainer.run_dir: {problem}")
    steps = ranks.exchange(checkpoint_step(saved[-1]) if saved else None)
    if steps[0] is not None:
        return Path(trainer.run_dir or "")
    for rank, step in enumerate(steps):
        if step is not None:
            raise RankError(
                f"rank 0 has no checkpoint in trainer.run_dir, but rank {rank} has one of step {step}: copy that "
                "folder to the machine of rank 0, or use one that all machines see"
            )
    return None


def resume_command(run: Path) -> str:
    """Return the command that continues a run as it was started; several machines have more options."""
    launcher = ""
    if is_launched():
        several = int(os.environ["WORLD_SIZE"]) > local_count()
        launcher = f"torchrun {'...' if several else f'--nproc-per-node={local_count()}'} -m "
    return f"{launcher}embodichain train --resume {run}"


class RunLog:
    """Writes scalars to TensorBoard, to a file with one JSON object per line, and to Weights & Biases if asked to."""

    def __init__(self, run: RunFolder, cfg: TrainCfg, resumed_at: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        if resumed_at is not None:
            _cut(run.metrics, resumed_at)
        self._file = run.metrics
        self._lines = run.metrics.open("a", encoding="utf-8")
        purge = None if resumed_at is None else resumed_at + 1
        self._tensorboard = SummaryWriter(str(run.path), purge_step=purge)
        self._wandb = _start_wandb(run, cfg) if cfg.trainer.use_wandb else None

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log named numbers; NaN and infinity become ``null`` in the JSON lines."""
        finite = {name: value if math.isfinite(value) else None for name, value in scalars.items()}
        with self._writing():
            for name, value in scalars.items():
                self._tensorboard.add_scalar(name, value, step)
            self._lines.write(json.dumps({"step": step, **finite}) + "\n")
            self._lines.flush()
        if self._wandb is not None:
            self._wandb.log(dict(scalars), step=step)

    def video(self, step: int, file: Path) -> None:
        """Log a video where that is possible; it is in the run's folder in any case."""
        if self._wandb is not None:
            wandb = require("wandb", extra="track")
            self._wandb.log({"eval/video": wandb.Video(str(file), format="mp4")}, step=step)

    def flush(self) -> None:
        """Write everything to the disk, as it must be before a checkpoint is saved."""
        with self._writing():
            self._tensorboard.flush()
            self._lines.flush()
            os.fsync(self._lines.fileno())

    def close(self) -> None:
        """Write out everything; calling it twice is fine."""
        try:
            with self._writing():
                self._lines.close()
        finally:
            self._tensorboard.close()
            if self._wandb is not None:
                self._wandb.finish()
                self._wandb = None

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn errors of the disk into one that says what to do."""
        try:
            yield
        except OSError as error:
            raise OutputError(
                f"cannot write to {self._file}: {error.strerror or error}. Once that is fixed, the run can continue "
                f"from its latest checkpoint: --resume {self._file.parent}"
            ) from error


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a ``metrics.jsonl``; a last one that was cut short is left out."""
    lines = file.read_text(encoding="utf-8").split("\n") if file.exists() else []
    return [json.loads(line) for line in lines[:-1] if line]  # what follows the last line break was not finished


def _cut(file: Path, step: int) -> None:
    """Drop lines of later steps, which are logged again."""
    try:
        kept = [line for line in read_metrics(file) if line["step"] <= step]
    except (ValueError, KeyError, TypeError) as error:
        raise TrainingStateError(f"{file} is damaged: {error!r}. Move it away to resume without it.") from None
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    partial.write_text("".join(f"{json.dumps(line)}\n" for line in kept), encoding="utf-8")
    partial.replace(file)


def _start_wandb(run: RunFolder, cfg: TrainCfg) -> Any:
    """Open the run at Weights & Biases, the same one when resumed."""
    wandb = require("wandb", extra="track")
    file = run.path / WANDB_FILE
    run_id = file.read_text().strip() if file.exists() else wandb.util.generate_id()
    file.write_text(f"{run_id}\n")
    names = {"project": cfg.trainer.wandb_project, "name": run.path.name, "id": run_id}
    return wandb.init(**names, resume="allow", dir=str(run.path), config=cfg.to_dict())


class StopSignals:
    """While active, the first Ctrl-C (or SIGTERM) asks the loop to stop; the second one interrupts it at once."""

    def __init__(self, aloud: bool = True) -> None:
        """``aloud`` prints at once that a signal has come."""
        self._aloud = aloud
        self.received: int | None = None
        """Number of the signal that asked to stop."""
        self._former: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python handles signals nowhere else
            for number in (signal.SIGINT, signal.SIGTERM):
                self._former[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former.clear()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = number
        if self._aloud:  # by no stream or lock, as the signal may interrupt a write to one
            with contextlib.suppress(OSError):
                clear = "\r\x1b[2K" if os.isatty(_STDERR) else ""
                os.write(_STDERR, f"{clear}stopping after this iteration; a second signal stops at once\n".encode())
