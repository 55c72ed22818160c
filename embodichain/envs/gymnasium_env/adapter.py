"""``GymnasiumVecEnv`` adapts a ``gymnasium.vector.VectorEnv`` of any autoreset mode to the ``VecEnv`` contract."""

from __future__ import annotations

import contextlib
import functools
import secrets
from collections.abc import Callable, Collection, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array
from PIL import Image
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from embodichain.envs.actions import ActionManager
from embodichain.envs.gymnasium_env.construct import (
    RowwiseSyncVectorEnv,
    SubEnvStates,
    env_limit,
    env_name,
    explain_old_interface,
    resolve_spec,
    single_env,
    time_limit,
    vector_limit,
)
from embodichain.envs.gymnasium_env.spaces import Rows, action_decoder, choose, observation_encoder, to_tensordict
from embodichain.envs.gymnasium_env.tasks import TaskGymnasiumVectorEnv
from embodichain.envs.random import combine
from embodichain.envs.resets import check_state
from embodichain.envs.vec_env import Action, EnvIds, StepResult, VecEnv
from embodichain.errors import ConfigError, EnvContractError, RenderingError

_SEED_MASK = (1 << 31) - 1  # some simulators accept 32-bit seeds only
_AHEAD = 64  # number of episode seeds computed at once, so that a reset is a table lookup
_OWN = (SyncVectorEnv, AsyncVectorEnv, TaskGymnasiumVectorEnv)
"""Vector envs whose ``reset`` accepts one seed per env and ``reset_mask``."""


class EpisodeSeeds:
    """Episode seeds in [0, 2**31): hashes of (seed, env index, episode number), independent of ``num_envs``."""

    def __init__(self, num_envs: int, seed: int) -> None:
        self.state = torch.zeros(num_envs, 2, dtype=torch.int64)
        """The stream key and the next episode number of each env, ``[num_envs, 2]``."""
        self._next = self.state.numpy()[:, 1]
        self._table = np.zeros((num_envs, _AHEAD), dtype=np.int64)
        self.seed(torch.arange(num_envs), seed)

    def seed(self, ids: Tensor, seed: int) -> None:
        """Restart the streams of these envs at the first episode of ``(seed, env index)``."""
        self.set_state(
            ids, torch.stack([combine(torch.full_like(ids, seed & ((1 << 62) - 1)), ids), torch.zeros_like(ids)], dim=1)
        )

    def set_state(self, ids: Tensor, state: Tensor) -> None:
        """Continue the streams of these envs from ``state`` ``[len(ids), 2]``."""
        self.state[ids] = state
        self._look_ahead(ids)

    def take(self, ids: np.ndarray) -> np.ndarray:
        """Return the seeds ``[len(ids)]`` of the envs' next episodes and advance the streams."""
        column = self._next[ids] % _AHEAD
        seeds: np.ndarray = self._table[ids, column]
        self._next[ids] += 1
        if (column == _AHEAD - 1).any():
            self._look_ahead(torch.from_numpy(ids[column == _AHEAD - 1]))
        return seeds

    def _look_ahead(self, ids: Tensor) -> None:
        key, number = self.state[ids].unsqueeze(2).unbind(1)
        episodes = number - number % _AHEAD + torch.arange(_AHEAD)
        self._table[ids.numpy()] = combine(key, episodes).numpy() & _SEED_MASK


