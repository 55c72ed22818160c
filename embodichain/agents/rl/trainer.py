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
from typing import Any, Literal

from rich.console import Console

from embodichain.agents.rl.algo.base import BaseAlgorithm
from embodichain.agents.rl.buffer.layout import count_transitions
from embodichain.agents.rl.collector.sync_collector import SyncCollector
from embodichain.agents.rl.training.config import TrainCfg, num_iterations
from embodichain.agents.rl.training.nan_guard import NanGuard
from embodichain.agents.rl.training.progress import ProgressView, Standing
from embodichain.agents.rl.training.run_folder import RunFolder
from embodichain.agents.rl.training.run_log import RunLog
from embodichain.agents.rl.training.schedule import Every
from embodichain.agents.rl.training.signals import StopSignals
from embodichain.agents.rl.training.state import Collector, Counters, Run
from embodichain.agents.rl.training.threads import update_threads
from embodichain.agents.rl.utils.evaluation import Evaluation, evaluate
from embodichain.agents.rl.utils.threads import torch_threads
from embodichain.envs.vec_env import VecEnv

StopReason = Literal["iterations", "max_seconds", "target", "interrupted"]


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
        settings = cfg.trainer
        self.cfg, self.env, self.eval_env, self.folder = cfg, env, eval_env, folder
        self.algorithm, self.policy = algorithm, algorithm.policy
        self.collector: Collector = collector or SyncCollector(
            env,
            self.policy,
            algorithm.device,
            start_rollout=algorithm.start_rollout,
            num_threads=settings.collect_threads,
        )
        owner = env if isinstance(self.collector, SyncCollector) else None  # others step it at any time
        self.guard = NanGuard(owner, self.policy, folder.failure) if settings.nan_guard else None
        self.view = ProgressView(settings.exp_name, console)
        self.counters = Counters()
        self._update_threads = settings.update_threads or update_threads(self.policy, algorithm.cfg.batch_size)
        self.evaluation: Evaluation | None = None
        self._run = Run(cfg, env, algorithm, self.collector)
        self._eval_schedule, self._save_schedule = Every(settings.eval_freq), Every(settings.save_freq)
        self._saved_at = -1
        self._resumed_at: int | None = None
        self._log: RunLog | None = None
        self._began = time.perf_counter()

    @property
    def global_step(self) -> int:
        """Environment transitions of all envs so far."""
        return self.counters.global_step

    @property
    def log(self) -> RunLog:
        """Where scalars go; opened when the first one comes."""
        if self._log is None:
            self._log = RunLog(self.folder, self.cfg, self._resumed_at)
        return self._log

    # --- the loop -------------------------------------------------------------------------------------------------

    def train(self) -> TrainingResult:
        """Train until the configured end, a target or an interruption, and save the state at the end."""
        self._began = time.perf_counter() - self.counters.seconds
        try:
            with StopSignals() as signals, self.view:
                if self._resumed_at is None:
                    self.collector.reset(seed=self.cfg.trainer.seed)
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
        if self.guard is not None:
            self.guard.before_rollout()
        rollout = self.collector.collect(self.cfg.trainer.buffer_size)
        if self.guard is not None:
            self.guard.check_rollout(rollout, self.global_step)
        collected = time.perf_counter()

        self.algorithm.progress = self._progress()
        with torch_threads(self._update_threads):
            measures = self.algorithm.update(rollout)
        if self.guard is not None:
            self.guard.check_update(measures, rollout, self.global_step)
        self.collector.publish()
        updated = time.perf_counter()

        steps = count_transitions(rollout)
        self.counters.global_step += steps
        self.counters.iteration += 1
        statistics = self.collector.statistics()
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
        settings, limit = self.cfg.trainer, num_iterations(self.cfg.trainer)
        if signals.received is not None:
            return "interrupted"
        if limit is not None and self.counters.iteration >= limit:
            return "iterations"
        if settings.total_steps is not None and self.global_step >= settings.total_steps:
            return "iterations"
        if settings.max_seconds is not None and self._tell_time() >= settings.max_seconds:
            return "max_seconds"
        return "target" if self._reached_target() else None

    def _reached_target(self) -> bool:
        wanted_return, wanted_success = self.cfg.trainer.target_return, self.cfg.trainer.target_success
        if self.evaluation is None or (wanted_return is None and wanted_success is None):
            return False
        summary = self.evaluation.summary
        enough = wanted_return is None or summary.mean_return >= wanted_return
        return enough and (wanted_success is None or (summary.success_rate or 0.0) >= wanted_success)

    # --- evaluation and checkpoints -------------------------------------------------------------------------------

    def evaluate(self) -> None:
        """Evaluate the policy, log how it did, and save it if it is the best so far."""
        if self.eval_env is None:
            return
        settings = self.cfg.trainer
        video = self.folder.video(self.global_step) if settings.eval_video else None
        result = evaluate(self.policy, self.eval_env, settings.num_eval_episodes, settings.eval_seed, video)
        self.evaluation, self.counters.evaluated_at = result, self.global_step
        self.log.write(self.global_step, result.scalars() | {"time/total_seconds": self._tell_time()})
        for file in result.files:
            self.log.video(self.global_step, file)
        problem = "" if result.problem is None else f" (no video: {result.problem})"
        self.view.say(f"step {self.global_step}: evaluation {result}{problem}")
        if self.counters.best_score is None or result.score > self.counters.best_score:
            self.counters.best_score = result.score
            self.save_checkpoint(best=True)

    def save_checkpoint(self, best: bool = False) -> Path:
        """Write a checkpoint of everything the next iteration depends on."""
        self._saved_at = self.global_step
        self._tell_time()
        self.log.flush()
        return self.folder.save(self.global_step, self._run.state(self.counters), best)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint of the same run, exactly where it was saved."""
        self.counters = self._run.restore(state)
        if state["env"] is None:
            self.view.say("this environment cannot be saved: the run goes on with new episodes")
        for schedule in (self._eval_schedule, self._save_schedule):
            schedule.continue_from(self.global_step)
        self._saved_at = self._resumed_at = self.global_step
        self.folder.forget_after(self.global_step)

    def _tell_time(self) -> float:
        """Bring the clock up to date and return it."""
        self.counters.seconds = time.perf_counter() - self._began
        return self.counters.seconds

    # --- what is shown --------------------------------------------------------------------------------------------

    def _progress(self) -> float:
        """Return the share of the training that is over: by the clock only if nothing else ends it."""
        limit = num_iterations(self.cfg.trainer)
        if limit is None:
            return self._share_of_time() or 0.0
        total = self.cfg.trainer.total_steps
        if total is not None and self.policy.chunk_size > 1:  # a rollout has more steps than decisions
            return min(1.0, max(self.counters.iteration / limit, self.global_step / total))
        return min(1.0, self.counters.iteration / limit)

    def _share_of_time(self) -> float | None:
        seconds = self.cfg.trainer.max_seconds
        return None if seconds is None else min(1.0, self.counters.seconds / seconds)

    def _standing(self) -> Standing:
        return Standing(
            step=self.global_step,
            done=max(self._progress(), self._share_of_time() or 0.0),
            mean_return=self.counters.mean_return,
            success=self.counters.success_rate,
        )
