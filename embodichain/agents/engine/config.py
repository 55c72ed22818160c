"""Configuration of the data engine, and the registry of actors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
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
"""Actor factories by name. A string is an entry point of this package, imported only by the worker that needs it."""


def register_actor(name: str, factory: ActorFactory) -> None:
    """Make ``{"source": name}`` a valid ``action_config``; call this in a module of ``trusted_modules``.

    A worker calls ``factory(env, path=..., deterministic=..., seed=..., trusted_modules=...)`` to get an ``Actor``.
    """
    if name == "dataset" or isinstance(ACTORS.get(name), str):
        raise ConfigError(f"source: the name {name!r} is taken", "register_actor")
    ACTORS[name] = factory


@configclass
class ExpertShareCfg(Config):
    """Schedule of DAgger's beta: the share of decisions that the expert takes instead of the policy."""

    start: Fraction = 0.0
    """Initial share; ``constant`` keeps it."""
    schedule: Literal["constant", "linear", "exponential"] = "constant"
    """``linear`` reaches ``end`` after ``over`` units; ``exponential`` multiplies the distance to ``end`` by ``decay``
    every ``over`` units."""
    end: Fraction = 0.0
    """Final share."""
    over: Count = 1000
    """Length of the schedule, in ``unit``."""
    unit: Literal["episodes", "steps", "updates"] = "episodes"
    """Unit of ``over``: episodes or environment steps of all workers, or updates of the acting policy."""
    decay: Fraction = 0.5
    """With ``exponential``: the fraction of the distance to ``end`` that remains after ``over``."""

    def at(self, count: float) -> float:
        """Return the share after ``count`` episodes, steps or updates."""
        if self.schedule == "constant":
            return self.start
        passed = max(count, 0.0) / self.over
        left = 1.0 - min(passed, 1.0) if self.schedule == "linear" else self.decay**passed
        return self.end + (self.start - self.end) * left


