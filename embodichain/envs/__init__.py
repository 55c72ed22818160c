"""Environments: batched physics, tasks and adapters; ``vec_env.py`` defines the contract.

Importing this package registers its tasks with Gymnasium, as ``"embodichain/PushCubeRL-v0"`` and so on.
"""

import gymnasium as gym

TASKS = {
    "BipedVelocityRL": "embodichain.envs.tasks.locomotion:BipedVelocity",
    "CartPoleRL": "embodichain.envs.tasks.cart_pole:CartPole",
    "CloseDrawerRL": "embodichain.envs.tasks.drawer:CloseDrawer",
    "InsertPegRL": "embodichain.envs.tasks.peg:InsertPeg",
    "OpenDoorRL": "embodichain.envs.tasks.door:OpenDoor",
    "OpenDrawerLanguageRL": "embodichain.envs.tasks.drawer:OpenDrawerLanguage",
    "OpenDrawerRL": "embodichain.envs.tasks.drawer:OpenDrawer",
    "HandOverRL": "embodichain.envs.tasks.two_arms:HandOver",
    "LiftBarRL": "embodichain.envs.tasks.two_arms:LiftBar",
    "PickCubeRL": "embodichain.envs.tasks.pick_cube:PickCube",
    "PlaceInBinLanguageRL": "embodichain.envs.tasks.place_in_bin:PlaceInBinLanguage",
    "PlaceInBinRL": "embodichain.envs.tasks.place_in_bin:PlaceInBin",
    "PushAroundRL": "embodichain.envs.tasks.push_around:PushAround",
    "PressButtonLanguageRL": "embodichain.envs.tasks.button:PressButtonLanguage",
    "PressButtonRL": "embodichain.envs.tasks.button:PressButton",
    "PushCubeLanguageRL": "embodichain.envs.tasks.push_cube:PushCubeLanguage",
    "PushCubeRL": "embodichain.envs.tasks.push_cube:PushCube",
    "QuadrupedVelocityRL": "embodichain.envs.tasks.locomotion:QuadrupedVelocity",
    "ReachRL": "embodichain.envs.tasks.reach:Reach",
    "StackCubeLanguageRL": "embodichain.envs.tasks.stack_cube:StackCubeLanguage",
    "StackCubeRL": "embodichain.envs.tasks.stack_cube:StackCube",
}
"""Tasks of this package: id and entry point, imported when the task is made."""
_EPISODE_STEPS = {
    "BipedVelocityRL": 1000,
    "CartPoleRL": 500,
    "CloseDrawerRL": 100,
    "InsertPegRL": 150,
    "OpenDoorRL": 120,
    "OpenDrawerLanguageRL": 100,
    "OpenDrawerRL": 100,
    "HandOverRL": 150,
    "LiftBarRL": 120,
    "PickCubeRL": 150,
    "PlaceInBinLanguageRL": 150,
    "PlaceInBinRL": 150,
    "PushAroundRL": 200,
    "PressButtonLanguageRL": 100,
    "PressButtonRL": 100,
    "PushCubeLanguageRL": 100,
    "PushCubeRL": 100,
    "QuadrupedVelocityRL": 1000,
    "ReachRL": 100,
    "StackCubeLanguageRL": 150,
    "StackCubeRL": 150,
}
"""Time limits of the tasks, known without importing them."""

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
"""Gymnasium environments that run batched on this package's physics: id and entry point."""


def register_with_gymnasium(task_id: str, max_episode_steps: int | None = None) -> None:
    """Register a task with Gymnasium as ``embodichain/<task id>-v0``; heavy imports happen when it is made.

    Without ``max_episode_steps``, the task truncates episodes itself instead of Gymnasium's ``TimeLimit``.
    """
    name, kind = f"embodichain/{task_id}-v0", "TaskGymnasiumEnv" if max_episode_steps is None else "RegisteredTaskEnv"
    gym.registry.pop(name, None)
    gym.register(
        name,
        entry_point=f"embodichain.envs.gymnasium_env:{kind}",
        vector_entry_point="embodichain.envs.gymnasium_env:TaskGymnasiumVectorEnv",
        max_episode_steps=max_episode_steps,
        kwargs={"config": task_id},
    )


for _task in TASKS:
    register_with_gymnasium(_task, _EPISODE_STEPS[_task])
