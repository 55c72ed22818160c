"""Whether a saved simulation state fits the environment it is to be put into."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase
from torch import Tensor

from embodichain.errors import EnvContractError


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
