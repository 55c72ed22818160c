"""The last part of a sweep: its best trials and the original config are trained with further seeds.

The best of many trials is partly the luckiest one. Seeds that were not used in the search give an unbiased comparison.
As the original config takes part, the result of a sweep is never worse than it on these seeds.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from embodichain.agents.rl.run_records import RunInfo, format_seeds
from embodichain.agents.rl.sweeps.group import DONE, GroupFolder, GroupRequest, Runner
from embodichain.agents.rl.sweeps.jobs import Job
from embodichain.agents.rl.sweeps.scores import Judge


@dataclass(frozen=True)
class Candidate:
    """Settings that may be the best."""

    name: str
    """Name on the terminal."""
    folder: str
    """Folder of its runs, relative to the folder of the sweep."""
    words: tuple[str, ...]
    """The flags that set them."""
    planned: int | None
    """Number of evaluations of each run, if known."""
    number: int | None = None
    """Number of the trial, if it is one."""


@dataclass(frozen=True)
class Confirmed:
    """A candidate and its scores, one for each further seed."""

    candidate: Candidate
    scores: tuple[float, ...]

    @property
    def value(self) -> float:
        """Mean over the seeds."""
        return statistics.fmean(self.scores)

    def to_data(self) -> dict[str, Any]:
        """Return plain data."""
        return {"name": self.candidate.name, "trial": self.candidate.number, "value": self.value, "scores": self.scores}


def further_seeds(seeds: Sequence[int], count: int) -> list[int]:
    """Return the ``count`` lowest seeds that are not in ``seeds``."""
    taken = set(seeds)
    return list(itertools.islice((seed for seed in itertools.count() if seed not in taken), count))


class Confirmation:
    """Trains candidates with further seeds; finished runs are reused."""

    def __init__(
        self,
        request: GroupRequest,
        group: GroupFolder,
        runner: Runner,
        judge: Judge,
        config: Candidate,
        best: Sequence[Candidate],
        count: int,
    ) -> None:
        """``config`` is the original config, which may be among ``best``; ``count`` is the number of seeds."""
        self.request, self.group, self.runner, self.judge, self.config = request, group, runner, judge, config
        self.candidates = [config, *(one for one in best if one != config)]  # the config first, which wins ties
        self.seeds = further_seeds(request.seeds, count)
        self._waiting = [(one, seed) for seed in self.seeds for one in self.candidates]
        self._failed: set[Candidate] = set()
        self._running: dict[Job, Candidate] = {}
        names = ", ".join(self._label(one) for one in self.candidates)
        runner.print(f"confirming with seeds {format_seeds(self.seeds)}: {names}")

    @property
    def failed(self) -> list[str]:
        """Candidates of which a run failed."""
        return [self._label(one) for one in self.candidates if one in self._failed]

    def _label(self, one: Candidate) -> str:
        is_trial = one == self.config and one.number is not None
        return f"{one.name} (the config as it was)" if is_trial else one.name

    def step(self) -> bool:
        """Process finished runs and start others; return whether all are finished."""
        for job, problem in self.runner.ended():
            one = self._running.pop(job)
            run = RunInfo(job.run_dir)
            if problem is not None or run.state not in DONE:
                self._failed.add(one)
                reason = problem or f"its run is {run.state}"
                self.runner.print(f"{job.name} failed: {reason} (see {job.log}); {one.name} is not confirmed")
        for slot in self.runner.free:
            following = self._next(slot)
            if following is None:
                break
            self.runner.start(following, slot)
        is_over = not self._waiting and not self._running
        if is_over:
            for confirmed in self.ranking():
                deviation = f" ± {statistics.stdev(confirmed.scores):.2g}" if len(confirmed.scores) > 1 else ""
                result = f"{self.judge.metric} {confirmed.value:.4g}{deviation}"
                self.runner.print(f"{self._label(confirmed.candidate)}: {result} with further seeds")
        return is_over

    def _next(self, slot: int) -> Job | None:
        """Return the next run to start, or ``None``."""
        while self._waiting:
            one, seed = self._waiting.pop(0)
            job = self.group.job(seed, self.request, slot, one.folder, one.words)
            if one not in self._failed and RunInfo(job.run_dir).state not in DONE:
                self._running[job] = one
                return job
        return None

    def ranking(self) -> list[Confirmed]:
        """Return the candidates whose runs are all finished, best first."""
        found = []
        for one in self.candidates:
            runs = [RunInfo(self.group.job(seed, self.request, 0, one.folder).run_dir) for seed in self.seeds]
            known = [self.judge.of(self.judge.evaluations(run, one.planned)) for run in runs if run.state in DONE]
            scores = tuple(score for score in known if score is not None)
            if len(scores) == len(self.seeds):
                found.append(Confirmed(one, scores))
        return sorted(found, key=lambda confirmed: self.judge.rank(confirmed.value))
