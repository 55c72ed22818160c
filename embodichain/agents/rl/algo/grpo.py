"""Group Relative Policy Optimisation (GRPO): without a critic; envs that start in the same state form the baseline."""

from contextlib import closing
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import AfterValidator, Field
from tensordict import TensorDictBase
from torch import Tensor

from embodichain.agents.rl.algo.advantages import Proximal, compute_gae, reward_and_discount
from embodichain.agents.rl.algo.base import ClippedAlgorithm
from embodichain.agents.rl.algo.gradient_steps import Meter
from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.utils import AlgorithmCfg, ClippedCfg
from embodichain.agents.rl.utils.ratios import (
    clipped_gain,
    decision_entropy,
    is_clipped,
    kl_estimate,
    like,
    log_ratio,
    per_decision,
)
from embodichain.agents.rl.utils.tensordicts import Observation
from embodichain.config.classes import NotNegative, Positive, configclass
from embodichain.envs.vec_env import VecEnv
from embodichain.errors import ConfigError

KEYS = ("observation", "action", "reward", "done", "sample_log_prob")
LOSS_KEYS = ("observation", "action", "sample_log_prob", "advantage", "num_actions", "decision")
"""Keys that the loss reads; ``num_actions`` exists for action chunks only, ``decision`` for ``has_decision`` only."""


def _needs_common_start(reset: bool) -> bool:
    if not reset:
        raise ValueError("expected true, as members of a group are compared and have to begin in the same state")
    return reset


@configclass
class GRPOCfg(ClippedCfg):
    """Configuration for GRPO."""

    kl_coef: NotNegative = 0.0
    """Weight of the KL divergence to the initial policy; 0 keeps no copy of it."""
    group_size: Annotated[int, Field(ge=2)] = 4
    """Number of envs that start in the same state and are compared with each other; it must divide num_envs."""
    eps: Positive = 1e-8
    """Added to the standard deviation by which returns are divided."""
    reset_every_rollout: Annotated[bool, AfterValidator(_needs_common_start)] = True
    """Each rollout starts with new episodes, the same in all envs of a group; must be true."""
    truncate_at_first_done: bool = True
    """Whether to ignore transitions after the first episode of each env in a rollout."""
    advantage: Literal["step", "trajectory"] = "step"
    """Compare, within a group, the returns from each step on, or the returns of whole trajectories. Both are divided by
    the standard deviation over the whole group."""
    baseline: Literal["mean", "leave_one_out"] = "mean"
    """Baseline of returns: the mean of the group, or of its other members."""
    normalize_advantage: bool = True
    """Whether to divide advantages by the standard deviation of the group's returns."""