class GymnasiumVecEnv(VecEnv):
    """A Gymnasium vector env as a ``VecEnv``; see the package docstring for autoreset modes and seeds.

    The time limit is the smaller of ``max_episode_steps`` and the env's own. ``seed`` (default: random) determines the
    episode seeds.
    """

    def __init__(
        self,
        vector_env: VectorEnv,
        *,
        device: torch.device | str = "cpu",
        max_episode_steps: int | None = None,
        seed: int | None = None,
    ) -> None:
        if not isinstance(vector_env, VectorEnv):
            raise EnvContractError(
                f"expected a gymnasium.vector.VectorEnv, got {type(vector_env).__name__}; use make_gymnasium for an id "
                "and GymnasiumVecEnv.from_factory for a function that makes one env"
            )
        self.vector_env = vector_env
        self.num_envs = int(vector_env.num_envs)
        self.device = torch.device(device)
        self.max_episode_steps = time_limit(max_episode_steps, vector_limit(vector_env))
        self.observation_space, self._encode = observation_encoder(vector_env.single_observation_space)
        self.action_space, self._decode = action_decoder(vector_env.single_action_space, self.num_envs)
        self.action_manager = ActionManager("action", self.action_space, self.num_envs, "cpu")
        self.seed = secrets.randbits(61) if seed is None else seed
        self._streams = EpisodeSeeds(self.num_envs, self.seed)
        self._own = isinstance(vector_env.unwrapped, _OWN)
        self._mode = _autoreset_mode(vector_env, self._own)
        self._states = SubEnvStates.of(vector_env)
        self.supports_state = self._states is not None
        self._elapsed = np.zeros(self.num_envs, dtype=np.int64)
        self._episode = np.full(self.num_envs, -1, dtype=np.int64)
        self._episode_end_callback: Callable[[Tensor], None] | None = None
        self._state_like: TensorDict | None = None  # one row of a state, to compare others with
        self._rows: Rows | None = None  # last returned observation; None before the first reset

    @classmethod
    def from_factory(
        cls,
        make_env: Callable[[], gym.Env],
        num_envs: int,
        *,
        max_episode_steps: int | None = None,
        asynchronous: bool = False,
        device: torch.device | str = "cpu",
        seed: int | None = None,
    ) -> GymnasiumVecEnv:
        """Vectorise ``num_envs`` envs made by a function, in this process or (``asynchronous``) in one process each."""
        if num_envs < 1:
            raise ConfigError(f"num_envs: expected at least 1, got {num_envs}")
        makers = [make_env] * num_envs
        if not asynchronous:
            vector_env: VectorEnv = RowwiseSyncVectorEnv(makers)
        else:
            if max_episode_steps is None:
                with contextlib.closing(make_env()) as env:
                    max_episode_steps = env_limit(env)
            # Only the adapter resets, by mask and with one seed per episode. Its encoder copies observations.
            vector_env = AsyncVectorEnv(makers, copy=False, autoreset_mode=AutoresetMode.DISABLED)
        return cls(vector_env, device=device, max_episode_steps=max_episode_steps, seed=seed)

    @property
    def name(self) -> str:
        base = self.vector_env.unwrapped
        spec = getattr(base, "spec", None)
        if isinstance(base, SyncVectorEnv):
            return env_name(base.envs[0])
        return type(base).__name__ if spec is None else str(spec.id)

    def reset(self, seed: int | Tensor | None = None, env_ids: EnvIds = None) -> tuple[TensorDict, dict[str, Any]]:
        ids = self.resolve_ids(env_ids).cpu().numpy()
        mask = np.zeros(self.num_envs, dtype=np.bool_)
        mask[ids] = True
        if self._rows is None and not mask.all():
            raise EnvContractError("the first reset must be of all envs: call reset() without env_ids once")
        batch, infos = self._reset_envs(mask, seed)
        rows = self._encode(batch)
        self._rows = rows if self._rows is None or mask.all() else choose(torch.from_numpy(mask), rows, self._rows)
        self._elapsed[ids] = 0
        return self._tensordict(self._rows), {"episode_seed": self._tensor(self._episode), "gymnasium": infos}

    def step(self, action: Action) -> StepResult:
        if self._rows is None:
            raise EnvContractError("call reset() before the first step()")
        native = self._decode(self.action_manager.unwrap(action, torch.from_numpy(self._elapsed)).numpy())
        try:
            batch, reward, terminated, truncated, infos = self.vector_env.step(native)
        except (AttributeError, TypeError, ValueError) as error:
            explain_old_interface(error, self.name, "step")
            raise
        self._elapsed += 1
        terminated, native_end = np.asarray(terminated, np.bool_), np.logical_or(terminated, truncated)
        truncated = np.array(truncated, np.bool_)
        if self.max_episode_steps is not None:
            truncated |= self._elapsed >= self.max_episode_steps
        done = terminated | truncated

        self._rows = rows = reached = self._encode(batch)
        if self._mode is AutoresetMode.SAME_STEP and native_end.any():
            reached = self._final_rows(rows, infos, native_end)
        if done.any():
            if self._episode_end_callback is not None:
                self._episode_end_callback(torch.from_numpy(done).to(self.device))
            self._rows = self._reset_done(rows, done, native_end)
        obs = self._tensordict(self._rows)
        info = {
            "final_observation": obs if reached is self._rows else self._tensordict(reached),
            "rewards": {},
            "metrics": self._metrics(infos, native_end),
            "episode_seed": self._tensor(self._episode),
            "gymnasium": infos,
        }
        flags = torch.from_numpy(truncated).to(self.device)  # already a copy
        return obs, self._tensor(reward, np.float32), self._tensor(terminated), flags, info

    def get_state(self) -> TensorDict:
        if self._states is None:
            return super().get_state()
        if self._rows is None:
            self.reset()
        counters = {"elapsed": self._elapsed, "episode": self._episode}
        state = {name: torch.from_numpy(value.copy()) for name, value in counters.items()}
        state |= {"streams": self._streams.state.clone(), "sub_envs": torch.from_numpy(self._states.read())}
        rows = self._tensordict(self._rows or {})
        return TensorDict({**state, "observation": rows.clone()}, batch_size=[self.num_envs]).to(self.device)

    def set_state(self, state: TensorDictBase, env_ids: EnvIds = None) -> TensorDict:
        if self._states is None:
            return super().set_state(state, env_ids)
        if self._rows is None:
            self.reset()
        ids = self.resolve_ids(env_ids).cpu()
        if self._state_like is None:
            self._state_like = self.get_state()[:1].clone()
        check_state(state, self._state_like, ids.numel())
        rows, state = ids.numpy(), state.to("cpu")
        self._states.write(rows, state["sub_envs"].numpy())
        self._streams.set_state(ids, state["streams"])
        self._elapsed[rows] = state["elapsed"].numpy()
        self._episode[rows] = state["episode"].numpy()
        obs = self._tensordict(self._rows or {}).to("cpu").clone()
        obs[ids] = state["observation"]
        self._rows = obs.to_dict()
        return self._tensordict(self._rows)

    def render(
        self, env_ids: EnvIds = None, camera: str | None = None, size: tuple[int, int] = (240, 320)
    ) -> np.ndarray:
        ids, base = self.resolve_ids(env_ids).tolist(), self.vector_env.unwrapped
        if camera is not None:
            raise RenderingError(f"a Gymnasium env has one view of its own: expected camera=None, got {camera!r}")
        if self.vector_env.render_mode not in ("rgb_array", "rgb_array_list"):
            raise RenderingError(
                f'{self.vector_env} is not in a render mode that gives images: make it with kwargs={{"render_mode": '
                '"rgb_array"}, if it takes that'
            )
        try:
            if isinstance(base, SyncVectorEnv):
                frames = [base.envs[i].render() for i in ids]
            else:
                every = self.vector_env.render()
                frames = [None if every is None else every[i] for i in ids]
        except gym.error.DependencyNotInstalled as error:
            raise RenderingError(f"this Gymnasium env cannot be rendered: {error}") from error
        images = [_rgb_image(frame).resize(size[::-1], Image.Resampling.BILINEAR) for frame in frames]
        return np.stack([np.asarray(image) for image in images])

    def on_episode_end(self, callback: Callable[[Tensor], None] | None) -> bool:
        if self._mode is AutoresetMode.SAME_STEP:  # the vector env has begun the next episodes already
            return False
        self._episode_end_callback = callback
        return True

    def close(self) -> None:
        self.vector_env.close()

    def _reset_envs(self, mask: np.ndarray, seed: int | Tensor | None) -> tuple[Any, dict[str, Any]]:
        """Reset the envs of ``mask`` ``[num_envs]``, each with its episode seed, or all with one seed."""
        ids = np.flatnonzero(mask)
        given: Any = seed
        if self._own:
            self._episode[ids] = self._next_seeds(ids, seed)
            given = np.where(mask, self._episode, np.array(None)).tolist()
        elif isinstance(seed, Tensor) or (seed is not None and len(ids) < self.num_envs):
            raise EnvContractError(f"{self.vector_env} takes one seed for all envs: reset all, with an int")
        if not mask.all() and not self._own and self._mode is AutoresetMode.SAME_STEP:
            raise EnvContractError(
                f"{self.vector_env} cannot reset envs {ids.tolist()[:10]} alone: it is no vector env of Gymnasium's own"
            )
        options = {} if mask.all() else {"options": {"reset_mask": mask.copy()}}
        try:
            batch, infos = self.vector_env.reset(seed=given, **options)
        except (AttributeError, TypeError, ValueError) as error:
            explain_old_interface(error, self.name, "reset")
            raise
        return batch, infos

    def _next_seeds(self, ids: np.ndarray, seed: int | Tensor | None) -> np.ndarray:
        """Return the seeds in [0, 2**31) of the next episodes of these envs."""
        checked = None if seed is None else self.resolve_seed(seed, len(ids))
        if isinstance(checked, Tensor):
            if bool((checked < 0).any()):
                raise EnvContractError(f"reset: episode seeds must not be negative, got {checked.tolist()[:10]}")
            seeds: np.ndarray = checked.cpu().numpy()
            return seeds
        if checked is not None:
            self._streams.seed(torch.from_numpy(ids), checked)
        return self._streams.take(ids)

    def _reset_done(self, rows: Rows, done: np.ndarray, native_end: np.ndarray) -> Rows:
        """Start the next episodes of the done envs and return the observation of all envs."""
        self._elapsed[done] = 0
        if self._mode is AutoresetMode.SAME_STEP and not self._own:
            done = done & ~native_end  # the vector env has reset the others itself, without a seed
        if not done.any():
            return rows
        first: Rows = self._encode(self._reset_envs(done, None)[0])
        # In-process vector envs of Gymnasium return unchanged observations for the other envs.
        repeats = type(self.vector_env) in (SyncVectorEnv, RowwiseSyncVectorEnv)
        return first if repeats else choose(torch.from_numpy(done), first, rows)

    def _final_rows(self, rows: Rows, infos: dict[str, Any], ended: np.ndarray) -> Rows:
        """Return ``rows`` with the final observations of the envs that ended in SAME_STEP mode."""
        final = infos.get("final_obs")
        if final is None:
            raise EnvContractError(f"{self.vector_env} is in SAME_STEP autoreset mode but gave no info['final_obs']")
        if isinstance(final, np.ndarray) and final.dtype == object:  # one observation per ended env
            space = self.vector_env.single_observation_space
            some = final[np.flatnonzero(ended)[0]]
            rest = [final[i] if ended[i] else some for i in range(self.num_envs)]
            final = concatenate(space, rest, create_empty_array(space, self.num_envs))  # type: ignore[arg-type]
        return choose(torch.from_numpy(ended), self._encode(final), rows)

    def _metrics(self, infos: dict[str, Any], ended: np.ndarray) -> dict[str, Tensor]:
        """Return ``success`` as reported by the envs; in SAME_STEP mode, ended envs report it in ``final_info``."""
        final = infos.get("final_info")
        for name in ("is_success", "success"):
            now, last = infos.get(name), final.get(name) if isinstance(final, dict) else None
            if now is not None or last is not None:
                success = np.zeros(self.num_envs) if now is None else now
                success = success if last is None else np.where(ended, last, success)
                return {"success": self._tensor(success, np.float32)}
        return {}

    def _tensordict(self, rows: Rows) -> TensorDict:
        obs = to_tensordict(rows, torch.Size([self.num_envs]))
        return obs if self.device.type == "cpu" else obs.to(self.device)

    def _tensor(self, values: Any, dtype: Any = None) -> Tensor:
        """Return a copy of ``values`` as a tensor on the env's device."""
        return torch.from_numpy(np.array(values, dtype=dtype)).to(self.device)


