"""The action expert of SmolVLA: layers that attend to the language model's keys and values, and causally to actions.

Time is that of ``flow.py``: LeRobot's ``t`` is ``1 - tau``, and its velocity has the opposite sign.
"""

import math
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from tensordict import TensorDictBase
from torch import Tensor, nn

from embodichain.agents.rl.models.flow import FlowHead, time_waves
from embodichain.config.classes import Config, Positive, Size, configclass
from embodichain.errors import ConfigError
from embodichain.extras import require

ROPE_BASE = 10_000.0
"""Base of rotary position embeddings; SmolVLA does not use that of its language model."""


@configclass
class SmolVLANetworkCfg(Config):
    """Architecture of the network, with LeRobot's names."""

    max_state_dim: Size = 32
    """Dimension to which states are padded."""
    max_action_dim: Size = 32
    """Dimension to which actions are padded."""
    resize_imgs_with_padding: tuple[Size, Size] | None = (512, 512)
    """Width and height of resized images; they keep their aspect ratio and are padded at the top and left."""
    tokenizer_max_length: Size = 48
    """Maximum number of tokens of an instruction; longer ones are truncated."""
    add_image_special_tokens: bool = False
    """Whether special tokens enclose each image."""
    empty_cameras: Annotated[int, Field(ge=0, le=64)] = 0
    """Number of missing images, of which only the special tokens are used."""
    attention_mode: Literal["cross_attn", "self_attn"] = "cross_attn"
    """Whether layers of the expert attend to the context only, or also to the actions."""
    num_vlm_layers: int = 16
    """Number of layers of the language model that are used; all if not positive."""
    num_expert_layers: int = -1
    """Number of layers of the expert; as many as the language model has if not positive."""
    self_attn_every_n_layers: int = 2
    """For cross_attn: every n-th layer also attends to the actions; none if not positive."""
    expert_width_multiplier: Positive = 0.75
    """Width of the expert, relative to the language model."""
    min_period: Positive = 4e-3
    """Shortest period of the sinusoidal time embedding."""
    max_period: Positive = 4.0
    """Longest period of the sinusoidal time embedding."""

    def attends_to_actions(self, layer: int) -> bool:
        """Return whether a layer also attends to the actions."""
        every = self.self_attn_every_n_layers
        return self.attention_mode == "self_attn" or (every > 0 and layer % every == 0)


