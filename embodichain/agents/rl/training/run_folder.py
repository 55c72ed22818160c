"""The folder of one run.

::

    train_config.json           the resolved config: it starts the same run again
    run_id                      what no other run is called; workers that stay in a cluster are found again by it
    metrics.jsonl               every logged scalar, one line per iteration or evaluation
    events.out.tfevents...      the same for TensorBoard
    checkpoints/step_.../       the latest checkpoints; the links ``latest`` and ``best`` name two of them
    videos/step_....mp4         one episode of each evaluation
    failure/                    batch, policy and simulation at the first NaN (of other ranks: failure_rank_...)
"""

from __future__ import annotations

import os
import re
import shutil
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embodichain.agents.rl.collector.ray_names import name_of_rank
from embodichain.agents.rl.training.config import TrainCfg
from embodichain.agents.rl.utils.checkpoint import BEST, CHECKPOINTS, list_checkpoints, save_checkpoint
from embodichain.config import save_config
from embodichain.errors import OutputError, TrainingStateError

CONFIG_FILE = "train_config.json"
ID_FILE = "run_id"
LATEST = "latest"


class RunFolder:
    """Where a run's files are, and which checkpoints stay."""

    def __init__(self, path: Path, keep: int = 2, run_id: str = "") -> None:
        self.path = path
        self.run_id = run_id
        self.keep = keep
        self.checkpoints = path / CHECKPOINTS
        self.metrics = path / "metrics.jsonl"
        self.videos = path / "videos"
        self.failure = path / "failure"

    @classmethod
    def create(cls, cfg: TrainCfg) -> RunFolder:
        """Make the folder of a new run; ``TrainingStateError`` if there is a run in it already."""
        trainer = cfg.trainer
        if trainer.run_dir is not None:
            path = Path(trainer.run_dir)
        else:
            path = _unused(Path(trainer.output_dir) / f"{trainer.exp_name}_{time.strftime('%Y%m%d-%H%M%S')}")
        if (path / CONFIG_FILE).exists():
            raise TrainingStateError(
                f"{path} holds a run already: continue it with --resume {path}, or choose another --trainer.run_dir"
            )
        return cls.open(path, cfg)

    @classmethod
    def open(cls, path: Path, cfg: TrainCfg) -> RunFolder:
        """Use a folder and write the config into it."""
        try:
            save_config(cfg, path / CONFIG_FILE)
            run_id = _run_id(path / ID_FILE)
        except OSError as error:
            raise OutputError(
                f"cannot write to the run's folder {path}: {error.strerror}. Choose another one."
            ) from error
        return cls(path, cfg.trainer.keep_checkpoints, run_id)

    @classmethod
    def begin_anew(cls, path: Path, cfg: TrainCfg) -> RunFolder:
        """Use the folder of a run that ended before its first checkpoint; what it logged will be logged again."""
        folder = cls.open(path, cfg)
        for old in (folder.metrics, *path.glob("events.out.tfevents.*")):
            old.unlink(missing_ok=True)
        return folder

    def name_of(self, rank: int, ranks: int) -> str:
        """Return what the workers of a rank are called in a cluster: like the folder, but as no other run's."""
        name = re.sub(r"[^\w.+-]", "_", f"{self.path.resolve().name}-{self.run_id}")
        return name_of_rank(name, rank, ranks)

    def save(self, step: int, state: Mapping[str, Any], best: bool = False) -> Path:
        """Write a checkpoint, let ``latest`` (and ``best``) point at it, and remove those that nothing points at."""
        saved = save_checkpoint(self.checkpoints / f"step_{step:012d}", state)
        self._point(LATEST, saved)
        if best:
            self._point(BEST, saved)
        self._prune()
        return saved

    def forget_after(self, step: int) -> None:
        """Remove what an interrupted run left unfinished, and checkpoints of steps that are about to be made again."""
        for partial in self.checkpoints.glob(".step_*"):
            shutil.rmtree(partial, ignore_errors=True)
        for checkpoint in list_checkpoints(self.checkpoints):
            if int(checkpoint.name.removeprefix("step_")) > step:
                shutil.rmtree(checkpoint)

    def failure_of(self, rank: int) -> Path:
        """Return where a rank leaves what it met at the first NaN."""
        return self.failure if rank == 0 else self.path / f"failure_rank_{rank}"

    def video(self, step: int) -> Path:
        """Return the path of the video of an evaluation."""
        return self.videos / f"step_{step:012d}.mp4"

    def _point(self, name: str, checkpoint: Path) -> None:
        """Let a link point at a checkpoint; at every moment it points at the old one or at the new one."""
        fresh = self.checkpoints / f".{name}.{os.getpid()}"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(checkpoint.name)
        os.replace(fresh, self.checkpoints / name)

    def _prune(self) -> None:
        best = self.checkpoints / BEST
        kept = best.resolve() if best.exists() else None
        for old in list_checkpoints(self.checkpoints)[: -self.keep]:
            if old.resolve() != kept:
                shutil.rmtree(old)


def _run_id(file: Path) -> str:
    """Return what a run is called since it was created: a folder's path may be that of another run elsewhere."""
    if not file.exists():
        file.write_text(uuid.uuid4().hex[:12])
    return file.read_text().strip()


def _unused(path: Path) -> Path:
    """Return the path, with a number if somebody started a run of this name in the same second."""
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate
