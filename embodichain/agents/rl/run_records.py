"""Information about a run from its folder: its origin, progress, results and end.

``run.json`` records what is not in the config: the command, its overrides, machine, versions, and how the run ended.
Folders of older runs have none. This module imports neither torch nor MuJoCo, so that runs are listed quickly.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from embodichain import __version__
from embodichain.agents.rl.run_lock import LOCK_FILE, read_holder
from embodichain.config.files import save_config
from embodichain.errors import OutputError

CONFIG_FILE, METRICS_FILE, RECORD_FILE = "train_config.json", "metrics.jsonl", "run.json"
EVALUATIONS_FILE = "evaluations.jsonl"
"""Results of ``embodichain eval``, one line per evaluation."""
GROUP_FILE = "group.json"
"""Describes a group of runs (seeds or a sweep), in their common folder."""
_TAIL_BYTES = 1 << 16
_PACKAGES = ("torch", "mujoco", "gymnasium", "tensordict", "numpy", "mujoco-warp", "warp-lang", "transformers", "ray")
_CHECKOUT = Path(__file__).parents[3]
_RECORDED: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("name", "config", "command", "reason", "error"), (str,)),
    **dict.fromkeys(("overrides", "resumed"), (list,)),
    **dict.fromkeys(("machine", "versions"), (dict,)),
    **dict.fromkeys(("began", "ended"), (int, float)),
    "seed": (int,),
}
"""Types of the fields of ``run.json``; a field of another type is ignored."""
_GROUPED: dict[str, type] = {
    **dict.fromkeys(("seeds", "trials", "confirmed", "trusted_modules"), list),
    **dict.fromkeys(("space", "overrides"), dict),
    "metric": str,
}
"""Types of the fields of ``group.json``."""
_TRIAL = ("number", "state", "value", "params", "folder")
_MOST = 1e100
"""Logged numbers beyond it are treated as infinite."""


def trust_flags(modules: Iterable[str]) -> list[str]:
    """Return the flags ``--trust MODULE`` for all modules."""
    return [word for module in modules for word in ("--trust", module)]


@dataclass(frozen=True)
class RunOrigin:
    """How a run was started."""

    config: str = ""
    """The config file or environment name, as given."""
    overrides: tuple[str, ...] = ()
    """Flags that changed the config."""
    trusted_modules: tuple[str, ...] = ()
    """Modules allowed with ``--trust``."""
    program: str = "train"
    """The subcommand of ``embodichain``."""

    @property
    def command(self) -> str:
        """The command line that starts the run; empty if unknown."""
        words = [self.program, self.config, *self.overrides, *trust_flags(self.trusted_modules)]
        return shlex.join(["embodichain", *words]) if self.config else ""


@dataclass
class RunRecord:
    """The content of ``run.json``."""

    name: str = ""
    """Name of the experiment."""
    seed: int | None = None
    """Seed of the run."""
    config: str = ""
    """The config file or environment name, as given."""
    overrides: list[str] = field(default_factory=list)
    """Flags that changed the config."""
    command: str = ""
    """The command line that starts the run."""
    began: float = 0.0
    """Start time, in seconds since 1970."""
    resumed: list[float] = field(default_factory=list)
    """Times at which it was resumed."""
    machine: dict[str, Any] = field(default_factory=dict)
    """The machine it runs on, or ran on last."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of Python and of important packages."""
    ended: float | None = None
    """End time; ``None`` if it runs or was killed."""
    reason: str | None = None
    """Why it ended: a stop criterion, ``interrupted``, ``failed`` or ``pruned``."""
    error: str | None = None
    """The error that ended it."""

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Return the record of a run; ``None`` if it cannot be read."""
        with contextlib.suppress(OSError, ValueError):
            data = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
            if isinstance(data, dict):
                kept = [name for name, value in data.items() if isinstance(value, _RECORDED.get(name, ()))]
                record = cls(**{name: data[name] for name in kept})
                record.overrides = [str(word) for word in record.overrides]
                return record
        return None

    @property
    def trusted_modules(self) -> list[str]:
        """The modules that the command names with ``--trust``."""
        with contextlib.suppress(ValueError):
            words = shlex.split(self.command)
            return [value for word, value in pairwise(words) if word == "--trust"]
        return []

    def write(self, folder: Path) -> None:
        """Write ``run.json`` atomically."""
        save_config(asdict(self), folder / RECORD_FILE)

    @classmethod
    def begin(cls, folder: Path, name: str, seed: int | None, origin: RunOrigin, gpu: str | None) -> None:
        """Record that a run starts or is resumed."""
        former = cls.read(folder)
        record = former or cls(config=origin.config, command=origin.command or program_command(), began=time.time())
        if former is not None:
            record.resumed.append(time.time())
        record.overrides += origin.overrides
        record.name, record.seed = name, seed
        record.machine, record.versions = describe_machine(gpu), list_versions()
        record.ended = record.reason = record.error = None
        record.write(folder)

    @classmethod
    def end(cls, folder: Path, reason: str, error: BaseException | None = None) -> None:
        """Record that a run has ended, and why; does nothing without a record, or if it cannot be written."""
        record = cls.read(folder)
        if record is not None:
            record.ended, record.reason = time.time(), reason
            record.error = None if error is None else f"{type(error).__name__}: {error}"
            with contextlib.suppress(OutputError):
                record.write(folder)


def describe_machine(gpu: str | None = None) -> dict[str, Any]:
    """Return host, system, processor, cores, memory and GPU of this machine."""
    processor = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        processor = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), processor)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "host": socket.gethostname(),
        "system": platform.platform(terse=True),
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory, 1),
        **({"gpu": gpu} if gpu else {}),
    }


def list_versions() -> dict[str, str]:
    """Return the versions of this package, of Python and of important packages that are installed."""
    versions = {"embodichain": f"{__version__}{_commit()}", "python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def _commit() -> str:
    """Return the commit of a git checkout as a suffix of the version, or an empty string."""
    if not (_CHECKOUT / ".git").exists():
        return ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        words = ["git", "-C", str(_CHECKOUT), "rev-parse", "--short=12", "HEAD"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=5.0, check=True)
        return f"+{done.stdout.strip()}"
    return ""


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a ``metrics.jsonl``, without an incomplete last line."""
    lines = file.read_text(encoding="utf-8").split("\n") if file.exists() else []
    return [json.loads(line) for line in lines[:-1] if line]  # text after the last line break is incomplete


