"""Where scalars go: TensorBoard, a file with one JSON object per line, and Weights & Biases if wanted."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from embodichain.agents.rl.training.config import TrainCfg
from embodichain.agents.rl.training.run_folder import RunFolder
from embodichain.errors import OutputError, TrainingStateError
from embodichain.extras import require

WANDB_FILE = "wandb_run.txt"


class RunLog:
    """Writes scalars under the step they belong to; a resumed run goes on behind the step it was saved at."""

    def __init__(self, run: RunFolder, cfg: TrainCfg, resumed_at: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a moment to import

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
        """Have everything on the disk that was written so far, as it must be before a checkpoint is."""
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
        """Turn what the disk says into an error that tells what to do."""
        try:
            yield
        except OSError as error:
            raise OutputError(
                f"cannot write to {self._file}: {error.strerror or error}. Once that is mended, the run can go on from "
                f"its latest checkpoint: --resume {self._file.parent}"
            ) from error


class SilentLog(RunLog):
    """Writes nothing: all ranks know the same numbers, and the first one logs them."""

    def __init__(self) -> None:
        """Open nothing."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Do nothing."""

    def video(self, step: int, file: Path) -> None:
        """Do nothing."""

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a ``metrics.jsonl``; a last one that was cut short is left out."""
    return [json.loads(line) for line in _whole_lines(file)]


def _whole_lines(file: Path) -> Iterator[str]:
    if not file.exists():
        return
    lines = file.read_text(encoding="utf-8").split("\n")
    yield from (line for line in lines[:-1] if line)  # what follows the last line break was not finished


def _cut(file: Path, step: int) -> None:
    """Drop lines of later steps: they are about to be made again."""
    try:
        kept = [line for line in _whole_lines(file) if json.loads(line)["step"] <= step]
    except (ValueError, KeyError, TypeError) as error:
        raise TrainingStateError(f"{file} is damaged: {error!r}. Move it away to resume without it.") from None
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    partial.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    partial.replace(file)


def _start_wandb(run: RunFolder, cfg: TrainCfg) -> Any:
    """Open the run at Weights & Biases, the same one when resumed."""
    wandb = require("wandb", extra="track")
    note = run.path / WANDB_FILE
    known = note.read_text().strip() if note.exists() else wandb.util.generate_id()
    note.write_text(f"{known}\n")
    return wandb.init(
        project=cfg.trainer.wandb_project,
        name=run.path.name,
        id=known,
        resume="allow",
        dir=str(run.path),
        config=cfg.to_dict(),
    )
