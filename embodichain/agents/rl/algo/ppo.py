"""Proximal policy optimisation."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor

from embodichain.agents.rl.algo.advantages import (
    Level,
    compute_gae,
    compute_vtrace,
    decision_entropy,
    like,
    log_ratio,
    loss_keys,
    per_decision,
    reward_and_discount,
)
from embodichain.agents.rl.algo.base import Meter, MinibatchAlgorithm
from embodichain.agents.rl.algo.off_policy import Proximal, decouple, scalars
from embodichain.agents.rl.algo.optimizer import Precision
from embodichain.agents.rl.buffer.rollout import ROLLOUT_KEYS, Minibatches
from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.utils.config import AlgorithmCfg, Count, NotNegative, Positive
from embodichain.agents.rl.utils.distributed import Ranks
from embodichain.agents.rl.utils.ratios import clipped_gain, is_clipped, kl_estimate
from embodichain.config import configclass
from embodichain.utils.cuda_graphs import kernels_work


@configclass
class PPOCfg(AlgorithmCfg):
    """Configuration for the PPO algorithm."""

    n_epochs: Count = 10
    """Passes over each rollout."""
    clip_coef: Positive = 0.2
    """The probability ratio counts inside [1 - clip_coef, 1 + clip_coef] only."""
    ent_coef: NotNegative = 0.0
    """Weight of the entropy bonus."""
    vf_coef: NotNegative = 0.5
    """Weight of the value loss, a mean squared error."""
    normalize_advantage: bool = True
    """Whether advantages of a rollout are shifted and scaled to mean 0 and standard deviation 1, over all ranks."""
    clip_value_loss: bool = False
    """Whether values, too, may leave the old ones by clip_coef only."""
    lr_schedule: Literal["constant", "linear", "adaptive"] = "constant"
    """Step size: constant, falling to zero over the training, or adapted after each epoch to keep desired_kl."""
    desired_kl: Positive = 0.01
    """For the adaptive schedule: the change of the policy per epoch, as KL divergence, to aim at."""
    target_kl: Positive | None = None
    """The remaining epochs are left out once an epoch's mean KL divergence exceeds this."""
    mixed_precision: Precision = "off"
    """Precision of the networks in the update: off (float32), tf32 (float32, faster on a GPU), bf16 or fp16."""
    sequence_length: Count | None = None
    """For policies with memory: steps per training sequence, a divisor of the rollout's; default: all of them."""
    log_prob_per: Level = "chunk"
    """For policies that choose chunks of actions: one probability ratio per chunk, or one for each action in it."""
    cuda_graphs: bool = True
    """On a GPU: record the gradient step once as a CUDA graph and replay it; the log says where that cannot be."""
    correction: Literal["none", "decoupled"] = "none"
    """For rollouts older than the policy: plain PPO, or decoupled PPO, which weighs them by their probability now and
    takes advantages and returns by the values of now."""
    max_importance_weight: Positive = 5.0
    """Bound of that weight."""
    advantage_estimator: Literal["gae", "vtrace"] = "gae"
    """Generalised advantage estimation, or V-trace, which corrects it for rollouts older than the policy."""
    vtrace_clip: tuple[Positive, Positive] = (1.0, 1.0)
    """Bounds rho and c of V-trace's importance weights: of the errors, and of the traces."""


