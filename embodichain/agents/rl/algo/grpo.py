"""Group relative policy optimisation: no critic, groups of equal starts are each other's baseline."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor

from embodichain.agents.rl.algo.advantages import (
    Level,
    compute_gae,
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
from embodichain.agents.rl.buffer.rollout import Minibatches, episode_starts, flatten_time_major
from embodichain.agents.rl.collector.sync_collector import RolloutStart
from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.utils.config import AlgorithmCfg, Count, NotNegative, Positive
from embodichain.agents.rl.utils.distributed import Ranks
from embodichain.agents.rl.utils.observations import Observation
from embodichain.agents.rl.utils.ratios import clipped_gain, is_clipped, kl_estimate
from embodichain.config import configclass
from embodichain.envs.vec_env import VecEnv
from embodichain.errors import ConfigError

# MERGED reference: A frozen copy of a policy, to measure how far the trained one has moved.


ROWS = 65_536
"""Transitions evaluated at a time, which bounds the memory for it."""


class FrozenReference:
    """The policy as it was when this object was made."""

    def __init__(self, policy: Policy) -> None:
        self.policy = copy.deepcopy(policy).eval().requires_grad_(False)

    @torch.no_grad()
    def log_prob(self, rollout: TensorDictBase) -> Tensor:
        """Return the log-probability ``[num_envs, num_steps]`` of a rollout's actions; of chunks one per action."""
        num_envs, num_steps = rollout.batch_size
        if not self.policy.is_recurrent:
            rows = flatten_time_major(rollout.select("observation", "action"))
            parts = [self.policy.evaluate(part)[0] for part in rows.split(ROWS)]
            return torch.cat(parts).unflatten(0, (num_steps, num_envs)).transpose(0, 1)
        data = rollout.select("observation", "action", "hidden")
        data["start"] = episode_starts(rollout["done"])
        sequences = data.split(max(1, ROWS // num_steps))
        return torch.cat([self.policy.evaluate(part.transpose(0, 1))[0].t() for part in sequences])


KEYS = ("observation", "action", "reward", "done", "sample_log_prob")


@configclass
class GRPOCfg(AlgorithmCfg):
    """Configuration for GRPO."""

    n_epochs: Count = 10
    """Passes over each rollout."""
    clip_coef: Positive = 0.2
    """The probability ratio counts inside [1 - clip_coef, 1 + clip_coef] only."""
    ent_coef: NotNegative = 0.0
    """Weight of the entropy bonus."""
    kl_coef: NotNegative = 0.0
    """Weight of the KL divergence to the policy as it was at first; 0 needs no such reference."""
    group_size: Count = 4
    """Envs that start from the same state and are compared with each other; num_envs is a multiple of it."""
    eps: Positive = 1e-8
    """Added to the standard deviation that returns are divided by."""
    reset_every_rollout: bool = True
    """Whether each rollout begins with new episodes, the same one in all envs of a group."""
    truncate_at_first_done: bool = True
    """Whether what follows the first end of an episode in a rollout is left out."""
    advantage: Literal["step", "trajectory"] = "step"
    """Compare, in a group, the returns that follow each step, or those of whole trajectories."""
    mixed_precision: Precision = "off"
    """Precision of the networks in the update: off (float32), tf32 (float32, faster on a GPU), bf16 or fp16."""
    sequence_length: Count | None = None
    """For policies with memory: steps per training sequence, a divisor of the rollout's; default: all of them."""
    log_prob_per: Level = "chunk"
    """For policies that choose chunks of actions: one probability ratio per chunk, or one for each action in it."""
    cuda_graphs: bool = True
    """On a GPU: record the gradient step once as a CUDA graph and replay it; the log says where that cannot be."""
    correction: Literal["none", "decoupled"] = "none"
    """For rollouts older than the policy: the plain loss, or the decoupled one, which weighs them by their age."""
    max_importance_weight: Positive = 5.0
    """Bound of that weight."""


class GRPO(MinibatchAlgorithm):
    """GRPO on rollouts ``[num_envs, num_steps]``; envs ``k * group_size ... (k + 1) * group_size - 1`` are a group."""

    cfg_type: ClassVar[type[AlgorithmCfg]] = GRPOCfg
    cfg: GRPOCfg
    validity_key = "valid"
    one_version_per_rollout = True  # members of a group are compared: they must come from one policy

    def __init__(self, cfg: GRPOCfg, policy: Policy) -> None:
        super().__init__(cfg, policy, cfg.mixed_precision, cfg.cuda_graphs)
        self.reference = FrozenReference(policy) if cfg.kl_coef > 0.0 else None

    def join(self, ranks: Ranks) -> None:
        """Train the policy together with other processes; a group is always of one rank."""
        super().join(ranks)
        if self.reference is not None:
            ranks.copy_first(self.reference.policy)

    def check_num_envs(self, num_envs: int) -> None:
        """Raise ``ConfigError`` if the envs cannot be divided into groups."""
        if num_envs % self.cfg.group_size:
            problem = f"num_envs {num_envs} is no multiple of group_size {self.cfg.group_size}"
            raise ConfigError(f"{problem}; choose a num_envs that is", "algorithm")

    def start_rollout(self, env: VecEnv) -> Observation | None:
        """Start new episodes, the same one in all envs of a group."""
        self.check_num_envs(env.num_envs)
        return GroupStart(self.cfg.group_size)(env) if self.cfg.reset_every_rollout else None

    @property
    def rollout_start(self) -> RolloutStart | None:
        """What ``start_rollout`` does, without the algorithm: a collecting process can be sent this."""
        return GroupStart(self.cfg.group_size) if self.cfg.reset_every_rollout else None

    def update(self, rollout: TensorDictBase | None = None) -> dict[str, float]:
        """Improve the policy by a rollout ``[num_envs, num_steps]``; adds ``advantage`` and ``return`` to it."""
        cfg = self.cfg
        rollout = self._take(rollout, KEYS)
        done = rollout["done"]
        reward, discount = reward_and_discount(rollout, cfg.gamma)

        # R_t = r_t + gamma R_{t+1} until the episode ends: GAE with lambda = 1 and no values
        nothing = torch.zeros_like(reward)
        rollout["return"] = compute_gae(reward, nothing, nothing, done, done, discount, 1.0)[1]
        valid = until_first_done(done) if cfg.truncate_at_first_done else torch.ones_like(done)
        rollout["advantage"], spread = group_advantage(rollout["return"], valid, cfg)
        valid = valid & spread.repeat_interleave(cfg.group_size).unsqueeze(1)
        proximal = None
        if cfg.correction == "decoupled":
            with self.optimizer.autocast():
                proximal = Proximal.of(self.policy, rollout, cfg.batch_size)
        minibatches = self._agree(self._minibatches(rollout, valid, proximal))

        meter = Meter()
        if len(minibatches):
            for _ in range(cfg.n_epochs):
                self._run_epoch(minibatches, meter)
                meter.end_epoch("approx_kl")

        groups = self.ranks.sum(torch.stack([(~spread).sum(), valid.sum()])).tolist()
        metrics = meter.means() | {"learning_rate": self.optimizer.learning_rate}
        metrics |= {} if proximal is None else scalars(proximal.measures(self.ranks))
        self._finish_update(rollout)
        return metrics | {"skipped_groups": float(groups[0]), "transitions_used": float(groups[1])}

    def _minibatches(self, rollout: TensorDictBase, valid: Tensor, proximal: Proximal | None) -> Minibatches:
        """Select what the loss needs."""
        data = rollout.select("observation", "action", "sample_log_prob", "advantage", *loss_keys(rollout))
        data["valid"] = valid
        if self.reference is not None:
            data["reference_log_prob"] = self.reference.log_prob(rollout)
        if proximal is not None:
            decouple(data, proximal, self.cfg.max_importance_weight, self.cfg.log_prob_per)
        if not self.policy.is_recurrent:
            return Minibatches(data, self.cfg.batch_size, valid=valid)
        data.update(rollout.select("hidden", "done"))
        length = self.cfg.sequence_length or data.batch_size[1]
        return Minibatches(data, self.cfg.batch_size, sequence_length=length, valid=valid)

    def _loss(self, batch: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a minibatch and what is to be logged about it."""
        cfg = self.cfg
        with self.optimizer.autocast():
            log_prob, entropy, _ = self.policy.evaluate(batch)
        weight = batch["valid"] / batch["valid"].sum().clamp(min=1)
        advantage = batch["advantage"]

        # ratio = pi(a|s) / pi_old(a|s)
        log_r = log_ratio(log_prob, batch["sample_log_prob"], batch, cfg.log_prob_per)

        # L_policy = -E min(ratio A, clip(ratio, 1 - c, 1 + c) A)
        gained = clipped_gain(log_r, like(advantage, log_r), cfg.clip_coef)
        policy_loss = -(per_decision(gained, batch) * weight).sum()
        mean_entropy = (decision_entropy(entropy, batch, cfg.log_prob_per) * weight).sum()
        loss = policy_loss - cfg.ent_coef * mean_entropy
        measures = {"policy_loss": policy_loss, "entropy": mean_entropy}

        # KL(pi || pi_ref) = E[pi_ref / pi - 1 - log(pi_ref / pi)], an estimate that is never negative
        if self.reference is not None:
            reference_r = log_ratio(batch["reference_log_prob"], log_prob, batch, cfg.log_prob_per)
            reference_kl = (per_decision(kl_estimate(reference_r), batch) * weight).sum()
            loss = loss + cfg.kl_coef * reference_kl
            measures["reference_kl"] = reference_kl
        with torch.no_grad():
            measures["approx_kl"] = (per_decision(kl_estimate(log_r), batch) * weight).sum()
            measures["clip_fraction"] = (per_decision(is_clipped(log_r, cfg.clip_coef), batch) * weight).sum()
        return loss, measures

    def state_dict(self) -> dict[str, Any]:
        """Return optimiser state, progress and the reference policy."""
        state = super().state_dict()
        return state if self.reference is None else state | {"reference": self.reference.policy.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` returned."""
        super().load_state_dict(state)
        if self.reference is not None:
            self.reference.policy.load_state_dict(state["reference"])


@dataclass(frozen=True)
class GroupStart:
    """Starts new episodes, the same one in all envs of a group."""

    group_size: int

    def __call__(self, env: VecEnv) -> Observation:
        """Return the observation that all envs begin with."""
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

    ``A = (R - mean R) / (std R + eps)``, mean and standard deviation over the valid members of the group: at each step
    for what follows it, or once for the whole trajectory.
    """
    if cfg.advantage == "trajectory":
        returns = returns[:, :1].expand_as(returns)
    grouped = returns.unflatten(0, (-1, cfg.group_size))
    weight = valid.unflatten(0, (-1, cfg.group_size)).float()
    if cfg.advantage == "trajectory":
        weight = torch.ones_like(weight)  # the return of a whole trajectory counts however short it was
    count = weight.sum(1, keepdim=True).clamp(min=1.0)
    mean = (grouped * weight).sum(1, keepdim=True) / count
    std = ((grouped - mean).square() * weight).sum(1, keepdim=True).div(count).sqrt()
    differs = std > 1e-6 * (1.0 + mean.abs())  # less than that is rounding
    advantage = torch.where(differs, (grouped - mean) / (std + cfg.eps), 0.0)
    return advantage.flatten(0, 1) * valid, differs.flatten(1).any(1)
