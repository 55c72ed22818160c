"""The folder of a run, its log, and the signals that stop it.

The folder of a run::

    train_config.json           the resolved config, which reproduces the run
    metrics.jsonl               all logged scalars, one line per iteration or evaluation
    run.json                    how the run was started, machine, versions, and how it ended
    events.out.tfevents...      the scalars for TensorBoard
    checkpoints/step_.../       the latest checkpoints; ``latest`` and ``best`` are links to two of them
    videos/step_....mp4         one episode of each evaluation
    failure/                    batch, policy and simulation at the first NaN (of other ranks: failure_rank_...)
    run.lock                    host and process that train in this folder; locked while they do
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
    no_checkpoint,
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
    PolicyContractError,
    RankError,
    TrainingStateError,
    writing,
)
from embodichain.extras import require

LATEST = "latest"
WANDB_FILE = "wandb_run.txt"
_UNFINISHED = re.compile(rf"\.step_[0-9]+\.[0-9]+\.partial|\.({LATEST}|{BEST})\.[0-9]+")
"""Names of unfinished checkpoints and links, left by a killed process."""
_STDERR = 2
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Ctrl-C, and the signals that schedulers send before they end a job, such as Slurm's SIGTERM or ``--signal``."""
_ALWAYS_TAKEN = (signal.SIGINT, signal.SIGTERM)
"""The other signals are only handled if the program neither handles nor ignores them, as ``nohup`` does."""
_LOG = logging.getLogger(__name__)


