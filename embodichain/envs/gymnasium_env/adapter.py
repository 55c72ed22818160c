"""``GymnasiumVecEnv``: a ``gymnasium.vector.VectorEnv`` of any autoreset mode behind the contract of ``VecEnv``."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from embodichain.envs.actions import ActionManager
from embodichain.envs.gymnasium_env.construct import (
    RowwiseSyncVectorEnv,
    SubEnvStates,
    factory_of,
    time_limit,
    vectorize,
)
from embodichain.envs.gymnasium_env.spaces import ActionDecoder, ObservationEncoder, Rows, choose
from embodichain.envs.gymnasium_env.tasks import TaskGymnasiumVectorEnv
from embodichain.envs.random import combine
from embodichain.envs.vec_env import Action, EnvIds, StepResult, VecEnv
from embodichain.errors import EnvContractError, RenderingError

# MERGED seeds: Which seed each episode of a Gymnasium env gets: a hash of (seed, env index, episode number).


_AHEAD = 64  # episodes whose seeds are computed at once, so that a reset costs a look-up
_MASK = (1 << 31) - 1  # some simulators behind Gymnasium take 32-bit seeds only


class EpisodeSeeds:
    """One counter-based stream of episode seeds in [0, 2**31) per env, the same whatever ``num_envs`` is."""

    def __init__(self, num_envs: int, seed: int) -> None:
        self._key = torch.zeros(num_envs, dtype=torch.int64)
        self._first = np.zeros(num_envs, dtype=np.int64)  # episode number of column 0 of the table
        self._used = np.zeros(num_envs, dtype=np.int64)
        self._table = np.zeros((num_envs, _AHEAD), dtype=np.int64)
        self.seed(np.arange(num_envs), seed)

    def seed(self, env_ids: np.ndarray, seed: int) -> None:
        """Give these envs the streams of ``(seed, env index)`` from their first episode on."""
        ids = torch.from_numpy(env_ids)
        self._key[ids] = combine(torch.full_like(ids, seed & ((1 << 62) - 1)), ids)
        self._first[env_ids] = 0
        self._fill(env_ids)

    def take(self, env_ids: np.ndarray) -> np.ndarray:
        """Return the seeds ``[len(env_ids)]`` of the envs' next episodes and count them as begun."""
        spent = env_ids[self._used[env_ids] == _AHEAD]
        if len(spent):
            self._first[spent] += _AHEAD
            self._fill(spent)
        seeds = self._table[env_ids, self._used[env_ids]]
        self._used[env_ids] += 1
        return seeds

    @property
    def state(self) -> np.ndarray:
        """The streams as int64 ``[num_envs, 2]``: key, number of the next episode."""
        return np.stack([self._key.numpy(), self._first + self._used], axis=1)

    def set_state(self, env_ids: np.ndarray, state: np.ndarray) -> None:
        """Continue the streams of these envs where ``state`` ``[len(env_ids), 2]`` was taken."""
        self._key[torch.from_numpy(env_ids)] = torch.from_numpy(state[:, 0].copy())
        self._first[env_ids] = state[:, 1]
        self._fill(env_ids)

    def _fill(self, env_ids: np.ndarray) -> None:
        episodes = torch.from_numpy(self._first[env_ids]).unsqueeze(1) + torch.arange(_AHEAD)
        keys = self._key[torch.from_numpy(env_ids)].unsqueeze(1)
        self._table[env_ids] = (combine(keys, episodes) & _MASK).numpy()
        self._used[env_ids] = 0


# MERGED frames: Pictures of Gymnasium envs in the size that was asked for.


