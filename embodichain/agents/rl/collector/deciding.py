"""How a collector lets its policy decide: by calling it, or, on a GPU, by replaying what was recorded of it."""

from __future__ import annotations

import torch
from torch import Tensor

from embodichain.agents.rl.collector.base import Decision
from embodichain.agents.rl.collector.graphed import GraphedPolicy
from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.utils.observations import Observation


class Decider:
    """Calls a policy; on a GPU, one without memory is recorded after a few calls, and replayed from then on."""

    def __init__(self, policy: Policy, device: torch.device) -> None:
        self._policy = policy
        on_gpu = device.type == "cuda" == policy.device.type and not policy.is_recurrent
        self._graphs = GraphedPolicy(policy) if on_gpu else None

    @property
    def records(self) -> bool:
        """Whether decisions are recorded at all."""
        return self._graphs is not None

    def decide(self, obs: Observation, state: Tensor | None, apart: bool, kept: bool) -> Decision:
        """Let the policy choose actions for an observation.

        ``apart`` leaves the values for later; ``kept`` says that the decision is needed after the next one is made.
        """
        if self._graphs is None:
            if apart:
                return Decision(obs, state, *self._policy.choose(obs), None, None)
            return Decision(obs, state, *self._policy.act(obs, state))
        action, log_prob, value = (*self._graphs.choose(obs), None) if apart else self._graphs.act(obs)
        if kept:
            action, log_prob = action.clone(), log_prob.clone()
            value = None if value is None else value.clone()
        return Decision(obs, state, action, log_prob, value, None)

    def value(self, obs: Observation, state: Tensor | None) -> Tensor:
        """Value an observation between two steps."""
        if self._graphs is None:
            return self._policy.state_value(obs, state)
        return self._graphs.state_value(obs).clone()

    def refresh(self) -> None:
        """Look whether what was recorded still holds, between two rollouts."""
        if self._graphs is not None:
            self._graphs.refresh()

    def record(self, obs: Observation | None) -> None:
        """Record decisions for such observations now, and nothing later: from now on others use the device, too."""
        if self._graphs is None:
            return
        if obs is None:
            self._graphs.settle()
        else:
            self._graphs.record(obs, self._policy.values_apart)
