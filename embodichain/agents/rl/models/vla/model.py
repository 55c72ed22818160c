"""What a vision-language-action model is: one Gaussian over a chunk of actions, and a value.

Any module will do for ``VLAPolicy`` that has ``forward(obs, deterministic) -> (action, log_prob, value)``,
``get_value(obs)`` and ``evaluate_actions(obs, actions) -> (log_prob, entropy, value)``. ``VLAModel`` gives all three to
an author who writes ``decode`` alone, and knows how to take shapes from an environment's spaces.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NamedTuple, Protocol, Self, runtime_checkable

import gymnasium as gym
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from embodichain.agents.rl.models.distributions import DistributionCfg, GaussianHead
from embodichain.agents.rl.models.normalizer import RunningNormalizer
from embodichain.agents.rl.models.vla.spaces import inputs_from_space, leaf_of
from embodichain.agents.rl.utils.config import Count
from embodichain.agents.rl.utils.observations import Observation
from embodichain.config import MISSING, Config, Field, configclass
from embodichain.errors import ConfigError, ObservationError

Outcome = tuple[Tensor, Tensor, Tensor]


class Decoded(NamedTuple):
    """What a model makes of observations."""

    mean: Tensor
    """Mean of the chunk, ``[batch, chunk_size, action_dim]``."""
    value: Tensor
    """Value, ``[batch]``."""
    points: Tensor | None = None
    """Where the model believes things to be, ``[batch, num_points]`` in units of their spread, if it points."""


@runtime_checkable
class ActsOnObservations(Protocol):
    """What ``VLAPolicy`` needs of a module."""

    def __call__(self, obs: Observation, deterministic: bool = False) -> Outcome:
        """Return ``(action, log_prob, value)``."""

    def get_value(self, obs: Observation) -> Tensor:
        """Return the value ``[batch]``."""

    def evaluate_actions(self, obs: Observation, actions: Tensor) -> Outcome:
        """Return ``(log_prob, entropy, value)``."""


@configclass
class VLAModelCfg(Config):
    """What every model sees and says; shapes that are not given are taken from the environment's spaces."""

    cameras: dict[str, tuple[Count, Count, Count]] = MISSING
    """Pictures: name of the camera to ``[height, width, channels]``. In a config a list of names is enough."""
    proprio: dict[str, Count] = MISSING
    """Vectors of the robot's own state: key to width. In a config a list of keys or groups is enough."""
    instruction_length: Annotated[int, Field(ge=0)] = MISSING
    """Bytes of ``instruction``; 0 for a task without words."""
    action_dim: Count = MISSING
    """Numbers per action."""
    chunk_size: Count = 4
    """Actions per decision."""
    init_log_std: float = -1.5
    """First value of the learnable log-std of every action."""
    num_points: Annotated[int, Field(ge=0)] = 0
    """Coordinates that the model learns to point out while it imitates, such as those of the goal that is meant."""


class VLAModel(nn.Module, ABC):
    """Pictures, words and proprioception to a Gaussian over ``[chunk_size, action_dim]`` and a value."""

    cfg_type: ClassVar[type[VLAModelCfg]] = VLAModelCfg
    """Class of the model's settings."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.cfg = self.cfg_type.from_dict(settings, source="model_config")
        missing = self.cfg.validate()
        if missing:
            problem = "expected a value, which a policy takes from the environment's spaces and a call has to give"
            raise ConfigError([f"{name}: {problem}" for name in missing], "model_config")
        self.chunk_size, self.action_dim = self.cfg.chunk_size, self.cfg.action_dim
        self.head = GaussianHead(self.action_dim, DistributionCfg(init_log_std=self.cfg.init_log_std))
        width = sum(self.cfg.proprio.values())
        self.normalizer = RunningNormalizer(width) if width else None
        self.point_normalizer = RunningNormalizer(self.cfg.num_points) if self.cfg.num_points else None

    @abstractmethod
    def decode(self, obs: TensorDictBase) -> Decoded:
        """Return the chunk's mean, the value, and the points where the model has any."""

    # --- what a policy calls --------------------------------------------------------------------------------------

    def forward(
        self, obs: TensorDictBase, deterministic: bool = False, generator: torch.Generator | None = None
    ) -> Outcome:
        """Return ``(action [batch, chunk_size, action_dim], log_prob [batch, chunk_size], value [batch])``.

        A chunk of one action comes without that dimension.
        """
        mean, value, _ = self.decode(obs)
        action, log_prob = self.head.sample(mean, deterministic, generator)
        return self._squeeze(action, 1), self._squeeze(log_prob, 1), value

    def get_value(self, obs: TensorDictBase) -> Tensor:
        """Return the value ``[batch]``."""
        return self.decode(obs).value

    def evaluate_actions(self, obs: TensorDictBase, actions: Tensor) -> Outcome:
        """Return ``(log_prob [batch, chunk_size], entropy [batch, chunk_size], value [batch])``."""
        mean, value, _ = self.decode(obs)
        log_prob, entropy = self.head.evaluate(mean, actions.reshape(mean.shape))
        return self._squeeze(log_prob, 1), self._squeeze(entropy, 1), value

    def update_normalizer(self, obs: TensorDictBase) -> None:
        """Let the running statistics of proprioception take in observations."""
        if self.normalizer is not None:
            self.normalizer.update(self.proprioception(obs))

    # --- what authors need ----------------------------------------------------------------------------------------

    def picture(self, obs: TensorDictBase, camera: str) -> Tensor:
        """Return a camera's picture, float32 ``[batch, channels, height, width]`` in [-1, 1]."""
        value = leaf_of(obs, f"image/{camera}", "the camera to env.observations.cameras")
        if tuple(value.shape[1:]) != self.cfg.cameras[camera]:
            expected = list(self.cfg.cameras[camera])
            raise ObservationError(f"image/{camera}: expected [batch, *{expected}], got {list(value.shape)}")
        scaled = value.float() / 127.5 - 1.0 if value.dtype == torch.uint8 else value.float()
        return scaled.permute(0, 3, 1, 2)

    def instruction(self, obs: TensorDictBase) -> Tensor:
        """Return the instruction's bytes, int64 ``[batch, instruction_length]``."""
        return leaf_of(obs, "instruction", "an instruction to the task").long()

    def proprioception(self, obs: TensorDictBase) -> Tensor:
        """Return the robot's own state as one vector, float32 ``[batch, width]``, not normalised."""
        parts = [leaf_of(obs, key, "it to the observations").flatten(1).float() for key in self.cfg.proprio]
        return torch.cat(parts, dim=1)

    @classmethod
    def complete_config(
        cls, given: Mapping[str, Any], obs_space: gym.Space[Any], action_space: gym.Space[Any]
    ) -> dict[str, Any]:
        """Return the settings with everything that the spaces tell; names are checked against them."""
        return {**given, **inputs_from_space(given, obs_space, action_space)}

    @classmethod
    def from_spaces(cls, obs_space: gym.Space[Any], action_space: gym.Space[Any], **settings: Any) -> Self:
        """Build the model for an environment's spaces."""
        return cls(**cls.complete_config(settings, obs_space, action_space))

    def _squeeze(self, value: Tensor, dim: int) -> Tensor:
        return value.squeeze(dim) if self.chunk_size == 1 else value
