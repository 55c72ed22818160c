"""What the checks have in common: playing an environment, keeping what came back, and comparing it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import gymnasium as gym
import torch
from tensordict import TensorDictBase
from torch import Tensor

from embodichain.envs.vec_env import HasExpert, VecEnv

SEED = 20_000
"""The seed that checks reset with; any other would do."""
SHORT = 12
"""Number of steps of a trajectory that is played several times."""


class Finding(NamedTuple):
    """One thing that is wrong."""

    expected: str
    got: str
    advice: str


class NotApplicable(Exception):  # noqa: N818 - it is no error
    """Raised by a check that has nothing to say about this environment; the message gives the reason."""


Check = Callable[["Probe"], Iterator[Finding]]


def leaves(value: TensorDictBase) -> dict[str, Tensor]:
    """Return the tensors of an observation by their path, ``robot/qpos``."""
    found: dict[str, Tensor] = {}
    for key, item in value.items():
        nested = leaves(item) if isinstance(item, TensorDictBase) else {"": item}
        found.update({f"{key}/{name}" if name else str(key): tensor for name, tensor in nested.items()})
    return found


def rows_differ(a: Tensor, b: Tensor) -> Tensor:
    """Return bool ``[num_envs]``: the rows that are not bitwise the same (NaN equals NaN)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return torch.ones(len(a), dtype=torch.bool, device=a.device)
    same = (a == b) | ((a != a) & (b != b))
    return ~same.reshape(len(a), -1).all(dim=1)


@dataclass
class Frame:
    """What one reset or step returned, by name: the objects themselves, and copies made at once."""

    returned: dict[str, Tensor]
    copies: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.copies = {name: value.clone() for name, value in self.returned.items()}


def frame(obs: TensorDictBase, info: dict[str, Any], result: tuple[Tensor, Tensor, Tensor] | None = None) -> Frame:
    """Collect the tensors of one reset, or of one step with its ``(reward, terminated, truncated)``."""
    named = {f"obs[{name}]": value for name, value in leaves(obs).items()}
    if isinstance(info.get("episode_seed"), Tensor):
        named["info[episode_seed]"] = info["episode_seed"]
    if result is not None:
        named.update(zip(("reward", "terminated", "truncated"), result, strict=True))
        final = leaves(info["final_observation"])
        named.update({f"info[final_observation][{name}]": value for name, value in final.items()})
    return Frame(named)


def first_difference(a: list[Frame], b: list[Frame], rows: slice | Tensor | None = None) -> str | None:
    """Say where two trajectories first differ (in some rows), or return ``None`` if they do not."""
    chosen = slice(None) if rows is None else rows
    for step, (left, right) in enumerate(zip(a, b, strict=True)):
        if left.copies.keys() != right.copies.keys():
            return f"after {step} steps, the keys {sorted(left.copies.keys() ^ right.copies.keys())}"
        for name, value in left.copies.items():
            differ = torch.nonzero(rows_differ(value[chosen], right.copies[name][chosen])).reshape(-1)
            if differ.numel():
                return f"after {step} steps, {name} of env row {int(differ[0])}"
    return None


class Probe:
    """An environment under test and ways to play it; everything is made from fixed seeds."""

    def __init__(self, env: VecEnv, factory: Callable[[int], VecEnv] | None = None, max_steps: int = 1000) -> None:
        self.env = env
        self.factory = factory
        self.max_steps = max_steps

    def actions(self, steps: int, num_envs: int | None = None, seed: int = 0) -> Tensor:
        """Return valid random actions ``[steps, num_envs, ...]``; those of env i do not depend on ``num_envs``."""
        space, count = self.env.action_space, num_envs or self.env.num_envs
        columns = []
        for i in range(count):
            generator = torch.Generator().manual_seed(seed * 1_000_003 + i)
            if isinstance(space, gym.spaces.Discrete):
                columns.append(torch.randint(0, int(space.n), (steps,), generator=generator))
            else:
                low, high = (bound.cpu().clamp(-1.0, 1.0) for bound in self.action_bounds)
                columns.append(low + (high - low) * torch.rand(steps, *(space.shape or ()), generator=generator))
        return torch.stack(columns, dim=1).to(self.env.device)

    @property
    def action_bounds(self) -> tuple[Tensor, Tensor]:
        """The bounds ``[action_dim]`` of continuous actions."""
        space = self.env.action_space
        if not isinstance(space, gym.spaces.Box):
            raise NotApplicable("actions are discrete")
        return torch.as_tensor(space.low, device=self.env.device), torch.as_tensor(space.high, device=self.env.device)

    def start(self, seed: int | Tensor | None = SEED, env: VecEnv | None = None) -> list[Frame]:
        """Reset and return the trajectory so far: one frame."""
        obs, info = (env or self.env).reset(seed=seed)
        return [frame(obs, info)]

    def go_on(self, trajectory: list[Frame], actions: Tensor, env: VecEnv | None = None) -> list[Frame]:
        """Apply actions and add the frames to the trajectory."""
        for action in actions:
            obs, reward, terminated, truncated, info = (env or self.env).step(action)
            trajectory.append(frame(obs, info, (reward, terminated, truncated)))
        return trajectory

    def play(self, steps: int, seed: int | Tensor | None = SEED) -> list[Frame]:
        """Reset and take the first ``steps`` of the random actions."""
        return self.go_on(self.start(seed), self.actions(steps))

    def play_expert(self, steps: int) -> list[Frame]:
        """Reset and take the actions of the environment's expert."""
        trajectory = self.start()
        for _ in range(steps if isinstance(self.env, HasExpert) else 0):
            self.go_on(trajectory, self.env.expert_action().unsqueeze(0))  # type: ignore[attr-defined]
        return trajectory

    @cached_property
    def long(self) -> list[Frame]:
        """One trajectory beyond the time limit, or of ``max_steps`` if that is less."""
        return self.play(self.long_steps)

    @property
    def long_steps(self) -> int:
        """Number of steps of ``long``."""
        return min(self.env.max_episode_steps + 5, self.max_steps)

    @cached_property
    def ended(self) -> list[tuple[int, Tensor]]:
        """The steps of ``long`` at which envs were done, with the mask ``[num_envs]``."""
        masks = [(t, f.copies["terminated"] | f.copies["truncated"]) for t, f in enumerate(self.long) if t]
        return [(t, mask) for t, mask in masks if bool(mask.any())]

    @cached_property
    def nondeterminism(self) -> str | None:
        """Where two short trajectories of the same seed and actions first differ; ``None`` if they do not."""
        return first_difference(self.play(SHORT), self.play(SHORT))

    def need_determinism(self) -> None:
        """Say that nothing can be compared where the same seed does not give the same trajectory."""
        if self.nondeterminism is not None:
            raise NotApplicable("the same seed does not give the same trajectory")

    def need_ends(self) -> list[tuple[int, Tensor]]:
        """Return ``ended``, or say that nothing can be checked."""
        if not self.ended:
            raise NotApplicable(f"no episode ended within {self.long_steps} random steps")
        return self.ended

    def need_episode_seeds(self) -> None:
        """Say that nothing can be checked where the environment does not name its episodes."""
        if bool((self.long[0].copies["info[episode_seed]"] < 0).all()):
            raise NotApplicable("the environment does not name its episodes: episode_seed is -1")
