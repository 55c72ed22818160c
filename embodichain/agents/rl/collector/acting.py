"""How a collector lets its policy decide and value: by calling it, or, on a GPU, by replaying CUDA graphs of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from embodichain.agents.rl.buffer.rollout_buffer import RolloutBuffer
from embodichain.agents.rl.collector.base import PolicyStep
from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.utils.tensordicts import Observation, sorted_leaves
from embodichain.errors import EmbodiChainError
from embodichain.utils.cuda_graphs import WARM_UP, Recorded, Recorder, copy_together, record

Result = TypeVar("Result")


class Decider:
    """Calls a policy; on a GPU, one without recurrent state is recorded after a few calls and replayed in one launch.

    What cannot be recorded runs as usual, and the log says why; so do observations of other shapes. Weights must keep
    their addresses during a rollout: ``refresh`` comes before it.
    """

    def __init__(self, policy: Policy, device: torch.device) -> None:
        policy.check()
        self._policy = policy
        self.records = can_record(policy, device)
        """Whether decisions are recorded at all."""
        self._act: _Replayed[tuple[Any, ...]]
        self._act = _Replayed(policy.decide if policy.has_decision else lambda obs: policy.act(obs)[:3], policy)
        self._choose: _Replayed[tuple[Tensor, Tensor]] = _Replayed(policy.choose, policy)
        self._value: _Replayed[Tensor] = _Replayed(policy.state_value, policy)
        self._all: tuple[_Replayed[Any], ...] = (self._act, self._choose, self._value)
        self._addresses = _addresses_of(policy)
        self._noise: Tensor | None = None  # what a policy with noise_steps explores by, of all envs
        self._noise_age = 0

    @contextmanager
    def exploring(self) -> Iterator[None]:
        """Let the policy, inside the block, keep exploration noise as it wants to (``noise_steps``)."""
        self._noise, self._noise_age = None, 0
        try:
            yield
        finally:
            self._noise = None
            self._policy.hold_noise(None)

    def renew_noise(self, num_envs: int) -> None:
        """Draw the noise that is kept from this step on, if it is time to; it comes before the decisions of a step."""
        kept_for = self._policy.noise_steps
        if kept_for is not None and (self._noise is None or (kept_for and self._noise_age % kept_for == 0)):
            self._noise = self._policy.draw_noise(num_envs)
        self._noise_age += 1

    def decide(
        self, obs: Observation, state: Tensor | None, deferred: bool, kept: bool, rows: slice = slice(None)
    ) -> PolicyStep:
        """Let the policy choose for the envs ``rows``; ``deferred`` leaves values for later.

        ``kept``: the decision is needed after the next one.
        """
        if self._noise is not None:
            self._policy.hold_noise(self._noise[rows])
        if not self.records:
            if deferred:
                return PolicyStep(obs, state, *self._policy.choose(obs), None)
            if self._policy.has_decision:
                return _with_decision(obs, self._policy.decide(obs))
            return PolicyStep(obs, state, *self._policy.act(obs, state))
        parts: tuple[Any, ...] = self._choose(obs) if deferred else self._act(obs)
        if kept:
            parts = tuple(part.clone() for part in parts)
        if self._policy.has_decision:
            return _with_decision(obs, parts)
        return PolicyStep(obs, state, parts[0], parts[1], None if deferred else parts[2])

    def value(self, obs: Observation, state: Tensor | None) -> Tensor:
        """Value an observation between two steps."""
        return self._value(obs).clone() if self.records else self._policy.state_value(obs, state)

    def refresh(self) -> None:
        """Forget, between two rollouts, what was recorded if the weights have moved since."""
        addresses = _addresses_of(self._policy) if self.records else self._addresses
        if addresses != self._addresses:
            self._addresses = addresses
            for replayed in self._all:
                replayed.forget("its weights have moved")

    def record(self, obs: Observation | None) -> None:
        """Record decisions for such observations now, and nothing later; random generators stay as they are."""
        if obs is not None and self.records and not self._act.settled:
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
            replayed.settled = True


def _with_decision(obs: Observation, parts: tuple[Any, ...]) -> PolicyStep:
    action, log_prob, value, decision = parts
    return PolicyStep(obs, None, action, log_prob, value, decision=decision)


def can_record(policy: Policy, device: torch.device) -> bool:
    """Tell whether a policy that acts on a device may be recorded."""
    return device.type == "cuda" == policy.device.type and not policy.is_recurrent and policy.noise_steps is None


class _Replayed(Generic[Result]):
    """One function of an observation; what a call returned may be overwritten by the next."""

    def __init__(self, function: Callable[[Observation], Result], policy: Policy) -> None:
        self._function, self._policy = function, policy
        self.recorder = Recorder("the policy acts")
        self.settled = False
        """Whether nothing is recorded any more."""
        self._recorded: Recorded[Result] | None = None
        self.forget("")

    def forget(self, reason: str) -> None:
        """Let go of the graph; if none can be recorded any more, say why."""
        if self.settled and self._recorded is not None:
            self.recorder.give_up(reason)
        self.recorder.calls = 0
        self._mode = self._policy.training
        self._recorded, self._inputs = None, list[Tensor]()

    def __call__(self, obs: Observation) -> Result:
        if self._mode != self._policy.training:  # dropout and the like are recorded as they were
            self.forget("its mode has changed")
        if self._recorded is None and self.recorder.possible and not self.settled:
            if not self.recorder.ready:
                return self.recorder.warm_up(lambda: self._function(obs))
            self.record(obs)
        leaves = _leaves(obs)
        if self._recorded is None or _shapes(leaves) != _shapes(self._inputs):
            return self._function(obs)
        copy_together(self._inputs, leaves)
        return self._recorded.replay()

    def warm_up(self, obs: Observation) -> None:
        """Call it as often as recording needs."""
        self.recorder.calls = 0
        try:
            for _ in range(WARM_UP):
                self.recorder.warm_up(lambda: self._function(obs))
        except (EmbodiChainError, LookupError, RuntimeError, TypeError, ValueError) as error:
            # The observation may be none that the policy would ever be given.
            self.recorder.give_up(f"{type(error).__name__}: {error}")

    def record(self, obs: Observation, stream: torch.cuda.Stream | None = None) -> None:
        """Record a call, unless that was found impossible."""
        if not self.recorder.possible:
            return
        own, generator = obs.clone(), self._policy.generator
        with torch.cuda.device(self._policy.device):
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
"""Observations valued at a time, which bounds the memory for it; on a CPU their features stay in the cache."""


class DeferredValues:
    """Computes the values of a rollout, at its end wherever the policy allows it (``values_apart``).

    Two passes by the weights of the end value every observation, the one after the last step, and each
    ``final_observation`` at a time limit. Other policies value each observation as they act on it.
    """

    def __init__(
        self,
        policy: Policy,
        device: torch.device,
        value_now: Callable[[Observation, Tensor | None], Tensor],
        may_look: bool,
    ) -> None:
        """Value observations on a device; ``value_now`` does so between two steps, where it cannot be put off.

        ``may_look`` tells whether flags can be looked at without waiting for a device. Where they cannot, the final
        observations of all envs are kept until the end, or valued at once if that would take much memory.
        """
        self._policy, self._device, self._value_now, self.may_look = policy, device, value_now, may_look
        self.begin()

    def begin(self) -> None:
        """Begin a rollout."""
        self.deferred = self._policy.values_apart
        """Whether nothing is valued while acting."""
        self._cut: list[Observation] = []
        self._cut_states: list[Tensor] = []
        self._finals: list[Observation] = []
        self._final_values: list[Tensor] = []

    def keep(self, cut: Tensor, final: Observation, state: Tensor | None) -> None:
        """Set aside the final observations of a step in which a time limit cut the episodes of some envs."""
        if not self._policy.has_critic:
            return
        final = self._policy.seen_by_critic(final)
        if self.may_look:
            if cut.any() if cut.is_cuda else cut.numpy().any():  # numpy's call on a few flags costs a third of torch's
                rows = cut.nonzero().squeeze(-1)
                self._cut.append(final[rows.to(final.device)].to(self._device))
                self._cut_states += [] if state is None else [state[rows]]
        elif self.deferred and not _has_images(final):
            self._finals.append(final.to(self._device))
        else:
            self._final_values.append(self._value_now(final.to(self._device), state))

    def finish(self, buffer: RolloutBuffer, obs: Observation, state: Tensor | None) -> None:
        """Complete the values of a rollout; ``obs`` and the recurrent ``state`` are those after its last step."""
        storage = buffer.full_storage("collect()")
        everywhere = storage["value"]
        if not self._policy.has_critic:
            zeros = torch.zeros_like(everywhere)
            buffer.finalize(None, zeros, value=zeros)
            return
        obs, kept = self._policy.seen_by_critic(obs), self._policy.seen_by_critic(storage["observation"])
        values = self._values(kept.flatten(0, 1), None).view_as(everywhere) if self.deferred else None
        if self.may_look:
            states = None if state is None else torch.cat([state, *self._cut_states])
            last, final = self._values(torch.cat([obs, *self._cut]), states).tensor_split([obs.shape[0]])
        else:  # all of them: to find those that count would mean to wait
            last = self._policy.state_value(obs, state)
            finals = [self._values(torch.cat(self._finals), None)] if self._finals else self._final_values
            final = torch.cat(finals).view_as(everywhere)
        buffer.finalize(last, final, value=values)
        self.begin()

    def _values(self, obs: Observation, state: Tensor | None) -> Tensor:
        """Return the values ``[rows]`` of observations, some at a time."""
        size = CPU_ROWS if self._device.type == "cpu" else GPU_ROWS
        states = repeat(None) if state is None else state.split(size)
        parts = [self._policy.state_value(part, own) for part, own in zip(obs.split(size), states, strict=False)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _has_images(obs: Observation) -> bool:
    return not isinstance(obs, Tensor) and any(leaf.dtype == torch.uint8 for _, leaf in sorted_leaves(obs))
