"""Recurrent policies: a GRU between observation and networks, with its state reset at every episode's start."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from embodichain.agents.rl.utils.config import Count
from embodichain.config.classes import Config, configclass


@configclass
class RecurrentCfg(Config):
    """A recurrent layer between the observation and the actor and critic networks."""

    type: Literal["gru"] = "gru"
    """Kind of layer."""
    hidden_size: Count = 128
    """Width of the recurrent state, and of what actor and critic see."""
    num_layers: Count = 1
    """Stacked layers."""


class RecurrentLayer(nn.Module):
    """A GRU with its state as ``[batch, num_layers, hidden_size]``, so that envs are rows as everywhere else."""

    def __init__(self, input_dim: int, cfg: RecurrentCfg) -> None:
        super().__init__()
        self.hidden_size, self.num_layers = cfg.hidden_size, cfg.num_layers
        self.gru = nn.GRU(input_dim, cfg.hidden_size, cfg.num_layers)

    def initial_state(self, batch_size: int) -> Tensor:
        """Return the state at an episode's start: zeros."""
        device = next(self.gru.parameters()).device
        return torch.zeros(batch_size, self.num_layers, self.hidden_size, device=device)

    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Take in one observation ``[batch, input_dim]``; return ``(output [batch, hidden_size], new state)``."""
        output, new = self.gru(x.unsqueeze(0), state.transpose(0, 1).contiguous())
        return output.squeeze(0), new.transpose(0, 1)

    def sequence(self, x: Tensor, state: Tensor, start: Tensor) -> Tensor:
        """Run over ``[num_steps, batch, input_dim]`` from a state; return ``[num_steps, batch, hidden_size]``.

        ``start`` ``[num_steps, batch]`` marks observations that begin an episode: the row's state is reset before them.
        """
        # Between two steps at which any row resets, the GRU runs in one call. Finding these steps would synchronise
        # with a GPU, which runs step by step instead.
        starts = range(1, x.shape[0]) if x.is_cuda else (start[1:].any(dim=1).nonzero().flatten() + 1).tolist()
        hidden = state.transpose(0, 1)
        outputs = []
        for begin, end in pairwise([0, *starts, x.shape[0]]):
            hidden = torch.where(start[begin].unsqueeze(-1), 0.0, hidden)
            output, hidden = self.gru(x[begin:end], hidden.contiguous())
            outputs.append(output)
        return torch.cat(outputs)
