"""Any Gymnasium environment as a ``VecEnv`` (``adapter``), and our environments as Gymnasium's (``tasks``).

::

    env = make_gymnasium("CartPole-v1", num_envs=64)                     # by id
    env = GymnasiumVecEnv.from_factory(lambda: MyEnv(), num_envs=64)     # by a function that makes one env
    env = GymnasiumVecEnv(my_vector_env)                                 # by a gymnasium.vector.VectorEnv

Each of Gymnasium's autoreset modes gives the same contract, and no reset ever looks like a step:

* DISABLED (ids and factories): after a step, envs that are done are reset with a ``reset_mask``.
* NEXT_STEP: the same, for Gymnasium's own vector envs; it replaces the reset they would do in the next step.
* SAME_STEP: the final observation comes from ``info["final_obs"]``.

Every episode of Gymnasium's own vector envs begins from a seed of its own, ``info["episode_seed"]``:
``reset(seed=that_tensor)``, or ``gymnasium.make(id).reset(seed=int(that_tensor[i]))``, begins it again. (SAME_STEP
needs a second reset for this and is slower.) Other vector envs take one int for all; their ``episode_seed`` is -1.

``max_episode_steps`` is ``None`` where an env states no time limit and none is given. ``info["gymnasium"]`` is the
step's info from Gymnasium; ``is_success`` or ``success`` in it becomes ``info["metrics"]["success"]``.
"""

from embodichain.envs.gymnasium_env.adapter import GymnasiumVecEnv, make_gymnasium
from embodichain.envs.gymnasium_env.tasks import RegisteredTaskEnv, TaskGymnasiumEnv, TaskGymnasiumVectorEnv

__all__ = ["GymnasiumVecEnv", "RegisteredTaskEnv", "TaskGymnasiumEnv", "TaskGymnasiumVectorEnv", "make_gymnasium"]
