"""``TinyVLA``: a vision-language-action model of little more than a million parameters, fit for a CPU.

Patches of all cameras and the bytes of the instruction are what is seen and said. A few readout tokens, which know what
was said, look at it layer by layer; what they found and proprioception become the chunk of actions and the value. The
cost is that of the few readouts looking at the patches, not of all patches looking at each other.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from tensordict import TensorDictBase
from torch import Tensor, nn

from embodichain.agents.rl.models.vla.model import Decoded, VLAModel, VLAModelCfg, register_vla_model
from embodichain.agents.rl.utils.config import Count
from embodichain.config import configclass
from embodichain.errors import ConfigError

# MERGED tokenizer: Instructions as tokens: UTF-8 bytes, a few at a time.


PAD = 0
"""The byte that ends an instruction; no text contains it."""
VOCABULARY = 256


class ByteTokenizer(nn.Module):
    """Embeds ``stride`` neighbouring bytes as one token, with its place: ``[batch, length]`` to ``[batch, n, width]``.

    Any text in any language has bytes, so there is no vocabulary to fit and none that could be missing.
    """

    def __init__(self, length: int, width: int, stride: int = 4) -> None:
        super().__init__()
        self.length, self.stride = length, stride
        self.num_tokens = -(-length // stride)
        self.embed = nn.Embedding(VOCABULARY, width, padding_idx=PAD)
        self.join = nn.Conv1d(width, width, kernel_size=stride, stride=stride)
        self.place = nn.Parameter(torch.randn(self.num_tokens, width) * 0.02)

    def forward(self, instruction: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens ``[batch, num_tokens, width]`` and which of them hold text, bool ``[batch, num_tokens]``."""
        padded = F.pad(instruction, (0, self.num_tokens * self.stride - self.length), value=PAD)
        tokens = self.join(self.embed(padded).transpose(1, 2)).transpose(1, 2) + self.place
        return tokens, (padded != PAD).unflatten(1, (self.num_tokens, self.stride)).any(-1)


@configclass
class TinyVLACfg(VLAModelCfg):
    """Settings of ``TinyVLA``."""

    width: Count = 128
    """Numbers per token."""
    depth: Count = 2
    """Layers in which the readouts look and talk."""
    num_readouts: Count = 4
    """Tokens that carry what was found to the heads."""
    hidden_size: Count = 256
    """Width of the heads' hidden layers."""
    num_heads: Count = 4
    """Attention heads; they divide the width."""
    patch_size: Literal[2, 4, 8, 16, 32] = 8
    """Pixels along a side of one patch; it divides height and width of every picture."""
    bytes_per_token: Count = 4
    """Bytes of the instruction that make one token."""
    value_shapes_perception: bool = True
    """Whether the value's errors, too, change what is perceived; without, what was imitated is better kept."""


class PatchEncoder(nn.Module):
    """Turns a picture into one token per patch, each with its place: ``[batch, C, H, W]`` to ``[batch, n, width]``.

    Overlapping convolutions, each halving the picture, make the patches; beside the colours they are given the pixels'
    coordinates, so that where something is can be read off as easily as what it is.
    """

    pixels: Tensor

    def __init__(self, shape: tuple[int, int, int], width: int, patch_size: int) -> None:
        super().__init__()
        height, across, channels = shape
        if height % patch_size or across % patch_size:
            raise ConfigError(
                f"patch_size: {patch_size} does not divide a picture of {height}x{across}", "model_config"
            )
        halvings = patch_size.bit_length() - 1
        widths = [channels + 2, *(max(16, width >> (halvings - i)) for i in range(1, halvings)), width]
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Conv2d(before, after, kernel_size=3, stride=2, padding=1), nn.GELU()]
        self.embed = nn.Sequential(*layers[:-1])
        self.num_tokens = (height // patch_size) * (across // patch_size)
        self.place = nn.Parameter(torch.randn(self.num_tokens, width) * 0.02)
        grid = torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, across), indexing="ij")
        self.register_buffer("pixels", torch.stack(grid), persistent=False)

    def forward(self, picture: Tensor) -> Tensor:
        """Return tokens ``[batch, num_tokens, width]``."""
        placed = torch.cat((picture, self.pixels.expand(picture.shape[0], -1, -1, -1)), dim=1)
        return self.embed(placed).flatten(2).transpose(1, 2) + self.place


