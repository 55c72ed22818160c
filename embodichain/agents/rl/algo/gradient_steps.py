"""Gradient steps: Adam with mixed precision, means of metrics, and steps that are replayed as CUDA graphs."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from embodichain.agents.rl.buffer.rollout_buffer import Minibatches, shaped
from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.utils import Precision
from embodichain.agents.rl.utils.tensordicts import sorted_leaves
from embodichain.errors import CheckpointError, ConfigError
from embodichain.utils.cuda_graphs import Recorded, Recorder, record, timed_convolutions

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
LEARNING_RATE_STEP = 1.5
"""Factor by which the adaptive learning rate changes."""
_NARROW = 256  # maximum width of tensors in the common table
_SMALL = 1 << 26  # maximum size in bytes of tensors that are copied rather than used in place


class Meter:
    """Averages metrics over gradient steps; sums stay on the device and are read once."""

    def __init__(self) -> None:
        self.epochs = 0
        self._steps = 0
        self._sums: dict[str, Tensor] = {}
        self._epoch_steps = 0
        self.epoch_sums: dict[str, Tensor] = {}
        """Sums over the steps of the current epoch."""

    def add(self, measures: dict[str, Tensor], weight: float = 1.0, steps: int = 0) -> None:
        """Add scalars of a part of a minibatch with its weight, or the sums over whole ``steps``."""
        for name, value in measures.items():
            part = value.detach().float() if weight == 1.0 else value.detach().float() * weight
            self.epoch_sums[name] = self.epoch_sums[name] + part if name in self.epoch_sums else part
        self._epoch_steps += steps

    def end_epoch(self, name: str) -> Tensor:
        """End an epoch and return the mean ``[]`` of one scalar in it."""
        mean = self.epoch_sums[name] / self._epoch_steps
        for key, value in self.epoch_sums.items():
            self._sums[key] = self._sums[key] + value if key in self._sums else value
        self._steps += self._epoch_steps
        self.epochs += 1
        self.epoch_sums, self._epoch_steps = {}, 0
        return mean

    def means(self) -> dict[str, float]:
        """Return the mean of every scalar over all epochs; synchronises with the device once."""
        if not self._sums:
            return {}
        values = (torch.stack(list(self._sums.values())) / self._steps).tolist()
        return dict(zip(self._sums, values, strict=True))


class Float32Weights:
    """Float32 copies of parameters in lower precision, which an optimiser trains in their place.

    A step of 5e-6 is smaller than the spacing of bfloat16 numbers around 0.01, so that rounding would undo it.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        own = list(parameters)
        self._copies = {p: nn.Parameter(p.detach().float()) for p in own if p.dtype in _AUTOCAST.values()}
        self.parameters = [self.of(parameter) for parameter in own]
        """What the optimiser trains: the copies, and the parameters that need none."""

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the copy of a parameter, or itself if it has none."""
        return self._copies.get(parameter, parameter)

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Move the gradients to the copies; those of parameters that were changed elsewhere follow first."""
        for own, precise in self._copies.items():
            precise.copy_(torch.where(precise.to(own.dtype) == own, precise, own.float()))
            precise.grad, own.grad = None if own.grad is None else own.grad.float(), None

    @torch.no_grad()
    def write(self) -> None:
        """Round the copies to the parameters."""
        for own, precise in self._copies.items():
            own.copy_(precise)

    def clear_gradients(self) -> None:
        """Discard gradients of the parameters that have copies; an optimiser knows only the copies."""
        for own in self._copies:
            own.grad = None

    def state_dict(self) -> list[Tensor]:
        """Return the copies."""
        return [precise.detach() for precise in self._copies.values()]

    @torch.no_grad()
    def load_state_dict(self, state: Sequence[Tensor]) -> None:
        """Restore the copies from ``state_dict``; without any, they are those of the parameters."""
        here, there = [list(own.shape) for own in self._copies], [list(saved.shape) for saved in state]
        if there and there != here:
            raise CheckpointError(
                f"the checkpoint has float32 copies of {len(there)} weights, and here {len(here)} or others need one: "
                "train the same parts in the same dtype"
            )
        for (own, precise), saved in zip(self._copies.items(), state or self._copies, strict=True):
            precise.copy_(saved if state else own)


