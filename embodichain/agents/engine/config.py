"""Settings of the data engine, and the names of what can act in its environments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from embodichain.agents.processes.ray_backend import PlacementCfg
from embodichain.config import Config, Count, Field, Fraction, NotNegative, Positive, Shorthand, configclass, merge
from embodichain.envs.multi_task import MULTI_TASK, TaskEntry, shared_out, task_entries
from embodichain.errors import ConfigError, nearest

ActorFactory = Callable[..., Any]
ACTORS: dict[str, ActorFactory | str] = {
    "expert": "embodichain.agents.engine.sources:ExpertActor",
    "random": "embodichain.agents.engine.sources:RandomActor",
    "policy": "embodichain.agents.rl.published:StreamPolicy",
    "dagger": "embodichain.agents.engine.dagger:DaggerActor",
}
"""What chooses actions, by name. A string is an entry point of this package, imported by the worker that needs it."""


def register_actor(name: str, factory: ActorFactory) -> None:
    """Make ``{"source": name}`` a valid ``action_config``; call this in a module of ``trusted_modules``.

    A worker calls ``factory(env, path=..., deterministic=..., seed=..., trusted_modules=...)`` to get an ``Actor``.
    """
    if name == "dataset" or isinstance(ACTORS.get(name), str):
        raise ConfigError(f"source: the name {name!r} is taken", "register_actor")
    ACTORS[name] = factory


@configclass
class ExpertShareCfg(Config):
    """The share of decisions that the expert takes in the place of the policy, as ``dagger`` goes on."""

    start: Fraction = 0.0
    """The share at first; for ``constant`` it stays."""
    schedule: Literal["constant", "linear", "exponential"] = "constant"
    """``linear`` reaches ``end`` after ``over``; ``exponential`` comes nearer to it by the factor ``decay`` in every
    ``over``."""
    end: Fraction = 0.0
    """The share in the end."""
    over: Count = 1000
    """How long that takes, in ``unit``."""
    unit: Literal["episodes", "steps", "updates"] = "episodes"
    """What is counted: episodes or environment steps of all workers, or updates of the policy that acts."""
    decay: Fraction = 0.5
    """With ``exponential``: what is left of the distance to ``end`` after ``over``."""

    def at(self, count: float) -> float:
        """Return the share after so many episodes, steps or updates."""
        if self.schedule == "constant":
            return self.start
        passed = max(count, 0.0) / self.over
        left = 1.0 - min(passed, 1.0) if self.schedule == "linear" else self.decay**passed
        return self.end + (self.start - self.end) * left


@configclass
class ActionSourceCfg(Config):
    """Where the episodes come from: the ``action_config`` of an engine, checked."""

    source: str = "expert"
    """``expert`` (the task's own), ``random``, ``policy`` (a checkpoint), ``dagger`` (a policy acts, the expert labels
    every state), ``dataset`` (a recorded folder), or a name given to ``register_actor``."""
    path: str | None = None
    """The checkpoint of ``policy``, or the folder of ``dataset``."""
    only_success: bool = False
    """Keep episodes out that did not solve the task."""
    terminate_on_success: bool | None = None
    """Whether success ends an episode of a task. Default: episodes of ``expert`` and ``dagger`` run to the time limit;
    for other sources the ``gym_config`` decides."""
    noise_std: NotNegative = 0.0
    """Standard deviation of Gaussian noise on continuous actions. What is stored is the action before the noise: the
    episodes then show how to recover."""
    deterministic: bool = False
    """Whether a policy acts by its mean instead of a sample."""
    segments: bool = False
    """With ``expert`` and ``dagger``: store what the expert's actions are part of (reach, grasp, move, place ...) as
    ``segment``, which datasets can weigh."""
    policy: str | None = None
    """With ``dagger``: the run or checkpoint of the policy that acts at first. None: the expert acts alone until
    ``engine.publish(policy)``."""
    expert_share: Annotated[ExpertShareCfg, Shorthand("start")] = ExpertShareCfg()
    """With ``dagger``: the share of decisions that the expert takes; a number, or a schedule."""
    expert_acts_for: Literal["decision", "episode"] = "decision"
    """With ``dagger``: what is drawn by that share: who takes the next decision (a step, or a chunk of a policy that
    decides on chunks), or who acts in the whole next episode."""

    @classmethod
    def of(cls, action_config: dict[str, Any], trusted_modules: Sequence[str] = ()) -> ActionSourceCfg:
        """Check an ``action_config``; a trusted module, which only workers import, may register further names."""
        cfg = cls.from_dict(action_config, source="action_config")
        problems = []
        names = [*ACTORS, "dataset"]
        if cfg.source not in names and not trusted_modules:
            problems.append(f"source: unknown name {cfg.source!r}.{nearest(cfg.source, names)}")
        needed = {"policy": "checkpoint", "dataset": "folder"}.get(cfg.source)
        if needed and cfg.path is None:
            problems.append(f"path: source {cfg.source!r} needs the path of its {needed}")
        if cfg.source == "dagger":
            if cfg.only_success:
                problems.append("only_success: dagger is for episodes in which the policy fails; expected false")
            if cfg.path is not None:
                problems.append(f"path: dagger takes its policy from {{'policy': {cfg.path!r}}}")
        else:
            usual = cls()
            given = [n for n in ("policy", "expert_share", "expert_acts_for") if getattr(cfg, n) != getattr(usual, n)]
            problems += [f"{name}: only source 'dagger' has it, got source {cfg.source!r}" for name in given]
        if cfg.segments and cfg.source not in ("expert", "dagger"):
            problems.append(f"segments: only experts mark them, got source {cfg.source!r}")
        if cfg.source == "dataset" and cfg.noise_std:
            problems.append("noise_std: recorded episodes are stored as they are; expected 0")
        if problems:
            raise ConfigError(problems, "action_config")
        return cfg


@configclass
class OnlineDataEngineCfg(Config):
    """Settings of an :class:`OnlineDataEngine`."""

    buffer_size: Count = 16
    """Number of episodes in the shared buffer; ideally a multiple of ``num_envs * num_workers``."""
    max_episode_steps: Count | None = None
    """Length of a row: the longest episode there is room for, and the longest chunk there can be; None takes the
    environment's (1000 where it has no time limit)."""
    state_dim: Count | None = None
    """Expected size of the robot state (``robot/qpos``, or ``state``); None takes the environment's."""
    buffer_device: str = "cpu"
    """Where batches come from: ``cpu``, or ``cuda`` to mirror the buffer on the GPU."""
    gym_config: dict[str, Any] | list[Any] = {}
    """The environment: the parsed ``gym_config.json`` of a task, or ``id``, ``num_envs``, ``kwargs`` of any other. Or
    several in a list, each with a ``weight``, and a ``task`` in words: see :func:`task_entries`."""
    task_observations: Literal["same", "common", "padded"] = "same"
    """With several tasks: whether they have to observe the same, or only what all of them do is kept, or zeros fill up
    what is missing or shorter, in observations and actions."""
    action_config: dict[str, Any] = {}
    """Where episodes come from; see :class:`ActionSourceCfg`."""
    refill_threshold: Count = 50
    """Samples per stored episode: after ``refill_threshold * buffer_size`` samples the buffer is written again."""
    refill: Literal["threshold", "continuous"] = "threshold"
    """``threshold`` rewrites the whole buffer; ``continuous`` writes one episode per ``refill_threshold`` samples."""
    max_samples_per_episode: Positive | None = None
    """With ``continuous``: readers wait rather than draw more samples per written episode; None: they never wait."""
    num_workers: Annotated[int, Field(ge=1, le=4096)] = 1
    """Number of simulation processes; on a Ray cluster the most there are, as nodes come and go."""
    workers: Literal["local", "ray"] = "local"
    """Where they run: on this machine, or anywhere in a Ray cluster (extra ``ray``)."""
    address: str | None = None
    """With ``ray``: the cluster, as ``HOST:PORT`` or ``auto``; None starts one on this machine, for itself alone."""
    placement: PlacementCfg = PlacementCfg()
    """With ``ray``: what a worker needs of a node."""
    seed: Annotated[int, Field(ge=0, lt=2**62)] = 0
    """Seed of the simulation and of the draws."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """How often each worker is replaced after a crash, a hang or a NaN before the engine gives up;
    ten minutes without a fault give the budget back."""
    start_timeout: Positive = 120.0
    """Seconds a worker may take to build its environment, and then to deliver its first episode."""
    worker_timeout: Positive = 60.0
    """Seconds without a sign of life after which a worker counts as hung, and after which the stream
    has stalled if episodes end, or should have, but none that is due is written."""
    trusted_modules: list[str] = []
    """Modules (names or .py files) that workers import first: those that register tasks, environments and actors.
    In a file they have to be allowed on the command line as well, with ``--trust``."""
    progress: bool = True
    """Whether ``start`` shows a progress bar (in a terminal only)."""

    def tasks(self) -> list[TaskEntry]:
        """Return the tasks of a list, or of the environment ``MultiTask``; nothing where there is one environment."""
        given = self.gym_config
        if isinstance(given, list):
            return task_entries(given) if given else []
        if given.get("id") != MULTI_TASK:
            return []
        common = {name: value for name, value in given.items() if name not in ("id", "num_envs", "kwargs")}
        entries, _ = shared_out(given.get("kwargs", {}), int(given.get("num_envs", 1)))
        return [replace(entry, gym_config=merge(entry.gym_config, common)) for entry in entries]

    @property
    def agreement(self) -> Literal["same", "common", "padded"]:
        """What is observed of tasks that differ."""
        if isinstance(self.gym_config, list) or self.gym_config.get("id") != MULTI_TASK:
            return self.task_observations
        return self.gym_config.get("kwargs", {}).get("observations", self.task_observations)

    def check(self) -> ActionSourceCfg:
        """Raise ConfigError for settings that contradict each other; return the checked ``action_config``."""
        action = ActionSourceCfg.of(self.action_config, self.trusted_modules)
        problems = []
        if not self.gym_config and action.source != "dataset":
            problems.append(f"gym_config: expected the config of an environment, got {self.gym_config}")
        entries = []
        try:
            entries = self.tasks()
        except ConfigError as error:
            problems += error.problems
        rows, workers = self.buffer_size, self.num_workers if self.workers == "local" else 1
        if len(entries) > 1 and rows < len(entries) * workers:
            needed = f"at least one row per task and worker ({len(entries)} x {workers})"
            problems.append(f"buffer_size: expected {needed}, got {rows}")
        if self.workers == "local":
            cluster = {"address": (self.address, None), "placement": (self.placement, PlacementCfg())}
            for name, (given, default) in cluster.items():
                if given != default:
                    problems.append(f'{name}: only workers="ray" has a cluster; got {given!r}')
        if self.buffer_size < self.num_workers and self.workers == "local":
            problems.append(
                f"buffer_size: expected at least one row per worker ({self.num_workers}), got {self.buffer_size}"
            )
        if self.max_samples_per_episode is not None:
            if self.refill != "continuous":
                problems.append('max_samples_per_episode: only refill="continuous" makes readers wait')
            if self.max_samples_per_episode < self.refill_threshold:
                problems.append(
                    f"max_samples_per_episode: cannot be satisfied below refill_threshold ({self.refill_threshold}), "
                    f"at which workers write the next episode; got {self.max_samples_per_episode}"
                )
        if problems:
            raise ConfigError(problems, "OnlineDataEngineCfg")
        return action
