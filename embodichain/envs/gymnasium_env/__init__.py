"""Gymnasium environments as ``VecEnv`` (``adapter``), and our environments as Gymnasium environments (``tasks``).

::

    env = make_gymnasium("CartPole-v1", num_envs=64)                     # by id
    env = GymnasiumVecEnv.from_factory(lambda: MyEnv(), num_envs=64)     # from a function that makes one env
    env = GymnasiumVecEnv(my_vector_env)                                 # from a gymnasium.vector.VectorEnv

All autoreset modes of Gymnasium give the same contract; a reset never counts as a step:

* DISABLED (ids and factories): after a step, done envs are reset with a ``reset_mask``.
* NEXT_STEP: the same, for Gymnasium's own vector envs; it replaces their reset in the next step.
* SAME_STEP: the final observation is ``info["final_obs"]``.

In Gymnasium's own vector envs, every episode has its own seed, ``info["episode_seed"]``. ``reset(seed=episode_seed)``
or ``gymnasium.make(id).reset(seed=int(episode_seed[i]))`` repeats it. SAME_STEP needs a second reset for this and is
slower. Other vector envs accept a single int only; their ``episode_seed`` is -1.

``max_episode_steps`` is ``None`` if neither the env nor the caller sets a time limit. ``info["gymnasium"]`` is the info
dict of Gymnasium; its ``is_success`` or ``success`` becomes ``info["metrics"]["success"]``.
"""

from embodichain.envs.gymnasium_env.adapter import GymnasiumVecEnv, make_gymnasium
from embodichain.envs.gymnasium_env.tasks import RegisteredTaskEnv, TaskGymnasiumEnv, TaskGymnasiumVectorEnv

__all__ = ["GymnasiumVecEnv", "RegisteredTaskEnv", "TaskGymnasiumEnv", "TaskGymnasiumVectorEnv", "make_gymnasium"]
