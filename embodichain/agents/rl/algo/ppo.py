"""Proximal Policy Optimisation (PPO): ``update`` loops over minibatches, ``_loss`` computes the loss of each."""

from contextlib import closing
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from tensordict import TensorDictBase
from torch import Tensor

from embodichain.agents.rl.algo.advantages import (
    Proximal,
    RewardNormalizer,
    compute_gae,
    compute_vtrace,
    reward_and_discount,
)
from embodichain.agents.rl.algo.base import ClippedAlgorithm
from embodichain.agents.rl.algo.gradient_steps import Meter
from embodichain.agents.rl.buffer.rollout_buffer import ROLLOUT_KEYS
from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.utils import AlgorithmCfg, ClippedCfg
from embodichain.agents.rl.utils.distributed import Ranks
from embodichain.agents.rl.utils.ratios import (
    clipped_gain,
    decision_entropy,
    is_clipped,
    kl_estimate,
    like,
    log_ratio,
    per_decision,
)
from embodichain.config.classes import NotNegative, Positive, configclass
from embodichain.errors import ConfigError
from embodichain.utils.cuda_graphs import kernels_work

GAE_KEYS = ("value", "next_value", "terminated", "done")
LOSS_KEYS = ("observation", "action", "sample_log_prob", "value", "advantage", "return", "num_actions", "decision")
"""Keys that the loss reads; ``num_actions`` exists for action chunks only, ``decision`` for ``has_decision`` only."""


@configclass
class PPOCfg(ClippedCfg):
    """Configuration for the PPO algorithm."""

    vf_coef: NotNegative = 0.5
    """Weight of the value loss (mean squared error)."""
    normalize_advantage: bool = True
    """Whether to normalise advantages to mean 0 and standard deviation 1, over all ranks."""
    advantage_scope: Literal["rollout", "minibatch"] = "rollout"
    """Normalise advantages over the whole rollout, or over each minibatch as in Stable-Baselines3: a few outliers then
    do not scale down all other transitions."""
    normalize_reward: bool = False
    """Whether to divide rewards by the running standard deviation of discounted returns; logs show the raw rewards."""
    reward_clip: Positive = 10.0
    """Normalised rewards are clipped to [-reward_clip, reward_clip]."""
    clip_value_loss: bool = False
    """Whether to clip the change of the value to +-clip_coef in the value loss."""
    value_learning_rate: Positive | None = None
    """Learning rate of the critic, scaled by the same schedule as the policy's; default: learning_rate."""
    advantage_estimator: Literal["gae", "vtrace"] = "gae"
    """GAE, or V-trace, which corrects for rollouts that an older policy collected."""
    vtrace_clip: tuple[Positive, Positive] = (1.0, 1.0)
    """Clipping thresholds (rho, c) of V-trace's importance weights: for the temporal differences and for the traces."""
    value_warmup: Annotated[int, Field(ge=0)] = 0
    """Initial updates that train only the critic: advantages from an untrained critic would destroy a policy that was
    pretrained by imitation or distillation."""


