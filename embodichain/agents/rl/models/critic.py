"""A critic that learns in units of the returns' own spread."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from embodichain.agents.rl.models.mlp import MLP
from embodichain.agents.rl.models.normalizer import RunningNormalizer
from embodichain.errors import ConfigError


class NormalizedCritic(nn.Module):
    """A network whose output is shifted and scaled by the running mean and standard deviation of returns.

    ``value = mean + std * network(features)``. Whatever the rewards' scale is, the network learns numbers of size one.
    When the statistics change, its last layer is changed along, so that no value does.
    """

    def __init__(self, network: MLP) -> None:
        super().__init__()
        last = network[-1]
        if not isinstance(last, nn.Linear) or last.out_features != 1:
            raise ConfigError("normalize_value needs a critic that ends in one linear output", "policy")
        self.network = network
        self.returns = RunningNormalizer(1)

    def forward(self, features: Tensor) -> Tensor:
        """Return values ``[..., 1]`` in the units of rewards."""
        return torch.addcdiv(self.returns.shift, self.network(features).float(), self.returns.scale)

    @property
    def scale(self) -> Tensor:
        """The returns' standard deviation ``[]``; 1 before any were seen."""
        return self.returns.scale.reciprocal().squeeze()

    @torch.no_grad()
    def update(self, returns: Tensor) -> None:
        """Take in the returns of a rollout; values stay as they are, except before the first ones were seen."""
        is_first = self.returns.count == 0
        shift, scale = self.returns.shift.clone(), self.returns.scale.clone()
        self.returns.update(returns.reshape(-1, 1))
        last = self.network[-1]
        if is_first or not isinstance(last, nn.Linear):
            return
        # mean' + std' (w' x + b') = mean + std (w x + b), with std = 1 / scale
        ratio = self.returns.scale / scale
        last.weight.mul_(ratio)
        last.bias.mul_(ratio).add_((shift - self.returns.shift) * self.returns.scale)
