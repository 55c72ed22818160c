"""The training loop: collect, update, log, evaluate, save.

::

    while not done:
        rollout = collector.collect(num_steps)
        losses = algorithm.update(rollout)
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from embodichain.agents.rl.algo.base import BaseAlgorithm
from embodichain.agents.rl.buffer.rollout import count_transitions
from embodichain.agents.rl.checkpoint import Collector, Counters, NanGuard, Run, resume_note
from embodichain.agents.rl.collector.sync_collector import SyncCollector
from embodichain.agents.rl.config import TrainCfg, TrainerCfg, num_iterations
from embodichain.agents.rl.evaluation import Evaluation, evaluate
from embodichain.agents.rl.runs import ProgressView, RunFolder, RunLog, SilentLog, Standing, StopSignals
from embodichain.agents.rl.utils.distributed import Ranks, check_equal
from embodichain.envs.vec_env import VecEnv
from embodichain.utils.threads import torch_threads, update_threads

# MERGED schedule: Things that happen every so many steps.


class Every:
    """Fires when a multiple of ``frequency`` steps was crossed, however large the jumps are; 0 never fires."""

    def __init__(self, frequency: int) -> None:
        self.frequency = frequency
        self.next = frequency
        """The step at which it fires next."""

    def due(self, step: int) -> bool:
        """Tell whether a multiple was crossed since the last time this was true; several at once count as one."""
        if not self.frequency or step < self.next:
            return False
        self.next = (step // self.frequency + 1) * self.frequency
        return True

    def continue_from(self, step: int) -> None:
        """Go on as if every multiple up to this step had fired."""
        self.next = (step // self.frequency + 1) * self.frequency if self.frequency else 0


# MERGED joint: What all ranks of a run have to agree on between two updates.


Scalars = Mapping[str, float]
_EXTREMES = {"async/lag_min": min, "async/lag_max": max}
_TOTALS = ("episode/count", "async/restarts", "async/workers")


def joint_statistics(ranks: Ranks, steps: int, statistics: Scalars) -> tuple[int, dict[str, float]]:
    """Return the environment steps of all ranks, and the averages of their rollouts."""
    if ranks.count == 1:
        return steps, dict(statistics)
    rows = ranks.exchange([steps, dict(statistics)])
    return sum(row[0] for row in rows), merge_statistics([row[1] for row in rows])


def merge_statistics(rows: Sequence[Scalars]) -> dict[str, float]:
    """Return averages over ranks: those of episodes by the number of episodes, others where a rank has them."""
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        having = [row for row in rows if name in row]
        values = [row[name] for row in having]
        if name in _EXTREMES:
            merged[name] = _EXTREMES[name](values)
        elif name in _TOTALS:
            merged[name] = sum(values)
        else:
            weights = [row["episode/count"] if name.startswith("episode/") else 1.0 for row in having]
            merged[name] = sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)
    return merged


# MERGED ending: When a run ends, and how near that is.


StopReason = Literal["iterations", "total_steps", "max_seconds", "target", "interrupted"]


class Ending:
    """What ends a run, apart from an interruption."""

    def __init__(self, trainer: TrainerCfg, num_ranks: int = 1, in_chunks: bool = False) -> None:
        """Take a run's settings; ``in_chunks`` tells that a rollout has more steps than decisions."""
        self.trainer, self.num_ranks, self.in_chunks = trainer, num_ranks, in_chunks

    def reason(self, now: Counters, evaluation: Evaluation | None) -> StopReason | None:
        """Return why the run ends here, ``None`` if it goes on."""
        trainer = self.trainer
        if trainer.iterations is not None and now.iteration >= trainer.iterations:
            return "iterations"
        if trainer.total_steps is not None and now.global_step >= trainer.total_steps:
            return "total_steps"
        if trainer.max_seconds is not None and now.seconds >= trainer.max_seconds:
            return "max_seconds"
        return "target" if evaluation is not None and self._is_reached(evaluation) else None

    def progress(self, now: Counters) -> float:
        """Return the share of the training that is over: by the clock only if nothing else ends it."""
        limit = self._num_iterations(now)
        if limit is None:
            return self.share_of_time(now) or 0.0
        total = self.trainer.total_steps
        if total is not None and self.in_chunks:
            return min(1.0, max(now.iteration / limit, now.global_step / total))
        return min(1.0, now.iteration / limit)

    def share_of_time(self, now: Counters) -> float | None:
        """Return the share of the time that is over, where time is limited."""
        seconds = self.trainer.max_seconds
        return None if seconds is None else min(1.0, now.seconds / seconds)

    def _num_iterations(self, now: Counters) -> int | None:
        return num_iterations(self.trainer, self.num_ranks, now.iteration, now.global_step)

    def _is_reached(self, evaluation: Evaluation) -> bool:
        wanted_return, wanted_success = self.trainer.target_return, self.trainer.target_success
        if wanted_return is None and wanted_success is None:
            return False
        summary = evaluation.summary
        enough = wanted_return is None or summary.mean_return >= wanted_return
        return enough and (wanted_success is None or (summary.success_rate or 0.0) >= wanted_success)