class RunFolder:
    """The folder of a run: its paths, its lock, and its checkpoints."""

    def __init__(self, path: Path, keep: int = 2) -> None:
        self.path = path
        self.keep = keep
        self.checkpoints = path / CHECKPOINTS
        self.metrics = path / METRICS_FILE
        self.lock = RunLock(path)
        self.is_new = False
        """Whether this process created the folder."""
        self.new_parents: list[Path] = []
        """Parent folders that did not exist before."""
        self.is_named = True
        """Whether the user chose its name."""
        self.origin = RunOrigin()
        """How the run was started."""

    @classmethod
    def create(cls, cfg: RunConfig) -> RunFolder:
        """Create the folder of a new run and lock it; raise ``TrainingStateError`` if it contains a checkpoint."""
        name, number = f"{cfg.trainer.exp_name}_{time.strftime('%Y%m%d-%H%M%S')}", 1
        path = Path(cfg.trainer.run_dir or Path(cfg.trainer.output_dir) / name)
        new_parents = [parent for parent in path.parents if not os.path.lexists(parent)]
        while cfg.trainer.run_dir is None and not _is_new(path):  # another run was started in the same second
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
        """Remove the folder of a run that failed before its first update, if this process created it."""
        steps = [checkpoint_step(checkpoint) for checkpoint in list_checkpoints(self.checkpoints, damaged=True)]
        kept = 0 if self.is_named else 1  # the first checkpoint is determined by config and seed
        is_used = len(steps) >= kept + 1 or any(steps) or (self.metrics.is_file() and _has_line(self.metrics))
        if self.is_new and not is_used and not (self.path / "failure").exists():
            shutil.rmtree(self.path, ignore_errors=True)
            with contextlib.suppress(OSError):  # not empty: another run may use it by now
                for parent in self.new_parents:
                    parent.rmdir()

    def begin(self, cfg: RunConfig) -> None:
        """Write the config of a new run, and remove the files of an earlier run that saved no checkpoint.

        Raises ``TrainingStateError``, without changes, if the folder may contain anything else.
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
        """Raise ``TrainingStateError`` if checkpoints are missing: there is a log, which starts after the first one."""
        if os.path.lexists(self.checkpoints) and not os.path.isdir(self.checkpoints):
            kind = "a link to what is not there" if self.checkpoints.is_symlink() else "no folder"
            raise TrainingStateError(
                f"{self.checkpoints} is {kind}: mount or restore the folder to continue the run, or choose another "
                "--trainer.run_dir to begin one"
            )
        first = re.compile(r"\.step_0+\.[0-9]+\.partial")  # killed while saving the first checkpoint
        if any(first.fullmatch(path.name) for path in self.checkpoints.glob(".step_*.partial")):
            return
        if self.metrics.is_file() and _has_line(self.metrics):
            raise TrainingStateError(
                f"{self.path} holds the log of a run, {self.metrics.name}, but {CHECKPOINTS} has no checkpoint of it. "
                "Mount or restore that folder to continue the run; to begin anew, choose another --trainer.run_dir or "
                f"move {self.metrics.name} away"
            )

    def configure(self, cfg: RunConfig) -> None:
        """Write the config to the folder, and apply its ``keep_checkpoints``."""
        self.keep = cfg.trainer.keep_checkpoints
        save_config(cfg, self.path / CONFIG_FILE)

    def save(self, step: int, state: Mapping[str, Any], best: bool = False) -> Path:
        """Write a checkpoint, link it as ``latest`` (and ``best``), and remove old ones, except the best."""
        saved = save_checkpoint(self.checkpoints / f"step_{step:012d}", state)
        for name in (LATEST, BEST) if best else (LATEST,):
            self._link(name, saved)
        kept = os.path.realpath(self.checkpoints / BEST)
        for old in list_checkpoints(self.checkpoints)[: -self.keep]:
            if os.path.realpath(old) != kept:
                _remove(old)
        return saved

    def load_latest(self) -> tuple[Path, dict[str, Any]] | None:
        """Return the newest intact checkpoint and its content; ``None`` if there is no checkpoint.

        Newer ones that are damaged are renamed, as the run will write them again.
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
                _LOG.warning(
                    "%s; it is kept as %s, and the run continues from %s", problem, _rename_damaged(path), checkpoint
                )
            return checkpoint, state
        if damaged:
            problems = "; ".join(map(str, damaged.values()))
            raise CheckpointError(
                f"none of the {len(damaged)} checkpoints of {self.path} can be read: {problems}. To begin "
                f"anew, choose another --trainer.run_dir, or move {CHECKPOINTS} and {self.metrics.name} away"
            )
        return None

    def forget_after(self, step: int) -> None:
        """Remove unfinished files of an interrupted run, and checkpoints after ``step``, which will be repeated."""
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
        """Atomically point a link at a checkpoint."""
        fresh, link = self.checkpoints / f".{name}.{os.getpid()}", self.checkpoints / name
        with writing(link):
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(checkpoint.name)
            if link.is_dir() and not link.is_symlink():  # the run was copied without symbolic links
                shutil.rmtree(link)
            fresh.replace(link)


def _has_line(file: Path) -> bool:
    with file.open("rb") as lines:
        return lines.readline().endswith(b"\n")


