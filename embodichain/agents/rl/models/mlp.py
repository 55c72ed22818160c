"""Networks of policies and their configs: MLPs, image encoders and recurrent layers."""

import math
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from embodichain.agents.processes.shared_memory import available_bytes
from embodichain.config.classes import Config, Fraction, Layers, Size, configclass
from embodichain.errors import ConfigError, UnknownNameError, look_up
from embodichain.utils.cuda_graphs import kernels_work

FEW = 8192
"""Number of elements up to which a backward pass in Python costs more than the faster forward pass saves."""
_MINUS_ONE = torch.tensor(-1.0)
_CHANNELS = 8  # convolutions in reduced precision are fast for multiples of it
_WORK, _NARROWEST = 1 << 22, 16  # a convolution is faster for more multiplications, and layers at least as wide
_IMAGES = range(16, 65)  # torch gives convolutions of fewer images to MKL, too


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
    """tanh; in float32 on a CPU it is mostly computed from the sigmoid, accurate to 2e-7.

    On many CPUs, ``torch.tanh`` takes half the time of an update of a small network.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_cpu or x.dtype != torch.float32 or torch.compiler.is_compiling():
            return torch.tanh(x)
        if not (torch.is_grad_enabled() and x.requires_grad):
            return _tanh(x)
        return torch.tanh(x) if x.numel() <= FEW else _SigmoidTanh.apply(x)


class Linear(nn.Linear):
    """``nn.Linear``; large float32 products on AMD processors with AVX-512 are computed by oneDNN, as a convolution.

    torch leaves matrix products to MKL, which uses half of the vector width of these processors, and convolutions to
    oneDNN, which uses all of it: a 1x1 convolution of images whose pixels are the rows is the same product.
    """

    def forward(self, input: Tensor) -> Tensor:
        return _linear(input, self.weight, self.bias)


@torch.fx.wrap
@torch.jit.ignore
def _linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    jit: Any = torch.jit
    is_traced = torch.compiler.is_compiling() or jit.is_tracing()  # for other numbers of rows, too
    if not input.is_cpu or is_traced or not (_convolves_faster() and torch.backends.mkldnn.enabled):
        return functional.linear(input, weight, bias)
    outputs, inputs = weight.shape
    rows = input.shape[:-1].numel()
    is_large = rows * weight.numel() > _WORK and min(inputs, outputs) >= _NARROWEST
    is_plain = input.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    fits = is_large and is_plain and input.shape[-1] == inputs
    count = next((count for count in _IMAGES if rows % count == 0), None) if fits else None
    if count is None:
        return functional.linear(input, weight, bias)
    images = input.reshape(count, -1, 1, inputs).permute(0, 3, 1, 2)
    product = functional.conv2d(images, weight[:, :, None, None], bias)
    return product.permute(0, 2, 3, 1).reshape(*input.shape[:-1], outputs)


@cache
def _convolves_faster() -> bool:
    """Return whether this is an AMD processor on which torch has both libraries, and oneDNN uses AVX-512."""
    backends: Any = torch.backends
    if not (backends.mkl.is_available() and backends.mkldnn.is_available()):
        return False
    return backends.cpu.get_cpu_capability().startswith("AVX512") and "AuthenticAMD" in _processor()


def _processor() -> str:
    """Return a description of the processor with its vendor."""
    try:
        return Path("/proc/cpuinfo").read_text(errors="replace").partition("\n\n")[0]
    except OSError:
        return platform.processor()


ACTIVATIONS: dict[str, type[nn.Module]]
ACTIVATIONS = {"relu": nn.ReLU, "elu": nn.ELU, "tanh": Tanh, "gelu": nn.GELU, "silu": nn.SiLU}


def make_activation(name: str) -> nn.Module:
    """Return a new activation module by name."""
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
            layers.append(Linear(width, hidden))
            if use_layernorm:
                layers.append(nn.LayerNorm(hidden))
            layers.append(make_activation(activation))
            if dropout_p > 0.0:
                layers.append(nn.Dropout(dropout_p))
        layers.append(Linear([input_dim, *hidden_dims][-1], math.prod(shape)))
        if last_activation is not None:
            layers.append(make_activation(last_activation))
        if len(shape) != 1:
            layers.append(nn.Unflatten(-1, shape))
        super().__init__(*layers)
        self.input_dim, self.output_dim = input_dim, math.prod(shape)

    def init_orthogonal(self, scales: float | Sequence[float] = math.sqrt(2.0)) -> None:
        """Initialise weights orthogonally, with one gain for all layers or one per layer, and biases with zero."""
        linears = [layer for layer in self if isinstance(layer, nn.Linear)]
        gains = [float(scales)] * len(linears) if isinstance(scales, (int, float)) else list(scales)
        if len(gains) != len(linears):
            raise ConfigError(f"expected one scale or {len(linears)} of them, got {len(gains)}", "init_orthogonal")
        for layer, gain in zip(linears, gains, strict=True):
            nn.init.orthogonal_(layer.weight, gain)
            nn.init.zeros_(layer.bias)


@configclass
class NetworkCfg(Config):
    """The settings under ``"network_cfg"`` in a policy block."""

    hidden_sizes: Annotated[tuple[Size, ...], Field(max_length=256)] = (256, 256)
    """Width of each hidden layer."""
    activation: str = "relu"
    """Activation of hidden layers: relu, elu, tanh, gelu or silu."""
    last_activation: str | None = None
    """Activation of the output; none by default."""
    use_layernorm: bool = False
    """Whether a LayerNorm follows each hidden linear layer."""
    dropout_p: Fraction = 0.0
    """Dropout probability of hidden layers. Reinforcement learning disables dropout, as probability ratios need the
    same network twice; your own training code may use it."""


@configclass
class NetworkSettings(Config):
    """Base class of policy settings whose ``actor`` and ``critic``, if any, are network blocks."""


@configclass
class NetworkBlock(Config):
    """The block of a network, ``{"type": "mlp", "network_cfg": {...}}``; settings may also be given beside ``type``."""

    type: Literal["mlp"] = "mlp"
    """Kind of network."""
    network_cfg: NetworkCfg = NetworkCfg()
    """Layers of the network."""


def build_mlp_from_cfg(module_cfg: Mapping[str, Any], in_dim: int, out_dim: int | Sequence[int]) -> MLP:
    """Build an MLP from ``{"type": "mlp", "hidden_sizes": [256, 256], "activation": "relu"}``.

    The settings may also be nested: ``{"type": "mlp", "network_cfg": {...}}``.
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
    """Return the checked settings of a network block; error messages start with ``source``."""
    look_up("network type", str(module_cfg.get("type", "mlp")), {"mlp": MLP})
    direct = {key: value for key, value in module_cfg.items() if key not in ("type", "network_cfg")}
    nested = module_cfg.get("network_cfg", {})
    if not isinstance(nested, Mapping):
        problem = f"network_cfg: expected a mapping of NetworkCfg fields, got {nested!r:.60} ({type(nested).__name__})"
        raise ConfigError(problem, source)
    if twice := sorted(direct.keys() & nested.keys()):
        raise ConfigError(f"{', '.join(twice)}: given both beside and inside network_cfg", source)
    return NetworkCfg.from_dict({**direct, **nested}, source=source)