@configclass
class ActionSourceCfg(Config):
    """Source of the episodes: the validated ``action_config`` of an engine."""

    source: str = "expert"
    """``expert`` (scripted by the task), ``random``, ``policy`` (a checkpoint), ``dagger`` (a policy acts, the expert
    labels every state), ``dataset`` (a folder of recordings), or a name given to ``register_actor``."""
    path: str | None = None
    """The checkpoint of ``policy``, or the folder of ``dataset``."""
    only_success: bool = False
    """Store only episodes that solve the task."""
    terminate_on_success: bool | None = None
    """Whether success ends an episode of a task. None: episodes of ``expert`` and ``dagger`` run to the time limit, and
    for other sources the ``gym_config`` decides."""
    noise_std: NotNegative = 0.0
    """Standard deviation of Gaussian noise on continuous actions. The noise-free action is stored, so that episodes
    show how to recover."""
    deterministic: bool = False
    """Whether a policy takes its mean action instead of sampling."""
    segments: bool = False
    """With ``expert`` and ``dagger``: store the phase of the expert's plan (reach, grasp, move, place ...) as
    ``segment``; datasets can weight frames by it."""
    policy: str | None = None
    """With ``dagger``: the run or checkpoint of the initial policy. None: the expert acts alone until
    ``engine.publish(policy)``."""
    expert_share: Annotated[ExpertShareCfg, Shorthand("start")] = ExpertShareCfg()
    """With ``dagger``: the share of decisions that the expert takes; a number, or a schedule."""
    expert_acts_for: Literal["decision", "episode"] = "decision"
    """With ``dagger``: whether the actor is drawn anew for every decision (a step, or an action chunk) or every
    episode."""

    @classmethod
    def of(cls, action_config: dict[str, Any], trusted_modules: Sequence[str] = ()) -> ActionSourceCfg:
        """Validate an ``action_config``. Unknown sources are accepted if there are trusted modules, which may register
        them in the workers."""
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
    """Length of a row in steps: the longest episode and the longest chunk. None: the environment's time limit (1000 if
    it has none)."""
    state_dim: Count | None = None
    """Expected size of the robot state (``robot/qpos``, or ``state``). None: any."""
    buffer_device: str = "cpu"
    """Device of the batches: ``cpu``, or ``cuda`` to mirror the buffer on the GPU."""
    gym_config: dict[str, Any] | list[Any] = {}
    """The environment: the parsed ``gym_config.json`` of a task, or ``id``, ``num_envs``, ``kwargs`` of any other. Or a
    list of several, each with a ``weight`` and an instruction ``task``: see :func:`task_entries`."""
    task_observations: Literal["same", "common", "padded"] = "same"
    """With several tasks: require the ``same`` observations and actions, keep only the ``common`` ones, or pad missing
    and shorter ones with zeros (``padded``)."""
    action_config: dict[str, Any] = {}
    """Source of the episodes; see :class:`ActionSourceCfg`."""
    refill_threshold: Count = 50
    """Samples per stored episode: the buffer is rewritten after ``refill_threshold * buffer_size`` samples."""
    refill: Literal["threshold", "continuous"] = "threshold"
    """``threshold`` rewrites the whole buffer; ``continuous`` writes one episode per ``refill_threshold`` samples."""
    max_samples_per_episode: Positive | None = None
    """With ``continuous``: readers block rather than exceed this many samples per written episode. None: no limit."""
    num_workers: Annotated[int, Field(ge=1, le=4096)] = 1
    """Number of simulation processes; on a Ray cluster an upper bound, as nodes come and go."""
    workers: Literal["local", "ray"] = "local"
    """Where workers run: on this machine, or on the nodes of a Ray cluster (extra ``ray``)."""
    address: str | None = None
    """With ``ray``: the cluster, as ``HOST:PORT`` or ``auto``. None: start a private one on this machine."""
    placement: PlacementCfg = PlacementCfg()
    """With ``ray``: the resources of a node that each worker requires."""
    seed: Annotated[int, Field(ge=0, lt=2**62)] = 0
    """Random seed of the simulation and of sampling."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """How often each worker is replaced after a crash, a hang or a NaN before the engine fails; the count resets after
    ten minutes without a fault."""
    start_timeout: Positive = 120.0
    """Seconds that a worker may take to build its environment, and then to deliver its first episode."""
    worker_timeout: Positive = 60.0
    """Seconds without a heartbeat after which a worker counts as hung, and seconds without a due episode being written
    after which the stream counts as stalled."""
    trusted_modules: list[str] = []
    """Modules (names or .py files) that workers import first, to register tasks, environments and actors. Those named
    in a config file must also be allowed on the command line with ``--trust``."""
    progress: bool = True
    """Whether ``start`` shows a progress bar (in a terminal only)."""

    def tasks(self) -> list[TaskEntry]:
        """Return the entries of a list of tasks or of a ``MultiTask`` environment; empty for a single environment."""
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
        """``task_observations``, or the ``observations`` of a ``MultiTask`` environment."""
        if isinstance(self.gym_config, list) or self.gym_config.get("id") != MULTI_TASK:
            return self.task_observations
        return self.gym_config.get("kwargs", {}).get("observations", self.task_observations)

    def check(self) -> ActionSourceCfg:
        """Raise ``ConfigError`` for contradictory settings; return the validated ``action_config``."""
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

    def check_policy_exists(self) -> None:
        """Raise ``ConfigError`` if there is no such run or checkpoint as acts; on Ray, it lies on other machines."""
        action = ActionSourceCfg.of(self.action_config, self.trusted_modules)
        name, path = ("path", action.path) if action.source == "policy" else ("policy", action.policy)
        if self.workers == "local" and action.source in ("policy", "dagger") and path and not Path(path).exists():
            raise ConfigError(f"{name}: expected a run or a checkpoint, but there is no {path}", "action_config")
