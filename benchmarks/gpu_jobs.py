"""What ``gpu_all`` measures: commands, about how long they take, what they need, and how to find out what is done.

The order is that of importance, except that what needs all cores comes first, before anything is under way. Times are
those of an H200 with 16 cores, from earlier runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.processes import ROOT

ALL = 0
"""Cores of a measurement that nothing may run beside."""
FIRST = ("lift_bar", "hand_over", "place_in_bin", "place_in_bin_language")
"""Tasks of which it is not known yet whether they are learned in time."""
FIRST_AT_ONCE, OTHERS_AT_ONCE = 3, 4
"""Runs at a time: those that need most of their time get a greater part of the GPU."""
SHORT = ("press_button", "close_drawer", "insert_peg", "press_button_language", "open_drawer", "open_drawer_language")
"""Tasks that are learned within half a minute: in the order in which the others are tried, they come first."""
SEEDS = (0, 1, 2)
FLOW_ROLLOUTS, PARITY_ROLLOUTS = 50, 75


@dataclass(frozen=True)
class Job:
    """One measurement."""

    name: str
    group: str
    words: tuple[str, ...]
    """What follows ``python``; ``{work}`` is the folder of results, ``{seconds}`` how long it may take."""
    seconds: float
    """About how long it takes."""
    cores: int = 1
    gpu: Literal["", "shared", "alone"] = ""
    mps: bool = False
    """Whether it reaches the GPU through MPS."""
    least: float = 0.0
    """Seconds in which it gets something done, if it can go on later; 0: most of its time."""
    left: Callable[[Path], int] | None = None
    """Counts what is missing in a folder of results, one file of which belongs to its group; ``None``: it is done once
    the command has ended."""

    @property
    def limit(self) -> float:
        """Seconds after which it is killed."""
        return 3.0 * self.seconds + 30.0

    @property
    def needed(self) -> float:
        """Seconds that have to be left when it begins."""
        return self.least or 0.8 * self.seconds


def worlds_left(tasks: Sequence[str], jobs: int, seeds: Sequence[int] = SEEDS) -> Callable[[Path], int]:
    """Count the runs of tasks that are not over, with the settings of today and ``jobs`` runs at a time."""

    def count(work: Path) -> int:
        from benchmarks.worlds_report import Run, WorldResults, settings_digest

        results = WorldResults.read(work / "worlds.json")
        runs = [Run(task, "cuda", seed, settings_digest(task, "cuda"), jobs, 0.0) for task in tasks for seed in seeds]
        return sum(not results.is_over(run) for run in runs)

    return count


def learn_left(work: Path) -> int:
    """Count the runs of ours that are not finished."""
    runs = _read(work / "learn.json").get("runs", [])
    finished = {(run["task"], run["seed"]) for run in runs if run["finished"] and run["framework"] == "embodichain"}
    return sum((task, seed) not in finished for task in ("walker2d", "ant") for seed in range(5))


def heads_left(work: Path) -> int:
    """Count the runs that are missing."""
    from benchmarks.heads_runs import PARTS

    made = {
        (run["name"], run["seed"]) for run in _read(work / "heads.json").get("runs", []) if run["part"] == "reinforce"
    }
    return sum((name, seed) not in made for name in PARTS["reinforce"] for seed in SEEDS)


def flow_left(work: Path) -> int:
    """Count the seeds that are missing."""
    from benchmarks.flow_vla import finished_seeds

    return max(0, len(SEEDS) - finished_seeds(_read(work / "flow_vla.json").get("rate", {}), FLOW_ROLLOUTS))


def parity_left(work: Path) -> int:
    """Count the runs that are missing."""
    from benchmarks.flow_vla_parity import VARIANTS, Parity, plan

    parity = Parity(_read(work / "flow_vla.json").get("parity", {}), PARITY_ROLLOUTS)
    return len(parity.missing(plan(list(VARIANTS), len(SEEDS))))


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.exists() else {}


def all_jobs() -> Iterator[Job]:
    """Give all measurements, in the order in which they begin."""
    from embodichain.envs import MUJOCO_SUITE
    from embodichain.envs.registration import list_envs

    alone: dict[str, Any] = {"cores": 4, "gpu": "alone"}
    shared: dict[str, Any] = {"gpu": "shared", "mps": True}
    out, seeds = ("--output", "{work}"), tuple(map(str, SEEDS))
    cameras = ("-m", "benchmarks.gpu_cameras", "--no-profile", "--out", "{work}/gpu_cameras.json", "--only")
    envs = ("-m", "benchmarks.gpu", "--only", "env", "--ids", "Ant-v5", "QuadrupedVelocityRL")
    suite = ("-m", "benchmarks.sim", "--tasks", "--no-frames", "--rounds", "5", "--window", "0.5", "--patience", "5")
    worlds = ("-m", "benchmarks.worlds", "--device", "cuda", "--budget", "{seconds}", *out)
    tasks = ("--tasks", "walker2d", "ant", "--frameworks", "embodichain")
    learn = ("-m", "benchmarks.learn", *tasks, "--jobs", "8", "--time-limit", "{seconds}", *out)
    flow = ("-m", "benchmarks.flow_vla", "--seeds", str(len(SEEDS)), "--start", "{work}/flow_vla", *out)
    rate = (*flow, "--parts", "rate", "--rollouts", str(FLOW_ROLLOUTS))
    parity = (*flow, "--parts", "parity", "--rollouts", str(PARITY_ROLLOUTS), "--jobs", "2", "--budget", "{seconds}")
    yield Job("cameras, rates", "cameras", (*cameras, "env", "train"), 100, **alone)
    yield Job("cameras, seed 0", "cameras", (*cameras, "learn", "--seeds", "0"), 90, **alone)
    yield Job("envs beside mujoco_warp", "envs", (*envs, "--out", "{work}/gpu_envs.json"), 70, **alone)
    yield Job("suite on the CPU", "sim", (*suite, "--output", "{work}/sim.json"), 190, cores=6)
    yield Job("flow VLA", "flow", rate, 460, 8, **shared, least=240, left=flow_left)
    first_worlds = (*worlds, "--jobs", str(FIRST_AT_ONCE), "--tasks", *FIRST, "--seeds")
    left = worlds_left(FIRST, FIRST_AT_ONCE, (0,))
    yield Job("worlds, not known yet", "worlds", (*first_worlds, "0"), 300, 4, **shared, least=200, left=left)
    for name in sorted(path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py")):
        yield Job(f"tests/gpu/{name}", "tests", ("-m", "pytest", "-q", f"tests/gpu/{name}"), 60, 3, gpu="shared")
    for spec in sorted(list_envs(), key=lambda spec: spec.id in MUJOCO_SUITE):
        check = ("-m", "embodichain", "envs", "check", spec.id, "--device", "cuda")
        yield Job(f"check {spec.id}", "checks", check, 40, 3, **shared)
    others = _other_worlds()
    more = (*worlds, "--jobs", str(OTHERS_AT_ONCE), "--seeds", *seeds, "--tasks", *others)
    left = worlds_left(others, OTHERS_AT_ONCE)
    yield Job("worlds, more seeds", "worlds", more, 520, 5, **shared, least=60, left=left)
    left = worlds_left(FIRST, FIRST_AT_ONCE)
    yield Job("worlds, the first again", "worlds", (*first_worlds, *seeds), 520, 4, **shared, least=200, left=left)
    yield Job("cameras, seeds 1 and 2", "cameras", (*cameras, "learn", "--seeds", "1", "2"), 170, 2, gpu="alone")
    yield Job("walker2d and ant", "learn", learn, 900, 8, least=60, left=learn_left)
    heads = ("-m", "benchmarks.heads", "--parts", "reinforce", "--jobs", "8", *out)
    yield Job("heads, reinforced", "heads", heads, 900, 8, least=300, left=heads_left)
    yield Job("flow VLA, parity", "flow", parity, 560, 16, **shared, least=300, left=parity_left)


def _other_worlds() -> tuple[str, ...]:
    """Return the tasks with a config for a GPU that are not among the first, the short ones before the others."""
    from benchmarks.worlds_report import claims

    others = [name for name in claims("cuda") if name not in (*FIRST, *SHORT)]
    return (*SHORT, *others)