def check_network(block: dict[str, Any]) -> dict[str, Any]:
    """Return a network block unchanged; raise ``ConfigError`` for all of its problems."""
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
    """Return the number of bytes that are free for networks; unlimited if unknown."""
    return available_bytes() if sys.platform == "linux" else sys.maxsize


@configclass
class ImageEncoderCfg(Config):
    """Settings of image encoders; each camera has its own, shared by actor and critic."""

    channels: Annotated[tuple[Size, ...], Field(max_length=16)] = (16, 32, 32)
    """Output channels of each convolution; each halves height and width."""
    feature_dim: Size = 128
    """Features per image."""
    activation: str = "relu"
    """Activation after each layer: relu, elu, tanh, gelu or silu."""
    layout: Literal["auto", "channels_first", "channels_last"] = "auto"
    """Position of the channel axis; ``auto`` infers it from the shape: the axis beside two equal ones, else one of
    size 1, 3 or 4, else the smaller one."""


@dataclass(frozen=True)
class ImageLayout:
    """The axes of an image: ``[H, W]``, ``[H, W, C]``, ``[C, H, W]``, or a stack ``[T, ...]`` of the latter two."""

    shape: tuple[int, int, int, int]
    """Number of frames, and the three sizes of a frame in their given order."""
    channels_last: bool

    @classmethod
    def of(cls, shape: tuple[int, ...], name: str, layout: str = "auto") -> Self:
        """Return the layout for a shape; raise ``ConfigError`` about the image ``name`` if it is ambiguous."""
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
            if middle in (first, last):  # [8, 8, 111] is a square image with many channels
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

    With ``num_ids``, segmentations ``[..., H, W, 1]`` of ids below it, which are one-hot encoded as channels.
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
        """Scale the weights of the first layer instead of the images, which saves a pass over them.

        Fast kernels need a multiple of 8 channels. Blocks of 2x2 pixels have them with the fewest zeros, usually; they
        suit a layer of stride 2. Otherwise, in reduced precision, channels are padded with zeros.
        """
        is_reduced = torch.is_autocast_enabled("cuda")
        dtype = torch.get_autocast_dtype("cuda") if is_reduced else torch.float32
        first: Any
        first, *others = self.convolutions
        weight = first.weight / self.largest
        rows, channels, height, width = image.shape
        padded, block = _rounded_up(channels), _rounded_up(4 * channels + 1)
        if height % 2 == width % 2 == 0 and block < 4 * padded:
            maps = functional.conv2d(in_blocks(image, block, dtype), _block_weight(weight, first.bias, block))
        else:
            if is_reduced and padded > channels:
                weight = functional.pad(weight, (0, 0, 0, 0, 0, padded - channels))
                wider = image.new_empty((rows, height, width, padded), dtype=dtype).permute(0, 3, 1, 2)
                wider[:, :channels], wider[:, channels:] = image, 0.0
                image = wider
            maps = functional.conv2d(image.to(dtype), weight, first.bias, stride=2, padding=1)
        for layer in others:
            maps = layer(maps)
        return maps


