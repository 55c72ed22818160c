"""Several seeds of one config: ``embodichain train CONFIG --seeds 0..4 --jobs 2``, and ``embodichain imitate``.

The folder of a group contains ``group.json``, a run for each seed, and the output of the runs (``logs``). The same
command resumes a group that was interrupted or killed, and skips finished runs.
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
from typing import Any, Generic, TypeVar

import torch
from rich.console import Console

from embodichain.agents.rl.arguments import given_origins, given_value
from embodichain.agents.rl.config import TrainCfg, load_train_config, override
from embodichain.agents.rl.run_config import RunConfig
from embodichain.agents.rl.run_lock import RunLock
from embodichain.agents.rl.run_records import GROUP_FILE, RunInfo, flag_values, program_command, read_group
from embodichain.agents.rl.runs import StopSignals
from embodichain.agents.rl.sweeps.jobs import TRAIN, Job, JobHandle, Launcher, Program
from embodichain.agents.rl.utils.distributed import is_launched
from embodichain.config import load_config, save_config
from embodichain.config.files import dotted
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
_SHOWN_DIFFERENCES = 3
_OWN = ("seed", "run_dir", "output_dir")
"""Fields of the trainer that are ignored when groups are compared."""


def parse_seeds(text: str) -> list[int]:
    """Parse seeds such as ``0..4``, ``7`` or ``0..2,10``."""
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
    """The command line of a group of runs."""

    config: Path
    overrides: tuple[str, ...]
    trusted_modules: tuple[str, ...]
    seeds: tuple[int, ...]
    jobs: int
    program: Program = TRAIN

    @classmethod
    def of(
        cls,
        config: Path,
        overrides: Sequence[str],
        trust: Sequence[str],
        seeds: str,
        jobs: int,
        program: Program = TRAIN,
    ) -> GroupRequest:
        """Create a request; raise ``ConfigError`` for invalid arguments. The config is not read yet."""
        check_counts({"--jobs": jobs})
        if is_launched():
            raise ConfigError("--seeds: start it without torchrun: every run is a process of its own", "command line")
        if given_value(overrides, "trainer.seed")[0] is not None:
            raise ConfigError("--trainer.seed: expected either --seeds or --trainer.seed, got both", "command line")
        located = locate_trusted(trust, config_folders(config))
        return cls(config, tuple(overrides), located, tuple(parse_seeds(seeds)), jobs, program)

    def load(self, prog: str) -> TrainCfg:
        """Return the config with the flags applied."""
        cfg = load_train_config(self.config, self.trusted_modules, *given_origins(self.overrides))
        return override(cfg, list(self.overrides), prog, self.trusted_modules)


C = TypeVar("C", bound=RunConfig)


@dataclass
class GroupFolder(Generic[C]):
    """The folder of a group of runs."""

    path: Path
    cfg: C
    """The common config, without ``run_dir``."""
    facts: dict[str, Any] = field(default_factory=dict)
    """The content of ``group.json``."""
    note: str = ""
    """Message about an unfinished group with other settings, which is not resumed."""

    @classmethod
    @contextlib.contextmanager
    def opened(
        cls, kind: str, cfg: C, facts: Mapping[str, Any], overrides: Sequence[str] = ()
    ) -> Iterator[GroupFolder[C]]:
        """Find the folder of an unfinished group with the same settings, or create one, and lock it.

        ``overrides`` are the flags of the command, for display.
        """
        digest = _digest([kind, _shared(cfg), facts])
        named = cfg.trainer.run_dir
        output, stem, note = Path(cfg.trainer.output_dir), f"{cfg.trainer.exp_name}_{kind}", ""
        path = Path(named) if named is not None else _unfinished(output, digest=digest)
        if path is None:
            path, other = _new_path(output, stem), _unfinished(output, f"{stem}_*", kind=kind)
            if other is not None:
                changes = _differences(other, read_group(other) or {}, facts, cfg)
                note = f"{other} is not finished, and is left as it is ({changes})"
        there = read_group(path)
        if there is not None and there.get("digest") != digest:
            begun_by = there.get("command") or "another command"
            differences = _differences(path, there, {"kind": kind, **facts}, cfg)
            raise TrainingStateError(
                f"{path} holds other runs ({differences}), begun by: {begun_by}. Choose another --trainer.run_dir"
            )
        lock = RunLock(path)
        try:
            lock.acquire()
        except TrainingStateError as error:
            raise TrainingStateError(str(error).partition("; then continue")[0]) from error
        try:
            base = cfg.replace(trainer=cfg.trainer.replace(run_dir=None))
            begun = {"kind": kind, "digest": digest, "command": program_command(), "began": time.time(), "done": False}
            begun |= {"overrides": flag_values(overrides)} if overrides else {}
            group = cls(path, base, begun | dict(facts) | (there or {}), note)
            save_config(base, path / BASE_CONFIG)
            group.write()
            yield group
        finally:
            lock.release()

    def write(self, **changes: Any) -> None:
        """Apply changes and write ``group.json``."""
        self.facts |= changes
        save_config(self.facts, self.path / GROUP_FILE)

    def job(self, seed: int, request: GroupRequest, slot: int, below: str = "", words: Sequence[str] = ()) -> Job:
        """Return the job of a seed, with additional flags ``words``, in the subfolder ``below``."""
        name = f"{self.cfg.trainer.exp_name}_seed{seed}"
        run_dir = (self.path / below / name).absolute()
        trainer, threads = self.cfg.trainer, 0
        flags = [*words, "--trainer.seed", str(seed), "--trainer.run_dir", str(run_dir)]
        if request.jobs > 1:
            threads = max(1, available_cores() // request.jobs)
            if trainer.gym_config and not trainer.environment.get("num_threads"):
                flags += ["--trainer.gym_config.num_threads", str(threads)]
        log = self.path.absolute() / LOGS / below / f"{name}.log"
        shown = f"{below}, seed {seed}" if below else f"seed {seed}"
        base = str((self.path / BASE_CONFIG).absolute())
        trusted, gpu = request.trusted_modules, gpu_of(slot, trainer.device)
        return Job(shown, base, tuple(flags), run_dir, log, trusted, threads, gpu, request.program)


def gpu_of(slot: int, device: str) -> str | None:
    """Return the GPU of a slot if ``device`` is ``cuda`` and there are several GPUs, else ``None``."""
    count = torch.cuda.device_count() if device == "cuda" and torch.cuda.is_available() else 0
    return str(slot % count) if count > 1 else None


def _shared(cfg: RunConfig) -> dict[str, Any]:
    """Return the settings that the runs of a group share."""
    data = cfg.to_dict()
    trainer = {key: value for key, value in data["trainer"].items() if key not in _OWN}
    if trainer.get("gym_config"):  # a recording is imitated without an environment, too
        trainer["gym_config"] = {key: value for key, value in trainer["gym_config"].items() if key != "seed"}
    return data | {"trainer": trainer}


def _differences(path: Path, there: Mapping[str, Any], facts: Mapping[str, Any], cfg: RunConfig) -> str:
    """Describe how the runs in a folder differ from the requested ones."""
    found = [f"{name}: {there.get(name)!r} there, {now!r} now" for name, now in facts.items() if there.get(name) != now]
    with contextlib.suppress(OSError, ValueError, ConfigError):
        former, now = dotted(load_config(path / BASE_CONFIG)), dotted(json.loads(json.dumps(_shared(cfg))))
        found += [f"{name}: absent there, {now[name]!r} now" for name in now if name not in former]
        names = [name for name in now if name in former and former[name] != now[name]]
        found += [f"{name}: {former[name]!r} there, {now[name]!r} now" for name in names]
    more = f", and {len(found) - _SHOWN_DIFFERENCES} more" if len(found) > _SHOWN_DIFFERENCES else ""
    return "; ".join(found[:_SHOWN_DIFFERENCES]) + more if found else "with other settings"


def _digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _unfinished(folder: Path, names: str = "*", **facts: str) -> Path | None:
    """Return the newest unfinished group whose ``group.json`` has these ``facts``, or ``None``."""
    groups = [(path.parent, read_group(path.parent) or {}) for path in folder.glob(f"{names}/{GROUP_FILE}")]
    same = [(group, path) for path, group in groups if not group.get("done") and facts.items() <= group.items()]
    return max(same, key=lambda entry: entry[0].get("began", 0.0))[1] if same else None


def _new_path(folder: Path, name: str) -> Path:
    stamped = f"{name}_{time.strftime('%Y%m%d-%H%M%S')}"
    names = (stamped, *(f"{stamped}-{number}" for number in range(2, 1000)))
    return next(folder / one for one in names if not (folder / one).exists())


class Runner:
    """Runs several jobs at a time, and stops them on a signal."""

    def __init__(self, jobs: int, launcher: Launcher, console: Console) -> None:
        self.launcher, self.console = launcher, console
        self._slots: dict[int, tuple[Job, JobHandle]] = {}
        self._jobs = jobs
        self.interrupted = False

    @property
    def free(self) -> list[int]:
        """Free slots."""
        return [slot for slot in range(self._jobs) if slot not in self._slots]

    @property
    def active(self) -> list[Job]:
        """Running jobs."""
        return [job for job, _ in self._slots.values()]

    def start(self, job: Job, slot: int) -> None:
        """Start a job in a slot."""
        self._slots[slot] = job, self.launcher.start(job)

    def end(self, job: Job) -> None:
        """Kill a job."""
        for slot, (running, handle) in list(self._slots.items()):
            if running == job:
                handle.kill()
                del self._slots[slot]

    def ended(self) -> Iterator[tuple[Job, str | None]]:
        """Yield the jobs that have ended, each with its error or ``None``, and free their slots."""
        for slot, (job, handle) in list(self._slots.items()):
            if handle.is_over():
                del self._slots[slot]
                yield job, handle.problem

    def loop(self, step: Callable[[], bool]) -> None:
        """Call ``step`` repeatedly until it returns ``True``; a signal stops the jobs after they save a checkpoint."""
        with StopSignals(announce=False) as signals, self.console.status("") as status:
            try:
                while signals.received is None and not step():
                    status.update(self._status())
                    time.sleep(_POLL_SECONDS)
                if signals.received is not None:
                    self.interrupted = True
                    self._stop_all()
            finally:
                for _, handle in self._slots.values():
                    handle.kill()

    def _status(self) -> str:
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
    """Return the result of a run as text."""
    result = "no evaluation" if run.mean_return is None else f"return {run.mean_return:.2f}"
    success = "" if run.success is None else f", success {run.success:.0%}"
    return f"{result}{success}, {run.step:,} steps"


def train_seeds(request: GroupRequest, cfg: RunConfig | None = None) -> int:
    """Train a config with several seeds, or resume that; return the exit code.

    ``cfg`` is the config of the request with its flags; by default, it is loaded as one of ``embodichain train``.
    """
    cfg = request.load("embodichain train") if cfg is None else cfg
    facts = {"seeds": list(request.seeds)}
    with shown_messages(), GroupFolder.opened("seeds", cfg, facts, request.overrides) as group:
        runner = Runner(request.jobs, Launcher(request.jobs), MessageConsole())
        waiting, problems = list(request.seeds), {}
        names = {group.job(seed, request, 0).name: seed for seed in request.seeds}

        def step() -> bool:
            for job, problem in runner.ended():
                state = RunInfo(job.run_dir).state
                problems[names[job.name]] = problem or (None if state in DONE else f"its run is {state}")
                failure = problem and f"failed: {problem} (see {job.log})"
                runner.print(f"{job.name}: {failure or describe(RunInfo(job.run_dir))}")
            for slot in runner.free:
                if not waiting:
                    break
                job = group.job(waiting.pop(0), request, slot)
                if RunInfo(job.run_dir).state in DONE:
                    runner.print(f"{job.name}: finished before, {describe(RunInfo(job.run_dir))}")
                else:
                    runner.start(job, slot)
            return not waiting and not runner.active

        if group.note:
            runner.print(group.note)
        runner.print(f"{len(request.seeds)} seeds, {request.jobs} at a time: {group.path}")
        runner.loop(step)
        runs = [RunInfo(group.job(seed, request, 0).run_dir) for seed in request.seeds]
        is_done = all(run.state in DONE for run in runs)
        group.write(done=is_done)
        return _conclude(runner, group.path, runs, is_done)


def _conclude(runner: Runner, path: Path, runs: Collection[RunInfo], is_done: bool) -> int:
    """Print the results of the runs, and return the exit code."""
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
