"""Base class for tasks whose scene is declared in the config: measurements and observations follow ``env.scene``.

::

    class Press(KitTask):
        '''Press a button.'''

        @staticmethod
        def default_cfg():
            scene = SceneCfg(fixtures={"panel": ButtonsCfg(pose=PoseRangeCfg(x=(0.5, 0.6), y=(-0.2, 0.2)))})
            return kit_cfg("PressRL", scene, rewards={"reach": reward("near", of="ee", to="panel_button_0")})

        def success(self, scene):
            return scene["panel_button_0_opening"] > 0.012
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from embodichain.envs.env_cfg import (
    ActionsCfg,
    EndEffectorTermCfg,
    EnvCfg,
    EventsCfg,
    GymCfg,
    JointRangeCfg,
    LanguageCfg,
    ObservationsCfg,
    ObservationTermCfg,
    RewardsCfg,
    RewardTermCfg,
    RobotCfg,
    SceneCfg,
)
from embodichain.envs.observations import instruction_table
from embodichain.envs.physics import Physics
from embodichain.envs.primitives import Tool, ToolArm
from embodichain.envs.random import RandomStreams
from embodichain.envs.robots import Robot
from embodichain.envs.task import Measurements, ResetState, Scene
from embodichain.envs.tasks.arm import ArmTask
from embodichain.errors import ConfigError, EnvContractError, look_up

_HOME = {"pusher": [-0.3267, -0.21, 2.4154, -0.6345, -1.5708, -0.3267]}
_HOME["gripper"] = [-0.2449, -0.0699, 1.9673, -0.3266, -1.5708, -0.2449, 0.04, 0.04]
_OPEN_GAP = 0.084  # distance between the open fingers of the gripper, in metres


def kit_cfg(
    id: str,
    scene: SceneCfg,
    rewards: Mapping[str, RewardTermCfg],
    *,
    steps: int = 150,
    threshold: float = 0.03,
    actions: ActionsCfg | None = None,
    robot: RobotCfg | Mapping[str, Any] | None = None,
    observations: Mapping[str, ObservationTermCfg] | None = None,
    language: LanguageCfg | None = None,
) -> GymCfg:
    """Return a task config; the defaults are a UR5 with a gripper at a table and end-effector actions.

    ``id`` is the name under which the task is registered, and ``robot`` may be the settings of another one.
    """
    arm = RobotCfg.from_dict(robot, "robot") if isinstance(robot, Mapping) else robot
    env = EnvCfg(
        substeps=5,
        success_threshold=threshold,
        scene=scene,
        events=EventsCfg(randomize_robot=JointRangeCfg(position=0.02)),
        rewards=RewardsCfg(terms=dict(rewards)),
        observations=ObservationsCfg(terms=dict(observations or {})),
        actions=actions or ActionsCfg(ee_delta=EndEffectorTermCfg(scale=0.04)),
        language=language,
    )
    return GymCfg(id=id, max_episode_steps=steps, env=env, robot=arm or ur5("gripper"))


def ur5(tool: str) -> RobotCfg:
    """Return a UR5 with a tool, ``"gripper"`` or ``"pusher"``, in its home posture above the table."""
    return RobotCfg(tool=tool, init_qpos=look_up("tool of ur5", tool, _HOME))


def reward(func: str, weight: float = 1.0, **params: Any) -> RewardTermCfg:
    """Return a reward term: ``reward("near", 2.0, of="ee", to="cube")``."""
    return RewardTermCfg(func=func, weight=weight, params=params)


def observation(func: str, **params: Any) -> ObservationTermCfg:
    """Return an observation term: ``observation("offset", of="cube", to="goal")``."""
    return ObservationTermCfg(func=func, params=params)


def stages(*terms: RewardTermCfg) -> RewardTermCfg:
    """Return a staged reward; each term lies in [0, 1], and its weight is the value at which the stage is complete."""
    entries = [{"func": term.func, "params": term.params, "done": term.weight} for term in terms]
    return RewardTermCfg(func="staged", params={"stages": entries})


class KitTask(ArmTask):
    """A robot arm in a configured scene; define ``default_cfg``, ``success`` and optionally ``expert_action``."""

    scene_file, goal_dim = "table_scene.xml", 0
    reward_weights: ClassVar[dict[str, float]] = {}
    needs: ClassVar[tuple[str, ...]] = ()
    """Names that ``env.scene`` must contain."""
    needs_success = True
    needs_fingers: ClassVar[bool] = False
    """Whether the robot must have a gripper."""

    def __init__(self, cfg: GymCfg, physics: Physics, robot: Robot) -> None:
        scene, problems = cfg.env.scene, []
        named = {**scene.fixtures, **scene.objects, **scene.goals}
        missing = [name for name in self.needs if named.get(name) is None]
        if missing:
            problems.append(f"env.scene: {cfg.id} needs {', '.join(map(repr, missing))}, which the config leaves out")
        if self.needs_fingers and not robot.num_fingers:
            problems.append(
                f"robot.tool: {cfg.id} needs a tool with fingers, such as 'gripper', got {cfg.robot.tool!r}"
            )
        if problems:
            raise ConfigError(problems)
        super().__init__(cfg, physics, robot)
        self._arm = ToolArm(robot, cfg.id)
        self._nq = int(physics.model.nq)

    def sample_start(self, env_ids: Tensor, streams: RandomStreams) -> ResetState:
        """Sample the robot and the scene; store further task variables in ``variables``."""
        return self.start_robot(env_ids, streams)

    def read(self, env_ids: Tensor | None = None) -> Scene:
        """Return the robot's joints and tool position, the gripper gap, and every thing of the scene by name."""
        snapshot = self.physics.snapshot(env_ids)
        qpos = snapshot[:, : self._nq][:, self.robot.qpos]
        scene = Measurements({"qpos": qpos, "qvel": snapshot[:, self._nq :][:, self.robot.qvel]})
        scene["ee_pos"] = self.chain.position(qpos[:, : self.robot.num_joints])
        if self.robot.num_fingers:
            arm = next(iter(self.robot.arms.values()))
            scene["gripper"] = 2.0 * arm.opening(qpos[:, self.robot.num_joints :])
        if self.placed is not None:
            scene.update(self.placed.read(snapshot, env_ids))
        return scene

    def observe(self, scene: Scene) -> dict[str, Any]:
        robot = {"qpos": scene["qpos"], "qvel": scene["qvel"], "ee_pos": scene["ee_pos"]}
        return {"robot": robot, **(self.placed.observe(scene) if self.placed is not None else {})}

    def reward_terms(self, scene: Scene, action: Tensor) -> dict[str, Tensor]:
        return {}

    def success(self, scene: Scene) -> Tensor:
        expected = "expected a method success(self, scene) that returns where the task is solved, bool [num_envs]"
        raise EnvContractError(f"{type(self).__name__}.success: {expected}; the class has none. Write one")

    def metrics(self, scene: Scene) -> dict[str, Tensor]:
        return {}

    def markers(self) -> dict[str, Tensor]:
        return {}

    def arm(self, scene: Scene) -> Tool:
        """Return the measured tool pose, for the motion primitives of ``envs/primitives.py``."""
        return self._arm.at(scene["qpos"])


