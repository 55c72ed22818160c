"""What surrounds the training loop of a run: its folder and the lock on it, its logs, signals that stop it.

The folder of a run::

    train_config.json           the resolved config: it starts the same run again
    metrics.jsonl               every logged scalar, one line per iteration or evaluation
    run.json                    how it was started, on which machine and versions, and how it ended
    events.out.tfevents...      the same for TensorBoard
    checkpoints/step_.../       the latest checkpoints; the links ``latest`` and ``best`` name two of them
    videos/step_....mp4         one episode of each evaluation
    failure/                    batch, policy and simulation at the first NaN (of other ranks: failure_rank_...)
    run.lock                    host and process that train in this folder; locked as long as they do
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import shlex
import shutil
import signal
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Self

from embodichain.agents.rl.checkpoint import (
    BEST,
    CHECKPOINTS,
    check_parts,
    checkpoint_step,
    find_checkpoint,
    is_checkpoint,
    list_checkpoints,
    load_checkpoint,
    restore_former,
    save_checkpoint,
)
from embodichain.agents.rl.run_config import RunConfig, RunSettings
from embodichain.agents.rl.run_lock import RunLock
from embodichain.agents.rl.run_records import (
    CONFIG_FILE,
    METRICS_FILE,
    RECORD_FILE,
    RunOrigin,
    RunRecord,
    command_of,
)
from embodichain.agents.rl.run_records import read_metrics as read_metrics
from embodichain.agents.rl.utils.distributed import Ranks, is_launched, is_torchrun, local_count
from embodichain.config import load_config, save_config
from embodichain.errors import (
    CheckpointError,
    CheckpointUnreadableError,
    CheckpointVersionError,
    ConfigError,
    EmbodiChainError,
    OutputError,
    RankError,
    TrainingStateError,
    writing,
)
from embodichain.extras import require

LATEST = "latest"
WANDB_FILE = "wandb_run.txt"
_UNFINISHED = re.compile(rf"\.step_[0-9]+\.[0-9]+\.partial|\.({LATEST}|{BEST})\.[0-9]+")
"""Names of checkpoints and links that were being written when their process was killed."""
_STDERR = 2
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Ctrl-C, and what schedulers send before they end a job: Slurm, for one, SIGTERM, or what ``--signal`` asks for."""
_ALWAYS_TAKEN = (signal.SIGINT, signal.SIGTERM)
"""The others are left to a program that has a handler for them, or ignores them, as ``nohup`` does."""
_LOG = logging.getLogger(__name__)


