"""Imitation learning: a policy learns from chunks of demonstrations, streamed or recorded."""

import math
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from embodichain.agents.rl.algo.gradient_steps import Float32Weights
from embodichain.agents.rl.algo.ppo import PPO, PPOCfg
from embodichain.agents.rl.collector.sync_collector import SyncCollector
from embodichain.agents.rl.models.observation import RunningNormalizer, entry_of
from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.models.vla.loading import only_trained
from embodichain.agents.rl.models.vla.model import VLAModel
from embodichain.agents.rl.models.vla_policy import VLAPolicy
from embodichain.agents.rl.utils.tensordicts import Observation
from embodichain.config.classes import Config, Count, NotNegative, Positive, Size, configclass
from embodichain.envs.vec_env import VecEnv
from embodichain.errors import ConfigError, ObservationError, RolloutError

MASK = "mask"
"""Key of a mask ``[batch, n]`` that is true for frames and false for padding."""
PADDED, PAST = "action_is_pad", "observation_is_pad"
"""Keys of chunks of an ``OnlineDataset``: masks of padded actions, and of padded past observations."""
_USUAL_STEPS = 1000
_BY_INSTRUCTION = "{instruction}"


@configclass
class ImitationCfg(Config):
    """Configuration for imitation learning."""

    batch_size: Count = 256
    """Chunks per gradient step."""
    learning_rate: Positive = 1e-3
    """Maximum learning rate of AdamW."""
    total_steps: Count | None = None
    """Gradient steps over which the learning rate decreases to a tenth, along a cosine; default: those of the run, or
    1000 without a run."""
    warmup_steps: Count = 50
    """Gradient steps over which the learning rate increases to its maximum."""
    weight_decay: NotNegative = 1e-4
    """Weight decay of AdamW."""
    max_grad_norm: Positive = 1.0
    """Maximum norm of the gradient, for clipping."""
    mixed_precision: Literal["off", "bf16"] = "off"
    """Precision of networks: off (float32) or bf16; weights stay float32."""
    sequence_length: Size = 16
    """Steps per training sequence of a recurrent policy; each starts with the initial state."""
    points: tuple[str, ...] = ()
    """For models with num_points: observation keys to predict, such as ``object/pos``. ``goal/{instruction}`` is the
    entry below ``goal`` whose name occurs in the instruction."""
    point_coef: NotNegative = 0.5
    """For models with num_points: weight of their prediction loss."""


