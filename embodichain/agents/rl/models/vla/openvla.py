"""OpenVLA, as saved by transformers: generates one token per action dimension from an image and a prompt.

The network is that of Prismatic: one or two vision transformers (``vision_backbone``, in timm's layout), an MLP
(``projector``), and a Llama (``language_model``) whose input is the first token of the prompt, the patches, the rest of
the prompt, and then the action. The last tokens of the vocabulary represent bins of [-1, 1] in reverse order; the
statistics of the training data rescale them to actions. Code in the folder of a checkpoint is not run.
"""

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from tensordict import TensorDict, TensorDictBase
from torch import Generator, Tensor, nn

from embodichain.agents.rl.models.tokens import choose
from embodichain.agents.rl.models.vla.hf_backbone import reading, refuse_kernels
from embodichain.agents.rl.models.vla.model import Decoded, Outcome, Space, VLAModelCfg, register_vla_model
from embodichain.agents.rl.models.vla.pretrained import (
    PretrainedVLA,
    PretrainedVLACfg,
    checked,
    read_json,
    read_tensors,
    setting,
    tensor_shapes,
    value_head,
    weight_files,
)
from embodichain.config.classes import Config, Layers, Number, Positive, Size, configclass
from embodichain.errors import CheckpointError, ConfigError, RolloutError, nearest
from embodichain.extras import require

PROMPT = "In: What action should the robot take to {}?\nOut:"
BLANK = 29871
"""Llama's token of an empty word, which separated prompt and action in training."""
IMAGE_KEY = "image"
_TOWERS = ("featurizer", "fused_featurizer")
_HEADS = {"vit_large_": 16, "vit_so400m_": 16, "vit_base_": 12}
"""Number of attention heads by prefix of timm's model name, as the weights do not show it."""
_TOKENIZER = "tokenizer.json"
_NEW_PARTS = ("head", "to_value")


@configclass
class TowerCfg(Config):
    """Shape of a vision transformer and its image normalisation."""

    width: Size = 1024
    """Width of patch tokens."""
    depth: Layers = 23
    """Number of layers used: all but the last."""
    hidden_size: Size = 4096
    """Width of the MLPs."""
    num_heads: Layers = 16
    """Number of attention heads."""
    patch_size: Size = 14
    """Side of a patch in pixels."""
    image_size: Size = 224
    """Side of the image in pixels."""
    class_token: bool = False
    """Whether there is a class token."""
    registers: Annotated[int, Field(ge=0, le=64)] = 0
    """Number of register tokens."""
    layer_scale: bool = False
    """Whether residual branches have LayerScale."""
    mean: tuple[Number, Number, Number] = (0.5, 0.5, 0.5)
    """Mean of the colours, in [0, 1]."""
    std: tuple[Positive, Positive, Positive] = (0.5, 0.5, 0.5)
    """Standard deviation of the colours."""


@configclass
class OpenVLACfg(PretrainedVLACfg):
    """Settings of ``OpenVLA``; all but ``unnorm_key`` are read from a checkpoint."""

    head: Literal["tokens"] = "tokens"
    """Action head; always tokens."""
    chunk_size: Literal[1] = 1
    """Actions per decision."""
    max_chunk_size: Literal[1] = 1
    """Maximum number of actions per decision."""
    freeze: tuple[Literal["vision", "language"], ...] = ("vision",)
    """Parts that are not trained; language includes the projector."""
    towers: Annotated[tuple[TowerCfg, ...], Field(max_length=2)] = ()
    """The vision transformers."""
    text_config: dict[str, Any] = {}
    """Settings of transformers' Llama."""
    num_bins: Annotated[int, Field(ge=2, le=4096)] = 256
    """Number of action tokens in the vocabulary."""
    padded_tokens: Annotated[int, Field(ge=0, le=65_536)] = 64
    """Number of unused tokens at the end of the vocabulary."""
    statistics: dict[str, dict[str, list[float]]] = {}
    """``q01``, ``q99`` and ``mask`` of actions by dataset; ``mask`` is 1 for dimensions that are rescaled."""
    unnorm_key: str | None = None
    """Dataset whose statistics to use; optional if there is only one."""
    max_prompt: Size = 64
    """Maximum number of tokens of the prompt; longer ones are truncated."""


