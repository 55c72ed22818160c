"""Any Gymnasium environment as a ``VecEnv``, and our environments as Gymnasium's.

::

    env = make_gymnasium("CartPole-v1", num_envs=64)                     # by id
    env = GymnasiumVecEnv.from_factory(lambda: MyEnv(), num_envs=64)     # by a function that makes one env
    env = GymnasiumVecEnv(my_vector_env)                                 # by a gymnasium.vector.VectorEnv

How each of Gymnasium's autoreset modes gives the one contract, without ever returning a step that was none:

* DISABLED (what ids and factories get): after a step, the envs that are done are reset with a ``reset_mask``.
* NEXT_STEP: the same; a reset by mask also calls off the reset that the vector env would do instead of its next step.
  A vector env that ignores ``reset_mask`` cannot be used in this mode and is refused when it is wrapped.
* SAME_STEP: the final observation comes from ``info["final_obs"]``.

Every episode is started from a seed of its own, which is ``info["episode_seed"]``: ``reset(seed=that_tensor)``, or
plain ``gymnasium.make(id).reset(seed=int(that_tensor[i]))``, starts it again. (So a SAME_STEP vector env is reset once
more after its own reset; the other modes are faster.) Vector envs other than Gymnasium's own usually take one seed for
all envs: for them ``episode_seed`` is -1 and only an int can seed them, unless ``episode_seeds=True`` says that they
take a list.

Every episode ends: an env without a time limit needs ``max_episode_steps``. ``info["gymnasium"]`` is the info of the
step as Gymnasium gave it; ``is_success`` or ``success`` in it becomes ``info["metrics"]["success"]``.

``spaces`` says how observations and actions are converted, ``resets`` how envs are reset one by one, ``seeds`` where
episode seeds come from, ``state`` which envs can be saved, ``construct`` turns ids and functions into vector envs,
``tasks`` is the way from our environments to Gymnasium.
"""

from __future__ import annotations

from embodichain.envs.gymnasium_env.adapter import GymnasiumVecEnv, make_gymnasium
from embodichain.envs.gymnasium_env.tasks import TaskGymnasiumEnv, TaskGymnasiumVectorEnv

__all__ = ["GymnasiumVecEnv", "TaskGymnasiumEnv", "TaskGymnasiumVectorEnv", "make_gymnasium"]