class PPO(MinibatchAlgorithm):
    """PPO on rollouts ``[num_envs, num_steps]``: GAE on the time axis, then clipped updates on minibatches."""

    cfg_type: ClassVar[type[AlgorithmCfg]] = PPOCfg
    cfg: PPOCfg

    def __init__(self, cfg: PPOCfg, policy: Policy) -> None:
        super().__init__(cfg, policy, cfg.mixed_precision, cfg.cuda_graphs)

    def update(self, rollout: TensorDictBase | None = None) -> dict[str, float]:
        """Improve the policy by a rollout ``[num_envs, num_steps]``; adds ``advantage`` and ``return`` to it.

        A correction for old rollouts also brings their ``value`` and ``next_value`` up to date.
        """
        cfg = self.cfg
        rollout = self._take(rollout, ROLLOUT_KEYS)
        proximal = self._proximal(rollout)
        if proximal is not None:
            rollout["value"], rollout["next_value"] = proximal.values(rollout, self.policy.version)
        rollout["advantage"], rollout["return"] = self._advantage(rollout, proximal)
        self.policy.update_value_normalizer(rollout["return"])
        minibatches = self._agree(self._minibatches(rollout, proximal))
        if cfg.lr_schedule == "linear":
            self.optimizer.learning_rate = cfg.learning_rate * (1.0 - self.progress)

        meter = Meter()
        for _ in range(cfg.n_epochs):
            self._run_epoch(minibatches, meter)
            if self._adapt_to_kl(meter.end_epoch("approx_kl")):
                break

        metrics = meter.means() | {"learning_rate": self.optimizer.learning_rate, "epochs": float(meter.epochs)}
        metrics["explained_variance"] = explained_variance(rollout["value"], rollout["return"], self.ranks)
        self._finish_update(rollout)
        return metrics if proximal is None else metrics | scalars(proximal.measures(self.ranks))

    def _proximal(self, rollout: TensorDictBase) -> Proximal | None:
        """Evaluate the present policy on the rollout, if anything needs it."""
        if self.cfg.correction == "none" and self.cfg.advantage_estimator == "gae":
            return None
        with self.optimizer.autocast():
            return Proximal.of(self.policy, rollout, self.cfg.batch_size)

    def _advantage(self, rollout: TensorDictBase, proximal: Proximal | None) -> tuple[Tensor, Tensor]:
        """Return advantages and returns ``[num_envs, num_steps]``."""
        cfg = self.cfg
        reward, discount = reward_and_discount(rollout, cfg.gamma)
        if proximal is not None and cfg.advantage_estimator == "vtrace":
            return compute_vtrace(rollout, proximal.log_importance, reward, discount, cfg.gae_lambda, cfg.vtrace_clip)
        value, next_value = rollout["value"], rollout["next_value"]
        terminated, done = rollout["terminated"], rollout["done"]
        return compute_gae(reward, value, next_value, terminated, done, discount, cfg.gae_lambda)

    def _minibatches(self, rollout: TensorDictBase, proximal: Proximal | None) -> Minibatches:
        """Select what the loss needs, with advantages normalised over the rollouts of all ranks."""
        keys = ("observation", "action", "sample_log_prob", "value", "advantage", "return", *loss_keys(rollout))
        data = rollout.select(*keys)
        if self.cfg.normalize_advantage:
            [(mean, std)] = self.ranks.mean_and_std(rollout["advantage"])
            data["advantage"] = (rollout["advantage"] - mean) / (std + 1e-8)
        if proximal is not None and self.cfg.correction == "decoupled":
            decouple(data, proximal, self.cfg.max_importance_weight, self.cfg.log_prob_per)
        if not self.policy.is_recurrent:
            return Minibatches(data, self.cfg.batch_size)
        data.update(rollout.select("hidden", "done"))
        return Minibatches(data, self.cfg.batch_size, sequence_length=self.cfg.sequence_length or data.batch_size[1])

    def _loss(self, batch: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a minibatch and what is to be logged about it."""
        cfg = self.cfg
        with self.optimizer.autocast():
            log_prob, entropy, value = self.policy.evaluate(batch)
        advantage, return_, old_value = batch["advantage"], batch["return"], batch["value"]
        mean_entropy = decision_entropy(entropy, batch, cfg.log_prob_per).mean()
        if log_prob.ndim == batch.batch_dims == 1 and kernels_work(value.device):
            from embodichain.agents.rl.algo.kernels import clipped_loss

            new, old = (log_prob, value), (batch["sample_log_prob"], old_value)
            settings = (cfg.clip_coef, cfg.vf_coef, cfg.clip_value_loss)
            loss, parts = clipped_loss(new, old, advantage, return_, self.policy.value_scale, settings)
            return loss - cfg.ent_coef * mean_entropy, parts | {"entropy": mean_entropy}

        # ratio = pi(a|s) / pi_old(a|s)
        log_r = log_ratio(log_prob, batch["sample_log_prob"], batch, cfg.log_prob_per)

        # L_policy = -E min(ratio A, clip(ratio, 1 - c, 1 + c) A)
        policy_loss = -per_decision(clipped_gain(log_r, like(advantage, log_r), cfg.clip_coef), batch).mean()

        # L_value = E (V - R)^2; with clipping the larger of it and that of V_old + clip(V - V_old, -c, c)
        scale = self.policy.value_scale
        if isinstance(scale, Tensor) or scale != 1.0:
            value, old_value, return_ = value / scale, old_value / scale, return_ / scale
        squared_error = (value - return_).square()
        if cfg.clip_value_loss:
            clipped_value = old_value + (value - old_value).clamp(-cfg.clip_coef, cfg.clip_coef)
            squared_error = torch.max(squared_error, (clipped_value - return_).square())
        value_loss = squared_error.mean()

        # L = L_policy + c_value L_value - c_entropy H
        loss = policy_loss + cfg.vf_coef * value_loss - cfg.ent_coef * mean_entropy
        with torch.no_grad():
            approx_kl = per_decision(kl_estimate(log_r), batch).mean()
            clip_fraction = per_decision(is_clipped(log_r, cfg.clip_coef), batch).mean()
        return loss, {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": mean_entropy,
            "approx_kl": approx_kl,
            "clip_fraction": clip_fraction,
        }

    def _adapt_to_kl(self, epoch_kl: Tensor) -> bool:
        """Adapt the step size to how far the policy moved in an epoch; return whether to stop here.

        A GPU is waited for only if there is a target.
        """
        cfg = self.cfg
        if cfg.lr_schedule != "adaptive" and cfg.target_kl is None:
            return False
        if cfg.lr_schedule == "adaptive":
            self.optimizer.adapt_learning_rate(epoch_kl, cfg.desired_kl)
        return cfg.target_kl is not None and float(epoch_kl) > cfg.target_kl


def explained_variance(value: Tensor, return_: Tensor, ranks: Ranks) -> float:
    """Return ``1 - Var(return - value) / Var(return)``: 1 is perfect, 0 no better than a constant."""
    (_, std), (_, error) = ranks.mean_and_std(return_, return_ - value)
    return float(1.0 - (error / std.clamp(min=1e-6)).square())