class VisionBlock(nn.Module):
    """A transformer block in timm's layout."""

    def __init__(self, cfg: TowerCfg) -> None:
        super().__init__()
        width, self.num_heads = cfg.width, cfg.num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width)})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, cfg.hidden_size), "fc2": nn.Linear(cfg.hidden_size, width)})
        self.ls1, self.ls2 = (_Scale(width) if cfg.layer_scale else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.attn["qkv"](self.norm1(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        x = x + self.ls1(self.attn["proj"](attended))
        return x + self.ls2(self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.norm2(x)))))


class _Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale_factor


class Tower(nn.Module):
    """A vision transformer without its last layer: maps images in [0, 1] to patches ``[batch, n, width]``."""

    mean: Tensor
    std: Tensor

    def __init__(self, cfg: TowerCfg) -> None:
        super().__init__()
        self.cfg = cfg
        count = (cfg.image_size // cfg.patch_size) ** 2
        patch = nn.Conv2d(3, cfg.width, kernel_size=cfg.patch_size, stride=cfg.patch_size)
        self.patch_embed = nn.ModuleDict({"proj": patch})
        self.pos_embed = nn.Parameter(torch.randn(1, count, cfg.width) * 0.02)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, cfg.width)) if cfg.class_token else None
        self.reg_token = nn.Parameter(torch.zeros(1, cfg.registers, cfg.width)) if cfg.registers else None
        self.blocks = nn.ModuleList(VisionBlock(cfg) for _ in range(cfg.depth))
        self.register_buffer("mean", torch.tensor(cfg.mean).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(cfg.std).view(3, 1, 1), persistent=False)

    def forward(self, image: Tensor) -> Tensor:
        size = self.cfg.image_size
        if tuple(image.shape[-2:]) != (size, size):  # like PIL, which rounds to 8 bits
            image = F.interpolate(image, (size, size), mode="bicubic", antialias=True, align_corners=False)
            image = (image * 255.0).round().clamp(0.0, 255.0) / 255.0
        x = self.patch_embed["proj"](((image - self.mean) / self.std).to(self.pos_embed.dtype))
        x = x.flatten(2).transpose(1, 2) + self.pos_embed
        extra = [part.expand(x.shape[0], -1, -1) for part in (self.cls_token, self.reg_token) if part is not None]
        x = torch.cat([*extra, x], dim=1)
        for block in self.blocks:
            x = block(x)
        return x[:, x.shape[1] - self.pos_embed.shape[1] :]


class Projector(nn.Module):
    """Projects patches to the width of the language model: two layers for one tower, three for two."""

    def __init__(self, width: int, out: int, is_fused: bool) -> None:
        super().__init__()
        sizes = [width, 4 * width, out, out] if is_fused else [width, out, out]
        self.count = len(sizes) - 1
        for i in range(self.count):
            self.add_module(f"fc{i + 1}", nn.Linear(sizes[i], sizes[i + 1]))

    def forward(self, x: Tensor) -> Tensor:
        for i in range(1, self.count + 1):
            x = self.get_submodule(f"fc{i}")(x if i == 1 else F.gelu(x))
        return x


