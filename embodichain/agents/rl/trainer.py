"""The training loop: collect, update, log, evaluate, save.

::

    while not done:
        rollout = collector.collect(num_steps)
        losses = algorithm.update(rollout)
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from embodichain.agents.rl.algo.base import BaseAlgorithm
from embodichain.agents.rl.buffer.layout import count_transitions
from embodichain.agents.rl.collector.sync_collector import SyncCollector
from embodichain.agents.rl.training.config import TrainCfg
from embodichain.agents.rl.training.ending import Ending, StopReason
from embodichain.agents.rl.training.joint import joint_statistics
from embodichain.agents.rl.training.nan_guard import NanGuard
from embodichain.agents.rl.training.progress import ProgressView, Standing
from embodichain.agents.rl.training.run_folder import RunFolder
from embodichain.agents.rl.training.run_log import RunLog, SilentLog
from embodichain.agents.rl.training.schedule import Every
from embodichain.agents.rl.training.signals import StopSignals
from embodichain.agents.rl.training.state import Collector, Counters, Run, resume_note
from embodichain.agents.rl.training.threads import update_threads
from embodichain.agents.rl.utils.evaluation import Evaluation, evaluate
from embodichain.agents.rl.utils.ranks import check_equal
from embodichain.agents.rl.utils.threads import torch_threads
from embodichain.envs.vec_env import VecEnv


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
            self.log.close()
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
