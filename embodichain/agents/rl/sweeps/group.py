"""Several seeds of one config: ``embodichain train CONFIG --seeds 0..4 --jobs 2``.

The folder of a group holds ``group.json``, a run for every seed and what the runs print (``logs``). The same command
continues a group that was interrupted or killed: runs that are finished stay as they are.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from embodichain.agents.rl.arguments import given_origins, given_value
from embodichain.agents.rl.config import TrainCfg, load_train_config, override
from embodichain.agents.rl.run_lock import RunLock
from embodichain.agents.rl.run_records import GROUP_FILE, RunInfo, program_command, read_group
from embodichain.agents.rl.runs import StopSignals
from embodichain.agents.rl.sweeps.jobs import Job, JobHandle, Launcher
from embodichain.agents.rl.utils.distributed import is_launched
from embodichain.config import save_config
from embodichain.envs.physics.mujoco_cpu import available_cores
from embodichain.errors import ConfigError, TrainingStateError
from embodichain.extras import config_folders, locate_trusted
from embodichain.utils.console import MessageConsole, check_counts, shown_messages

BASE_CONFIG = "base_config.json"
LOGS = "logs"
DONE = ("finished", "evaluated")
EXIT_FAILED, EXIT_INTERRUPTED = 1, 130
_RANGE = re.compile(r"(\d+)(?:\.\.(\d+))?")
_MOST_SEEDS = 10_000
_POLL_SECONDS = 0.05
_OWN = ("seed", "run_dir", "output_dir")
"""Fields of the trainer that make no other group."""


def parse_seeds(text: str) -> list[int]:
    """Return the seeds that ``0..4``, ``7`` or ``0..2,10`` stand for."""
    seeds: list[int] = []
    for part in text.replace(" ", "").split(","):
        found = _RANGE.fullmatch(part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if last < first or last - first >= _MOST_SEEDS or last >= 2**31:
            raise ConfigError(f"--seeds: expected seeds such as 0..4 or 0,1,7, got {text!r}", "command line")
        seeds += range(first, last + 1)
    return list(dict.fromkeys(seeds))


@dataclass(frozen=True)
class GroupRequest:
    """What several runs share, as the command line gives it."""

    config: Path
    overrides: tuple[str, ...]
    trusted_modules: tuple[str, ...]
    seeds: tuple[int, ...]
    jobs: int

    @classmethod
    def of(cls, config: Path, overrides: Sequence[str], trust: Sequence[str], seeds: str, jobs: int) -> GroupRequest:
        """Check what can be checked without reading the config."""
        check_counts({"--jobs": jobs})
        if is_launched():
            raise ConfigError("--seeds: start it without torchrun: every run is a process of its own", "command line")
        if given_value(overrides, "trainer.seed")[0] is not None:
            raise ConfigError("--trainer.seed: expected either --seeds or --trainer.seed, got both", "command line")
        located = locate_trusted(trust, config_folders(config))
        return cls(config, tuple(overrides), located, tuple(parse_seeds(seeds)), jobs)

    def load(self, prog: str) -> TrainCfg:
        """Return the config with the flags applied."""
        cfg = load_train_config(self.config, self.trusted_modules, *given_origins(self.overrides))
        return override(cfg, list(self.overrides), prog, self.trusted_modules)


@dataclass
class GroupFolder:
    """Where the runs of a group are."""

    path: Path
    cfg: TrainCfg
    """The config that they share; ``run_dir`` is none of theirs."""
    facts: dict[str, Any] = field(default_factory=dict)
    """The content of ``group.json``."""

    @classmethod
    @contextlib.contextmanager
    def opened(cls, kind: str, cfg: TrainCfg, facts: Mapping[str, Any]) -> Iterator[GroupFolder]:
        """Find the folder of a group that was begun with the same settings, or make one; keep others out of it."""
        digest = _digest([kind, _shared(cfg), facts])
        named = cfg.trainer.run_dir
        path = Path(named) if named is not None else _unfinished(Path(cfg.trainer.output_dir), digest)
        if path is None:
            path = _new_path(Path(cfg.trainer.output_dir), f"{cfg.trainer.exp_name}_{kind}")
        there = read_group(path)
        if there is not None and there.get("digest") != digest:
            raise TrainingStateError(
                f"{path} holds other runs, begun by: {there.get('command') or 'another command'}. Choose another "
                "--trainer.run_dir"
            )
        lock = RunLock(path)
        try:
            lock.acquire()
        except TrainingStateError as error:
            raise TrainingStateError(str(error).partition("; then continue")[0]) from error
        try:
            base = cfg.replace(trainer=cfg.trainer.replace(run_dir=None))
            begun = {"kind": kind, "digest": digest, "command": program_command(), "began": time.time(), "done": False}
            group = cls(path, base, begun | dict(facts) | (there or {}))
            save_config(base, path / BASE_CONFIG)
            group.write()
            yield group
        finally:
            lock.release()

    def write(self, **changes: Any) -> None:
        """Write ``group.json``, with changes."""
        self.facts |= changes
        save_config(self.facts, self.path / GROUP_FILE)

    def job(self, seed: int, request: GroupRequest, slot: int, below: str = "", words: Sequence[str] = ()) -> Job:
        """Return the training of a seed; ``words`` are flags beside it, and ``below`` a folder of their own."""
        name = f"{self.cfg.trainer.exp_name}_seed{seed}"
        run_dir = (self.path / below / name).absolute()
        trainer, threads = self.cfg.trainer, 0
        flags = [*words, "--trainer.seed", str(seed), "--trainer.run_dir", str(run_dir)]
        if request.jobs > 1:
            threads = max(1, available_cores() // request.jobs)
            if not trainer.environment.get("num_threads"):
                flags += ["--trainer.gym_config.num_threads", str(threads)]
        log = self.path.absolute() / LOGS / below / f"{name}.log"
        shown = f"{below}, seed {seed}" if below else f"seed {seed}"
        base = str((self.path / BASE_CONFIG).absolute())
        trusted, gpu = request.trusted_modules, gpu_of(slot, trainer.device)
        return Job(shown, base, tuple(flags), run_dir, log, trusted, threads, gpu)


def gpu_of(slot: int, device: str) -> str | None:
    """Return the GPU for one of the jobs that run at the same time, if a config leaves the choice of several."""
    count = torch.cuda.device_count() if device == "cuda" and torch.cuda.is_available() else 0
    return str(slot % count) if count > 1 else None


def _shared(cfg: TrainCfg) -> dict[str, Any]:
    """Return the settings that runs of a group have in common."""
    data = cfg.to_dict()
    environment = {key: value for key, value in data["trainer"]["gym_config"].items() if key != "seed"}
    trainer = {key: value for key, value in data["trainer"].items() if key not in _OWN}
    return data | {"trainer": trainer | {"gym_config": environment}}


def _digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _unfinished(folder: Path, digest: str) -> Path | None:
    """Return the newest group of these settings that was not finished."""
    groups = [(path.parent, read_group(path.parent) or {}) for path in folder.glob(f"*/{GROUP_FILE}")]
    same = [(group, path) for path, group in groups if group.get("digest") == digest and not group.get("done")]
    return max(same, key=lambda entry: entry[0].get("began", 0.0))[1] if same else None


def _new_path(folder: Path, name: str) -> Path:
    stamped = f"{name}_{time.strftime('%Y%m%d-%H%M%S')}"
    names = (stamped, *(f"{stamped}-{number}" for number in range(2, 1000)))
    return next(folder / one for one in names if not (folder / one).exists())


class Runner:
    """Keeps as many jobs going as may run at the same time, and ends them when a signal asks for it."""

    def __init__(self, jobs: int, launcher: Launcher, console: Console) -> None:
        self.launcher, self.console = launcher, console
        self._slots: dict[int, tuple[Job, JobHandle]] = {}
        self._jobs = jobs
        self.interrupted = False

    @property
    def free(self) -> list[int]:
        """Places for more jobs."""
        return [slot for slot in range(self._jobs) if slot not in self._slots]

    @property
    def active(self) -> list[Job]:
        """Jobs that run."""
        return [job for job, _ in self._slots.values()]

    def start(self, job: Job, slot: int) -> None:
        """Start a job."""
        self._slots[slot] = job, self.launcher.start(job)

    def end(self, job: Job) -> None:
        """End a job whose result is not wanted any more."""
        for slot, (running, handle) in list(self._slots.items()):
            if running == job:
                handle.kill()
                del self._slots[slot]

    def ended(self) -> Iterator[tuple[Job, str | None]]:
        """Yield the jobs that have ended, with what ended them if that was an error."""
        for slot, (job, handle) in list(self._slots.items()):
            if handle.is_over():
                del self._slots[slot]
                yield job, handle.problem

    def loop(self, step: Callable[[], bool]) -> None:
        """Call ``step`` again and again, until it says that all is done; a signal ends the jobs in an orderly way."""
        with StopSignals(aloud=False) as signals, self.console.status("") as status:
            try:
                while signals.received is None and not step():
                    status.update(self._told())
                    time.sleep(_POLL_SECONDS)
                if signals.received is not None:
                    self.interrupted = True
                    self._stop_all()
            finally:
                for _, handle in self._slots.values():
                    handle.kill()

    def _told(self) -> str:
        return f"running: {'; '.join(job.name for job in self.active)}" if self._slots else "waiting"

    def _stop_all(self) -> None:
        if self._slots:
            self.print("stopping: runs save a checkpoint; Ctrl-C stops at once")
        for _, handle in self._slots.values():
            handle.stop()
        while self._slots:
            for _ in self.ended():
                pass
            time.sleep(_POLL_SECONDS)

    def print(self, text: str) -> None:
        """Print a line."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def describe(run: RunInfo) -> str:
    """Return how well a run does."""
    told = "no evaluation" if run.mean_return is None else f"return {run.mean_return:.2f}"
    success = "" if run.success is None else f", success {run.success:.0%}"
    return f"{told}{success}, {run.step:,} steps"


