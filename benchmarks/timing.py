"""Timing that is fair on a machine with other work to do: interleaved windows, paired ratios, load of others noticed.

All candidates are timed in turn, again and again, so that a slow minute of the machine hits all of them. A comparison
is the median of the ratios within the rounds. A window in which other programs used the processor is measured again
while patience lasts; after that, disturbed rounds are left out as long as enough quiet ones remain, or else all count
and the result is marked.
"""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


@dataclass(frozen=True)
class Window:
    """One measurement: how many units of work per second, and how much of the machine others used meanwhile."""

    rate: float
    foreign: float


@dataclass
class Rounds:
    """The windows of all candidates, round by round."""

    windows: dict[str, list[Window]] = field(default_factory=dict)
    max_foreign: float = 0.1
    min_quiet: int = 5

    def quiet(self, *names: str) -> list[int]:
        """Return the rounds in which nobody else used the machine while these were measured, or else all rounds."""
        count = len(self.windows[names[0]])
        calm = [i for i in range(count) if all(self.windows[n][i].foreign <= self.max_foreign for n in names)]
        return calm if len(calm) >= self.min_quiet else list(range(count))

    def is_quiet(self, *names: str) -> bool:
        """Tell whether enough rounds were undisturbed."""
        return all(self.windows[n][i].foreign <= self.max_foreign for n in names for i in self.quiet(*names))

    def rate(self, name: str) -> float:
        """Return the median rate of one candidate."""
        return statistics.median(self.windows[name][i].rate for i in self.quiet(name))

    def ratios(self, name: str, other: str) -> list[float]:
        """Return the ratio of two rates in each round that counts."""
        ours, theirs = self.windows[name], self.windows[other]
        return [ours[i].rate / theirs[i].rate for i in self.quiet(name, other)]

    def ratio(self, name: str, other: str) -> float:
        """Return the median of the ratios within the rounds."""
        return statistics.median(self.ratios(name, other))

    def summary(self, name: str) -> dict[str, float | bool]:
        """Return what is worth writing down about one candidate."""
        rates = [self.windows[name][i].rate for i in self.quiet(name)]
        return {
            "median": statistics.median(rates),
            "lowest": min(rates),
            "highest": max(rates),
            "rounds": len(rates),
            "quiet": self.is_quiet(name),
        }


def interleave(
    candidates: Mapping[str, Callable[[], object]],
    units: Mapping[str, float],
    rounds: int = 7,
    window: float = 0.5,
    patience: float = 0.0,
    on_window: Callable[[], None] = lambda: None,
) -> Rounds:
    """Time all candidates in turn; ``units`` is the work that one call of each does.

    ``patience`` is how many seconds in all may go into waiting for others, and into measuring disturbed windows again.
    """
    result = Rounds({name: [] for name in candidates}, min_quiet=min(5, rounds))
    for call in candidates.values():
        call()
    names = list(candidates)
    for number in range(rounds):
        shift = number % len(names)  # nobody always comes first
        for name in names[shift:] + names[:shift]:
            patience -= _wait_for_quiet(result.max_foreign, patience)
            measured = _time(candidates[name], units[name], window)
            while measured.foreign > result.max_foreign and patience > 0:
                patience -= window + _wait_for_quiet(result.max_foreign, patience)
                measured = _time(candidates[name], units[name], window)
            result.windows[name].append(measured)
            on_window()
    return result


def _wait_for_quiet(max_foreign: float, patience: float, sample: float = 0.25) -> float:
    """Sleep until nobody else uses the machine, at most ``patience`` seconds; return how long it took."""
    start = time.perf_counter()
    while time.perf_counter() - start < patience:
        own, busy, begin = own_cpu(), total_cpu(), time.perf_counter()
        time.sleep(sample)
        foreign = (total_cpu() - busy) - (own_cpu() - own)
        if foreign <= max_foreign * cores() * (time.perf_counter() - begin):
            break
    return time.perf_counter() - start


def _time(call: Callable[[], object], units: float, window: float) -> Window:
    own, busy, start = own_cpu(), total_cpu(), time.perf_counter()
    calls = 0
    while time.perf_counter() - start < window or calls < 2:
        call()
        calls += 1
    elapsed = time.perf_counter() - start
    foreign = (total_cpu() - busy) - (own_cpu() - own)
    return Window(calls * units / elapsed, max(0.0, foreign) / (elapsed * cores()))


def cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def own_cpu() -> float:
    """Return the processor seconds used so far by this process and its live children."""
    pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children() if child.pid)]
    return sum(_process_cpu(pid) for pid in pids)


def total_cpu() -> float:
    """Return the processor seconds used so far by everybody on this machine (0 where it cannot be known)."""
    try:
        fields = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except OSError:
        return 0.0
    return (sum(fields) - fields[3] - fields[4]) / _TICKS  # without idle and waiting for input


def _process_cpu(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return sum(int(x) for x in fields[11:13]) / _TICKS


def machine(packages: Iterable[str]) -> dict[str, str | int]:
    """Describe what a figure was measured on: processor, cores and versions; nothing that tells whose machine it is."""
    return {
        "processor": _processor(),
        "cores": cores(),
        "system": platform.system(),
        "python": platform.python_version(),
        **{name: version for name in packages if (version := _version(name))},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
