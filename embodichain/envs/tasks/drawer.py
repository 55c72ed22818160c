"""Open and close drawers of a cabinet: any of them, or the one that an instruction names."""

from torch import Tensor

from embodichain.envs.actions import RobotActionManager
from embodichain.envs.env_cfg import Color, GymCfg, LanguageCfg, PoseRangeCfg, RobotCfg, SceneCfg
from embodichain.envs.fixtures import DrawersCfg
from embodichain.envs.kinematics import length, mean_square
from embodichain.envs.physics import Physics
from embodichain.envs.primitives import BACKWARD, FORWARD, grasp, press, pull, sequence
from embodichain.envs.random import RandomStreams
from embodichain.envs.robots import Robot
from embodichain.envs.task import ResetState, Scene
from embodichain.envs.tasks.fixture_task import FixtureTask, OpeningTask, fixture_of, fixture_task_cfg, near

_COLORS: tuple[Color, ...] = ("red", "green", "blue")
_AREA = PoseRangeCfg(x=(0.76, 0.82), y=(-0.1, 0.1), yaw=(-0.1, 0.1))
_FORWARD = [-0.488, -0.3514, 2.3804, 1.1126, 1.0828, 1.5708]
"""The gripper points at the cabinet, with one finger above the other."""


class DrawerTask(FixtureTask):
    """A gripper in front of a ``cabinet`` with drawers."""

    def __init__(self, cfg: GymCfg, physics: Physics, robot: Robot) -> None:
        self.cabinet = fixture_of(cfg, "cabinet", DrawersCfg)
        self.parts = [f"cabinet_drawer_{i}" for i in range(self.cabinet.drawers)]
        self.colors = self.cabinet.colors
        super().__init__(cfg, physics, robot)
        self.wide = 0.9 * self.cabinet.travel  # opening of an open drawer, in metres


class OpenDrawer(OpeningTask, DrawerTask):
    """Take a drawer of a cabinet by its handle and pull it open."""

    @staticmethod
    def default_cfg() -> GymCfg:
        scene = SceneCfg(fixtures={"cabinet": DrawersCfg(colors=_COLORS, pose=_AREA)})
        robot = RobotCfg(tool="gripper", init_qpos=[*_FORWARD, 0.04, 0.04])
        return fixture_task_cfg("OpenDrawerRL", scene, robot, steps=100, threshold=0.02)

    def read(self, env_ids: Tensor | None = None) -> Scene:
        scene = super().read(env_ids)
        scene["held"] = self.held(scene, 2.0 * self.cabinet.handle.radius)
        scene["left"] = self.wide - scene["part_opening"]
        return scene

    def metrics(self, scene: Scene) -> dict[str, Tensor]:
        return {"opening": scene["part_opening"], "held": scene["held"]}

    def expert_action(self, scene: Scene, actions: RobotActionManager) -> Tensor:
        """Grasp the handle from the front, and pull."""
        tool, held, at = self.arm(scene), scene["held"] > 0, scene["part_pos"]
        take = grasp(tool, at, FORWARD, held, clearance=0.06, tolerance=0.02)
        return tool.act(actions, sequence(take, pull(tool, scene["left"] < 0.0, at, BACKWARD)))


class OpenDrawerLanguage(OpenDrawer):
    """Pull open the drawer whose coloured handle an instruction names.

    The handles are observed by their colours; only the bytes of ``instruction`` name the one that counts.
    """

    understands_language = True

    @staticmethod
    def default_cfg() -> GymCfg:
        cfg = OpenDrawer.default_cfg()
        language = LanguageCfg(colors=_COLORS, phrases=("open the drawer with the {color} handle",))
        return cfg.replace(id="OpenDrawerLanguageRL", env=cfg.env.replace(language=language))

    def metrics(self, scene: Scene) -> dict[str, Tensor]:
        """Return also whether another drawer is open."""
        return {**super().metrics(scene), "wrong_drawer": self.others(scene, 0.5 * self.wide)}


class CloseDrawer(DrawerTask):
    """Push the open drawer of a cabinet shut."""

    reward_weights = {"reach": 0.1, "close": 0.4, "effort": -0.005, "success": 50.0}

    @staticmethod
    def default_cfg() -> GymCfg:
        area = _AREA.replace(x=(0.82, 0.86))
        scene = SceneCfg(fixtures={"cabinet": DrawersCfg(colors=_COLORS, pose=area)})
        robot = RobotCfg(tool="gripper", init_qpos=[*_FORWARD, 0.0, 0.0])
        return fixture_task_cfg("CloseDrawerRL", scene, robot, steps=100, threshold=0.01)

    def sample_start(self, env_ids: Tensor, streams: RandomStreams) -> ResetState:
        start, travel = super().sample_start(env_ids, streams), self.cabinet.travel
        opening = streams.uniform(env_ids, 1, 0.6 * travel, 0.95 * travel)[:, 0]
        target = self.target(start)
        for i in range(self.cabinet.drawers):  # the others stay closed
            joint = int(self.physics.model.joint(f"cabinet/drawer_{i}").qposadr[0])
            start.qpos[:, joint] = opening * (target == i)
        return start

    def reward_terms(self, scene: Scene, action: Tensor) -> dict[str, Tensor]:
        return {
            "reach": near(scene["to_part"]),
            "close": 1.0 - (scene["part_opening"] / self.cabinet.travel).clamp(0.0, 1.0),
            "effort": mean_square(action),
            "success": scene["success"],
        }

    def success(self, scene: Scene) -> Tensor:
        return scene["part_opening"] < self._threshold

    def metrics(self, scene: Scene) -> dict[str, Tensor]:
        return {"opening": scene["part_opening"], "distance": length(scene["to_part"])}

    def expert_action(self, scene: Scene, actions: RobotActionManager) -> Tensor:
        """Move in front of the handle with closed fingers, and push."""
        tool, shut = self.arm(scene), scene["part_opening"] < 0.0
        return tool.act(actions, press(tool, scene["part_pos"], FORWARD, shut, tolerance=0.02))
