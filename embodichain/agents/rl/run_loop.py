"""Base class of training loops: counters, logging, evaluation, checkpoints."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from embodichain.agents.rl.evaluation import Evaluation, evaluate
from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.run_config import RunConfig
from embodichain.agents.rl.run_records import RunRecord
from embodichain.agents.rl.runs import RunFolder, RunLog
from embodichain.agents.rl.utils.distributed import Ranks
from embodichain.envs.vec_env import VecEnv
from embodichain.errors import CheckpointError
from embodichain.utils.console import ProgressView

Scalars = Mapping[str, float]
StopReason = Literal["iterations", "total_steps", "max_seconds", "target", "interrupted"]
_RECENT = 100
"""Number of episodes over which recent returns are averaged."""


@dataclass(frozen=True)
class TrainingResult:
    """Result of a run."""

    run_dir: Path
    """Folder of the run."""
    global_step: int
    """Number of environment steps, including those before a resume."""
    iteration: int
    """Number of updates."""
    seconds: float
    """Training time."""
    reason: StopReason
    """Why the run ended."""
    evaluation: Evaluation | None
    """The last evaluation."""


@dataclass
class Counters:
    """Progress of a run."""

    global_step: int = 0
    """Number of environment steps of all envs."""
    iteration: int = 0
    """Number of updates."""
    seconds: float = 0.0
    """Training time, including evaluations and checkpoints."""
    best_score: tuple[float, float] | None = None
    """Score of the best evaluation."""
    evaluated_at: int = -1
    """Step of the last evaluation."""
    evaluated: tuple[float, float | None] | None = None
    """Mean return and, if known, success rate of the last evaluation."""
    recent: deque[tuple[int, float, float | None]] = field(default_factory=deque)
    """For each recent rollout: number of finished episodes, their mean return and, if known, success rate."""
    episodes: int = 0
    """Number of finished episodes since the start."""

    @property
    def mean_return(self) -> float | None:
        """Mean return of recent episodes."""
        return _weighted([(count, value) for count, value, _ in self.recent])

    @property
    def success_rate(self) -> float | None:
        """Success rate of recent episodes, if the task reports it."""
        return _weighted([(count, value) for count, _, value in self.recent if value is not None])

    def shown_success(self, num_envs: int) -> float | None:
        """Success rate, once as many episodes have ended as there are envs: the first ends are those of successes."""
        return self.success_rate if self.episodes >= num_envs else None

    def add_episodes(self, statistics: Scalars) -> None:
        """Add the episodes that ended in a rollout."""
        if "episode/return" not in statistics:
            return
        count = int(statistics["episode/count"])
        self.episodes += count
        self.recent.append((count, statistics["episode/return"], statistics.get("episode/success")))
        while sum(number for number, *_ in self.recent) - self.recent[0][0] >= _RECENT:
            self.recent.popleft()

    def to_data(self) -> dict[str, Any]:
        """Return plain data."""
        return {**vars(self), "recent": list(self.recent)}

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> Counters:
        """Return the counters from the result of ``to_data``."""
        counters = Counters(**{**data, "recent": deque(data["recent"])})
        whole = {name: getattr(counters, name) for name in ("global_step", "iteration", "evaluated_at")}
        wrong = next((name for name, value in whole.items() if type(value) is not int or value < -1), None)
        if wrong is not None or not isinstance(counters.seconds, float | int):
            raise CheckpointError(f"the checkpoint has no proper {wrong or 'seconds'} in 'trainer': {dict(data)}")
        return counters


class RunLoop(ABC):
    """Base class of training runs; a subclass implements the loop and the content of checkpoints."""

    def __init__(
        self,
        cfg: RunConfig,
        policy: Policy,
        folder: RunFolder,
        eval_env: VecEnv | None = None,
        console: Console | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.cfg, self.policy, self.folder, self.eval_env = cfg, policy, folder, eval_env
        self.ranks = Ranks() if ranks is None else ranks
        self.view = ProgressView(cfg.trainer.exp_name, console)
        self.counters = Counters()
        self.evaluation: Evaluation | None = None
        self._video_problem_shown = False
        self._saved_at = -1
        self._resumed_at: int | None = None
        self._log: RunLog | None = None
        self._began = time.perf_counter()

    @abstractmethod
    def _state(self) -> dict[str, Any] | None:
        """Return the content of a checkpoint, on the first rank; see ``checkpoint.py``."""

    @property
    def global_step(self) -> int:
        """Number of environment steps so far, of all envs on all ranks."""
        return self.counters.global_step

    @property
    def log(self) -> RunLog:
        """The log of the first rank, opened at its first use."""
        if self._log is None:
            self._begin_record()
            evaluated = self.counters.evaluated_at == self._resumed_at
            self._log = RunLog(self.folder, self.cfg, self._resumed_at, evaluated)
        return self._log

    def _begin_record(self) -> None:
        """Write to the run's folder how the run was started, and on which machine."""
        settings, device = self.cfg.trainer, self.policy.device
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        RunRecord.begin(self.folder.path, settings.exp_name, settings.seed, self.folder.origin, gpu)

    def limit_met(self) -> StopReason | None:
        """Return which limit is reached: the time, or the target of evaluations; or ``None``."""
        settings, now = self.cfg.trainer, self.counters
        if settings.max_seconds is not None and now.seconds >= settings.max_seconds:
            return "max_seconds"
        wanted_return, wanted_success = settings.target_return, settings.target_success
        if now.evaluated is None or (wanted_return is None and wanted_success is None):
            return None
        mean_return, success_rate = now.evaluated
        enough = wanted_return is None or mean_return >= wanted_return
        return "target" if enough and (success_rate or 0.0) >= (wanted_success or 0.0) else None

    def _share_of_time(self) -> float:
        """Return the elapsed fraction of ``max_seconds``, 0 if there is no time limit."""
        seconds = self.cfg.trainer.max_seconds
        return 0.0 if seconds is None else min(1.0, self.counters.seconds / seconds)

    def _evaluate_and_save(self, before: int) -> None:
        """Evaluate and save if that is due, given the step ``before`` this iteration."""
        settings = self.cfg.trainer
        if crossed(settings.eval_freq, before, self.global_step):
            self.evaluate()
        if crossed(settings.save_freq, before, self.global_step) and self._saved_at != self.global_step:
            self.save_checkpoint()

    def _finish(self, reason: StopReason) -> None:
        """Evaluate the final policy, unless the run was interrupted, and save a checkpoint."""
        if reason != "interrupted" and self.counters.evaluated_at != self.global_step:
            self.evaluate()
        if self._saved_at != self.global_step:
            self.save_checkpoint()

    def evaluate(self) -> None:
        """Evaluate the policy on the first rank, log the result, and save a checkpoint if it is the best so far."""
        settings, now = self.cfg.trainer, self.counters
        is_best: bool | None = None
        began = time.perf_counter()
        with self.ranks.together("evaluating"):
            if self.eval_env is not None:
                video = (
                    self.folder.path / "videos" / f"step_{self.global_step:012d}.mp4" if settings.eval_video else None
                )
                episodes, seed, best = settings.num_eval_episodes, settings.eval_seed, settings.eval_deterministic
                result = evaluate(self.policy, self.eval_env, episodes, seed, video, deterministic=best)
                self.evaluation = result
                now.evaluated = result.summary.mean_return, result.summary.success_rate
                times = {
                    "time/evaluate_seconds": time.perf_counter() - began,
                    "time/total_seconds": self._update_clock(),
                }
                self.log.write(self.global_step, result.scalars() | times)
                for file in result.files:
                    self.log.video(self.global_step, file)
                self.view.print(f"step {self.global_step}: evaluation {result}")
                self._show_video_problem(result.problem)
                is_best = now.best_score is None or result.score > now.best_score
                now.best_score = result.score if is_best else now.best_score
        is_best = self.ranks.from_first(is_best)
        if is_best is not None:
            now.evaluated_at = self.global_step
            self._saved_at = -1  # a checkpoint saved at this step lacks the evaluation
        if is_best:
            self.save_checkpoint(best=True)

    def _show_video_problem(self, problem: str | None) -> None:
        """Print once per run why evaluations have no video: the first and the last line, the reason and the remedy."""
        if problem is not None and not self._video_problem_shown:
            self._video_problem_shown = True
            first, *_, last = (problem.splitlines() or [""]) * 2
            self.view.print(f"no video: {first if first == last else f'{first} {last}'}")

    def save_checkpoint(self, best: bool = False) -> None:
        """Write a checkpoint with the state of all ranks."""
        self._saved_at = self.global_step
        self._update_clock()
        if self.ranks.is_first:
            self.log.flush()
        state = self._state()
        with self.ranks.together("saving a checkpoint"):
            if state is not None:
                self.folder.save(self.global_step, state, best)

    def _update_clock(self) -> float:
        """Update the training time and return it."""
        self.counters.seconds = time.perf_counter() - self._began
        return self.counters.seconds

    def _result(self, reason: StopReason) -> TrainingResult:
        """Return the result of the run; write to its folder why it ended."""
        now = self.counters
        if self.ranks.is_first:
            RunRecord.end(self.folder.path, reason)
        return TrainingResult(self.folder.path, now.global_step, now.iteration, now.seconds, reason, self.evaluation)

    def _close_log(self) -> None:
        """Close the log."""
        if self._log is not None:
            self._log.close()
            self._log = None


def crossed(frequency: int, before: int, step: int) -> bool:
    """Return whether there is a multiple of ``frequency`` in ``(before, step]``; never if it is 0."""
    return frequency > 0 and step // frequency > before // frequency


def _weighted(counted: list[tuple[int, float]]) -> float | None:
    total = sum(count for count, _ in counted)
    return sum(count * value for count, value in counted) / total if total else None