class RunFolder:
    """Where a run's files are, which process may write them, and which checkpoints stay."""

    def __init__(self, path: Path, keep: int = 2) -> None:
        self.path = path
        self.keep = keep
        self.checkpoints = path / CHECKPOINTS
        self.metrics = path / METRICS_FILE
        self.lock = RunLock(path)
        self.is_new = False
        """Whether this process made the folder."""
        self.new_parents: list[Path] = []
        """Whether it made the one above, too."""
        self.is_named = True
        """Whether the user chose its name."""
        self.origin = RunOrigin()
        """How the run was started."""

    @classmethod
    def create(cls, cfg: RunConfig) -> RunFolder:
        """Make the folder of a new run and lock it; ``TrainingStateError`` if there is a checkpoint in it already."""
        name, number = f"{cfg.trainer.exp_name}_{time.strftime('%Y%m%d-%H%M%S')}", 1
        path = Path(cfg.trainer.run_dir or Path(cfg.trainer.output_dir) / name)
        new_parents = [parent for parent in path.parents if not os.path.lexists(parent)]
        while cfg.trainer.run_dir is None and not _is_new(path):  # a run of this name was started in the same second
            number += 1
            path = path.with_name(f"{name}-{number}")
        folder = cls(path)
        folder.new_parents = new_parents
        folder.is_named = cfg.trainer.run_dir is not None
        folder.is_new = not folder.is_named or not os.path.lexists(path)
        folder.lock.acquire()
        try:
            if list_checkpoints(folder.checkpoints, damaged=True):
                raise TrainingStateError(
                    f"{path} holds a run already: continue it with --resume {path}, or choose another --trainer.run_dir"
                )
            folder.begin(cfg)
        except BaseException:
            folder.lock.release()
            raise
        return folder

    def discard(self) -> None:
        """Remove the folder of a run that failed before it had learned anything, if this process made it for that."""
        steps = [checkpoint_step(checkpoint) for checkpoint in list_checkpoints(self.checkpoints, damaged=True)]
        kept = 0 if self.is_named else 1  # the first checkpoint holds nothing but what the config and the seed say
        is_used = len(steps) >= kept + 1 or any(steps) or (self.metrics.is_file() and _has_line(self.metrics))
        if self.is_new and not is_used and not (self.path / "failure").exists():
            shutil.rmtree(self.path, ignore_errors=True)
            with contextlib.suppress(OSError):  # another run may be in one of them by now
                for parent in self.new_parents:
                    parent.rmdir()

    def begin(self, cfg: RunConfig) -> None:
        """Write the config of a new run, and remove what one without a checkpoint has left.

        ``TrainingStateError`` if what is there may be more than that: nothing is changed then.
        """
        logs = [file for file in (self.metrics, *self.path.glob("events.out.tfevents.*")) if os.path.lexists(file)]
        is_run = (self.path / CONFIG_FILE).exists()
        if logs and not is_run:
            raise TrainingStateError(
                f"{self.path} holds {logs[0].name} of something else, as there is no {CONFIG_FILE}: choose another "
                "--trainer.run_dir, or move the file away"
            )
        self._check_not_begun()
        if is_run:
            _LOG.warning("%s holds a run without a checkpoint: the run begins anew", self.path)
        self.configure(cfg)
        for old in (*logs, self.path / RECORD_FILE):
            old.unlink(missing_ok=True)
        self._forget_unfinished()

    def _check_not_begun(self) -> None:
        """Raise ``TrainingStateError`` if there must be checkpoints that cannot be seen: they come before the log."""
        if os.path.lexists(self.checkpoints) and not os.path.isdir(self.checkpoints):
            kind = "a link to what is not there" if self.checkpoints.is_symlink() else "no folder"
            raise TrainingStateError(
                f"{self.checkpoints} is {kind}: mount or restore the folder to continue the run, or choose another "
                "--trainer.run_dir to begin one"
            )
        first = re.compile(r"\.step_0+\.[0-9]+\.partial")  # it was killed while it saved the first one
        if any(first.fullmatch(path.name) for path in self.checkpoints.glob(".step_*.partial")):
            return
        if self.metrics.is_file() and _has_line(self.metrics):
            raise TrainingStateError(
                f"{self.path} holds the log of a run, {self.metrics.name}, but {CHECKPOINTS} has no checkpoint of it. "
                "Mount or restore that folder to continue the run; to begin anew, choose another --trainer.run_dir or "
                f"move {self.metrics.name} away"
            )

    def configure(self, cfg: RunConfig) -> None:
        """Write the config into the folder, and keep as many checkpoints as it says."""
        self.keep = cfg.trainer.keep_checkpoints
        save_config(cfg, self.path / CONFIG_FILE)

    def save(self, step: int, state: Mapping[str, Any], best: bool = False) -> Path:
        """Write a checkpoint, let ``latest`` (and ``best``) point at it, and remove those that nothing points at."""
        saved = save_checkpoint(self.checkpoints / f"step_{step:012d}", state)
        for name in (LATEST, BEST) if best else (LATEST,):
            self._link(name, saved)
        kept = os.path.realpath(self.checkpoints / BEST)
        for old in list_checkpoints(self.checkpoints)[: -self.keep]:
            if os.path.realpath(old) != kept:
                _remove(old)
        return saved

    def load_latest(self) -> tuple[Path, dict[str, Any]] | None:
        """Return the newest intact checkpoint and its content; ``None`` if there is none at all.

        Later ones that are damaged make way for those that are made again, but are kept under another name.
        """
        damaged: dict[Path, CheckpointError] = {}
        for checkpoint in reversed(list_checkpoints(self.checkpoints, damaged=True)):
            try:
                state = load_checkpoint(checkpoint)
            except (CheckpointVersionError, CheckpointUnreadableError):
                raise
            except CheckpointError as error:
                damaged[checkpoint] = error
                continue
            for path, problem in damaged.items():
                _LOG.warning("%s; it is kept as %s, and the run continues from %s", problem, _put_by(path), checkpoint)
            return checkpoint, state
        if damaged:
            problems = "; ".join(map(str, damaged.values()))
            raise CheckpointError(
                f"none of the {len(damaged)} checkpoints of {self.path} can be read: {problems}. To begin "
                f"anew, choose another --trainer.run_dir, or move {CHECKPOINTS} and {self.metrics.name} away"
            )
        return None

    def forget_after(self, step: int) -> None:
        """Remove what an interrupted run left unfinished, and checkpoints of steps that are about to be made again."""
        self.lock.acquire()
        restore_former(self.checkpoints)
        self._forget_unfinished()
        for checkpoint in list_checkpoints(self.checkpoints):
            if checkpoint_step(checkpoint) > step:
                _remove(checkpoint)
            elif checkpoint_step(checkpoint) == step:
                self._link(LATEST, checkpoint)

    def _forget_unfinished(self) -> None:
        for unfinished in self.checkpoints.glob(".*"):
            if _UNFINISHED.fullmatch(unfinished.name):
                _remove(unfinished)
        for name in (CONFIG_FILE, self.metrics.name, RECORD_FILE):
            for unfinished in self.path.glob(f".{name}.*"):
                unfinished.unlink(missing_ok=True)

    def _link(self, name: str, checkpoint: Path) -> None:
        """Let a link point at a checkpoint; at any time it points at the old one or the new one."""
        fresh, link = self.checkpoints / f".{name}.{os.getpid()}", self.checkpoints / name
        with writing(link):
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(checkpoint.name)
            if link.is_dir() and not link.is_symlink():  # a copy that was made without links
                shutil.rmtree(link)
            fresh.replace(link)


