"""Training parts of a model while the rest stays as it is."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from torch import nn

from embodichain.errors import ConfigError


def freeze_but(module: nn.Module, parts: Collection[str]) -> None:
    """Freeze all parameters but those of the submodules (or parameters) with these names; frozen ones stay frozen."""
    names = [name for name, _ in module.named_parameters()]
    for part in parts:
        if not any(_belongs(name, part) for name in names):
            depth = part.count(".") + 1
            known = sorted({".".join(name.split(".")[:depth]) for name in names})
            raise ConfigError(
                f"trainable: no parameter is or lies in {part!r}; there are: {', '.join(known)}", "policy"
            )
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and any(_belongs(name, part) for part in parts))


@contextmanager
def only_trained(module: nn.Module, *parts: str) -> Iterator[None]:
    """Freeze everything but these parts inside the block."""
    before = [parameter.requires_grad for parameter in module.parameters()]
    try:
        freeze_but(module, parts)
        yield
    finally:
        for parameter, was in zip(module.parameters(), before, strict=True):
            parameter.requires_grad_(was)


def _belongs(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}.")
