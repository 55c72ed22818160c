"""Balance a pole on a cart by pushing the cart with a continuous force."""

import math
from typing import Any

import torch
from torch import Tensor

from embodichain.envs.actions import RobotActionManager
from embodichain.envs.env_cfg import ActionsCfg, EffortTermCfg, EnvCfg, EventsCfg, GymCfg, JointRangeCfg, RobotCfg
from embodichain.envs.physics import Physics
from embodichain.envs.random import RandomStreams
from embodichain.envs.robots import Robot
from embodichain.envs.task import ResetState, Scene, Task
from embodichain.errors import ConfigError

MAX_ANGLE = math.radians(12.0)
MAX_POSITION = 2.4
# State feedback u = -K x for (position, velocity, angle, angular rate), in units of the 10 N motor: the LQR gain of the
# model linearised about the upright pole, for a step of 20 ms, Q = diag(1, 0.1, 10, 0.1) and R = 1 / N^2.
_GAIN = (-0.0912, -0.1923, -2.9310, -0.7344)


class CartPole(Task):
    """Balance a pole on a cart with a continuous force; the maximum return is the episode length."""

    scene_file = "cart_pole.xml"
    reward_weights = {"alive": 1.0, "position": -0.02, "effort": -0.01}

    def __init__(self, cfg: GymCfg, physics: Physics, robot: Robot) -> None:
        if cfg.robot.uid != "cart":
            raise ConfigError(f"robot.uid: {cfg.id} needs the robot 'cart', got {cfg.robot.uid!r}")
        scene = cfg.env.scene
        if any(thing is not None for part in (scene.objects, scene.fixtures, scene.goals) for thing in part.values()):
            raise ConfigError(f"env.scene: {cfg.id} has cart and pole alone; leave out objects, fixtures and goals")
        super().__init__(cfg, physics, robot)
        self._limits = torch.tensor([MAX_POSITION, MAX_ANGLE], device=physics.device)

    @staticmethod
    def default_cfg() -> GymCfg:
        return GymCfg(
            id="CartPoleRL",
            max_episode_steps=500,
            env=EnvCfg(
                substeps=2,  # of 10 ms: the motion is smooth and contact-free
                terminate_on_success=False,
                events=EventsCfg(randomize_robot=JointRangeCfg(position=0.05, velocity=0.05)),
                actions=ActionsCfg(effort=EffortTermCfg()),
            ),
            robot=RobotCfg(uid="cart"),
        )

    def sample_start(self, env_ids: Tensor, streams: RandomStreams) -> ResetState:
        start = self.start_robot(env_ids, streams)
        spread = self.cfg.env.events.randomize_robot
        if spread is not None:  # the pole is not a joint of the robot, but is randomised alike
            drawn = streams.uniform(env_ids, 2, -1.0, 1.0)
            start.qpos[:, 1] += spread.position * drawn[:, 0]
            start.qvel[:, 1] += spread.velocity * drawn[:, 1]
        return start

    def read(self, env_ids: Tensor | None = None) -> Scene:
        qpos, qvel = self.physics.snapshot(env_ids).split_with_sizes((2, 2), dim=1)
        away = qpos.abs()
        return {"qpos": qpos, "qvel": qvel, "away": away, "fallen": (away > self._limits).any(dim=1)}

    def observe(self, scene: Scene) -> dict[str, Any]:
        return {"robot": {"qpos": scene["qpos"], "qvel": scene["qvel"]}}

    def reward_terms(self, scene: Scene, action: Tensor) -> dict[str, Tensor]:
        force, position = action[:, 0], scene["qpos"][:, 0]
        return {"alive": torch.ones_like(force), "position": position.square(), "effort": force.square()}

    def success(self, scene: Scene) -> Tensor:
        """The pole stands and the cart is on the rail."""
        return ~scene["fallen"]

    def failed(self, scene: Scene) -> Tensor:
        return scene["fallen"]

    def metrics(self, scene: Scene) -> dict[str, Tensor]:
        position, angle = scene["away"].unbind(1)
        return {"angle": angle, "position": position}

    def expert_action(self, scene: Scene, actions: RobotActionManager) -> Tensor:
        position, angle = scene["qpos"].unbind(1)
        velocity, rate = scene["qvel"].unbind(1)
        force = -(_GAIN[0] * position + _GAIN[1] * velocity + _GAIN[2] * angle + _GAIN[3] * rate)
        return force.clamp(-1.0, 1.0).unsqueeze(1)