class Imitation:
    """Supervised learning of a policy on chunks ``[batch, n]`` of demonstrations.

    The policy learns the actions of a chunk from its first observation; a recurrent policy uses all observations. If
    the policy's chunks are longer than ``n``, their remaining actions are ignored, and so are frames that ``mask`` or
    ``action_is_pad`` ``[batch, n]`` mark as padding. For a Gaussian only the mean is trained. The statistics of
    observations come from the demonstrations and stay frozen in later reinforcement learning, as new ones would change
    the actions.
    """

    def __init__(self, cfg: ImitationCfg, policy: Policy) -> None:
        self.cfg, self.policy = cfg, policy
        self.model: VLAModel | None = None
        if isinstance(policy, VLAPolicy):
            if not isinstance(policy.model, VLAModel):
                problem = f"expected a model that derives from VLAModel, got {type(policy.model).__name__}"
                raise ConfigError(problem, "policy")
            self.model = policy.model
        elif type(policy).imitation_loss is Policy.imitation_loss:
            raise ConfigError(f"{type(policy).__name__} cannot imitate: it has no imitation_loss of its own", "policy")
        self.normalizers = [
            module
            for name, module in policy.named_modules()
            if isinstance(module, RunningNormalizer) and not policy.in_critic(name) and "point_normalizer" not in name
        ]
        trained = [p for name, p in policy.named_parameters() if p.requires_grad and not policy.in_critic(name)]
        if not trained:
            raise ConfigError(f"none of {type(policy).__name__}'s parameters is to be trained", "policy")
        self._weights = Float32Weights(trained)
        parameters = self._weights.parameters
        self.optimizer = torch.optim.AdamW(parameters, lr=cfg.learning_rate, weight_decay=cfg.weight_decay)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._scale)

    @property
    def chunk_size(self) -> int:
        """Maximum length of chunks: the policy's chunk size, or ``sequence_length`` for a recurrent one."""
        return self.cfg.sequence_length if self.policy.is_recurrent else self.policy.chunk_size

    def update(self, chunks: TensorDictBase, points: Tensor | None = None) -> dict[str, Tensor]:
        """Take one gradient step on chunks ``[batch, n]`` and return the losses.

        ``points`` ``[batch, num_points]`` are the labels of a model with ``num_points``.
        """
        policy, length = self.policy, chunks.batch_size[1] if chunks.batch_dims == 2 else 0
        if not 0 < length <= self.chunk_size:
            expected = f"[batch, 1 to {self.chunk_size}]"
            raise RolloutError(f"expected chunks {expected}, got {list(chunks.batch_size)}")
        if PAST in chunks.keys():  # noqa: SIM118 - it iterates rows
            raise RolloutError("the chunks have past observations, which no policy reads: leave out obs_horizon")
        obs = chunks["observation"] if policy.is_recurrent else chunks["observation"][:, 0]
        obs, action = obs.to(policy.device), chunks["action"].to(policy.device)
        valid = _valid(chunks)
        valid = valid if valid is None else valid.to(policy.device)
        self._update_statistics(obs if valid is None or not policy.is_recurrent else obs[valid])
        with torch.autocast(policy.device.type, torch.bfloat16, enabled=self.cfg.mixed_precision == "bf16"):
            error, pointed = self._error(obs, action, valid)
        loss = action_loss = error.float().mean()
        losses: dict[str, Tensor] = {"action_loss": action_loss.detach()}
        if pointed is not None:
            labels = self._labels(obs) if points is None and self.cfg.points else points
            point_loss = self._point_loss(pointed.float(), labels)
            loss = loss + self.cfg.point_coef * point_loss
            losses["point_loss"] = point_loss.detach()
        if (auxiliary := policy.take_auxiliary_loss()) is not None:
            loss, losses["auxiliary_loss"] = loss + auxiliary, auxiliary.detach()
        self._weights.clear_gradients()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self._weights.take_gradients()
        norm = nn.utils.clip_grad_norm_(self._weights.parameters, self.cfg.max_grad_norm)
        losses["grad_norm"] = norm.detach()
        self.optimizer.step()
        self._weights.write()
        self.schedule.step()
        return losses

    def state_dict(self) -> dict[str, Any]:
        """Return the state of optimiser and schedule."""
        state = {"optimizer": self.optimizer.state_dict(), "schedule": {"last_epoch": self.schedule.last_epoch}}
        precise = self._weights.state_dict()
        return state | {"float32": precise} if precise else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from ``state_dict``."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.last_epoch = int(state["schedule"]["last_epoch"])
        self._weights.load_state_dict(state.get("float32", []))
        for group in self.optimizer.param_groups:  # settings come from the config
            group["lr"] = self.cfg.learning_rate * self._scale(self.schedule.last_epoch)
            group["weight_decay"] = self.cfg.weight_decay

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next gradient step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def _update_statistics(self, obs: Observation) -> None:
        """Update the statistics of observations, which are frozen otherwise."""
        for normalizer in self.normalizers:
            normalizer.frozen = False
        if self.model is not None:
            self.model.update_normalizer(obs)
        elif self.normalizers:
            self.policy.update_normalizer(obs)
        for normalizer in self.normalizers:
            normalizer.frozen = True

    def _error(self, obs: Any, action: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the imitation loss ``[batch]`` of the actions, and the predicted points."""
        if self.model is not None:
            return self.model.imitation_loss(obs, action, valid, generator=self.policy.generator)
        return self.policy.imitation_loss(obs, action, valid), None

    def _labels(self, obs: TensorDictBase) -> Tensor:
        """Return the observations that ``points`` names, ``[batch, num_points]``."""
        return torch.cat([_named(obs, name).flatten(1).float() for name in self.cfg.points], dim=1)

    def _point_loss(self, pointed: Tensor, points: Tensor | None) -> Tensor:
        normalizer = None if self.model is None else self.model.point_normalizer
        if points is None or normalizer is None or points.shape != pointed.shape:
            got = "none: name them in algorithm.cfg.points" if points is None else str(list(points.shape))
            raise RolloutError(f"points: the model points at {list(pointed.shape)}, got labels {got}")
        labels = points.to(pointed)
        normalizer.update(labels)
        return (pointed - normalizer(labels)).abs().sum(-1).mean()

    def _scale(self, step: int) -> float:
        """Return the factor of the learning rate: linear warmup, times a cosine from 1 to a tenth."""
        share = min(1.0, step / (self.cfg.total_steps or _USUAL_STEPS))
        return min(1.0, (step + 1) / self.cfg.warmup_steps) * (0.1 + 0.45 * (1.0 + math.cos(math.pi * share)))


def _valid(chunks: TensorDictBase) -> Tensor | None:
    """Return a mask ``[batch, n]`` of frames that are not padding; ``None`` if there is no padding."""
    keys = chunks.keys()
    valid = [chunks[MASK]] if MASK in keys else []
    valid += [~chunks[PADDED]] if PADDED in keys else []
    return valid[0] & valid[-1] if valid else None


def _named(obs: TensorDictBase, name: str) -> Tensor:
    """Return one entry ``[batch, ...]`` of observations; ``{instruction}`` selects the one the instruction names."""
    path = tuple(name.split("/"))
    if path[-1] != _BY_INSTRUCTION:
        return entry_of(obs, path)
    group, instruction = obs.get(path[:-1], None), entry_of(obs, ("instruction",))
    if not isinstance(group, TensorDictBase):
        raise ObservationError(f"points: {name!r} needs observations below {'/'.join(path[:-1])!r}, and there are none")
    chosen: Tensor | None = None
    for word in sorted(group.keys()):
        letters = torch.tensor(list(word.encode()), dtype=instruction.dtype, device=instruction.device)
        occurs = (instruction.unfold(-1, len(letters), 1) == letters).all(-1).any(-1)
        part = group[word] * occurs.view(-1, *[1] * (group[word].ndim - 1))
        chosen = part if chosen is None else chosen + part
    if chosen is None:
        raise ObservationError(f"points: there is nothing below {'/'.join(path[:-1])!r}")
    return chosen


class _ValuePPO(PPO):
    """PPO that trains only a value head: the policy's observation statistics stay frozen."""

    @property
    def _freezes_statistics(self) -> bool:
        return True


def warm_up_value(
    policy: Policy, env: VecEnv, cfg: PPOCfg, num_steps: int, rollouts: int, head: str = "model.to_value"
) -> list[float]:
    """Train only the value head on rollouts ``[num_envs, num_steps]``; the policy's actions do not change.

    Do this after imitation: advantages from an untrained value head would destroy the policy. ``env`` takes the
    policy's chunks. Returns the explained variance before each update; 1 is perfect.
    """
    with only_trained(policy, head):
        # Too few updates for CUDA graphs
        algorithm = _ValuePPO(cfg.replace(cuda_graphs=False, kl_coef=0.0, lr_warmup=0), policy)
        collector = SyncCollector(env, policy, algorithm.device, return_discount=algorithm.return_discount)
        return [algorithm.update(collector.collect(num_steps))["explained_variance"] for _ in range(rollouts)]
