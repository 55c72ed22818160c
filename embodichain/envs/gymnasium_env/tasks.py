"""Our environments as Gymnasium environments, single or vectorised."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from embodichain.envs.env_cfg import GymCfg
from embodichain.envs.random import combine
from embodichain.envs.vec_env import StepOutcome, VecEnv
from embodichain.envs.wrappers import DefersResets
from embodichain.errors import EnvContractError

Config = VecEnv | GymCfg | Mapping[str, Any] | str
"""A ``VecEnv``, or an id or config to make one from."""
NO_LIMIT = 1 << 40
"""Time limit of an environment whose episodes are truncated by a wrapper."""
_SETTINGS = {field.name for field in fields(GymCfg)}


class TaskGymnasiumEnv(gym.Env[dict[str, Any], Any]):
    """A single env with Gymnasium's interface: numpy observations in nested dicts, without autoreset.

    ``overrides`` are settings of a ``gym_config``. ``info`` is flat, as other libraries expect: ``rewards/<name>``,
    ``metrics/<name>``, ``is_success`` (1 or 0) and ``episode_seed``.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 25}

    def __init__(self, config: Config, render_mode: str | None = None, **overrides: Any) -> None:
        _check_settings(type(self), overrides)
        if overrides.setdefault("num_envs", 1) != 1:
            name = f"embodichain/{config}-v0" if isinstance(config, str) else "id"
            raise EnvContractError(
                f"num_envs: gymnasium.make makes one env, got {overrides['num_envs']}. For a batch use "
                f"gymnasium.make_vec({name!r}, num_envs={overrides['num_envs']})"
            )
        self.vec_env = _open(config, overrides)
        if self.vec_env.num_envs != 1:
            raise EnvContractError(f"a single Gymnasium env needs num_envs=1, got {self.vec_env.num_envs}")
        self.render_mode = render_mode
        self.observation_space = self.vec_env.observation_space
        self.action_space = self.vec_env.action_space
        self._episode_seed = np.int64(-1)
        self._running = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        obs, info = self.vec_env.reset(seed=seed)
        self._running, self._episode_seed = True, _array(info["episode_seed"])[0]
        return _numpy(obs[0]), {"episode_seed": self._episode_seed}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        if not self._running:
            raise gym.error.ResetNeeded("call reset() before step(): no episode is running")
        obs, outcome = _step(self.vec_env, torch.as_tensor(np.asarray(action)).unsqueeze(0))
        terminated, truncated = bool(outcome.terminated[0]), bool(outcome.truncated[0])
        self._running = not (terminated or truncated)
        info = {name: value[0] for name, value in _measures(outcome).items()} | {"episode_seed": self._episode_seed}
        return _numpy(obs[0]), float(outcome.reward[0]), terminated, truncated, info

    def render(self) -> Any:
        return None if self.render_mode is None else self.vec_env.render()[0]

    def close(self) -> None:
        self.vec_env.close()


class RegisteredTaskEnv(TaskGymnasiumEnv):
    """A task as made by ``gymnasium.make``, whose ``TimeLimit`` wrapper replaces the default time limit of the task."""

    def __init__(self, config: Config, render_mode: str | None = None, **overrides: Any) -> None:
        _check_settings(type(self), overrides)
        if not isinstance(config, VecEnv) and overrides.get("num_envs", 1) == 1:
            from embodichain.envs.registration import load_gym_config  # imported here as in _open

            cfg = load_gym_config(config, **overrides)
            usual = load_gym_config(cfg.id).max_episode_steps
            starts = cfg.env.events.demonstration_starts  # these shorten the limit of some episodes
            config = cfg.replace(max_episode_steps=NO_LIMIT) if cfg.max_episode_steps == usual and not starts else cfg
            overrides = {}
        super().__init__(config, render_mode, **overrides)


