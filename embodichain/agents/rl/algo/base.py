"""What algorithms have in common: ``BaseAlgorithm`` for all, ``MinibatchAlgorithm`` for those of gradient steps."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from embodichain.agents.rl.buffer.rollout import (
    EVALUATED_ROWS,
    Minibatches,
    StaticRows,
    check_rollout,
    flatten_time_major,
)
from embodichain.agents.rl.buffer.rollout_buffer import RolloutBuffer
from embodichain.agents.rl.collector.base import StepCallback
from embodichain.agents.rl.collector.sync_collector import RolloutStart, SyncCollector
from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.utils import AlgorithmCfg, MinibatchCfg, Precision
from embodichain.agents.rl.utils.distributed import Ranks, SharedStatistics
from embodichain.agents.rl.utils.tensordicts import Observation
from embodichain.envs.vec_env import VecEnv
from embodichain.errors import ConfigError, RolloutError
from embodichain.utils.cuda_graphs import Recorded, Recorder, record

_LOG = logging.getLogger(__name__)
CPU_ROWS = 2048
"""Transitions per backward pass and CPU thread: what a network of usual width makes of them stays in the cache."""
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
MIN_LEARNING_RATE, MAX_LEARNING_RATE, LEARNING_RATE_STEP = 1e-5, 1e-2, 1.5
"""Bounds of the adaptive step size, and the factor of one change."""


class BaseAlgorithm(ABC):
    """Base class for RL algorithms: ``update(rollout)`` is all that a new one has to write.

    Trainers have a collector of their own and call ``update(rollout)``. An algorithm also works alone:
    ``initialize_buffer``, then ``collect_rollout`` and ``update()`` in turn.
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

    @property
    def rollout_start(self) -> RolloutStart | None:
        """What resets the environment before each rollout, if anything does; it can be sent to a collecting process."""
        return None

    def start_rollout(self, env: VecEnv) -> Observation | None:
        """Prepare the environment for a rollout; collectors call it before each. By default episodes continue."""
        self.check_num_envs(env.num_envs)
        return None if self.rollout_start is None else self.rollout_start(env)

    def check_num_envs(self, num_envs: int) -> None:
        """Raise ``ConfigError`` if the algorithm cannot work with this number of envs; by default any will do."""
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

        ``obs`` is the environment's present observation; ``None`` continues where the last rollout ended, or resets the
        environment for the first one.
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
        """Continue from what ``state_dict`` returned."""
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
            for part in flatten_time_major(rollout.select("observation")).split(EVALUATED_ROWS):
                self.policy.update_normalizer(part["observation"])
            self.policy.version += 1


