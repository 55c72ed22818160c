"""Velocity tracking for walking robots: the shared task, and one task per robot.

A command is a forward velocity, a lateral velocity and a yaw rate, in the frame of the robot's base. An episode has a
sequence of commands, all sampled at reset.

Two metrics measure the tracking over the steps of an episode that are at least ``SETTLING`` seconds after the last
change of command. ``tracking_error`` is the mean of ``|v - v_cmd| / |v_cmd|`` over steps with a commanded speed of at
least ``SLOWEST``, with ``v`` the horizontal velocity; ``turning_error`` is the same for the yaw rate. Both are 1 while
nothing has been measured yet, and after a fall.
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import mujoco
import torch
from torch import Tensor

from embodichain.envs.env_cfg import (
    ActionsCfg,
    EnvCfg,
    EventsCfg,
    GymCfg,
    JointRangeCfg,
    JointTermCfg,
    RobotCfg,
    VelocityCommandCfg,
)
from embodichain.envs.physics import Physics
from embodichain.envs.random import RandomStreams
from embodichain.envs.rendering import camera_names
from embodichain.envs.robots import Robot
from embodichain.envs.task import ResetState, Scene, Task, present_bounds
from embodichain.errors import ConfigError

SETTLING = 1.0
"""Seconds after a change of command that are excluded from the errors."""
SLOWEST = 0.3
"""Commands below this, in m/s or rad/s, are excluded from the relative errors."""
_MOST_COMMANDS = 64  # per episode, sampled at reset; a longer episode repeats them
_STANDING = 0.1  # commands below this mean standing, in m/s or rad/s
_AHEAD = 0.6  # seconds by which the command marker is ahead of the robot


class VelocityTask(Task):
    """Walk with a commanded velocity without falling."""

    understands_commands = True
    scene_file = "ground.xml"
    outputs = ("site_xpos", "actuator_force")
    reward_weights = {
        "track_linear": 1.5,
        "track_turning": 0.75,
        "alive": 1.0,
        "vertical": -1.0,
        "rolling": -0.03,
        "tilt": -2.0,
        "torque": -2e-4,
        "action_rate": -0.02,
        "air_time": 1.0,
        "slip": -0.1,
        "posture": -0.1,
    }
    feet: ClassVar[tuple[str, ...]]
    """Sites of the feet of our robot, at the centre of their spheres or capsules and of the same radius."""
    swing: ClassVar[float]
    """Air time in seconds above which a step is rewarded."""
    clearance: ClassVar[float]
    """Height in metres below which a foot is in contact with the ground."""

    def __init__(self, cfg: GymCfg, physics: Physics, robot: Robot) -> None:
        super().__init__(cfg, physics, robot)
        model, device = physics.model, physics.device
        free = [j for j in range(model.njnt) if model.jnt_type[j] == mujoco.mjtJoint.mjJNT_FREE]
        if not free:
            key, named = ("mjcf", cfg.robot.mjcf) if cfg.robot.mjcf is not None else ("uid", cfg.robot.uid)
            problem = f"needs a robot with a free base and legs, and the base of {named!r} is fixed"
            raise ConfigError(f"robot.{key}: {cfg.id} {problem}; choose a robot that walks, or a task of an arm")
        self._base, self._motion = int(model.jnt_qposadr[free[0]]), int(model.nq + model.jnt_dofadr[free[0]])
        nq, at = int(model.nq), robot.qvel
        self._velocities = slice(nq + at.start, nq + at.stop) if isinstance(at, slice) else nq + at
        sites = _feet(model, self.feet)
        self._sites = torch.tensor(sites, device=device)
        radii = model.site_size[sites, 0]
        self._touching = torch.tensor(radii, dtype=torch.float32, device=device) + self.clearance
        # Start on the ground, at whatever height the model has its base.
        data = mujoco.MjData(model)
        data.qpos[:] = self._home.cpu().numpy()
        mujoco.mj_kinematics(model, data)
        self._home[self._base + 2] -= float((data.site_xpos[sites, 2] - radii).min())
        self._height = float(self._home[self._base + 2])
        cameras = camera_names(model)
        self.camera = "robot/track" if "robot/track" in cameras else cameras[0] if cameras else None
        self._rest = robot.init_qpos.float()
        self._dt = float(model.opt.timestep) * self.substeps
        command = cfg.env.command or VelocityCommandCfg()
        self._standing = command.standing
        self._interval = max(1, round(command.interval / self._dt))
        self._num_commands = min((cfg.max_episode_steps or 1000) // self._interval + 2, _MOST_COMMANDS)
        self._ranges = (command.forward, command.sideways, command.turning)
        self._settling = math.ceil(SETTLING / self._dt - 1e-6)
        self._gravity = torch.tensor([0.0, 0.0, -1.0], device=device)
        self._before = torch.zeros(physics.num_envs, len(sites), 3, device=device)
        self._change = torch.zeros(physics.num_envs, robot.num_joints, device=device)
        self._alive, self._zeros = torch.ones(physics.num_envs, device=device), torch.zeros(1, 1, device=device)
        self._sharpness = torch.tensor([-4.0, -25.0], device=device)

    def sample_start(self, env_ids: Tensor, streams: RandomStreams) -> ResetState:
        start, count = self.start_robot(env_ids, streams), env_ids.numel()
        yaw, offset, drawn = streams.uniform(env_ids, 2 + 4 * self._num_commands).tensor_split((1, 2), dim=1)
        half = math.pi * yaw[:, 0]
        start.qpos[:, self._base + 3], start.qpos[:, self._base + 6] = half.cos(), half.sin()
        drawn = drawn.unflatten(1, (-1, 4))
        moves = (drawn[..., 3:] >= self._standing).double()
        low, high = (ends.unsqueeze(1) for ends in present_bounds(self._ranges, env_ids, streams))
        commands = moves * (low + (high - low) * drawn[..., :3])
        start.variables = {
            "commands": commands.float(),
            "clock": torch.zeros_like(env_ids),
            "offset": (offset[:, 0] * self._interval).long(),
            "action": commands.new_zeros(count, self.robot.num_joints, dtype=torch.float32),
            "air": commands.new_zeros(count, len(self._sites), dtype=torch.float32),
            "errors": commands.new_zeros(count, 4, dtype=torch.float32),
        }
        return start

    def read(self, env_ids: Tensor | None = None) -> Scene:
        state, rows = self.physics.snapshot(env_ids), dict(self.variables)
        feet = self.physics.outputs["site_xpos"]
        if env_ids is not None:
            feet, rows = feet[env_ids], {name: value[env_ids] for name, value in rows.items()}
        base, motion = self._base, self._motion
        position, quat = state[:, base : base + 3], state[:, base + 3 : base + 7]
        linear, angular = state[:, motion : motion + 3], state[:, motion + 3 : motion + 6]
        # The free joint's linear velocity is in the world frame, its angular velocity in the body frame.
        local = _rotate_back(quat, torch.stack((linear, self._gravity.expand_as(linear)), dim=1))
        feet = feet.index_select(1, self._sites).float()
        index = (rows["clock"] + rows["offset"]) // self._interval % self._num_commands
        command = rows["commands"].gather(1, index.view(-1, 1, 1).expand(-1, 1, 3)).squeeze(1)
        scene = {
            "position": position,
            "quat": quat,
            "linear": local[:, 0],
            "gravity": local[:, 1],
            "angular": angular,
            "qpos": state[:, self.robot.qpos] - self._rest,
            "qvel": state[:, self._velocities],
            "command": command,
            "action": rows["action"],
            "feet": feet,
            "contact": feet[..., 2] < self._touching,
        }
        scene["fallen"] = (scene["gravity"][:, 2] > -0.5) | (position[:, 2] < 0.5 * self._height)
        return scene

    def observe(self, scene: Scene) -> dict[str, Any]:
        # What a real robot measures; "critic" holds privileged observations.
        return {
            "base": {"angvel": scene["angular"], "gravity": scene["gravity"]},
            "command": {"velocity": scene["command"]},
            "robot": {"qpos": scene["qpos"], "qvel": scene["qvel"], "action": scene["action"]},
            "critic": {
                "linvel": scene["linear"],
                "height": scene["position"][:, 2:],
                "feet": scene["feet"][..., 2],
            },
        }

    def before_step(self) -> None:
        air, clock = self.variables["air"], self.variables["clock"]
        self._before.copy_(self.physics.outputs["site_xpos"].index_select(1, self._sites))
        air.add_(self._dt).masked_fill_(self._before[..., 2] < self._touching, 0.0)
        clock.add_(1)

    def take_action(self, action: Tensor) -> None:
        last = self.variables["action"]
        torch.sub(action, last, out=self._change)
        last.copy_(action)

    def after_step(self, scene: Scene) -> None:
        self.variables["errors"].add_(self._errors(scene))

    def _errors(self, scene: Scene) -> Tensor:
        """Return the relative errors of velocity and yaw rate ``[n, 4]``, each followed by 1 where it counts."""
        clock, command = self.variables["clock"], scene["command"]
        since = torch.minimum(clock, (clock + self.variables["offset"]) % self._interval)
        zeros = self._zeros.expand(command.shape[0], 1)
        sizes = torch.cat((_deviation(scene), zeros, command, zeros), dim=1).view(-1, 2, 2, 2).norm(dim=3)
        error, wanted = sizes.unbind(1)  # [n, 2] each: of the horizontal velocity and of the yaw rate
        counts = ((since >= self._settling).unsqueeze(1) & (wanted >= SLOWEST)).float()
        return torch.stack((error / wanted.clamp_min(SLOWEST) * counts, counts), dim=2).flatten(1)

    def reward_terms(self, scene: Scene, action: Tensor) -> dict[str, Tensor]:
        contact, air, forces = scene["contact"], self.variables["air"], self.physics.outputs["actuator_force"]
        sliding = (scene["feet"] - self._before)[..., :2] * contact.unsqueeze(2)
        linear, angular, deviation = scene["linear"], scene["angular"], _deviation(scene)
        squares = self._squared_norms(
            *(deviation[:, :2], deviation[:, 2:], linear[:, 2:], angular[:, :2], scene["gravity"][:, :2]),
            *(forces.float(), self._change, sliding.flatten(1), scene["qpos"], scene["command"]),
        )
        _, _, vertical, rolling, tilt, torque, change, slip, posture, speed = squares.unbind(1)
        # No error is 1: the mean of a wide Gaussian, which guides from afar, and a narrow one.
        closeness = torch.exp(squares[:, :2, None] * self._sharpness).mean(dim=2)
        walks = (speed > _STANDING**2).float()
        landed = contact & (air > 0)
        return {
            "track_linear": closeness[:, 0],
            "track_turning": closeness[:, 1],
            "alive": self._alive,
            "vertical": vertical,
            "rolling": rolling,
            "tilt": tilt,
            "torque": torque,
            "action_rate": change,
            "air_time": walks * (landed * (air - self.swing).clamp(max=self.swing)).sum(dim=1),
            "slip": slip / self._dt**2,
            "posture": (2.0 - walks) * posture,
        }

    def _squared_norms(self, *vectors: Tensor) -> Tensor:
        """Return the squared norms ``[n, len(vectors)]`` of vectors ``[n, size]``, padded so as to sum all at once."""
        count, width = vectors[0].shape[0], max(vector.shape[1] for vector in vectors)
        padded = [part for v in vectors for part in (v, self._zeros.expand(count, width - v.shape[1]))]
        return torch.cat(padded, dim=1).view(count, len(vectors), width).square().sum(dim=2)

    def _mean_errors(self, scene: Scene) -> Tensor:
        """Return the mean errors of the episode so far ``[n, 2]``: of the velocity and of the yaw rate."""
        if "mean_errors" not in scene:  # both success and metrics need them
            sums, counts = self.variables["errors"][:, 0::2], self.variables["errors"][:, 1::2]
            unknown = scene["fallen"] | (counts.sum(dim=1) == 0)
            scene["mean_errors"] = (sums / counts.clamp_min(1.0)).masked_fill_(unknown.unsqueeze(1), 1.0)
        return scene["mean_errors"]

    def success(self, scene: Scene) -> Tensor:
        """Commands have been followed so far: both mean errors are below ``success_threshold``."""
        return (self._mean_errors(scene) < self._threshold).all(dim=1)

    def failed(self, scene: Scene) -> Tensor:
        return scene["fallen"]

    def metrics(self, scene: Scene) -> dict[str, Tensor]:
        linear, turning = self._mean_errors(scene).unbind(1)
        return {"tracking_error": linear, "turning_error": turning, "fallen": scene["fallen"].float()}

    def markers(self) -> dict[str, Tensor]:
        scene = self.read()
        ahead = torch.cat((_AHEAD * scene["command"][:, :2], torch.zeros_like(scene["command"][:, :1])), dim=1)
        w, _, _, z = scene["quat"].unbind(1)
        back = torch.stack((w, torch.zeros_like(w), torch.zeros_like(w), -z), dim=1)  # inverse of the heading
        back = back / back.norm(dim=1, keepdim=True).clamp_min(1e-6)
        return {"command": scene["position"] + _rotate_back(back, ahead.unsqueeze(1)).squeeze(1)}


def _feet(model: mujoco.MjModel, names: Sequence[str]) -> list[int]:
    """Return the site ids of the feet: those of our robot, or those found in a robot with ``walks``."""
    sites = {model.site(i).name: i for i in range(model.nsite)}
    ours = [sites[f"robot/{name}"] for name in names if f"robot/{name}" in sites]
    feet = ours or [i for name, i in sites.items() if name.startswith("robot/foot_")]
    if not feet:
        raise ConfigError("robot.walks: this robot has no feet; set it to true for a robot with legs and a free base")
    return feet


def _deviation(scene: Scene) -> Tensor:
    """Return the velocity minus the commanded one ``[n, 3]``: forwards, sideways, and the yaw rate."""
    return torch.cat((scene["linear"][:, :2], scene["angular"][:, 2:]), dim=1) - scene["command"]


def _rotate_back(quat: Tensor, vectors: Tensor) -> Tensor:
    """Rotate world vectors ``[n, k, 3]`` into the frame of a body with orientation ``quat`` ``[n, 4]``."""
    axis = quat[:, None, 1:].expand_as(vectors)
    across = torch.linalg.cross(axis, vectors)
    turned = torch.addcmul(torch.linalg.cross(axis, across), quat[:, :1, None], across, value=-1.0)
    return torch.add(vectors, turned, alpha=2.0)


def walker_cfg(id: str, robot: RobotCfg, command: VelocityCommandCfg, threshold: float) -> GymCfg:
    """Return the config of a walking robot: joint targets around its initial posture at 50 Hz, physics at 200 Hz."""
    env = EnvCfg(
        substeps=4,
        success_threshold=threshold,
        terminate_on_success=False,
        events=EventsCfg(randomize_robot=JointRangeCfg(position=0.1, velocity=0.1)),
        actions=ActionsCfg(qpos=JointTermCfg(scale=0.5, around="init")),
        command=command,
    )
    return GymCfg(id=id, max_episode_steps=1000, env=env, robot=robot)


class QuadrupedVelocity(VelocityTask):
    """Walk on four legs with a commanded velocity (forwards, sideways, turning) without falling."""

    feet = ("fl_foot", "fr_foot", "rl_foot", "rr_foot")
    swing = 0.15
    clearance = 0.004

    @staticmethod
    def default_cfg() -> GymCfg:
        robot = RobotCfg(uid="quadruped", init_qpos=[0.0, 0.8, -1.6] * 4)
        return walker_cfg("QuadrupedVelocityRL", robot, VelocityCommandCfg(), threshold=0.15)


class BipedVelocity(VelocityTask):
    """Walk on two legs with a commanded velocity (forwards, sideways, turning) without falling."""

    reward_weights = {**VelocityTask.reward_weights, "torque": -1e-5, "vertical": -0.5}
    feet = ("left_foot", "right_foot")
    swing = 0.3
    clearance = 0.015

    @staticmethod
    def default_cfg() -> GymCfg:
        robot = RobotCfg(uid="biped", init_qpos=[0.0, 0.0, -0.25, 0.5, -0.25, 0.0] * 2)
        command = VelocityCommandCfg(forward=(-0.4, 0.8), sideways=(-0.25, 0.25), turning=(-0.6, 0.6))
        return walker_cfg("BipedVelocityRL", robot, command, threshold=0.25)