class PPO(ClippedAlgorithm):
    """PPO on rollouts ``[num_envs, num_steps]``: GAE along the time axis, then clipped updates on minibatches."""

    cfg_type: ClassVar[type[AlgorithmCfg]] = PPOCfg
    cfg: PPOCfg
    needs_critic = True

    def __init__(self, cfg: PPOCfg, policy: Policy) -> None:
        if not policy.trains_critic_alone:
            why = f"as {type(policy).__name__} trains no part that values alone depend on (critic_parts)"
            given = (("value_warmup", 0, cfg.value_warmup), ("value_learning_rate", None, cfg.value_learning_rate))
            problems = [f"{name}: expected {usual}, {why}; got {got}" for name, usual, got in given if got]
            if problems:
                raise ConfigError(problems, "algorithm.cfg")
        super().__init__(cfg, policy)
        self.critic_only_updates = cfg.value_warmup
        self.return_discount = cfg.gamma if cfg.normalize_reward else None
        self.reward_normalizer = RewardNormalizer(cfg.reward_clip, self.device) if cfg.normalize_reward else None

    def _value_rate(self) -> float | None:
        return self.cfg.value_learning_rate

    def update(self, rollout: TensorDictBase | None = None) -> dict[str, float]:
        """Train the policy on a rollout, and return the metrics to log.

        Adds ``advantage`` and ``return`` to the rollout. A correction replaces its values with the current critic's.
        """
        cfg = self.cfg
        rollout = self._take(rollout, ROLLOUT_KEYS)
        self._normalize_first(rollout)

        # For rollouts of an older policy: log-probabilities and values of the current policy
        proximal = None
        if cfg.correction == "decoupled" or cfg.advantage_estimator == "vtrace":
            proximal = Proximal.of(self.policy, rollout, cfg.batch_size)  # in the precision of the collector
            rollout["value"], rollout["next_value"] = proximal.values(rollout, self.policy.version)

        # Advantages and returns, along the time axis
        reward, gamma = reward_and_discount(rollout, cfg.gamma)
        if self.reward_normalizer is not None:
            reward = self.reward_normalizer.normalize(reward, rollout, self.ranks)
        if proximal is not None and cfg.advantage_estimator == "vtrace":
            estimate = compute_vtrace(rollout, proximal.log_importance, reward, gamma, cfg.gae_lambda, cfg.vtrace_clip)
        else:
            value, next_value, terminated, done = (rollout[key] for key in GAE_KEYS)
            estimate = compute_gae(reward, value, next_value, terminated, done, gamma, cfg.gae_lambda)
        rollout["advantage"], rollout["return"] = estimate
        self.policy.update_value_normalizer(rollout["return"])

        # Inputs of the loss, with advantages normalised over the rollouts of all ranks, or later over each minibatch
        data = rollout.select(*LOSS_KEYS, strict=False)
        if cfg.normalize_advantage and not self._per_minibatch:
            data["advantage"] = self._normalized(rollout["advantage"])
        if proximal is not None and cfg.correction == "decoupled":
            weight = proximal.decouple(data, cfg.max_importance_weight, cfg.log_prob_per)
            if self._per_minibatch:
                data["importance_weight"] = weight
            else:
                data["advantage"] = data["advantage"] * weight
        self._add_reference(data, rollout)

        # Epochs of gradient steps on shuffled minibatches
        meter, scheduled = Meter(), self._schedule_coefficients()
        with closing(self._epochs(self._minibatches(data, rollout), meter)) as minibatches:
            for batch, share in minibatches:
                self._step(batch, meter, share)
        metrics = self._measures(meter) | scheduled
        metrics["explained_variance"] = explained_variance(rollout["value"], rollout["return"], self.ranks)
        if self.reward_normalizer is not None:
            metrics["reward_std"] = float(self.reward_normalizer.std)
        self._finish_update(rollout)
        return metrics if proximal is None else metrics | proximal.measures(self.ranks)

    def _normalized(self, advantage: Tensor, counts: bool = True) -> Tensor:
        """Normalise advantages by the mean and deviation of all ranks, to which this rank adds if it ``counts``."""
        [(mean, std)] = self.ranks.mean_and_std(advantage if counts else advantage.new_empty(0))
        return (advantage - mean) / (std + 1e-8)

    @property
    def _per_minibatch(self) -> bool:
        """Whether advantages are normalised over each minibatch."""
        return self.cfg.normalize_advantage and self.cfg.advantage_scope == "minibatch"

    def _prepare(self, batch: TensorDictBase, counts: bool) -> None:
        if self._per_minibatch:
            batch["advantage"] = self._normalized(batch["advantage"], counts)
            weight = batch.get("importance_weight", None)
            if weight is not None:
                batch["advantage"] = batch["advantage"] * weight

    def _loss(self, batch: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        cfg = self.cfg
        with self.optimizer.autocast():
            log_prob, entropy, value = self.policy.evaluate(batch)
        advantage, return_, old_value = batch["advantage"], batch["return"], batch["value"]
        mean_entropy = decision_entropy(entropy, batch, cfg.log_prob_per).mean()
        auxiliary = self.policy.take_auxiliary_loss()
        extra = {} if auxiliary is None else {"auxiliary_loss": auxiliary}
        reference_kl = self._reference_kl(log_prob, batch)
        if reference_kl is not None:
            extra["reference_kl"] = reference_kl = reference_kl.mean()
        clip, clip_high, ent_coef = self.clip, self.clip_high, self.ent_coef
        is_plain = not isinstance(clip, Tensor) and clip == clip_high  # the kernel takes one constant clip range
        if is_plain and log_prob.ndim == batch.batch_dims == 1 and kernels_work(value.device):
            from embodichain.agents.rl.algo.kernels import clipped_loss

            coefficients = (cfg.clip_coef, cfg.vf_coef, cfg.clip_value_loss)
            loss, parts = clipped_loss(log_prob, value, batch, self.policy.value_scale, coefficients)
            loss = loss - ent_coef * mean_entropy
            loss = loss if reference_kl is None else loss + cfg.kl_coef * reference_kl
            return loss if auxiliary is None else loss + auxiliary, parts | {"entropy": mean_entropy} | extra

        # ratio = pi(a|s) / pi_old(a|s)
        log_r = log_ratio(log_prob, batch["sample_log_prob"], batch, cfg.log_prob_per)

        # L_policy = -E min(ratio A, clip(ratio, 1 - c, 1 + c_high) A)
        policy_loss = -per_decision(clipped_gain(log_r, like(advantage, log_r), clip, clip_high), batch).mean()

        # L_value = E (V - R)^2; clipped: E max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2)
        scale = self.policy.value_scale
        if isinstance(scale, Tensor) or scale != 1.0:
            value, old_value, return_ = value / scale, old_value / scale, return_ / scale
        squared_error = (value - return_).square()
        if cfg.clip_value_loss:
            clipped_value = old_value + (value - old_value).clamp(-clip, clip)
            squared_error = torch.max(squared_error, (clipped_value - return_).square())
        value_loss = squared_error.mean()

        # L = L_policy + c_value L_value - c_entropy H (+ c_kl KL(pi || pi_ref)) (+ L_auxiliary)
        loss = policy_loss + cfg.vf_coef * value_loss - ent_coef * mean_entropy
        loss = loss if reference_kl is None else loss + cfg.kl_coef * reference_kl
        loss = loss if auxiliary is None else loss + auxiliary
        with torch.no_grad():
            approx_kl = per_decision(kl_estimate(log_r), batch).mean()
            clip_fraction = per_decision(is_clipped(log_r, clip, clip_high), batch).mean()
        return loss, {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": mean_entropy,
            "approx_kl": approx_kl,
            "clip_fraction": clip_fraction,
            **extra,
        }

    def state_dict(self) -> dict[str, Any]:
        state, rewards = super().state_dict(), self.reward_normalizer
        return state if rewards is None else state | {"reward_normalizer": rewards.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self.reward_normalizer is not None and "reward_normalizer" in state:
            self.reward_normalizer.load_state_dict(state["reward_normalizer"])


def explained_variance(value: Tensor, return_: Tensor, ranks: Ranks) -> float:
    """Return ``1 - Var(return - value) / Var(return)``: 1 is a perfect critic, 0 is no better than a constant."""
    (_, std), (_, error) = ranks.mean_and_std(return_, return_ - value)
    return float(1.0 - (error / std.clamp(min=1e-6)).square())