class PolicyOptimizer:
    """Adam with gradient clipping and optional mixed precision; trains weights of lower precision in float32.

    ``weight_decay`` is decoupled from the gradient, as in AdamW. ``value_rate`` is the initial learning rate of the
    critic; its ratio to that of the policy stays constant.

    On a GPU, learning rates are tensors, so that schedules change them without synchronising and CUDA graphs can
    contain the step.
    """

    def __init__(
        self,
        policy: nn.Module,
        learning_rate: float,
        max_grad_norm: float,
        precision: Precision = "off",
        weight_decay: float = 0.0,
        value_rate: float | None = None,
    ) -> None:
        trained = {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}
        if not trained:
            problem = f"none of {type(policy).__name__}'s parameters is to be trained: one that load_policy returns is"
            raise ConfigError(f"{problem} frozen until you call policy.requires_grad_()", "policy")
        self.parameters = list(trained.values())
        self._weights = Float32Weights(self.parameters)
        self.max_grad_norm = max_grad_norm
        self._host_rate = learning_rate
        self._first_rates = learning_rate, learning_rate if value_rate is None else value_rate
        self.precision: Precision = precision
        self.device_type = self.parameters[0].device.type
        device, on_gpu = self.parameters[0].device, self.device_type == "cuda"
        self._rate: Tensor | None = torch.tensor(learning_rate, device=device) if on_gpu else None
        self._value_rate: Tensor | None = None
        if on_gpu and value_rate is not None:
            self._value_rate = torch.tensor(value_rate, device=device)
        self._is_of_value: list[bool] = []  # for each parameter group
        groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
        for name, parameter in trained.items():
            is_of_value = value_rate is not None and isinstance(policy, Policy) and policy.in_critic(name)
            decay = weight_decay if _decays(name, parameter) else 0.0
            groups.setdefault((is_of_value, decay), []).append(self._weights.of(parameter))
        entries: list[dict[str, Any]] = []
        for (is_of_value, decay), members in groups.items():
            self._is_of_value.append(is_of_value)
            entries.append({"params": members, "lr": self._first_rates[is_of_value], "weight_decay": decay})
        self.adam = torch.optim.Adam(
            entries, eps=1e-5, fused=True, capturable=on_gpu, decoupled_weight_decay=weight_decay > 0.0
        )
        self._point_to_rates()
        self.scaler = torch.amp.GradScaler(self.device_type, enabled=precision == "fp16")

    @property
    def learning_rate(self) -> float:
        """The current learning rate."""
        return self._host_rate if self._rate is None else float(self._rate)

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        if self._rate is None:
            self._host_rate = value
            self._point_to_rates()
        else:
            self._rate.fill_(value)
            self._follow_rate()

    def rates(self) -> dict[str, float]:
        """Return the current learning rates by name; synchronises with a GPU."""
        own, first = self.learning_rate, self._first_rates
        has_two = any(self._is_of_value)
        return {"learning_rate": own} | ({"value_learning_rate": first[1] * (own / first[0])} if has_two else {})

    def _point_to_rates(self) -> None:
        """Set the learning rate of each parameter group: a number, or on a GPU one of two tensors."""
        first = self._first_rates
        rates: tuple[Any, Any] = self._rate, self._value_rate
        if self._rate is None:
            rates = self._host_rate, first[1] * (self._host_rate / first[0])
        for group, is_of_value in zip(self.adam.param_groups, self._is_of_value, strict=True):
            group["lr"] = rates[is_of_value]

    def _follow_rate(self) -> None:
        """On a GPU, scale the critic's learning rate by the same factor as the policy's."""
        if self._rate is not None and self._value_rate is not None:
            self._value_rate.copy_(self._rate / self._first_rates[0] * self._first_rates[1])

    def adapt_learning_rate(self, kl: Tensor, desired_kl: float, bounds: tuple[float, float]) -> None:
        """Lower the learning rate if the KL divergence of an epoch is above ``2 desired_kl``, raise it if below half.

        The result is limited to ``bounds``, but a learning rate outside them is not moved in the opposite direction.
        """
        if self._rate is not None:
            self._rate.copy_(adapted_rate(self._rate, kl, desired_kl, bounds))
            self._follow_rate()
            return
        rate = self.learning_rate
        if float(kl) > 2.0 * desired_kl:
            self.learning_rate = min(rate, max(bounds[0], rate / LEARNING_RATE_STEP))
        elif float(kl) < 0.5 * desired_kl:
            self.learning_rate = max(rate, min(bounds[1], rate * LEARNING_RATE_STEP))

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the autocast context of the chosen precision."""
        dtype = _AUTOCAST.get(self.precision, torch.float32)
        return torch.autocast(self.device_type, dtype, enabled=self.precision in _AUTOCAST)

    @property
    def is_reduced(self) -> bool:
        """Whether the update uses a lower precision than the collector."""
        return self.precision in _AUTOCAST or (self.precision == "tf32" and self._rate is not None)

    @contextmanager
    def matmul_precision(self) -> Iterator[None]:
        """Use TF32 for float32 products inside the block, also in the backward pass, if the precision is ``tf32``."""
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
        """Accumulate the gradient of ``weight * loss``."""
        self.scaler.scale(loss if weight == 1.0 else loss * weight).backward()

    def step(self) -> Tensor:
        """Take a step with the accumulated gradient; return its norm before clipping, ``[]``.

        With fp16, a step whose gradient is too large for the loss scale is left out: its norm counts as 0.
        """
        self._weights.take_gradients()
        self.scaler.unscale_(self.adam)
        norm = nn.utils.clip_grad_norm_(self._weights.parameters, self.max_grad_norm, foreach=True)
        self.scaler.step(self.adam)
        self.scaler.update()
        self._weights.write()
        self.clear_gradients()
        return torch.where(norm.isfinite(), norm, 0.0) if self.scaler.is_enabled() else norm

    def clear_gradients(self) -> None:
        """Discard all gradients."""
        self._weights.clear_gradients()
        self.adam.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """Return Adam's state, learning rate and loss scale, independent of the device and parameter groups."""
        moments = {i: self.adam.state[p] for i, p in enumerate(self._weights.parameters) if p in self.adam.state}
        group = {**self.adam.state_dict()["param_groups"][0], "lr": self.learning_rate}
        group |= {"params": list(range(len(self.parameters)))}
        state = {"adam": {"state": moments, "param_groups": [group]}, "scaler": self.scaler.state_dict()}
        precise = self._weights.state_dict()
        return state | {"float32": precise} if precise else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from ``state_dict``."""
        [saved], own = state["adam"]["param_groups"], self.adam.state_dict()  # group settings come from the config
        if len(saved["params"]) != len(self.parameters):
            there, here = len(saved["params"]), len(self.parameters)
            raise CheckpointError(
                f"Adam's state is that of {there} trained parameters, and here {here} are trained: train the same parts"
            )
        self._weights.load_state_dict(state.get("float32", []))
        index = {id(parameter): i for i, parameter in enumerate(self._weights.parameters)}
        order = [index[id(parameter)] for group in self.adam.param_groups for parameter in group["params"]]
        moments = state["adam"]["state"]
        own["state"] = {position: moments[i] for position, i in enumerate(order) if i in moments}
        self.adam.load_state_dict(own)
        self.scaler.load_state_dict(state["scaler"])
        self._point_to_rates()  # loading has replaced the tensors by copies
        self.learning_rate = saved["lr"]
        for parameter, values in self.adam.state.items():
            shapes = {name: value.shape for name, value in values.items()}
            if shapes != {"step": (), "exp_avg": parameter.shape, "exp_avg_sq": parameter.shape}:
                raise CheckpointError(f"Adam's state of a parameter {list(parameter.shape)} has the shapes {shapes}")
            values["step"] = values["step"].to(self.parameters[0].device, torch.float32)


def _decays(name: str, parameter: Tensor) -> bool:
    """Return whether weight decay applies to this parameter: not to biases, norms and log standard deviations."""
    return parameter.ndim > 1 and not name.endswith("log_std")


def adapted_rate(rate: Tensor, kl: Tensor, desired_kl: float, bounds: tuple[float, float]) -> Tensor:
    """Return the adapted learning rate ``[]`` after an epoch with a KL divergence ``[]``, without synchronising."""
    lower = torch.minimum(rate, (rate / LEARNING_RATE_STEP).clamp(min=bounds[0]))
    higher = torch.maximum(rate, (rate * LEARNING_RATE_STEP).clamp(max=bounds[1]))
    return torch.where(kl > 2.0 * desired_kl, lower, torch.where(kl < 0.5 * desired_kl, higher, rate))


class StaticRows:
    """Data of one update at fixed addresses: narrow tensors share one table for a single gather, large ones stay."""

    def __init__(self, minibatches: Minibatches, own: bool) -> None:
        """Store the data; ``own`` copies large tensors, too, because their addresses change."""
        self.minibatches = minibatches
        leaves = dict(sorted_leaves(minibatches.rows))
        self._columns = _side_by_side(leaves)
        width = max((columns.stop for columns in self._columns.values()), default=0)
        self._table = torch.empty(minibatches.rows.batch_size[0], width, device=minibatches.device)
        self._parts: dict[tuple[str, ...], Tensor] = {}
        self._owned = set(self._columns)
        for path, leaf in leaves.items():
            if path in self._columns:
                self._parts[path] = self._table[:, self._columns[path]].view(leaf.shape)
                self._parts[path].copy_(leaf)
            elif own or leaf.nbytes <= _SMALL:
                self._owned.add(path)
                self._parts[path] = leaf.clone()
            else:
                self._parts[path] = leaf

    def gather(self, chosen: Tensor) -> TensorDict:
        """Return the minibatch of these items."""
        index, shape = self.minibatches.locate(chosen)
        batch = TensorDict({}, batch_size=shape, device=chosen.device)
        table = self._table.index_select(0, index) if self._columns else None
        for path, part in self._parts.items():
            columns = self._columns.get(path)
            if columns is None or table is None:
                rows = _select(part, index)
            else:
                rows = table[:, columns] if part.ndim > 1 else table[:, columns.start]
            batch.set(path, shaped(rows, shape))
        return batch

    def take(self, minibatches: Minibatches) -> bool:
        """Store the data of the next update; return ``False`` if shapes, or addresses of uncopied tensors, differ."""
        leaves = dict(sorted_leaves(minibatches.rows))
        if minibatches.layout != self.minibatches.layout or leaves.keys() != self._parts.keys():
            return False
        for path, part in self._parts.items():
            leaf = leaves[path]
            has_moved = path not in self._owned and leaf.data_ptr() != part.data_ptr()
            if has_moved or (leaf.shape, leaf.dtype) != (part.shape, part.dtype):
                return False
        for path in self._owned:
            self._parts[path].copy_(leaves[path])
        self.minibatches = minibatches
        return True


def _select(part: Tensor, index: Tensor) -> Tensor:
    """Return copies of rows; those of images in words of 8 bytes, as each thread of a GPU copies one number."""
    numbers = max(1, 8 // part.element_size())  # in a word
    size = part.shape[1:].numel()
    if part.ndim < 3 or not size or size % numbers or part.storage_offset() % numbers or not part.is_contiguous():
        return part.index_select(0, index)
    rows = part.flatten(1).view(torch.int64).index_select(0, index)
    return rows.view(part.dtype).view(-1, *part.shape[1:])


def _side_by_side(leaves: dict[tuple[str, ...], Tensor]) -> dict[tuple[str, ...], slice]:
    """Assign table columns to all narrow float32 tensors, the widest first, which keeps them aligned."""
    widths = {p: x.shape[1:].numel() for p, x in leaves.items() if x.dtype == torch.float32 and x.ndim <= 2}
    columns, first = {}, 0
    for path in sorted((p for p in widths if widths[p] <= _NARROW), key=lambda path: -widths[path]):
        columns[path] = slice(first, first + widths[path])
        first += widths[path]
    return columns


Evaluated = tuple[Tensor, Tensor | None]
"""Log-probabilities and values of a minibatch."""


class GraphedSteps:
    """Gradient steps replayed as CUDA graphs: gather, forward, backward, clip and Adam in one launch.

    Shapes and addresses are fixed: data is copied, the order of rows is an input, and each minibatch size has its own
    graph. If the loss has a validity mask, minibatches are padded with invalid transitions to a single size.
    """

    def __init__(
        self,
        step: Callable[[TensorDictBase, Meter], None],
        optimizer: PolicyOptimizer,
        validity_key: str | None = None,
    ) -> None:
        """Create a replayer of ``step``; ``validity_key`` is the key of the mask of valid transitions, if any."""
        self._step, self._optimizer, self._validity_key = step, optimizer, validity_key
        self._recorder, self._evaluator = Recorder("the update runs"), Recorder("the rollout is evaluated")
        self._graphs: dict[int, tuple[Recorded[None], Tensor]] = {}  # by size: graph and its input, the items
        self._evaluations: dict[int, tuple[Recorded[Evaluated], Tensor]] = {}  # the same for ``evaluate``
        self._rows: StaticRows | None = None
        self._loaded: Minibatches | None = None  # whose data the rows hold
        self._names: list[str] = []
        self._sums: Tensor | None = None

    def run_epoch(self, minibatches: Minibatches) -> tuple[dict[str, Tensor], int]:
        """Run one epoch; return the sums of all metrics and the number of steps."""
        rows, order = self._load(minibatches), minibatches.draw()
        if self._sums is not None:
            self._sums.zero_()
        with timed_convolutions:
            for chosen in order:
                if not self._replay(rows, chosen):
                    self._recorder.warm_up(partial(self._do, rows, chosen), self._optimizer.clear_gradients)
        if self._sums is None:
            return {}, 0
        return dict(zip(self._names, self._sums.clone().unbind(), strict=True)), len(order)

    @property
    def replays_evaluations(self) -> bool:
        """Whether ``evaluate`` can use graphs: minibatches have few sizes, and no capture of a step has failed."""
        return self._validity_key is None and self._recorder.possible and self._optimizer.precision != "fp16"

    def evaluate(
        self, minibatches: Minibatches, work: Callable[[TensorDictBase], Evaluated]
    ) -> Iterator[tuple[Tensor, Evaluated]]:
        """Yield the items of each minibatch, unshuffled, and the result of ``work``, which the next one overwrites.

        The data of ``minibatches`` may be changed afterwards. ``work`` must be the same function in every call.
        """
        rows = self._load(minibatches)
        for chosen in minibatches.items.tensor_split(max(1, minibatches.count)):
            if chosen.numel():
                with timed_convolutions:
                    evaluated = self._evaluate(rows, chosen, work)
                yield chosen, evaluated
        self._loaded = None

    def _evaluate(self, rows: StaticRows, chosen: Tensor, work: Callable[[TensorDictBase], Evaluated]) -> Evaluated:
        size, recorder = chosen.numel(), self._evaluator
        if recorder.ready and size not in self._evaluations:
            items = torch.zeros_like(chosen)
            recorded = recorder.attempt(lambda: record(lambda: work(rows.gather(items)), pool=self._pool()))
            if recorded is not None:
                self._evaluations[size] = recorded, items
        if size not in self._evaluations:
            return recorder.warm_up(lambda: work(rows.gather(chosen)))
        graph, items = self._evaluations[size]
        items.copy_(chosen)
        return graph.replay()

    def forget(self) -> None:
        """Discard the graphs, because parameters or Adam's state have moved in memory."""
        self._discard()
        self._recorder.calls = self._evaluator.calls = 0

    def _discard(self) -> None:
        self._graphs.clear()
        self._evaluations.clear()

    def _pool(self) -> Any:
        """Return the memory pool that all graphs share, ``None`` if there is no graph yet."""
        recorded: Iterable[tuple[Recorded[Any], Tensor]] = (*self._graphs.values(), *self._evaluations.values())
        return next((graph.graph.pool() for graph, _ in recorded), None)

    def _replay(self, rows: StaticRows, chosen: Tensor) -> bool:
        """Run a step by its graph, which is captured if necessary; return ``False`` if that is not possible."""
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
        recorded = self._recorder.attempt(lambda: record(lambda: self._do(rows, items), pool=self._pool()))
        if recorded is None:
            self._optimizer.clear_gradients()
            return False
        self._graphs[size] = recorded, items
        return True

    def _do(self, rows: StaticRows, chosen: Tensor) -> None:
        """Run a step on these items and add its metrics to the sums."""
        meter = Meter()
        self._step(self._gather(rows, chosen), meter)
        values = torch.stack(list(meter.epoch_sums.values()))
        if self._sums is None:
            self._names, self._sums = list(meter.epoch_sums), torch.zeros_like(values)
        self._sums.add_(values)

    def _gather(self, rows: StaticRows, chosen: Tensor) -> TensorDict:
        """Return a minibatch; items of -1 are padding, marked as invalid."""
        if self._validity_key is None:
            return rows.gather(chosen)
        batch = rows.gather(chosen.clamp(min=0))
        batch[self._validity_key] = batch[self._validity_key] & (chosen >= 0)
        return batch

    def _load(self, minibatches: Minibatches) -> StaticRows:
        """Copy the data of an update to the addresses that the graphs read."""
        recorder, rows = self._recorder, self._rows
        if recorder.possible and self._optimizer.precision == "fp16":
            recorder.give_up("the loss scale of fp16 depends on what came before; bf16 needs none")
        if rows is not None and self._loaded is minibatches:
            return rows
        if rows is None or not recorder.possible or not rows.take(minibatches):
            self._rows = rows = StaticRows(minibatches, own=recorder.possible and rows is not None)
            self._discard()
        self._loaded = minibatches
        return rows
