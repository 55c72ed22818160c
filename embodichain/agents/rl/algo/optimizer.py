"""One gradient step: backward, clip, Adam."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

Precision = Literal["off", "tf32", "bf16", "fp16"]
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
MIN_LEARNING_RATE, MAX_LEARNING_RATE, LEARNING_RATE_STEP = 1e-5, 1e-2, 1.5
"""Bounds of the adaptive step size, and the factor of one change."""


class PolicyOptimizer:
    """Adam with a bound on the gradient's norm, and mixed precision where it is wanted.

    On a GPU the step size is a tensor there, so that a schedule changes it without waiting for the device, and a step
    can be part of a CUDA graph.
    """

    def __init__(
        self, policy: nn.Module, learning_rate: float, max_grad_norm: float, precision: Precision = "off"
    ) -> None:
        self.parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        self.max_grad_norm = max_grad_norm
        self.precision: Precision = precision
        self.device_type = self.parameters[0].device.type
        device, on_gpu = self.parameters[0].device, self.device_type == "cuda"
        self._rate: Tensor | None = torch.tensor(learning_rate, device=device) if on_gpu else None
        rate = learning_rate if self._rate is None else self._rate
        self.adam = torch.optim.Adam(self.parameters, lr=rate, eps=1e-5, fused=True, capturable=on_gpu)
        self.scaler = torch.amp.GradScaler(self.device_type, enabled=precision == "fp16")

    @property
    def learning_rate(self) -> float:
        """Adam's present step size."""
        return float(self.adam.param_groups[0]["lr"])

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        if self._rate is None:
            self.adam.param_groups[0]["lr"] = value
        else:
            self._rate.fill_(value)

    def adapt_learning_rate(self, kl: Tensor, desired_kl: float) -> None:
        """Lower the step size after an epoch that moved the policy too far, raise it after one that hardly did."""
        if self._rate is not None:
            self._rate.copy_(adapted_rate(self._rate, kl, desired_kl))
        elif float(kl) > 2.0 * desired_kl:
            self.learning_rate = max(MIN_LEARNING_RATE, self.learning_rate / LEARNING_RATE_STEP)
        elif float(kl) < 0.5 * desired_kl:
            self.learning_rate = min(MAX_LEARNING_RATE, self.learning_rate * LEARNING_RATE_STEP)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which networks run in the chosen precision."""
        dtype = _AUTOCAST.get(self.precision, torch.float32)
        return torch.autocast(self.device_type, dtype, enabled=self.precision in _AUTOCAST)

    @contextmanager
    def matmul_precision(self) -> Iterator[None]:
        """Let float32 products, backwards too, use the GPU's TF32 units inside the block, if that was chosen."""
        if self.precision != "tf32" or self._rate is None:
            yield
            return
        cudnn: Any = torch.backends.cudnn
        backends: tuple[Any, ...] = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)
        before = [backend.fp32_precision for backend in backends]
        try:
            for backend in backends:
                backend.fp32_precision = "tf32"
            yield
        finally:
            for backend, precision in zip(backends, before, strict=True):
                backend.fp32_precision = precision

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a loss to what has been gathered since the last step."""
        self.scaler.scale(loss).backward()

    def step(self) -> Tensor:
        """Follow the gathered gradient; return its norm before clipping, ``[]``."""
        self.scaler.unscale_(self.adam)
        norm = nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm, foreach=True)
        self.scaler.step(self.adam)
        self.scaler.update()
        self.adam.zero_grad(set_to_none=True)
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Return Adam's moments and step size, and the loss scale; the same data whatever the device."""
        adam = self.adam.state_dict()
        adam["param_groups"] = [{**group, "lr": float(group["lr"])} for group in adam["param_groups"]]
        return {"adam": adam, "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` returned."""
        own = {name: self.adam.param_groups[0][name] for name in ("fused", "capturable")}
        self.adam.load_state_dict(state["adam"])
        self.scaler.load_state_dict(state["scaler"])
        for group in self.adam.param_groups:
            group.update(own)  # these belong to the device, not to the training
        for values in self.adam.state.values():
            values["step"] = values["step"].to(self.parameters[0].device, torch.float32)
        if self._rate is not None:
            self._rate.fill_(self.learning_rate)
            self.adam.param_groups[0]["lr"] = self._rate


def adapted_rate(rate: Tensor, kl: Tensor, desired_kl: float) -> Tensor:
    """Return the step size ``[]`` after an epoch that moved the policy by ``kl`` ``[]``, without waiting for either."""
    lower = (rate / LEARNING_RATE_STEP).clamp(min=MIN_LEARNING_RATE)
    higher = (rate * LEARNING_RATE_STEP).clamp(max=MAX_LEARNING_RATE)
    return torch.where(kl > 2.0 * desired_kl, lower, torch.where(kl < 0.5 * desired_kl, higher, rate))
