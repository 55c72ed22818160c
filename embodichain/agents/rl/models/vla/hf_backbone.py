"""A vision-language model of the transformers library as the backbone of a VLA.

The language model reads the patches of all images, the instruction, one token of proprioception, and one query for each
action and for the value. Its outputs for the queries are the chunk and the value, in one pass.
"""

from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from tensordict import TensorDictBase
from torch import Tensor, nn

from embodichain.agents.rl.models.vla.model import Decoded, VLAModel, VLAModelCfg, register_vla_model
from embodichain.config.classes import configclass
from embodichain.envs.observations import decode_instructions
from embodichain.errors import CheckpointError, ConfigError, look_up
from embodichain.extras import require

MODEL_TYPES = {name: name for name in ("smolvlm", "idefics3")}
"""Families whose models consist of ``vision_model``, ``connector`` and ``text_model``."""


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
        for layer in (self.to_action, last):  # outputs close to zero at first
            nn.init.normal_(layer.weight, std=0.01)
            nn.init.zeros_(layer.bias)
        self.to_value = nn.Sequential(nn.Linear(width, width), nn.GELU(), last)
        self.to_points = nn.Linear(width, cfg.num_points) if cfg.num_points else None
        if "vision" in cfg.freeze:
            self.backbone.vision_model.requires_grad_(False)
        if "language" in cfg.freeze:
            self.backbone.text_model.requires_grad_(False)
            self.backbone.connector.requires_grad_(False)

    def decode(self, obs: TensorDictBase) -> Decoded:
        tokens, mask = self._context(obs)
        own = self.queries.expand(tokens.shape[0], -1, -1)
        if self.body is not None and self.normalizer is not None:
            own = torch.cat((self.body(self.normalizer(self.proprioception(obs))).unsqueeze(1), own), dim=1)
        tokens = torch.cat((tokens, own.to(tokens.dtype)), dim=1)
        mask = torch.cat((mask, mask.new_ones(own.shape[:2])), dim=1)
        # Positions do not count the padding of short instructions, so that its length changes nothing.
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)
        hidden = self.backbone.text_model(
            inputs_embeds=tokens, attention_mask=mask, position_ids=positions, use_cache=False
        ).last_hidden_state[:, -(self.chunk_size + 1) :]
        hidden = hidden.to(self.queries.dtype)
        points = None if self.to_points is None else self.to_points(hidden[:, -1]).float()
        return Decoded(self.to_action(hidden[:, :-1]).float(), self.to_value(hidden[:, -1]).squeeze(-1).float(), points)

    def _context(self, obs: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Return the tokens of images and words ``[batch, n, width]``, and which of them count ``[batch, n]``."""
        vision, size = self.backbone.vision_model, (self.image_size, self.image_size)
        dtype = next(vision.parameters()).dtype
        parts = []
        for name in self.cfg.cameras:
            image = self.image(obs, name).to(dtype)
            if image.shape[-2:] != size:
                image = F.interpolate(image, size, mode="bilinear", align_corners=False)
            parts.append(self.backbone.connector(vision(pixel_values=image).last_hidden_state))
        tokens = torch.cat(parts, dim=1)
        mask = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        if self.words is not None:
            ids, is_text = self.words(self.instruction(obs))
            words = self.backbone.get_input_embeddings()(ids)
            tokens, mask = torch.cat((tokens, words.to(dtype)), dim=1), torch.cat((mask, is_text), dim=1)
        return tokens, mask


class _Words:
    """Instructions as token ids: the backbone's own tokens where it has a tokenizer, else bytes."""

    def __init__(self, cfg: HFBackboneVLACfg, vocabulary: int) -> None:
        self.length = cfg.instruction_length
        self.tokenizer: Any = None
        if cfg.backbone_path is not None:
            transformers = require("transformers", extra="vla")
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(cfg.backbone_path, local_files_only=True)
        elif vocabulary < 256:
            raise ConfigError(f"text_config.vocab_size: bytes need at least 256 tokens, got {vocabulary}", "backbone")

    def __call__(self, instruction: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids ``[batch, length]`` and which of them are text."""
        if self.tokenizer is None:
            return instruction, instruction != 0
        unique, rows = instruction.unique(dim=0, return_inverse=True)  # few instructions differ
        tokenized = self.tokenizer(list(decode_instructions(unique)), add_special_tokens=False)
        lists = [tokens[: self.length] for tokens in tokenized["input_ids"]]
        ids = torch.zeros(len(lists), self.length, dtype=torch.int64)
        mask = torch.zeros(len(lists), self.length, dtype=torch.bool)
        for i, tokens in enumerate(lists):
            ids[i, : len(tokens)], mask[i, : len(tokens)] = torch.tensor(tokens), True
        return ids.to(instruction.device)[rows], mask.to(instruction.device)[rows]


def _load_backbone(cfg: HFBackboneVLACfg) -> Any:
    """Return the vision-language model without its language head."""
    if (cfg.backbone is None) == (cfg.backbone_path is None):
        raise ConfigError("expected either backbone (settings) or backbone_path (a folder)", "model_config")
    transformers = require("transformers", extra="vla")
    if cfg.backbone is not None:
        settings = dict(cfg.backbone)
        model_type = look_up("backbone.model_type", str(settings.pop("model_type", None)), MODEL_TYPES)
        config = transformers.AutoConfig.for_model(model_type, **settings)
        return transformers.AutoModel.from_config(config).to(getattr(torch, cfg.dtype))
    folder = Path(str(cfg.backbone_path))
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder}: expected the folder of a pretrained model, with config.json in it")
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    look_up("backbone.model_type", str(config.model_type), MODEL_TYPES)
    return transformers.AutoModel.from_pretrained(
        folder, config=config, dtype=getattr(torch, cfg.dtype), local_files_only=True, use_safetensors=True
    )