@register_vla_model("openvla")
class OpenVLA(PretrainedVLA):
    """OpenVLA with a value head; only action tokens are sampled."""

    cfg_type: ClassVar[type[VLAModelCfg]] = OpenVLACfg
    cfg: OpenVLACfg
    new_parts: ClassVar[tuple[str, ...]] = _NEW_PARTS
    low: Tensor
    span: Tensor
    scaled: Tensor
    edges: Tensor

    def __init__(self, **settings: Any) -> None:
        super().__init__(**_with_action_dim(settings))
        cfg = self.cfg
        if not cfg.towers or cfg.backbone_path is None:
            raise ConfigError("expected towers and backbone_path, which a checkpoint's folder gives", "model_config")
        dtype = getattr(torch, cfg.dtype)
        names = _TOWERS[: len(cfg.towers)]
        parts = {name: Tower(tower).to(dtype) for name, tower in zip(names, cfg.towers, strict=True)}
        self.vision_backbone = nn.ModuleDict(parts)
        transformers, folder = require("transformers", extra="vla"), Path(cfg.backbone_path)
        refuse_kernels(cfg.text_config, "text_config")
        with reading(folder):
            text = {key: value for key, value in cfg.text_config.items() if key not in ("model_type", "torch_dtype")}
            config = transformers.AutoConfig.for_model("llama", **text)
            self.language_model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=False
            )
            self.tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / _TOKENIZER))
        width = int(config.hidden_size)
        vision_width = sum(tower.width for tower in cfg.towers)
        self.projector = Projector(vision_width, width, len(cfg.towers) > 1).to(dtype)
        self.to_value = value_head(width)
        self.first_token = int(config.vocab_size) - cfg.padded_tokens - cfg.num_bins
        if self.first_token < 0:
            raise ConfigError(f"num_bins: the vocabulary has fewer than {cfg.num_bins} tokens", "model_config")
        q01, q99, mask = _statistics(cfg.statistics, cfg.unnorm_key)
        self.register_buffer("low", torch.tensor(q01), persistent=False)
        self.register_buffer("span", torch.tensor(q99) - torch.tensor(q01) + 1e-8, persistent=False)
        self.register_buffer("scaled", torch.tensor(mask) > 0.5, persistent=False)
        edges = torch.from_numpy(np.linspace(-1.0, 1.0, cfg.num_bins))  # bit-equal to those used in training
        self.register_buffer("edges", edges, persistent=False)
        if "vision" in cfg.freeze:
            self.vision_backbone.requires_grad_(False)
        if "language" in cfg.freeze:
            self.language_model.requires_grad_(False)
            self.projector.requires_grad_(False)

    def decode(self, obs: TensorDictBase) -> Decoded:
        embedded, mask = self._embed_prompt(obs)
        hidden = self._last_hidden(self._run_language_model(embedded, mask).last_hidden_state, mask)
        return Decoded(None, self._value(hidden), None, hidden)

    def decide(
        self, obs: TensorDictBase, deterministic: bool = False, generator: Generator | None = None
    ) -> tuple[Tensor, Tensor, Tensor, TensorDictBase]:
        embedded, mask = self._embed_prompt(obs)
        out = self._run_language_model(embedded, mask, use_cache=True)
        hidden = self._last_hidden(out.last_hidden_state, mask)
        value, chosen, log_probs = self._value(hidden), list[Tensor](), list[Tensor]()
        for number in range(self.action_dim):
            if number:
                mask = F.pad(mask, (0, 1), value=True)
                out = self._run_language_model(
                    self._embed(chosen[-1]).unsqueeze(1), mask, past=out.past_key_values, use_cache=True
                )
                hidden = out.last_hidden_state[:, -1]
            token, log_prob = choose(self._logits(hidden), deterministic, generator)
            chosen.append(token)
            log_probs.append(log_prob)
        tokens = torch.stack(chosen, dim=1)
        decision = TensorDict({"tokens": tokens}, [tokens.shape[0]])
        return self.actions_of(self.numbers(tokens)), torch.stack(log_probs, dim=1).unsqueeze(1), value, decision

    def evaluate_actions(self, obs: TensorDictBase, actions: Tensor, decision: TensorDictBase | None = None) -> Outcome:
        tokens = None if decision is None else decision.get("tokens", None)
        if tokens is None or tokens.shape[1:] != (self.action_dim,):
            got = "none" if tokens is None else list(tokens.shape)
            raise RolloutError(
                f"decision: expected tokens [batch, {self.action_dim}] of this policy, got {got}: rollouts of another "
                "policy cannot be learned from"
            )
        hidden = self._hidden_states(obs, tokens)
        log_probs = self._logits(hidden).log_softmax(-1)
        log_prob = log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return log_prob.unsqueeze(1), entropy.unsqueeze(1), self._value(hidden[:, 0])

    def imitation_loss(
        self, obs: TensorDictBase, actions: Tensor, valid: Tensor | None = None, generator: Generator | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the mean cross-entropy ``[batch]`` per token of ``actions`` ``[batch, 1, action_dim]``."""
        tokens = self.tokens(self.chunk_of(actions[:, 0]))
        decision = TensorDict({"tokens": tokens}, [tokens.shape[0]])
        loss = -self.evaluate_actions(obs, actions, decision)[0].mean((1, 2))
        return loss if valid is None else loss * valid[:, 0], None

    def tokens(self, numbers: Tensor) -> Tensor:
        """Return the bin indices, int64, of numbers in [-1, 1]."""
        inside = numbers.double().clamp(-1.0, 1.0).contiguous()
        return torch.bucketize(inside, self.edges, right=True) - 1

    def numbers(self, tokens: Tensor) -> Tensor:
        """Return the centres of bins; the last index, which only 1.0 has, belongs to the bin before it."""
        at = tokens.clamp(max=self.cfg.num_bins - 2)
        return (0.5 * (self.edges[at] + self.edges[at + 1])).float()

    def actions_of(self, chunk: Tensor) -> Tensor:
        return torch.where(self.scaled, 0.5 * (chunk + 1.0) * self.span + self.low, chunk)

    def chunk_of(self, actions: Tensor) -> Tensor:
        return torch.where(self.scaled, 2.0 * (actions.float() - self.low) / self.span - 1.0, actions.float())

    def _hidden_states(self, obs: TensorDictBase, tokens: Tensor) -> Tensor:
        """Return the hidden states that predict each token, ``[batch, action_dim, width]``, in one pass."""
        embedded, mask = self._embed_prompt(obs)
        length = mask.shape[1]
        whole = torch.cat([embedded, self._embed(tokens[:, :-1])], dim=1)
        hidden = self._run_language_model(whole, F.pad(mask, (0, tokens.shape[1] - 1), value=True)).last_hidden_state
        return torch.cat([self._last_hidden(hidden[:, :length], mask).unsqueeze(1), hidden[:, length:]], dim=1)

    def _embed_prompt(self, obs: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Return the embedded image and prompt ``[batch, n, width]``, and the mask of valid tokens ``[batch, n]``."""
        image = self.image(obs, next(iter(self.cfg.cameras)))
        patches = self.projector(torch.cat([tower(image) for tower in self.vision_backbone.values()], dim=2))
        ids, is_text = self.tokens_of(obs, image.shape[0], self._encode, self.cfg.max_prompt)
        words = self.language_model.get_input_embeddings()(ids)
        embedded = torch.cat([words[:, :1], patches.to(words.dtype), words[:, 1:]], dim=1)
        return embedded, torch.cat([is_text[:, :1], is_text.new_ones(patches.shape[:2]), is_text[:, 1:]], dim=1)

    def _encode(self, texts: list[str]) -> dict[str, list[list[int]]]:
        ids = self.tokenizer([PROMPT.format(text.lower()) for text in texts])["input_ids"]
        if self.first_token > BLANK:
            ids = [row if row[-1] == BLANK else [*row, BLANK] for row in ids]
        return {"input_ids": ids}

    def _run_language_model(self, embedded: Tensor, mask: Tensor, past: Any = None, use_cache: bool = False) -> Any:
        # Positions skip the padding of short prompts, so that its length has no effect.
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)[:, -embedded.shape[1] :]
        return self.language_model.model(
            inputs_embeds=embedded,
            attention_mask=mask.long(),
            position_ids=positions,
            past_key_values=past,
            use_cache=use_cache,
        )

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.language_model.get_input_embeddings()(self.first_token + self.cfg.num_bins - 1 - tokens)

    def _logits(self, hidden: Tensor) -> Tensor:
        ends = (self.first_token, self.first_token + self.cfg.num_bins)
        return self.language_model.lm_head(hidden)[..., ends[0] : ends[1]].flip(-1).float()

    @staticmethod
    def _last_hidden(hidden: Tensor, mask: Tensor) -> Tensor:
        at = torch.arange(mask.shape[1], device=mask.device).mul(mask).amax(1)
        return hidden[torch.arange(len(at), device=at.device), at]

    def _value(self, hidden: Tensor) -> Tensor:
        # Detached: the value loss does not train the backbone.
        return self.to_value(hidden.detach().float()).squeeze(-1)

    def save_files(self, folder: Path) -> dict[str, Any]:
        target = folder / "backbone"
        target.mkdir(exist_ok=True)
        self.tokenizer.backend_tokenizer.save(str(target / _TOKENIZER))
        return {"backbone_path": Path(target.name)}

    @classmethod
    def complete_config(cls, given: Mapping[str, Any], obs_space: Space, action_space: Space) -> dict[str, Any]:
        return super().complete_config(_with_action_dim(given), obs_space, action_space)

    @classmethod
    def read_config(cls, folder: Path, content: Mapping[str, Any]) -> dict[str, Any]:
        """Convert OpenVLA's ``config.json`` to settings; the code that it names is not run."""
        file = folder / "config.json"
        text = setting(content, "text_config", dict, file)
        if text.get("model_type", "llama") != "llama":
            raise CheckpointError(f"{file}: text_config.model_type: expected llama, got {text['model_type']!r}")
        if not (folder / _TOKENIZER).is_file():
            raise CheckpointError(f"{folder}: there is no {_TOKENIZER}; copy the whole checkpoint, with all its files")
        ids = setting(content, "timm_model_ids", list, file)
        return {
            "image_keys": [IMAGE_KEY],
            "towers": list(_towers(folder, ids)),
            "text_config": text,
            "num_bins": setting(content, "n_action_bins", int, file, 256),
            "padded_tokens": setting(content, "pad_to_multiple_of", int, file, 64),
            "statistics": _read_statistics(setting(content, "norm_stats", dict, file), file),
            "backbone_path": str(folder),
        }

    def foreign_weights(self, folder: Path) -> dict[str, Tensor]:
        given = {name: tensor for file in weight_files(folder) for name, tensor in read_tensors(file).items()}
        unused = [
            f"vision_backbone.{tower}.{part}" for tower in _TOWERS for part in ("norm.", "attn_pool.", "fc_norm.")
        ]
        for tower, cfg in zip(_TOWERS, self.cfg.towers, strict=False):
            unused.append(f"vision_backbone.{tower}.blocks.{cfg.depth}.")  # the last layer
        return {
            name: tensor
            for name, tensor in given.items()
            if not name.startswith(tuple(unused)) and not name.endswith("rotary_emb.inv_freq")
        }


