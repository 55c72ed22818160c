"""The training loop for synchronous and asynchronous collectors: collect, update, log, evaluate, save."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from tensordict import TensorDictBase

from embodichain.agents.rl.algo.base import BaseAlgorithm
from embodichain.agents.rl.buffer.rollout_buffer import count_transitions
from embodichain.agents.rl.checkpoint import NanGuard, load_weights, reading_checkpoint
from embodichain.agents.rl.collector.async_collector import AsyncCollector
from embodichain.agents.rl.collector.config import AsyncCfg
from embodichain.agents.rl.collector.sync_collector import SyncCollector
from embodichain.agents.rl.config import TrainCfg, TrainerCfg, num_iterations
from embodichain.agents.rl.run_loop import Counters, RunLoop, Scalars, StopReason, TrainingResult
from embodichain.agents.rl.runs import RunFolder, StopSignals
from embodichain.agents.rl.utils.distributed import check_equal
from embodichain.agents.rl.utils.tensordicts import space_to_data
from embodichain.envs.vec_env import VecEnv
from embodichain.errors import CheckpointError
from embodichain.utils.torch_runtime import (
    get_random_state,
    seed_everything,
    set_random_state,
    torch_threads,
    update_threads,
)

_EXTREMES = {"async/lag_min": min, "async/lag_max": max}
_TOTALS = ("episode/count", "async/restarts", "async/workers")


class Trainer(RunLoop):
    """Trains one policy with one algorithm in one vectorised environment."""

    cfg: TrainCfg

    def __init__(
        self,
        cfg: TrainCfg,
        env: VecEnv,
        algorithm: BaseAlgorithm,
        collector: SyncCollector | AsyncCollector,
        folder: RunFolder,
        eval_env: VecEnv | None = None,
        console: Console | None = None,
    ) -> None:
        """Create a trainer; ``cfg`` is completed by ``config.complete``, ``eval_env`` is only needed for evaluation."""
        algorithm.check_num_envs(env.num_envs)
        settings, ranks = cfg.trainer, algorithm.ranks
        super().__init__(cfg, algorithm.policy, folder, eval_env, console, ranks)
        self.env, self.algorithm, self.collector = env, algorithm, collector
        owned = env if isinstance(collector, SyncCollector) else None  # an asynchronous collector steps it at any time
        failure = folder.path / (f"failure_rank_{ranks.rank}" if ranks.rank else "failure")
        self.guard = NanGuard(owned, self.policy, failure) if settings.nan_guard else None
        self._update_threads = settings.update_threads or update_threads(self.policy, algorithm.cfg.batch_size)

    def train(self) -> TrainingResult:
        """Train until a stop criterion is met or a signal interrupts the run, then save a checkpoint."""
        settings = self.cfg.trainer
        self._began = time.perf_counter() - self.counters.seconds
        with self.ranks.together("locking the folder of the run"):
            if self.ranks.is_first:
                self.folder.lock.acquire()
        try:
            with StopSignals(announce=self.ranks.is_first) as signals, self.view:
                if self._resumed_at is None:
                    self.collector.reset(seed=self.ranks.seed(settings.seed))
                    self.save_checkpoint()
                while (reason := self._stop_reason(signals)) is None:
                    began, before = time.perf_counter(), self.global_step
                    with self.ranks.together("collecting"):
                        rollout = self._collect()
                    collected = time.perf_counter()
                    self.algorithm.progress = self._progress()
                    self.algorithm.next_progress = self._progress(ahead=1)
                    with torch_threads(self._update_threads):
                        measures = self.algorithm.update(rollout)
                    if self.guard is not None:
                        self.guard.check_update(measures, rollout, before)
                    check_equal(self.ranks, self.policy, f"after the update at step {before}")
                    self.collector.publish()
                    self._log_iteration(rollout, measures, began, collected)
                    self._evaluate_and_save(before)
                self._finish(reason)
        finally:
            self.collector.stop()
            self._close_log()
            self.folder.lock.release()
        return self._result(reason)

    def _stop_reason(self, signals: StopSignals) -> StopReason | None:
        """Return why training stops, or ``None``: an interrupt on any rank, or a stop criterion on the first rank."""
        self._update_clock()
        own = "interrupted" if signals.received is not None else self._criterion_met()
        answers = self.ranks.exchange([own, self.counters.seconds])
        self.counters.seconds = answers[0][1]
        return "interrupted" if any(reason == "interrupted" for reason, _ in answers) else answers[0][0]

    def _criterion_met(self) -> StopReason | None:
        """Return which limit or target of the config is reached, or ``None``."""
        settings, now = self.cfg.trainer, self.counters
        if settings.iterations is not None and now.iteration >= settings.iterations:
            return "iterations"
        if settings.total_steps is not None and now.global_step >= settings.total_steps:
            return "total_steps"
        return self.limit_met()

    def _progress(self, ahead: int = 0) -> float:
        """Return the fraction of training done after ``ahead`` more iterations; of time if only that is limited."""
        settings, now = self.cfg.trainer, self.counters
        limit = num_iterations(settings, self.ranks.count, now.iteration, now.global_step)
        if limit is None:
            return self._share_of_time()
        share = (now.iteration + ahead) / limit
        if settings.total_steps is not None and self.policy.chunk_size > 1:  # a rollout has more steps than decisions
            share = max(share, now.global_step / settings.total_steps)
        return min(1.0, share)

    def _collect(self) -> TensorDictBase:
        """Return one rollout ``[num_envs, num_steps]`` without NaN or infinity."""
        if self.guard is None:
            return self.collector.collect(self.cfg.trainer.buffer_size)
        self.guard.before_rollout()
        rollout = self.collector.collect(self.cfg.trainer.buffer_size)
        self.guard.check_rollout(rollout, self.global_step)
        return rollout

    def _log_iteration(self, rollout: TensorDictBase, measures: Scalars, began: float, collected: float) -> None:
        """Advance the counters, write the log and refresh the progress display."""
        updated = time.perf_counter()
        rows = self.ranks.exchange([count_transitions(rollout), dict(self.collector.statistics())])
        steps, statistics = sum(row[0] for row in rows), merge_statistics([row[1] for row in rows])
        self.counters.global_step += steps
        self.counters.iteration += 1
        times = {
            "time/collect_seconds": collected - began,
            "time/update_seconds": updated - collected,
            "time/steps_per_second": steps / (updated - began),
            "time/total_seconds": self._update_clock(),
        }
        if self.ranks.is_first:
            self.log.write(self.global_step, statistics | {f"update/{k}": v for k, v in measures.items()} | times)
        self.counters.add_episodes(statistics)
        share, now = max(self._progress(), self._share_of_time()), self.counters
        success = now.shown_success(self.env.num_envs * len(rows))
        self.view.show(self.global_step, share, now.mean_return, success)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint of this run; training then continues as if it had not stopped.

        Environments start new episodes if their state cannot be saved, or if the number of ranks or the way rollouts
        are collected has changed. Random generators are restored last, as the other steps may draw from them.
        """
        with self.ranks.together("resuming"), reading_checkpoint("the checkpoint"):
            ranks, self.counters = self.ranks, Counters.from_data(state["trainer"])
            same_ranks, change = saved_ranks(state) == ranks.count, collector_change(state, self.cfg.trainer)
            own = state if ranks.is_first or not same_ranks else state["other_ranks"][ranks.rank - 1]
            env_state = own["env"] if same_ranks and change is None else None
            if env_state is not None and env_state.batch_size[0] != self.env.num_envs:
                raise CheckpointError(
                    f"the checkpoint holds {env_state.batch_size[0]} environments, this run has {self.env.num_envs}: "
                    "resume it with as many"
                )
            load_weights(self.policy, state["policy"], "the checkpoint")
            self.algorithm.load_state_dict(state["algorithm"])
            if same_ranks and change is None:
                self.collector.load_state_dict(own["collector"], env_state)
            later_seed = ranks.seed(self.cfg.trainer.seed + self.counters.iteration)  # not the first episodes again
            if env_state is None:
                self.collector.reset(seed=later_seed)
            else:
                self.collector.seed_recovery(later_seed)
            if same_ranks:
                set_random_state(own["random"])
            else:
                seed_everything(later_seed)
        message = change or resume_message(state, self.cfg.trainer.collector, self.ranks.count)
        if message is not None:
            self.view.print(message)
        self._saved_at = self._resumed_at = self.global_step
        if self.ranks.is_first:
            self.folder.forget_after(self.global_step)

    def _state(self) -> dict[str, Any] | None:
        """Return the content of a checkpoint, on the first rank; see ``checkpoint.py``."""
        with self.collector.hold():
            env, collector = self.collector.env_state(), self.collector.state_dict()  # env_state() may replace the env
            of_ranks = self.ranks.to_first({"collector": collector, "env": env, "random": get_random_state()})
            if not of_ranks:
                return None
            spaces = {"observation": self.env.observation_space, "action": self.env.action_space}
            return {
                "config": self.cfg.to_dict(),
                "spaces": {name: space_to_data(space) for name, space in spaces.items()},
                "policy": self.policy.state_dict(),
                "algorithm": self.algorithm.state_dict(),
                **of_ranks[0],
                "other_ranks": of_ranks[1:],
                "trainer": self.counters.to_data(),
            }


