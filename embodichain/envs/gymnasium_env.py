"""Any Gymnasium environment as a ``VecEnv``: same-step resets, final observations and replayable episodes.

::

    env = make_gymnasium("CartPole-v1", num_envs=64)                     # by id
    env = GymnasiumVecEnv.from_factory(lambda: MyEnv(), num_envs=64)     # by a function that makes one env
    env = GymnasiumVecEnv(my_vector_env)                                 # by a gymnasium.vector.VectorEnv

How each of Gymnasium's autoreset modes gives the one contract, without ever returning a step that was none:

* DISABLED (what ids and factories get): after a step, the envs that are done are reset with a ``reset_mask``.
* NEXT_STEP: the same; a reset by mask also calls off the reset that the vector env would do instead of its next step.
  A vector env that ignores ``reset_mask`` cannot be used in this mode and is refused when it is wrapped.
* SAME_STEP: the final observation comes from ``info["final_obs"]``.

Every episode is started from a seed of its own, which is ``info["episode_seed"]``: ``reset(seed=that_tensor)``, or plain
``gymnasium.make(id).reset(seed=int(that_tensor[i]))``, starts it again. (So a SAME_STEP vector env is reset once more
after its own reset; the other modes are faster.) Vector envs other than Gymnasium's own usually take one seed for all
envs: for them ``episode_seed`` is -1 and only an int can seed them, unless ``episode_seeds=True`` says they take a list.

``info["gymnasium"]`` is the info of the step as Gymnasium gave it; ``is_success`` or ``success`` in it becomes
``info["metrics"]["success"]``. How observations and actions are converted is said in ``gymnasium_spaces.py``.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from embodichain.envs import gymnasium_state as saved
from embodichain.envs.actions import ActionManager
from embodichain.envs.gymnasium_make import make_single, resolve_spec, time_limit
from embodichain.envs.gymnasium_seeds import EpisodeSeeds
from embodichain.envs.gymnasium_spaces import ActionDecoder, ObservationEncoder
from embodichain.envs.gymnasium_task import TaskGymnasiumEnv, TaskGymnasiumVectorEnv
from embodichain.envs.vec_env import Action, EnvIds, StepResult, VecEnv
from embodichain.errors import EnvContractError, RenderingError
