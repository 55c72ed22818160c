"""The networks of policies: perceptrons, image encoders and recurrent layers, and how configs describe them."""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from embodichain.agents.processes.shared_memory import available_bytes
from embodichain.config.classes import Config, Fraction, Layers, Size, configclass
from embodichain.errors import ConfigError, UnknownNameError, look_up

FEW = 8192
"""Numbers up to which a backward pass in Python costs more than a faster forward pass saves."""
_MINUS_ONE = torch.tensor(-1.0)
_CHANNELS = 8  # a multiple of it has fast convolutions in reduced precision


class _SigmoidTanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = _tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return torch.ops.aten.tanh_backward(grads[0], ctx.saved_tensors[0])


def _tanh(x: Tensor) -> Tensor:
    # tanh(x) = 2 sigmoid(2x) - 1, in place
    y = (x * 2.0).sigmoid_()
    return torch.add(_MINUS_ONE, y, alpha=2.0, out=y)


class Tanh(nn.Module):
    """tanh; in float32 on a CPU mostly by way of the sigmoid, exact to 2e-7.

    ``torch.tanh`` would take half the time of updating a small network on many processors.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_cpu or x.dtype != torch.float32 or torch.compiler.is_compiling():
            return torch.tanh(x)
        if not (torch.is_grad_enabled() and x.requires_grad):
            return _tanh(x)
        return torch.tanh(x) if x.numel() <= FEW else _SigmoidTanh.apply(x)


ACTIVATIONS: dict[str, type[nn.Module]]
ACTIVATIONS = {"relu": nn.ReLU, "elu": nn.ELU, "tanh": Tanh, "gelu": nn.GELU, "silu": nn.SiLU}


def make_activation(name: str) -> nn.Module:
    """Return a new activation module by its name."""
    return look_up("activation", name.lower(), ACTIVATIONS)()


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
        for width, hidden in pairwise([input_dim, *hidden_dims]):
            layers.append(nn.Linear(width, hidden))
            if use_layernorm:
                layers.append(nn.LayerNorm(hidden))
            layers.append(make_activation(activation))
            if dropout_p > 0.0:
                layers.append(nn.Dropout(dropout_p))
        layers.append(nn.Linear([input_dim, *hidden_dims][-1], math.prod(shape)))
        if last_activation is not None:
            layers.append(make_activation(last_activation))
        if len(shape) != 1:
            layers.append(nn.Unflatten(-1, shape))
        super().__init__(*layers)
        self.input_dim, self.output_dim = input_dim, math.prod(shape)

    def init_orthogonal(self, scales: float | Sequence[float] = math.sqrt(2.0)) -> None:
        """Make every weight matrix orthogonal, with one scale for all layers or one for each, and every bias zero."""
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

    hidden_sizes: Annotated[tuple[Size, ...], Field(max_length=256)] = (256, 256)
    """Width of each hidden layer."""
    activation: str = "relu"
    """Between the layers: relu, elu, tanh, gelu or silu."""
    last_activation: str | None = None
    """After the last layer; none for a linear output."""
    use_layernorm: bool = False
    """Whether a LayerNorm follows each hidden linear layer."""
    dropout_p: Fraction = 0.0
    """Dropout probability of hidden layers. Reinforcement learning collects and learns without dropout, as the
    probability ratio needs the same network twice; training of your own in training mode uses it."""


@configclass
class NetworkSettings(Config):
    """Settings of a policy whose ``actor`` and ``critic``, where it has them, are blocks that describe networks."""


@configclass
class NetworkBlock(Config):
    """The block of a network, ``{"type": "mlp", "network_cfg": {...}}``; settings may also stand beside ``type``."""

    type: Literal["mlp"] = "mlp"
    """Kind of network."""
    network_cfg: NetworkCfg = NetworkCfg()
    """Its layers."""


def build_mlp_from_cfg(module_cfg: Mapping[str, Any], in_dim: int, out_dim: int | Sequence[int]) -> MLP:
    """Construct an MLP from ``{"type": "mlp", "hidden_sizes": [256, 256], "activation": "relu"}``.

    The settings may also stand under ``"network_cfg"``: ``{"type": "mlp", "network_cfg": {...}}``.
    """
    cfg = network_settings(module_cfg).to_dict()
    hidden = cfg.pop("hidden_sizes")
    outputs = out_dim if isinstance(out_dim, int) else math.prod(out_dim)
    needed = 4 * sum(width * following for width, following in pairwise([in_dim, *hidden, outputs]))
    if needed > (room := free_memory()):
        problem = f"hidden_sizes: a network of these sizes has {needed} bytes, and {room} are free"
        raise ConfigError(f"{problem}; choose fewer or narrower layers", "network")
    return MLP(in_dim, out_dim, hidden, **cfg)


def network_settings(module_cfg: Mapping[str, Any], source: str = "network") -> NetworkCfg:
    """Return the checked settings of a network block; ``source`` opens the message about what is wrong with it."""
    look_up("network type", str(module_cfg.get("type", "mlp")), {"mlp": MLP})
    direct = {key: value for key, value in module_cfg.items() if key not in ("type", "network_cfg")}
    nested = module_cfg.get("network_cfg", {})
    if not isinstance(nested, Mapping):
        problem = f"network_cfg: expected a mapping of NetworkCfg fields, got {nested!r:.60} ({type(nested).__name__})"
        raise ConfigError(problem, source)
    if twice := sorted(direct.keys() & nested.keys()):
        raise ConfigError(f"{', '.join(twice)}: given both beside and inside network_cfg", source)
    cfg = NetworkCfg.from_dict({**direct, **nested}, source=source)
    return cfg


def check_network(block: dict[str, Any]) -> dict[str, Any]:
    """Return a network block as it is, or raise ``ConfigError`` for all that is wrong with it."""
    nested = block.get("network_cfg")
    try:
        cfg = network_settings(block)
        for name in filter(None, (cfg.activation, cfg.last_activation)):
            look_up("activation", name.lower(), ACTIVATIONS)
    except ConfigError as error:
        inside = nested if isinstance(nested, Mapping) else {}
        prefixes = ["network_cfg." * (problem.split(":")[0] in inside) for problem in error.problems]
        raise ConfigError([f"{a}{b}" for a, b in zip(prefixes, error.problems, strict=True)], "network") from None
    except UnknownNameError as error:
        raise ConfigError(f"{'activation' if 'activation' in str(error) else 'type'}: {error}", "network") from None
    return block


def free_memory() -> int:
    """Return how many bytes the weights of a network may take here, where that can be known."""
    return available_bytes() if sys.platform == "linux" else sys.maxsize


@configclass
class ImageEncoderCfg(Config):
    """How images become features; each camera has its own encoder, shared by actor and critic."""

    channels: Annotated[tuple[Size, ...], Field(max_length=16)] = (16, 32, 32)
    """Channels of each convolution; every one halves height and width."""
    feature_dim: Size = 128
    """Features per image."""
    activation: str = "relu"
    """After each layer: relu, elu, tanh, gelu or silu."""
    layout: Literal["auto", "channels_first", "channels_last"] = "auto"
    """Where an image has its channels; ``auto`` tells it by its shape: the side beside two equal ones, else
    1, 3 or 4 of them, else the smaller side."""


@dataclass(frozen=True)
class ImageLayout:
    """What the axes of an image mean: ``[H, W]``, ``[H, W, C]``, ``[C, H, W]``, or a stack ``[T, ...]`` of such."""

    shape: tuple[int, int, int, int]
    """Frames, and each one's axes in the order in which they come."""
    channels_last: bool

    @classmethod
    def of(cls, shape: tuple[int, ...], name: str, layout: str = "auto") -> Self:
        """Return the layout of images of a shape; ``name`` is what the error calls those that cannot be told."""
        if len(shape) not in (2, 3, 4):
            expected = "[H, W], [H, W, C], [C, H, W], or a stack [T, ...] of the latter two"
            raise ConfigError(f"{name}: expected images {expected}, got shape {list(shape)}", "image encoder")
        stack = shape[0] if len(shape) == 4 else 1
        first, middle, last = (*shape, 1) if len(shape) == 2 else shape[-3:]
        if len(shape) == 2:
            layout = "channels_last"
        elif layout == "auto":
            usual = (first in (1, 3, 4), last in (1, 3, 4))
            if first == last:
                problem = f"an image of shape {list(shape)} may have its channels first or last"
                raise ConfigError(f"{name}: {problem}; say which by policy.image_encoder.layout", "image encoder")
            if middle in (first, last):  # [8, 8, 111] is a square of many channels
                is_last = first == middle
            else:
                is_last = usual[1] if usual[0] != usual[1] else last < first
            layout = "channels_last" if is_last else "channels_first"
        return cls((stack, first, middle, last), layout == "channels_last")

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Channels of all frames together, height and width."""
        stack, first, middle, last = self.shape
        return (stack * last, first, middle) if self.channels_last else (stack * first, middle, last)

    def channels_first(self, images: Tensor) -> Tensor:
        """Return images ``[..., *shape]`` as ``[rows, channels, height, width]``."""
        rows = images.reshape(-1, *self.shape)
        return (rows.permute(0, 1, 4, 2, 3) if self.channels_last else rows).flatten(1, 2)


class ImageEncoder(nn.Module):
    """Maps images ``[..., *shape]`` in [0, ``largest``] to features ``[..., feature_dim]``.

    With ``num_ids``, images ``[..., H, W, 1]`` of ids that are smaller: each id becomes a channel of zeros and ones.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        cfg: ImageEncoderCfg,
        largest: float = 255.0,
        name: str = "image",
        num_ids: int = 0,
    ) -> None:
        super().__init__()
        self.shape, self.largest, self.num_ids = shape, 1.0 if num_ids else largest, num_ids
        if num_ids:
            self.layout = ImageLayout((1, shape[0], shape[1], num_ids), channels_last=True)
        else:
            self.layout = ImageLayout.of(shape, name, cfg.layout)
        channels, height, width = self.layout.sizes
        layers: list[nn.Module] = []
        for out in cfg.channels:
            layers += [nn.Conv2d(channels, out, kernel_size=3, stride=2, padding=1), make_activation(cfg.activation)]
            height, width, channels = (height + 1) // 2, (width + 1) // 2, out
        self.convolutions = nn.Sequential(*layers)
        self.project = nn.Linear(channels * height * width, cfg.feature_dim)
        self.activation = make_activation(cfg.activation)

    def forward(self, image: Tensor) -> Tensor:
        batch = image.shape[: image.ndim - len(self.shape)]
        if self.num_ids:
            image = image == torch.arange(self.num_ids, dtype=image.dtype, device=image.device)
        if image.is_cuda and len(self.convolutions):
            maps = self._convolve_unscaled(self.layout.channels_first(image))
        else:
            scaled = image.float() if self.largest == 1.0 else image.float() / self.largest
            maps = self.convolutions(self.layout.channels_first(scaled))
        return self.activation(self.project(maps.flatten(1))).unflatten(0, batch)

    def _convolve_unscaled(self, image: Tensor) -> Tensor:
        """Scale the weights of the first layer instead of the images, which are read once and in their own type.

        In reduced precision there are fast kernels only for multiples of eight channels: what is missing is zeros.
        """
        is_reduced = torch.is_autocast_enabled("cuda")
        first, *others = self.convolutions
        weight: Any = first.weight
        weight = weight / self.largest
        if is_reduced and (missing := -image.shape[1] % _CHANNELS):
            weight = functional.pad(weight, (0, 0, 0, 0, 0, missing))
            rows, channels, height, width = image.shape
            wider = image.new_empty(
                (rows, height, width, channels + missing), dtype=torch.get_autocast_dtype("cuda")
            ).permute(0, 3, 1, 2)
            wider[:, :channels], wider[:, channels:] = image, 0.0
            image = wider
        image = image.to(torch.get_autocast_dtype("cuda") if is_reduced else torch.float32)
        maps = functional.conv2d(image, weight, first.bias, stride=2, padding=1)  # type: ignore[arg-type]
        for layer in others:
            maps = layer(maps)
        return maps


