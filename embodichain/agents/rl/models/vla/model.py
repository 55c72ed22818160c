"""The base class and registry of vision-language-action models; a subclass of ``VLAModel`` implements ``decode``."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import gymnasium as gym
import torch
from pydantic import Field
from tensordict import TensorDictBase
from torch import Generator, Tensor, nn

from embodichain.agents.rl.models.distributions import DistributionCfg, GaussianHead
from embodichain.agents.rl.models.flow import FlowCfg, FlowHead
from embodichain.agents.rl.models.mlp import MLP, ImageLayout
from embodichain.agents.rl.models.observation import (
    ObservationEntry,
    RunningNormalizer,
    entry_of,
    select_entries,
    space_entries,
)
from embodichain.agents.rl.models.tokens import TokenCfg, TokenHead, make_token_head
from embodichain.agents.rl.utils import Level, Registry
from embodichain.config.classes import MISSING, Config, Count, Number, Size, configclass
from embodichain.errors import ConfigError, ObservationError, RolloutError, UnknownNameError, nearest
from embodichain.extras import allowed_modules, check_trusted

Outcome = tuple[Tensor, Tensor, Tensor]
Space = gym.Space[Any]

_FACTORS: dict[str, tuple[Level, ...]] = {"flow": ("denoising_step",), "tokens": ("token",)}


class Decoded(NamedTuple):
    """Outputs of a model."""

    mean: Tensor | None
    """Mean of the chunk, ``[batch, chunk_size, action_dim]``; ``None`` for a model with an ``action_head``."""
    value: Tensor
    """Value, ``[batch]``."""
    points: Tensor | None = None
    """Predicted coordinates, normalised, ``[batch, num_points]``, if the model has ``num_points``."""
    features: Tensor | None = None
    """Input of the ``action_head``, ``[batch, width]``."""


@configclass
class VLAModelCfg(Config):
    """Inputs and outputs of a model; missing shapes are taken from the environment's spaces."""

    cameras: dict[str, tuple[Count, Count, Count]] = MISSING
    """Images: camera name to ``[height, width, channels]``. In a config, a list of names is enough."""
    proprio: dict[str, Size] = MISSING
    """Proprioception: key to width. In a config, a list of keys or groups is enough."""
    instruction_length: Annotated[int, Field(ge=0, le=16_384)] = MISSING
    """Length of ``instruction`` in bytes; 0 for a task without one."""
    action_dim: Size = MISSING
    """Dimension of an action."""
    chunk_size: Size = 4
    """Actions per decision."""
    head: Literal["gaussian", "flow", "tokens"] = "gaussian"
    """Action head: a Gaussian over the chunk, denoising by a flow, or tokens."""
    init_log_std: Number = -1.5
    """For gaussian: initial value of the learnable log-std of each action dimension."""
    flow: FlowCfg = FlowCfg()
    """For flow: settings of denoising."""
    velocity_sizes: Annotated[tuple[Size, ...], Field(max_length=16)] = (512, 512)
    """For flow: widths of the velocity network."""
    tokens: TokenCfg = TokenCfg()
    """For tokens: settings of tokens and their decoder."""
    num_points: Annotated[int, Field(ge=0, le=16_384)] = 0
    """Number of coordinates to predict as an auxiliary task of imitation, such as those of the goal."""


