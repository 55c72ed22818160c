"""SmolVLA, as saved by LeRobot: a small vision-language model, and an action expert that denoises actions.

The language model processes images, instruction and state once; its keys and values are the context. In every denoising
step, the expert takes a chunk of noisy actions and the time. Its layers attend to the context, or causally to context
and actions. So an action does not depend on later ones: a policy with a smaller chunk size than the checkpoint's
denoises only its own actions, with the same result.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from embodichain.agents.rl.models.flow import FlowCfg
from embodichain.agents.rl.models.vla.hf_backbone import LOCAL, MODEL_TYPES, load_tokenizer, reading, refuse_code
from embodichain.agents.rl.models.vla.model import Decoded, VLAModelCfg, register_vla_model
from embodichain.agents.rl.models.vla.pretrained import (
    ACTION,
    STATE,
    PretrainedVLA,
    PretrainedVLACfg,
    read_json,
    read_tensors,
    setting,
    value_head,
    weight_files,
)
from embodichain.agents.rl.models.vla.smolvla_expert import ActionExpert, ExpertFlowHead, SmolVLANetworkCfg, rotate
from embodichain.config.classes import Size, configclass
from embodichain.errors import CheckpointError, ConfigError, look_up
from embodichain.extras import require

_IMAGE_TOKENS = ("<fake_token_around_image>", "<global-img>")
_PREFIX = "model.vlm_with_expert."
_RENAMED = {
    f"{_PREFIX}vlm.model.": "vlm.",
    f"{_PREFIX}lm_expert.": "action_head.velocity_net.",
    "model.state_proj.": "state_proj.",
    "model.action_": "action_head.velocity_net.action_",
}
"""Prefixes of LeRobot's parameter names, and those of this model."""
_UNUSED = (f"{_PREFIX}vlm.lm_head.", "normalize_inputs.", "normalize_targets.", "unnormalize_outputs.")
"""Prefixes of parameters that are not needed."""
_MODES = {
    "IDENTITY": (),
    "MEAN_STD": ("mean", "std"),
    "MIN_MAX": ("min", "max"),
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
}
"""LeRobot's normalisation modes, and the two statistics that each needs."""


@configclass
class SmolVLACfg(PretrainedVLACfg):
    """Settings of ``SmolVLA``; all are read from a checkpoint."""

    head: Literal["flow"] = "flow"
    """Action head; always flow."""
    flow: FlowCfg = FlowCfg(num_steps=10)
    """Settings of denoising and exploration."""
    max_chunk_size: Size = 50
    """Maximum number of actions per decision."""
    network: SmolVLANetworkCfg = SmolVLANetworkCfg()
    """Architecture of the network."""
    normalization: Annotated[dict[str, str], Field(max_length=8)] = {}
    """Normalisation modes of state and action, with LeRobot's names."""


