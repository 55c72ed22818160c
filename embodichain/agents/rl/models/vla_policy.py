"""``VLAPolicy``: a vision-language-action model as a policy that PPO and GRPO can train.

Its block is ``{"name": "vla", "vla_config": {"model_path": "checkpoints/vla", "model_class": "tiny_vla"}}``.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, Self, cast, runtime_checkable

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from embodichain.agents.rl.models.policy import Evaluation, Policy
from embodichain.agents.rl.models.vla.loading import (
    LoRACfg,
    apply_lora,
    class_name,
    freeze_but,
    load_vla_model,
    saved_config,
)
from embodichain.agents.rl.models.vla.model import VLAModel, get_vla_model_class
from embodichain.agents.rl.utils.tensordicts import Observation
from embodichain.config.classes import Config, Size, configclass
from embodichain.errors import ConfigError

__all__ = ["VLACfg", "VLAPolicy", "VLAPolicyCfg", "load_vla_model"]


@configclass
class VLACfg(Config):
    """Which model, and where its weights come from."""

    model_path: str | None = None
    """Folder or file of the weights; ``null`` for random ones."""
    model_class: str | None = None
    """Registered name, or ``module.Class`` of a module that is trusted; default: what the folder says."""
    model_config: dict[str, Any] = {}
    """Arguments of the class; what the environment's spaces say need not be given."""
    lora: LoRACfg | None = None
    """Train low-rank additions only."""
    trainable: list[str] | None = None
    """Parts of the model that are trained, such as ``to_action`` and ``to_value``; default: all that are not frozen."""
    freeze_normalizer: bool | None = None
    """Whether the statistics of proprioception stay as they are in reinforcement learning; default: those of a model
    that imitated do, as other ones would change how it acts."""


@configclass
class VLAPolicyCfg(Config):
    """The block of the policy ``vla``, without ``name`` and ``action_dim``."""

    vla_config: VLACfg = VLACfg()
    """The model."""
    chunk_size: Size | None = None
    """Actions per decision of a model class that does not derive from ``VLAModel``; others know it themselves."""


@runtime_checkable
class ActsOnObservations(Protocol):
    """What ``VLAPolicy`` needs of a module, besides being callable with ``(obs, deterministic)``."""

    def get_value(self, obs: Observation) -> Tensor: ...

    def evaluate_actions(self, obs: Observation, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...


class VLAPolicy(Policy):
    """Lets a vision-language-action model choose chunks of actions.

    The model is a ``VLAModel``, or any module with ``forward(obs, deterministic) -> (action, log_prob, value)``,
    ``get_value(obs)`` and ``evaluate_actions(obs, actions)``; ``obs`` is the environment's nested TensorDict.
    """

    cfg_type: ClassVar[type[Config] | None] = VLAPolicyCfg

    def __init__(
        self,
        obs_space: Any,
        action_space: Any,
        device: torch.device | str,
        model: nn.Module,
        *,
        chunk_size: int | None = None,
        freeze_normalizer: bool | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(model, ActsOnObservations):
            problem = f"{type(model).__name__} lacks get_value(obs) or evaluate_actions(obs, actions)"
            raise ConfigError(f"{problem}: derive it from VLAModel, or add them", "model_class")
        self.chunk_size = model.chunk_size if isinstance(model, VLAModel) else chunk_size or 1
        problems = []
        if chunk_size not in (None, self.chunk_size):
            problems.append(f"chunk_size: the model chooses {self.chunk_size} actions at a time, got {chunk_size}")
        if isinstance(model, VLAModel) and model.action_dim != action_space.shape[-1]:
            problems.append(f"action_dim: the model has {model.action_dim}, the environment {action_space.shape[-1]}")
        if len(action_space.shape) == 2 and action_space.shape[0] != self.chunk_size:
            problems.append(f"the policy chooses chunks of {self.chunk_size}, the environment takes {action_space}")
        if problems:
            raise ConfigError(problems, "policy")
        self.model: Any = model
        self.has_decision = bool(getattr(model, "has_decision", False))
        if isinstance(getattr(model, "to_value", None), nn.Module):
            self.critic_parts = ("model.to_value",)
        self.freeze_normalizer = freeze_normalizer
        """Whether updates leave the statistics of proprioception as they are; ``None``: if they are frozen already."""
        self.device = torch.device(device)
        self.to(self.device)

    def get_action(self, obs: Observation, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        noise = (self.generator,) if isinstance(self.model, VLAModel) else ()
        return cast(Evaluation, self.model(obs, deterministic, *noise))

    def get_value(self, obs: Observation) -> Tensor:
        return cast(Tensor, self.model.get_value(obs))

    def decide(
        self, obs: Observation, deterministic: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, TensorDictBase | None]:
        if not self.has_decision:
            return super().decide(obs, deterministic)
        return cast(
            tuple[Tensor, Tensor, Tensor, TensorDictBase], self.model.decide(obs, deterministic, self.generator)
        )

    def evaluate_actions(self, obs: Observation, actions: Tensor, decision: TensorDictBase | None = None) -> Evaluation:
        parts = (decision,) if self.has_decision else ()
        return cast(Evaluation, self.model.evaluate_actions(obs, actions, *parts))

    def update_normalizer(self, obs: Observation) -> None:
        if not isinstance(self.model, VLAModel) or self.model.normalizer is None:
            return
        if self.freeze_normalizer is not None:
            self.model.normalizer.frozen = self.freeze_normalizer
        self.model.update_normalizer(obs)

    @classmethod
    def build(cls, cfg: Mapping[str, Any], obs_space: Any, action_space: Any, device: torch.device) -> Self:
        checked = VLAPolicyCfg.from_dict(cfg, source="policy")
        vla = checked.vla_config
        saved = saved_config(vla.model_path)
        name = class_name(vla.model_class, saved, vla.model_path) or "tiny_vla"
        settings = {**saved.get("model_config", {}), **vla.model_config}
        if issubclass(model_cls := get_vla_model_class(name), VLAModel):
            settings = model_cls.complete_config(settings, obs_space, action_space)
        model = load_vla_model(vla.model_path, name, settings, device)
        if vla.lora is not None:
            apply_lora(model, vla.lora)
        if vla.trainable is not None:
            freeze_but(model, vla.trainable)
        size, freeze = checked.chunk_size, vla.freeze_normalizer
        return cls(obs_space, action_space, device, model, chunk_size=size, freeze_normalizer=freeze).train()