def saved_ranks(state: Mapping[str, Any]) -> int:
    """Return the number of ranks that saved a checkpoint."""
    return 1 + len(state.get("other_ranks", ()))


def collector_change(state: Mapping[str, Any], trainer: TrainerCfg) -> str | None:
    """Return why this run cannot restore the collector's state of a checkpoint; ``None`` if it can."""
    collector, saved, was_async = state["collector"], state["config"]["trainer"], "queue" in state["collector"]
    what = None
    if collector and was_async != trainer.collects_async:
        modes = ("synchronously", "asynchronously")
        what = f"saved while collecting {modes[was_async]}, resumed {modes[trainer.collects_async]}"
    elif was_async and saved["buffer_size"] != trainer.buffer_size:
        what = f"saved with rollouts of {saved['buffer_size']} steps, resumed with {trainer.buffer_size}"
    elif was_async and saved["collector"]["max_policy_lag"] > trainer.collector.max_policy_lag:
        what = f"saved with a larger max_policy_lag ({saved['collector']['max_policy_lag']})"
    return None if what is None else f"{what}: all environments begin new episodes"


def resume_message(state: Mapping[str, Any], collector: AsyncCfg, ranks: int) -> str | None:
    """Return a message if a resumed run starts new episodes; ``None`` if all episodes continue."""
    if saved_ranks(state) != ranks:
        return f"saved by {saved_ranks(state)} rank(s), resumed by {ranks}: all environments begin new episodes"
    if state["env"] is not None:
        return None
    if collector.worker == "ray":
        return "environments in a cluster are not saved: the run continues with new episodes"
    return "this environment cannot be saved: the run continues with new episodes"


def merge_statistics(rows: Sequence[Scalars]) -> dict[str, float]:
    """Merge the statistics of all ranks: sums of counts, means of all others (``episode/...`` weighted by episodes)."""
    if len(rows) == 1:
        return dict(rows[0])
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