class GRPO(ClippedAlgorithm):
    """GRPO on rollouts ``[num_envs, num_steps]``; envs ``k * group_size ... (k + 1) * group_size - 1`` are a group."""

    cfg_type: ClassVar[type[AlgorithmCfg]] = GRPOCfg
    cfg: GRPOCfg
    validity_key = "valid"
    one_version_per_rollout = True  # members of a group must come from the same policy

    def __init__(self, cfg: GRPOCfg, policy: Policy) -> None:
        super().__init__(cfg, policy)
        self.start_rollout = GroupReset(cfg.group_size)

    def check_num_envs(self, num_envs: int) -> None:
        check_groups(num_envs, self.cfg.group_size)

    def update(self, rollout: TensorDictBase | None = None) -> dict[str, float]:
        """Train the policy on a rollout ``[num_envs, num_steps]``, and return the metrics to log.

        Adds ``advantage`` and ``return`` to the rollout.
        """
        cfg = self.cfg
        rollout = self._take(rollout, KEYS)
        self._normalize_first(rollout)

        # R_t = r_t + gamma R_{t+1} until the episode ends: GAE with lambda = 1 and no values
        done = rollout["done"]
        reward, gamma = reward_and_discount(rollout, cfg.gamma)
        zeros = torch.zeros_like(reward)
        rollout["return"] = compute_gae(reward, zeros, zeros, done, done, gamma, 1.0)[1]

        # A_t = (R_t - mean R_t) / (std R + eps) over a group; groups with equal returns are skipped
        valid = until_first_done(done) if cfg.truncate_at_first_done else torch.ones_like(done)
        rollout["advantage"], spread = group_advantage(rollout["return"], valid, cfg)
        valid = valid & spread.repeat_interleave(cfg.group_size).unsqueeze(1)

        # Inputs of the loss; for rollouts of an older policy also log-probabilities of the current one
        data = rollout.select(*LOSS_KEYS, strict=False)
        data["valid"] = valid
        self._add_reference(data, rollout)
        proximal = None
        if cfg.correction == "decoupled":
            proximal = Proximal.of(self.policy, rollout, cfg.batch_size)  # in the precision of the collector
            data["advantage"] = data["advantage"] * proximal.decouple(data, cfg.max_importance_weight, cfg.log_prob_per)

        # Epochs of gradient steps on shuffled minibatches
        meter, scheduled = Meter(), self._schedule_coefficients()
        with closing(self._epochs(self._minibatches(data, rollout, valid), meter)) as minibatches:
            for batch, share in minibatches:
                self._step(batch, meter, share)
        metrics = self._measures(meter) | scheduled
        skipped, used = self.ranks.sum(torch.stack([(~spread).sum(), valid.sum()])).tolist()
        metrics |= {} if proximal is None else proximal.measures(self.ranks)
        self._finish_update(rollout)
        return metrics | {"skipped_groups": float(skipped), "transitions_used": float(used)}

    def _loss(self, batch: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        cfg = self.cfg
        with self.optimizer.autocast():
            log_prob, entropy, _ = self.policy.evaluate(batch)
        weight = batch["valid"] / batch["valid"].sum().clamp(min=1)
        advantage = batch["advantage"]

        # ratio = pi(a|s) / pi_old(a|s)
        log_r = log_ratio(log_prob, batch["sample_log_prob"], batch, cfg.log_prob_per)

        # L_policy = -E min(ratio A, clip(ratio, 1 - c, 1 + c_high) A)
        gained = clipped_gain(log_r, like(advantage, log_r), self.clip, self.clip_high)
        policy_loss = -(per_decision(gained, batch) * weight).sum()
        mean_entropy = (decision_entropy(entropy, batch, cfg.log_prob_per) * weight).sum()
        loss = policy_loss - self.ent_coef * mean_entropy
        measures = {"policy_loss": policy_loss, "entropy": mean_entropy}

        # + c_kl KL(pi || pi_ref)
        reference_kl = self._reference_kl(log_prob, batch)
        if reference_kl is not None:
            measures["reference_kl"] = (reference_kl * weight).sum()
            loss = loss + cfg.kl_coef * measures["reference_kl"]

        # + L_auxiliary
        auxiliary = self.policy.take_auxiliary_loss()
        if auxiliary is not None:
            loss, measures["auxiliary_loss"] = loss + auxiliary, auxiliary
        with torch.no_grad():
            outside = per_decision(is_clipped(log_r, self.clip, self.clip_high), batch)
            measures["approx_kl"] = (per_decision(kl_estimate(log_r), batch) * weight).sum()
            measures["clip_fraction"] = (outside * weight).sum()
        return loss, measures


def check_groups(num_envs: int, group_size: int) -> None:
    """Raise ``ConfigError`` if the envs cannot be divided into groups."""
    if num_envs % group_size:
        problem = f"num_envs {num_envs} is no multiple of group_size {group_size}; choose a num_envs that is"
        raise ConfigError(problem, "algorithm")


@dataclass(frozen=True)
class GroupReset:
    """Resets all envs so that those of a group start in the same state."""

    group_size: int

    def __call__(self, env: VecEnv) -> Observation:
        """Reset the environment and return the first observation."""
        check_groups(env.num_envs, self.group_size)
        _, info = env.reset()
        leader = torch.arange(env.num_envs, device=env.device) // self.group_size * self.group_size
        if env.supports_state:
            return env.set_state(env.get_state()[leader])
        return env.reset(seed=info["episode_seed"][leader])[0]


def until_first_done(done: Tensor) -> Tensor:
    """Return a mask ``[num_envs, num_steps]`` of the transitions in the first episode of each env."""
    return (done.long().cumsum(1) - done.long()) == 0


def group_advantage(returns: Tensor, valid: Tensor, cfg: GRPOCfg) -> tuple[Tensor, Tensor]:
    """Return advantages ``[num_envs, num_steps]`` and a mask ``[num_groups]`` of groups whose returns differ.

    ``A_t = (R_t - mean R_t) / (std R + eps)`` over the valid members of a group, for the return of each step or of the
    whole trajectory. The mean is computed per step. The standard deviation is computed over all steps of the group: one
    per step would give steps near the end, whose returns hardly differ, and steps that few members reach, the same
    weight as the others. Without ``normalize_advantage`` there is no division. ``leave_one_out`` subtracts the mean of
    the other members.
    """
    grouped = returns.unflatten(0, (-1, cfg.group_size))
    weight = valid.unflatten(0, (-1, cfg.group_size)).float()
    if cfg.advantage == "trajectory":  # all trajectories have the same weight, whatever their length
        grouped, weight = grouped[..., :1], torch.ones_like(weight[..., :1])
    count = weight.sum(1, keepdim=True)
    mean = (grouped * weight).sum(1, keepdim=True) / count.clamp(min=1.0)
    squares = (grouped - mean).square() * weight
    std = (squares.sum((1, 2), keepdim=True) / weight.sum((1, 2), keepdim=True)).sqrt()
    differs = std > 1e-6 * (1.0 + mean.abs().amax(2, keepdim=True))  # beyond rounding errors
    deviation = grouped - mean
    if cfg.baseline == "leave_one_out":  # R - (n mean - R) / (n - 1) = (R - mean) n / (n - 1)
        deviation = deviation * (count / (count - 1.0).clamp(min=1.0))
    advantage = torch.where(differs, deviation / (std + cfg.eps) if cfg.normalize_advantage else deviation, 0.0)
    return advantage.expand(-1, -1, valid.shape[1]).flatten(0, 1) * valid, differs.flatten()
