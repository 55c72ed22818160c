"""A small convolutional encoder for camera pictures."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from embodichain.agents.rl.models.activations import make_activation
from embodichain.agents.rl.utils.config import Count
from embodichain.config import Config, configclass
from embodichain.errors import ConfigError


@configclass
class ImageEncoderCfg(Config):
    """How pictures become features; each camera has its own encoder, shared by actor and critic."""

    channels: tuple[Count, ...] = (16, 32, 32)
    """Channels of each convolution; every one halves height and width."""
    feature_dim: Count = 128
    """Features per picture."""
    activation: str = "relu"
    """After each layer: relu, elu, tanh, gelu or silu."""


class ImageEncoder(nn.Module):
    """Maps pictures ``[..., H, W, C]`` (or ``[..., H, W]``) to features ``[..., feature_dim]``.

    uint8 pictures are scaled to [0, 1] here, so they are stored and shuffled as bytes.
    """

    def __init__(self, shape: tuple[int, ...], cfg: ImageEncoderCfg) -> None:
        super().__init__()
        if len(shape) not in (2, 3):
            raise ConfigError(f"expected pictures [H, W] or [H, W, C], got shape {list(shape)}", "image encoder")
        self.shape = shape
        height, width, channels = (*shape, 1)[:3]
        layers: list[nn.Module] = []
        for out in cfg.channels:
            layers += [nn.Conv2d(channels, out, kernel_size=3, stride=2, padding=1), make_activation(cfg.activation)]
            height, width, channels = (height + 1) // 2, (width + 1) // 2, out
        self.convolutions = nn.Sequential(*layers)
        self.project = nn.Linear(channels * height * width, cfg.feature_dim)
        self.activation = make_activation(cfg.activation)

    def forward(self, image: Tensor) -> Tensor:
        """Return features ``[..., feature_dim]``."""
        batch = image.shape[: image.ndim - len(self.shape)]
        scaled = image.float() / 255.0 if image.dtype == torch.uint8 else image.float()
        channels_first = scaled.reshape(-1, *(*self.shape, 1)[:3]).permute(0, 3, 1, 2)
        features = self.project(self.convolutions(channels_first).flatten(1))
        return self.activation(features).unflatten(0, batch)
