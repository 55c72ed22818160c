"""One gradient step: backward, average over ranks, clip, Adam."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

Precision = Literal["off", "bf16", "fp16"]
_DTYPES = {"off": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Ranks(Protocol):
    """The other processes of a data-parallel training."""

    def average_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace every gradient by the mean of all ranks."""

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a tensor over all ranks."""


class PolicyOptimizer:
    """Adam with a bound on the gradient's norm, and mixed precision where it is wanted."""

    def __init__(
        self, policy: nn.Module, learning_rate: float, max_grad_norm: float, precision: Precision = "off"
    ) -> None:
        self.parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        self.max_grad_norm = max_grad_norm
        self.precision: Precision = precision
        self.device_type = self.parameters[0].device.type
        self.adam = torch.optim.Adam(self.parameters, lr=learning_rate, eps=1e-5, fused=True)
        self.scaler = torch.amp.GradScaler(self.device_type, enabled=precision == "fp16")
        self.ranks: Ranks | None = None
        """Set under data parallelism: gradients are averaged between backward and clipping."""

    @property
    def learning_rate(self) -> float:
        """Adam's present step size."""
        return float(self.adam.param_groups[0]["lr"])

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self.adam.param_groups[0]["lr"] = value

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which networks run in the chosen precision."""
        return torch.autocast(self.device_type, _DTYPES[self.precision], enabled=self.precision != "off")

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a loss to what has been gathered since the last step."""
        self.scaler.scale(loss).backward()

    def step(self) -> Tensor:
        """Follow the gathered gradient; return its norm before clipping, ``[]``."""
        if self.ranks is not None:
            self.ranks.average_gradients(self.parameters)
        self.scaler.unscale_(self.adam)
        norm = nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm, foreach=True)
        self.scaler.step(self.adam)
        self.scaler.update()
        self.adam.zero_grad(set_to_none=True)
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Return Adam's moments and step size, and the loss scale."""
        return {"adam": self.adam.state_dict(), "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` returned."""
        self.adam.load_state_dict(state["adam"])
        self.scaler.load_state_dict(state["scaler"])
