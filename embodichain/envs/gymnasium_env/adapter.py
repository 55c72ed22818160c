"""``GymnasiumVecEnv``: a ``gymnasium.vector.VectorEnv`` of any autoreset mode behind the contract of ``VecEnv``."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from embodichain.envs.actions import ActionManager
from embodichain.envs.gymnasium_env.construct import factory_of, time_limit, vectorize
from embodichain.envs.gymnasium_env.frames import draw
from embodichain.envs.gymnasium_env.resets import ResetPort
from embodichain.envs.gymnasium_env.seeds import EpisodeSeeds
from embodichain.envs.gymnasium_env.spaces import ActionDecoder, ObservationEncoder, Rows, choose
from embodichain.envs.gymnasium_env.state import SubEnvStates
from embodichain.envs.vec_env import Action, EnvIds, StepResult, VecEnv
from embodichain.errors import EnvContractError


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
