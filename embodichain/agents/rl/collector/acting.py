"""Runs a collector's policy: by calling it or, on a GPU, by replaying CUDA graphs of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import repeat
from typing import Any, Generic, TypeVar

import torch
from tensordict import TensorDictBase
from torch import Tensor

from embodichain.agents.rl.buffer.rollout_buffer import RolloutBuffer
from embodichain.agents.rl.collector.base import PolicyStep
from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.utils.tensordicts import Observation, sorted_leaves
from embodichain.errors import EmbodiChainError, PolicyContractError
from embodichain.utils.cuda_graphs import WARM_UP, Recorded, Recorder, copy_together, record, timed_convolutions

Result = TypeVar("Result")


class Decider:
    """Computes actions and values; on a GPU, a policy without recurrent state is captured as CUDA graphs.

    If a policy cannot be captured, it runs eagerly and the log says why. Observations of other shapes run eagerly, too.
    Weights must keep their addresses during a rollout, so call ``refresh`` before each.
    """

    def __init__(self, policy: Policy, device: torch.device) -> None:
        policy.check()
        self._policy = policy
        self.records = can_record(policy, device)
        """Whether CUDA graphs are used."""
        self._act: _Replayed[tuple[Any, ...]]
        self._act = _Replayed(policy.decide if policy.has_decision else policy.act, policy)
        self._choose: _Replayed[tuple[Tensor, Tensor]] = _Replayed(policy.choose, policy)
        self._value: _Replayed[Tensor] = _Replayed(policy.state_value, policy)
        self._all: tuple[_Replayed[Any], ...] = (self._act, self._choose, self._value)
        self._addresses = _addresses_of(policy)
        self._check = OutputCheck(policy)
        self._noise: Tensor | None = None  # exploration noise of all envs, for policies with noise_steps
        self._noise_age = 0

    @contextmanager
    def exploring(self) -> Iterator[None]:
        """Inside the block, keep the policy's exploration noise for ``noise_steps`` steps."""
        self._noise, self._noise_age = None, 0
        try:
            yield
        finally:
            self._noise = None
            self._policy.hold_noise(None)

    def renew_noise(self, num_envs: int) -> None:
        """Draw new exploration noise if ``noise_steps`` have passed; call it before the decisions of each step."""
        interval = self._policy.noise_steps
        if interval is not None and (self._noise is None or (interval and self._noise_age % interval == 0)):
            self._noise = self._policy.draw_noise(num_envs)
        self._noise_age += 1

    def decide(
        self, obs: Observation, state: Tensor | None, deferred: bool, kept: bool, rows: slice = slice(None)
    ) -> PolicyStep:
        """Return the policy's decision for the envs ``rows``.

        ``deferred`` skips values. ``kept`` copies the outputs, which the next call may otherwise overwrite.
        """
        if self._noise is not None:
            self._policy.hold_noise(self._noise[rows])
        parts: tuple[Any, ...]
        if self.records:
            parts = self._choose(obs) if deferred else self._act(obs)
        elif deferred:
            parts = self._policy.choose(obs)
        else:
            parts = self._policy.decide(obs) if self._policy.has_decision else self._policy.act(obs, state)
        if self._check.is_due:
            self._check(obs.shape[0], parts, deferred)
        if self.records and kept:
            parts = tuple(None if part is None else part.clone() for part in parts)
        if deferred:
            return PolicyStep(obs, state, parts[0], parts[1], None)
        if self._policy.has_decision:
            return PolicyStep(obs, None, parts[0], parts[1], parts[2], decision=parts[3])
        return PolicyStep(obs, state, *parts)

    def value(self, obs: Observation, state: Tensor | None) -> Tensor:
        """Return the values ``[envs]`` of an observation."""
        return self._value(obs).clone() if self.records else self._policy.state_value(obs, state)

    def refresh(self) -> None:
        """Discard the CUDA graphs if the weights have moved in memory; call it between two rollouts."""
        addresses = _addresses_of(self._policy) if self.records else self._addresses
        if addresses != self._addresses:
            self._addresses = addresses
            for replayed in self._all:
                replayed.forget("its weights have moved")

    def record(self, obs: Observation | None) -> None:
        """Capture graphs for observations like ``obs`` now, and none later; random generators are left unchanged."""
        if obs is not None and self.records and not self._act.is_final:
            deciding: _Replayed[Any] = self._choose if self._policy.values_apart else self._act
            own = self._policy.generator
            own_state = None if own is None else own.get_state()
            with torch.cuda.device(self._policy.device), torch.random.fork_rng([torch.cuda.current_device()]):
                drawn = torch.cuda.get_rng_state()
                deciding.warm_up(obs)
                if own is not None and not torch.equal(torch.cuda.get_rng_state(), drawn):
                    deciding.recorder.give_up("it draws random numbers from the generator that others use meanwhile")
                deciding.record(obs, torch.cuda.Stream(priority=-1))
            if own is not None and own_state is not None:
                own.set_state(own_state)
        for replayed in self._all:
            replayed.is_final = True


