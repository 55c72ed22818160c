"""The training loop: collect, update, log, evaluate, save; the same for synchronous and asynchronous collectors."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from tensordict import TensorDictBase

from embodichain.agents.rl.algo.base import BaseAlgorithm
from embodichain.agents.rl.buffer.rollout_buffer import count_transitions
from embodichain.agents.rl.checkpoint import NanGuard, load_weights, reading_checkpoint
from embodichain.agents.rl.collector.async_collector import AsyncCollector
from embodichain.agents.rl.collector.config import AsyncCfg
from embodichain.agents.rl.collector.sync_collector import SyncCollector
from embodichain.agents.rl.config import TrainCfg, TrainerCfg, num_iterations
from embodichain.agents.rl.evaluation import Evaluation, evaluate
from embodichain.agents.rl.runs import RunFolder, RunLog, StopSignals
from embodichain.agents.rl.utils.distributed import check_equal
from embodichain.agents.rl.utils.tensordicts import space_to_data
from embodichain.envs.vec_env import VecEnv
from embodichain.errors import CheckpointError
from embodichain.utils.console import ProgressView
from embodichain.utils.torch_runtime import (
    get_random_state,
    seed_everything,
    set_random_state,
    torch_threads,
    update_threads,
)

Scalars = Mapping[str, float]
StopReason = Literal["iterations", "total_steps", "max_seconds", "target", "interrupted"]
_EXTREMES = {"async/lag_min": min, "async/lag_max": max}
_TOTALS = ("episode/count", "async/restarts", "async/workers")
_RECENT = 100
"""Episodes over which recent returns are averaged."""


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
    """Why it ended."""
    evaluation: Evaluation | None
    """The last evaluation."""


@dataclass
class Counters:
    """How far a run has come."""

    global_step: int = 0
    """Environment transitions of all envs."""
    iteration: int = 0
    """Rollouts learned from."""
    seconds: float = 0.0
    """Time spent training, evaluations and checkpoints included."""
    best_score: tuple[float, float] | None = None
    """Score of the best evaluation."""
    evaluated_at: int = -1
    """Step of the last evaluation."""
    evaluated: tuple[float, float | None] | None = None
    """Mean return of the last evaluation, and its success rate if it is known."""
    recent: deque[tuple[int, float, float | None]] = field(default_factory=deque)
    """Of recent rollouts: number of episodes that ended, their mean return, and their success rate if it is known."""

    @property
    def mean_return(self) -> float | None:
        """Mean return of recent episodes."""
        return _weighted([(count, value) for count, value, _ in self.recent])

    @property
    def success_rate(self) -> float | None:
        """Share of recent episodes that ended in success, where the task reports it."""
        return _weighted([(count, value) for count, _, value in self.recent if value is not None])

    def add_episodes(self, statistics: Scalars) -> None:
        """Take in the episodes that ended in a rollout."""
        if "episode/return" not in statistics:
            return
        count = int(statistics["episode/count"])
        self.recent.append((count, statistics["episode/return"], statistics.get("episode/success")))
        while sum(number for number, *_ in self.recent) - self.recent[0][0] >= _RECENT:
            self.recent.popleft()

    def to_data(self) -> dict[str, Any]:
        """Return plain data."""
        return {**vars(self), "recent": list(self.recent)}

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> Counters:
        """Return the counters that ``to_data`` was called on."""
        counters = Counters(**{**data, "recent": deque(data["recent"])})
        whole = {name: getattr(counters, name) for name in ("global_step", "iteration", "evaluated_at")}
        wrong = next((name for name, value in whole.items() if type(value) is not int or value < -1), None)
        if wrong is not None or not isinstance(counters.seconds, float | int):
            raise CheckpointError(f"the checkpoint has no proper {wrong or 'seconds'} in 'trainer': {dict(data)}")
        return counters


class Trainer:
    """Trains one policy with one algorithm in one vectorised environment."""

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
        """Prepare a run; ``cfg`` is complete (see ``config.complete``), ``eval_env`` is needed to evaluate."""
        algorithm.check_num_envs(env.num_envs)
        settings, ranks = cfg.trainer, algorithm.ranks
        self.cfg, self.env, self.eval_env, self.folder = cfg, env, eval_env, folder
        self.algorithm, self.policy, self.ranks = algorithm, algorithm.policy, ranks
        self.collector = collector
        owned = env if isinstance(collector, SyncCollector) else None  # other collectors step it at any time
        failure = folder.path / (f"failure_rank_{ranks.rank}" if ranks.rank else "failure")
        self.guard = NanGuard(owned, self.policy, failure) if settings.nan_guard else None
        self.view = ProgressView(settings.exp_name, console)
        self.counters = Counters()
        self.evaluation: Evaluation | None = None
        self._told_video_problem = False
        self._update_threads = settings.update_threads or update_threads(self.policy, algorithm.cfg.batch_size)
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
        """Where the first rank writes scalars; opened when it is first used."""
        if self._log is None:
            evaluated = self.counters.evaluated_at == self._resumed_at
            self._log = RunLog(self.folder, self.cfg, self._resumed_at, evaluated)
        return self._log

    def train(self) -> TrainingResult:
        """Train until a stop criterion is met or a signal interrupts the run, and save the state at the end."""
        settings = self.cfg.trainer
        self._began = time.perf_counter() - self.counters.seconds
        with self.ranks.together("locking the folder of the run"):
            if self.ranks.is_first:
                self.folder.lock.acquire()
        try:
            with StopSignals(aloud=self.ranks.is_first) as signals, self.view:
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
                    if crossed(settings.eval_freq, before, self.global_step):
                        self.evaluate()
                    if crossed(settings.save_freq, before, self.global_step) and self._saved_at != self.global_step:
                        self.save_checkpoint()
                if reason != "interrupted" and self.counters.evaluated_at != self.global_step:
                    self.evaluate()
                if self._saved_at != self.global_step:
                    self.save_checkpoint()
        finally:
            self.collector.stop()
            if self._log is not None:
                self._log.close()
                self._log = None
            self.folder.lock.release()
        now = self.counters
        return TrainingResult(self.folder.path, now.global_step, now.iteration, now.seconds, reason, self.evaluation)

    def _stop_reason(self, signals: StopSignals) -> StopReason | None:
        """Return why training ends here: any rank was interrupted, or the first one's clock and evaluations decide."""
        self._update_clock()
        own = "interrupted" if signals.received is not None else self._criterion_met()
        answers = self.ranks.exchange([own, self.counters.seconds])
        self.counters.seconds = answers[0][1]
        return "interrupted" if any(reason == "interrupted" for reason, _ in answers) else answers[0][0]

    def _criterion_met(self) -> StopReason | None:
        """Return which of the config's limits or targets is reached."""
        settings, now = self.cfg.trainer, self.counters
        if settings.iterations is not None and now.iteration >= settings.iterations:
            return "iterations"
        if settings.total_steps is not None and now.global_step >= settings.total_steps:
            return "total_steps"
        if settings.max_seconds is not None and now.seconds >= settings.max_seconds:
            return "max_seconds"
        wanted_return, wanted_success = settings.target_return, settings.target_success
        if now.evaluated is None or (wanted_return is None and wanted_success is None):
            return None
        mean_return, success_rate = now.evaluated
        enough = wanted_return is None or mean_return >= wanted_return
        return "target" if enough and (success_rate or 0.0) >= (wanted_success or 0.0) else None

    def _progress(self, ahead: int = 0) -> float:
        """Return the share of the training that is over: by the clock only if nothing else ends it; or the share that
        will be, after the iterations ``ahead``."""
        settings, now = self.cfg.trainer, self.counters
        limit = num_iterations(settings, self.ranks.count, now.iteration, now.global_step)
        if limit is None:
            return self._share_of_time()
        share = (now.iteration + ahead) / limit
        if settings.total_steps is not None and self.policy.chunk_size > 1:  # a rollout has more steps than decisions
            share = max(share, now.global_step / settings.total_steps)
        return min(1.0, share)

    def _share_of_time(self) -> float:
        """Return the share of the time that is over, where time is limited."""
        seconds = self.cfg.trainer.max_seconds
        return 0.0 if seconds is None else min(1.0, self.counters.seconds / seconds)

    def _collect(self) -> TensorDictBase:
        """Return one rollout ``[num_envs, num_steps]`` without NaN or infinity."""
        if self.guard is None:
            return self.collector.collect(self.cfg.trainer.buffer_size)
        self.guard.before_rollout()
        rollout = self.collector.collect(self.cfg.trainer.buffer_size)
        self.guard.check_rollout(rollout, self.global_step)
        return rollout

    def _log_iteration(self, rollout: TensorDictBase, measures: Scalars, began: float, collected: float) -> None:
        """Count, log and show one iteration."""
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
        self.view.show(self.global_step, share, now.mean_return, now.success_rate)

    def _update_clock(self) -> float:
        """Bring the time spent training up to date and return it."""
        self.counters.seconds = time.perf_counter() - self._began
        return self.counters.seconds

    def evaluate(self) -> None:
        """Evaluate the policy, on the first rank; log how it did, and save it if it is the best so far."""
        settings, now = self.cfg.trainer, self.counters
        is_best: bool | None = None
        with self.ranks.together("evaluating"):
            if self.eval_env is not None:
                video = (
                    self.folder.path / "videos" / f"step_{self.global_step:012d}.mp4" if settings.eval_video else None
                )
                episodes, seed, best = settings.num_eval_episodes, settings.eval_seed, settings.eval_deterministic
                result = evaluate(self.policy, self.eval_env, episodes, seed, video, deterministic=best)
                self.evaluation = result
                now.evaluated = result.summary.mean_return, result.summary.success_rate
                self.log.write(self.global_step, result.scalars() | {"time/total_seconds": self._update_clock()})
                for file in result.files:
                    self.log.video(self.global_step, file)
                self.view.print(f"step {self.global_step}: evaluation {result}")
                self._tell_video_problem(result.problem)
                is_best = now.best_score is None or result.score > now.best_score
                now.best_score = result.score if is_best else now.best_score
        is_best = self.ranks.from_first(is_best)
        if is_best is not None:
            now.evaluated_at = self.global_step
            self._saved_at = -1  # what was saved at this step does not know of it
        if is_best:
            self.save_checkpoint(best=True)

    def _tell_video_problem(self, problem: str | None) -> None:
        """Say once in a run why evaluations are not filmed, in what a person can act on: the reason and the remedy."""
        if problem is not None and not self._told_video_problem:
            self._told_video_problem = True
            first, *_, last = (problem.splitlines() or [""]) * 2
            self.view.print(f"no video: {first if first == last else f'{first} {last}'}")

    def save_checkpoint(self, best: bool = False) -> None:
        """Write a checkpoint of everything the next iteration depends on, on all ranks."""
        self._saved_at = self.global_step
        self._update_clock()
        if self.ranks.is_first:
            self.log.flush()
        state = self._state()
        with self.ranks.together("saving a checkpoint"):
            if state is not None:
                self.folder.save(self.global_step, state, best)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint of the same run, exactly where it was saved if as many ranks saved it.

        An environment that cannot be saved begins new episodes, and so do all if the number of ranks is another one or
        rollouts are collected in another way.
        The random generators come last, as everything else may draw from them.
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
            later_seed = ranks.seed(self.cfg.trainer.seed + self.counters.iteration)  # not the episodes of the start
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
            env, collector = self.collector.env_state(), self.collector.state_dict()  # the former may get a new env
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
    """Return how many ranks a checkpoint was saved by."""
    return 1 + len(state.get("other_ranks", ()))


def collector_change(state: Mapping[str, Any], trainer: TrainerCfg) -> str | None:
    """Return why the environments and rollouts in a checkpoint do not fit the collector of this run, if so."""
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
    """Return what a person has to know about the episodes of a resumed run; ``None`` if all of them continue."""
    if saved_ranks(state) != ranks:
        return f"saved by {saved_ranks(state)} rank(s), resumed by {ranks}: all environments begin new episodes"
    if state["env"] is not None:
        return None
    if collector.worker == "ray":
        return "environments in a cluster are not saved: the run continues with new episodes"
    return "this environment cannot be saved: the run continues with new episodes"


def crossed(frequency: int, before: int, step: int) -> bool:
    """Tell whether a multiple of ``frequency`` lies behind one step and not behind a later one; 0 has none."""
    return frequency > 0 and step // frequency > before // frequency


def merge_statistics(rows: Sequence[Scalars]) -> dict[str, float]:
    """Return averages over ranks: those of episodes by the number of episodes, others where a rank has them."""
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


def _weighted(counted: list[tuple[int, float]]) -> float | None:
    total = sum(count for count, _ in counted)
    return sum(count * value for count, value in counted) / total if total else None
