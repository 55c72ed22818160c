"""The settings every algorithm has."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from embodichain.config.classes import Config, configclass

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
NotNegative = Annotated[float, Field(ge=0.0)]
Count = Annotated[int, Field(ge=1)]


@configclass
class AlgorithmCfg(Config):
    """Minimal algorithm configuration shared across RL algorithms."""

    device: str = "cpu"
    """Where the rollout is stored and the policy is trained."""
    learning_rate: Positive = 3e-4
    """Step size of Adam (the first one, where a schedule changes it)."""
    batch_size: Count = 64
    """Transitions per gradient step; the last minibatches share what is left evenly."""
    gamma: Fraction = 0.99
    """Discount per environment step."""
    gae_lambda: Fraction = 0.95
    """Weight of longer returns in generalised advantage estimation."""
    max_grad_norm: Positive = 0.5
    """The gradient is scaled down to this norm when it is longer."""
