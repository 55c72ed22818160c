"""What collects: an environment, a policy of its own, and a synchronous collector that brings them together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from embodichain.agents.rl.collector.base import StepCallback
from embodichain.agents.rl.collector.config import AsyncCfg
from embodichain.agents.rl.collector.sync_collector import RolloutStart, SyncCollector
from embodichain.agents.rl.collector.weights import InferenceCopy
from embodichain.agents.rl.models.policy import Policy
from embodichain.envs.vec_env import VecEnv


@dataclass(frozen=True)
class Setup:
    """How collection is set up, apart from the environment; a collecting process is sent this."""

    policy: Policy
    device: torch.device
    """Where rollouts are stored."""
    callback: StepCallback | None
    start_rollout: RolloutStart | None
    cfg: AsyncCfg


class Station:
    """An environment, a copy of the policy and a ``SyncCollector`` of the two."""

    def __init__(self, env: VecEnv, setup: Setup) -> None:
        cfg = setup.cfg
        self.cfg = cfg
        self.copy = InferenceCopy(setup.policy)
        if cfg.max_policy_lag > 0:  # it runs beside the learner, so neither may disturb the other's random numbers
            device = setup.policy.device
            self.copy.policy.generator = torch.Generator(device).manual_seed(cfg.seed or 0)
        self.collector = SyncCollector(
            env,
            self.copy.policy,
            setup.device,
            setup.callback,
            start_rollout=setup.start_rollout,
            num_threads=cfg.num_threads,
            pipeline_stages=cfg.pipeline_stages,
        )

    def reset(self, seed: int | None) -> None:
        """Begin with new episodes."""
        self.collector.reset(seed)

    def state(self, tickets: Sequence[tuple[int, int]] = ()) -> dict[str, Any]:
        """Return everything that the next rollout depends on; ``tickets`` are numbers and versions of those to come."""
        env, generator = self.collector.env, self.copy.policy.generator
        return {
            "collector": {name: part.clone() for name, part in self.collector.state_dict().items()},
            "env": env.get_state() if env.supports_state else None,
            "generator": None if generator is None else generator.get_state(),
            "tickets": [list(ticket) for ticket in tickets],
        }

    def load(self, state: Mapping[str, Any]) -> bool:
        """Go on from a state; return whether the environment's was in it. Tickets are for the learner to issue anew."""
        env, generator = self.collector.env, self.copy.policy.generator
        if generator is not None and state["generator"] is not None:
            generator.set_state(state["generator"].cpu().clone())
        if state["env"] is None or not state["collector"]:
            return False
        env.set_state(state["env"].to(env.device))
        self.collector.load_state_dict(state["collector"])
        return True