def _towers(folder: Path, ids: list[Any]) -> Iterable[dict[str, Any]]:
    """Yield the settings of the vision transformers, inferred from the shapes of their weights and the preprocessor."""
    shapes, prepared = tensor_shapes(folder), {}
    if (folder / "preprocessor_config.json").is_file():
        prepared = read_json(folder / "preprocessor_config.json")
    strategy = prepared.get("image_resize_strategy", "resize-naive")
    if strategy != "resize-naive":
        problem = f"image_resize_strategy: expected resize-naive, got {strategy!r}"
        raise CheckpointError(f"{folder / 'preprocessor_config.json'}: {problem}")
    if not 1 <= len(ids) <= len(_TOWERS):
        raise CheckpointError(f"{folder / 'config.json'}: timm_model_ids: expected one or two names, got {ids!r:.60}")
    for i, (name, timm_id) in enumerate(zip(_TOWERS, ids, strict=False)):
        begin = f"vision_backbone.{name}."
        own = {key.removeprefix(begin): shape for key, shape in shapes.items() if key.startswith(begin)}
        heads = next((count for start, count in _HEADS.items() if str(timm_id).startswith(start)), None)
        needed = ("patch_embed.proj.weight", "pos_embed", "blocks.0.mlp.fc1.weight")
        if missing := [key for key in needed if key not in own]:
            raise CheckpointError(f"{folder}: {begin}{missing[0]} is missing; expected a vision transformer of timm")
        depth = 1 + max(int(match[1]) for key in own if (match := re.match(r"blocks\.(\d+)\.", key)))
        width, _, patch, _ = own["patch_embed.proj.weight"]
        side = math.isqrt(own["pos_embed"][1])
        if heads is None or any(key.startswith("norm_pre.") for key in own) or side * side != own["pos_embed"][1]:
            raise CheckpointError(
                f"{folder}: timm_model_ids: expected DINOv2 with registers or SigLIP, got {timm_id!r}"
            )
        colours = {}
        for key, plural in (("mean", "means"), ("std", "stds")):
            if isinstance(prepared.get(plural), list) and len(prepared[plural]) > i:
                colours[key] = prepared[plural][i]
            elif "cls_token" in own:
                colours[key] = [0.485, 0.456, 0.406] if key == "mean" else [0.229, 0.224, 0.225]
        yield {
            "width": width,
            "depth": depth - 1,
            "hidden_size": own["blocks.0.mlp.fc1.weight"][0],
            "num_heads": heads,
            "patch_size": patch,
            "image_size": side * patch,
            "class_token": "cls_token" in own,
            "registers": own["reg_token"][1] if "reg_token" in own else 0,
            "layer_scale": "blocks.0.ls1.scale_factor" in own,
            **colours,
        }


