"""What every algorithm is: something that improves a policy by a rollout."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from torch import Tensor

from embodichain.agents.rl.algo.graphed import GraphedSteps
from embodichain.agents.rl.algo.optimizer import PolicyOptimizer, Precision
from embodichain.agents.rl.buffer.rollout import Minibatches, check_rollout, flatten_time_major
from embodichain.agents.rl.buffer.rollout_buffer import RolloutBuffer
from embodichain.agents.rl.collector.base import StepCallback
from embodichain.agents.rl.collector.sync_collector import RolloutStart, SyncCollector
from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.utils.config import AlgorithmCfg
from embodichain.agents.rl.utils.distributed import Ranks, RunningStatistics
from embodichain.agents.rl.utils.observations import Observation
from embodichain.envs.vec_env import VecEnv
from embodichain.errors import ConfigError, RolloutError

NORMALIZER_ROWS = 65_536
"""Transitions that running statistics take in at a time, which bounds the memory for it."""


class BaseAlgorithm(ABC):
    """Base class for RL algorithms: ``update(rollout)`` is all that a new one has to write.

    Trainers collect with a collector of their own and call ``update(rollout)``. The same can be had from the algorithm
    alone: ``initialize_buffer``, then ``collect_rollout`` and ``update()`` in turn.
    """

    device: torch.device
    """Where the policy is trained."""
    cfg_type: ClassVar[type[AlgorithmCfg]] = AlgorithmCfg
    """Class of the settings, so that a config can be checked before anything is built."""
    one_version_per_rollout: ClassVar[bool] = False
    """Whether all transitions of a rollout must come from one version of the policy."""

    def __init__(self, cfg: AlgorithmCfg, policy: Policy) -> None:
        self.cfg = cfg
        self.device = torch.device(cfg.device)
        self.policy = policy.to(self.device)
        self.policy.device = self.device
        self.ranks = Ranks()
        """The processes that train this policy together; see ``join``."""
        self.progress = 0.0
        """Share of the training that is over, in [0, 1]; set by the trainer, used by schedules."""
        self.buffer: RolloutBuffer | None = None
        self._collector: SyncCollector | None = None
        self._rollout: TensorDictBase | None = None

    @abstractmethod
    def update(self, rollout: TensorDictBase | None = None) -> dict[str, float]:
        """Improve the policy by a rollout ``[num_envs, num_steps]``; return losses and other measures.

        Without an argument, by the one that ``collect_rollout`` collected.
        """

    def start_rollout(self, env: VecEnv) -> Observation | None:
        """Prepare the environment for a rollout; collectors call it before each. By default it just goes on."""
        return None

    @property
    def rollout_start(self) -> RolloutStart | None:
        """What ``start_rollout`` does, as something that can be sent to a collecting process; ``None`` if nothing."""
        return None

    def check_num_envs(self, num_envs: int) -> None:
        """Raise ``ConfigError`` if the algorithm cannot work with so many envs; by default any number will do."""
        return

    def join(self, ranks: Ranks) -> None:
        """Train the policy together with other processes, each with envs and a copy of the policy of its own.

        An algorithm that can do so overrides this; all copies begin as the first one.
        """
        if ranks.count > 1:
            problem = f"{type(self).__name__} cannot train on several ranks: it does not add up gradients over them"
            raise ConfigError(problem, "algorithm")

    def initialize_buffer(
        self,
        num_steps: int,
        num_envs: int,
        obs_dim: int,
        action_dim: int,
        device: torch.device | str | None = None,
    ) -> None:
        """Make the buffer that ``collect_rollout`` writes to; nested observations are stored flat."""
        self.check_num_envs(num_envs)
        self.buffer = RolloutBuffer(num_steps, num_envs, obs_dim, action_dim, device or self.device)

    def collect_rollout(
        self,
        env: VecEnv,
        policy: Policy,
        obs: Observation | None,
        num_steps: int,
        on_step_callback: StepCallback | None = None,
    ) -> dict[str, Any]:
        """Collect ``num_steps`` of all envs; return logging info: reward parts, metrics, episode returns.

        ``obs`` is the environment's present observation; ``None`` goes on from where the last rollout ended, or resets
        the environment for the first one.
        """
        collector = self._collector
        if collector is None or collector.env is not env or collector.policy is not policy:
            collector = SyncCollector(env, policy, self.device, buffer=self.buffer, start_rollout=self.start_rollout)
            self._collector = collector
            if obs is not None:
                collector.begin(obs)
        elif obs is not None:
            collector.obs = obs.to(self.device)
        collector.callback = on_step_callback
        self._rollout = collector.collect(num_steps)
        return dict(collector.statistics())

    def state_dict(self) -> dict[str, Any]:
        """Return what ``update`` depends on besides policy, config and random state: nested dicts, tensors, numbers."""
        return {"progress": self.progress}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` returned."""
        self.progress = state["progress"]

    def _take(self, rollout: TensorDictBase | None, keys: Iterable[str]) -> TensorDictBase:
        """Return the rollout to learn from, on the algorithm's device, if its layout is right."""
        if rollout is None:
            rollout, self._rollout = self._rollout, None
            if rollout is None:
                raise RolloutError("update() without a rollout needs collect_rollout() before it, each time")
        check_rollout(rollout, keys)
        self.check_num_envs(rollout.batch_size[0])
        return rollout if rollout["reward"].device == self.device else rollout.to(self.device)

    def _finish_update(self, rollout: TensorDictBase) -> None:
        """Let the policy's running statistics see the rollout, and count the update."""
        with torch.no_grad():
            for part in flatten_time_major(rollout.select("observation")).split(NORMALIZER_ROWS):
                self.policy.update_normalizer(part["observation"])
            self.policy.version += 1


# MERGED minibatch: What PPO and GRPO share: gradient steps on minibatches, and means of what is measured on the way.


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
            if isinstance(module, RunningStatistics):
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
