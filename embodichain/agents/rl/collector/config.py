"""What can be set about asynchronous collection."""

from typing import Annotated, Literal

from embodichain.agents.processes.ray_backend import PlacementCfg
from embodichain.config import Config, Field, Shorthand, configclass
from embodichain.config.classes import Count, Positive, Threads
from embodichain.errors import ConfigError


@configclass
class AsyncCfg(Config):
    """Settings of an :class:`AsyncCollector`."""

    mode: Literal["sync", "async"] = "sync"
    """Whether a trainer collects and learns in turn (sync), or both at once (async), for slow policies. ``ray`` is
    always asynchronous."""
    worker: Literal["thread", "process", "ray"] = "thread"
    """Where it collects: in a thread of this process, in a process of its own, which is replaced when its simulator
    dies or hangs, or in several of them anywhere in a Ray cluster (extra ``ray``)."""
    num_steps: Count | None = None
    """Steps per environment and rollout; default: what the first ``collect`` asks for, or what fills the buffer. A
    trainer's ``buffer_size`` decides instead of this."""
    max_policy_lag: Annotated[int, Field(ge=0, le=1024)] = 1
    """Updates that the learner may be ahead of the policy that collected; the collector waits rather than exceed it.
    0 is the synchronous algorithm, bit by bit."""
    adopt: Literal["step", "rollout", "lockstep"] = "step"
    """When newer weights are used: from the next step on, from the next rollout on, or always ``max_policy_lag``
    updates late, which makes a run independent of who is faster: it can be repeated and resumed bit by bit."""
    pipeline_stages: Annotated[int, Field(ge=1, le=64)] = 1
    """Groups of environments that take turns: one is simulated while the policy decides for another."""
    env_processes: Annotated[int, Field(ge=0, le=1024)] = 0
    """Processes that simulate, with equally many environments each, and a whole number of them per group; 0: none,
    groups are simulated in threads of this process. Faster where pictures are drawn by software or a task has much
    Python in it. With ``thread``, or without a collector apart."""
    num_threads: Threads | None = None
    """Torch's threads while collecting; default: one for small policies."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Seed of the actions, where collection draws from a random generator of its own: at a lag of 1 or more. Default:
    the seed of the run, or 0."""
    step_timeout: Positive = 60.0
    """Seconds that one step, inference and simulation, may take before the environment counts as hung."""
    start_timeout: Positive = 300.0
    """Seconds that building the environment and the first step of it may take."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """How often a collecting process that died or hung, or an environment that raised, is replaced before that is an
    error; with ``env_processes``, how often those that failed are. Ten minutes without a fault give the budget back."""
    kl_rows: Annotated[int, Field(ge=0)] = 1024
    """Decisions of each rollout on which the KL divergence from behaviour to current policy is measured; 0: none."""
    verify_weights: bool = False
    """Whether weights are hashed when they are published and again when a collector uses them, and compared. It costs
    a pass over the model each time."""
    num_workers: Annotated[int, Field(ge=1, le=4096)] = 1
    """With ``ray``: processes that collect, each with ``num_envs`` environments; rollouts come from one at a time, so
    no more than ``max_policy_lag + 1`` can be at work at once."""
    address: str | None = None
    """With ``ray``: the cluster, as ``HOST:PORT`` or ``auto``; None starts one on this machine, for itself alone."""
    placement: PlacementCfg = PlacementCfg()
    """With ``ray``: what a worker needs of a node; with a GPU, the policy acts on it there."""
    patience: Annotated[float, Field(ge=1)] = 3.0
    """With ``ray``: times the usual duration of a rollout that all others wait for a slow one, at ``max_policy_lag``,
    before it is broken off and collected by another worker."""

    def check(self) -> None:
        """Raise ConfigError for settings that contradict each other."""
        if problems := self.problems():
            raise ConfigError(problems, "collector")

    def problems(self) -> list[str]:
        """Return what contradicts each other."""
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
        """Return why so many environments cannot be divided into groups and processes."""
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
"""Settings of collection in a config, for which the name of the worker will do: ``"collector": "ray"``."""