class TaskGymnasiumVectorEnv(VectorEnv[dict[str, Any], np.ndarray, np.ndarray]):
    """A batch of envs with Gymnasium's vector interface, in any autoreset mode.

    ``reset`` accepts one int seed or a list of episode seeds; ``options={"reset_mask": ...}`` resets some envs only.
    SAME_STEP is the native mode and the fastest; the others leave done envs in their final state.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 25, "autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(
        self,
        config: Config,
        num_envs: int = 1,
        render_mode: str | None = None,
        autoreset_mode: AutoresetMode | str = AutoresetMode.SAME_STEP,
        **overrides: Any,
    ) -> None:
        _check_settings(type(self), overrides)
        known = [mode.value for mode in AutoresetMode]
        if not isinstance(autoreset_mode, AutoresetMode) and autoreset_mode not in known:
            raise ValueError(f"autoreset_mode: expected one of {', '.join(known)}, got {autoreset_mode!r}")
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.vec_env = _open(config, {**overrides, "num_envs": num_envs})
        if self.autoreset_mode is not AutoresetMode.SAME_STEP and not isinstance(self.vec_env, DefersResets):
            raise EnvContractError(f"{type(self.vec_env).__name__} resets itself: use AutoresetMode.SAME_STEP")
        self.metadata = {**self.metadata, "autoreset_mode": self.autoreset_mode}
        self.num_envs = self.vec_env.num_envs
        self.render_mode = render_mode
        self.max_episode_steps = self.vec_env.max_episode_steps
        self.single_observation_space = self.vec_env.observation_space
        self.single_action_space = self.vec_env.action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._ended = np.zeros(self.num_envs, dtype=np.bool_)
        self._seeds = np.full(self.num_envs, -1, dtype=np.int64)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        mask = np.asarray((options or {}).get("reset_mask", np.ones(self.num_envs)), dtype=np.bool_)
        if mask.shape != (self.num_envs,) or not mask.any():
            raise ValueError(f"reset_mask must be [{self.num_envs}] with at least one true value, got {mask}")
        super().reset(seed=seed if isinstance(seed, int) else None)
        obs, info = self._begin(seed, np.flatnonzero(mask))
        self._ended[mask], self._seeds = False, _array(info["episode_seed"])
        return _numpy(obs), self._info_of({"episode_seed": self._seeds}, mask)

    def _begin(self, seed: int | list[int | None] | None, env_ids: np.ndarray) -> tuple[TensorDict, dict[str, Any]]:
        """Start episodes; a list of seeds also determines the episodes that follow."""
        if seed is None or isinstance(seed, int):
            return self.vec_env.reset(seed, torch.from_numpy(env_ids))
        if len(seed) != self.num_envs:
            raise ValueError(f"a list of seeds needs one per env: expected {self.num_envs}, got {len(seed)}")
        given = [i for i in env_ids.tolist() if seed[i] is not None]
        others = [i for i in env_ids.tolist() if seed[i] is None]
        result = self.vec_env.reset(None, others)
        if given:
            episodes = torch.tensor([seed[i] for i in given], dtype=torch.int64)
            common = torch.zeros(1, dtype=torch.int64)
            for episode in episodes:
                common = combine(common, episode.reshape(1))
            self.vec_env.reset(int(common) & ((1 << 61) - 1), given)
            result = self.vec_env.reset(episodes, given)
        return result

    def step(self, actions: np.ndarray) -> tuple[dict[str, Any], np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        given = torch.as_tensor(np.asarray(actions))
        if self.autoreset_mode is AutoresetMode.SAME_STEP:
            return self._step_and_reset(given)
        resetting = self._ended
        if resetting.any():
            if self.autoreset_mode is AutoresetMode.DISABLED:
                ids = ", ".join(map(str, np.flatnonzero(resetting)))
                raise gym.error.ResetNeeded(f'env(s) {ids} ended: reset them with options={{"reset_mask": ...}}')
            given = torch.where(torch.from_numpy(resetting).view(-1, *[1] * (given.ndim - 1)), 0, given)
        obs, outcome = _step(self.vec_env, given)
        if resetting.any() and isinstance(self.vec_env, DefersResets):
            obs, seeds = self.vec_env.reset_done(torch.from_numpy(resetting).to(self.vec_env.device))
            self._seeds = _array(seeds)
        reward = np.where(resetting, np.float32(0.0), _array(outcome.reward))
        terminated, truncated = _array(outcome.terminated) & ~resetting, _array(outcome.truncated) & ~resetting
        self._ended = terminated | truncated
        infos = self._info_of({"episode_seed": self._seeds}, np.ones(self.num_envs, dtype=np.bool_))
        infos.update(self._info_of(_measures(outcome), ~resetting))
        return _numpy(obs), reward, terminated, truncated, infos

    def _step_and_reset(
        self, actions: Tensor
    ) -> tuple[dict[str, Any], np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Step in SAME_STEP mode; the final observations and infos are in ``final_obs`` and ``final_info``."""
        obs, reward, terminated, truncated, info = self.vec_env.step(actions)
        outcome = StepOutcome(info["rewards"], reward, terminated, truncated, info["metrics"])
        done, before, self._seeds = _array(terminated | truncated), self._seeds, _array(info["episode_seed"])
        infos = self._info_of(_measures(outcome), ~done)
        if done.any():
            infos["final_obs"] = np.full(self.num_envs, None, dtype=object)
            for i in np.flatnonzero(done).tolist():
                infos["final_obs"][i] = _numpy(info["final_observation"][i])
            infos["final_info"] = self._info_of({**_measures(outcome), "episode_seed": before}, done)
            infos["_final_obs"], infos["_final_info"] = done.copy(), done.copy()
        infos.update(self._info_of({"episode_seed": self._seeds}, np.ones(self.num_envs, dtype=np.bool_)))
        return _numpy(obs), _array(reward), _array(terminated), _array(truncated), infos

    def _info_of(self, values: Mapping[str, Any], mask: np.ndarray) -> dict[str, Any]:
        """Return values with their masks as in Gymnasium's vector info; values outside the mask are zero."""
        found: dict[str, Any] = {}
        for name, value in values.items() if mask.any() else ():
            found[name], found[f"_{name}"] = np.where(mask, value, np.zeros_like(value)), mask.copy()
        return found

    def render(self) -> tuple[Any, ...] | None:
        return None if self.render_mode is None else tuple(self.vec_env.render())

    def close_extras(self, **kwargs: Any) -> None:
        self.vec_env.close()


