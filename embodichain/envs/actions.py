"""From a policy's action to motor commands, through one term: ``delta_qpos``, ``qpos``, ``ee_delta`` or ``effort``."""

from typing import Any

import gymnasium as gym
import mujoco
import numpy as np
import torch
from torch import Tensor

from embodichain.envs.env_cfg import ActionsCfg, EffortTermCfg, EndEffectorTermCfg, JointTermCfg
from embodichain.envs.kinematics import SerialChain, rotation_error
from embodichain.envs.robots import Robot
from embodichain.envs.vec_env import Action
from embodichain.envs.vec_env import ActionManager as ActionManager
from embodichain.errors import ConfigError


class DeltaQpos:
    """``target = qpos + scale * action``."""

    def __init__(self, cfg: JointTermCfg, robot: Robot) -> None:
        self.scale, self.robot, self.dim = cfg.scale, robot, robot.num_joints

    def target(self, action: Tensor, qpos: Tensor) -> Tensor:
        """Return joint targets ``[n, num_joints]``, or motor commands."""
        return torch.clamp(torch.add(qpos.float(), action, alpha=self.scale), self.robot.lower, self.robot.upper)

    def encode(self, qpos: Tensor, displacement: Tensor, twist: Tensor) -> Tensor:
        """Return the action that asks for a joint displacement."""
        return _shorten(displacement / self.scale)


class Qpos:
    """The range [-1, 1] spans the joint limits, or ``scale`` to both sides of ``init_qpos``."""

    def __init__(self, cfg: JointTermCfg, robot: Robot) -> None:
        self.dim, self.scale, self.robot = robot.num_joints, cfg.scale, robot
        self.middle, self.half = 0.5 * (robot.upper + robot.lower), 0.5 * (robot.upper - robot.lower)
        self._clamps = cfg.around == "init"
        if self._clamps:
            self.middle = robot.init_qpos[: robot.num_joints].to(torch.float32)
            self.half = torch.full_like(self.middle, cfg.scale)

    def target(self, action: Tensor, qpos: Tensor) -> Tensor:
        target = self.middle + self.half * action
        return torch.clamp(target, self.robot.lower, self.robot.upper) if self._clamps else target

    def encode(self, qpos: Tensor, displacement: Tensor, twist: Tensor) -> Tensor:
        """Return the action that asks for a joint displacement, no further than ``scale`` per step."""
        return (qpos + self.scale * _shorten(displacement / self.scale) - self.middle) / self.half


class EndEffectorDelta:
    """The tool moves by ``scale * action``; without rotation it keeps the orientation it has in ``init_qpos``."""

    def __init__(self, cfg: EndEffectorTermCfg, robot: Robot) -> None:
        self.cfg, self.robot, self.chain = cfg, robot, chain_of(robot, "ee_delta")
        self.dim = 6 if cfg.rotation_scale else 3
        home = robot.init_qpos[: robot.num_joints].to(torch.float32)
        self._upright = self.chain.pose(home.unsqueeze(0))[1]

    def target(self, action: Tensor, qpos: Tensor) -> Tensor:
        qpos = qpos.float()
        if self.cfg.rotation_scale:
            turn = self.cfg.rotation_scale * action[:, 3:]
        else:
            turn = rotation_error(self._upright, self.chain.pose(qpos)[1])
        twist = torch.cat((self.cfg.scale * action[:, :3], turn), dim=-1)
        step = self.chain.inverse_step(qpos, twist, self.cfg.damping)
        return torch.clamp(qpos + step, self.robot.lower, self.robot.upper)

    def encode(self, qpos: Tensor, displacement: Tensor, twist: Tensor) -> Tensor:
        """Return the action that asks for a displacement of the tool."""
        linear = twist[:, :3] / self.cfg.scale
        return _shorten(
            torch.cat((linear, twist[:, 3:] / self.cfg.rotation_scale), dim=-1) if self.dim == 6 else linear
        )


class Effort:
    """The action goes to the motors, 1 being the most they can do."""

    def __init__(self, cfg: EffortTermCfg, robot: Robot) -> None:
        self.dim, self.limit = robot.num_joints, robot.max_control

    def target(self, action: Tensor, qpos: Tensor) -> Tensor:
        return self.limit * action


def _shorten(action: Tensor) -> Tensor:
    """Scale actions ``[n, dim]`` that leave [-1, 1] back into it as a whole, so that the tool keeps its direction."""
    return action / torch.amax(action.abs(), dim=1, keepdim=True).clamp_min(1.0)


