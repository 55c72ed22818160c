"""Where in a Ray cluster a worker may run."""

from __future__ import annotations

from typing import Annotated, Literal

from embodichain.config import Config, Field, configclass

Share = Annotated[float, Field(ge=0)]


@configclass
class PlacementCfg(Config):
    """What one worker needs of a node of a Ray cluster. It waits for a node that has it; others do not wait for it."""

    num_cpus: Share = 1.0
    """Cores that are set aside for a worker; its simulator uses as many threads."""
    num_gpus: Share = 0.0
    """GPUs, or the part of one, that are set aside for a worker."""
    resources: dict[str, Share] = {}
    """Named resources of your own, such as ``{"simulation": 1}`` for nodes started with ``--resources``."""
    strategy: Literal["spread", "pack"] = "spread"
    """Whether workers are spread over the nodes, or packed onto as few as will do."""
