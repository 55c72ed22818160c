"""What can be set about asynchronous collection."""

from __future__ import annotations

from typing import Annotated, Literal

from embodichain.agents.rl.utils.config import Count, Positive
from embodichain.config import Config, Field, configclass


@configclass
class AsyncCfg(Config):
    """Settings of an :class:`AsyncCollector`."""

    worker: Literal["thread", "process"] = "thread"
    """Where it collects: in a thread of this process, or in a process of its own, which is replaced when its simulator
    dies or hangs."""
    num_steps: Count | None = None
    """Steps per environment and rollout; default: what the first ``collect`` asks for, or what fills the buffer. A
    trainer's ``buffer_size`` decides instead of this."""
    max_policy_lag: Annotated[int, Field(ge=0)] = 1
    """Updates that the learner may be ahead of the policy that collected; the collector waits rather than exceed it.
    0 is the synchronous algorithm, bit by bit."""
    adopt: Literal["step", "rollout", "lockstep"] = "step"
    """When newer weights are used: from the next step on, from the next rollout on, or always ``max_policy_lag``
    updates late, which makes a run independent of who is faster: it can be repeated and resumed bit by bit."""
    pipeline_stages: Count = 1
    """Groups of environments that take turns: one is simulated while the policy decides for another."""
    num_threads: Count | None = None
    """Torch's threads while collecting; default: one for small policies."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Seed of the actions, where collection draws from a random generator of its own: at a lag of 1 or more. Default:
    the seed of the run, or 0."""
    step_timeout: Positive = 60.0
    """Seconds that one step, inference and simulation, may take before the environment counts as hung."""
    start_timeout: Positive = 300.0
    """Seconds that building the environment and the first step of it may take."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """How often a collecting process that died or hung is replaced before that is an error."""
    kl_rows: Annotated[int, Field(ge=0)] = 1024
    """Decisions of each rollout on which the KL divergence from behaviour to current policy is measured; 0: none."""
