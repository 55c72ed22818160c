"""How old a rollout is when the learner gets it, and how far the policy has moved since."""

from __future__ import annotations

from dataclasses import dataclass

from tensordict import TensorDictBase

from embodichain.agents.rl.buffer.rollout import evaluate_rollout
from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.utils.ratios import kl_estimate, log_importance
from embodichain.errors import WeightsError


@dataclass(frozen=True)
class Age:
    """The age of a rollout in updates of the policy."""

    versions: list[int]
    """Versions that its transitions are stamped with, one per step."""
    now: int
    """Version of the learner's policy."""
    kl: float | None
    """``KL(behaviour || current)``, if it was measured."""

    def scalars(self) -> dict[str, float]:
        """Return what is logged."""
        lags = [self.now - version for version in self.versions]
        measured = {} if self.kl is None else {"async/behaviour_kl": self.kl}
        return measured | {
            "async/lag_min": float(min(lags)),
            "async/lag_mean": sum(lags) / len(lags),
            "async/lag_max": float(max(lags)),
        }


class Staleness:
    """Measures the age of rollouts and sees to it that it stays within its bound."""

    def __init__(self, policy: Policy, max_policy_lag: int, kl_rows: int) -> None:
        self.policy, self.max_policy_lag, self.kl_rows = policy, max_policy_lag, kl_rows

    def measure(self, rollout: TensorDictBase) -> Age:
        """Return how old a rollout ``[num_envs, num_steps]`` is; all envs of a step have the same version."""
        versions, now = rollout["policy_version"][0].tolist(), int(self.policy.version)
        if now - min(versions) > self.max_policy_lag:
            raise WeightsError(
                f"a rollout of version {min(versions)} was taken at version {now}, but max_policy_lag is "
                f"{self.max_policy_lag}: the policy is updated more than once per rollout; raise max_policy_lag"
            )
        kl: float | None = None
        if self.kl_rows:
            kl = 0.0 if min(versions) == now else behaviour_kl(self.policy, rollout, self.kl_rows)
        return Age(versions, now, kl)


def behaviour_kl(policy: Policy, rollout: TensorDictBase, rows: int) -> float:
    """Return ``KL(mu || pi) = E[pi/mu - 1 - log pi/mu]`` on the trajectories of as many envs as make up ``rows``."""
    part = rollout[: max(1, rows // rollout.batch_size[1])].to(policy.device)
    return float(kl_estimate(log_importance(evaluate_rollout(policy, part)[0], part)).mean())