def _is_new(path: Path) -> bool:
    """Create a folder; return whether it is new."""
    with writing(path):
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            return False
    return True


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint or the link to it; log a warning if that fails."""
    if checkpoint.is_symlink():
        with contextlib.suppress(OSError):
            checkpoint.unlink()
    else:
        shutil.rmtree(checkpoint, ignore_errors=True)
    if os.path.lexists(checkpoint):
        _LOG.warning("%s is not needed any more, but cannot be removed", checkpoint)


def _rename_damaged(checkpoint: Path) -> Path:
    """Rename a damaged checkpoint to a free name; return its new path."""
    number, kept = 1, checkpoint.with_name(f"damaged_{checkpoint.name.lstrip('.')}")
    while os.path.lexists(kept):
        number += 1
        kept = checkpoint.with_name(f"damaged_{checkpoint.name.lstrip('.')}-{number}")
    with writing(kept):
        checkpoint.rename(kept)
    return kept


@contextmanager
def locked_run(given: str | os.PathLike[str], ranks: Ranks) -> Iterator[RunFolder]:
    """Lock the folder of a run to resume; ``given`` is the folder or one of its checkpoints."""
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
    """Return the folder of a run, given that folder or one of its checkpoints."""
    if os.path.isdir(path / CHECKPOINTS) or os.path.isfile(path / CONFIG_FILE):
        return path
    for candidate in (path, Path(os.path.realpath(path))) if "\0" not in str(path) else ():
        if candidate.parent.name == CHECKPOINTS and os.path.isdir(candidate.parent):
            return candidate.parent.parent
    if is_checkpoint(path):
        raise TrainingStateError(f"{path} is not in the folder of a run, which is needed to continue it")
    raise no_checkpoint(path)


def open_folder(cfg: RunConfig, folder: RunFolder | None, ranks: Ranks, restart: bool = False) -> RunFolder:
    """Return the folder of a run, which the first rank creates; other ranks may be on machines without access to it.

    ``restart`` starts the run in the given folder from its first step again.
    """
    made = ""
    with ranks.together("making the folder of the run"):
        if ranks.is_first:
            if folder is None:
                folder = RunFolder.create(cfg)
            elif restart:
                folder.begin(cfg)
            else:
                folder.configure(cfg)
            made = str(folder.path)
    made = ranks.from_first(made)
    return folder if ranks.is_first and folder is not None else RunFolder(Path(made), cfg.trainer.keep_checkpoints)


def run_to_resume(trainer: RunSettings, ranks: Ranks) -> Path | None:
    """Return ``run_dir`` if torchrun started the ranks and the folder has a checkpoint; ``None`` for a new run.

    The first rank decides. Raises ``RankError`` if only another rank has a checkpoint, because a machine was replaced.
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
    """Return the source of the config of a run to resume, the config, and the checkpoint or ``None``.

    ``run`` is the run's folder or one of its checkpoints. Raises ``CheckpointError`` if another command started it.
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
def recording_failure(
    folder: RunFolder, trusted_modules: Collection[str] = (), ranks: Ranks | None = None, command: str = "train"
) -> Iterator[None]:
    """Record an error that ends a run, and add the command that resumes it; remove the folder of an empty run."""
    former = RunRecord.read(folder.path)
    try:
        yield
    except BaseException as error:
        is_first = ranks is None or ranks.is_first
        if is_first and RunRecord.read(folder.path) != former:  # otherwise the run was not started or resumed
            RunRecord.end(folder.path, "interrupted" if isinstance(error, KeyboardInterrupt) else "failed", error)
        if is_first:
            folder.discard()
        continues = isinstance(error, EmbodiChainError | KeyboardInterrupt)
        # Resuming fixes neither a wrong config nor a wrong policy.
        if continues and not isinstance(error, ConfigError | PolicyContractError) and "--resume" not in str(error):
            with contextlib.suppress(EmbodiChainError):
                find_checkpoint(folder.path)
                trusted = trusted_modules or ([] if former is None else former.trusted_modules)
                error.add_note(f"continue with: {resume_command(folder.path, trusted, command)}")
        raise


def resume_command(run: Path, trusted_modules: Collection[str] = (), command: str = "train") -> str:
    """Return the command that resumes a run, with the launcher it was started with."""
    launcher = ""
    if is_launched():
        several = int(os.environ["WORLD_SIZE"]) > local_count()
        launcher = f"torchrun {'...' if several else f'--nproc-per-node={local_count()}'} -m "
    here = f"{Path.cwd()}{os.sep}"
    trust = "".join(f" --trust {shlex.quote(module.removeprefix(here))}" for module in trusted_modules)
    return f"{launcher}embodichain {command} --resume {run}{trust}"


class RunLog:
    """Logs scalars to TensorBoard, to a JSON lines file, and optionally to Weights & Biases."""

    def __init__(self, run: RunFolder, cfg: RunConfig, resumed_at: int | None = None, evaluated: bool = True) -> None:
        """Open the log, at step ``resumed_at`` if given; ``evaluated``: whether that step is already evaluated."""
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        if resumed_at is not None:
            _remove_repeated_lines(run.metrics, resumed_at, evaluated)
        self._file = run.metrics
        self._lines = run.metrics.open("a", encoding="utf-8")
        purge = None if resumed_at is None else resumed_at + 1
        self._tensorboard = SummaryWriter(str(run.path), purge_step=purge)
        self._wandb = _start_wandb(run, cfg) if cfg.trainer.use_wandb else None

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log scalars by name; NaN and infinity become ``null`` in the JSON lines."""
        finite = {name: value if math.isfinite(value) else None for name, value in scalars.items()}
        with self._writing():
            for name, value in scalars.items():
                self._tensorboard.add_scalar(name, value, step)
            self._lines.write(json.dumps({"step": step, **finite}) + "\n")
            self._lines.flush()
        if self._wandb is not None:
            self._wandb.log(dict(scalars), step=step)

    def video(self, step: int, file: Path) -> None:
        """Log a video to Weights & Biases, if used."""
        if self._wandb is not None:
            wandb = require("wandb", extra="track")
            self._wandb.log({"eval/video": wandb.Video(str(file), format="mp4")}, step=step)

    def flush(self) -> None:
        """Flush everything to the disk, as is required before a checkpoint is saved."""
        with self._writing():
            self._tensorboard.flush()
            self._lines.flush()
            os.fsync(self._lines.fileno())

    def close(self) -> None:
        """Flush and close the log; may be called repeatedly."""
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
        """Turn an ``OSError`` into an ``OutputError`` that says what to do."""
        try:
            yield
        except OSError as error:
            raise OutputError(
                f"cannot write to {self._file}: {error.strerror or error}. Once that is fixed, the run can continue "
                f"from its latest checkpoint: --resume {self._file.parent}"
            ) from error


