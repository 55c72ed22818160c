"""A vision-language model of the transformers library as the backbone of a VLA.

The language model reads, in this order: the patches of all pictures, the instruction, one token of proprioception and
one query for each action and for the value. What it makes of the queries is the chunk and the value; all actions are
decoded in one pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from tensordict import TensorDictBase
from torch import Tensor, nn

from embodichain.agents.rl.models.vla.model import Decoded, VLAModel, VLAModelCfg, register_vla_model
from embodichain.config import configclass
from embodichain.envs.observations import decode_instructions
from embodichain.errors import CheckpointError, ConfigError, UnknownNameError, nearest
from embodichain.extras import require

MODEL_TYPES = ("smolvlm", "idefics3")
"""Families whose models consist of ``vision_model``, ``connector`` and ``text_model``."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@configclass
class HFBackboneVLACfg(VLAModelCfg):
    """Settings of ``HFBackboneVLA``; either ``backbone`` or ``backbone_path`` is given."""

    backbone: dict[str, Any] | None = None
    """Settings of the transformers config, ``model_type`` among them: a model with random weights."""
    backbone_path: str | None = None
    """Folder of a pretrained model, as ``save_pretrained`` writes it, with its tokenizer; nothing is downloaded."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the backbone; the heads are float32."""
    freeze: tuple[Literal["vision", "language"], ...] = ()
    """Parts of the backbone that are not trained."""


