"""Multi-layer perceptrons, and how a config describes them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from embodichain.agents.rl.models.activations import make_activation
from embodichain.agents.rl.utils.config import Count, Fraction
from embodichain.config import Config, configclass
from embodichain.errors import ConfigError, UnknownNameError, nearest


class MLP(nn.Sequential):
    """Linear layers with activations between them; ``output_dim`` may be a shape."""

    def __init__(
        self,
        input_dim: int,
        output_dim: int | Sequence[int],
        hidden_dims: Sequence[int],
        activation: str = "elu",
        last_activation: str | None = None,
        use_layernorm: bool = False,
        dropout_p: float = 0.0,
    ) -> None:
        shape = (output_dim,) if isinstance(output_dim, int) else tuple(output_dim)
        layers: list[nn.Module] = []
        width = input_dim
        for hidden in hidden_dims:
            layers.append(nn.Linear(width, hidden))
            if use_layernorm:
                layers.append(nn.LayerNorm(hidden))
            layers.append(make_activation(activation))
            if dropout_p > 0.0:
                layers.append(nn.Dropout(dropout_p))
            width = hidden
        layers.append(nn.Linear(width, math.prod(shape)))
        if last_activation is not None:
            layers.append(make_activation(last_activation))
        if len(shape) != 1:
            layers.append(nn.Unflatten(-1, shape))
        super().__init__(*layers)
        self.input_dim = input_dim
        self.output_dim = math.prod(shape)

    def init_orthogonal(self, scales: float | Sequence[float] = math.sqrt(2.0)) -> None:
        """Make every weight matrix orthogonal and every bias zero.

        One scale serves all layers; a sequence gives one for each.
        """
        linears = [layer for layer in self if isinstance(layer, nn.Linear)]
        gains = [float(scales)] * len(linears) if isinstance(scales, (int, float)) else list(scales)
        if len(gains) != len(linears):
            raise ConfigError(f"expected one scale or {len(linears)} of them, got {len(gains)}", "init_orthogonal")
        for layer, gain in zip(linears, gains, strict=True):
            nn.init.orthogonal_(layer.weight, gain)
            nn.init.zeros_(layer.bias)


@configclass
class NetworkCfg(Config):
    """What follows ``"network_cfg"`` in a policy block."""

    hidden_sizes: tuple[Count, ...] = (256, 256)
    """Width of each hidden layer."""
    activation: str = "relu"
    """Between the layers: relu, elu, tanh, gelu or silu."""
    last_activation: str | None = None
    """After the last layer; none for a linear output."""
    use_layernorm: bool = False
    """Whether a LayerNorm follows each hidden linear layer."""
    dropout_p: Fraction = 0.0
    """Dropout probability of hidden layers."""


def build_mlp_from_cfg(module_cfg: Mapping[str, Any], in_dim: int, out_dim: int | Sequence[int]) -> MLP:
    """Construct an MLP from ``{"type": "mlp", "hidden_sizes": [256, 256], "activation": "relu"}``.

    The settings may also stand under ``"network_cfg"``: ``{"type": "mlp", "network_cfg": {...}}``.
    """
    kind = module_cfg.get("type", "mlp")
    if kind != "mlp":
        raise UnknownNameError(f"unknown network type {kind!r}.{nearest(str(kind), ['mlp'])}")
    direct = {key: value for key, value in module_cfg.items() if key not in ("type", "network_cfg")}
    nested = module_cfg.get("network_cfg", {})
    twice = sorted(direct.keys() & nested.keys())
    if twice:
        raise ConfigError(f"{', '.join(twice)}: given both beside and inside network_cfg", "network")
    cfg = NetworkCfg.from_dict({**direct, **nested}, source="network")
    return MLP(
        in_dim,
        out_dim,
        cfg.hidden_sizes,
        cfg.activation,
        last_activation=cfg.last_activation,
        use_layernorm=cfg.use_layernorm,
        dropout_p=cfg.dropout_p,
    )