def _remove_repeated_lines(file: Path, step: int, evaluated: bool) -> None:
    """Remove lines that will be logged again: of later steps, and of an evaluation that was not saved."""
    try:
        kept = [line for line in read_metrics(file) if line["step"] <= step]
        kept = [line for line in kept if evaluated or line["step"] < step or "eval/return" not in line]
    except (ValueError, KeyError, TypeError) as error:
        raise TrainingStateError(f"{file} is damaged: {error!r}. Move it away to resume without it.") from None
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    partial.write_text("".join(f"{json.dumps(line)}\n" for line in kept), encoding="utf-8")
    partial.replace(file)


def _start_wandb(run: RunFolder, cfg: RunConfig) -> Any:
    """Open the run at Weights & Biases; a resumed run continues the same one."""
    wandb = require("wandb", extra="track")
    file = run.path / WANDB_FILE
    run_id = file.read_text().strip() if file.exists() else wandb.util.generate_id()
    file.write_text(f"{run_id}\n")
    names = {"project": cfg.trainer.wandb_project, "name": run.path.name, "id": run_id}
    return wandb.init(**names, resume="allow", dir=str(run.path), config=cfg.to_dict())


class StopSignals:
    """Inside the block, the first Ctrl-C or scheduler signal requests a stop; a second Ctrl-C interrupts at once.

    Schedulers and launchers may send several signals, of which only the first counts. SIGHUP and SIGUSR1 are not
    handled if the program handles or ignores them itself.
    """

    def __init__(self, announce: bool = True) -> None:
        """``announce`` prints a message as soon as a signal arrives."""
        self._announce = announce
        self.received: int | None = None
        """Number of the signal that requested the stop."""
        self._former: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python handles signals in this thread only
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
        if self._announce:  # os.write, as the signal may have interrupted a write to a locked stream
            with contextlib.suppress(OSError):
                clear = "\r\x1b[2K" if os.isatty(_STDERR) else ""
                os.write(_STDERR, f"{clear}stopping after this iteration; Ctrl-C stops at once\n".encode())