@register_vla_model("hf_vlm")
class HFBackboneVLA(VLAModel):
    """A pretrained (or random) vision-language model with an action-chunk head and a value head."""

    cfg_type: ClassVar[type[VLAModelCfg]] = HFBackboneVLACfg
    cfg: HFBackboneVLACfg

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        cfg = self.cfg
        self.backbone = _load_backbone(cfg)
        self.words = _Words(cfg, int(self.backbone.config.text_config.vocab_size)) if cfg.instruction_length else None
        width = int(self.backbone.config.text_config.hidden_size)
        size = self.backbone.config.vision_config.image_size
        self.image_size = int(size if isinstance(size, int) else size[0])
        proprio = sum(cfg.proprio.values())
        self.body = nn.Linear(proprio, width) if proprio else None
        self.queries = nn.Parameter(torch.randn(cfg.chunk_size + 1, width) * 0.02)
        self.to_action, last = nn.Linear(width, self.action_dim), nn.Linear(width, 1)
        for layer in (self.to_action, last):  # begin with no action, worth nothing
            nn.init.normal_(layer.weight, std=0.01)
            nn.init.zeros_(layer.bias)
        self.to_value = nn.Sequential(nn.Linear(width, width), nn.GELU(), last)
        self.to_points = nn.Linear(width, cfg.num_points) if cfg.num_points else None
        parts = {
            "vision": [self.backbone.vision_model],
            "language": [self.backbone.text_model, self.backbone.connector],
        }
        for part in cfg.freeze:
            for module in parts[part]:
                module.requires_grad_(False)

    def decode(self, obs: TensorDictBase) -> Decoded:
        """Return the chunk's mean, the value and the points."""
        tokens, mask = self._perceive(obs)
        own = self.queries.expand(tokens.shape[0], -1, -1)
        if self.body is not None and self.normalizer is not None:
            own = torch.cat((self.body(self.normalizer(self.proprioception(obs))).unsqueeze(1), own), dim=1)
        tokens = torch.cat((tokens, own.to(tokens.dtype)), dim=1)
        mask = torch.cat((mask, mask.new_ones(own.shape[:2])), dim=1)
        # Places are counted without the padding of short instructions, so that its length changes nothing.
        places = (mask.long().cumsum(1) - 1).clamp(min=0)
        hidden = self.backbone.text_model(
            inputs_embeds=tokens, attention_mask=mask, position_ids=places, use_cache=False
        ).last_hidden_state[:, -(self.chunk_size + 1) :]
        hidden = hidden.to(self.queries.dtype)
        points = None if self.to_points is None else self.to_points(hidden[:, -1]).float()
        return Decoded(self.to_action(hidden[:, :-1]).float(), self.to_value(hidden[:, -1]).squeeze(-1).float(), points)

    def _perceive(self, obs: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Return the embedded pictures and words, and which of them mean something."""
        dtype = next(self.backbone.vision_model.parameters()).dtype
        seen = [self._see(self.picture(obs, name).to(dtype)) for name in self.cfg.cameras]
        tokens = torch.cat(seen, dim=1)
        mask = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        if self.words is not None:
            ids, is_text = self.words(self.instruction(obs))
            said = self.backbone.get_input_embeddings()(ids)
            tokens, mask = torch.cat((tokens, said.to(dtype)), dim=1), torch.cat((mask, is_text), dim=1)
        return tokens, mask

    def _see(self, picture: Tensor) -> Tensor:
        """Return the tokens ``[batch, n, width]`` that the language model is shown for a picture in [-1, 1]."""
        if picture.shape[-2:] != (self.image_size, self.image_size):
            picture = F.interpolate(picture, (self.image_size, self.image_size), mode="bilinear", align_corners=False)
        return self.backbone.connector(self.backbone.vision_model(pixel_values=picture).last_hidden_state)


class _Words(nn.Module):
    """Instructions as token ids: the backbone's own tokens where it has a tokenizer, else bytes."""

    def __init__(self, cfg: HFBackboneVLACfg, vocabulary: int) -> None:
        super().__init__()
        self.length = cfg.instruction_length
        self.tokenizer: Any = None
        if cfg.backbone_path is not None:
            transformers = require("transformers", extra="vla")
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(cfg.backbone_path, local_files_only=True)
        elif vocabulary < 256:
            raise ConfigError(f"text_config.vocab_size: bytes need at least 256 tokens, got {vocabulary}", "backbone")
        self._known: dict[str, list[int]] = {}

    def forward(self, instruction: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids ``[batch, length]`` and which of them are text."""
        if self.tokenizer is None:
            return instruction, instruction != 0
        # Few instructions differ: each is tokenised once, and every row looks its own up.
        unique, rows = instruction.unique(dim=0, return_inverse=True)
        lists = [self._tokens(text) for text in decode_instructions(unique)]
        ids = torch.zeros(len(lists), self.length, dtype=torch.int64)
        mask = torch.zeros(len(lists), self.length, dtype=torch.bool)
        for i, tokens in enumerate(lists):
            ids[i, : len(tokens)], mask[i, : len(tokens)] = torch.tensor(tokens), True
        return ids.to(instruction.device)[rows], mask.to(instruction.device)[rows]

    def _tokens(self, text: str) -> list[int]:
        if text not in self._known:
            tokens = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
            self._known[text] = tokens[: self.length]
        return self._known[text]


def _load_backbone(cfg: HFBackboneVLACfg) -> Any:
    """Return the vision-language model without its language head."""
    if (cfg.backbone is None) == (cfg.backbone_path is None):
        raise ConfigError("expected either backbone (settings) or backbone_path (a folder)", "model_config")
    transformers = require("transformers", extra="vla")
    dtype = _DTYPES[cfg.dtype]
    if cfg.backbone is not None:
        settings = dict(cfg.backbone)
        model_type = _check_type(settings.pop("model_type", None))
        config = transformers.AutoConfig.for_model(model_type, **settings)
        return transformers.AutoModel.from_config(config).to(dtype)
    folder = Path(str(cfg.backbone_path))
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder}: expected the folder of a pretrained model, with config.json in it")
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    _check_type(config.model_type)
    return transformers.AutoModel.from_pretrained(
        folder, config=config, dtype=dtype, local_files_only=True, use_safetensors=True
    )


def _check_type(model_type: object) -> str:
    if model_type not in MODEL_TYPES:
        raise UnknownNameError(f"backbone.model_type is {model_type!r}.{nearest(str(model_type), MODEL_TYPES)}")
    return str(model_type)


def smolvlm_config(width: int, depth: int, image_size: int, **text: Any) -> Mapping[str, Any]:
    """Return the settings of a SmolVLM with so many layers of this width for vision and for language each."""
    heads = max(1, width // 64)
    return {
        "model_type": "smolvlm",
        "scale_factor": 2,
        "image_token_id": 257,
        "vision_config": {
            "hidden_size": width,
            "intermediate_size": 4 * width,
            "num_hidden_layers": depth,
            "num_attention_heads": heads,
            "image_size": image_size,
            "patch_size": 8,
        },
        "text_config": {
            "model_type": "llama",
            "hidden_size": width,
            "intermediate_size": 4 * width,
            "num_hidden_layers": depth,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "vocab_size": 512,
            "pad_token_id": 0,
            "bos_token_id": 256,
            "eos_token_id": 258,
            **text,
        },
    }
