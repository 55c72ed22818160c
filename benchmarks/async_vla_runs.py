"""One run of a benchmark of asynchronous collection: collect and learn, in one of several ways, and take the time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, astuple, dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import torch

from benchmarks.timing import cores, own_cpu, total_cpu
from embodichain.agents.rl.algo import PPO
from embodichain.agents.rl.buffer import VLABuffer
from embodichain.agents.rl.collector import AsyncCfg, AsyncCollector, SyncCollector
from embodichain.agents.rl.collector.remote_env import RemoteEnv
from embodichain.envs.vec_env import VecEnv
from embodichain.envs.wrappers import GroupedEnv, RemoteGroups, arrange, make_grouped


@dataclass(frozen=True)
class Way:
    """How the stages are arranged."""

    groups: int
    """Groups of envs that take turns."""
    worker: Literal["thread", "process"] | None = None
    """Where collection goes on meanwhile; ``None``: nowhere, it is synchronous."""
    apart: bool = False
    """Whether all is simulated in processes of their own, as many as the case says, side by side."""

    @property
    def kind(self) -> str:
        """What its stage times depend on."""
        return f"{self.groups} apart" if self.apart else str(self.groups)


WAYS = {
    "sync": Way(1),
    "sync, apart": Way(1, apart=True),
    "sync, pipelined": Way(2),
    "async": Way(1, "thread"),
    "async, pipelined": Way(2, "thread"),
    "async, pipelined, process": Way(2, "process"),
    "async, pipelined, apart": Way(2, "thread", apart=True),
}
MEASURES = ("approx_kl", "clip_fraction", "learning_rate", "epochs", "behaviour_kl", "importance_max")
"""Metrics of an update that are written down, where it has them."""


@dataclass(frozen=True)
class Sizes:
    """What all ways have in common; written down beside the figures."""

    num_envs: int
    num_steps: int
    """Decisions per env and rollout."""
    rollouts: int
    """Rollouts that are timed, after one that is not."""
    epochs: int
    """Passes of an update over its rollout."""


class Case(Protocol):
    """What is run."""

    sizes: Sizes
    make_env: Callable[[int], VecEnv]
    """Makes so many environments."""
    make_apart: Callable[[int], VecEnv]
    """Makes so many environments in one of several processes."""
    processes: int
    """How many there are of these."""

    def learner(self, env: VecEnv, seed: int) -> PPO:
        """Return an algorithm with a policy that is the same for every way."""

    def score(self, learner: PPO, statistics: dict[str, float], rewards: float) -> float:
        """Return how well a rollout went."""

    def final_score(self, learner: PPO) -> float | None:
        """Return how well the policy does at the end, if that is measured beside the rollouts."""


@dataclass(frozen=True)
class Stages:
    """Seconds that collection takes for one group of envs alone, when nothing else happens."""

    inference: float
    """Per decision."""
    simulation: float
    """Per decision."""
    rest: float
    """Per rollout: the values of the last observations, and book-keeping."""

    @staticmethod
    def mean(measured: Iterable[Stages]) -> Stages:
        """Return the means of several measurements."""
        return Stages(*map(statistics.mean, zip(*map(astuple, measured), strict=True)))

    def bound(self, groups: int, num_steps: int, rest: float) -> float:
        """Return the least time for a rollout of ``groups`` such groups, which share one policy.

        The policy decides for one group after the other, and a group's own decisions and steps follow each other.
        ``rest`` is that of all envs.
        """
        policy_busy = groups * num_steps * self.inference + self.simulation
        group_busy = (groups - 1) * self.inference + num_steps * (self.inference + self.simulation)
        return max(policy_busy, group_busy) + rest


@dataclass
class Outcome:
    """One run, as it is written down."""

    seconds: float = 0.0
    samples: int = 0
    """Decisions."""
    update: float = 0.0
    """Seconds of an update, on average."""
    simulation: float = 0.0
    """Seconds of simulation per rollout, on average; groups are added up. Not known of another process."""
    inference: float = 0.0
    """Seconds that the policy took to decide, per rollout; known of synchronous collection alone."""
    lag_mean: float = 0.0
    lag_max: float = 0.0
    foreign: float = 0.0
    """Share of the machine that other programs used meanwhile."""
    final: float | None = None
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    """Decisions, seconds and score after every rollout."""
    measures: dict[str, list[float]] = field(default_factory=dict)
    """``MEASURES`` of every update, and the mean lag of its rollout."""
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    """Rollouts and success of evaluations on the way, if there were any."""

    def note(self, measures: Mapping[str, float]) -> None:
        """Add the measures of an update."""
        for name, value in measures.items():
            self.measures.setdefault(name, []).append(float(f"{value:.4g}"))

    def line(self) -> str:
        """Return what is printed when it is done."""
        final = "" if self.final is None else f", final success {self.final:.0%}"
        return f"{self.seconds:.1f} s, update {self.update:.2f} s, simulation {self.simulation:.2f} s{final}"

    def to_dict(self) -> dict[str, Any]:
        """Return what goes into a file."""
        return asdict(self)


class Clock:
    """Adds up the time that environments take for their steps, and a policy for its decisions."""

    def __init__(self, env: VecEnv) -> None:
        self.simulation = self.inference = 0.0
        whole = not isinstance(env, GroupedEnv) or isinstance(env, RemoteGroups)
        for one in [env] if whole else env.groups:  # type: ignore[attr-defined]
            one.step = self._timed(one.step, "simulation")  # type: ignore[method-assign]

    def watch(self, collector: SyncCollector) -> None:
        """Take the time of a collector's decisions, too, until they are there."""
        decide = collector.decide

        def decide_now(*args: Any) -> Any:
            decision = decide(*args)
            if collector.device.type == "cuda":
                torch.cuda.current_stream(collector.device).synchronize()  # the environment would wait for it anyway
            return decision

        collector.decide = self._timed(decide_now, "inference")  # type: ignore[method-assign]

    def reset(self) -> None:
        """Begin at zero."""
        self.simulation = self.inference = 0.0

    def _timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            result = function(*args)
            setattr(self, name, getattr(self, name) + time.perf_counter() - began)
            return result

        return timed


