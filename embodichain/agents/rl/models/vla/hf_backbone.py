"""A vision-language model of the transformers library as the backbone of a VLA.

The language model processes the patches of all images, the instruction, one token of proprioception, and one query
token for each action and for the value. Its outputs at the queries give the chunk and the value, in one pass.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from tensordict import TensorDictBase
from torch import Tensor, nn

from embodichain.agents.rl.models.vla.model import Decoded, VLAModel, VLAModelCfg, register_vla_model
from embodichain.config.classes import configclass
from embodichain.envs.observations import decode_instructions
from embodichain.errors import CheckpointError, ConfigError, EmbodiChainError, look_up
from embodichain.extras import require

MODEL_TYPES = {name: name for name in ("smolvlm", "idefics3")}
"""Supported model types, which consist of ``vision_model``, ``connector`` and ``text_model``."""
_CONFIG, _TOKENIZER_CONFIG = "config.json", "tokenizer_config.json"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""A tokenizer has at least one of these files."""
LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""Download nothing and run no code from a folder; transformers would otherwise ask on stdin."""


@configclass
class HFBackboneVLACfg(VLAModelCfg):
    """Settings of ``HFBackboneVLA``; either ``backbone`` or ``backbone_path`` is required."""

    backbone: dict[str, Any] | None = None
    """Settings of the transformers config, including ``model_type``, for a model with random weights."""
    backbone_path: str | None = None
    """Folder of a pretrained model, written by ``save_pretrained``, with its tokenizer; nothing is downloaded."""
    pretrained: bool = True
    """Whether to load the weights in ``backbone_path``; false if the checkpoint of the whole model has them."""
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
        self.action_head = self.make_action_head(cfg.chunk_size * width)
        self.to_action = nn.Linear(width, self.action_dim) if self.action_head is None else None
        last = nn.Linear(width, 1)
        for layer in (self.to_action, last):  # initial outputs close to zero
            if layer is not None:
                nn.init.normal_(layer.weight, std=0.01)
                nn.init.zeros_(layer.bias)
        self.to_value = nn.Sequential(nn.Linear(width, width), nn.GELU(), last)
        self.to_points = nn.Linear(width, cfg.num_points) if cfg.num_points else None
        if "vision" in cfg.freeze:
            self.backbone.vision_model.requires_grad_(False)
        if "language" in cfg.freeze:
            self.backbone.text_model.requires_grad_(False)
            self.backbone.connector.requires_grad_(False)

    def save_files(self, folder: Path) -> dict[str, Any]:
        if self.cfg.backbone_path is None:
            return {}  # described by the settings
        target = folder / "backbone"
        self.backbone.config.save_pretrained(target)
        if self.words is not None and self.words.tokenizer is not None:
            self.words.tokenizer.save_pretrained(target)
        return {"backbone_path": Path(target.name), "pretrained": False}

    def decode(self, obs: TensorDictBase) -> Decoded:
        tokens, mask = self._context(obs)
        own = self.queries.expand(tokens.shape[0], -1, -1)
        if self.body is not None and self.normalizer is not None:
            own = torch.cat((self.body(self.normalizer(self.proprioception(obs))).unsqueeze(1), own), dim=1)
        tokens = torch.cat((tokens, own.to(tokens.dtype)), dim=1)
        mask = torch.cat((mask, mask.new_ones(own.shape[:2])), dim=1)
        # Positions skip the padding of short instructions, so that its length has no effect.
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)
        hidden = self.backbone.text_model(
            inputs_embeds=tokens, attention_mask=mask, position_ids=positions, use_cache=False
        ).last_hidden_state[:, -(self.chunk_size + 1) :]
        hidden = hidden.to(self.queries.dtype)
        points = None if self.to_points is None else self.to_points(hidden[:, -1]).float()
        mean = None if self.to_action is None else self.to_action(hidden[:, :-1]).float()
        value = self.to_value(hidden[:, -1]).squeeze(-1).float()
        return Decoded(mean, value, points, hidden[:, :-1].flatten(1))

    def _context(self, obs: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Return the tokens of images and words ``[batch, n, width]``, and the mask of valid ones ``[batch, n]``."""
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
    """Converts instructions to token ids, by the backbone's tokenizer or, without one, as bytes."""

    def __init__(self, cfg: HFBackboneVLACfg, vocabulary: int) -> None:
        self.length = cfg.instruction_length
        self.tokenizer: Any = None
        if cfg.backbone_path is not None:
            self.tokenizer = load_tokenizer(Path(cfg.backbone_path))
        elif vocabulary < 256:
            raise ConfigError(f"text_config.vocab_size: bytes need at least 256 tokens, got {vocabulary}", "backbone")

    def __call__(self, instruction: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids ``[batch, length]`` and a mask of those that are text."""
        if self.tokenizer is None:
            return instruction, instruction != 0
        return tokenize(instruction, lambda texts: self.tokenizer(texts, add_special_tokens=False), self.length)


def tokenize(instruction: Tensor, encode: Callable[[list[str]], Any], length: int) -> tuple[Tensor, Tensor]:
    """Return token ids ``[batch, length]`` of instructions, int64 ``[batch, bytes]``, and a mask of the text tokens.

    ``encode`` calls a tokenizer of transformers on a list of texts. Longer instructions are truncated.
    """
    unique, rows = instruction.unique(dim=0, return_inverse=True)  # most instructions are equal
    lists = [tokens[:length] for tokens in encode(list(decode_instructions(unique)))["input_ids"]]
    ids = torch.zeros(len(lists), length, dtype=torch.int64)
    mask = torch.zeros(len(lists), length, dtype=torch.bool)
    for i, tokens in enumerate(lists):
        ids[i, : len(tokens)], mask[i, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64), True
    return ids.to(instruction.device)[rows], mask.to(instruction.device)[rows]


def _load_backbone(cfg: HFBackboneVLACfg) -> Any:
    """Return the vision-language model without its language head."""
    if (cfg.backbone is None) == (cfg.backbone_path is None):
        raise ConfigError("expected either backbone (settings) or backbone_path (a folder)", "model_config")
    # Passing dtype keeps the rotary frequencies in float32, which .to(dtype) would round.
    transformers, dtype = require("transformers", extra="vla"), getattr(torch, cfg.dtype)
    if cfg.backbone is not None:
        settings = dict(cfg.backbone)
        refuse_kernels(settings, "backbone")
        model_type = look_up("backbone.model_type", str(settings.pop("model_type", None)), MODEL_TYPES)
        config = transformers.AutoConfig.for_model(model_type, **settings)
        return transformers.AutoModel.from_config(config, dtype=dtype, trust_remote_code=False)
    folder = Path(str(cfg.backbone_path))
    if not (folder / _CONFIG).is_file():
        raise CheckpointError(f"{folder}: expected the folder of a pretrained model, with {_CONFIG} in it")
    with reading(folder):
        refuse_code(folder / _CONFIG)
        config = transformers.AutoConfig.from_pretrained(folder, **LOCAL)
        look_up("backbone.model_type", str(config.model_type), MODEL_TYPES)
        if not cfg.pretrained:
            return transformers.AutoModel.from_config(config, dtype=dtype, trust_remote_code=False)
        return transformers.AutoModel.from_pretrained(folder, config=config, dtype=dtype, use_safetensors=True, **LOCAL)


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer in the folder of a backbone."""
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise CheckpointError(
            f"{folder}: there is no tokenizer in it ({', '.join(_TOKENIZERS)}); write it there with "
            "tokenizer.save_pretrained(folder)"
        )
    with reading(folder):
        if (folder / _TOKENIZER_CONFIG).is_file():
            refuse_code(folder / _TOKENIZER_CONFIG)
        return require("transformers", extra="vla").AutoTokenizer.from_pretrained(folder, **LOCAL)


def refuse_code(file: Path) -> None:
    """Raise ``CheckpointError`` if a config names code in its folder, even if transformers would not run it."""
    content = json.loads(file.read_text(encoding="utf-8"))
    if "auto_map" in content:
        raise CheckpointError(
            f"{file} names code in its folder (auto_map), which is never run; if the model is one of transformers' "
            "own, remove the entry"
        )
    refuse_kernels(content, str(file))


def refuse_kernels(settings: Any, source: str) -> None:
    """Raise ``CheckpointError`` for an implementation ``owner/name``, which transformers would download and run."""
    for key, value in settings.items() if isinstance(settings, Mapping) else ():
        if str(key).endswith("_implementation") and "/" in str(value):
            raise CheckpointError(f"{source}: {key}: {value!r:.80} names code of a repository, which is never run")
        refuse_kernels(value, source)


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Turn errors of transformers about a folder into a one-line ``CheckpointError``."""
    try:
        yield
    except (EmbodiChainError, MemoryError):
        raise
    except Exception as error:  # the tokenizers library raises bare Exceptions
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{folder} cannot be read as a pretrained model: {reason}") from error