class Attention(nn.Module):
    """Multi-head attention of queries ``[batch, q, width]`` over ``[batch, n, width]``."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key_value = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, seen: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return what each query takes from ``seen``; ``mask`` ``[batch, n]`` tells what there is to see."""
        query = self.query(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        key, value = self.key_value(seen).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        allowed = None if mask is None else mask[:, None, None, :]
        taken = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed)
        return self.out(taken.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Readouts look at what is seen and said, then at each other, then think."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.look, self.talk = Attention(width, num_heads), Attention(width, num_heads)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.think = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, seen: Tensor, mask: Tensor) -> Tensor:
        """Return the readouts ``[batch, q, width]`` after this layer."""
        x = x + self.look(self.norms[0](x), seen, mask)
        own = self.norms[1](x)
        x = x + self.talk(own, own)
        return x + self.think(self.norms[2](x))


@register_vla_model("tiny_vla")
class TinyVLA(VLAModel):
    """Patch encoder, byte tokens, proprioception, a small transformer, an action-chunk head and a value head."""

    cfg_type: ClassVar[type[VLAModelCfg]] = TinyVLACfg
    cfg: TinyVLACfg

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        cfg, width = self.cfg, self.cfg.width
        if width % (2 * cfg.num_heads):
            problem = f"width: expected a multiple of 2 * num_heads = {2 * cfg.num_heads}, got {width}"
            raise ConfigError(problem, "model_config")
        self.eyes = nn.ModuleDict({name: PatchEncoder(s, width, cfg.patch_size) for name, s in cfg.cameras.items()})
        length = cfg.instruction_length
        self.words = ByteTokenizer(length, width, cfg.bytes_per_token) if length else None
        self.meaning = nn.Linear(self.words.num_tokens * width, width) if self.words is not None else None
        self.readouts = nn.Parameter(torch.randn(cfg.num_readouts, width) * 0.02)
        self.layers = nn.ModuleList(Layer(width, cfg.num_heads) for _ in range(cfg.depth))
        self.seen_norm, self.out_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        perceived = cfg.num_readouts * width
        known = perceived + sum(cfg.proprio.values())
        self.to_action = _head(known, cfg.hidden_size, self.chunk_size * self.action_dim)
        self.to_value = _head(known, cfg.hidden_size, 1)
        self.to_points = nn.Linear(perceived, cfg.num_points) if cfg.num_points else None

    def decode(self, obs: TensorDictBase) -> Decoded:
        """Return the chunk's mean, the value and the points."""
        seen, mask, said = self._perceive(obs)
        x = self.readouts.expand(seen.shape[0], -1, -1)
        if said is not None:  # what is looked for depends on what was said, from the first layer on
            x = x + said.unsqueeze(1)
        for layer in self.layers:
            x = layer(x, seen, mask)
        perceived = known = self.out_norm(x).flatten(1)
        if self.normalizer is not None:
            known = torch.cat((perceived, self.normalizer(self.proprioception(obs))), dim=1)
        mean = self.to_action(known).unflatten(1, (self.chunk_size, self.action_dim))
        points = None if self.to_points is None else self.to_points(perceived).float()
        judged = known if self.cfg.value_shapes_perception else known.detach()
        return Decoded(mean.float(), self.to_value(judged).squeeze(-1).float(), points)

    def _perceive(self, obs: TensorDictBase) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return all tokens, which of them mean something ``[batch, n]``, and the instruction as a whole."""
        tokens = [self.eyes[name](self.picture(obs, name)) for name in self.cfg.cameras]
        seen = torch.cat(tokens, dim=1)
        mask = torch.ones(seen.shape[:2], dtype=torch.bool, device=seen.device)
        if self.words is None or self.meaning is None:
            return self.seen_norm(seen), mask, None
        said, is_text = self.words(self.instruction(obs))
        whole = self.meaning((F.gelu(said) * is_text.unsqueeze(-1)).flatten(1))
        seen, mask = torch.cat((seen, said), dim=1), torch.cat((mask, is_text), dim=1)
        return self.seen_norm(seen), mask, whole


def _head(width: int, hidden: int, out: int) -> nn.Sequential:
    """Return a perceptron that begins with zeros, nearly: no action, worth nothing."""
    last = nn.Linear(hidden, out)
    nn.init.normal_(last.weight, std=0.01)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), last)
