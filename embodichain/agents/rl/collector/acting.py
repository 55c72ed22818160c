"""Runs a collector's policy: by calling it or, on a GPU, by replaying CUDA graphs of it."""

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
        self._act = _Replayed(policy.decide if policy.has_decision else lambda obs: policy.act(obs)[:3], policy)
        self._choose: _Replayed[tuple[Tensor, Tensor]] = _Replayed(policy.choose, policy)
        self._value: _Replayed[Tensor] = _Replayed(policy.state_value, policy)
        self._all: tuple[_Replayed[Any], ...] = (self._act, self._choose, self._value)
        self._addresses = _addresses_of(policy)
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
    """Return whether a policy may be captured as CUDA graphs."""
    return device.type == "cuda" == policy.device.type and not policy.is_recurrent and policy.noise_steps is None


class _Replayed(Generic[Result]):
    """A function of an observation, replayed as a CUDA graph; the next call may overwrite its result."""

    def __init__(self, function: Callable[[Observation], Result], policy: Policy) -> None:
        self._function, self._policy = function, policy
        self.recorder = Recorder("the policy acts")
        self.settled = False
        """Whether no more graphs may be captured."""
        self._recorded: Recorded[Result] | None = None
        self.forget("")

    def forget(self, reason: str) -> None:
        """Discard the graph; if no other may be captured, log the reason."""
        if self.settled and self._recorded is not None:
            self.recorder.give_up(reason)
        self.recorder.calls = 0
        self._mode = self._policy.training
        self._recorded, self._inputs = None, list[Tensor]()

    def __call__(self, obs: Observation) -> Result:
        if self._mode != self._policy.training:  # the graph holds dropout etc. as captured
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
        """Run the warm-up calls that capturing needs."""
        self.recorder.calls = 0
        try:
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
        may_look: bool,
    ) -> None:
        """Compute values on ``device``; ``value_now`` computes one between two steps, if it cannot be deferred.

        ``may_look``: whether flags can be read without synchronising with a device. If not, the final observations of
        all envs are kept until the end, or evaluated at once if they would take much memory.
        """
        self._policy, self._device, self._value_now, self.may_look = policy, device, value_now, may_look
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
        if self.may_look:
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
        if self.may_look:
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
