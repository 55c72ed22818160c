"""``VLAPolicy``: a vision-language-action model as a policy that PPO and GRPO can train.

The block of a training config::

    {"name": "vla", "vla_config": {"model_path": "checkpoints/vla", "model_class": "tiny_vla", "model_config": {}}}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.models.vla.finetuning import LoRACfg, apply_lora, freeze_but
from embodichain.agents.rl.models.vla.loading import load_vla_model, saved_model_config
from embodichain.agents.rl.models.vla.model import ActsOnObservations, VLAModel, get_vla_model_class
from embodichain.agents.rl.utils.config import Count
from embodichain.agents.rl.utils.observations import Observation
from embodichain.config import Config, configclass
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
    """Arguments of the class; what the environment's spaces tell need not be given."""
    lora: LoRACfg | None = None
    """Train low-rank additions only."""
    trainable: list[str] | None = None
    """Parts of the model that are trained, such as ``to_action`` and ``to_value``; default: all that are not frozen."""


@configclass
class VLAPolicyCfg(Config):
    """The block of the policy ``vla``, without ``name`` and ``action_dim``."""

    vla_config: VLACfg = VLACfg()
    """The model."""
    chunk_size: Count | None = None
    """Actions per decision of a model class that does not derive from ``VLAModel``; others know it themselves."""


class VLAPolicy(Policy):
    """Lets a vision-language-action model choose chunks of actions.

    The model is a ``VLAModel``, or any module with ``forward(obs, deterministic) -> (action, log_prob, value)``,
    ``get_value(obs)`` and ``evaluate_actions(obs, actions)``; ``obs`` is the environment's nested TensorDict.
    """

    def __init__(
        self,
        obs_space: Any,
        action_space: Any,
        device: torch.device | str,
        model: nn.Module,
        *,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(model, ActsOnObservations):
            raise ConfigError(
                f"{type(model).__name__} lacks get_value(obs) or evaluate_actions(obs, actions): derive it from "
                "VLAModel, or add them",
                "model_class",
            )
        self.chunk_size = _chunk_size(model, chunk_size)
        expected = (self.chunk_size, action_space.shape[-1])
        if len(action_space.shape) == 2 and tuple(action_space.shape) != expected:
            raise ConfigError(
                f"the policy chooses chunks of {self.chunk_size} actions, the environment takes {action_space}",
                "policy",
            )
        if isinstance(model, VLAModel) and model.action_dim != expected[1]:
            raise ConfigError(f"action_dim: the model has {model.action_dim}, the environment {expected[1]}", "policy")
        self.model: nn.Module = model
        self.device = torch.device(device)
        self.to(self.device)

    def get_action(self, obs: Observation, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Choose a chunk: ``(action [batch, chunk_size, action_dim], log_prob [batch, chunk_size], value [batch])``."""
        if isinstance(self.model, VLAModel):
            return self.model(obs, deterministic, self.generator)
        return self.model(obs, deterministic)

    def get_value(self, obs: Observation) -> Tensor:
        """Return the value ``[batch]``."""
        return self._acting.get_value(obs)

    def evaluate_actions(self, obs: Observation, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``(log_prob, entropy)``, each ``[batch, chunk_size]``, and the value ``[batch]``."""
        return self._acting.evaluate_actions(obs, actions)

    def update_normalizer(self, obs: Observation) -> None:
        """Let the model's running statistics take in the observations of a rollout."""
        if isinstance(self.model, VLAModel):
            self.model.update_normalizer(obs)

    @property
    def _acting(self) -> ActsOnObservations:
        return cast(ActsOnObservations, self.model)

    @classmethod
    def build(cls, cfg: Mapping[str, Any], obs_space: Any, action_space: Any, device: torch.device) -> Self:
        """Construct the policy from its config block."""
        checked = VLAPolicyCfg.from_dict(cfg, source="policy")
        vla = checked.vla_config
        name, settings = saved_model_config(vla.model_path) if vla.model_path is not None else (None, {})
        name, settings = vla.model_class or name or "tiny_vla", {**settings, **vla.model_config}
        model_cls = get_vla_model_class(name)
        if issubclass(model_cls, VLAModel):
            settings = model_cls.complete_config(settings, obs_space, action_space)
        model = load_vla_model(vla.model_path, name, settings, device)
        if vla.lora is not None:
            apply_lora(model, vla.lora)
        if vla.trainable is not None:
            freeze_but(model, vla.trainable)
        return cls(obs_space, action_space, device, model, chunk_size=checked.chunk_size).train()


def _chunk_size(model: nn.Module, given: int | None) -> int:
    if not isinstance(model, VLAModel):
        return 1 if given is None else given
    if given not in (None, model.chunk_size):
        raise ConfigError(f"chunk_size: the model chooses {model.chunk_size} actions at a time, got {given}", "policy")
    return model.chunk_size