class VLAModel(nn.Module, ABC):
    """Maps images, an instruction and proprioception to a distribution over ``[chunk_size, action_dim]`` and a value.

    For the Gaussian head, ``decode`` returns the mean. For any other ``head``, it returns features, and the constructor
    of the subclass calls ``make_action_head`` with their width.
    """

    cfg_type: ClassVar[type[VLAModelCfg]] = VLAModelCfg
    """Class of the model's settings."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.cfg = self.cfg_type.from_dict(settings, source="model_config")
        if missing := self.cfg.validate():
            problem = "expected a value, which a policy takes from the environment's spaces and a call has to give"
            raise ConfigError([f"{name}: {problem}" for name in missing], "model_config")
        self.chunk_size, self.action_dim = self.cfg.chunk_size, self.cfg.action_dim
        self.has_decision = self.cfg.head != "gaussian"
        self.action_head: FlowHead | TokenHead | None = None
        self.head = GaussianHead(self.action_dim, DistributionCfg(init_log_std=self.cfg.init_log_std))
        if self.has_decision:
            self.head.requires_grad_(False)
        width = sum(self.cfg.proprio.values())
        self.normalizer = RunningNormalizer(width) if width else None
        self.point_normalizer = RunningNormalizer(self.cfg.num_points) if self.cfg.num_points else None

    @property
    def factors(self) -> tuple[Level, ...] | None:
        """Names of the factors of a chunk's probability; see ``Policy.factors``."""
        return _FACTORS.get(self.cfg.head, None if self.has_decision else ())

    @abstractmethod
    def decode(self, obs: TensorDictBase) -> Decoded:
        """Return the chunk's mean or the features, the value, and the points if there are any."""

    def make_action_head(self, width: int) -> FlowHead | TokenHead | None:
        """Return the action head for features ``[batch, width]``; ``None`` for the Gaussian."""
        cfg = self.cfg
        if cfg.head == "tokens":
            return make_token_head(width, self.chunk_size, self.action_dim, cfg.tokens)
        if cfg.head == "gaussian":
            return None
        inputs = FlowHead.velocity_inputs(width, self.chunk_size, self.action_dim)
        velocity = MLP(inputs, self.chunk_size * self.action_dim, cfg.velocity_sizes, activation="silu")
        return FlowHead(velocity, width, self.chunk_size, self.action_dim, cfg.flow)

    def forward(self, obs: TensorDictBase, deterministic: bool = False, generator: Generator | None = None) -> Outcome:
        """Return ``(action [batch, chunk_size, action_dim], log_prob [batch, chunk_size], value [batch])``.

        If ``chunk_size`` is 1, there is no chunk dimension.
        """
        if self.has_decision:
            return self.decide(obs, deterministic, generator)[:3]
        decoded = self.decode(obs)
        action, log_prob = self.head.sample(_required(decoded.mean, "mean"), deterministic, generator)
        return self._squeeze(action), self._squeeze(log_prob), decoded.value

    def decide(
        self, obs: TensorDictBase, deterministic: bool = False, generator: Generator | None = None
    ) -> tuple[Tensor, Tensor, Tensor, TensorDictBase]:
        """Return ``(action, log_prob, value, decision)`` of a model with an ``action_head``."""
        decoded = self.decode(obs)
        features = _required(decoded.features, "features")
        action, log_prob, decision = self._decision_head().sample(features, deterministic, generator)
        return self._squeeze(self.actions_of(action)), log_prob, decoded.value, decision

    def imitation_loss(
        self, obs: TensorDictBase, actions: Tensor, valid: Tensor | None = None, generator: Generator | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the imitation loss ``[batch]`` of ``actions`` ``[batch, n, action_dim]``, and the predicted points.

        For the Gaussian it is ``sum_d |mean - action|``: with multimodal actions, its minimum, the median, lies in a
        mode and the mean does not. ``valid`` ``[batch, n]`` masks the actions that count (default: all).
        """
        decoded = self.decode(obs)
        if self.has_decision:
            features = _required(decoded.features, "features")
            chunk = self.chunk_of(actions)
            return self._decision_head().imitation_loss(features, chunk, valid, generator), decoded.points
        mean = _required(decoded.mean, "mean")
        error = (mean[:, : actions.shape[1]] - actions).abs().sum(-1)
        if valid is None:
            return error.mean(-1), decoded.points
        return (error * valid).sum(-1) / valid.sum(-1).clamp(min=1), decoded.points

    def actions_of(self, chunk: Tensor) -> Tensor:
        """Convert a chunk of the ``action_head`` to actions of the environment."""
        return chunk

    def chunk_of(self, actions: Tensor) -> Tensor:
        """Convert actions to a chunk ``[batch, n, ...]`` of the ``action_head``: the inverse of ``actions_of``."""
        return actions

    def _decision_head(self) -> FlowHead | TokenHead:
        if self.action_head is None:
            problem = f"{type(self).__name__} calls no make_action_head"
            raise ConfigError(f"head: {problem}, which {self.cfg.head!r} needs; choose gaussian", "model_config")
        return self.action_head

    def get_value(self, obs: TensorDictBase) -> Tensor:
        return self.decode(obs).value

    def evaluate_actions(self, obs: TensorDictBase, actions: Tensor, decision: TensorDictBase | None = None) -> Outcome:
        decoded = self.decode(obs)
        if self.has_decision:
            if decision is None:
                raise RolloutError(f"head {self.cfg.head!r}: pass the decision that came with the actions")
            features = _required(decoded.features, "features")
            return (*self._decision_head().evaluate(features, decision), decoded.value)
        mean = _required(decoded.mean, "mean")
        log_prob, entropy = self.head.evaluate(mean, actions.reshape(mean.shape))
        return self._squeeze(log_prob), self._squeeze(entropy), decoded.value

    def update_normalizer(self, obs: TensorDictBase) -> None:
        """Update the running statistics of proprioception with observations."""
        if self.normalizer is not None:
            self.normalizer.update(self.proprioception(obs))

    def save_files(self, folder: Path) -> dict[str, Any]:
        """Write additional files to a folder; return the settings that point to them, as paths relative to it."""
        return {}

    def _squeeze(self, value: Tensor) -> Tensor:
        return value.squeeze(1) if self.chunk_size == 1 else value

    def image(self, obs: TensorDictBase, camera: str) -> Tensor:
        """Return a camera's image, float32 ``[batch, channels, height, width]`` in [-1, 1]."""
        value = entry_of(obs, ("image", *camera.split("/")), " Add the camera to env.observations.cameras.")
        expected = self.cfg.cameras[camera]
        if tuple(value.shape[1:]) != expected:
            raise ObservationError(f"image/{camera}: expected [batch, *{list(expected)}], got {list(value.shape)}")
        scaled = value.float() / 127.5 - 1.0 if value.dtype == torch.uint8 else value.float()
        return scaled.permute(0, 3, 1, 2)

    def instruction(self, obs: TensorDictBase) -> Tensor:
        """Return the instruction's bytes, int64 ``[batch, instruction_length]``."""
        return entry_of(obs, ("instruction",), " Add an instruction to the task.").long()

    def proprioception(self, obs: TensorDictBase) -> Tensor:
        """Return the proprioception as one vector, float32 ``[batch, width]``, not normalised."""
        parts = [entry_of(obs, tuple(key.split("/")), " Add it to the observations.") for key in self.cfg.proprio]
        return torch.cat([part.flatten(1).float() for part in parts], dim=1)

    @classmethod
    def complete_config(cls, given: Mapping[str, Any], obs_space: Space, action_space: Space) -> dict[str, Any]:
        """Add ``cameras``, ``proprio``, ``instruction_length`` and ``action_dim`` of the spaces to the settings.

        ``given`` may select cameras and vectors by name; the default is all cameras and the group ``robot``.
        """
        if not isinstance(obs_space, gym.spaces.Dict):
            raise ConfigError(f"expected nested observations with images, got {obs_space}", "observation_space")
        entries = {entry.name: entry for entry in space_entries(obs_space)}
        return {
            **given,
            "cameras": _cameras(given.get("cameras"), entries),
            "proprio": _proprio(given.get("proprio"), entries),
            "instruction_length": entries["instruction"].size if "instruction" in entries else 0,
            "action_dim": _action_dim(action_space, given.get("chunk_size")),
        }


def _required(part: Tensor | None, name: str) -> Tensor:
    if part is None:
        raise ConfigError(f"head: the model's decode returns no {name}, which this head needs", "model_config")
    return part


def _cameras(given: Any, entries: Mapping[str, ObservationEntry]) -> dict[str, list[int]]:
    images = {name.removeprefix("image/"): list(entry.shape) for name, entry in entries.items() if entry.is_image}
    chosen = list(images if given is None else _names(given, "cameras"))
    if missing := [name for name in chosen or [""] if name not in images]:
        camera = f"no camera {missing[0]!r}" if missing[0] else "no camera"
        known = nearest(missing[0], images)
        raise ObservationError(f"the observations have {camera}.{known} Add it to env.observations.cameras.")
    for name in chosen:
        shape = tuple(images[name])
        if len(shape) != 3 or not ImageLayout.of(shape, f"image/{name}").channels_last:
            problem = f"image/{name}: expected [height, width, channels], got {list(shape)}"
            raise ObservationError(f"{problem}. Wrap the environment so that channels come last.")
    shapes = {name: images[name] for name in chosen}
    if isinstance(given, Mapping) and any(list(given[name]) != shapes[name] for name in chosen):
        raise ConfigError(f"cameras: expected {shapes}, as the environment has them, got {dict(given)}", "model_config")
    return shapes


def _names(given: Any, setting: str) -> list[str]:
    """Return the names in a list, or the keys of a mapping; ``ConfigError`` if they are no strings."""
    names: list[Any] = list(given) if isinstance(given, Mapping | list | tuple) else [None]
    if not all(isinstance(name, str) for name in names):
        problem = f"{setting}: expected a list of names, got {given!r:.60} ({type(given).__name__})"
        raise ConfigError(problem, "model_config")
    return names


def _proprio(given: Any, entries: Mapping[str, ObservationEntry]) -> dict[str, int]:
    vectors = [entry for name, entry in entries.items() if not entry.is_image and name != "instruction"]
    if given is not None:
        given = _names(given, "proprio")
    else:
        given = ["robot"] if any(entry.path[0] == "robot" for entry in vectors) else []
    return {entry.name: entry.size for entry in select_entries(vectors, given, "proprio", "model_config")}


def _action_dim(action_space: Space, chunk_size: Any) -> int:
    shape = action_space.shape if isinstance(action_space, gym.spaces.Box) else None
    if shape is None or len(shape) not in (1, 2):
        raise ConfigError(
            f"expected a Box [action_dim] or [chunk_size, action_dim], got {action_space}", "action_space"
        )
    if len(shape) == 2 and chunk_size not in (None, shape[0]):
        problem = f"chunk_size: the environment takes chunks of {shape[0]} actions, got {chunk_size}"
        raise ConfigError(problem, "model_config")
    return int(shape[-1])


_MODELS = Registry[nn.Module]("model", nn.Module)
register_vla_model, get_registered_vla_model_names = _MODELS.register, _MODELS.names


def registered_name(model_cls: type[nn.Module]) -> str:
    """Return the registered name of a class, or else its dotted path."""
    dotted = f"{model_cls.__module__}.{model_cls.__qualname__}"
    return next((name for name, known in _MODELS.classes.items() if known is model_cls), dotted)


def get_vla_model_class(name: str, trusted_modules: Collection[str] = ()) -> type[nn.Module]:
    """Return a model class by registered name, or by ``module.Class`` if the module is trusted (``--trust``)."""
    if name in _MODELS.classes:
        return _MODELS.get(name)
    module_name, _, class_name = name.rpartition(".")
    if not module_name:
        hint = "A class of your own is named by its module, as in my_module.MyVLA, or registered by it."
        raise UnknownNameError(f"unknown model class {name!r}.{nearest(name, _MODELS.classes)} {hint}")
    check_trusted([module_name], {*trusted_modules, *allowed_modules()}, "model_class")
    members = vars(importlib.import_module(module_name))
    if class_name not in members:
        classes = [key for key, value in members.items() if isinstance(value, type)]
        raise UnknownNameError(f"module {module_name!r} has no class {class_name!r}.{nearest(class_name, classes)}")
    model_cls = members[class_name]
    if not isinstance(model_cls, type) or not issubclass(model_cls, nn.Module):
        raise ConfigError(f"{name!r}: expected a subclass of torch.nn.Module, got {model_cls!r}", "model_class")
    return model_cls