def raised(point: Tensor, by: float) -> Tensor:
    """Return points ``[n, 3]`` raised by a height."""
    return torch.cat((point[:, :2], point[:, 2:] + by), dim=1)


def climb(*rungs: tuple[Tensor, Tensor]) -> Tensor:
    """Return progress ``[n]`` in [0, 1] through ordered stages, each given as ``(reached, progress)``, ``[n]`` each.

    Only the highest stage reached counts, so a later stage is not penalised for undoing an earlier one, such as
    releasing a cube after placing it. The first stage is always reached.
    """
    total = rungs[0][1].clamp(0.0, 1.0)
    for number, (reached, part) in enumerate(rungs[1:], start=1):
        total = torch.where(reached, number + part.clamp(0.0, 1.0), total)
    return total / len(rungs)


def nearness(distance: Tensor) -> Tensor:
    """Return a closeness reward ``[n]``: 1 at distance 0, 0 beyond 0.8 m, linear far away and steep nearby."""
    return 0.5 * (1.0 - distance / 0.8).clamp_min(0.0) + 0.5 * (1.0 - torch.tanh(10.0 * distance))


def coming_to_grasp(distance: Tensor, gap: Tensor, width: float) -> Tensor:
    """Return progress in [0, 1] towards a grasp: approach the object, then close the fingers around it.

    ``distance`` ``[n]`` is from the tool to the object, ``gap`` ``[n]`` between the fingers, both in metres.
    """
    closed = ((_OPEN_GAP - gap) / (_OPEN_GAP - width)).clamp(0.0, 1.0)
    between = (distance < 0.5 * width).to(closed.dtype)
    return 0.8 * nearness(distance) + 0.2 * between * closed


class Instructed:
    """Samples the choice and the phrasing of the instruction of each episode."""

    def __init__(self, language: LanguageCfg, choices: Sequence[Mapping[str, str]], device: torch.device) -> None:
        self.choices = list(choices)
        self.table = instruction_table(language, choices).to(device)

    def sample(self, env_ids: Tensor, streams: RandomStreams, start: ResetState) -> None:
        """Sample the choice and the phrase of each episode into its variables."""
        phrases, choices = self.table.shape[:2]
        drawn = streams.uniform(env_ids, 2)
        start.variables["choice"] = (drawn[:, 0] * choices).long().clamp_(max=choices - 1)
        start.variables["phrase"] = (drawn[:, 1] * phrases).long().clamp_(max=phrases - 1)

    def read(self, choice: Tensor, phrase: Tensor) -> Tensor:
        """Return the instructions as bytes, uint8 ``[n, length]``."""
        return self.table[phrase, choice]


def pick(scene: Scene, names: Sequence[str], which: Tensor, quantity: str) -> Tensor:
    """Return a quantity, such as ``"pos"``, of thing ``names[which[i]]`` in each env ``i``; ``which`` is ``[n]``."""
    return select(torch.stack([scene[f"{name}_{quantity}"] for name in names], dim=1), which)


def select(values: Tensor, index: Tensor) -> Tensor:
    """Return ``values[i, index[i]]`` for values ``[n, k, ...]`` and ``index`` ``[n]``."""
    shape = (-1, 1, *[1] * (values.dim() - 2))
    return values.gather(1, index.view(shape).expand(-1, 1, *values.shape[2:])).squeeze(1)


def letting_go(gap: Tensor, width: float, widest: float) -> Tensor:
    """Return progress in [0, 1] of releasing an object: 0 at its width, 1 at the gap ``widest``."""
    return ((gap - width) / (widest - width)).clamp(0.0, 1.0)
