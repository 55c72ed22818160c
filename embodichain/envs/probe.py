"""Playing an environment for the checks of ``checker.py``: what was returned is kept, looked at and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from embodichain.envs.vec_env import HasExpert, VecEnv

SEED = 20_000
"""The seed that checks reset with; any other would do."""
SHORT = 12
"""Number of steps of a trajectory that is played several times."""


_DTYPES = {np.dtype(t): getattr(torch, t) for t in ("float32", "float64", "float16", "uint8", "int8", "int32", "int64")}
_DTYPES[np.dtype(np.bool_)] = torch.bool


class Finding(NamedTuple):
    """One thing that is wrong."""

    expected: str
    got: str
    advice: str


class NotApplicable(Exception):  # noqa: N818 - it is no error
    """Raised by a check that does not apply to this environment; the message gives the reason."""


def leaves(value: TensorDictBase) -> dict[str, Tensor]:
    """Return the tensors of an observation by their path, ``robot/qpos``."""
    return dict(value.flatten_keys("/").items())


def rows_differ(a: Tensor, b: Tensor) -> Tensor:
    """Return bool ``[num_envs]``: the rows that are not bitwise the same (NaN equals NaN)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return torch.ones(len(a), dtype=torch.bool, device=a.device)
    same = (a == b) | ((a != a) & (b != b))
    return ~same.reshape(len(a), -1).all(dim=1)


def check_vector(env: VecEnv, name: str, value: Any, dtype: torch.dtype | None) -> Iterator[Finding]:
    """Find out what is wrong with a tensor ``[num_envs]``; without a dtype any will do."""
    if isinstance(value, Tensor):
        yield from _check_tensor(env, name, value, (env.num_envs,), value.dtype if dtype is None else dtype)
    else:
        yield Finding(f"{name} is a tensor [{env.num_envs}]", type(value).__name__, "return tensors")


def _check_tensor(env: VecEnv, name: str, value: Tensor, shape: tuple[int, ...], dtype: Any) -> Iterator[Finding]:
    if tuple(value.shape) != shape:
        advice = "one row per env; spaces are those of one env"
        yield Finding(f"{name} has shape {list(shape)}", str(list(value.shape)), advice)
        return
    if value.dtype != dtype:
        yield Finding(f"{name} is {dtype}", str(value.dtype), f"convert it: .to({dtype})")
    if value.device.type != env.device.type:
        yield Finding(f"{name} is on {env.device}", str(value.device), "make it on env.device")
    if value.is_floating_point() and not bool(torch.isfinite(value).all()):
        bad = torch.nonzero(~torch.isfinite(value).reshape(env.num_envs, -1).all(dim=1)).reshape(-1)
        got = f"env {int(bad[0])} has NaN or infinity"
        yield Finding(f"{name} is finite", got, "find out which term diverges, or guard the simulation")


def check_observation(env: VecEnv, obs: Any, name: str) -> Iterator[Finding]:
    """Find out what is wrong with an observation: type, keys, shapes, dtypes, devices, values."""
    if not isinstance(obs, TensorDictBase):
        yield Finding(f"{name} is a TensorDict", type(obs).__name__, "TensorDict({...}, batch_size=[num_envs])")
        return
    if tuple(obs.batch_size) != (env.num_envs,):
        yield Finding(f"{name} has batch size [{env.num_envs}]", str(list(obs.batch_size)), "batch_size=[num_envs]")
    spaces, found = _flat(env.observation_space), leaves(obs)
    if spaces.keys() != found.keys():
        yield Finding(f"{name} has the keys {sorted(spaces)}", str(sorted(found)), "match observation_space")
    for key in sorted(spaces.keys() & found.keys()):
        space, value, what = spaces[key], found[key], f"{name}[{key}]"
        shape, dtype = (env.num_envs, *(space.shape or ())), _DTYPES.get(np.dtype(space.dtype))
        problems = list(_check_tensor(env, what, value, shape, dtype))
        yield from problems
        if isinstance(space, gym.spaces.Box) and not problems:
            low, high = (torch.as_tensor(bound, device=value.device).double() for bound in (space.low, space.high))
            slack = 1e-5 * (1.0 + value.double().abs())  # rounding, not a violation
            if bool(((value < low - slack) | (value > high + slack)).any()):
                got = f"values in [{float(value.min()):.6g}, {float(value.max()):.6g}]"
                yield Finding(f"{what} lies within {space}", got, "widen the space, or clip the observation")


def _flat(space: gym.spaces.Dict) -> dict[str, gym.Space[Any]]:
    found: dict[str, gym.Space[Any]] = {}
    for key, value in space.spaces.items():
        nested = _flat(value) if isinstance(value, gym.spaces.Dict) else {"": value}
        found.update({f"{key}/{name}" if name else str(key): leaf for name, leaf in nested.items()})
    return found


@dataclass
class Frame:
    """What one reset or step returned, by name: the objects themselves, and copies made at once."""

    returned: dict[str, Tensor]
    copies: dict[str, Tensor] = field(init=False)
    observed: list[str] = field(init=False)
    """The names of the observation's leaves."""

    def __post_init__(self) -> None:
        self.copies = {name: value.clone() for name, value in self.returned.items()}
        self.observed = [name for name in self.returned if name.startswith("obs[")]


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
    """Return where two trajectories first differ (in some rows), or return ``None`` if they do not."""
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

    def extend(self, trajectory: list[Frame], actions: Tensor, env: VecEnv | None = None) -> list[Frame]:
        """Apply actions and add the frames to the trajectory."""
        for action in actions:
            obs, reward, terminated, truncated, info = (env or self.env).step(action)
            trajectory.append(frame(obs, info, (reward, terminated, truncated)))
        return trajectory

    def play(self, steps: int, seed: int | Tensor | None = SEED) -> list[Frame]:
        """Reset and take the first ``steps`` of the random actions."""
        return self.extend(self.start(seed), self.actions(steps))

    def play_expert(self, steps: int) -> list[Frame]:
        """Reset and take the actions of the environment's expert."""
        trajectory = self.start()
        for _ in range(steps if isinstance(self.env, HasExpert) else 0):
            self.extend(trajectory, self.env.expert_action().unsqueeze(0))  # type: ignore[attr-defined]
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
        """Raise ``NotApplicable`` if the same seed does not give the same trajectory."""
        if self.nondeterminism is not None:
            raise NotApplicable("the same seed does not give the same trajectory")

    def need_ends(self) -> list[tuple[int, Tensor]]:
        """Return ``ended``; raise ``NotApplicable`` if no episode did."""
        if not self.ended:
            raise NotApplicable(f"no episode ended within {self.long_steps} random steps")
        return self.ended

    def need_episode_seeds(self) -> None:
        """Raise ``NotApplicable`` if the environment does not name its episodes."""
        if bool((self.long[0].copies["info[episode_seed]"] < 0).all()):
            raise NotApplicable("the environment does not name its episodes: episode_seed is -1")
