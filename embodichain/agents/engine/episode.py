"""An episode on its way into the buffer, and what the buffer remembers about one."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from embodichain.agents.engine.layout import Key
from embodichain.errors import SimulationError


@dataclass
class Episode:
    """One finished episode; its frames belong to whoever made it and are valid until that one goes on."""

    frames: dict[Key, tuple[Tensor, ...]]
    """For each key the frames in order, as consecutive pieces ``[n, ...]``."""
    length: int
    seed: int = -1
    """Episode seed with which the environment can start it again; -1 where there is none."""
    success: bool | None = None
    """Whether the task was solved; None if the environment does not say."""
    policy_version: int = -1

    def check_finite(self) -> None:
        """Raise if any number of the episode is NaN or infinite."""
        for key, pieces in self.frames.items():
            if not pieces[0].is_floating_point():
                continue
            offset = 0
            for piece in pieces:
                # A sum is not finite if any term is not; looking at every number is only needed then.
                if not math.isfinite(piece.sum(dtype=torch.float64)):
                    self._find_not_finite(key, piece, offset)
                offset += len(piece)

    def _find_not_finite(self, key: Key, piece: Tensor, offset: int) -> None:
        bad = torch.nonzero(~torch.isfinite(piece).reshape(len(piece), -1).all(dim=1)).reshape(-1)
        if bad.numel():
            step = int(bad[0])
            raise SimulationError(
                f"{'/'.join(key)} is not finite at step {offset + step} of the episode with seed {self.seed}: "
                f"{piece[step].reshape(-1)[:8].tolist()}"
            )


@dataclass(frozen=True)
class EpisodeInfo:
    """Where the episode in a row of the buffer came from."""

    row: int
    length: int
    """Number of frames; 0 while nothing was written to the row yet."""
    sequence: int
    """Grows by two with every write to the row: two equal numbers mean the same episode."""
    worker: int
    seed: int
    """Episode seed: ``env.reset(seed=torch.tensor([seed]))`` starts the same episode; -1 if unknown."""
    policy_version: int
    """How many updates had shaped the policy that acted; -1 for experts and random actions."""
    success: bool | None
    time: float
    """Unix time at which the episode was written."""