def _has_line(file: Path) -> bool:
    with file.open("rb") as lines:
        return lines.readline().endswith(b"\n")


def _is_new(path: Path) -> bool:
    """Make a folder; tell whether nobody was quicker."""
    with writing(path):
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            return False
    return True


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint (or the link to it) that nobody needs; one that cannot be removed ends no training."""
    if checkpoint.is_symlink():
        with contextlib.suppress(OSError):
            checkpoint.unlink()
    else:
        shutil.rmtree(checkpoint, ignore_errors=True)
    if os.path.lexists(checkpoint):
        _LOG.warning("%s is not needed any more, but cannot be removed", checkpoint)


def _put_by(checkpoint: Path) -> Path:
    """Give a damaged checkpoint a name that is not taken; return it."""
    number, kept = 1, checkpoint.with_name(f"damaged_{checkpoint.name.lstrip('.')}")
    while os.path.lexists(kept):
        number += 1
        kept = checkpoint.with_name(f"damaged_{checkpoint.name.lstrip('.')}-{number}")
    with writing(kept):
        checkpoint.rename(kept)
    return kept


@contextmanager
def locked_run(given: str | os.PathLike[str], ranks: Ranks) -> Iterator[RunFolder]:
    """Keep other processes out of the folder of a run that is to be continued; ``given`` may be a checkpoint of it."""
    path = Path(given)
    with ranks.together("locking the folder of the run"):
        if ranks.is_first:
            path = _run_of(path)
            folder = RunFolder(path)
            folder.lock.acquire()
            restore_former(folder.checkpoints)
    path = Path(ranks.from_first(str(path)))
    folder = folder if ranks.is_first else RunFolder(path)
    try:
        yield folder
    finally:
        folder.lock.release()


def _run_of(path: Path) -> Path:
    """Return the folder of a run, given that or the folder of one of its checkpoints."""
    if os.path.isdir(path / CHECKPOINTS) or os.path.isfile(path / CONFIG_FILE):
        return path
    for place in (path, Path(os.path.realpath(path))) if "\0" not in str(path) else ():
        if place.parent.name == CHECKPOINTS and os.path.isdir(place.parent):
            return place.parent.parent
    if is_checkpoint(path):
        raise TrainingStateError(f"{path} is not in the folder of a run, which is needed to continue it")
    shown = str(path) if str(path).isprintable() else ascii(str(path))
    raise CheckpointError(f"{shown}: expected a checkpoint or a run with a checkpoint in it, found neither")


def open_folder(cfg: RunConfig, folder: RunFolder | None, ranks: Ranks, anew: bool = False) -> RunFolder:
    """Return the folder of a run, which the first rank makes; the others may be on machines that do not have it.

    ``anew`` begins the run again in a folder that is given.
    """
    made = ""
    with ranks.together("making the folder of the run"):
        if ranks.is_first:
            if folder is None:
                folder = RunFolder.create(cfg)
            elif anew:
                folder.begin(cfg)
            else:
                folder.configure(cfg)
            made = str(folder.path)
    made = ranks.from_first(made)
    return folder if ranks.is_first and folder is not None else RunFolder(Path(made), cfg.trainer.keep_checkpoints)


def run_to_continue(trainer: RunSettings, ranks: Ranks) -> Path | None:
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


def read_saved(
    run: str | os.PathLike[str], folder: RunFolder, command: str
) -> tuple[str, dict[str, Any], dict[str, Any] | None]:
    """Return where the config of a run to continue was read, that config, and the checkpoint, if there is one.

    ``run`` is the run's folder or one of its checkpoints. ``CheckpointError`` if another command began it.
    """
    is_named = folder.path != Path(run)
    found = (Path(run), load_checkpoint(run)) if is_named else folder.load_latest()
    file = folder.path / CONFIG_FILE
    saved: tuple[str, dict[str, Any], dict[str, Any] | None]
    if found is not None:
        check_parts(found[1], found[0], "config", "trainer", "policy", "algorithm")
        saved = str(found[0]), found[1]["config"], found[1]
    elif file.is_file():
        saved = str(file), load_config(file), None
    else:
        raise CheckpointError(
            f"{folder.path} holds neither a checkpoint nor {CONFIG_FILE}: begin the run with embodichain {command} "
            f"CONFIG --trainer.run_dir {folder.path}"
        )
    if (other := command_of(saved[1])) != command:
        command_line = resume_command(folder.path, (), other)
        raise CheckpointError(f"{saved[0]} is of a run of embodichain {other}: continue it with {command_line}")
    return saved


@contextmanager
def telling_how_to_continue(
    folder: RunFolder, trusted_modules: Collection[str] = (), ranks: Ranks | None = None, command: str = "train"
) -> Iterator[None]:
    """Add to an error that ends a run the command that continues it; one that has learned nothing leaves no folder."""
    former = RunRecord.read(folder.path)
    try:
        yield
    except BaseException as error:
        is_first = ranks is None or ranks.is_first
        if is_first and RunRecord.read(folder.path) != former:  # or else it was not continued: it is what it was
            RunRecord.end(folder.path, "interrupted" if isinstance(error, KeyboardInterrupt) else "failed", error)
        if is_first:
            folder.discard()
        continues = isinstance(error, EmbodiChainError | KeyboardInterrupt) and not isinstance(error, ConfigError)
        if continues and "--resume" not in str(error):  # a wrong config stays wrong
            with contextlib.suppress(EmbodiChainError):
                find_checkpoint(folder.path)
                trusted = trusted_modules or ([] if former is None else former.trusted_modules)
                error.add_note(f"continue with: {resume_command(folder.path, trusted, command)}")
        raise


def resume_command(run: Path, trusted_modules: Collection[str] = (), command: str = "train") -> str:
    """Return the command that continues a run as it was started; several machines have more options."""
    launcher = ""
    if is_launched():
        several = int(os.environ["WORLD_SIZE"]) > local_count()
        launcher = f"torchrun {'...' if several else f'--nproc-per-node={local_count()}'} -m "
    here = f"{Path.cwd()}{os.sep}"
    trust = "".join(f" --trust {shlex.quote(module.removeprefix(here))}" for module in trusted_modules)
    return f"{launcher}embodichain {command} --resume {run}{trust}"


class RunLog:
    """Writes scalars to TensorBoard, to a file with one JSON object per line, and to Weights & Biases if asked to."""

    def __init__(self, run: RunFolder, cfg: RunConfig, resumed_at: int | None = None, evaluated: bool = True) -> None:
        """Continue the log at step ``resumed_at``; ``evaluated`` tells whether the evaluation there is over."""
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        if resumed_at is not None:
            _cut(run.metrics, resumed_at, evaluated)
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


def _cut(file: Path, step: int, evaluated: bool) -> None:
    """Drop lines that are logged again: those of later steps, and of an evaluation that was not saved."""
    try:
        kept = [line for line in read_metrics(file) if line["step"] <= step]
        kept = [line for line in kept if evaluated or line["step"] < step or "eval/return" not in line]
    except (ValueError, KeyError, TypeError) as error:
        raise TrainingStateError(f"{file} is damaged: {error!r}. Move it away to resume without it.") from None
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    partial.write_text("".join(f"{json.dumps(line)}\n" for line in kept), encoding="utf-8")
    partial.replace(file)


def _start_wandb(run: RunFolder, cfg: RunConfig) -> Any:
    """Open the run at Weights & Biases, the same one when resumed."""
    wandb = require("wandb", extra="track")
    file = run.path / WANDB_FILE
    run_id = file.read_text().strip() if file.exists() else wandb.util.generate_id()
    file.write_text(f"{run_id}\n")
    names = {"project": cfg.trainer.wandb_project, "name": run.path.name, "id": run_id}
    return wandb.init(**names, resume="allow", dir=str(run.path), config=cfg.to_dict())


class StopSignals:
    """While active, the first Ctrl-C (or signal of a scheduler) asks the loop to stop; another Ctrl-C interrupts it.

    Schedulers and launchers may send their signals more than once, and different ones: only the first counts. SIGHUP
    and SIGUSR1 stay with a program that handles or ignores them itself.
    """

    def __init__(self, aloud: bool = True) -> None:
        """``aloud`` prints at once that a signal has come."""
        self._aloud = aloud
        self.received: int | None = None
        """Number of the signal that asked to stop."""
        self._former: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python handles signals nowhere else
            for number in _STOP_SIGNALS:
                former = signal.getsignal(number)
                if former is signal.SIG_DFL or (number in _ALWAYS_TAKEN and former is not None):
                    self._former[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former.clear()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self.received = number
        if self._aloud:  # by no stream or lock, as the signal may interrupt a write to one
            with contextlib.suppress(OSError):
                clear = "\r\x1b[2K" if os.isatty(_STDERR) else ""
                os.write(_STDERR, f"{clear}stopping after this iteration; Ctrl-C stops at once\n".encode())