def draw(vector_env: VectorEnv, env_ids: list[int], camera: str | None, size: tuple[int, int]) -> np.ndarray:
    """Return uint8 frames ``[len(env_ids), H, W, 3]`` of the envs' present states."""
    if camera is not None:
        raise RenderingError(f"a Gymnasium env has one view of its own: expected camera=None, got {camera!r}")
    if vector_env.render_mode != "rgb_array":
        raise RenderingError('pass kwargs={"render_mode": "rgb_array"} when making the env, then it can be rendered')
    base = vector_env.unwrapped
    try:
        if isinstance(base, SyncVectorEnv):
            frames = [base.envs[i].render() for i in env_ids]
        else:
            every = vector_env.render() or ()
            frames = [every[i] for i in env_ids]
    except gym.error.DependencyNotInstalled as error:
        raise RenderingError(f"this Gymnasium env cannot be drawn: {error}") from error
    pictures = torch.from_numpy(np.stack([np.asarray(frame, dtype=np.uint8) for frame in frames]))
    if tuple(pictures.shape[1:3]) == size:
        return pictures.numpy()
    resized = torch.nn.functional.interpolate(
        pictures.permute(0, 3, 1, 2).to(torch.float32), size, mode="bilinear", antialias=True, align_corners=False
    )
    return resized.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()


# MERGED resets: How a vector env is reset in part, and what must hold so that no step is ever made up.


_SEEDED_PER_ENV = (SyncVectorEnv, RowwiseSyncVectorEnv, AsyncVectorEnv, TaskGymnasiumVectorEnv)


