"""How a collector lets its policy decide: by calling it, or, on a GPU, by replaying what was recorded of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from embodichain.agents.rl.collector.base import Decision
from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.utils.observations import Observation, sorted_leaves
from embodichain.agents.rl.utils.random_state import get_random_state, set_random_state
from embodichain.utils.cuda_graphs import copy_together, recording, refusing_to_wait

# MERGED graphed: A policy's decisions as CUDA graphs: one launch instead of some thirty, as often as there are
# environment steps.


Result = TypeVar("Result")
_LOG = logging.getLogger(__name__)
_WARM_UP = 3  # ordinary calls before recording; in the last it is found out whether the policy waits for the device


class GraphedPolicy:
    """Acts and values like a policy without memory, by replaying graphs.

    What a method returns is overwritten by the next call of that method. What cannot be recorded runs as usual, and the
    log says why, and so do observations of other shapes than the recorded ones. The policy's weights may change, but
    must stay where they are during a rollout: ``refresh`` comes before it.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._act: _Replayed[tuple[Tensor, Tensor, Tensor]] = _Replayed(lambda obs: policy.act(obs)[:3], policy)
        self._choose: _Replayed[tuple[Tensor, Tensor]] = _Replayed(policy.choose, policy)
        self._value: _Replayed[Tensor] = _Replayed(policy.state_value, policy)
        self._all: tuple[_Replayed[Any], ...] = (self._act, self._choose, self._value)
        self._places = _places_of(policy)

    def act(self, obs: Observation) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``(action, log_prob, value)``."""
        return self._act(obs)

    def choose(self, obs: Observation) -> tuple[Tensor, Tensor]:
        """Return ``(action, log_prob)``."""
        return self._choose(obs)

    def state_value(self, obs: Observation) -> Tensor:
        """Return the value ``[batch]`` of an observation."""
        return self._value(obs)

    def refresh(self) -> None:
        """Forget what was recorded if the weights lie elsewhere by now."""
        places = _places_of(self._policy)
        if places != self._places:
            self._places = places
            for replayed in self._all:
                replayed.forget("its weights lie elsewhere now")

    def settle(self) -> None:
        """Record nothing from now on: another thread uses the GPU, too, and recording would disturb it."""
        for replayed in self._all:
            replayed.settled = True

    def record(self, obs: Observation, apart: bool) -> None:
        """Record a decision now, and nothing ever after; random generators stay as they are. Once is enough."""
        if self._act.settled:
            return
        deciding: _Replayed[Any] = self._choose if apart else self._act
        own, common = self._policy.generator, get_random_state()
        own_state = None if own is None else own.get_state()
        try:
            with torch.cuda.device(self._policy.device):
                drawn = torch.cuda.get_rng_state()
                deciding.warm_up(obs)
                if own is not None and not torch.equal(torch.cuda.get_rng_state(), drawn):
                    deciding.give_up("it draws random numbers from the generator that others use meanwhile")
                # A graph's kernels have the priority of the stream they were recorded on, wherever they are replayed.
                deciding.record(obs, torch.cuda.Stream(priority=-1))
        finally:
            set_random_state(common)
            if own is not None and own_state is not None:
                own.set_state(own_state)
        self.settle()


class _Replayed(Generic[Result]):
    """One function of an observation."""

    def __init__(self, function: Callable[[Observation], Result], policy: Policy) -> None:
        self._function, self._policy = function, policy
        self.settled = False
        """Whether nothing is recorded any more."""
        self._off = False
        self._graph: torch.cuda.CUDAGraph | None = None
        self.forget("")

    def forget(self, reason: str) -> None:
        """Let go of the graph; if none can be recorded any more, say why."""
        if self.settled and self._graph is not None:
            self.give_up(reason)
        self._calls = 0
        self._graph = None
        self._mode = self._policy.training
        self._obs: Observation | None = None
        self._inputs: list[Tensor] = []
        self._result: Any = None

    def __call__(self, obs: Observation) -> Result:
        if self._mode != self._policy.training:  # dropout and the like are recorded as they were
            self.forget("its mode has changed")
        if self._graph is None:
            if self._off or self.settled:
                return self._function(obs)
            self._calls += 1
            if self._calls < _WARM_UP:
                return self._function(obs)
            if self._calls == _WARM_UP:
                return self._check(obs)
            self.record(obs)
        leaves = _leaves(obs)
        if self._graph is None or not _alike(leaves, self._inputs):
            return self._function(obs)
        copy_together(self._inputs, leaves)
        self._graph.replay()
        return self._result

    def warm_up(self, obs: Observation) -> None:
        """Call it as often as recording needs."""
        try:
            for _ in range(_WARM_UP - 1):
                self._function(obs)
            self._check(obs)
        except Exception as error:  # noqa: BLE001 - the observation may be none that it would ever see
            self.give_up(f"{type(error).__name__}: {error}")

    def record(self, obs: Observation, stream: torch.cuda.Stream | None = None) -> None:
        """Record a call, unless that was found impossible."""
        if self._off:
            return
        self._obs = obs.clone()
        graph = torch.cuda.CUDAGraph()
        if self._policy.generator is not None:
            graph.register_generator_state(self._policy.generator)
        try:
            with torch.cuda.device(self._policy.device), recording(graph, stream=stream):
                self._result = self._function(self._obs)
        except RuntimeError as error:
            self.give_up(str(error) or type(error).__name__)
            return
        self._graph, self._inputs = graph, _leaves(self._obs)

    def give_up(self, reason: str) -> None:
        """Never record it, and say why."""
        self._off = True
        _LOG.warning("the policy acts without CUDA graphs, which costs speed: %s", reason.splitlines()[0])

    def _check(self, obs: Observation) -> Result:
        try:
            with refusing_to_wait():
                return self._function(obs)
        except RuntimeError as error:
            self.give_up(str(error) or type(error).__name__)
        return self._function(obs)


def _places_of(policy: Policy) -> list[int]:
    """Return where the weights lie."""
    return [tensor.data_ptr() for tensor in (*policy.parameters(), *policy.buffers())]


def _alike(leaves: list[Tensor], others: list[Tensor]) -> bool:
    if len(leaves) != len(others):
        return False
    pairs = zip(leaves, others, strict=True)
    return all(leaf.shape == other.shape and leaf.dtype == other.dtype for leaf, other in pairs)


def _leaves(obs: Observation) -> list[Tensor]:
    return [obs] if isinstance(obs, Tensor) else [leaf for _, leaf in sorted_leaves(obs)]


class Decider:
    """Calls a policy; on a GPU, one without memory is recorded after a few calls, and replayed from then on."""

    def __init__(self, policy: Policy, device: torch.device) -> None:
        self._policy = policy
        on_gpu = device.type == "cuda" == policy.device.type and not policy.is_recurrent
        self._graphs = GraphedPolicy(policy) if on_gpu else None

    @property
    def records(self) -> bool:
        """Whether decisions are recorded at all."""
        return self._graphs is not None

    def decide(self, obs: Observation, state: Tensor | None, apart: bool, kept: bool) -> Decision:
        """Let the policy choose actions for an observation.

        ``apart`` leaves the values for later; ``kept`` says that the decision is needed after the next one is made.
        """
        if self._graphs is None:
            if apart:
                return Decision(obs, state, *self._policy.choose(obs), None, None)
            return Decision(obs, state, *self._policy.act(obs, state))
        action, log_prob, value = (*self._graphs.choose(obs), None) if apart else self._graphs.act(obs)
        if kept:
            action, log_prob = action.clone(), log_prob.clone()
            value = None if value is None else value.clone()
        return Decision(obs, state, action, log_prob, value, None)

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
            self._graphs.record(obs, self._policy.values_apart)