def _rgb_image(frame: Any) -> Image.Image:
    """Return the RGB image of an env's ``render``, which may be grey, RGB, RGBA, or a list (the last one counts)."""
    several = isinstance(frame, list | tuple) and len(frame) > 0 and isinstance(frame[-1], np.ndarray)
    pixels = np.asarray(frame[-1] if several else frame)
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[..., 0]
    is_image = pixels.size > 0 and (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (3, 4)))
    if not is_image or pixels.dtype.kind not in "ui" or pixels.min() < 0 or pixels.max() > 255:
        got = "None" if frame is None else f"{type(frame).__name__} of {pixels.dtype} and shape {list(pixels.shape)}"
        raise RenderingError(f"render() of a Gymnasium env returns a uint8 array [H, W, 3], got {got}")
    return Image.fromarray(pixels.astype(np.uint8)).convert("RGB")


def _autoreset_mode(vector_env: VectorEnv, own: bool) -> AutoresetMode:
    """Return the autoreset mode of a vector env; raise ``EnvContractError`` if a reset could count as a step."""
    given, base = vector_env.metadata.get("autoreset_mode"), vector_env.unwrapped
    try:
        mode = given if isinstance(given, AutoresetMode) else AutoresetMode(given)
    except ValueError:
        raise EnvContractError(
            f"{vector_env} must say in metadata['autoreset_mode'] when it resets envs that are done "
            f"({', '.join(m.name for m in AutoresetMode)}), got {given!r}"
        ) from None
    resets_again = isinstance(base, AsyncVectorEnv) and not base.shared_memory
    if mode is AutoresetMode.NEXT_STEP and (resets_again or (not own and vector_env.num_envs > 1)):
        raise EnvContractError(
            f"{vector_env} is in NEXT_STEP autoreset mode, and resets envs once more that were reset with "
            'options={"reset_mask": ...}, which would look like a step. Use make_gymnasium with an id, '
            "GymnasiumVecEnv.from_factory, or a vector env in DISABLED or SAME_STEP mode"
        )
    return mode


def make_gymnasium(
    id: str,
    num_envs: int = 1,
    kwargs: Mapping[str, Any] | None = None,
    max_episode_steps: int | None = None,
    asynchronous: bool = False,
    trusted_modules: Collection[str] = (),
    device: torch.device | str = "cpu",
    seed: int | None = None,
) -> GymnasiumVecEnv:
    """Make ``num_envs`` envs of a Gymnasium id; ``kwargs`` go to the environment's constructor.

    ``"my_module:MyEnv-v0"`` needs a trusted ``my_module``. ``max_episode_steps`` replaces the registered time limit.
    """
    arguments = dict(kwargs or {})
    reserved = [name for name in ("id", "max_episode_steps", "disable_env_checker") if name in arguments]
    if reserved:
        raise ConfigError(
            [f"kwargs.{name}: not an argument of the environment itself; give it beside kwargs" for name in reserved]
        )
    spec = resolve_spec(id, trusted_modules)
    limit = spec.max_episode_steps if max_episode_steps is None else time_limit(max_episode_steps, None)
    factory = functools.partial(single_env, spec, arguments, limit)
    return GymnasiumVecEnv.from_factory(
        factory, num_envs, max_episode_steps=limit, asynchronous=asynchronous, device=device, seed=seed
    )
