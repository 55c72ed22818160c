"""``VLAPolicy``: a vision-language-action model as a policy that PPO and GRPO can train.

Config block: ``{"name": "vla", "vla_config": {"model_path": "checkpoints/vla", "model_class": "tiny_vla"}}``.
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
    """The model and its weights."""

    model_path: str | None = None
    """Folder or file of the weights; ``null`` for random weights."""
    model_class: str | None = None
    """Registered name, or ``module.Class`` of a trusted module; default: the class in the folder's config."""
    model_config: dict[str, Any] = {}
    """Arguments of the class; those that follow from the environment's spaces are optional."""
    lora: LoRACfg | None = None
    """Train only low-rank adapters (LoRA)."""
    trainable: list[str] | None = None
    """Submodules to train, such as ``to_action`` and ``to_value``; default: all that are not frozen."""
    freeze_normalizer: bool | None = None
    """Whether reinforcement learning freezes the statistics of proprioception; default: only for a model trained by
    imitation, whose actions new statistics would change."""


@configclass
class VLAPolicyCfg(Config):
    """The block of the policy ``vla``, without ``name`` and ``action_dim``."""

    vla_config: VLACfg = VLACfg()
    """The model."""
    chunk_size: Size | None = None
    """Actions per decision, for a model class that does not derive from ``VLAModel``."""


@runtime_checkable
class ActsOnObservations(Protocol):
    """The methods that ``VLAPolicy`` needs, besides ``forward(obs, deterministic)``."""

    def get_value(self, obs: Observation) -> Tensor: ...

    def evaluate_actions(self, obs: Observation, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...


class VLAPolicy(Policy):
    """A policy that chooses chunks of actions with a vision-language-action model.

    The model is a ``VLAModel``, or any module with ``forward(obs, deterministic) -> (action, log_prob, value)``,
    ``get_value(obs)`` and ``evaluate_actions(obs, actions)``; ``obs`` is the environment's nested TensorDict.
    """

    cfg_type: ClassVar[type[Config] | None] = VLAPolicyCfg
    critic_parts = ("model.to_value",)

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
        self.factors = getattr(model, "factors", None)
        self.freeze_normalizer = freeze_normalizer
        """Whether the statistics of proprioception are frozen in updates; ``None`` leaves that to the model."""
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

    @property
    def lacks_statistics(self) -> bool:
        if not isinstance(self.model, VLAModel) or self.model.normalizer is None or self.freeze_normalizer:
            return False
        if self.freeze_normalizer is not None:
            self.model.normalizer.frozen = self.freeze_normalizer
        return self.model.normalizer.is_empty

    @classmethod
    def settings_below(cls, cfg: Mapping[str, Any]) -> dict[tuple[str, ...], type[Config]]:
        given = cfg.get("vla_config")
        vla: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
        name = vla.get("model_class") or ("tiny_vla" if vla.get("model_path") is None else None)
        model_cls = get_vla_model_class(name) if isinstance(name, str) else nn.Module
        return {("vla_config", "model_config"): model_cls.cfg_type} if issubclass(model_cls, VLAModel) else {}

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
