"""Base class of pretrained policies of other libraries, and functions that read their files.

A checkpoint of LeRobot or transformers specifies the inputs of its policy by its own names, and the dimension of
actions. ``PretrainedVLA.complete_config`` matches them to an environment, and lists what is missing.
"""

import json
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import gymnasium as gym
import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from tensordict import TensorDictBase
from torch import Tensor, nn

from embodichain.agents.rl.models.observation import ObservationEntry, select_entries, space_entries
from embodichain.agents.rl.models.vla.hf_backbone import tokenize
from embodichain.agents.rl.models.vla.model import Space, VLAModel, VLAModelCfg
from embodichain.config.classes import Size, configclass
from embodichain.errors import CheckpointError, ConfigError, ObservationError, nearest

STATE, ACTION, IMAGE = "observation.state", "action", "observation.images."
INDEX_FILE, WEIGHTS_FILE = "model.safetensors.index.json", "model.safetensors"
_STATES = ("state", "robot/qpos")
"""Keys that may hold the state: those that recordings write as ``observation.state``."""


@configclass
class PretrainedVLACfg(VLAModelCfg):
    """Settings of pretrained policies of other libraries; most are read from the checkpoint's folder."""

    image_keys: tuple[str, ...] = ()
    """Names of the images that the policy expects."""
    state_dim: Annotated[int, Field(ge=0, le=16_384)] = 0
    """Dimension of the state; 0 if the policy has none."""
    inputs: dict[str, str | tuple[str, ...] | None] = {}
    """Observation keys of the policy's inputs: ``{"observation.images.top": "image/front", "observation.state":
    ["robot/qpos"]}``; default: the keys with the same name. ``null`` leaves out an image."""
    instruction: str | None = None
    """Instruction for tasks without one."""
    max_chunk_size: Size = 1
    """Maximum number of actions per decision."""
    backbone_path: str | None = None
    """Folder with the config and tokenizer of the language model; nothing is downloaded."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the pretrained backbone; the action and value heads are float32."""
    freeze: tuple[Literal["vision", "language"], ...] = ("vision", "language")
    """Parts of the backbone that are not trained."""