@register_vla_model("smolvla")
class SmolVLA(PretrainedVLA):
    """SmolVLA with a value head; actions are in the units of the checkpoint, without its padding."""

    cfg_type: ClassVar[type[VLAModelCfg]] = SmolVLACfg
    cfg: SmolVLACfg
    new_parts: ClassVar[tuple[str, ...]] = ("head", "to_value", "action_head.std_net", "action_head.start")
    state_offset: Tensor
    state_scale: Tensor
    action_offset: Tensor
    action_scale: Tensor

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        cfg, network = self.cfg, self.cfg.network
        if self.chunk_size > cfg.max_chunk_size:
            problem = f"chunk_size: the policy chooses at most {cfg.max_chunk_size} actions, got {self.chunk_size}"
            raise ConfigError(problem, "model_config")
        for name, width, most in (
            ("state", cfg.state_dim, network.max_state_dim),
            (ACTION, self.action_dim, network.max_action_dim),
        ):
            if width > most:
                raise ConfigError(f"{name}: expected at most {most} numbers, got {width}", "model_config")
        self.vlm, self.tokenizer = _load_vlm(cfg)
        text = self.vlm.config.text_config
        width = int(text.hidden_size)
        self.head_dim = int(text.head_dim)
        self.state_proj = nn.Linear(network.max_state_dim, width)
        self.action_head = ExpertFlowHead(
            ActionExpert(text, network), width, self.chunk_size, network.max_action_dim, cfg.flow
        )
        self.to_value = value_head(width)
        for name, count in (("state", cfg.state_dim), (ACTION, self.action_dim)):
            self.register_buffer(f"{name}_offset", torch.zeros(count))
            self.register_buffer(f"{name}_scale", torch.ones(count))
        if "vision" in cfg.freeze:
            self.vlm.vision_model.requires_grad_(False)
        if "language" in cfg.freeze:
            self.vlm.text_model.requires_grad_(False)
            self.vlm.connector.requires_grad_(False)

    def decode(self, obs: TensorDictBase) -> Decoded:
        tokens, valid = self._prefix(obs)
        batch, length = valid.shape
        position = valid.long().cumsum(1) - 1
        allowed = valid.unsqueeze(1).repeat(1, length, 1)
        allowed[:, :-1, -1] = False  # the state comes last: it attends to everything, nothing attends to it
        keys, values, x = list[Tensor](), list[Tensor](), tokens
        for layer in self.vlm.text_model.layers:
            attention, inputs = layer.self_attn, layer.input_layernorm(x)
            query, key, value = (
                project(inputs).unflatten(-1, (-1, self.head_dim))
                for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            query, key = rotate(query, position), rotate(key, position)
            keys.append(key)
            values.append(value)
            repeats = query.shape[2] // key.shape[2]
            attended = F.scaled_dot_product_attention(
                query.transpose(1, 2),
                key.repeat_interleave(repeats, dim=2).transpose(1, 2),
                value.repeat_interleave(repeats, dim=2).transpose(1, 2),
                attn_mask=allowed.unsqueeze(1),
            )
            x = x + attention.o_proj(attended.transpose(1, 2).flatten(2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        state = self.vlm.text_model.norm(x[:, -1]).float()
        expert: Any = self._decision_head().velocity_net
        expert_keys, expert_values = expert.context(keys, values)
        parts = {"keys": expert_keys, "values": expert_values, "valid": valid, "state": state}
        features = TensorDict(parts, [batch], device=state.device)
        # Detached: the value loss does not train the backbone.
        return Decoded(None, self.to_value(state.detach()).squeeze(-1), None, features)

    def _prefix(self, obs: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Return the embedded images, instruction and state ``[batch, n, width]``, and the mask of valid tokens."""
        network, embed = self.cfg.network, self.vlm.text_model.get_input_embeddings()
        dtype, width = embed.weight.dtype, embed.weight.shape[1]
        parts, batch = list[Tensor](), obs.batch_size[0]
        around = self._image_tokens(batch) if network.add_image_special_tokens else None
        for camera in self.cfg.cameras:
            image = self.image(obs, camera)
            if network.resize_imgs_with_padding is not None:
                image = _fit(image, *network.resize_imgs_with_padding)
            encoded = self.vlm.vision_model(pixel_values=(image * 2.0 - 1.0).to(dtype)).last_hidden_state
            patches = self.vlm.connector(encoded) * math.sqrt(width)
            parts += [patches] if around is None else [embed(around), patches, embed(around[:, :1])]
        if around is not None:
            parts += [embed(around), embed(around[:, :1])] * network.empty_cameras
        ids, is_text = self.tokens_of(obs, batch, self._encode, network.tokenizer_max_length)
        state = F.pad(self._normalized_state(obs, batch), (0, network.max_state_dim - self.cfg.state_dim))
        parts += [embed(ids) * math.sqrt(width), self.state_proj(state).unsqueeze(1)]
        tokens = torch.cat([part.to(dtype) for part in parts], dim=1)
        valid = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        valid[:, -1 - ids.shape[1] : -1] = is_text
        return tokens, valid

    def _normalized_state(self, obs: TensorDictBase, batch: int) -> Tensor:
        if not self.cfg.state_dim:
            return torch.zeros(batch, 0, device=self.state_offset.device)
        return (self.proprioception(obs) - self.state_offset) / self.state_scale

    def _encode(self, texts: list[str]) -> Any:
        ended = [text if text.endswith("\n") else f"{text}\n" for text in texts]
        return self.tokenizer(ended, truncation=True, max_length=self.cfg.network.tokenizer_max_length)

    def _image_tokens(self, batch: int) -> Tensor:
        ids = self.tokenizer.convert_tokens_to_ids(list(_IMAGE_TOKENS))
        return torch.tensor(ids, device=self.state_offset.device).expand(batch, -1)

    def actions_of(self, chunk: Tensor) -> Tensor:
        return chunk[..., : self.action_dim] * self.action_scale + self.action_offset

    def chunk_of(self, actions: Tensor) -> Tensor:
        normalized = (actions.float() - self.action_offset) / self.action_scale.clamp(min=1e-8)
        return F.pad(normalized, (0, self.cfg.network.max_action_dim - self.action_dim))

    def save_files(self, folder: Path) -> dict[str, Any]:
        target = folder / "backbone"
        self.vlm.config.save_pretrained(target)
        self.tokenizer.save_pretrained(target)
        return {"backbone_path": Path(target.name)}

    @classmethod
    def read_config(cls, folder: Path, content: Mapping[str, Any]) -> dict[str, Any]:
        """Convert LeRobot's ``config.json`` to settings."""
        file = folder / "config.json"
        for name in ("adapt_to_pi_aloha", "use_delta_joint_actions_aloha"):
            if content.get(name):
                raise CheckpointError(f"{file}: {name}: policies of Aloha robots, in units of their own, are not read")
        features = setting(content, "input_features", dict, file)
        outputs = setting(content, "output_features", dict, file)
        images = [key for key, kind, _ in _features(features, file) if kind == "VISUAL" and ".empty_camera_" not in key]
        states = {key: shape for key, kind, shape in _features(features, file) if kind in ("STATE", "ENV")}
        actions = {key: shape for key, _, shape in _features(outputs, file)}
        if list(actions) != [ACTION] or set(states) - {STATE}:
            raise CheckpointError(
                f"{file}: expected images, {STATE} and {ACTION} alone, got {', '.join([*states, *actions])}"
            )
        network = {name: content[name] for name in vars(SmolVLANetworkCfg()) if name in content}
        normalization = setting(content, "normalization_mapping", dict, file, {})
        if normalization.get("VISUAL", "IDENTITY") != "IDENTITY":
            problem = f"normalization_mapping.VISUAL: expected IDENTITY, got {normalization['VISUAL']!r}"
            raise CheckpointError(f"{file}: {problem}: policies whose images are normalised are not read")
        only_expert = bool(content.get("train_expert_only", True))
        frozen = [
            part for part, is_so in (("vision", content.get("freeze_vision_encoder", True) or only_expert),) if is_so
        ]
        return {
            "image_keys": images,
            "state_dim": math.prod(states.get(STATE, [0])),
            "action_dim": math.prod(actions[ACTION]),
            "chunk_size": setting(content, "n_action_steps", int, file, 50),
            "max_chunk_size": setting(content, "chunk_size", int, file, 50),
            "flow": {"num_steps": setting(content, "num_steps", int, file, 10)},
            "network": network,
            "normalization": {key: str(value) for key, value in normalization.items()},
            "backbone_path": _find_vlm(folder, setting(content, "vlm_model_name", str, file)),
            "freeze": [*frozen, *(["language"] if only_expert else [])],
        }

    def foreign_weights(self, folder: Path) -> dict[str, Tensor]:
        given = {name: tensor for file in weight_files(folder) for name, tensor in read_tensors(file).items()}
        weights = {}
        for name, tensor in given.items():
            if not name.startswith(_UNUSED):
                begin = next((old for old in _RENAMED if name.startswith(old)), "")
                weights[_RENAMED.get(begin, "") + name.removeprefix(begin)] = tensor
        for kind, key, count in (("STATE", STATE, self.cfg.state_dim), ("ACTION", ACTION, self.action_dim)):
            mode = self.cfg.normalization.get(kind, "IDENTITY")
            look_up("normalization", mode, _MODES)
            name = "state" if key == STATE else ACTION
            offset, scale = _statistics(folder, given, key, mode, count)
            weights |= {f"{name}_offset": offset, f"{name}_scale": scale}
        return weights


def _features(features: Mapping[str, Any], file: Path) -> list[tuple[str, str, list[int]]]:
    found = []
    for key, feature in features.items():
        kind, shape = (feature.get("type"), feature.get("shape")) if isinstance(feature, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(shape, list) or not all(type(n) is int for n in shape):
            raise CheckpointError(f"{file}: {key}: expected a type and a shape, got {feature!r:.60}")
        found.append((key, kind, shape))
    return found


def _statistics(folder: Path, weights: Mapping[str, Tensor], key: str, mode: str, count: int) -> tuple[Tensor, Tensor]:
    """Return offset and scale of a state or action; ``(x - offset) / scale`` is normalised."""
    if mode == "IDENTITY" or not count:
        return torch.zeros(count), torch.ones(count)
    pipeline, step = ("pre", "normalizer") if key == STATE else ("post", "unnormalizer")
    file = folder / f"policy_{pipeline}processor.json"
    eps, stats = 1e-8, dict[str, Tensor]()
    if file.is_file():
        steps = setting(read_json(file), "steps", list, file)
        found = [s for s in steps if isinstance(s, dict) and s.get("registry_name") == f"{step}_processor"]
        if not found or not isinstance(found[0].get("state_file"), str):
            raise CheckpointError(f"{file}: expected a step {step}_processor with its state_file")
        eps = setting(setting(found[0], "config", dict, file, {}), "eps", int | float, file, eps)
        state_file = folder / Path(found[0]["state_file"]).name
        stats = {
            name.removeprefix(f"{key}."): v for name, v in read_tensors(state_file).items() if name.startswith(key)
        }
        source = str(state_file)
    else:  # older versions of LeRobot, without processors
        begin = ("normalize_inputs" if key == STATE else "unnormalize_outputs") + f".buffer_{key.replace('.', '_')}."
        stats = {name.removeprefix(begin): v for name, v in weights.items() if name.startswith(begin)}
        source = str(folder / "model.safetensors")
    needed = _MODES[mode]
    if missing := [name for name in needed if name not in stats]:
        raise CheckpointError(
            f"{source}: {key} is normalised by {mode}, and {' and '.join(missing)} of it are not there: save the "
            "policy's processors with it (policy_preprocessor.json, policy_postprocessor.json and their files)"
        )
    first, second = (stats[name].float().flatten() for name in needed)
    if first.numel() != count or second.numel() != count:
        got = f"{first.numel()} and {second.numel()}"
        raise CheckpointError(f"{source}: {key}: expected statistics of {count} numbers, as the config says, got {got}")
    if not bool(torch.isfinite(first).all() & torch.isfinite(second).all()):
        raise CheckpointError(f"{source}: {key}: expected finite statistics, got NaN or infinity")
    if mode == "MEAN_STD":
        return first, second + eps if key == STATE else second
    half = 0.5 * torch.where(second == first, eps, second - first)
    return first + half, half


def _find_vlm(folder: Path, name: str) -> str | None:
    """Return the folder of the language model: in the policy's folder, by name as a path, or in the Hub's cache."""
    for candidate in (folder / "backbone", Path(name), folder / name):
        if (candidate / "config.json").is_file():
            return str(candidate)
    hub = require("huggingface_hub", extra="vla")
    try:
        return str(hub.snapshot_download(name, local_files_only=True))
    except (OSError, ValueError):  # not cached, or no valid repository name
        return None


def _load_vlm(cfg: SmolVLACfg) -> tuple[Any, Any]:
    """Return the vision-language model with random weights, and its tokenizer."""
    if cfg.backbone_path is None:
        raise CheckpointError(
            "neither the policy's folder nor the cache of huggingface_hub holds config and tokenizer of its language "
            "model (vlm_model_name): put config.json, tokenizer.json and tokenizer_config.json of that model into a "
            "folder, and set model_config.backbone_path to it"
        )
    folder, transformers = Path(cfg.backbone_path), require("transformers", extra="vla")
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"backbone_path: {folder} has no config.json of a language model")
    with reading(folder):
        refuse_code(folder / "config.json")
        config = transformers.AutoConfig.from_pretrained(folder, **LOCAL)
        look_up("backbone.model_type", str(config.model_type), MODEL_TYPES)
        if (kind := config.text_config.model_type) != "llama":
            raise CheckpointError(f"{folder / 'config.json'}: text_config.model_type: expected llama, got {kind!r}")
        if cfg.network.num_vlm_layers > 0:
            config.text_config.num_hidden_layers = min(cfg.network.num_vlm_layers, config.text_config.num_hidden_layers)
        if getattr(config.text_config, "head_dim", None) is None:
            config.text_config.head_dim = config.text_config.hidden_size // config.text_config.num_attention_heads
        model = transformers.AutoModel.from_config(config, dtype=getattr(torch, cfg.dtype), trust_remote_code=False)
    return model, load_tokenizer(folder)


def _fit(image: Tensor, width: int, height: int) -> Tensor:
    """Resize images ``[batch, 3, h, w]`` to fit, keeping their aspect ratio; pad with black at the top and left."""
    ratio = max(image.shape[3] / width, image.shape[2] / height)
    size = (int(image.shape[2] / ratio), int(image.shape[3] / ratio))
    scaled = F.interpolate(image, size=size, mode="bilinear", align_corners=False)
    return F.pad(scaled, (max(0, width - size[1]), 0, max(0, height - size[0]), 0))
