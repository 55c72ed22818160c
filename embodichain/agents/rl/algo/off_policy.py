"""Learning from rollouts that are older than the policy: an importance weight for their age, a clip for the update.

Plain PPO keeps the policy near the one that collected; after some lag that is neither the present policy nor a good
centre of the trust region. Decoupled PPO separates the two: with mu what collected, pi_prox the policy before the
update, and pi the one being trained,

    L = -E[ min(w_max, pi_prox/mu) * min(r A, clip(r, 1 - c, 1 + c) A) ],   r = pi/pi_prox.

The weight is a positive constant during the update, so this is the loss of plain PPO for old probabilities pi_prox and
advantages that carry the weight; the loss itself does not have to know.

Values are as old as the rollout, too. Returns that bootstrap from the critic of an update ago would let it learn from
what it has unlearned since, ``V <- T V_before`` instead of ``T V``, so the present critic values the rollout again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from tensordict import TensorDictBase
from torch import Tensor

from embodichain.agents.rl.buffer.rollout import evaluate_rollout
from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.utils import Level
from embodichain.agents.rl.utils.distributed import Ranks
from embodichain.agents.rl.utils.ratios import bounded, kl_estimate, log_ratio


@dataclass(frozen=True)
class Proximal:
    """The policy before an update, the centre of its trust region, on the transitions that are to be learned from."""

    log_prob: Tensor
    """Log-probability of the actions, in the shape of ``sample_log_prob``."""
    value: Tensor
    """Values of the observations, ``[num_envs, num_steps]``."""
    log_importance: Tensor
    """``log pi_prox / mu`` of the decisions, ``[num_envs, num_steps]``."""

    @classmethod
    def of(cls, policy: Policy, rollout: TensorDictBase, rows: int) -> Self:
        """Evaluate a rollout, ``rows`` transitions at a time."""
        log_prob, value = evaluate_rollout(policy, rollout, rows)
        log_importance = log_ratio(log_prob.float(), rollout["sample_log_prob"], rollout, "chunk")
        return cls(log_prob.float(), value.float(), log_importance)

    def values(self, rollout: TensorDictBase, version: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``value`` and ``next_value`` of a rollout by the present critic, ``[num_envs, num_steps]`` each.

        What the present ``version`` of the policy collected stays as it is, bit by bit.
        """
        value = torch.where(rollout["policy_version"] == version, rollout["value"], self.value)
        return value, next_values(rollout, value)

    def decouple(self, data: TensorDictBase, max_weight: float, level: Level) -> None:
        """Centre the clip on this policy, and weigh advantages by ``min(max_weight, pi_prox/mu)``; in place.

        With one probability ratio per action of a chunk, the weight is the geometric mean over the actions taken.
        """
        log_weight = self.log_importance
        if level == "action" and "num_actions" in data.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
            log_weight = log_weight / data["num_actions"]
        data["sample_log_prob"] = self.log_prob
        data["advantage"] = data["advantage"] * log_weight.exp().clamp(max=max_weight)

    def measures(self, ranks: Ranks) -> dict[str, float]:
        """Return how far the policy is from what collected: ``KL(mu || pi_prox)`` and its largest importance weight."""
        kl = ranks.gather(kl_estimate(self.log_importance).mean()).mean()
        largest = bounded(ranks.gather(self.log_importance.max()).max()).exp()
        return dict(zip(("behaviour_kl", "importance_max"), torch.stack([kl, largest]).tolist(), strict=True))


def next_values(rollout: TensorDictBase, value: Tensor) -> Tensor:
    """Return the values of the states that were reached, ``[num_envs, num_steps]``.

    They are the present policy's wherever the state is an observation of the rollout. What lies at its edge, or where a
    time limit cut an episode, is not stored: there the value of the time of collection is kept, plus what the state
    before it has gained since, as neighbours gain about the same. An old value beside new ones would look like a
    reward, or a penalty, for getting there. Where new weights were adopted later in the rollout nothing is added: it is
    not known then which of them valued the state.
    """
    version = rollout["policy_version"]
    gained = torch.where(version == version[:, -1:], value - rollout["value"], 0.0)
    reached = rollout["next_value"] + gained * ~rollout["terminated"]
    inside = ~rollout["done"][:, :-1]
    reached[:, :-1] = torch.where(inside, value[:, 1:], reached[:, :-1])
    return reached