class MinibatchAlgorithm(BaseAlgorithm):
    """An algorithm whose update is epochs of gradient steps on shuffled minibatches.

    ``update`` of a subclass loops over ``_shuffled(minibatches)`` and calls its own ``_step``, or has all steps of an
    epoch replayed by ``graphs`` where a GPU allows it.
    """

    cfg: MinibatchCfg
    validity_key: ClassVar[str | None] = None
    """Part of a minibatch that weighs its transitions, if there is one; minibatches can then be filled up."""

    def __init__(self, cfg: MinibatchCfg, policy: Policy) -> None:
        super().__init__(cfg, policy)
        self.optimizer = PolicyOptimizer(policy, cfg.learning_rate, cfg.max_grad_norm, cfg.mixed_precision)
        self.graphs: GraphedSteps | None = None
        """Replays epochs of ``_step`` on a GPU."""
        if self.device.type == "cuda" and cfg.cuda_graphs:
            self.graphs = GraphedSteps(self._step, self.optimizer, self.validity_key)

    def join(self, ranks: Ranks) -> None:
        """Train the policy together with other processes: minibatch k is that of all ranks, taken together."""
        self.ranks = ranks
        if ranks.count == 1:
            return
        ranks.copy_first(self.policy)
        for module in self.policy.modules():
            if isinstance(module, SharedStatistics):
                module.share = ranks.share_moments
        if self.graphs is not None:
            _LOG.info("gradient steps are not recorded as CUDA graphs, as gradients are added up over ranks in each")
            self.graphs = None

    @abstractmethod
    def _step(self, batch: TensorDictBase, meter: Meter, share: float = 1.0) -> None:
        """Do one gradient step on a minibatch, or on this rank's ``share`` of it."""

    def _minibatches(self, data: TensorDictBase, rollout: TensorDictBase, valid: Tensor | None = None) -> Minibatches:
        """Cut ``data`` into as many minibatches as those of all ranks would be cut into together."""
        length: int | None = None
        if self.policy.is_recurrent:
            data.update(rollout.select("hidden", "done"))
            length = self.cfg.sequence_length or rollout.batch_size[1]
        minibatches = Minibatches(data, self.cfg.batch_size, sequence_length=length, valid=valid)
        if self.ranks.count > 1:
            minibatches.cut_together(self.ranks.gather(torch.tensor(minibatches.items.numel())).tolist())
        return minibatches

    def _shuffled(self, minibatches: Minibatches) -> Iterator[tuple[Tensor, float]]:
        """Yield the items of every minibatch of an epoch, and their share of its transitions over all ranks."""
        order = minibatches.draw()
        if self.validity_key is None or not self.policy.is_recurrent:
            shares = minibatches.shares(self.ranks.rank)
        else:
            valid = [minibatches.num_valid(chosen, self.validity_key) for chosen in order]
            weights = torch.tensor(valid, dtype=torch.float64)
            shares = (weights / self.ranks.sum(weights)).tolist()
        for chosen, share in zip(order, shares, strict=True):
            # Where nothing is left for this rank, anything will do: its share is zero.
            yield chosen if chosen.numel() else chosen.new_zeros(1), share

    def _pieces(self, batch: TensorDictBase, share: float) -> Iterator[tuple[TensorDictBase, float]]:
        """Yield a minibatch and its weight in the loss, on a CPU in pieces whose gradients add up to the same.

        Memory traffic, not arithmetic, is what large minibatches would cost there.
        """
        rows, piece = batch.numel(), CPU_ROWS * torch.get_num_threads()
        if rows <= piece or batch.batch_dims > 1 or self.device.type != "cpu":
            yield batch, share
            return
        for part in batch.split(piece):
            yield part, share * part.numel() / rows

    @contextmanager
    def _over_ranks(self, meter: Meter) -> Iterator[Meter]:
        """Add up, at the end of the block, gradients and what was measured over all ranks."""
        if self.ranks.count == 1:
            yield meter
            return
        own = Meter()
        yield own
        meter.add(self.ranks.sum_gradients(self.optimizer.parameters, own.epoch_sums))

    def state_dict(self) -> dict[str, Any]:
        """Return optimiser state and progress."""
        return super().state_dict() | {"optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what ``state_dict`` returned."""
        super().load_state_dict(state)
        self.optimizer.load_state_dict(state["optimizer"])
        if self.graphs is not None:  # Adam's moments are in other memory now
            self.graphs.forget()


class Meter:
    """Means over gradient steps, added up on the device and read once."""

    def __init__(self) -> None:
        self.epochs = 0
        self._steps = 0
        self._sums: dict[str, Tensor] = {}
        self._epoch_steps = 0
        self.epoch_sums: dict[str, Tensor] = {}
        """Sums over the steps of the epoch under way."""

    def add(self, measures: dict[str, Tensor], weight: float = 1.0, steps: int = 0) -> None:
        """Take in scalars of a piece of a minibatch with its weight, or the sums of whole ``steps``."""
        for name, value in measures.items():
            part = value.detach().float() if weight == 1.0 else value.detach().float() * weight
            self.epoch_sums[name] = self.epoch_sums[name] + part if name in self.epoch_sums else part
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


class PolicyOptimizer:
    """Adam with a bound on the gradient's norm, and mixed precision where it is wanted.

    On a GPU the step size is a tensor there, so that a schedule changes it without waiting for the device, and a step
    can be part of a CUDA graph.
    """

    def __init__(
        self, policy: nn.Module, learning_rate: float, max_grad_norm: float, precision: Precision = "off"
    ) -> None:
        self.parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        self.max_grad_norm = max_grad_norm
        self.precision: Precision = precision
        self.device_type = self.parameters[0].device.type
        device, on_gpu = self.parameters[0].device, self.device_type == "cuda"
        self._rate: Tensor | None = torch.tensor(learning_rate, device=device) if on_gpu else None
        rate = learning_rate if self._rate is None else self._rate
        self.adam = torch.optim.Adam(self.parameters, lr=rate, eps=1e-5, fused=True, capturable=on_gpu)
        self.scaler = torch.amp.GradScaler(self.device_type, enabled=precision == "fp16")

    @property
    def learning_rate(self) -> float:
        """Adam's present step size."""
        return float(self.adam.param_groups[0]["lr"])

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        if self._rate is None:
            self.adam.param_groups[0]["lr"] = value
        else:
            self._rate.fill_(value)

    def adapt_learning_rate(self, kl: Tensor, desired_kl: float) -> None:
        """Lower the step size after an epoch that moved the policy too far, raise it after one that hardly did."""
        if self._rate is not None:
            self._rate.copy_(adapted_rate(self._rate, kl, desired_kl))
        elif float(kl) > 2.0 * desired_kl:
            self.learning_rate = max(MIN_LEARNING_RATE, self.learning_rate / LEARNING_RATE_STEP)
        elif float(kl) < 0.5 * desired_kl:
            self.learning_rate = min(MAX_LEARNING_RATE, self.learning_rate * LEARNING_RATE_STEP)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which networks run in the chosen precision."""
        dtype = _AUTOCAST.get(self.precision, torch.float32)
        return torch.autocast(self.device_type, dtype, enabled=self.precision in _AUTOCAST)

    @contextmanager
    def matmul_precision(self) -> Iterator[None]:
        """Let float32 products, backwards too, use the GPU's TF32 units inside the block, if that was chosen."""
        if self.precision != "tf32" or self._rate is None:
            yield
            return
        cudnn: Any = torch.backends.cudnn
        backends: tuple[Any, ...] = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)
        before = [backend.fp32_precision for backend in backends]
        try:
            for backend in backends:
                backend.fp32_precision = "tf32"
            yield
        finally:
            for backend, precision in zip(backends, before, strict=True):
                backend.fp32_precision = precision

    def backward(self, loss: Tensor, weight: float = 1.0) -> None:
        """Add the gradient of ``weight * loss`` to what has been gathered since the last step."""
        self.scaler.scale(loss if weight == 1.0 else loss * weight).backward()

    def step(self) -> Tensor:
        """Follow the gathered gradient; return its norm before clipping, ``[]``."""
        self.scaler.unscale_(self.adam)
        norm = nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm, foreach=True)
        self.scaler.step(self.adam)
        self.scaler.update()
        self.adam.zero_grad(set_to_none=True)
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Return Adam's moments and step size, and the loss scale; the same data whatever the device."""
        adam = self.adam.state_dict()
        adam["param_groups"] = [{**group, "lr": float(group["lr"])} for group in adam["param_groups"]]
        return {"adam": adam, "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what ``state_dict`` returned."""
        own = {name: self.adam.param_groups[0][name] for name in ("fused", "capturable")}
        self.adam.load_state_dict(state["adam"])
        self.scaler.load_state_dict(state["scaler"])
        for group in self.adam.param_groups:
            group.update(own)  # these belong to the device, not to the training
        for values in self.adam.state.values():
            values["step"] = values["step"].to(self.parameters[0].device, torch.float32)
        if self._rate is not None:
            self._rate.fill_(self.learning_rate)
            self.adam.param_groups[0]["lr"] = self._rate


def adapted_rate(rate: Tensor, kl: Tensor, desired_kl: float) -> Tensor:
    """Return the step size ``[]`` after an epoch that moved the policy by ``kl`` ``[]``, without waiting for either."""
    lower = (rate / LEARNING_RATE_STEP).clamp(min=MIN_LEARNING_RATE)
    higher = (rate * LEARNING_RATE_STEP).clamp(max=MAX_LEARNING_RATE)
    return torch.where(kl > 2.0 * desired_kl, lower, torch.where(kl < 0.5 * desired_kl, higher, rate))


Step = Callable[[TensorDictBase, Meter], None]
"""Does one gradient step on a minibatch and tells a meter what was measured."""


class GraphedSteps:
    """Gradient steps replayed as CUDA graphs: gather, forward, backward, clip and Adam in one launch.

    An ordinary step of a small network is hundreds of launches, and a GPU finishes each before the next arrives. A
    graph has fixed shapes and fixed memory. So the data of every update are copied to the same addresses, the order of
    rows is an input, and there is one graph for each size of minibatch. Where a loss weighs its transitions,
    minibatches are filled up with transitions of no weight, and one size does for all.
    """

    def __init__(self, step: Step, optimizer: PolicyOptimizer, validity_key: str | None = None) -> None:
        """Prepare to replay ``step``; ``validity_key`` names the part of a minibatch that weighs its transitions."""
        self._step, self._optimizer, self._validity_key = step, optimizer, validity_key
        self._recorder = Recorder("the update runs")
        self._graphs: dict[int, tuple[Recorded[None], Tensor]] = {}  # by size: the graph and the items it gathers
        self._rows: StaticRows | None = None
        self._names: list[str] = []
        self._sums: Tensor | None = None

    def run_epoch(self, minibatches: Minibatches) -> tuple[dict[str, Tensor], int]:
        """Do one pass over the data; return the sums of all measures and the number of steps."""
        rows, order = self._load(minibatches), minibatches.draw()
        if self._sums is not None:
            self._sums.zero_()
        for chosen in order:
            if not self._replay(rows, chosen):
                self._recorder.warm_up(partial(self._do, rows, chosen), self._clear_gradients)
        if self._sums is None:
            return {}, 0
        return dict(zip(self._names, self._sums.clone().unbind(), strict=True)), len(order)

    def forget(self) -> None:
        """Record anew: parameters or Adam's moments have moved."""
        self._graphs.clear()
        self._recorder.calls = 0

    def _replay(self, rows: StaticRows, chosen: Tensor) -> bool:
        """Do a step by its graph, if it has one or can be given one."""
        size = chosen.numel() if self._validity_key is None else rows.minibatches.largest
        if not self._recorder.ready or (size not in self._graphs and not self._record(rows, size)):
            return False
        graph, items = self._graphs[size]
        if chosen.numel() < size:
            items.fill_(-1)
        items[: chosen.numel()].copy_(chosen)
        graph.replay()
        return True

    def _record(self, rows: StaticRows, size: int) -> bool:
        items = torch.zeros(size, dtype=torch.int64, device=self._optimizer.parameters[0].device)
        pool = next(iter(self._graphs.values()))[0].graph.pool() if self._graphs else None
        recorded = self._recorder.attempt(lambda: record(lambda: self._do(rows, items), pool=pool))
        if recorded is None:
            self._clear_gradients()
            return False
        self._graphs[size] = recorded, items
        return True

    def _do(self, rows: StaticRows, chosen: Tensor) -> None:
        """Do a step on these items and add what was measured to the sums."""
        meter = Meter()
        self._step(self._gather(rows, chosen), meter)
        values = torch.stack(list(meter.epoch_sums.values()))
        if self._sums is None:
            self._names, self._sums = list(meter.epoch_sums), torch.zeros_like(values)
        self._sums.add_(values)

    def _gather(self, rows: StaticRows, chosen: Tensor) -> TensorDict:
        """Return a minibatch; an item of -1 stands for none: it is there, but does not count."""
        if self._validity_key is None:
            return rows.gather(chosen)
        batch = rows.gather(chosen.clamp(min=0))
        batch[self._validity_key] = batch[self._validity_key] & (chosen >= 0)
        return batch

    def _load(self, minibatches: Minibatches) -> StaticRows:
        """Bring the data of an update to where the graphs look for them."""
        recorder, rows = self._recorder, self._rows
        if recorder.possible and self._optimizer.precision == "fp16":
            recorder.give_up("the loss scale of fp16 depends on what came before; bf16 needs none")
        if rows is not None and rows.minibatches is minibatches:
            return rows
        if rows is None or not recorder.possible or not rows.take(minibatches):
            self._rows = rows = StaticRows(minibatches, own=recorder.possible and rows is not None)
            self._graphs.clear()
        return rows

    def _clear_gradients(self) -> None:
        self._optimizer.adam.zero_grad(set_to_none=True)