_TERMS: dict[str, Any] = {"delta_qpos": DeltaQpos, "qpos": Qpos, "ee_delta": EndEffectorDelta, "effort": Effort}


def chain_of(robot: Robot, wanted_by: str) -> SerialChain:
    """Return the robot's kinematic chain; ``ConfigError`` if it has no tool."""
    if robot.chain is None:
        raise ConfigError(f"robot.tool: {wanted_by} needs a robot with a tool")
    return robot.chain


class RobotActionManager(ActionManager):
    """Turns actions into controls through the one term set in the config; a gripper adds one action at the end."""

    def __init__(self, cfg: ActionsCfg, robot: Robot, num_envs: int, device: torch.device | str) -> None:
        chosen = [name for name in _TERMS if getattr(cfg, name) is not None]
        if len(chosen) != 1:
            raise ConfigError(f"env.actions: set exactly one of {', '.join(_TERMS)}, got {chosen or 'none'}")
        name, term = chosen[0], getattr(cfg, chosen[0])
        if (name == "effort") == robot.has_servos:
            wanted, has = ("motors", "servos") if robot.has_servos else ("servos", "motors")
            raise ConfigError(f"env.actions.{name}: needs joints with {wanted}, and this robot's have {has}")
        self.robot, self.clip = robot, float(term.clip)
        self.term: DeltaQpos | Qpos | EndEffectorDelta | Effort = _TERMS[name](term, robot)
        dim = self.term.dim + (1 if robot.num_fingers else 0)
        super().__init__(name, gym.spaces.Box(-1.0, 1.0, (dim,), np.float32), num_envs, device)

    def unwrap(self, action: Action, step: Tensor | int | None = None) -> Tensor:
        """Return the action as a checked tensor ``[num_envs, action_dim]`` within [-clip, clip]."""
        return super().unwrap(action, step).clamp(-self.clip, self.clip)

    def control(self, action: Tensor, qpos: Tensor) -> Tensor:
        """Return controls ``[num_envs, nu]`` for a checked action and ``qpos`` ``[num_envs, dofs]``, of any dtype."""
        if not self.robot.num_fingers:
            return self.term.target(action, qpos)
        target = self.term.target(action[:, : self.term.dim], qpos[:, : self.robot.num_joints])
        openness = 0.5 * (action[:, self.term.dim :] + 1.0)
        return torch.cat((target, torch.lerp(self.robot.finger_closed, self.robot.finger_open, openness)), dim=-1)

    def encode(self, qpos: Tensor, twist: Tensor, grip: Tensor | None = None) -> Tensor:
        """Return the action that moves the tool by ``twist`` ``[n, 6]``; fingers get ``grip`` ``[n, 1]``, or close."""
        if isinstance(self.term, Effort):
            raise ConfigError("env.actions.effort: an expert that moves a tool needs joint or tool commands")
        qpos = qpos[:, : self.robot.num_joints]
        displacement = chain_of(self.robot, self.action_type).inverse_step(qpos, twist)
        action = self.term.encode(qpos, displacement, twist).clamp(-1.0, 1.0)
        if not self.robot.num_fingers:
            return action
        return torch.cat((action, -torch.ones_like(action[:, :1]) if grip is None else grip), dim=-1)


class MotorActionManager(ActionManager):
    """[-1, 1] spans the control range of every motor of a model; values beyond are clipped."""

    def __init__(self, model: mujoco.MjModel, num_envs: int, device: torch.device | str) -> None:
        bounds = torch.tensor(model.actuator_ctrlrange, dtype=torch.float32, device=device).double()  # as in Gymnasium
        self._half, self._middle = 0.5 * (bounds[:, 1] - bounds[:, 0]), 0.5 * (bounds[:, 1] + bounds[:, 0])
        super().__init__("action", gym.spaces.Box(-1.0, 1.0, (int(model.nu),), np.float32), num_envs, device)

    def unwrap(self, action: Action, step: Tensor | int | None = None) -> Tensor:
        """Return the action as a checked tensor ``[num_envs, action_dim]`` within [-1, 1]."""
        return super().unwrap(action, step).clamp(-1.0, 1.0)

    def control(self, action: Tensor, qpos: Tensor) -> Tensor:
        """Return controls ``[num_envs, nu]``, rounded to float32 as actions of Gymnasium are."""
        return torch.addcmul(self._middle, action.double(), self._half).float()