class PretrainedVLA(VLAModel):
    """A pretrained policy of another library; it keeps its own statistics for normalisation."""

    cfg_type: ClassVar[type[VLAModelCfg]] = PretrainedVLACfg
    cfg: PretrainedVLACfg
    new_parts: ClassVar[tuple[str, ...]] = ("head", "to_value")
    """Submodules that the checkpoint does not contain; they keep their initial weights."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**self._unmatched(checked(self.cfg_type, settings)), **settings})
        self.normalizer = None  # the policy has its own statistics
        if self.cfg.num_points:
            raise ConfigError("num_points: a pretrained policy does not point; leave it out", "model_config")

    @classmethod
    @abstractmethod
    def read_config(cls, folder: Path, content: Mapping[str, Any]) -> dict[str, Any]:
        """Convert the other library's ``config.json`` to settings of this class."""

    @abstractmethod
    def foreign_weights(self, folder: Path) -> dict[str, Tensor]:
        """Return the weights in the other library's folder, by the names of this model."""

    def tokens_of(self, obs: TensorDictBase, batch: int, encode: Any, length: int) -> tuple[Tensor, Tensor]:
        """Return token ids ``[batch, length]`` of the instruction, and a mask of the text tokens."""
        if self.cfg.instruction_length and self.cfg.instruction is None:
            return tokenize(self.instruction(obs), encode, length)
        text = torch.tensor([list((self.cfg.instruction or "").encode()) or [0]])
        device = next(self.parameters()).device
        ids, mask = tokenize(text, encode, length)
        return ids.to(device).expand(batch, -1), mask.to(device).expand(batch, -1)

    @staticmethod
    def _unmatched(settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return placeholder inputs for a model that is built without an environment."""
        keys, given = settings.get("image_keys", ()), settings.get("inputs", {})
        cameras = {_camera(key, given): (1, 1, 3) for key in keys if not _left_out(key, given)}
        state = settings.get("state_dim", 0)
        return {"cameras": cameras, "proprio": {_STATES[-1]: state} if state else {}, "instruction_length": 256}

    @classmethod
    def complete_config(cls, given: Mapping[str, Any], obs_space: Space, action_space: Space) -> dict[str, Any]:
        """Match the policy's inputs to the spaces; return completed settings, or raise ``ConfigError``."""
        checked(cls.cfg_type, given)
        entries = {entry.name: entry for entry in space_entries(obs_space)}
        images = {n.removeprefix("image/"): e for n, e in entries.items() if e.is_image and len(e.shape) == 3}
        vectors = [entry for entry in entries.values() if not entry.is_image and entry.name != "instruction"]
        problems = list(_misplaced(given))
        inputs = given.get("inputs", {})
        cameras = dict(_match_cameras(given.get("image_keys", ()), inputs, images, problems))
        proprio = _match_state(int(given.get("state_dim", 0)), inputs, vectors, problems)
        length = entries["instruction"].size if "instruction" in entries else 0
        if not length and given.get("instruction") is None:
            problems.append(
                "instruction: the observations have none; set model_config.instruction to what the policy is to do"
            )
        expected, shape = given.get("action_dim"), action_space.shape
        if not isinstance(action_space, gym.spaces.Box) or shape is None or shape[-1] != expected:
            numbers = shape[-1] if shape else action_space
            problems.append(f"{ACTION}: the policy chooses {expected} numbers, the environment takes {numbers}")
        chunk, most = given.get("chunk_size", 1), given.get("max_chunk_size", 1)
        if isinstance(chunk, int) and chunk > most:
            problems.append(f"chunk_size: the policy chooses at most {most} actions at a time, got {chunk}")
        if problems:
            raise ConfigError([f"the policy does not fit the environment: {p}" for p in problems], "model_config")
        return {**given, "cameras": cameras, "proprio": proprio, "instruction_length": length}

    def image(self, obs: TensorDictBase, camera: str) -> Tensor:
        """Return a camera's image, float32 ``[batch, 3, height, width]`` in [0, 1], of any height and width."""
        value = obs.get(("image", *camera.split("/")), None)
        if value is None:
            raise ObservationError(f"image/{camera} is missing. Add the camera to env.observations.cameras.")
        scaled = value.float() / 255.0 if value.dtype == torch.uint8 else value.float()
        return scaled.permute(0, 3, 1, 2)


def checked(cfg_type: type[VLAModelCfg], settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Check the types of settings, except those that an environment completes; return the settings."""
    own = {name: value for name, value in settings.items() if name not in ("cameras", "proprio", "action_dim")}
    cfg_type.from_dict(own, source="model_config")
    return settings


def _misplaced(given: Mapping[str, Any]) -> Iterator[str]:
    """Yield messages about ``cameras`` or ``proprio`` lists, and about unknown names in ``inputs``."""
    for name in ("cameras", "proprio"):
        if isinstance(given.get(name), list | tuple):
            yield f"{name}: a pretrained policy expects inputs of its own; say where they are with inputs"
    expected = [*given.get("image_keys", ()), *([STATE] if given.get("state_dim") else [])]
    for key in given.get("inputs", {}):
        if key not in expected:
            yield f"inputs.{key}: the policy does not expect it.{nearest(key, expected)}"


def _left_out(key: str, inputs: Mapping[str, Any]) -> bool:
    return key in inputs and inputs[key] is None


def _camera(key: str, inputs: Mapping[str, Any]) -> str:
    """Return the name of the camera for an image of the policy."""
    return str(inputs.get(key, key.removeprefix(IMAGE))).removeprefix("image/")


def _match_cameras(
    keys: Collection[str], inputs: Mapping[str, Any], images: Mapping[str, ObservationEntry], problems: list[str]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    taken = dict[str, str]()
    if keys and all(_left_out(key, inputs) for key in keys):
        problems.append("inputs: every image is left out; the policy needs at least one")
    for key in keys:
        if _left_out(key, inputs):
            continue
        name = _camera(key, inputs)
        if key not in inputs and len(keys) == len(images) == 1 and not key.startswith(IMAGE):
            name = next(iter(images))  # the only image, without a camera name
        if name not in images:
            there = ", ".join(images) or "none"
            how = (
                f"; set inputs.{key} to one of them, or to null to leave it out"
                if images
                else "; add it to env.observations.cameras"
            )
            problems.append(f"{key}: there is no camera {name!r} among image: {there}{how}")
        elif images[name].shape[-1] != 3:
            problems.append(f"{key}: expected image/{name} [height, width, 3], got {list(images[name].shape)}")
        elif name in taken:
            problems.append(f"{key}: image/{name} is {taken[name]} already; set inputs.{key} to another camera")
        else:
            taken[name] = key
            yield name, images[name].shape


def _match_state(
    width: int, inputs: Mapping[str, Any], vectors: list[ObservationEntry], problems: list[str]
) -> dict[str, int]:
    if not width:
        return {}
    given = inputs.get(STATE)
    sizes = {entry.name: entry.size for entry in vectors}
    names = next(([name] for name in _STATES if name in sizes), []) if given is None else given
    names = [names] if isinstance(names, str) else list(names)
    try:
        chosen = [entry for name in names for entry in select_entries(vectors, [name], STATE, "model_config")]
    except ConfigError as error:
        problems.append(str(error))
        return {}
    found = sum(entry.size for entry in chosen)
    if found != width:
        there = ", ".join(f"{name} ({size})" for name, size in sizes.items()) or "none"
        what = f"{' + '.join(names)} has {found}" if names else "there is no robot/qpos"
        problems.append(
            f"{STATE}: the policy expects {width} numbers, {what}; set inputs.{STATE} to vectors of: {there}"
        )
    return {entry.name: entry.size for entry in chosen}


def value_head(width: int) -> nn.Sequential:
    """Return an MLP whose initial output is zero."""
    last = nn.Linear(width, 1)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), last)


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder: one, or the shards that its index names."""
    if (folder / INDEX_FILE).is_file():
        mapping = read_json(folder / INDEX_FILE).get("weight_map")
        if not isinstance(mapping, dict) or not all(isinstance(name, str) for name in mapping.values()):
            raise CheckpointError(f"{folder / INDEX_FILE}: weight_map: expected the file of every tensor")
        names = sorted(set(mapping.values()))
        if strange := [name for name in names if not name.endswith(".safetensors") or set(name) & set("/\\\0")]:
            problem = f"expected names of safetensors files in its folder, got {strange[0]!r:.80}"
            raise CheckpointError(f"{folder / INDEX_FILE}: weight_map: {problem}")
        files = [folder / name for name in names]  # not resolved: in a Hub cache these are links
    else:
        files = [folder / WEIGHTS_FILE]
    for file in files:
        if not file.is_file():
            pickled = next(folder.glob("*.bin"), None)
            what = "copy the whole checkpoint, with all its files"
            if pickled is not None:
                what = f"{pickled.name} is not read, as pickled files can run code: save the policy as safetensors"
            raise CheckpointError(f"{folder}: there is no {file.name}; {what}")
    return files


def tensor_shapes(folder: Path) -> dict[str, list[int]]:
    """Return the shapes of all tensors in a folder by name, without reading their data."""
    shapes = dict[str, list[int]]()
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as opened:
                shapes |= {name: list(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from None
    return shapes


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of one safetensors file."""
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: expected an object, got {content!r:.60}")
    return content


def setting(content: Mapping[str, Any], key: str, kind: Any, source: Path, default: Any = ...) -> Any:
    """Return a setting of another library's config; ``CheckpointError`` if it is missing or of another type."""
    value = content.get(key, default)
    if value is ...:
        raise CheckpointError(f"{source}: {key} is missing; is this the folder of a whole policy?")
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise CheckpointError(f"{source}: {key}: expected {getattr(kind, '__name__', kind)}, got {value!r:.60}")
    return value