def _check_settings(cls: type, overrides: Mapping[str, Any]) -> None:
    """Raise ``TypeError`` for an unknown argument, as TorchRL and others expect."""
    for name in overrides:
        if name not in _SETTINGS:
            raise TypeError(f"{cls.__name__}.__init__() got an unexpected keyword argument {name!r}")


def _open(config: Config, overrides: Mapping[str, Any]) -> VecEnv:
    if isinstance(config, VecEnv):
        return config
    from embodichain.envs.registration import make  # here, as registration imports this module

    return make(config, **overrides)


def _step(env: VecEnv, action: Tensor) -> tuple[TensorDict, StepOutcome]:
    """Step and return the observation reached; done envs are not reset if the environment can defer resets."""
    if isinstance(env, DefersResets):
        outcome = env.advance(action)
        return env.observe(torch.ones(env.num_envs, dtype=torch.bool, device=env.device)), outcome
    _, reward, terminated, truncated, info = env.step(action)
    return info["final_observation"], StepOutcome(info["rewards"], reward, terminated, truncated, info["metrics"])


def _array(value: Tensor) -> np.ndarray:
    """Return a numpy array that owns its memory."""
    return np.array(value.detach().cpu().numpy())


def _numpy(obs: TensorDictBase) -> dict[str, Any]:
    return {str(k): _numpy(v) if isinstance(v, TensorDictBase) else _array(v) for k, v in obs.items()}


def _measures(outcome: StepOutcome) -> dict[str, Any]:
    """Return the metrics of a step for the info dict, ``[num_envs]`` each."""
    groups = {"rewards": outcome.rewards, "metrics": outcome.metrics}
    found: dict[str, Any] = {
        f"{group}/{name}": _array(value).astype(np.float64)
        for group, values in groups.items()
        for name, value in values.items()
    }
    success = outcome.metrics.get("success")
    return found if success is None else {**found, "is_success": (_array(success) > 0.5).astype(np.float32)}