@configclass
class RecurrentCfg(Config):
    """A recurrent layer between the observation and the actor and critic networks."""

    type: Literal["gru", "lstm"] = "gru"
    """Kind of layer."""
    hidden_size: Size = 128
    """Width of what actor and critic see; the recurrent state is as wide, that of an LSTM twice as wide."""
    num_layers: Layers = 1
    """Stacked layers."""


class RecurrentLayer(nn.Module):
    """A GRU or LSTM with its state as ``[batch, num_layers, state_size]``, so that envs are rows as everywhere else.

    ``state_size`` is ``hidden_size``; an LSTM has its output and its cell side by side, twice that.
    """

    def __init__(self, input_dim: int, cfg: RecurrentCfg) -> None:
        super().__init__()
        self.cfg = cfg
        if cfg.type == "lstm":
            self.lstm = nn.LSTM(input_dim, cfg.hidden_size, cfg.num_layers)
        else:
            self.gru = nn.GRU(input_dim, cfg.hidden_size, cfg.num_layers)

    def initial_state(self, batch_size: int) -> Tensor:
        """Return the state at an episode's start: zeros."""
        state_size = self.cfg.hidden_size * (2 if self.cfg.type == "lstm" else 1)
        return next(self.parameters()).new_zeros(batch_size, self.cfg.num_layers, state_size)

    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Take in one observation ``[batch, input_dim]``; return ``(output [batch, hidden_size], new state)``."""
        output, new = self._run(x.unsqueeze(0), state.transpose(0, 1))
        return output.squeeze(0), new.transpose(0, 1)

    def sequence(self, x: Tensor, state: Tensor, start: Tensor) -> Tensor:
        """Run over ``[num_steps, batch, input_dim]`` from a state; return ``[num_steps, batch, hidden_size]``.

        ``start`` ``[num_steps, batch]`` marks observations that begin an episode: the row's state is reset before them.
        """
        # Between two resets of any row the layer runs in one call; a GPU, which would have to wait for the resets to be
        # found, runs step by step.
        starts = range(1, x.shape[0]) if x.is_cuda else (start[1:].any(dim=1).nonzero().flatten() + 1).tolist()
        hidden, outputs = state.transpose(0, 1), []
        for begin, end in pairwise([0, *starts, x.shape[0]]):
            hidden = torch.where(start[begin].unsqueeze(-1), 0.0, hidden)
            output, hidden = self._run(x[begin:end], hidden)
            outputs.append(output)
        return torch.cat(outputs)

    def _run(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs ``[num_steps, batch, hidden_size]`` and the new state ``[num_layers, batch, state_size]``."""
        if self.cfg.type == "gru":
            output, new = self.gru(x, state.contiguous())
            return output, new
        hidden, cell = state.chunk(2, dim=-1)
        output, both = self.lstm(x, (hidden.contiguous(), cell.contiguous()))
        return output, torch.cat(both, dim=-1)
