"""What is claimed about learning, and one run of it: a task, a framework and a seed, in a process of its own.

::

    python -m benchmarks.learn_tasks hopper stable_baselines3 0 FOLDER [--steps 100000]

writes its evaluations, one line each, to ``FOLDER/metrics.jsonl`` while it trains.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OURS, PEER = "embodichain", "stable_baselines3"
INTERRUPTED = 75
"""Exit status of a run that was asked to end, and goes on from there when it is started again."""


@dataclass(frozen=True)
class LearningTask:
    """One claim about learning."""

    config: str
    """File under ``configs/agents/rl``."""
    measure: str
    """What is judged, as it is called in ``metrics.jsonl``."""
    minutes: float
    """About how long a run takes on one core; the longest are begun first."""
    goal: float | None = None
    """What every seed has to reach; none where the figures are reported only."""
    seconds: float | None = None
    """How long that may take on two cores."""
    peer: bool = False
    """Whether Stable-Baselines3 is trained beside."""

    @property
    def frameworks(self) -> tuple[str, ...]:
        """Who is trained on it."""
        return (OURS, PEER) if self.peer else (OURS,)

    @property
    def path(self) -> Path:
        """The config's file."""
        return ROOT / "configs" / "agents" / "rl" / self.config


TASKS = {
    "cart_pole": LearningTask("basic/cart_pole/train_config.json", "eval/return", 0.5, goal=475.0, seconds=60.0),
    "reach": LearningTask("reach/train_config.json", "eval/success", 1.0),
    "push_cube": LearningTask("push_cube/train_config.json", "eval/success", 5.0, goal=0.9, seconds=600.0),
    "push_cube_grpo": LearningTask("push_cube/train_config_grpo.json", "eval/success", 6.0, goal=0.8),
    "pick_cube": LearningTask("pick_cube/train_config.json", "eval/success", 20.0),
    "half_cheetah": LearningTask("gymnasium/half_cheetah/train_config.json", "eval/return", 6.0, peer=True),
    "hopper": LearningTask("gymnasium/hopper/train_config.json", "eval/return", 5.0, peer=True),
    "walker2d": LearningTask("gymnasium/walker2d/train_config.json", "eval/return", 6.0, peer=True),
    "ant": LearningTask("gymnasium/ant/train_config.json", "eval/return", 8.0, peer=True),
}


@dataclass(frozen=True)
class Job:
    """One run."""

    task: str
    framework: str
    seed: int

    @property
    def minutes(self) -> float:
        """About how long it takes on one core."""
        return TASKS[self.task].minutes * (1.6 if self.framework == PEER else 1.0)

    def __str__(self) -> str:
        return f"{self.task} {self.framework} seed {self.seed}"


@dataclass(frozen=True)
class Outcome:
    """The evaluations of one run."""

    task: str
    framework: str
    seed: int
    settings: str
    """What it was trained with (see ``settings_of``)."""
    finished: bool
    """Whether it came to its end, or was stopped by a time limit."""
    steps: list[int]
    seconds: list[float]
    values: list[float]
    processor: str
    """What it ran on."""
    cores: int
    """How many cores it had."""
    beside: int
    """How many other runs the machine may have had at the same time."""
    cpu_seconds: float | None = None
    """Processor time of the whole run, which a busy machine does not lengthen as much."""

    @property
    def job(self) -> Job:
        """Whose outcome it is."""
        return Job(self.task, self.framework, self.seed)

    def reached(self, goal: float) -> dict[str, float | int] | None:
        """Return when a value was first reached."""
        for step, second, value in zip(self.steps, self.seconds, self.values, strict=True):
            if value >= goal:
                return {"step": step, "seconds": round(second, 1)}
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return it as data."""
        return asdict(self)


def settings_of(task: str, steps: int | None = None) -> str:
    """Return a digest of a task's config, so that runs with different settings are never mixed.

    What is at its default is left out: a setting that is added later does not make earlier runs others. So is the size
    of actions, which the environment has.
    """
    from embodichain.agents.rl.algo import get_algo_class
    from embodichain.agents.rl.config import load_train_config, override
    from embodichain.envs.env_cfg import GymCfg

    cfg = override(load_train_config(TASKS[task].path), _overrides(steps))
    algorithm = get_algo_class(cfg.algorithm.name).cfg_type.from_dict(cfg.algorithm.cfg)
    parts = {
        "trainer": _changed(cfg.trainer.replace(seed=0, gym_config={})),
        "environment": _changed(GymCfg.from_dict(cfg.trainer.environment | {"seed": 0})),
        "policy": {name: value for name, value in cfg.policy.items() if name != "action_dim"},
        "algorithm": [cfg.algorithm.name, _changed(algorithm)],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def _changed(value: Any) -> Any:
    """Return a config as data, without what is at its default."""
    from embodichain.config import Config

    if isinstance(value, Mapping):
        return {name: _changed(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_changed(entry) for entry in value]
    if not isinstance(value, Config):
        return value
    changed = {}
    for entry in fields(value):
        factory = entry.default_factory
        default = entry.default if factory is MISSING else factory()
        if (given := getattr(value, entry.name)) != default:
            changed[entry.name] = _changed(given)
    return changed


def run_job(job: Job, folder: Path, steps: int | None = None) -> bool:
    """Train, or go on with what was interrupted, and tell whether it is whole; writes ``FOLDER/metrics.jsonl``."""
    task = TASKS[job.task]
    if job.framework == PEER:
        from benchmarks.learn_sb3 import run_peer

        run_peer(task.path, job.seed, steps, folder / "metrics.jsonl", task.measure)
        return True
    from rich.console import Console

    from embodichain.agents.rl.train import resume_training, train_from_config

    console = Console(stderr=True)
    if (folder / "train_config.json").exists():
        return resume_training(folder, console=console).reason != "interrupted"
    words = ["--trainer.seed", str(job.seed), "--trainer.run_dir", str(folder), "--trainer.eval_video", "false"]
    return train_from_config(task.path, [*words, *_overrides(steps)], console=console).reason != "interrupted"


def _overrides(steps: int | None) -> list[str]:
    return [] if steps is None else ["--trainer.total_steps", str(steps)]


def main(argv: Sequence[str] | None = None) -> None:
    """Train once."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("task", choices=list(TASKS))
    parser.add_argument("framework", choices=[OURS, PEER])
    parser.add_argument("seed", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int)
    args = parser.parse_args(argv)
    is_whole = run_job(Job(args.task, args.framework, args.seed), args.folder, args.steps)
    clock = args.folder / "cpu_seconds"
    before = float(clock.read_text()) if clock.exists() else 0.0
    clock.write_text(f"{before + time.process_time():.1f}")
    sys.exit(0 if is_whole else INTERRUPTED)


if __name__ == "__main__":
    main()
