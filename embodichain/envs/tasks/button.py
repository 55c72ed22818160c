"""Press a button: the only one, or the coloured one that an instruction names."""

from torch import Tensor

from embodichain.envs.actions import RobotActionManager
from embodichain.envs.env_cfg import Color, GymCfg, LanguageCfg, PoseRangeCfg, RobotCfg, SceneCfg
from embodichain.envs.fixtures import ButtonsCfg
from embodichain.envs.kinematics import mean_square
from embodichain.envs.physics import Physics
from embodichain.envs.primitives import DOWN, press
from embodichain.envs.robots import Robot
from embodichain.envs.task import Scene
from embodichain.envs.tasks.fixture_task import FixtureTask, fixture_of, fixture_task_cfg, near

_COLORS: tuple[Color, ...] = ("red", "green", "blue")
_ROBOT = RobotCfg(tool="pusher", init_qpos=[-0.22, 0.0103, 1.6931, -0.1326, -1.5708, -0.22])


class PressButton(FixtureTask):
    """Press down a button that springs back."""

    needs_fingers = False
    reward_weights = {"reach": 0.2, "press": 0.3, "effort": -0.005, "success": 50.0}

    def __init__(self, cfg: GymCfg, physics: Physics, robot: Robot) -> None:
        names = [name for name, fixture in cfg.env.scene.fixtures.items() if isinstance(fixture, ButtonsCfg)]
        panels = {name: fixture_of(cfg, name, ButtonsCfg) for name in names or ["panel"]}
        self.parts = [f"{name}_button_{i}" for name, panel in panels.items() for i in range(len(panel.colors))]
        self.colors = [color for panel in panels.values() for color in panel.colors]
        super().__init__(cfg, physics, robot)
        self.travel = min(panel.travel for panel in panels.values())

    @staticmethod
    def default_cfg() -> GymCfg:
        area = PoseRangeCfg(x=(0.38, 0.62), y=(-0.25, 0.25), yaw=(-0.5, 0.5))
        scene = SceneCfg(fixtures={"panel": ButtonsCfg(pose=area)})
        return fixture_task_cfg("PressButtonRL", scene, _ROBOT, steps=100, threshold=0.004)

    def read(self, env_ids: Tensor | None = None) -> Scene:
        scene = super().read(env_ids)
        scene["left"] = self.travel - scene["part_opening"]
        return scene

    def reward_terms(self, scene: Scene, action: Tensor) -> dict[str, Tensor]:
        return {
            "reach": near(scene["to_part"]),
            "press": (scene["part_opening"] / self.travel).clamp(0.0, 1.0),
            "effort": mean_square(action),
            "success": scene["success"],
        }

    def success(self, scene: Scene) -> Tensor:
        return scene["left"] < self._threshold

    def metrics(self, scene: Scene) -> dict[str, Tensor]:
        return {"pressed": scene["part_opening"]}

    def expert_action(self, scene: Scene, actions: RobotActionManager) -> Tensor:
        """Move above the button and press it."""
        tool = self.arm(scene)
        return tool.act(actions, press(tool, scene["part_pos"], DOWN, scene["left"] < 0.0, clearance=0.06))


class PressButtonLanguage(PressButton):
    """Press the coloured button that an instruction names.

    The buttons stand elsewhere in every episode; only the bytes of ``instruction`` name the one that counts.
    """

    understands_language = True

    @staticmethod
    def default_cfg() -> GymCfg:
        area = PoseRangeCfg(x=(0.36, 0.62), y=(-0.26, 0.26))
        language = LanguageCfg(colors=_COLORS, phrases=("press the {color} button",))
        scene = SceneCfg(
            fixtures={f"{color}_panel": ButtonsCfg(colors=(color,), pose=area, min_distance=0.15) for color in _COLORS}
        )
        return fixture_task_cfg("PressButtonLanguageRL", scene, _ROBOT, steps=100, threshold=0.004, language=language)

    def metrics(self, scene: Scene) -> dict[str, Tensor]:
        """Return also whether another button is pressed."""
        return {**super().metrics(scene), "wrong_button": self.others(scene, 0.5 * self.travel)}
