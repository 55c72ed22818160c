"""Settings of asynchronous collection."""

from typing import Annotated, Literal

from embodichain.agents.processes.ray_backend import PlacementCfg
from embodichain.config import Config, Field, Shorthand, configclass
from embodichain.config.classes import Count, Positive, Threads
from embodichain.errors import ConfigError


@configclass
class AsyncCfg(Config):
    """Settings of an :class:`AsyncCollector`."""

    mode: Literal["sync", "async"] = "sync"
    """sync alternates between collecting and learning; async does both at once, which helps slow policies. Worker
    ``ray`` is always asynchronous."""
    worker: Literal["thread", "process", "ray"] = "thread"
    """Where rollouts are collected: in a thread, in a separate process, which is replaced when its simulator dies or
    hangs, or in several processes of a Ray cluster (extra ``ray``)."""
    num_steps: Count | None = None
    """Steps per environment and rollout; default: what the first ``collect`` asks for, or what fills the buffer. In a
    training config, ``trainer.buffer_size`` overrides it."""
    max_policy_lag: Annotated[int, Field(ge=0, le=1024)] = 1
    """Maximum age of a rollout's policy in updates; the collector waits to respect it. 0 gives exactly the results of
    synchronous collection."""
    adopt: Literal["step", "rollout", "lockstep"] = "step"
    """When new weights are used: from the next step on, from the next rollout on, or (lockstep) exactly
    ``max_policy_lag`` updates late, which makes runs reproducible whatever the timing."""
    pipeline_stages: Annotated[int, Field(ge=1, le=64)] = 1
    """Groups of environments; one is simulated while the policy computes the actions of another."""
    env_processes: Annotated[int, Field(ge=0, le=1024)] = 0
    """Number of simulation processes, a multiple of pipeline_stages; each gets the same number of environments. 0
    simulates in threads of this process. Faster for software rendering and tasks with much Python code. Only with
    worker ``thread`` or mode sync."""
    num_threads: Threads | None = None
    """Number of torch threads while collecting; default: one for small policies."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Seed of the collector's random generator for actions, used if max_policy_lag is 1 or more; default: the seed of
    the run, or 0."""
    step_timeout: Positive = 60.0
    """Seconds that one step (inference and simulation) may take before the environment counts as hung."""
    start_timeout: Positive = 300.0
    """Seconds that building the environment and its first step may take."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """How often a failed worker, environment or env_process is replaced before the run fails. Ten minutes without a
    failure reset the count."""
    kl_rows: Annotated[int, Field(ge=0)] = 1024
    """Transitions per rollout for estimating the KL divergence from behaviour to current policy; 0 disables it."""
    verify_weights: bool = False
    """Whether to compare hashes of the published weights and of those that a collector uses; each takes a pass over the
    model."""
    num_workers: Annotated[int, Field(ge=1, le=4096)] = 1
    """With ``ray``: number of workers, each with ``num_envs`` environments. A rollout comes from one worker, so at most
    ``max_policy_lag + 1`` can work at the same time."""
    address: str | None = None
    """With ``ray``: address of the cluster, as ``HOST:PORT`` or ``auto``; default: start a cluster on this machine."""
    placement: PlacementCfg = PlacementCfg()
    """With ``ray``: resources of a worker; with a GPU, the policy runs on it."""
    patience: Annotated[float, Field(ge=1)] = 3.0
    """With ``ray``: a rollout that blocks all others and takes longer than this many times the median is interrupted
    and collected by another worker."""

    def check(self) -> None:
        """Raise ``ConfigError`` for settings that contradict each other."""
        if problems := self.problems():
            raise ConfigError(problems, "collector")

    def problems(self) -> list[str]:
        """Return messages about settings that contradict each other."""
        problems = []
        if self.worker == "ray":
            if self.num_workers > self.max_policy_lag + 1:
                problems.append(
                    f"num_workers: with max_policy_lag {self.max_policy_lag} at most {self.max_policy_lag + 1} can be "
                    f"at work at once, got {self.num_workers}: raise max_policy_lag"
                )
            if self.adopt == "lockstep" and self.num_workers > 1:
                problems.append("adopt: lockstep needs one worker, as it is chance which of several comes first")
        elif self.num_workers > 1 or self.address is not None or self.placement != PlacementCfg():
            problems.append("num_workers, address and placement need worker 'ray'")
        if self.env_processes and self.worker != "thread":
            problems.append(f"env_processes needs worker 'thread': {self.worker!r} collects in a process anyway")
        return problems

    def group_problems(self, num_envs: int) -> list[str]:
        """Return messages if ``num_envs`` cannot be divided into groups and processes."""
        stages, processes = self.pipeline_stages, self.env_processes
        problems = []
        if num_envs % stages:
            problems.append(f"num_envs: expected a multiple of the {stages} pipeline_stages, got {num_envs}")
        if processes and num_envs % processes:
            problems.append(f"num_envs: expected a multiple of the {processes} env_processes, got {num_envs}")
        if processes % stages:
            problems.append(
                f"collector.env_processes: expected a multiple of the {stages} pipeline_stages, got {processes}"
            )
        return problems


CollectorBlock = Annotated[AsyncCfg, Shorthand("worker")]
"""Collection settings in a config; the name of the worker alone is a shorthand: ``"collector": "ray"``."""
