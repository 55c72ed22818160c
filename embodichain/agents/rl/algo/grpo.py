"""Group relative policy optimisation: no critic; envs that begin in the same state are each other's baseline."""

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
"""The last one is there for chunks only."""


def _needs_common_start(reset: bool) -> bool:
    if not reset:
        raise ValueError("expected true, as members of a group are compared and have to begin in the same state")
    return reset


@configclass
class GRPOCfg(ClippedCfg):
    """Configuration for GRPO."""

    kl_coef: NotNegative = 0.0
    """Weight of the KL divergence to the policy as it was at first; 0 needs no such reference."""
    group_size: Annotated[int, Field(ge=2)] = 4
    """Envs that begin in the same state and are compared with each other; num_envs is a multiple of it."""
    eps: Positive = 1e-8
    """Added to the standard deviation that returns are divided by."""
    reset_every_rollout: Annotated[bool, AfterValidator(_needs_common_start)] = True
    """Each rollout begins with new episodes, the same one in all envs of a group; there is no other way."""
    truncate_at_first_done: bool = True
    """Whether what follows the first end of an episode in a rollout is left out."""
    advantage: Literal["step", "trajectory"] = "step"
    """Compare, in a group, the returns that follow each step, or those of whole trajectories. The unit is the spread
    in the whole group either way, so a step that decides little counts little."""
    baseline: Literal["mean", "leave_one_out"] = "mean"
    """What returns are compared with: the mean of the group, or that of its other members."""
    normalize_advantage: bool = True
    """Whether advantages are divided by the spread of returns in the group; without, groups that differ more count
    more."""


class GRPO(ClippedAlgorithm):
    """GRPO on rollouts ``[num_envs, num_steps]``; envs ``k * group_size ... (k + 1) * group_size - 1`` are a group."""

    cfg_type: ClassVar[type[AlgorithmCfg]] = GRPOCfg
    cfg: GRPOCfg
    validity_key = "valid"
    one_version_per_rollout = True  # members of a group are compared: they must come from one policy

    def __init__(self, cfg: GRPOCfg, policy: Policy) -> None:
        super().__init__(cfg, policy)
        self.start_rollout = GroupReset(cfg.group_size)

    def check_num_envs(self, num_envs: int) -> None:
        check_groups(num_envs, self.cfg.group_size)

    def update(self, rollout: TensorDictBase | None = None) -> dict[str, float]:
        """Improve the policy by a rollout ``[num_envs, num_steps]``; adds ``advantage`` and ``return`` to it."""
        cfg = self.cfg
        rollout = self._take(rollout, KEYS)

        # R_t = r_t + gamma R_{t+1} until the episode ends: GAE with lambda = 1 and no values
        done = rollout["done"]
        reward, gamma = reward_and_discount(rollout, cfg.gamma)
        nothing = torch.zeros_like(reward)
        rollout["return"] = compute_gae(reward, nothing, nothing, done, done, gamma, 1.0)[1]

        # A_t = (R_t - mean R_t) / (std R + eps) over a group; one without any spread of returns is left out
        valid = until_first_done(done) if cfg.truncate_at_first_done else torch.ones_like(done)
        rollout["advantage"], spread = group_advantage(rollout["return"], valid, cfg)
        valid = valid & spread.repeat_interleave(cfg.group_size).unsqueeze(1)

        # What the loss needs; for rollouts older than the policy also log-probabilities of the present one
        data = rollout.select(*LOSS_KEYS, strict=False)
        data["valid"] = valid
        self._add_reference(data, rollout)
        proximal = None
        if cfg.correction == "decoupled":
            proximal = Proximal.of(self.policy, rollout, cfg.batch_size)  # as precisely as it was collected
            proximal.decouple(data, cfg.max_importance_weight, cfg.log_prob_per)

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

        # + a loss of the policy's own
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
    """Resets to new episodes, the same one in all envs of a group."""

    group_size: int

    def __call__(self, env: VecEnv) -> Observation:
        """Return the observation that all envs begin with."""
        check_groups(env.num_envs, self.group_size)
        _, info = env.reset()
        leader = torch.arange(env.num_envs, device=env.device) // self.group_size * self.group_size
        if env.supports_state:
            return env.set_state(env.get_state()[leader])
        return env.reset(seed=info["episode_seed"][leader])[0]


def until_first_done(done: Tensor) -> Tensor:
    """Return which transitions ``[num_envs, num_steps]`` lie in the first episode of the rollout."""
    return (done.long().cumsum(1) - done.long()) == 0


def group_advantage(returns: Tensor, valid: Tensor, cfg: GRPOCfg) -> tuple[Tensor, Tensor]:
    """Return advantages ``[num_envs, num_steps]`` and which groups ``[num_groups]`` have any spread of returns.

    ``A_t = (R_t - mean R_t) / (std R + eps)`` for the valid members of a group: of each step's return, or, the same for
    all steps, of the trajectory's. The mean is that of a step, the baseline of whoever got there. The standard
    deviation is that of all steps of the group: one for each step would give those at the end of a rollout, where
    hardly any reward is left to differ, and those that few reach, the weight of the others. Without
    ``normalize_advantage`` nothing is divided by; ``leave_one_out`` compares with the mean of the other members.
    """
    grouped = returns.unflatten(0, (-1, cfg.group_size))
    weight = valid.unflatten(0, (-1, cfg.group_size)).float()
    if cfg.advantage == "trajectory":  # the return of a whole trajectory counts however short it was
        grouped, weight = grouped[..., :1], torch.ones_like(weight[..., :1])
    count = weight.sum(1, keepdim=True)
    mean = (grouped * weight).sum(1, keepdim=True) / count.clamp(min=1.0)
    squares = (grouped - mean).square() * weight
    std = (squares.sum((1, 2), keepdim=True) / weight.sum((1, 2), keepdim=True)).sqrt()
    differs = std > 1e-6 * (1.0 + mean.abs().amax(2, keepdim=True))  # less than that is rounding
    deviation = grouped - mean
    if cfg.baseline == "leave_one_out":  # R - (n mean - R) / (n - 1) = (R - mean) n / (n - 1)
        deviation = deviation * (count / (count - 1.0).clamp(min=1.0))
    advantage = torch.where(differs, deviation / (std + cfg.eps) if cfg.normalize_advantage else deviation, 0.0)
    return advantage.expand(-1, -1, valid.shape[1]).flatten(0, 1) * valid, differs.flatten()