def command_of(config: Mapping[str, Any]) -> str:
    """Return the subcommand of ``embodichain`` for a run's config."""
    return "imitate" if "source" in config else "train"


def is_run(folder: Path) -> bool:
    """Return whether a folder is that of a run; a config file alone is not enough."""
    files = (LOCK_FILE, RECORD_FILE, METRICS_FILE)
    return os.path.isfile(folder / CONFIG_FILE) and any(os.path.isfile(folder / name) for name in files)


class RunInfo:
    """Information from the folder of a run, read lazily and cached."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved config; empty if it cannot be read."""
        with contextlib.suppress(OSError, ValueError):
            data = json.loads((self.path / CONFIG_FILE).read_text(encoding="utf-8"))
            return data if isinstance(data, dict) else {}
        return {}

    @cached_property
    def record(self) -> RunRecord:
        """The content of ``run.json``; for older runs, name and seed are taken from the config."""
        found = RunRecord.read(self.path)
        if found is not None and found.name:
            return found
        trainer = self.config.get("trainer")
        trainer = trainer if isinstance(trainer, Mapping) else self.config
        seed = trainer.get("seed")
        found = found or RunRecord(seed=seed if isinstance(seed, int) else None)
        found.name = str(trainer.get("exp_name", self.path.name))
        return found

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """All lines of the log, without unreadable ones."""
        return list(map(_numbers, _parsed(self._log_bytes(0))))

    @cached_property
    def recent(self) -> list[dict[str, Any]]:
        """The last lines of the log."""
        return list(map(_numbers, _parsed(self._log_bytes(_TAIL_BYTES))))

    def _log_bytes(self, last: int) -> bytes:
        """Return the log, or the complete lines in its ``last`` bytes."""
        with contextlib.suppress(OSError), (self.path / METRICS_FILE).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - last) if last else 0)
            if last and size > last:
                file.readline()
            return file.read()
        return b""

    @cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        """Results of ``embodichain eval``, oldest first."""
        with contextlib.suppress(OSError):
            return list(_parsed((self.path / EVALUATIONS_FILE).read_bytes()))
        return []

    @property
    def step(self) -> int:
        """Number of environment steps so far (for imitation: gradient steps)."""
        return max((int(line["step"]) for line in self.recent), default=0)

    def latest(self, *names: str) -> float | None:
        """Return the last value logged under the first of these names that has one; or ``None``."""
        for name in names:
            for lines in (self.recent, self.lines) if name.startswith("eval/") else (self.recent,):
                found = next((line[name] for line in reversed(lines) if line.get(name) is not None), None)
                if found is not None:
                    return float(found)
        return None

    @property
    def mean_return(self) -> float | None:
        """Mean return of the last evaluation; without evaluations, of recent episodes."""
        return self.latest("eval/return", "episode/return")

    @property
    def success(self) -> float | None:
        """Success rate of the last evaluation; without evaluations, of recent episodes."""
        return self.latest("eval/success", "episode/success")

    @property
    def age(self) -> float:
        """Seconds since the last log entry, or else since the start."""
        for name in (METRICS_FILE, RECORD_FILE, CONFIG_FILE):
            with contextlib.suppress(OSError):
                return max(0.0, time.time() - (self.path / name).stat().st_mtime)
        return 0.0

    @cached_property
    def state(self) -> str:
        """One of ``running``, ``finished``, ``evaluated``, ``interrupted``, ``pruned``, ``failed``, ``killed``.

        A run of an older version without a record is ``stopped`` if it is not running.
        """
        if is_running(self.path):
            return "running"
        record = RunRecord.read(self.path)
        if record is None:
            return "stopped"
        if record.reason is None:
            return "killed"
        if record.reason in ("interrupted", "pruned", "failed"):
            return record.reason
        return "evaluated" if self.evaluations else "finished"

    def overrides(self) -> dict[str, str]:
        """Return the values of the flags that changed the config, by name."""
        return flag_values(self.record.overrides)


