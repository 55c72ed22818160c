"""A policy's decisions as CUDA graphs: one launch instead of some thirty, as often as there are environment steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.utils.observations import Observation, sorted_leaves
from embodichain.envs.graphed import copy_together, recording, refusing_to_wait

Result = TypeVar("Result")
_LOG = logging.getLogger(__name__)
_WARM_UP = 3  # ordinary calls before recording; in the last it is found out whether the policy waits for the device


class GraphedPolicy:
    """Acts and values like a policy without memory, by replaying graphs.

    What a method returns is overwritten by the next call of that method. What cannot be recorded runs as usual, and the
    log says why. The policy's weights may change, but must stay where they are.
    """

    def __init__(self, policy: Policy) -> None:
        self._act: _Replayed[tuple[Tensor, Tensor, Tensor]] = _Replayed(lambda obs: policy.act(obs)[:3], policy)
        self._choose: _Replayed[tuple[Tensor, Tensor]] = _Replayed(policy.choose, policy)
        self._value: _Replayed[Tensor] = _Replayed(policy.state_value, policy)

    def act(self, obs: Observation) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``(action, log_prob, value)``."""
        return self._act(obs)

    def choose(self, obs: Observation) -> tuple[Tensor, Tensor]:
        """Return ``(action, log_prob)``."""
        return self._choose(obs)

    def state_value(self, obs: Observation) -> Tensor:
        """Return the value ``[batch]`` of an observation."""
        return self._value(obs)


class _Replayed(Generic[Result]):
    """One function of an observation."""

    def __init__(self, function: Callable[[Observation], Result], policy: Policy) -> None:
        self._function, self._policy = function, policy
        self._calls = 0
        self._off = False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._mode = policy.training
        self._obs: Observation | None = None
        self._inputs: list[Tensor] = []
        self._result: Any = None

    def __call__(self, obs: Observation) -> Result:
        if self._mode != self._policy.training:  # dropout and the like are recorded as they were
            self._graph, self._mode, self._calls = None, self._policy.training, 0
        if self._off:
            return self._function(obs)
        self._calls += 1
        if self._graph is None:
            if self._calls < _WARM_UP:
                return self._function(obs)
            if self._calls == _WARM_UP:
                return self._check(obs)
            self._record(obs)
        if self._graph is None:
            return self._function(obs)
        copy_together(self._inputs, _leaves(obs))
        self._graph.replay()
        return self._result

    def _check(self, obs: Observation) -> Result:
        try:
            with refusing_to_wait():
                return self._function(obs)
        except RuntimeError as error:
            self._give_up(error)
        return self._function(obs)

    def _record(self, obs: Observation) -> None:
        self._obs = obs.clone()
        graph = torch.cuda.CUDAGraph()
        try:
            with recording(graph):
                self._result = self._function(self._obs)
        except RuntimeError as error:
            self._give_up(error)
            return
        self._graph, self._inputs = graph, _leaves(self._obs)

    def _give_up(self, error: RuntimeError) -> None:
        self._off = True
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        _LOG.warning("the policy acts without CUDA graphs, which costs speed: %s", reason)


def _leaves(obs: Observation) -> list[Tensor]:
    return [obs] if isinstance(obs, Tensor) else [leaf for _, leaf in sorted_leaves(obs)]
