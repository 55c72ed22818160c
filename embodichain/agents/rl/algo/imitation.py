"""Learning from demonstrations: a policy of chunks imitates chunks of the stream, before reinforcement takes over."""

import math
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from embodichain.agents.rl.algo.ppo import PPO, PPOCfg
from embodichain.agents.rl.collector.sync_collector import SyncCollector
from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.models.vla.loading import only_trained
from embodichain.agents.rl.models.vla.model import VLAModel
from embodichain.agents.rl.models.vla_policy import VLAPolicy
from embodichain.config.classes import Config, Count, NotNegative, Positive, configclass
from embodichain.envs.vec_env import VecEnv
from embodichain.errors import ConfigError, RolloutError


@configclass
class ImitationCfg(Config):
    """How a policy imitates."""

    learning_rate: Positive = 1e-3
    """Largest step size of AdamW."""
    total_steps: Count = 1000
    """Gradient steps over which the step size falls to a tenth, along a cosine."""
    warmup_steps: Count = 50
    """Gradient steps over which it rises to its largest value."""
    weight_decay: NotNegative = 1e-4
    """Weight decay of AdamW."""
    max_grad_norm: Positive = 1.0
    """The gradient is scaled down to this norm when it is longer."""
    point_coef: NotNegative = 0.5
    """Weight of the error in pointing, for models that point."""


class Imitation:
    """Supervised fine-tuning of a ``VLAPolicy`` on chunks ``[batch, n]`` of demonstrations.

    The policy sees the first observation of a chunk and learns its actions; if its own chunks are longer than ``n``,
    their remaining actions do not count. Of a Gaussian the mean is trained and the spread stays. Proprioception is
    normalised by the demonstrations, also when reinforcement takes over: other statistics would change the clone.
    """

    def __init__(self, cfg: ImitationCfg, policy: VLAPolicy) -> None:
        if not isinstance(policy.model, VLAModel):
            raise ConfigError(
                f"expected a model that derives from VLAModel, got {type(policy.model).__name__}", "policy"
            )
        self.cfg, self.policy = cfg, policy
        self.model: VLAModel = policy.model
        trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=cfg.learning_rate, weight_decay=cfg.weight_decay)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._scale)

    def update(self, chunks: TensorDictBase, points: Tensor | None = None) -> dict[str, Tensor]:
        """Do one gradient step on ``[batch, n]`` and return losses; a model should point at ``[batch, num_points]``."""
        obs, action = chunks["observation"][:, 0].to(self.policy.device), chunks["action"].to(self.policy.device)
        length = action.shape[1]
        if chunks.batch_dims != 2 or length > self.policy.chunk_size:
            expected = f"[batch, 1 to {self.policy.chunk_size}]"
            raise RolloutError(f"expected chunks {expected}, got {list(chunks.batch_size)}")
        if (normalizer := self.model.normalizer) is not None:
            normalizer.frozen = False
            self.model.update_normalizer(obs)
            normalizer.frozen = True
        error, pointed = self.model.imitation_loss(obs, action, generator=self.policy.generator)
        action_loss = error.mean()
        losses: dict[str, Tensor] = {"action_loss": action_loss.detach()}
        loss = action_loss
        if pointed is not None:
            point_loss = self._point_loss(pointed, points)
            loss = loss + self.cfg.point_coef * point_loss
            losses["point_loss"] = point_loss.detach()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.policy.parameters(), self.cfg.max_grad_norm)
        self.optimizer.step()
        self.schedule.step()
        return losses

    def state_dict(self) -> dict[str, Any]:
        """Return the optimiser's state and how far it came."""
        return {"optimizer": self.optimizer.state_dict(), "schedule": self.schedule.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what ``state_dict`` returned."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])

    def _point_loss(self, pointed: Tensor, points: Tensor | None) -> Tensor:
        normalizer = self.model.point_normalizer
        if points is None or normalizer is None or points.shape != pointed.shape:
            got = None if points is None else list(points.shape)
            raise RolloutError(f"points: the model points at {list(pointed.shape)}, got labels {got}")
        labels = points.to(pointed)
        normalizer.update(labels)
        return (pointed - normalizer(labels)).abs().sum(-1).mean()

    def _scale(self, step: int) -> float:
        """Return the factor on the step size: a rise, then a cosine to a tenth."""
        share = min(1.0, step / self.cfg.total_steps)
        return min(1.0, (step + 1) / self.cfg.warmup_steps) * (0.1 + 0.45 * (1.0 + math.cos(math.pi * share)))


class _ValuePPO(PPO):
    """PPO for a value head alone: the observations of its rollouts do not change how the policy sees them."""

    @property
    def _keeps_statistics(self) -> bool:
        return True


def warm_up_value(
    policy: Policy, env: VecEnv, cfg: PPOCfg, num_steps: int, rollouts: int, head: str = "model.to_value"
) -> list[float]:
    """Let the value head alone learn from rollouts ``[num_envs, num_steps]``; the policy acts as before, to the bit.

    A cloned policy acts well and judges badly: advantages from a value that knows nothing would undo what was cloned.
    ``env`` takes the policy's chunks. Returns the explained variance before each update: 1 is a perfect value.
    """
    with only_trained(policy, head):
        algorithm = _ValuePPO(
            cfg.replace(cuda_graphs=False, kl_coef=0.0, lr_warmup=0), policy
        )  # too few updates to record
        collector = SyncCollector(env, policy, algorithm.device, return_discount=algorithm.return_discount)
        return [algorithm.update(collector.collect(num_steps))["explained_variance"] for _ in range(rollouts)]
