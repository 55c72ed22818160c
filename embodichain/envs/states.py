"""The whole state of a simulated environment by row, and whether a saved one fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor

from embodichain.envs.domain import DomainRandomization
from embodichain.envs.physics import Physics
from embodichain.envs.random import RandomStreams
from embodichain.errors import EnvContractError


@dataclass(frozen=True)
class LiveState:
    """Everything of an environment that changes while it simulates; the tensors are the environment's own."""

    physics: Physics
    streams: RandomStreams
    step: Tensor
    """Steps taken in the present episodes, ``[num_envs]``."""
    variables: dict[str, Tensor]
    """The task's own values, such as goals, ``[num_envs, ...]``."""
    domain: DomainRandomization

    def read(self) -> dict[str, Any]:
        """Return copies of all rows, nested by name."""
        return {
            "physics": self.physics.state(),
            "streams": self.streams.state.clone(),
            "step": self.step.clone(),
            "variables": {name: value.clone() for name, value in self.variables.items()},
            "model": self.domain.state(),
        }

    def write(self, env_ids: Tensor, rows: Any) -> None:
        """Put rows of what :meth:`read` returned, as a nested dict or TensorDict, into these envs."""
        self.physics.set_state(env_ids, rows["physics"])
        self.streams.state.index_copy_(0, env_ids, rows["streams"])
        self.step.index_copy_(0, env_ids, rows["step"])
        for name, value in self.variables.items():
            value.index_copy_(0, env_ids, rows["variables"][name])
        if self.domain.active:
            self.domain.set_state(env_ids, dict(rows["model"].items()))


def check_state(state: Any, template: TensorDictBase, count: int) -> None:
    """Raise ``EnvContractError`` unless ``state`` has ``count`` rows of what ``template`` has."""
    if not isinstance(state, TensorDictBase):
        raise EnvContractError(
            f"set_state: expected a TensorDict that get_state() returned, got {type(state).__name__}"
        )
    if tuple(state.batch_size) != (count,):
        raise EnvContractError(f"set_state: expected one row per env, [{count}], got {list(state.batch_size)}")
    wanted, came = _leaves(template), _leaves(state)
    problems = [f"{name} is missing" for name in wanted if name not in came]
    problems += [f"{name} is unknown here" for name in came if name not in wanted]
    for name in wanted.keys() & came.keys():
        want, got = wanted[name], came[name]
        if want.shape[1:] != got.shape[1:] or want.dtype != got.dtype:
            problems.append(
                f"{name} must be {want.dtype} {list(want.shape[1:])}, not {got.dtype} {list(got.shape[1:])}, per env"
            )
    if problems:
        raise EnvContractError(
            f"set_state: this state is of another task, robot or randomisation: {'; '.join(sorted(problems))}"
        )


def _leaves(state: TensorDictBase) -> dict[str, Tensor]:
    items = state.items(include_nested=True, leaves_only=True)
    return {"/".join(key) if isinstance(key, tuple) else key: value for key, value in items}
