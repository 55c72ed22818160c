"""``GymnasiumVecEnv``: a ``gymnasium.vector.VectorEnv`` of any autoreset mode behind the contract of ``VecEnv``."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from embodichain.envs.actions import ActionManager
from embodichain.envs.gymnasium_env.construct import time_limit, vectorize
from embodichain.envs.gymnasium_env.resets import ResetPort
from embodichain.envs.gymnasium_env.seeds import EpisodeSeeds
from embodichain.envs.gymnasium_env.spaces import ActionDecoder, ObservationEncoder, Rows, choose
from embodichain.envs.gymnasium_env.state import SubEnvStates
from embodichain.envs.vec_env import Action, EnvIds, StepResult, VecEnv
from embodichain.errors import EnvContractError, RenderingError


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
        truncated = truncated | (self._elapsed >= self.max_episode_steps)
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
        return obs, self._tensor(reward, np.float32), self._tensor(terminated), self._tensor(truncated), info

    def get_state(self) -> TensorDict:
        if self._states is None or not self.supports_state:
            return super().get_state()
        if self._rows is None:
            self.reset()
        counters = {"elapsed": self._elapsed, "episode": self._episode, "streams": self._seeds.state}
        state = {name: torch.from_numpy(value.copy()) for name, value in counters.items()}
        state["sub_envs"] = torch.from_numpy(self._states.read())
        rows = self._encoder.tensordict(self._rows or {})
        return TensorDict({**state, "observation": rows.clone()}, batch_size=[self.num_envs])

    def set_state(self, state: TensorDictBase, env_ids: EnvIds = None) -> TensorDict:
        if self._states is None or not self.supports_state:
            return super().set_state(state, env_ids)
        if self._rows is None:
            self.reset()
        ids = self.resolve_ids(env_ids).cpu()
        if state.batch_size != ids.shape:
            raise EnvContractError(f"{len(ids)} envs need a state of batch size [{len(ids)}], got {list(state.batch_size)}")
        rows = ids.numpy()
        self._states.write(rows, state["sub_envs"].cpu().numpy())
        self._seeds.set_state(rows, state["streams"].cpu().numpy())
        self._elapsed[rows] = state["elapsed"].cpu().numpy()
        self._episode[rows] = state["episode"].cpu().numpy()
        obs = self._encoder.tensordict(self._rows or {}).to("cpu").clone()
        obs[ids] = state["observation"].to("cpu")
        self._rows = obs.to_dict()
        return self._encoder.tensordict(self._rows)

    def render(self, env_ids: EnvIds = None, camera: str | None = None, size: tuple[int, int] = (240, 320)) -> np.ndarray:
        if camera is not None:
            raise RenderingError(f"a Gymnasium env has one view of its own: expected camera=None, got {camera!r}")
        if self.vector_env.render_mode != "rgb_array":
            raise RenderingError('pass kwargs={"render_mode": "rgb_array"} when making the env, then it can be rendered')
        ids = self.resolve_ids(env_ids).tolist()
        base = self.vector_env.unwrapped
        try:
            frames = [base.envs[i].render() for i in ids] if isinstance(base, SyncVectorEnv) else None
            frames = frames or [frame for i, frame in enumerate(self.vector_env.render() or ()) if i in set(ids)]
        except gym.error.DependencyNotInstalled as error:
            raise RenderingError(f"this Gymnasium env cannot be drawn: {error}") from error
        pictures = torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2).to(torch.float32)
        pictures = torch.nn.functional.interpolate(pictures, size, mode="bilinear", antialias=True, align_corners=False)
        return pictures.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()

    def close(self) -> None:
        self.vector_env.close()
