"""From an environment's spaces to what a model has to know of its inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
from tensordict import TensorDictBase
from torch import Tensor

from embodichain.agents.rl.models.observation import Leaf, space_leaves
from embodichain.agents.rl.utils.observations import Observation, sorted_leaves
from embodichain.errors import ConfigError, ObservationError, nearest


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
