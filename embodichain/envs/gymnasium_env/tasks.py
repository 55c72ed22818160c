"""Our environments as Gymnasium environments, single or batched."""

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from tensordict import TensorDictBase
from torch import Tensor

from embodichain.envs.vec_env import VecEnv
from embodichain.errors import EnvContractError

Config = VecEnv | Mapping[str, Any] | str
"""An environment of ours, or the id or config of one."""


class TaskGymnasiumEnv(gym.Env[dict[str, Any], Any]):
    """One env of ours with Gymnasium's interface: numpy observations in nested dicts, and no auto-reset.

    ``info`` has ``rewards`` and ``metrics`` as floats, ``episode_seed``, and ``is_success`` if the task measures it.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 25}

    def __init__(self, config: Config, render_mode: str | None = None, **overrides: Any) -> None:
        self.vec_env = _open(config, num_envs=1, **overrides)
        if self.vec_env.num_envs != 1:
            raise EnvContractError(f"a single Gymnasium env needs num_envs=1, got {self.vec_env.num_envs}")
        self.render_mode = render_mode
        self.observation_space = self.vec_env.observation_space
        self.action_space = self.vec_env.action_space
        self._running = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        obs, info = self.vec_env.reset(seed=seed)
        self._running = True
        return _numpy(obs[0]), _scalars(info)

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        if not self._running:
            raise gym.error.ResetNeeded("call reset() before step(): no episode is running")
        _, reward, terminated, truncated, info = self.vec_env.step(torch.as_tensor(np.asarray(action)).unsqueeze(0))
        self._running = not (bool(terminated[0]) or bool(truncated[0]))
        obs = _numpy(info["final_observation"][0])
        return obs, float(reward[0]), bool(terminated[0]), bool(truncated[0]), _scalars(info)

    def render(self) -> Any:
        # After an episode has ended, this is the reset state of the next one.
        return None if self.render_mode is None else self.vec_env.render()[0]

    def close(self) -> None:
        self.vec_env.close()


class TaskGymnasiumVectorEnv(VectorEnv[dict[str, Any], np.ndarray, np.ndarray]):
    """A batch of our envs with Gymnasium's vector interface, in SAME_STEP autoreset mode.

    ``reset`` takes one seed for all, or a list of episode seeds; ``options={"reset_mask": ...}`` resets some envs only.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 25, "autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self, config: Config, num_envs: int = 1, render_mode: str | None = None, **overrides: Any) -> None:
        self.vec_env = _open(config, num_envs=num_envs, **overrides)
        self.num_envs = self.vec_env.num_envs
        self.render_mode = render_mode
        self.max_episode_steps = self.vec_env.max_episode_steps
        self.single_observation_space = self.vec_env.observation_space
        self.single_action_space = self.vec_env.action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        mask = np.asarray((options or {}).get("reset_mask", np.ones(self.num_envs)), dtype=np.bool_)
        if mask.shape != (self.num_envs,) or not mask.any():
            raise ValueError(f"reset_mask must be [{self.num_envs}] with at least one true value, got {mask}")
        super().reset(seed=seed if isinstance(seed, int) else None)
        env_ids = np.flatnonzero(mask)
        obs, info = self.vec_env.reset(_episodes(seed, env_ids, self.num_envs), torch.from_numpy(env_ids))
        return _numpy(obs), {"episode_seed": _array(info["episode_seed"]), "_episode_seed": mask}

    def step(self, actions: np.ndarray) -> tuple[dict[str, Any], np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.vec_env.step(torch.as_tensor(np.asarray(actions)))
        done = _array(terminated | truncated)
        infos: dict[str, Any] = {
            "episode_seed": _array(info["episode_seed"]),
            "_episode_seed": np.ones(self.num_envs, dtype=np.bool_),
        }
        if not done.all():
            infos.update(_masked(info, ~done))
        if done.any():
            infos["final_obs"] = np.full(self.num_envs, None, dtype=object)
            for i in np.flatnonzero(done).tolist():
                infos["final_obs"][i] = _numpy(info["final_observation"][i])
            infos["final_info"] = _masked(info, done)
            infos["_final_obs"], infos["_final_info"] = done.copy(), done.copy()
        return _numpy(obs), _array(reward), _array(terminated), _array(truncated), infos

    def render(self) -> tuple[Any, ...] | None:
        return None if self.render_mode is None else tuple(self.vec_env.render())

    def close_extras(self, **kwargs: Any) -> None:
        self.vec_env.close()


def _open(config: Config, num_envs: int, **overrides: Any) -> VecEnv:
    if isinstance(config, VecEnv):
        return config
    from embodichain.envs.registration import make  # registration knows this module: importing it above is a cycle

    return make(config, num_envs=num_envs, **overrides)


def _episodes(seed: int | list[int | None] | None, env_ids: np.ndarray, num_envs: int) -> int | Tensor | None:
    """Return what ``VecEnv.reset`` takes: one seed for all, or those of the list that are asked for."""
    if seed is None or isinstance(seed, int):
        return seed
    if len(seed) != num_envs:
        raise ValueError(f"a list of seeds needs one per env: expected {num_envs}, got {len(seed)}")
    chosen = [seed[int(i)] for i in env_ids]
    if all(value is None for value in chosen):
        return None
    if any(value is None for value in chosen):
        raise ValueError("a list of seeds must give a seed to every env that is reset, or to none")
    return torch.tensor(chosen, dtype=torch.int64)


def _array(value: Tensor) -> np.ndarray:
    """Return a numpy array that owns its memory."""
    return np.array(value.detach().cpu().numpy())


def _numpy(obs: TensorDictBase) -> dict[str, Any]:
    return {str(k): _numpy(v) if isinstance(v, TensorDictBase) else _array(v) for k, v in obs.items()}


def _scalars(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first env's info as plain numbers."""
    parts = {name: {k: float(v[0]) for k, v in info[name].items()} for name in ("rewards", "metrics") if name in info}
    if "success" in parts.get("metrics", {}):
        parts["is_success"] = bool(parts["metrics"]["success"])  # type: ignore[assignment]
    return {**parts, "episode_seed": int(info["episode_seed"][0])}


def _masked(info: Mapping[str, Any], mask: np.ndarray) -> dict[str, Any]:
    """Return named measures with the mask of the envs they are about, as Gymnasium pairs them."""
    found: dict[str, Any] = {}
    for group in ("rewards", "metrics"):
        if info[group]:
            found[group] = {name: _array(value) for name, value in info[group].items()}
            found[group].update({f"_{name}": mask.copy() for name in info[group]})
            found[f"_{group}"] = mask.copy()
    if "success" in info["metrics"]:
        found["is_success"], found["_is_success"] = _array(info["metrics"]["success"]) > 0.5, mask.copy()
    return found
