"""What a user can set about the data engine."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from embodichain.agents.processes.ray_config import PlacementCfg
from embodichain.config import Config, Field, configclass
from embodichain.errors import ConfigError

SourceName = Literal["expert", "random", "policy", "dataset"]


@configclass
class ActionSourceCfg(Config):
    """Where the episodes come from: the ``action_config`` of an engine, checked."""

    source: SourceName = "expert"
    """``expert`` (the task's own), ``random``, ``policy`` (a checkpoint) or ``dataset`` (a recorded folder)."""
    path: str | None = None
    """The checkpoint of ``policy``, or the folder of ``dataset``."""
    only_success: bool = False
    """Keep episodes out that did not solve the task."""
    noise_std: Annotated[float, Field(ge=0)] = 0.0
    """Standard deviation of Gaussian noise on continuous actions. What is stored is the action before the noise: the
    episodes then show how to recover."""
    deterministic: bool = False
    """Whether a policy acts by its mean instead of a sample."""

    @classmethod
    def of(cls, action_config: dict[str, Any]) -> ActionSourceCfg:
        """Check an ``action_config``."""
        cfg = cls.from_dict(action_config, source="action_config")
        if cfg.source in ("policy", "dataset") and cfg.path is None:
            raise ConfigError(
                f"path: source {cfg.source!r} needs the path of its {_PATHS[cfg.source]}", "action_config"
            )
        if cfg.source == "dataset" and cfg.noise_std:
            raise ConfigError("noise_std: recorded episodes are stored as they are; expected 0", "action_config")
        return cfg


_PATHS = {"policy": "checkpoint", "dataset": "folder"}


@configclass
class OnlineDataEngineCfg(Config):
    """Settings of an :class:`OnlineDataEngine`."""

    buffer_size: Annotated[int, Field(ge=1)] = 16
    """Number of episodes in the shared buffer; ideally a multiple of ``num_envs * num_workers``."""
    max_episode_steps: Annotated[int, Field(ge=1)] = 300
    """Length of a row: the longest episode there is room for, and the longest chunk there can be."""
    state_dim: Annotated[int, Field(ge=1)] | None = None
    """Expected size of the robot state (``robot/qpos``, or ``state``); None takes the environment's."""
    buffer_device: str = "cpu"
    """Where batches come from: ``cpu``, or ``cuda`` to mirror the buffer on the GPU."""
    gym_config: dict[str, Any] = {}
    """The environment: the parsed ``gym_config.json`` of a task, or ``id``, ``num_envs``, ``kwargs`` of any other."""
    action_config: dict[str, Any] = {}
    """Where episodes come from; see :class:`ActionSourceCfg`."""
    refill_threshold: Annotated[int, Field(ge=1)] = 50
    """Samples per stored episode: after ``refill_threshold * buffer_size`` samples the buffer is written anew."""
    refill: Literal["threshold", "continuous"] = "threshold"
    """``threshold`` rewrites the whole buffer; ``continuous`` writes one episode per ``refill_threshold`` samples."""
    max_samples_per_episode: Annotated[float, Field(gt=0)] | None = None
    """With ``continuous``: readers wait rather than draw more samples per written episode; None: they never wait."""
    num_workers: Annotated[int, Field(ge=1, le=4096)] = 1
    """Number of simulation processes; on a Ray cluster at most so many, as nodes come and go."""
    workers: Literal["local", "ray"] = "local"
    """Where they run: on this machine, or anywhere in a Ray cluster (extra ``ray``)."""
    address: str | None = None
    """With ``ray``: the cluster, as ``HOST:PORT`` or ``auto``; None starts one on this machine, for itself alone."""
    placement: PlacementCfg = PlacementCfg()
    """With ``ray``: what a worker needs of a node."""
    seed: Annotated[int, Field(ge=0, lt=2**62)] = 0
    """Seed of the simulation and of the draws."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """How often each worker is replaced after a crash, a hang or a NaN before the engine gives up."""
    start_timeout: Annotated[float, Field(gt=0)] = 120.0
    """Seconds a worker may take to build its environment, and then to deliver its first episode."""
    worker_timeout: Annotated[float, Field(gt=0)] = 60.0
    """Seconds without a sign of life after which a worker counts as hung."""
    trusted_modules: list[str] = []
    """Modules that an environment id like ``my_module:MyEnv-v0`` may import."""
    progress: bool = True
    """Whether ``start`` shows a progress bar (in a terminal only)."""

    def check(self) -> ActionSourceCfg:
        """Raise ConfigError for settings that contradict each other; return the checked ``action_config``."""
        action = ActionSourceCfg.of(self.action_config)
        problems = []
        if not self.gym_config and action.source != "dataset":
            problems.append("gym_config: expected the config of an environment, got {}")
        if self.workers == "local":
            problems += [
                f'{name}: only workers="ray" has a cluster; got {given!r}'
                for name, given, default in (
                    ("address", self.address, None),
                    ("placement", self.placement, PlacementCfg()),
                )
                if given != default
            ]
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