class ResetPort:
    """Resets some envs of a vector env, each from its own seed where the vector env can do that."""

    def __init__(self, vector_env: VectorEnv, encode: Callable[[Any], Rows], episode_seeds: bool | None) -> None:
        self._env = vector_env
        self.num_envs = int(vector_env.num_envs)
        self.mode = _mode(vector_env)
        base = vector_env.unwrapped
        self.takes_episode_seeds = isinstance(base, _SEEDED_PER_ENV) if episode_seeds is None else episode_seeds
        if isinstance(base, AsyncVectorEnv) and self.mode is AutoresetMode.NEXT_STEP and not base.shared_memory:
            raise EnvContractError(
                "AsyncVectorEnv(shared_memory=False) in NEXT_STEP mode resets an env again after it was reset by mask, "
                "which would look like a step; make it with autoreset_mode=AutoresetMode.DISABLED or shared_memory=True"
            )
        # Gymnasium's own classes are known to honour reset_mask; a wrapper around them, or another class, is tried.
        self.partial = type(vector_env) in _SEEDED_PER_ENV or self._honours_mask(encode)
        self.repeats_others = type(vector_env) in (SyncVectorEnv, RowwiseSyncVectorEnv)
        """Whether a partial reset returns exactly what the other envs observed before."""
        if not self.partial and self.mode is not AutoresetMode.SAME_STEP:
            raise EnvContractError(
                f"{vector_env} is in {self.mode.name} autoreset mode and its reset() does not honour "
                'options={"reset_mask": ...}, so envs that are done cannot be reset in the same step. Use '
                "make_gymnasium with an id, GymnasiumVecEnv.from_factory, or a vector env in SAME_STEP mode"
            )

    def reset(
        self, mask: np.ndarray, env_ids: np.ndarray, seeds: np.ndarray | int | None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the envs of ``mask`` ``[num_envs]``; ``seeds`` is one per env of ``env_ids``, one for all, or none."""
        per_env: list[int | None] | int | None = seeds if isinstance(seeds, int) else None
        if isinstance(seeds, np.ndarray):
            per_env = [None] * self.num_envs
            for env, seed in zip(env_ids.tolist(), seeds.tolist(), strict=True):
                per_env[env] = seed
        if mask.all():
            return self._env.reset(seed=per_env)  # type: ignore[arg-type]  # a list is more than VectorEnv promises
        if not self.partial:
            raise EnvContractError(
                f"{self._env} cannot reset envs {env_ids.tolist()[:10]} alone: "
                'its reset() does not honour options={"reset_mask": ...}'
            )
        return self._env.reset(seed=per_env, options={"reset_mask": mask.copy()})  # type: ignore[arg-type]

    def _honours_mask(self, encode: Callable[[Any], Rows]) -> bool:
        """Step once, reset the first env by mask, and see whether the others are left where they were."""
        if self.num_envs == 1:
            return True
        self._env.reset()
        self._env.action_space.seed(0)
        before = encode(self._env.step(self._env.action_space.sample())[0])
        mask = np.zeros(self.num_envs, dtype=np.bool_)
        mask[0] = True
        try:
            after = encode(self._env.reset(options={"reset_mask": mask})[0])
        except (
            ValueError,
            TypeError,
            KeyError,
            NotImplementedError,
        ):  # how wrappers say that they reset all or nothing
            return False
        return _same_rows(before, after)


def _same_rows(before: Rows, after: Rows) -> bool:
    """Whether all envs but the first observe the same."""
    return all(
        _same_rows(value, after[name]) if isinstance(value, dict) else torch.equal(value[1:], after[name][1:])
        for name, value in before.items()
    )


def _mode(vector_env: VectorEnv) -> AutoresetMode:
    mode = vector_env.metadata.get("autoreset_mode")
    try:
        return mode if isinstance(mode, AutoresetMode) else AutoresetMode(mode)
    except ValueError:
        raise EnvContractError(
            f"{vector_env} must say in metadata['autoreset_mode'] when it resets envs that are done "
            f"({', '.join(m.name for m in AutoresetMode)}), got {mode!r}"
        ) from None


class GymnasiumVecEnv(VecEnv):
    """A Gymnasium vector env as a ``VecEnv``; see the package's docstring for what is promised.

    ``max_episode_steps`` is needed when the vector env does not say its own limit; where both are known the smaller one
    holds, and envs that reach it are truncated here. ``seed`` starts the streams of episode seeds (default: at random).
    ``episode_seeds`` says that ``reset(seed=[one per env])`` is honoured, for vector envs that are not Gymnasium's own.
    """

    def __init__(
        self,
        vector_env: VectorEnv,
        *,
        device: torch.device | str = "cpu",
        max_episode_steps: int | None = None,
        seed: int | None = None,
        episode_seeds: bool | None = None,
    ) -> None:
        if not isinstance(vector_env, VectorEnv):
            raise EnvContractError(
                f"expected a gymnasium.vector.VectorEnv, got {type(vector_env).__name__}; use make_gymnasium for an id "
                "and GymnasiumVecEnv.from_factory for a function that makes one env"
            )
        self.vector_env = vector_env
        self.num_envs = int(vector_env.num_envs)
        self.device = torch.device(device)
        self.max_episode_steps = time_limit(vector_env, max_episode_steps)
        self._encoder = ObservationEncoder(vector_env.single_observation_space, self.num_envs, self.device)
        self._decode = ActionDecoder(vector_env.single_action_space, self.num_envs)
        self.observation_space = self._encoder.space
        self.action_space = self._decode.space
        self.action_manager = ActionManager("action", self.action_space, self.num_envs, "cpu")
        self.seed = secrets.randbits(61) if seed is None else seed
        self._seeds = EpisodeSeeds(self.num_envs, self.seed)
        self._port = ResetPort(vector_env, self._encoder.encode, episode_seeds)
        self._states = SubEnvStates.of(vector_env)
        self.supports_state = self._states is not None and self._port.takes_episode_seeds
        self._elapsed = np.zeros(self.num_envs, dtype=np.int64)
        self._episode = np.full(self.num_envs, -1, dtype=np.int64)
        self._rows: Rows | None = None  # the observation last returned; None before the first reset

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
        """Vectorise ``num_envs`` envs made by a function: in this process, or ``asynchronous`` in one process each."""
        vector_env, limit = vectorize(make_env, num_envs, asynchronous, max_episode_steps)
        return cls(vector_env, device=device, max_episode_steps=limit, seed=seed)

    # --- the contract ---------------------------------------------------------------------------------------------

    def reset(self, seed: int | Tensor | None = None, env_ids: EnvIds = None) -> tuple[TensorDict, dict[str, Any]]:
        ids = self.resolve_ids(env_ids).cpu().numpy()
        mask = np.zeros(self.num_envs, dtype=np.bool_)
        mask[ids] = True
        if self._rows is None and not mask.all():
            raise EnvContractError("the first reset must be of all envs: call reset() without env_ids once")
        batch, infos = self._port.reset(mask, ids, self._seeds_for(ids, seed))
        rows = self._encoder.encode(batch)
        self._rows = rows if self._rows is None or mask.all() else choose(torch.from_numpy(mask), rows, self._rows)
        self._elapsed[ids] = 0
        return self._encoder.tensordict(self._rows), {"episode_seed": self._episode_seed(), "gymnasium": infos}

    def step(self, action: Action) -> StepResult:
        if self._rows is None:
            raise EnvContractError("call reset() before the first step()")
        native = self._decode(self.action_manager.unwrap(action, torch.from_numpy(self._elapsed)))
        batch, reward, terminated, truncated, infos = self.vector_env.step(native)
        self._elapsed += 1
        terminated, native_end = np.asarray(terminated, np.bool_), np.logical_or(terminated, truncated)
        truncated = np.asarray(truncated, np.bool_) | (self._elapsed >= self.max_episode_steps)
        done = terminated | truncated

        self._rows = rows = reached = self._encoder.encode(batch)
        if self._port.mode is AutoresetMode.SAME_STEP and native_end.any():
            reached = self._final_rows(rows, infos, native_end)
        if done.any():
            self._rows = self._restart(rows, done, native_end)
        obs = self._encoder.tensordict(self._rows)
        info = {
            "final_observation": obs if reached is self._rows else self._encoder.tensordict(reached),
            "rewards": {},
            "metrics": self._metrics(infos, native_end),
            "episode_seed": self._episode_seed(),
            "gymnasium": infos,
        }
        flags = torch.from_numpy(truncated).to(self.device)  # computed above: nobody else knows this array
        return obs, self._tensor(reward, np.float32), self._tensor(terminated), flags, info

    def get_state(self) -> TensorDict:
        if self._states is None or not self.supports_state:
            return super().get_state()
        if self._rows is None:
            self.reset()
        counters = {"elapsed": self._elapsed, "episode": self._episode, "streams": self._seeds.state}
        state = {name: torch.from_numpy(value.copy()) for name, value in counters.items()}
        state["sub_envs"] = torch.from_numpy(self._states.read())
        rows = self._encoder.tensordict(self._rows or {})
        return TensorDict({**state, "observation": rows.clone()}, batch_size=[self.num_envs]).to(self.device)

    def set_state(self, state: TensorDictBase, env_ids: EnvIds = None) -> TensorDict:
        if self._states is None or not self.supports_state:
            return super().set_state(state, env_ids)
        if self._rows is None:
            self.reset()
        ids = self.resolve_ids(env_ids).cpu()
        if state.batch_size != ids.shape:
            raise EnvContractError(
                f"{len(ids)} envs need a state of batch size [{len(ids)}], got {list(state.batch_size)}"
            )
        rows = ids.numpy()
        self._states.write(rows, state["sub_envs"].cpu().numpy())
        self._seeds.set_state(rows, state["streams"].cpu().numpy())
        self._elapsed[rows] = state["elapsed"].cpu().numpy()
        self._episode[rows] = state["episode"].cpu().numpy()
        obs = self._encoder.tensordict(self._rows or {}).to("cpu").clone()
        obs[ids] = state["observation"].to("cpu")
        self._rows = obs.to_dict()
        return self._encoder.tensordict(self._rows)

    def render(
        self, env_ids: EnvIds = None, camera: str | None = None, size: tuple[int, int] = (240, 320)
    ) -> np.ndarray:
        return draw(self.vector_env, self.resolve_ids(env_ids).tolist(), camera, size)

    def close(self) -> None:
        self.vector_env.close()

    # --- inside ---------------------------------------------------------------------------------------------------

    def _seeds_for(self, ids: np.ndarray, seed: int | Tensor | None) -> np.ndarray | int | None:
        """Return what the vector env is reset with, and note the episodes that begin."""
        if not self._port.takes_episode_seeds:
            if isinstance(seed, Tensor) or (seed is not None and len(ids) < self.num_envs):
                raise EnvContractError(
                    f"{self.vector_env} takes one seed for all envs: expected reset(seed=an int) of all envs. If its "
                    "reset() takes a list of seeds, say so with GymnasiumVecEnv(..., episode_seeds=True)"
                )
            return seed
        if isinstance(seed, Tensor):
            seeds = seed.detach().cpu().reshape(-1).to(torch.int64).numpy()
            if len(seeds) != len(ids) or (seeds < 0).any():
                raise EnvContractError(
                    f"reset of {len(ids)} envs needs as many episode seeds, none below 0, got {seeds.tolist()[:10]}"
                )
        else:
            if seed is not None:
                self._seeds.seed(ids, int(seed))
            seeds = self._seeds.take(ids)
        self._episode[ids] = seeds
        return seeds

    def _restart(self, rows: Rows, done: np.ndarray, native_end: np.ndarray) -> Rows:
        """Begin the next episode of the envs that are done and return what all envs observe then."""
        self._elapsed[done] = 0
        if self._port.mode is AutoresetMode.SAME_STEP and not self._port.takes_episode_seeds:
            done = done & ~native_end  # the others were reset by the vector env, and there is no seed to give them
        ids = np.flatnonzero(done)
        if not len(ids):
            return rows
        batch, _ = self._port.reset(done, ids, self._seeds_for(ids, None))
        restarted: Rows = self._encoder.encode(batch)
        return restarted if self._port.repeats_others else choose(torch.from_numpy(done), restarted, rows)

    def _final_rows(self, rows: Rows, infos: dict[str, Any], ended: np.ndarray) -> Rows:
        """Return ``rows`` with what the envs that ended in SAME_STEP mode really reached."""
        final = infos.get("final_obs")
        if final is None:
            raise EnvContractError(f"{self.vector_env} is in SAME_STEP autoreset mode but gave no info['final_obs']")
        if (
            isinstance(final, np.ndarray) and final.dtype == object
        ):  # Gymnasium's way: one observation per env that ended
            space = self.vector_env.single_observation_space
            some = final[np.flatnonzero(ended)[0]]
            rest = [final[i] if ended[i] else some for i in range(self.num_envs)]
            final = concatenate(space, rest, create_empty_array(space, self.num_envs))  # type: ignore[arg-type]
        return choose(torch.from_numpy(ended), self._encoder.encode(final), rows)

    def _metrics(self, infos: dict[str, Any], ended: np.ndarray) -> dict[str, Tensor]:
        """Return ``success`` as the envs tell it; those that ended in SAME_STEP mode tell it in ``final_info``."""
        if not infos:
            return {}
        final = infos.get("final_info")
        for name in ("is_success", "success"):
            now, last = infos.get(name), final.get(name) if isinstance(final, dict) else None
            if now is None and last is None:
                continue
            success = np.zeros(self.num_envs) if now is None else np.asarray(now, dtype=np.float32)
            if last is not None:
                success = np.where(ended, np.asarray(last, dtype=np.float32), success)
            return {"success": self._tensor(success, np.float32)}
        return {}

    def _episode_seed(self) -> Tensor:
        return self._tensor(self._episode)

    def _tensor(self, values: Any, dtype: Any = None) -> Tensor:
        """Return a tensor on the env's device that shares nothing with ``values``."""
        return torch.from_numpy(np.array(values, dtype=dtype)).to(self.device)


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

    ``"my_module:MyEnv-v0"`` imports ``my_module`` if it is among ``trusted_modules``. ``max_episode_steps`` replaces
    the limit that is registered with the id, and is needed where none is.
    """
    make_env, limit = factory_of(id, kwargs, max_episode_steps, trusted_modules)
    return GymnasiumVecEnv.from_factory(
        make_env, num_envs, max_episode_steps=limit, asynchronous=asynchronous, device=device, seed=seed
    )
