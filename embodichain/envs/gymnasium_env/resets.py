"""How a vector env is reset in part, and what must hold so that no step is ever made up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from embodichain.envs.gymnasium_env.spaces import Rows
from embodichain.envs.gymnasium_env.sync import RowwiseSyncVectorEnv
from embodichain.envs.gymnasium_env.tasks import TaskGymnasiumVectorEnv
from embodichain.errors import EnvContractError

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