@dataclass(frozen=True)
class TrainingResult:
    """What came of a run."""

    run_dir: Path
    """Folder of the run."""
    global_step: int
    """Environment steps taken, those before a resume included."""
    iteration: int
    """Rollouts learned from."""
    seconds: float
    """Time spent training."""
    reason: StopReason
    """Why it ended; ``iterations`` stands for total_steps as well."""
    evaluation: Evaluation | None
    """The last evaluation."""


class Trainer:
    """Trains one policy with one algorithm in one vectorised environment."""

    def __init__(
        self,
        cfg: TrainCfg,
        env: VecEnv,
        algorithm: BaseAlgorithm,
        folder: RunFolder,
        eval_env: VecEnv | None = None,
        console: Console | None = None,
        collector: Collector | None = None,
    ) -> None:
        """Prepare a run; ``cfg`` is complete (see ``training.config``), ``eval_env`` is needed to evaluate.

        Without a ``collector``, rollouts are collected synchronously.
        """
        algorithm.check_num_envs(env.num_envs)
        settings, ranks = cfg.trainer, algorithm.ranks
        self.cfg, self.env, self.eval_env, self.folder = cfg, env, eval_env, folder
        self.algorithm, self.policy, self.ranks = algorithm, algorithm.policy, ranks
        self.collector: Collector = collector or SyncCollector(
            env,
            self.policy,
            algorithm.device,
            start_rollout=algorithm.start_rollout,
            num_threads=settings.collect_threads,
        )
        owner = env if isinstance(self.collector, SyncCollector) else None  # others step it at any time
        self.guard = NanGuard(owner, self.policy, folder.failure_of(ranks.rank)) if settings.nan_guard else None
        self.view = ProgressView(settings.exp_name, console)
        self.counters = Counters()
        self._update_threads = settings.update_threads or update_threads(self.policy, algorithm.cfg.batch_size)
        self.evaluation: Evaluation | None = None
        self._run = Run(cfg, env, algorithm, self.collector)
        self._ending = Ending(settings, ranks.count, in_chunks=self.policy.chunk_size > 1)
        self._eval_schedule, self._save_schedule = Every(settings.eval_freq), Every(settings.save_freq)
        self._saved_at = -1
        self._resumed_at: int | None = None
        self._log: RunLog | None = None
        self._began = time.perf_counter()

    @property
    def global_step(self) -> int:
        """Environment transitions of all envs, on all ranks, so far."""
        return self.counters.global_step

    @property
    def log(self) -> RunLog:
        """Where scalars go; opened when the first one comes."""
        if self._log is None:
            self._log = RunLog(self.folder, self.cfg, self._resumed_at) if self.ranks.is_first else SilentLog()
        return self._log

    # --- the loop -------------------------------------------------------------------------------------------------

    def train(self) -> TrainingResult:
        """Train until the configured end, a target or an interruption, and save the state at the end."""
        self._began = time.perf_counter() - self.counters.seconds
        try:
            with StopSignals(aloud=self.ranks.is_first) as signals, self.view:
                if self._resumed_at is None:
                    self.collector.reset(seed=self.ranks.seed(self.cfg.trainer.seed))
                    self.save_checkpoint()
                reason = self._loop(signals)
                if reason != "interrupted" and self.counters.evaluated_at != self.global_step:
                    self.evaluate()
                if self._saved_at != self.global_step:
                    self.save_checkpoint()
        finally:
            self.collector.stop()
            if self._log is not None:
                self._log.close()
                self._log = None
        now = self.counters
        return TrainingResult(self.folder.path, now.global_step, now.iteration, now.seconds, reason, self.evaluation)

    def _loop(self, signals: StopSignals) -> StopReason:
        while True:
            reason = self._stop_reason(signals)
            if reason is not None:
                return reason
            self._iterate()
            if self._eval_schedule.due(self.global_step):
                self.evaluate()
            if self._save_schedule.due(self.global_step) and self._saved_at != self.global_step:
                self.save_checkpoint()

    def _iterate(self) -> None:
        """Collect one rollout, learn from it, log it."""
        began = time.perf_counter()
        with self.ranks.together("collecting"):
            if self.guard is not None:
                self.guard.before_rollout()
            rollout = self.collector.collect(self.cfg.trainer.buffer_size)
            if self.guard is not None:
                self.guard.check_rollout(rollout, self.global_step)
        collected = time.perf_counter()

        self.algorithm.progress = self._ending.progress(self.counters)
        with torch_threads(self._update_threads):
            measures = self.algorithm.update(rollout)
        if self.guard is not None:
            self.guard.check_update(measures, rollout, self.global_step)
        check_equal(self.ranks, self.policy, f"after the update at step {self.global_step}")
        self.collector.publish()
        updated = time.perf_counter()

        steps, statistics = joint_statistics(self.ranks, count_transitions(rollout), self.collector.statistics())
        self.counters.global_step += steps
        self.counters.iteration += 1
        times = {
            "time/collect_seconds": collected - began,
            "time/update_seconds": updated - collected,
            "time/steps_per_second": steps / (updated - began),
            "time/total_seconds": self._tell_time(),
        }
        self.log.write(self.global_step, statistics | {f"update/{k}": v for k, v in measures.items()} | times)
        self.counters.note(statistics)
        self.view.show(self._standing())

    def _stop_reason(self, signals: StopSignals) -> StopReason | None:
        """Return why training ends here: because any rank was asked to, or by the first one's clock and evaluations."""
        self._tell_time()
        own = "interrupted" if signals.received is not None else self._ending.reason(self.counters, self.evaluation)
        said = self.ranks.exchange([own, self.counters.seconds])
        self.counters.seconds = said[0][1]
        return "interrupted" if any(reason == "interrupted" for reason, _ in said) else said[0][0]

    # --- evaluation and checkpoints -------------------------------------------------------------------------------

    def evaluate(self) -> None:
        """Evaluate the policy, on the first rank; log how it did, and save it if it is the best so far."""
        with self.ranks.together("evaluating"):
            is_best = self._evaluate()
        is_best = self.ranks.from_first(is_best)
        if is_best is not None:
            self.counters.evaluated_at = self.global_step
        if is_best:
            self.save_checkpoint(best=True)

    def _evaluate(self) -> bool | None:
        """Return whether the policy is the best so far; ``None`` if it cannot be evaluated here."""
        if self.eval_env is None:
            return None
        settings = self.cfg.trainer
        video = self.folder.video(self.global_step) if settings.eval_video else None
        result = evaluate(self.policy, self.eval_env, settings.num_eval_episodes, settings.eval_seed, video)
        self.evaluation = result
        self.log.write(self.global_step, result.scalars() | {"time/total_seconds": self._tell_time()})
        for file in result.files:
            self.log.video(self.global_step, file)
        problem = "" if result.problem is None else f" (no video: {result.problem})"
        self.view.say(f"step {self.global_step}: evaluation {result}{problem}")
        if self.counters.best_score is not None and result.score <= self.counters.best_score:
            return False
        self.counters.best_score = result.score
        return True

    def save_checkpoint(self, best: bool = False) -> None:
        """Write a checkpoint of everything the next iteration depends on, on all ranks."""
        self._saved_at = self.global_step
        self._tell_time()
        self.log.flush()
        state = self._run.state(self.counters)
        with self.ranks.together("saving a checkpoint"):
            if state is not None:
                self.folder.save(self.global_step, state, best)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint of the same run, exactly where it was saved if as many ranks saved it."""
        with self.ranks.together("resuming"):
            self.counters = self._run.restore(state)
        note = resume_note(state, self.cfg.trainer.collector, self.ranks.count)
        if note is not None:
            self.view.say(note)
        for schedule in (self._eval_schedule, self._save_schedule):
            schedule.continue_from(self.global_step)
        self._saved_at = self._resumed_at = self.global_step
        if self.ranks.is_first:
            self.folder.forget_after(self.global_step)

    def _tell_time(self) -> float:
        """Bring the clock up to date and return it."""
        self.counters.seconds = time.perf_counter() - self._began
        return self.counters.seconds

    # --- what is shown --------------------------------------------------------------------------------------------

    def _standing(self) -> Standing:
        return Standing(
            step=self.global_step,
            done=max(self._ending.progress(self.counters), self._ending.share_of_time(self.counters) or 0.0),
            mean_return=self.counters.mean_return,
            success=self.counters.success_rate,
        )