def measure_stages(case: Case, way: Way, rollouts: int = 4) -> Stages:
    """Time the stages of collection for one group of a way, by itself."""
    sizes = case.sizes
    env = _make_apart(case, case.processes // way.groups) if way.apart else case.make_env(sizes.num_envs // way.groups)
    clock = Clock(env)
    learner = case.learner(env, 0)
    collector = SyncCollector(env, learner.policy, learner.device)
    clock.watch(collector)
    collector.reset(seed=0)
    collector.collect(sizes.num_steps)
    clock.reset()
    began = time.perf_counter()
    for _ in range(rollouts):
        collector.collect(sizes.num_steps)
    seconds, decisions = time.perf_counter() - began, rollouts * sizes.num_steps
    env.close()
    rest = (seconds - clock.inference - clock.simulation) / rollouts
    return Stages(clock.inference / decisions, clock.simulation / decisions, rest)


def make_for(case: Case, way: Way) -> Callable[[], VecEnv]:
    """Return what makes the environments of a way."""
    if not way.apart:
        return partial(make_grouped, case.make_env, case.sizes.num_envs, way.groups)
    return partial(_make_apart, case, case.processes, way.groups)


def _make_apart(case: Case, processes: int, groups: int = 1) -> VecEnv:
    """Return the environments of so many of the case's processes."""
    part = partial(case.make_apart, case.sizes.num_envs // case.processes)
    return arrange(RemoteEnv.several([part] * processes), groups)


def run(
    case: Case,
    way: str,
    seed: int,
    rollouts: int | None = None,
    watch: Callable[[Outcome, PPO], None] = lambda outcome, learner: None,
) -> Outcome:
    """Collect and learn, after one time that does not count; ``watch`` is called after every rollout."""
    count, sizes = rollouts or case.sizes.rollouts, case.sizes
    env = make_for(case, WAYS[way])()
    clock = Clock(env)
    learner = case.learner(env, seed)
    collector = _collector(case, env, learner, way, seed)
    if isinstance(collector, SyncCollector):
        clock.watch(collector)
    collector.reset(seed=seed)
    learner.update(collector.collect(sizes.num_steps))
    if isinstance(collector, AsyncCollector):
        with collector.hold():  # what was collected ahead counts for nobody
            collector.buffer.clear()
    outcome, updating, lags = Outcome(), 0.0, []
    clock.reset()
    own, total, began = own_cpu(), total_cpu(), time.perf_counter()
    for number in range(1, count + 1):
        rollout = collector.collect(sizes.num_steps)
        statistics = collector.statistics()
        lags.append((statistics.get("async/lag_mean", 0.0), statistics.get("async/lag_max", 0.0)))
        score = case.score(learner, statistics, float(rollout["reward"].mean()))
        update_began = time.perf_counter()
        metrics = learner.update(rollout)
        updating += time.perf_counter() - update_began
        collector.publish()
        outcome.curve.append((number * rollout.numel(), time.perf_counter() - began, score))
        outcome.note({name: metrics[name] for name in MEASURES if name in metrics} | {"lag": lags[-1][0]})
        watch(outcome, learner)
    outcome.seconds = time.perf_counter() - began
    others = (total_cpu() - total) - (own_cpu() - own)
    outcome.foreign = max(0.0, others) / (outcome.seconds * cores())
    collector.stop()
    env.close()
    outcome.samples = count * sizes.num_envs * sizes.num_steps
    outcome.update = updating / count
    outcome.simulation, outcome.inference = clock.simulation / count, clock.inference / count
    outcome.lag_mean, outcome.lag_max = sum(mean for mean, _ in lags) / count, max(largest for _, largest in lags)
    outcome.final = case.final_score(learner)
    return outcome


def _collector(case: Case, env: VecEnv, learner: PPO, way: str, seed: int) -> SyncCollector | AsyncCollector:
    groups, worker = WAYS[way].groups, WAYS[way].worker
    sizes = case.sizes
    if worker is None:
        return SyncCollector(env, learner.policy, learner.device, pipeline_stages=groups)
    settings = {"worker": worker, "num_steps": sizes.num_steps, "pipeline_stages": groups}
    cfg = AsyncCfg.from_dict({**settings, "max_policy_lag": 1, "seed": seed, "kl_rows": 0})
    buffer = VLABuffer(2 * sizes.num_envs * sizes.num_steps, learner.device)
    source = env if worker == "thread" else make_for(case, WAYS[way])
    return AsyncCollector(source, learner.policy, buffer, learner.device, cfg=cfg)
