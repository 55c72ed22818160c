"""What a vision-language-action model is: one Gaussian over a chunk of actions, and a value.

Any module will do for ``VLAPolicy`` that has ``forward(obs, deterministic) -> (action, log_prob, value)``,
``get_value(obs)`` and ``evaluate_actions(obs, actions) -> (log_prob, entropy, value)``. ``VLAModel`` gives all three to
an author who writes ``decode`` alone, and knows how to take shapes from an environment's spaces.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, NamedTuple, Protocol, Self, TypeVar, overload, runtime_checkable

import gymnasium as gym
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from embodichain.agents.rl.models.distributions import DistributionCfg, GaussianHead
from embodichain.agents.rl.models.observation import Leaf, RunningNormalizer, space_leaves
from embodichain.agents.rl.utils.config import Count
from embodichain.agents.rl.utils.observations import Observation, sorted_leaves
from embodichain.config import MISSING, Config, Field, configclass
from embodichain.errors import ConfigError, ObservationError, UnknownNameError, nearest
from embodichain.extras import allowed_modules, check_trusted

# MERGED spaces: From an environment's spaces to what a model has to know of its inputs and outputs.


def inputs_from_space(
    given: Mapping[str, Any], obs_space: gym.Space[Any], action_space: gym.Space[Any]
) -> dict[str, Any]:
    """Return ``cameras``, ``proprio``, ``instruction_length`` and ``action_dim`` for a pair of spaces.

    ``given`` may choose cameras and vectors by name (default: all cameras, and the group ``robot``), and says how long
    chunks are, which is checked against an action space of chunks.
    """
    if not isinstance(obs_space, gym.spaces.Dict):
        raise ConfigError(f"expected nested observations with pictures, got {obs_space}", "observation_space")
    leaves = {leaf.name: leaf for leaf in space_leaves(obs_space)}
    pictures = {name.removeprefix("image/"): leaf for name, leaf in leaves.items() if leaf.is_image}
    instruction = leaves.get("instruction")
    return {
        "cameras": _cameras(given.get("cameras"), pictures),
        "proprio": _proprio(given.get("proprio"), leaves),
        "instruction_length": 0 if instruction is None else instruction.size,
        "action_dim": _action_dim(action_space, given.get("chunk_size")),
    }


def leaf_of(obs: Observation, name: str, remedy: str) -> Tensor:
    """Return the tensor ``name`` of a nested observation, or say what is there and what to add."""
    if not isinstance(obs, TensorDictBase):
        raise ObservationError(f"{name!r} cannot be found in a flat tensor: pass the nested TensorDict")
    path = tuple(name.split("/"))
    value = obs.get(path, None)
    if not isinstance(value, Tensor):
        names = ["/".join(keys) for keys, _ in sorted_leaves(obs)]
        raise ObservationError(f"the observation lacks {name!r}.{nearest(name, names)} Add {remedy}.")
    return value


def _cameras(given: Any, pictures: Mapping[str, Leaf]) -> dict[str, list[int]]:
    chosen = list(pictures) if given is None else list(given)
    unknown = [name for name in chosen if name not in pictures]
    if unknown or not chosen:
        wanted = f"no camera {unknown[0]!r}" if unknown else "no camera"
        known = nearest(unknown[0] if unknown else "", pictures)
        raise ObservationError(f"the observations have {wanted}.{known} Add it to env.observations.cameras.")
    shapes = {name: list(pictures[name].shape) for name in chosen}
    if isinstance(given, Mapping) and any(list(given[name]) != shapes[name] for name in chosen):
        raise ConfigError(f"cameras: expected {shapes}, as the environment has them, got {dict(given)}", "model_config")
    return shapes


def _proprio(given: Any, leaves: Mapping[str, Leaf]) -> dict[str, int]:
    names = [leaf.name for leaf in leaves.values() if not leaf.is_image and leaf.name != "instruction"]
    if given is None:
        wanted = ["robot"] if any(name.startswith("robot/") for name in names) else []
    else:
        wanted = list(given)
    chosen: dict[str, int] = {}
    for entry in wanted:
        found = [name for name in names if name == entry or name.startswith(f"{entry}/")]
        if not found:
            raise ConfigError(f"proprio: the observations have no {entry!r}.{nearest(entry, names)}", "model_config")
        chosen |= {name: leaves[name].size for name in found}
    return chosen


def _action_dim(action_space: gym.Space[Any], chunk_size: Any) -> int:
    shape = action_space.shape if isinstance(action_space, gym.spaces.Box) else None
    if shape is None or len(shape) not in (1, 2):
        raise ConfigError(
            f"expected a Box [action_dim] or [chunk_size, action_dim], got {action_space}", "action_space"
        )
    if len(shape) == 2 and chunk_size is not None and shape[0] != chunk_size:
        raise ConfigError(
            f"chunk_size: the environment takes chunks of {shape[0]} actions, got {chunk_size}", "model_config"
        )
    return int(shape[-1])


# MERGED registry: Vision-language-action models by name; a class of the user's own only from a module that was allowed.


M = TypeVar("M", bound=type[nn.Module])

_MODELS: dict[str, type[nn.Module]] = {}


@overload
def register_vla_model(name: str, model_cls: M) -> M: ...
@overload
def register_vla_model(name: str) -> Callable[[M], M]: ...
def register_vla_model(name: str, model_cls: Any = None) -> Any:
    """Make a model class available to configs: ``register_vla_model("mine", Mine)``, or as a decorator."""
    if model_cls is None:
        return partial(register_vla_model, name)
    _check_module(name, model_cls)
    if _MODELS.get(name, model_cls) is not model_cls:
        raise ConfigError(f"the model name {name!r} is taken by {_MODELS[name].__name__}", "register_vla_model")
    _MODELS[name] = model_cls
    return model_cls


def get_registered_vla_model_names() -> list[str]:
    """Return the names that a config may use, sorted."""
    return sorted(_MODELS)


def registered_name(model_cls: type[nn.Module]) -> str:
    """Return the name under which a class is registered, else its dotted path."""
    for name, known in _MODELS.items():
        if known is model_cls:
            return name
    return f"{model_cls.__module__}.{model_cls.__qualname__}"


def get_vla_model_class(name: str, trusted_modules: Collection[str] = ()) -> type[nn.Module]:
    """Return the class registered under a name, or ``module.Class`` of a module that may be imported.

    A module may be imported if it is among ``trusted_modules``, or was allowed when the program started (``--trust``).
    """
    if name in _MODELS:
        return _MODELS[name]
    module_name, _, class_name = name.rpartition(".")
    if not module_name:
        hint = "a class of your own is named by its module, as in my_module.MyVLA, or registered by it"
        raise UnknownNameError(f"unknown model class {name!r}.{nearest(name, _MODELS)} {hint.capitalize()}.")
    check_trusted([module_name], {*trusted_modules, *allowed_modules()}, "model_class")
    module = importlib.import_module(module_name)
    found = vars(module).get(class_name)
    if found is None:
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        raise UnknownNameError(f"module {module_name!r} has no class {class_name!r}.{nearest(class_name, classes)}")
    _check_module(name, found)
    return found


def _check_module(name: str, model_cls: object) -> None:
    if not isinstance(model_cls, type) or not issubclass(model_cls, nn.Module):
        raise ConfigError(f"{name!r}: expected a subclass of torch.nn.Module, got {model_cls!r}", "model_class")


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