def _rounded_up(channels: int) -> int:
    return -(-channels // _CHANNELS) * _CHANNELS


def in_blocks(image: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    """Return images ``[rows, C, 2 h, 2 w]`` as blocks of 2x2 pixels, ``[rows, channels, h + 1, w + 1]``.

    The first row and the first column of blocks are outside the image. The channels are the 4 C numbers of a block, a
    one for the bias, and zeros.
    """
    if not image.requires_grad and kernels_work(image.device):
        from embodichain.agents.rl.models.image_kernel import arrange_in_blocks

        return arrange_in_blocks(image, channels, dtype)
    rows, depth, height, width = image.shape
    blocks = image.new_zeros((rows, height // 2 + 1, width // 2 + 1, channels), dtype=dtype)
    blocks[..., 4 * depth] = 1.0
    pixels = image.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).permute(0, 2, 4, 3, 5, 1)
    blocks[:, 1:, 1:, : 4 * depth].unflatten(-1, (2, 2, depth)).copy_(pixels)
    return blocks.permute(0, 3, 1, 2)


def _block_weight(weight: Tensor, bias: Tensor, channels: int) -> Tensor:
    """Return the weights ``[out, channels, 2, 2]`` for blocks, of a 3x3 convolution of stride 2 with padding."""
    out, depth = weight.shape[:2]
    taps = functional.pad(weight, (1, 0, 1, 0)).view(out, depth, 2, 2, 2, 2).permute(0, 3, 5, 1, 2, 4)
    others = functional.pad(bias.view(-1, 1, 1, 1), (1, 0, 1, 0, 0, channels - 4 * depth - 1))
    return torch.cat((taps.reshape(out, 4 * depth, 2, 2), others), dim=1)


@configclass
class RecurrentCfg(Config):
    """A recurrent layer between the observation and the actor and critic networks."""

    type: Literal["gru", "lstm"] = "gru"
    """Kind of layer."""
    hidden_size: Size = 128
    """Width of the output; the recurrent state has the same width, for an LSTM twice that."""
    num_layers: Layers = 1
    """Number of stacked layers."""


class RecurrentLayer(nn.Module):
    """A GRU or LSTM with a batch-first state ``[batch, num_layers, state_size]``.

    ``state_size`` is ``hidden_size`` for a GRU. For an LSTM it is twice that: hidden and cell state, concatenated.
    """

    def __init__(self, input_dim: int, cfg: RecurrentCfg) -> None:
        super().__init__()
        self.cfg = cfg
        if cfg.type == "lstm":
            self.lstm = nn.LSTM(input_dim, cfg.hidden_size, cfg.num_layers)
        else:
            self.gru = nn.GRU(input_dim, cfg.hidden_size, cfg.num_layers)

    def initial_state(self, batch_size: int) -> Tensor:
        """Return the state at the start of an episode: zeros."""
        state_size = self.cfg.hidden_size * (2 if self.cfg.type == "lstm" else 1)
        return next(self.parameters()).new_zeros(batch_size, self.cfg.num_layers, state_size)

    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Process one step ``[batch, input_dim]``; return ``(output [batch, hidden_size], new state)``."""
        output, new = self._run(x.unsqueeze(0), state.transpose(0, 1))
        return output.squeeze(0), new.transpose(0, 1)

    def sequence(self, x: Tensor, state: Tensor, start: Tensor) -> Tensor:
        """Run over ``[num_steps, batch, input_dim]`` from a state; return ``[num_steps, batch, hidden_size]``.

        ``start`` ``[num_steps, batch]`` marks the first observations of episodes: the state is reset before them.
        """
        # Between two resets of any row, the layer runs in one call. On a GPU it runs step by step, as finding the
        # resets would synchronise.
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