class ActionExpert(nn.Module):
    """Predicts the velocity of noisy actions, given the keys and values of the language model."""

    def __init__(self, text_config: Any, cfg: SmolVLANetworkCfg) -> None:
        super().__init__()
        transformers = require("transformers", extra="vla")
        depth = int(text_config.num_hidden_layers)
        own_depth = cfg.num_expert_layers if cfg.num_expert_layers > 0 else depth
        if depth % own_depth:
            raise ConfigError(f"network.num_expert_layers: {own_depth} does not divide {depth} layers", "model_config")
        width = int(text_config.hidden_size * cfg.expert_width_multiplier)
        hidden = int(4 * int(2 * width / 3))
        settings = {
            **text_config.to_dict(),
            "hidden_size": width,
            "intermediate_size": 256 * ((hidden + 255) // 256),
            "num_hidden_layers": own_depth,
            "vocab_size": 1,
            **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
        }
        config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
        model = transformers.AutoModel.from_config(config, dtype=torch.float32, trust_remote_code=False)
        self.layers, self.norm = model.layers, model.norm
        self.head_dim = int(text_config.head_dim)
        self.at = [i * (depth // own_depth) for i in range(own_depth)]
        """For each layer, the layer of the language model whose keys and values it attends to."""
        self.with_actions = [cfg.attends_to_actions(at) for at in self.at]
        kv_width = int(text_config.num_key_value_heads) * self.head_dim
        for own, (layer, at) in enumerate(zip(self.layers, self.at, strict=True)):
            if cfg.attends_to_actions(own) != cfg.attends_to_actions(at):
                raise ConfigError(
                    f"network: layer {own} of the expert stands beside layer {at} of the language model, and "
                    f"self_attn_every_n_layers {cfg.self_attn_every_n_layers} means different things for them",
                    "model_config",
                )
            if not cfg.attends_to_actions(at):
                layer.self_attn.k_proj = nn.Linear(kv_width, kv_width, bias=bool(config.attention_bias))
                layer.self_attn.v_proj = nn.Linear(kv_width, kv_width, bias=bool(config.attention_bias))
        self.periods = (cfg.min_period, cfg.max_period)
        self.action_in_proj = nn.Linear(cfg.max_action_dim, width)
        self.action_out_proj = nn.Linear(width, cfg.max_action_dim)
        self.action_time_mlp_in, self.action_time_mlp_out = nn.Linear(2 * width, width), nn.Linear(width, width)

    def context(self, keys: list[Tensor], values: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the keys and values ``[batch, layers, n, kv_heads, head_dim]`` that the expert's layers attend to."""
        parts: tuple[list[Tensor], list[Tensor]] = ([], [])
        for layer, at, with_actions in zip(self.layers, self.at, self.with_actions, strict=True):
            attention = layer.self_attn
            for found, given, project in (
                (parts[0], keys[at], attention.k_proj),
                (parts[1], values[at], attention.v_proj),
            ):
                part = given.float()
                found.append(part if with_actions else project(part.flatten(2)).unflatten(-1, (-1, self.head_dim)))
        return torch.stack(parts[0], dim=1), torch.stack(parts[1], dim=1)

    def forward(self, context: TensorDictBase, actions: Tensor, time: Tensor) -> Tensor:
        """Return the velocities of actions ``[batch, count, chunk_size, dim]`` at ``time`` ``[batch, count]``."""
        x = self.action_in_proj(actions)
        waves = _waves(time, x.shape[-1], self.periods).unsqueeze(-2).expand_as(x)
        x = self.action_time_mlp_out(F.silu(self.action_time_mlp_in(torch.cat([x, waves], dim=-1))))
        position = torch.arange(x.shape[2], device=x.device)
        after_context = position + context["valid"].sum(1).view(-1, 1, 1)
        for i, layer in enumerate(self.layers):
            attention, inputs = layer.self_attn, layer.input_layernorm(x)
            query = attention.q_proj(inputs).unflatten(-1, (-1, self.head_dim))
            own = None
            if self.with_actions[i]:
                query = rotate(query, after_context)
                key, value = (
                    p(inputs).unflatten(-1, (-1, self.head_dim)) for p in (attention.k_proj, attention.v_proj)
                )
                own = (rotate(key, after_context), value)
            else:
                query = rotate(query, position)
            attended = _attend(query, context["keys"][:, i], context["values"][:, i], context["valid"], own)
            x = x + attention.o_proj(attended)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.action_out_proj(self.norm(x))


class ExpertFlowHead(FlowHead):
    """A flow head with an ``ActionExpert``; features are a TensorDict of ``keys``, ``values``, ``valid``, ``state``."""

    def velocity(self, features: TensorDictBase, x: Tensor, time: Tensor) -> Tensor:
        """Return the velocity of ``x``, ``[batch, chunk_size, dim]`` or ``[batch, count, chunk_size, dim]``."""
        if x.ndim == 3:
            return self.velocity(features, x.unsqueeze(1), time.unsqueeze(1)).squeeze(1)
        return -self.velocity_net(features, x.float(), 1.0 - time).float()

    def std_inputs(self, features: TensorDictBase, time: Tensor) -> Tensor:
        state = features["state"].float()
        state = state if time.ndim == 1 else state.unsqueeze(1).expand(*time.shape, -1)
        return torch.cat([state, time_waves(time)], dim=-1)

    def each_step(self, features: Any, count: int) -> Any:
        return features  # in the expert, all steps attend to the same keys


def _waves(time: Tensor, width: int, periods: tuple[float, float]) -> Tensor:
    """Return a sinusoidal embedding ``[..., width]`` of a time, with geometrically spaced periods."""
    share = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64, device=time.device)
    period = periods[0] * (periods[1] / periods[0]) ** share
    angle = time.double().unsqueeze(-1) * (2.0 * math.pi / period)
    return torch.cat([angle.sin(), angle.cos()], dim=-1).float()


def rotate(x: Tensor, position: Tensor) -> Tensor:
    """Apply rotary position embeddings to ``x`` ``[..., n, heads, head_dim]`` at the positions ``[..., n]``."""
    half = x.shape[-1] // 2
    wavelength = ROPE_BASE ** (torch.arange(half, dtype=torch.float32, device=x.device) / half)
    angle = (position.float().unsqueeze(-1) / wavelength).unsqueeze(-2)
    first, second = x.float().split(half, dim=-1)
    turned = (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin())
    return torch.cat(turned, dim=-1).to(x.dtype)


def _attend(query: Tensor, keys: Tensor, values: Tensor, valid: Tensor, own: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return the attention output of queries ``[batch, count, n, heads, d]``.

    They attend to the context ``[batch, m, kv_heads, d]`` and, causally, to ``own`` keys and values
    ``[batch, count, n, kv_heads, d]`` if given.
    """
    grouped = query.unflatten(3, (keys.shape[2], -1)) * query.shape[-1] ** -0.5
    scores = torch.einsum("bcnhgd,bmhd->bcnhgm", grouped, keys)
    scores = scores.masked_fill(~valid.view(valid.shape[0], 1, 1, 1, 1, -1), -torch.inf)
    if own is None:
        return torch.einsum("bcnhgm,bmhd->bcnhgd", scores.softmax(-1), values).flatten(3)
    count = query.shape[2]
    later = torch.ones(count, count, dtype=torch.bool, device=query.device).triu(1).view(1, 1, count, 1, 1, count)
    among = torch.einsum("bcnhgd,bcmhd->bcnhgm", grouped, own[0]).masked_fill(later, -torch.inf)
    weight = torch.cat([scores, among], dim=-1).softmax(-1)
    context, rest = weight.split([keys.shape[1], count], dim=-1)
    attended = torch.einsum("bcnhgm,bmhd->bcnhgd", context, values)
    return (attended + torch.einsum("bcnhgm,bcmhd->bcnhgd", rest, own[1])).flatten(3)
