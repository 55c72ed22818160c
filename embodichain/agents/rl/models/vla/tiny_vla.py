"""``TinyVLA``: a vision-language-action model with about a million parameters, small enough for a CPU.

A few readout tokens, conditioned on the instruction, cross-attend to the patches of all cameras and the bytes of the
instruction. Together with proprioception, they are mapped to the chunk and the value. Patches do not attend to each
other.
"""

from itertools import pairwise
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from tensordict import TensorDictBase
from torch import Tensor, nn

from embodichain.agents.rl.models.mlp import Linear
from embodichain.agents.rl.models.vla.model import Decoded, VLAModel, VLAModelCfg, register_vla_model
from embodichain.config.classes import Layers, Size, configclass
from embodichain.errors import ConfigError

PAD = 0
"""The byte that pads instructions; no text contains it."""


class ByteTokenizer(nn.Module):
    """Embeds UTF-8 bytes ``[batch, length]``, ``stride`` adjacent ones per token, with a positional embedding."""

    def __init__(self, length: int, width: int, stride: int = 4) -> None:
        super().__init__()
        self.length, self.stride = length, stride
        self.num_tokens = -(-length // stride)
        self.embed = nn.Embedding(256, width, padding_idx=PAD)
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

    width: Size = 128
    """Width of tokens."""
    depth: Layers = 2
    """Number of attention layers."""
    num_readouts: Layers = 4
    """Number of readout tokens, which carry information from the context to the heads."""
    hidden_size: Size = 256
    """Width of the heads' hidden layers."""
    num_heads: Layers = 4
    """Number of attention heads, a divisor of the width."""
    patch_size: Literal[2, 4, 8, 16, 32] = 8
    """Side of a patch in pixels, a divisor of the height and width of every image."""
    bytes_per_token: Size = 4
    """Bytes of the instruction per token."""
    value_shapes_perception: bool = True
    """Whether the value loss also trains the encoders; ``false`` preserves what imitation learned."""


class PatchEncoder(nn.Module):
    """Encodes images ``[batch, C, H, W]`` as one token per patch ``[batch, n, width]``, by overlapping convolutions."""

    pixels: Tensor

    def __init__(self, shape: tuple[int, int, int], width: int, patch_size: int) -> None:
        super().__init__()
        height, across, channels = shape
        if height % patch_size or across % patch_size:
            raise ConfigError(f"patch_size: {patch_size} does not divide an image of {height}x{across}", "model_config")
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

    def forward(self, image: Tensor) -> Tensor:
        located = torch.cat((image, self.pixels.expand(image.shape[0], -1, -1, -1)), dim=1)
        return self.embed(located).flatten(2).transpose(1, 2) + self.place


class Attention(nn.Module):
    """Multi-head attention of queries ``[batch, q, width]`` over ``[batch, n, width]``."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key_value = Linear(width, width), Linear(width, 2 * width)
        self.out = Linear(width, width)

    def forward(self, x: Tensor, context: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the attention output ``[batch, q, width]``; ``mask`` ``[batch, n]`` is true for valid tokens."""
        query = self.query(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        key, value = self.key_value(context).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        allowed = None if mask is None else mask[:, None, None, :]
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed)
        return self.out(attended.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Cross-attention of readouts to the context (``look``), self-attention (``talk``), then an MLP (``think``)."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.look, self.talk = Attention(width, num_heads), Attention(width, num_heads)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.think = nn.Sequential(Linear(width, 4 * width), nn.GELU(), Linear(4 * width, width))

    def forward(self, x: Tensor, context: Tensor, mask: Tensor) -> Tensor:
        x = x + self.look(self.norms[0](x), context, mask)
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
        if width % (unit := 2 * cfg.num_heads):
            raise ConfigError(f"width: expected a multiple of 2 * num_heads = {unit}, got {width}", "model_config")
        self.eyes = nn.ModuleDict({name: PatchEncoder(s, width, cfg.patch_size) for name, s in cfg.cameras.items()})
        length = cfg.instruction_length
        self.words = ByteTokenizer(length, width, cfg.bytes_per_token) if length else None
        self.meaning = nn.Linear(self.words.num_tokens * width, width) if self.words is not None else None
        self.readouts = nn.Parameter(torch.randn(cfg.num_readouts, width) * 0.02)
        self.layers = nn.ModuleList(Layer(width, cfg.num_heads) for _ in range(cfg.depth))
        self.seen_norm, self.out_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        perceived = cfg.num_readouts * width
        known = perceived + sum(cfg.proprio.values())
        self.action_head = self.make_action_head(known)
        size = self.chunk_size * self.action_dim
        self.to_action = _head(known, cfg.hidden_size, size) if self.action_head is None else None
        self.to_value = _head(known, cfg.hidden_size, 1)
        self.to_points = nn.Linear(perceived, cfg.num_points) if cfg.num_points else None

    def decode(self, obs: TensorDictBase) -> Decoded:
        context, mask, instruction = self._context(obs)
        x = self.readouts.expand(context.shape[0], -1, -1)
        if instruction is not None:
            x = x + instruction.unsqueeze(1)
        for layer in self.layers:
            x = layer(x, context, mask)
        perceived = features = self.out_norm(x).flatten(1)
        if self.normalizer is not None:
            features = torch.cat((perceived, self.normalizer(self.proprioception(obs))), dim=1)
        mean, given = None, features
        if self.to_action is not None:
            mean = self.to_action(features).unflatten(1, (self.chunk_size, self.action_dim)).float()
        points = None if self.to_points is None else self.to_points(perceived).float()
        if not self.cfg.value_shapes_perception:
            features = features.detach()
        return Decoded(mean, self.to_value(features).squeeze(-1).float(), points, given)

    def _context(self, obs: TensorDictBase) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return all tokens, the mask of valid ones ``[batch, n]``, and the instruction as one vector."""
        tokens = torch.cat([self.eyes[name](self.image(obs, name)) for name in self.cfg.cameras], dim=1)
        mask = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        instruction = None
        if self.words is not None and self.meaning is not None:
            words, is_text = self.words(self.instruction(obs))
            instruction = self.meaning((F.gelu(words) * is_text.unsqueeze(-1)).flatten(1))
            tokens, mask = torch.cat((tokens, words), dim=1), torch.cat((mask, is_text), dim=1)
        return self.seen_norm(tokens), mask, instruction


def _head(width: int, hidden: int, out: int) -> nn.Sequential:
    """Return an MLP whose initial output is close to zero."""
    last = nn.Linear(hidden, out)
    nn.init.normal_(last.weight, std=0.01)
    nn.init.zeros_(last.bias)
    return nn.Sequential(Linear(width, hidden), nn.GELU(), Linear(hidden, hidden), nn.GELU(), last)