def flag_values(words: Sequence[str]) -> dict[str, str]:
    """Return the values of the flags of a command line, by name."""
    pairs: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--") and not word[2:3].isdigit():
            name, _, value = word[2:].partition("=")
            pairs[name] = value
        elif name:
            pairs[name] = f"{pairs[name]} {word}".strip()
    return pairs


def is_running(folder: Path) -> bool:
    """Return whether a process trains in a folder, without acquiring its lock, which could make that process fail."""
    holder = None
    with contextlib.suppress(OSError), (folder / LOCK_FILE).open("rb") as file:
        holder = read_holder(file)
    if holder is None:
        return False
    if holder["host"] != socket.gethostname():
        return True  # cannot be checked from this machine
    try:
        opened = [os.path.realpath(entry) for entry in Path(f"/proc/{int(holder['pid'])}/fd").iterdir()]
    except PermissionError:
        return True  # a process of another user
    except (OSError, ValueError):
        return False
    return os.path.realpath(folder / LOCK_FILE) in opened


def _parsed(data: bytes) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a log that contain a step."""
    for line in data.split(b"\n")[:-1]:
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            if isinstance(entry, dict) and isinstance(entry.get("step"), int) and abs(entry["step"]) < _MOST:
                yield entry


def _numbers(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of a line; non-finite ones are ``None``, as in the log."""
    numbers = {name: value for name, value in entry.items() if value is None or isinstance(value, int | float)}
    return {name: None if value is None or not abs(value) < _MOST else value for name, value in numbers.items()}


def find_runs(folder: Path) -> list[Path]:
    """Return the runs in a folder and its subfolders, sorted by name; folders of runs are not searched further."""
    if is_run(folder):
        return [folder]
    found: list[Path] = []
    with contextlib.suppress(OSError):
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                found += find_runs(Path(entry.path))
    return found


def read_group(folder: Path) -> dict[str, Any] | None:
    """Return the content of ``group.json`` in a folder; ``None`` if there is none."""
    with contextlib.suppress(OSError, ValueError):
        data = json.loads((folder / GROUP_FILE).read_text(encoding="utf-8"))
        return _checked_group(data) if isinstance(data, dict) else None
    return None


def _checked_group(data: dict[str, Any]) -> dict[str, Any]:
    """Return the valid parts of a ``group.json``."""
    kept = [name for name, value in data.items() if isinstance(value, _GROUPED.get(name, object))]
    group = {name: data[name] for name in kept}
    if "seeds" in group:
        group["seeds"] = [seed for seed in group["seeds"] if isinstance(seed, int)]
    if "space" in group:
        group["space"] = {name: domain for name, domain in group["space"].items() if _is_domain(domain)}
    if "trials" in group:
        group["trials"] = [trial for trial in group["trials"] if _is_trial(trial)]
    if "confirmed" in group:
        group["confirmed"] = [entry for entry in group["confirmed"] if _is_confirmed(entry)]
    return group


def _is_domain(domain: Any) -> bool:
    """Return whether data is a valid domain of a sweep."""
    if not isinstance(domain, dict):
        return False
    is_interval = all(isinstance(domain.get(name), int | float) for name in ("low", "high"))
    return is_interval or isinstance(domain.get("choices"), list)


def _is_trial(trial: Any) -> bool:
    """Return whether data is a valid trial of a sweep."""
    if not isinstance(trial, dict) or any(name not in trial for name in _TRIAL):
        return False
    is_number = trial["value"] is None or isinstance(trial["value"], int | float)
    is_named = isinstance(trial["state"], str) and isinstance(trial["folder"], str)
    return is_number and is_named and isinstance(trial["number"], int) and isinstance(trial["params"], dict)


def _is_confirmed(entry: Any) -> bool:
    """Return whether data is a valid entry of a sweep's confirmation."""
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        return False
    is_trial = entry.get("trial") is None or isinstance(entry["trial"], int)
    return is_trial and isinstance(entry.get("value"), int | float) and isinstance(entry.get("scores"), list)


def format_seeds(seeds: Sequence[int]) -> str:
    """Return seeds in the format of the command line: ``0..4,9``."""
    parts: list[list[int]] = []
    for seed in seeds:
        if parts and seed == parts[-1][-1] + 1:
            parts[-1].append(seed)
        else:
            parts.append([seed])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}..{part[-1]}" for part in parts)


def program_command() -> str:
    """Return the command line of this process if it is a command of this package, else an empty string."""
    name = Path(sys.argv[0]).name
    if name in ("embodichain", "__main__.py"):
        return shlex.join(["embodichain", *sys.argv[1:]])
    return ""
