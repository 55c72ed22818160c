"""What surrounds the training loop of a run: its folder, its logs, the progress that is shown, signals that stop it.

The folder of a run::

    train_config.json           the resolved config: it starts the same run again
    metrics.jsonl               every logged scalar, one line per iteration or evaluation
    events.out.tfevents...      the same for TensorBoard
    checkpoints/step_.../       the latest checkpoints; the links ``latest`` and ``best`` name two of them
    videos/step_....mp4         one episode of each evaluation
    failure/                    batch, policy and simulation at the first NaN (of other ranks: failure_rank_...)
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shutil
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from embodichain.agents.rl.checkpoint import (
    BEST,
    CHECKPOINTS,
    checkpoint_step,
    list_checkpoints,
    restore_former,
    save_checkpoint,
)
from embodichain.agents.rl.config import TrainCfg, TrainerCfg
from embodichain.agents.rl.utils.distributed import Ranks, is_launched, is_torchrun, local_count
from embodichain.config import save_config
from embodichain.errors import ConfigError, OutputError, RankError, TrainingStateError
from embodichain.extras import require

CONFIG_FILE = "train_config.json"
LATEST = "latest"
WANDB_FILE = "wandb_run.txt"
_LINE_SECONDS = 10.0
_SPEED_WINDOW = 20
_STDERR = 2
_LOG = logging.getLogger(__name__)


class RunFolder:
    """Where a run's files are, and which checkpoints stay."""

    def __init__(self, path: Path, keep: int = 2) -> None:
        self.path = path
        self.keep = keep
        self.checkpoints = path / CHECKPOINTS
        self.metrics = path / "metrics.jsonl"

    @classmethod
    def create(cls, cfg: TrainCfg) -> RunFolder:
        """Make the folder of a new run; ``TrainingStateError`` if there is a checkpoint in it already."""
        name, number = f"{cfg.trainer.exp_name}_{time.strftime('%Y%m%d-%H%M%S')}", 1
        path = Path(cfg.trainer.run_dir or Path(cfg.trainer.output_dir) / name)
        while cfg.trainer.run_dir is None and path.exists():  # a run of this name was started in the same second
            number += 1
            path = path.with_name(f"{name}-{number}")
        if list_checkpoints(path / CHECKPOINTS):
            raise TrainingStateError(
                f"{path} holds a run already: continue it with --resume {path}, or choose another --trainer.run_dir"
            )
        if (path / CONFIG_FILE).exists():
            _LOG.warning("%s holds a run without a checkpoint: the run begins anew", path)
        folder = cls.open(path, cfg)
        for old in (folder.metrics, *path.glob("events.out.tfevents.*")):
            old.unlink(missing_ok=True)
        return folder

    @classmethod
    def open(cls, path: Path, cfg: TrainCfg) -> RunFolder:
        """Use a folder and write the config into it."""
        try:
            save_config(cfg, path / CONFIG_FILE)
        except OSError as error:
            raise OutputError(f"cannot write to the folder {path}: {error.strerror}. Choose another one.") from error
        return cls(path, cfg.trainer.keep_checkpoints)

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
                shutil.rmtree(old)
        return saved

    def forget_after(self, step: int) -> None:
        """Remove what an interrupted run left unfinished, and checkpoints of steps that are about to be made again."""
        restore_former(self.checkpoints)
        for partial in self.checkpoints.glob(".step_*"):
            shutil.rmtree(partial, ignore_errors=True)
        for checkpoint in list_checkpoints(self.checkpoints):
            if checkpoint_step(checkpoint) > step:
                shutil.rmtree(checkpoint)


def open_folder(cfg: TrainCfg, run: Path | None, ranks: Ranks) -> RunFolder:
    """Return the folder of a run, which the first rank makes; the others may be on machines that do not have it."""
    made = ""
    with ranks.together("making the folder of the run"):
        if ranks.is_first:
            folder = RunFolder.create(cfg) if run is None else RunFolder.open(run, cfg)
            made = str(folder.path)
    return RunFolder(Path(ranks.from_first(made)), cfg.trainer.keep_checkpoints)


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


class ProgressView:
    """Shows return, success, steps per second and the time left: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, name: str, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._name = name
        self._marks: deque[tuple[float, int, float]] = deque(maxlen=_SPEED_WINDOW)  # time, step, share done
        self._last_line = 0.0
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            columns = TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[text]}")
            self._bar = Progress(*columns, console=self.console, transient=True)
            self._task = self._bar.add_task(self._name, total=1.0, text="")
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, step: int, done: float, mean_return: float | None, success: float | None) -> None:
        """Show the environment steps so far, the share that is done, and the results of recent episodes if known."""
        self._marks.append((time.monotonic(), step, done))
        parts = [f"{_short(step)} steps"]
        parts += [] if mean_return is None else [f"return {mean_return:.2f}"]
        parts += [] if success is None else [f"success {success:.0%}"]
        text = " | ".join([*parts, *self._speed()])
        if self._bar is not None:
            self._bar.update(self._task, completed=done, text=text)
        elif time.monotonic() - self._last_line > _LINE_SECONDS:
            self._last_line = time.monotonic()
            self.print(f"{self._name}: {text}")

    def print(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _speed(self) -> Iterator[str]:
        """Yield steps per second and the time left, over the last iterations."""
        (begin, first, share), (end, last, done) = self._marks[0], self._marks[-1]
        if end > begin:
            yield f"{_short(round((last - first) / (end - begin)))} steps/s"
            if done > share:
                yield f"{_clock((1.0 - done) * (end - begin) / (done - share))} left"


def _short(number: int) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return str(number)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


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
