"""Any Gymnasium environment as a ``VecEnv``, and our environments as Gymnasium's.

::

    env = make_gymnasium("CartPole-v1", num_envs=64)                     # by id
    env = GymnasiumVecEnv.from_factory(lambda: MyEnv(), num_envs=64)     # by a function that makes one env
    env = GymnasiumVecEnv(my_vector_env)                                 # by a gymnasium.vector.VectorEnv

Each of Gymnasium's autoreset modes gives the same contract, and no reset ever looks like a step:

* DISABLED (ids and factories): after a step, the envs that are done are reset with a ``reset_mask``.
* NEXT_STEP: the same, for Gymnasium's own vector envs; a reset by mask replaces the one they would do in the next step.
* SAME_STEP: the final observation comes from ``info["final_obs"]``.

Every episode of Gymnasium's own vector envs begins from a seed of its own, ``info["episode_seed"]``:
``reset(seed=that_tensor)``, or plain ``gymnasium.make(id).reset(seed=int(that_tensor[i]))``, begins it again. (So a
SAME_STEP vector env is reset once more after its own reset; the other modes are faster.) Other vector envs take one
seed for all envs: for them ``episode_seed`` is -1 and only an int can seed them.

Every episode ends: an env without a time limit needs ``max_episode_steps``. ``info["gymnasium"]`` is the info of the
step as Gymnasium gave it; ``is_success`` or ``success`` in it becomes ``info["metrics"]["success"]``.

``adapter`` is the way from Gymnasium to us and ``tasks`` the other way; ``construct`` turns ids and functions into
vector envs and saves the state of their envs; ``spaces`` converts observations and actions.
"""

from embodichain.envs.gymnasium_env.adapter import GymnasiumVecEnv, make_gymnasium
from embodichain.envs.gymnasium_env.tasks import TaskGymnasiumEnv, TaskGymnasiumVectorEnv

__all__ = ["GymnasiumVecEnv", "TaskGymnasiumEnv", "TaskGymnasiumVectorEnv", "make_gymnasium"]
