"""Plays trajectories of an environment from fixed seeds, and compares them.

On the CPU trajectories are compared bitwise. On a GPU, contacts are summed in no fixed order, so that the last bits of
a step vary and contacts diverge soon: only the start is compared bitwise, and single steps with a tolerance.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from embodichain.envs.vec_env import Action, HasExpert, VecEnv, random_actions

Factory = Callable[[int], VecEnv]
SEEDS = "info[episode_seed]"
SEED = 20_000  # arbitrary
_SHORT = 12  # steps of a trajectory that is repeated
_CLOSE = 1e-2  # relative and absolute tolerance on a GPU


class NotApplicable(Exception):  # noqa: N818 - not an error
    """Raised by a check that does not apply to this environment; the message is the reason."""


def need(condition: bool, otherwise: str) -> None:
    if not condition:
        raise NotApplicable(otherwise)


class Frame:
    """The result of one reset or step by name: the tensors, and copies of them."""

    def __init__(self, obs: TensorDictBase, *result: Any) -> None:
        *scores, info = result
        self.returned = {f"obs[{name}]": value for name, value in leaves(obs).items()}
        self.observed = list(self.returned)
        self.returned[SEEDS] = info["episode_seed"]
        if scores:
            self.returned.update(zip(("reward", "terminated", "truncated"), scores, strict=True))
            self.final_is_obs = info["final_observation"] is obs
            final = leaves(info["final_observation"])
            self.returned.update({f"info[final_observation][{name}]": value for name, value in final.items()})
        self.is_start = not scores
        self.copies = {name: value.clone() for name, value in self.returned.items()}

    @property
    def done(self) -> Tensor:
        """Bool ``[num_envs]``: envs whose episode ended with this step."""
        return self.copies["terminated"] | self.copies["truncated"]


class Play:
    """An environment under test, and ways to play it from fixed seeds."""

    def __init__(self, env: VecEnv, factory: Factory | None, max_steps: int) -> None:
        self.env, self.factory, self.max_steps = env, factory, max_steps

    def actions(self, steps: int) -> Tensor:
        """Return valid random actions ``[steps, num_envs, ...]``; those of env i are independent of ``num_envs``."""
        space, columns = self.env.action_space, []
        for i in range(self.env.num_envs):
            generator = torch.Generator().manual_seed(i)
            columns.append(random_actions(space, steps, generator))
        return torch.stack(columns, dim=1).to(self.env.device)

    def start(self, seed: int | Tensor | None = SEED) -> list[Frame]:
        """Reset and return the trajectory so far: one frame."""
        return [Frame(*self.env.reset(seed=seed))]

    def extend(self, trajectory: list[Frame], actions: Iterable[Action]) -> list[Frame]:
        """Apply actions and append the frames to the trajectory."""
        trajectory.extend(Frame(*self.env.step(action)) for action in actions)
        return trajectory

    def random(self, steps: int) -> list[Frame]:
        """Reset and apply the first ``steps`` random actions."""
        return self.extend(self.start(), self.actions(steps))

    def expert(self, steps: int) -> Iterator[Frame]:
        """Reset and apply the actions of the environment's expert, if it has one."""
        self.start()
        for _ in range(steps if isinstance(self.env, HasExpert) and self.env.has_expert else 0):
            yield Frame(*self.env.step(self.env.expert_action()))  # type: ignore[attr-defined]

    def demonstrations(self) -> Tensor | None:
        """Return in which envs the expert solves its first episode, bool ``[num_envs]``; None without that metric."""
        env: Any = self.env
        env.reset(seed=SEED)
        solved = torch.zeros(env.num_envs, dtype=torch.bool, device=env.device)
        running = ~solved
        for _ in range(self.max_steps):
            _, _, terminated, truncated, info = env.step(env.expert_action())
            success = info["metrics"].get("success")
            if success is None:
                return None
            solved |= running & (success > 0.5)
            running &= ~(terminated | truncated | solved)
            if not bool(running.any()):
                break
        return solved

    @property
    def exact(self) -> bool:
        """Whether repeated steps are bit-identical."""
        return self.env.device.type == "cpu"

    @property
    def short(self) -> int:
        """Number of steps of a trajectory that is repeated."""
        return _SHORT if self.exact else 1

    @property
    def long_steps(self) -> int:
        """Number of steps of ``long``."""
        limit = self.env.max_episode_steps
        return self.max_steps if limit is None else min(limit + 5, self.max_steps)

    @cached_property
    def long(self) -> list[Frame]:
        """One trajectory beyond the time limit, or of ``max_steps`` if that is shorter."""
        return self.random(self.long_steps)

    @cached_property
    def ends(self) -> list[int]:
        """The steps of ``long`` at which episodes ended."""
        return [t for t, frame in enumerate(self.long) if t and bool(frame.done.any())]

    @cached_property
    def difference(self) -> str | None:
        """Where two trajectories of the same seed and actions differ, or ``None``."""
        return first_difference(self.random(self.short), self.random(self.short))

    def need_determinism(self) -> None:
        """Raise ``NotApplicable`` if the same seed does not give the same trajectory."""
        need(self.difference is None, "the same seed does not give the same trajectory")

    def need_episode_seeds(self) -> None:
        """Raise ``NotApplicable`` if the environment has no episode seeds."""
        named = bool((self.long[0].copies[SEEDS] >= 0).any())
        need(named, "the environment does not name its episodes: episode_seed is -1")


def leaves(value: TensorDictBase) -> dict[str, Tensor]:
    """Return the tensors of an observation by path, such as ``robot/qpos``."""
    return dict(value.flatten_keys("/").items())


def rows_differ(a: Tensor, b: Tensor) -> Tensor:
    """Return bool ``[num_envs]``: rows that are not bitwise equal (NaN equals NaN)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return torch.ones(len(a), dtype=torch.bool, device=a.device)
    same = (a == b) | ((a != a) & (b != b))
    return ~same.reshape(len(a), -1).all(dim=1)


def rows_apart(a: Tensor, b: Tensor) -> Tensor:
    """Return bool ``[num_envs]``: rows that differ by more than the tolerance."""
    if a.device.type == "cpu" or a.shape != b.shape or not (a.is_floating_point() and b.is_floating_point()):
        return rows_differ(a, b)
    close = torch.isclose(a, b, rtol=_CLOSE, atol=_CLOSE, equal_nan=True)
    return ~close.reshape(len(a), -1).all(dim=1)


def first_difference(a: list[Frame], b: list[Frame], rows: slice = slice(None)) -> str | None:
    """Return where two trajectories first differ (in some rows), or ``None``."""
    for step, (left, right) in enumerate(zip(a, b, strict=True)):
        if left.copies.keys() != right.copies.keys():
            return f"after {step} steps, the keys {sorted(left.copies.keys() ^ right.copies.keys())}"
        compare = rows_differ if left.is_start else rows_apart
        for name, value in left.copies.items():
            differ = torch.nonzero(compare(value[rows], right.copies[name][rows])).reshape(-1)
            if differ.numel():
                return f"after {step} steps, {name} of env row {int(differ[0])}"
    return None
