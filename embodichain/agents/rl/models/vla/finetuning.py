"""LoRA: train small additions to a frozen model's linear layers, through peft."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Annotated

from torch import nn

from embodichain.agents.rl.utils.config import Count, Fraction, Positive
from embodichain.config import Config, Field, configclass
from embodichain.errors import ConfigError
from embodichain.extras import require

# MERGED freezing: Training parts of a model while the rest stays as it is.


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


@configclass
class LoRACfg(Config):
    """Which layers get low-rank additions, and how large these are."""

    rank: Count = 16
    """Rank of the additions."""
    alpha: Positive = 32.0
    """The additions are scaled by ``alpha / rank``."""
    dropout: Fraction = 0.0
    """Dropout before the additions; anything above 0 makes the policy that is trained differ from the one that acts."""
    target_modules: Annotated[tuple[str, ...], Field(min_length=1)] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Ends of the names of the layers that get additions."""
    trainable: tuple[str, ...] = ("head", "to_action", "to_value", "to_points", "body", "queries")
    """Beginnings of the names of parameters that stay trainable as they are: what is new, not pretrained."""


def apply_lora(model: nn.Module, cfg: LoRACfg) -> nn.Module:
    """Freeze the model, add low-rank parts to the chosen layers, in place, and return it.

    At first the additions are zero, so the model does what it did.
    """
    peft = require("peft", extra="vla")
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    unmatched = [end for end in cfg.target_modules if not any(_ends_with(name, end) for name in names)]
    if unmatched:
        known = sorted({name.rpartition(".")[2] for name in names})
        raise ConfigError(
            f"target_modules: no linear layer ends in {unmatched[0]!r}; there are: {', '.join(known)}", "lora"
        )
    settings = peft.LoraConfig(
        r=cfg.rank, lora_alpha=cfg.alpha, lora_dropout=cfg.dropout, target_modules=list(cfg.target_modules)
    )
    peft.inject_adapter_in_model(settings, model)  # freezes everything but the additions
    for name, parameter in model.named_parameters():
        if any(name == start or name.startswith(f"{start}.") for start in cfg.trainable):
            parameter.requires_grad_(True)
    return model


def merge_lora(model: nn.Module) -> nn.Module:
    """Add the low-rank parts to the layers they belong to, in place: an ordinary model, with ordinary names."""
    layers = require("peft.tuners.lora", extra="vla")
    for name, module in list(model.named_modules()):
        if not isinstance(module, layers.LoraLayer):
            continue
        module.merge()
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, module.get_base_layer())
    return model.requires_grad_(True)


def _ends_with(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")
