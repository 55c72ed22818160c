"""Environments: batched physics, tasks written on it, and adapters; ``vec_env.py`` states the contract.

Importing it registers the tasks for ``gymnasium.make`` and ``make_vec``, such as ``"embodichain/PushCubeRL-v0"``.
"""

import gymnasium as gym

TASKS = {
    "CartPoleRL": "embodichain.envs.tasks.cart_pole:CartPole",
    "PickCubeRL": "embodichain.envs.tasks.pick_cube:PickCube",
    "PushCubeLanguageRL": "embodichain.envs.tasks.push_cube:PushCubeLanguage",
    "PushCubeRL": "embodichain.envs.tasks.push_cube:PushCube",
    "ReachRL": "embodichain.envs.tasks.reach:Reach",
}
"""The tasks of this package: id and entry point, which is imported when the task is made."""

MUJOCO_SUITE = {
    f"{name}-v5": f"embodichain.envs.tasks.mujoco_suite:{name}"
    for name in (
        "Ant",
        "HalfCheetah",
        "Hopper",
        "Humanoid",
        "HumanoidStandup",
        "InvertedDoublePendulum",
        "InvertedPendulum",
        "Pusher",
        "Reacher",
        "Swimmer",
        "Walker2d",
    )
}
"""Environments of Gymnasium that are simulated here, batched: id and entry point."""


def register_with_gymnasium(task_id: str) -> None:
    """Make a task available as ``embodichain/<task id>-v0``; nothing heavy is imported before it is made."""
    name = f"embodichain/{task_id}-v0"
    if name not in gym.registry:
        gym.register(
            name,
            entry_point="embodichain.envs.gymnasium_env:TaskGymnasiumEnv",
            vector_entry_point="embodichain.envs.gymnasium_env:TaskGymnasiumVectorEnv",
            kwargs={"config": task_id},
        )


for _task in TASKS:
    register_with_gymnasium(_task)