def _read_statistics(norm_stats: Mapping[str, Any], file: Path) -> dict[str, dict[str, list[float]]]:
    found = {}
    for name, stats in norm_stats.items():
        action = stats.get("action") if isinstance(stats, dict) else None
        if not isinstance(action, dict) or not all(isinstance(action.get(key), list) for key in ("q01", "q99")):
            raise CheckpointError(f"{file}: norm_stats.{name}.action: expected q01 and q99, got {action!r:.60}")
        mask = action.get("mask") or [True] * len(action["q01"])
        if not isinstance(mask, list):
            raise CheckpointError(f"{file}: norm_stats.{name}.action.mask: expected a list, got {mask!r:.60}")
        parts = {"q01": action["q01"], "q99": action["q99"], "mask": [float(bool(value)) for value in mask]}
        if len({len(part) for part in parts.values()}) != 1:
            lengths = ", ".join(f"{key} {len(part)}" for key, part in parts.items())
            raise CheckpointError(f"{file}: norm_stats.{name}.action: expected numbers of one action, got {lengths}")
        found[name] = parts
    if not found:
        raise CheckpointError(f"{file}: norm_stats: expected statistics of actions, by which tokens become actions")
    return found


def _statistics(statistics: Mapping[str, Any], key: str | None) -> tuple[list[float], list[float], list[float]]:
    """Return ``q01``, ``q99`` and ``mask`` of the chosen dataset."""
    if key is None and len(statistics) == 1:
        key = next(iter(statistics))
    if key is None or key not in statistics:
        known = ", ".join(statistics) or "none"
        problem = "expected the data whose actions are meant" if key is None else f"there is no {key!r}"
        near = "" if key is None else nearest(key, statistics)
        raise ConfigError(f"unnorm_key: {problem}; the checkpoint has statistics of: {known}.{near}", "model_config")
    chosen = statistics[key]
    if len({len(chosen.get(part, ())) for part in ("q01", "q99", "mask")}) != 1 or not chosen.get("q01"):
        raise ConfigError(f"statistics.{key}: expected q01, q99 and mask of one action, got {chosen}", "model_config")
    return chosen["q01"], chosen["q99"], chosen["mask"]


def _with_action_dim(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with the ``action_dim`` of the chosen statistics."""
    checked(OpenVLACfg, settings)
    q01 = _statistics(settings.get("statistics", {}), settings.get("unnorm_key"))[0]
    return {**settings, "action_dim": len(q01)}
