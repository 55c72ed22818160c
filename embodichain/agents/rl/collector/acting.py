"""How a collector lets its policy decide: by calling it, or, on a GPU, by replaying what was recorded of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from embodichain.agents.rl.collector.base import Decision
from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.utils.observations import Observation, sorted_leaves
from embodichain.utils.cuda_graphs import WARM_UP, Recorded, Recorder, copy_together, record

Result = TypeVar("Result")


class GraphedPolicy:
    """Acts and values like a policy without recurrent state, by replaying CUDA graphs: one launch instead of thirty.

    What ``act``, ``choose`` or ``state_value`` returned is overwritten by its next call. What cannot be recorded runs
    as usual, and the log says why, and so do observations of other shapes than the recorded ones. The policy's weights
    may change, but must keep their addresses during a rollout: ``refresh`` comes before it.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.act: _Replayed[tuple[Tensor, Tensor, Tensor]] = _Replayed(lambda obs: policy.act(obs)[:3], policy)
        self.choose: _Replayed[tuple[Tensor, Tensor]] = _Replayed(policy.choose, policy)
        self.state_value: _Replayed[Tensor] = _Replayed(policy.state_value, policy)
        self._all: tuple[_Replayed[Any], ...] = (self.act, self.choose, self.state_value)
        self._addresses = _addresses_of(policy)

    def refresh(self) -> None:
        """Forget what was recorded if the weights have moved."""
        addresses = _addresses_of(self._policy)
        if addresses != self._addresses:
            self._addresses = addresses
            for replayed in self._all:
                replayed.forget("its weights have moved")

    def settle(self) -> None:
        """Record nothing from now on: another thread uses the GPU, too, and recording would disturb it."""
        for replayed in self._all:
            replayed.settled = True

    def record(self, obs: Observation) -> None:
        """Record a decision now, and nothing ever after; random generators stay as they are. Once is enough."""
        if self.act.settled:
            return
        deciding: _Replayed[Any] = self.choose if self._policy.values_apart else self.act
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
        self.settle()


class _Replayed(Generic[Result]):
    """One function of an observation."""

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
        if self._recorded is None or not _alike(leaves, self._inputs):
            return self._function(obs)
        copy_together(self._inputs, leaves)
        return self._recorded.replay()

    def warm_up(self, obs: Observation) -> None:
        """Call it as often as recording needs."""
        self.recorder.calls = 0
        try:
            for _ in range(WARM_UP):
                self.recorder.warm_up(lambda: self._function(obs))
        except Exception as error:  # noqa: BLE001 - the observation may be none that it would ever see
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
        self._inputs = _leaves(own)


def _addresses_of(policy: Policy) -> list[int]:
    """Return the addresses of the weights."""
    return [tensor.data_ptr() for tensor in (*policy.parameters(), *policy.buffers())]


def _alike(leaves: list[Tensor], others: list[Tensor]) -> bool:
    if len(leaves) != len(others):
        return False
    pairs = zip(leaves, others, strict=True)
    return all(leaf.shape == other.shape and leaf.dtype == other.dtype for leaf, other in pairs)


def _leaves(obs: Observation) -> list[Tensor]:
    return [obs] if isinstance(obs, Tensor) else [leaf for _, leaf in sorted_leaves(obs)]


class Decider:
    """Calls a policy; on a GPU, one without recurrent state is recorded after a few calls and replayed from then on."""

    def __init__(self, policy: Policy, device: torch.device) -> None:
        self._policy = policy
        on_gpu = device.type == "cuda" == policy.device.type and not policy.is_recurrent
        self._graphs = GraphedPolicy(policy) if on_gpu else None

    @property
    def records(self) -> bool:
        """Whether decisions are recorded at all."""
        return self._graphs is not None

    def decide(self, obs: Observation, state: Tensor | None, deferred: bool, kept: bool) -> Decision:
        """Let the policy choose actions for an observation.

        ``deferred`` leaves the values for later; ``kept`` says that the decision is needed after the next one is made.
        """
        if self._graphs is None:
            if deferred:
                return Decision(obs, state, *self._policy.choose(obs), None, None)
            return Decision(obs, state, *self._policy.act(obs, state))
        parts: tuple[Tensor, ...] = self._graphs.choose(obs) if deferred else self._graphs.act(obs)
        if kept:
            parts = tuple(part.clone() for part in parts)
        return Decision(obs, state, parts[0], parts[1], None if deferred else parts[2], None)

    def value(self, obs: Observation, state: Tensor | None) -> Tensor:
        """Value an observation between two steps."""
        if self._graphs is None:
            return self._policy.state_value(obs, state)
        return self._graphs.state_value(obs).clone()

    def refresh(self) -> None:
        """Look whether what was recorded still holds, between two rollouts."""
        if self._graphs is not None:
            self._graphs.refresh()

    def record(self, obs: Observation | None) -> None:
        """Record decisions for such observations now, and nothing later: from now on others use the device, too."""
        if self._graphs is None:
            return
        if obs is None:
            self._graphs.settle()
        else:
            self._graphs.record(obs)
