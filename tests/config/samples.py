"""Config classes with every kind of field, shared by the tests of this folder."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Any, Literal

from embodichain.config import MISSING, Config, Field, configclass


class Backend(enum.Enum):
    CPU = "cpu"
    GPU = "gpu"


@configclass
class NetCfg(Config):
    width: Annotated[int, Field(ge=1, le=4096)] = 64
    """Units of each layer."""
    layers: list[int] = [64, 64]
    """Sizes of the layers."""
    activation: Literal["tanh", "relu"] = "tanh"
    """Nonlinearity."""


@configclass
class AlgorithmCfg(Config):
    lr: Annotated[float, Field(gt=0)] = 3e-4
    """Step size."""


@configclass
class PpoCfg(AlgorithmCfg):
    clip: float = 0.2
    """Largest change of the probability ratio."""
    net: NetCfg = NetCfg()
    """The policy's network."""


@configclass
class RunCfg(Config):
    name: str = "run"
    """What the run is called."""
    num_envs: Annotated[int, Field(ge=1)] = 4
    """Number of environments."""
    resume: bool = False
    """Whether to go on with an earlier run."""
    bounds: tuple[float, float] = (-1.0, 1.0)
    """Lower and upper bound."""
    algorithm: PpoCfg = PpoCfg()
    """The algorithm."""
    critic: NetCfg | None = None
    """A network of its own for the value."""
    heads: dict[str, NetCfg] = {"left": NetCfg()}
    """Networks by name."""
    stages: list[NetCfg] = [NetCfg(width=8)]
    """Networks in a row."""
    weights: dict[str, float] = {"reach": 1.0}
    """Weights of the reward terms."""
    steps: int | list[int] = 10
    """One number, or one per stage."""
    backend: Backend = Backend.CPU
    """Where to simulate."""
    folder: Path | None = None
    """Where to write."""
    extra: dict[str, Any] = {"seed": 3, "env": {"noise": True}}
    """Anything else."""


@configclass
class EngineCfg(Config):
    buffer_size: int = MISSING
    """Rows of the buffer."""
    gym_config: dict[str, Any] = MISSING
    """The environment."""
    run: RunCfg = RunCfg()
    """The run."""


@configclass(frozen=True)
class PointCfg(Config):
    x: int
    y: int = 0