class OutputCheck:
    """Raises ``PolicyContractError`` if a policy's output violates the contract of ``Policy``.

    The first output is checked. If decisions belong to it, the later ones are compared with it: their entries, shapes
    and dtypes must stay the same, as rollouts are stored in memory like the first. No value is read, so nothing
    synchronises with a GPU.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.is_due = True
        """Whether the next output has to be checked."""
        self._layouts: dict[int, _Layout] = {}  # by number of rows, as groups of envs may differ in it
        self._last: tuple[Any, ...] | None = None

    def __call__(self, rows: int, parts: tuple[Any, ...], deferred: bool) -> None:
        """Check the output ``parts`` for ``rows`` observations; ``deferred`` if it comes from ``choose``."""
        if parts is self._last:  # the memory of a CUDA graph, whose layout does not change
            return
        is_known = rows in self._layouts and _is_alike(parts, self._layouts[rows])
        if not is_known and (problem := self._problem(rows, parts, deferred) or self._change(rows, parts)):
            raise PolicyContractError(f"{type(self._policy).__name__}.{problem}")
        self.is_due = self._policy.has_decision
        self._last = parts if self.is_due else None

    def _problem(self, rows: int, parts: Any, deferred: bool) -> str | None:
        """Return what violates the contract, beginning with the name of the method."""
        policy = self._policy
        names: tuple[str, ...] = ("action", "log_prob", "value", "state")
        method = "get_action" if type(policy).act is Policy.act else "act"
        if deferred:
            method, names = "choose", names[:2]
        elif policy.has_decision:
            method, names = "decide", (*names[:3], "decision")
        elif method == "get_action":  # act added the state
            parts, names = parts[:-1], names[:3]
        if not isinstance(parts, tuple) or not (len(parts) == len(names) or (method == "act" and len(parts) == 3)):
            got = f"{len(parts)} values" if isinstance(parts, tuple) else _named(parts)
            return f"{method} returned {got}, expected ({', '.join(names)})"
        shapes: dict[str, list[list[int]]] = {"action": [], "log_prob": self._log_prob_shapes(rows)}
        shapes |= {"value": [[rows], []]} if policy.has_critic else {}
        for name, part in zip(names, parts, strict=False):
            if name not in shapes:
                continue
            expected = " or ".join(map(str, shapes[name])).replace("-1", "factors") or f"[{rows}, ...]"
            if not isinstance(part, Tensor):
                return f"{method} returned {_named(part)} as {name}, expected a tensor {expected}"
            known = [[*shape[:-1], part.shape[-1]] if -1 in shape and part.ndim else shape for shape in shapes[name]]
            if list(part.shape) not in known if known else part.shape[:1] != (rows,):
                return f"{method} returned {name} of shape {list(part.shape)}, expected {expected}"
        return self._decision_problem(rows, parts[3]) if method == "decide" else None

    def _log_prob_shapes(self, rows: int) -> list[list[int]]:
        """Return the shapes that log-probabilities may have; -1 is any number of factors."""
        size = self._policy.chunk_size
        whole = [[rows], [rows, size]] if size > 1 else [[rows]]
        return whole if self._policy.factors == () else [*whole, *([rows, n, -1] for n in sorted({1, size}))]

    @staticmethod
    def _decision_problem(rows: int, decision: Any) -> str | None:
        expected = f"expected a TensorDict of batch [{rows}]"
        if not isinstance(decision, TensorDictBase):
            return f"decide returned {_named(decision)} as decision, {expected}"
        if decision.batch_size[:1] != (rows,):
            return f"decide returned a decision of batch {list(decision.batch_size)}, {expected}"
        for path, leaf in sorted_leaves(decision):
            if not isinstance(leaf, Tensor):
                return f"decide returned a decision with {_named(leaf)} as {'/'.join(path)!r}, expected tensors only"
        return None

    def _change(self, rows: int, parts: tuple[Any, ...]) -> str | None:
        """Return how an output with a decision differs from the first one; keep the layout of the first."""
        if not self._policy.has_decision:
            return None
        layout = _layout(parts)
        first = next(iter(self._layouts.values()), layout)
        for name, shape, former in zip(("action", "log_prob"), layout[:2], first[:2], strict=True):
            if shape[1:] != former[1:]:
                expected = [rows, *former[1:]]
                return f"decide returned {name} of shape {list(shape)}, expected {expected}, as in the first step"
        now, then = _described(layout[2], rows), _described(first[2], rows)
        if now != then:
            return f"decide returned a decision of {now}, expected {then}, as in the first step"
        self._layouts[rows] = layout
        return None


_Layout = tuple[torch.Size, torch.Size, dict[str | tuple[str, ...], tuple[torch.Size, torch.dtype]]]
"""Shapes of action and log-probability; shape and dtype of each entry of a decision."""


def _layout(parts: tuple[Any, ...]) -> _Layout:
    entries = parts[3].items(include_nested=True, leaves_only=True)
    return parts[0].shape, parts[1].shape, {name: (leaf.shape, leaf.dtype) for name, leaf in entries}


def _is_alike(parts: Any, layout: _Layout) -> bool:
    """Return whether an output has this layout; the cheap check of every step."""
    if not isinstance(parts, tuple) or len(parts) != 4 or not isinstance(parts[3], TensorDictBase):
        return False
    return all(isinstance(part, Tensor) for part in parts[:3]) and _layout(parts) == layout


def _described(entries: Mapping[Any, tuple[torch.Size, torch.dtype]], rows: int) -> dict[str, str]:
    """Return the entries of a decision for a message."""
    return {
        name if isinstance(name, str) else "/".join(name): f"{str(dtype).removeprefix('torch.')} {[rows, *shape[1:]]}"
        for name, (shape, dtype) in sorted(entries.items(), key=str)
    }


def _named(value: Any) -> str:
    """Return None, or the type of a value with its article."""
    kind = type(value).__name__
    return "None" if value is None else f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"


def can_record(policy: Policy, device: torch.device) -> bool:
    """Return whether a policy may be captured as CUDA graphs."""
    return device.type == "cuda" == policy.device.type and not policy.is_recurrent and policy.noise_steps is None


class _Replayed(Generic[Result]):
    """A function of an observation, replayed as a CUDA graph; the next call may overwrite its result."""

    def __init__(self, function: Callable[[Observation], Result], policy: Policy) -> None:
        self._function, self._policy = function, policy
        self.recorder = Recorder("the policy acts")
        self.is_final = False
        """Whether no more graphs may be captured, so that the present one is the last."""
        self._recorded: Recorded[Result] | None = None
        self.forget("")

    def forget(self, reason: str) -> None:
        """Discard the graph; if no other may be captured, log the reason."""
        if self.is_final and self._recorded is not None:
            self.recorder.give_up(reason)
        self.recorder.calls = 0
        self._mode = self._policy.training
        self._recorded, self._inputs = None, list[Tensor]()

    def __call__(self, obs: Observation) -> Result:
        if self._mode != self._policy.training:  # the graph holds dropout etc. as captured
            self.forget("its mode has changed")
        if self._recorded is None and self.recorder.possible and not self.is_final:
            if not self.recorder.ready:
                with timed_convolutions:
                    return self.recorder.warm_up(lambda: self._function(obs))
            self.record(obs)
        leaves = _leaves(obs)
        if self._recorded is None or _shapes(leaves) != _shapes(self._inputs):
            return self._function(obs)
        copy_together(self._inputs, leaves)
        return self._recorded.replay()

    def warm_up(self, obs: Observation) -> None:
        """Run the warm-up calls that capturing needs."""
        self.recorder.calls = 0
        try:
            with timed_convolutions:
                for _ in range(WARM_UP):
                    self.recorder.warm_up(lambda: self._function(obs))
        except (EmbodiChainError, LookupError, RuntimeError, TypeError, ValueError) as error:
            # A placeholder observation may be invalid for the policy.
            self.recorder.give_up(f"{type(error).__name__}: {error}")

    def record(self, obs: Observation, stream: torch.cuda.Stream | None = None) -> None:
        """Capture a call, unless that has failed before."""
        if not self.recorder.possible:
            return
        own, generator = obs.clone(), self._policy.generator
        with torch.cuda.device(self._policy.device), timed_convolutions:
            self._recorded = self.recorder.attempt(
                lambda: record(lambda: self._function(own), stream=stream, generator=generator)
            )
        self._inputs, self._mode = _leaves(own), self._policy.training


def _addresses_of(policy: Policy) -> list[int]:
    return [tensor.data_ptr() for tensor in (*policy.parameters(), *policy.buffers())]


def _shapes(leaves: list[Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(leaf.shape, leaf.dtype) for leaf in leaves]


def _leaves(obs: Observation) -> list[Tensor]:
    return [obs] if isinstance(obs, Tensor) else [leaf for _, leaf in sorted_leaves(obs)]


CPU_ROWS, GPU_ROWS = 2048, 65_536
"""Maximum number of observations per forward pass of the critic: bounds memory, and fits the cache of a CPU."""


class DeferredValues:
    """Computes the values of a rollout, at its end if the policy allows it (``values_apart``).

    With the weights at the end, it evaluates all observations, the one after the last step, and each
    ``final_observation`` at a time limit. Other policies compute the value together with the action.
    """

    def __init__(
        self,
        policy: Policy,
        device: torch.device,
        value_now: Callable[[Observation, Tensor | None], Tensor],
        can_read_flags: bool,
    ) -> None:
        """Compute values on ``device``; ``value_now`` computes one between two steps, if it cannot be deferred.

        ``can_read_flags``: whether flags can be read without synchronising with a device. If not, the final
        observations of all envs are kept until the end, or evaluated at once if they would take much memory.
        """
        self._policy, self._device, self._value_now, self.can_read_flags = policy, device, value_now, can_read_flags
        self.begin()

    def begin(self) -> None:
        """Start a rollout."""
        self.deferred = self._policy.values_apart
        """Whether values are computed at the end of the rollout."""
        self._cut: list[Observation] = []
        self._cut_states: list[Tensor] = []
        self._finals: list[Observation] = []
        self._final_values: list[Tensor] = []

    def keep(self, cut: Tensor, final: Observation, state: Tensor | None) -> None:
        """Keep the final observations ``final`` of the envs that a time limit ended, ``cut`` ``[num_envs]``."""
        if not self._policy.has_critic:
            return
        final = self._policy.seen_by_critic(final)
        if self.can_read_flags:
            if cut.any() if cut.is_cuda else cut.numpy().any():  # numpy takes a third of torch's time on a few flags
                rows = cut.nonzero().squeeze(-1)
                self._cut.append(final[rows.to(final.device)].to(self._device))
                self._cut_states += [] if state is None else [state[rows]]
        elif self.deferred and not _has_images(final):
            self._finals.append(final.to(self._device))
        else:
            self._final_values.append(self._value_now(final.to(self._device), state))

    def finish(self, buffer: RolloutBuffer, obs: Observation, state: Tensor | None) -> None:
        """Write the values of a rollout; ``obs`` and the recurrent ``state`` are those after its last step."""
        storage = buffer.full_storage("collect()")
        everywhere = storage["value"]
        if not self._policy.has_critic:
            zeros = torch.zeros_like(everywhere)
            buffer.finalize(None, zeros, value=zeros)
            return
        obs, kept = self._policy.seen_by_critic(obs), self._policy.seen_by_critic(storage["observation"])
        values = self._values(kept.flatten(0, 1), None).view_as(everywhere) if self.deferred else None
        if self.can_read_flags:
            states = None if state is None else torch.cat([state, *self._cut_states])
            last, final = self._values(torch.cat([obs, *self._cut]), states).tensor_split([obs.shape[0]])
        else:  # the values of all envs, as selecting would synchronise
            last = self._policy.state_value(obs, state)
            finals = [self._values(torch.cat(self._finals), None)] if self._finals else self._final_values
            final = torch.cat(finals).view_as(everywhere)
        buffer.finalize(last, final, value=values)
        self.begin()

    def _values(self, obs: Observation, state: Tensor | None) -> Tensor:
        """Return the values ``[rows]`` of observations, in several passes if there are many."""
        size = CPU_ROWS if self._device.type == "cpu" else GPU_ROWS
        states = repeat(None) if state is None else state.split(size)
        parts = [self._policy.state_value(part, own) for part, own in zip(obs.split(size), states, strict=False)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _has_images(obs: Observation) -> bool:
    return not isinstance(obs, Tensor) and any(leaf.dtype == torch.uint8 for _, leaf in sorted_leaves(obs))
