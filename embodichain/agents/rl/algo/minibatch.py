"""What PPO and GRPO share: gradient steps on minibatches, and means of what is measured on the way."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from torch import Tensor

from embodichain.agents.rl.algo.base import BaseAlgorithm
from embodichain.agents.rl.algo.graphed import GraphedSteps
from embodichain.agents.rl.algo.optimizer import PolicyOptimizer, Precision
from embodichain.agents.rl.buffer.minibatches import Minibatches
from embodichain.agents.rl.models.normalizer import RunningNormalizer
from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.utils.config import AlgorithmCfg
from embodichain.agents.rl.utils.ranks import Ranks

_LOG = logging.getLogger(__name__)
CPU_ROWS = 2048
"""Transitions per backward pass and CPU thread: what a network of usual width makes of them stays in the cache."""


class MinibatchAlgorithm(BaseAlgorithm):
    """An algorithm that follows the gradient of a loss on minibatches."""

    validity_key: ClassVar[str | None] = None
    """Part of a minibatch that weighs its transitions, if there is one; minibatches can then be filled up."""

    def __init__(self, cfg: AlgorithmCfg, policy: Policy, precision: Precision, cuda_graphs: bool = True) -> None:
        super().__init__(cfg, policy)
        self.optimizer = PolicyOptimizer(policy, cfg.learning_rate, cfg.max_grad_norm, precision)
        self._graphs: GraphedSteps | None = None
        if self.device.type == "cuda" and cuda_graphs:
            self._graphs = GraphedSteps(self._step_once, self.optimizer, self.validity_key)

    def join(self, ranks: Ranks) -> None:
        """Train the policy together with other processes: minibatch k is that of all ranks, taken together."""
        self.ranks = ranks
        if ranks.count == 1:
            return
        ranks.copy_first(self.policy)
        for module in self.policy.modules():
            if isinstance(module, RunningNormalizer):
                module.share = ranks.share_moments
        if self._graphs is not None:
            _LOG.info("gradient steps are not recorded as CUDA graphs, as gradients are added up over ranks in each")
            self._graphs = None

    def _run_epoch(self, minibatches: Minibatches, meter: Meter) -> None:
        """Do a gradient step on every minibatch of one pass over the data."""
        with self.optimizer.matmul_precision():
            if self._graphs is not None:
                meter.add_steps(*self._graphs.run_epoch(minibatches))
                return
            order = minibatches.draw()
            for chosen, share in zip(order, self._shares(minibatches, order), strict=True):
                # Where nothing is left for this rank, anything will do: its share is zero.
                self._descend(minibatches.gather(chosen if chosen.numel() else chosen.new_zeros(1)), meter, share)

    def _agree(self, minibatches: Minibatches) -> Minibatches:
        """Cut the data into as many minibatches as those of all ranks would be cut into together."""
        if self.ranks.count > 1:
            minibatches.cut_together(self.ranks.gather(torch.tensor(minibatches.items.numel())).tolist())
        return minibatches

    def _shares(self, minibatches: Minibatches, order: Sequence[Tensor]) -> list[float]:
        """Return which share of the transitions of each minibatch, those of all ranks together, is this rank's."""
        if self.validity_key is None or not self.policy.is_recurrent:
            return minibatches.shares(self.ranks.rank)
        weights = torch.tensor(
            [minibatches.num_valid(chosen, self.validity_key) for chosen in order], dtype=torch.float64
        )
        return (weights / self.ranks.sum(weights)).tolist()

    def _step_once(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Do one gradient step and return what was measured."""
        meter = Meter()
        self._descend(batch, meter)
        return meter.epoch_sums

    @abstractmethod
    def _loss(self, batch: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a minibatch, a mean over its transitions, and what is to be logged about it."""

    def _descend(self, batch: TensorDictBase, meter: Meter, share: float = 1.0) -> None:
        """Do one gradient step on a minibatch, or on this rank's share of it.

        On a CPU the minibatch is worked through in pieces whose gradients add up to the same: memory traffic, not
        arithmetic, is what large minibatches would cost there.
        """
        own = meter if self.ranks.count == 1 else Meter()
        rows, piece = batch.numel(), CPU_ROWS * torch.get_num_threads()
        whole = rows <= piece or batch.batch_dims > 1 or self.device.type != "cpu"
        for part in (batch,) if whole else batch.split(piece):
            loss, measures = self._loss(part)
            weight = share if whole else share * part.numel() / rows
            self.optimizer.backward(loss if weight == 1.0 else loss * weight)
            own.add(weight, measures)
        if own is not meter:
            meter.add(1.0, self.ranks.sum_gradients(self.optimizer.parameters, own.epoch_sums))
        meter.end_step(self.optimizer.step())

    def state_dict(self) -> dict[str, Any]:
        """Return optimiser state and progress."""
        return super().state_dict() | {"optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` returned."""
        super().load_state_dict(state)
        self.optimizer.load_state_dict(state["optimizer"])
        if self._graphs is not None:  # Adam's moments are in other memory now
            self._graphs.forget()


class Meter:
    """Means over gradient steps, added up on the device and read once."""

    def __init__(self) -> None:
        self.epochs = 0
        self._steps = 0
        self._sums: dict[str, Tensor] = {}
        self._epoch_steps = 0
        self.epoch_sums: dict[str, Tensor] = {}
        """Sums over the steps of the epoch under way."""

    def add(self, share: float, measures: dict[str, Tensor]) -> None:
        """Take in the scalars of a share of a minibatch."""
        for name, value in measures.items():
            part = value.detach().float() if share == 1.0 else value.detach().float() * share
            self.epoch_sums[name] = self.epoch_sums[name] + part if name in self.epoch_sums else part

    def end_step(self, grad_norm: Tensor) -> None:
        """Count a gradient step."""
        self.add(1.0, {"grad_norm": grad_norm})
        self._epoch_steps += 1

    def add_steps(self, sums: dict[str, Tensor], steps: int) -> None:
        """Take in what several gradient steps add up to."""
        self.add(1.0, sums)
        self._epoch_steps += steps

    def end_epoch(self, name: str) -> Tensor:
        """Close an epoch and return the mean ``[]`` of one scalar in it."""
        mean = self.epoch_sums[name] / self._epoch_steps
        for key, value in self.epoch_sums.items():
            self._sums[key] = self._sums[key] + value if key in self._sums else value
        self._steps += self._epoch_steps
        self.epochs += 1
        self.epoch_sums, self._epoch_steps = {}, 0
        return mean

    def means(self) -> dict[str, float]:
        """Return the mean of every scalar over all epochs; this waits for the device once."""
        if not self._sums:
            return {}
        values = (torch.stack(list(self._sums.values())) / self._steps).tolist()
        return dict(zip(self._sums, values, strict=True))