def train_seeds(request: GroupRequest, prog: str = "embodichain train", console: Console | None = None) -> int:
    """Train a config with several seeds, or continue that; return the exit code."""
    console = console or MessageConsole()
    cfg = request.load(prog)
    with shown_messages(), GroupFolder.opened("seeds", cfg, {"seeds": list(request.seeds)}) as group:
        runner = Runner(request.jobs, Launcher(request.jobs), console)
        waiting, problems = list(request.seeds), {}
        names = {group.job(seed, request, 0).name: seed for seed in request.seeds}

        def step() -> bool:
            for job, problem in runner.ended():
                state = RunInfo(job.run_dir).state
                problems[names[job.name]] = problem or (None if state in DONE else f"its run is {state}")
                told = problem and f"failed: {problem} (see {job.log})"
                runner.print(f"{job.name}: {told or describe(RunInfo(job.run_dir))}")
            for slot in runner.free:
                if not waiting:
                    break
                job = group.job(waiting.pop(0), request, slot)
                if RunInfo(job.run_dir).state in DONE:
                    runner.print(f"{job.name}: finished before, {describe(RunInfo(job.run_dir))}")
                else:
                    runner.start(job, slot)
            return not waiting and not runner.active

        runner.print(f"{len(request.seeds)} seeds, {request.jobs} at a time: {group.path}")
        runner.loop(step)
        runs = [RunInfo(group.job(seed, request, 0).run_dir) for seed in request.seeds]
        is_done = all(run.state in DONE for run in runs)
        group.write(done=is_done)
        return _conclude(runner, group.path, runs, is_done)


def _conclude(runner: Runner, path: Path, runs: Collection[RunInfo], is_done: bool) -> int:
    """Say what came of the runs, and return the exit code."""
    if runner.interrupted:
        runner.print(f"interrupted; the same command continues {path}")
        return EXIT_INTERRUPTED
    values = [value for run in runs if (value := run.mean_return) is not None]
    if values:
        tensor = torch.tensor(values, dtype=torch.float64)
        deviation = f" ± {tensor.std().item():.2f}" if len(values) > 1 else ""
        runner.print(f"mean return over {len(values)} seeds: {tensor.mean().item():.2f}{deviation}")
    runner.print(f"compare them: embodichain report {path}")
    if not is_done:
        runner.print("some runs failed; the same command tries them again")
    return 0 if is_done else EXIT_FAILED
