"""Action terms: map policy actions to motor commands as ``delta_qpos``, ``qpos``, ``ee_delta`` or ``effort``."""

from typing import Any

import gymnasium as gym
import mujoco
import numpy as np
import torch
from torch import Tensor

from embodichain.envs.env_cfg import ActionsCfg, EffortTermCfg, EndEffectorTermCfg, JointTermCfg
from embodichain.envs.kinematics import SerialChain, rotation_error
from embodichain.envs.robots import Arm, Robot
from embodichain.envs.vec_env import Action
from embodichain.envs.vec_env import ActionManager as ActionManager
from embodichain.errors import ConfigError


class DeltaQpos:
    """Relative joint positions: ``target = qpos + scale * action``."""

    def __init__(self, cfg: JointTermCfg, arm: Arm) -> None:
        self.scale, self.arm, self.dim = cfg.scale, arm, arm.num_joints

    def target(self, action: Tensor, qpos: Tensor) -> Tensor:
        """Return joint targets ``[n, num_joints]``, or motor commands for ``effort``."""
        return torch.clamp(torch.add(qpos.float(), action, alpha=self.scale), self.arm.lower, self.arm.upper)

    def encode(self, qpos: Tensor, displacement: Tensor, twist: Tensor) -> Tensor:
        """Return the action for a joint displacement."""
        return _shorten(displacement / self.scale)


class Qpos:
    """Absolute joint positions: [-1, 1] spans the joint limits, or ``init_qpos`` +- ``scale``."""

    def __init__(self, cfg: JointTermCfg, arm: Arm) -> None:
        self.dim, self.scale, self.arm = arm.num_joints, cfg.scale, arm
        self.middle, self.half = 0.5 * (arm.upper + arm.lower), 0.5 * (arm.upper - arm.lower)
        self._clamps = cfg.around == "init"
        if self._clamps:
            self.middle = arm.init_qpos[: arm.num_joints].to(torch.float32)
            self.half = torch.full_like(self.middle, cfg.scale)

    def target(self, action: Tensor, qpos: Tensor) -> Tensor:
        target = self.middle + self.half * action
        return torch.clamp(target, self.arm.lower, self.arm.upper) if self._clamps else target

    def encode(self, qpos: Tensor, displacement: Tensor, twist: Tensor) -> Tensor:
        """Return the action for a joint displacement, limited to ``scale`` per step."""
        return (qpos + self.scale * _shorten(displacement / self.scale) - self.middle) / self.half


class EndEffectorDelta:
    """Displaces the tool by ``scale * action``; without rotation it keeps its orientation at ``init_qpos``."""

    def __init__(self, cfg: EndEffectorTermCfg, arm: Arm) -> None:
        self.cfg, self.arm, self.chain = cfg, arm, chain_of(arm, "ee_delta")
        self.dim = 6 if cfg.rotation_scale else 3
        home = arm.init_qpos[: arm.num_joints].to(torch.float32)
        self._upright = self.chain.pose(home.unsqueeze(0))[1]

    def target(self, action: Tensor, qpos: Tensor) -> Tensor:
        qpos = qpos.float()
        if self.cfg.rotation_scale:
            turn = self.cfg.rotation_scale * action[:, 3:]
        else:
            turn = rotation_error(self._upright, self.chain.pose(qpos)[1])
        twist = torch.cat((self.cfg.scale * action[:, :3], turn), dim=-1)
        step = self.chain.inverse_step(qpos, twist, self.cfg.damping)
        return torch.clamp(qpos + step, self.arm.lower, self.arm.upper)

    def encode(self, qpos: Tensor, displacement: Tensor, twist: Tensor) -> Tensor:
        """Return the action for a displacement of the tool."""
        linear = twist[:, :3] / self.cfg.scale
        return _shorten(
            torch.cat((linear, twist[:, 3:] / self.cfg.rotation_scale), dim=-1) if self.dim == 6 else linear
        )


class Effort:
    """Motor commands: -1 and 1 are the limits of each motor, and 0 is no effort."""

    def __init__(self, cfg: EffortTermCfg, arm: Arm) -> None:
        self.dim, self.limit = arm.num_joints, arm.max_control.clamp_min(0.0)
        backwards = (-arm.min_control).clamp_min(0.0)
        self._backwards = None if torch.equal(self.limit, backwards) else backwards

    def target(self, action: Tensor, qpos: Tensor) -> Tensor:
        if self._backwards is None:
            return self.limit * action
        return torch.where(action < 0.0, self._backwards, self.limit) * action


def _shorten(action: Tensor) -> Tensor:
    """Scale each action ``[n, dim]`` uniformly into [-1, 1], which keeps its direction."""
    return action / torch.amax(action.abs(), dim=1, keepdim=True).clamp_min(1.0)


_TERMS: dict[str, Any] = {"delta_qpos": DeltaQpos, "qpos": Qpos, "ee_delta": EndEffectorDelta, "effort": Effort}
Term = DeltaQpos | Qpos | EndEffectorDelta | Effort


def chain_of(robot: Robot | Arm, wanted_by: str) -> SerialChain:
    """Return the kinematic chain of an arm, or of a robot with one arm; ``ConfigError`` if there is none."""
    if isinstance(robot, Robot) and robot.only_arm is None:
        raise ConfigError(f"robot.arms: {wanted_by} needs one arm, and this robot has {', '.join(robot.arms)}")
    if robot.chain is None:
        raise ConfigError(f"robot.tool: {wanted_by} needs a robot with a tool")
    return robot.chain


class RobotActionManager(ActionManager):
    """Maps actions to controls through the configured term; a gripper appends one action.

    With several arms, their actions are concatenated in order.
    """

    def __init__(self, cfg: ActionsCfg, robot: Robot, num_envs: int, device: torch.device | str) -> None:
        chosen = [name for name in _TERMS if getattr(cfg, name) is not None]
        if len(chosen) != 1:
            raise ConfigError(f"env.actions: set exactly one of {', '.join(_TERMS)}, got {chosen or 'none'}")
        name, term = chosen[0], getattr(cfg, chosen[0])
        for arm in robot.arms.values():
            _check_drives(name, arm)
        self.robot, self.clip = robot, float(term.clip)
        self.arms = {key: ArmActions(_TERMS[name](term, arm), arm) for key, arm in robot.arms.items()}
        self._only = next(iter(self.arms.values())) if len(self.arms) == 1 else None
        self.term: Term = next(iter(self.arms.values())).term
        dims = [arm.dim for arm in self.arms.values()]
        self._dims = dims
        self.segment: Tensor | None = None
        """Segment of the expert's last action, indices into ``SEGMENTS`` ``[n]``, if the expert sets it."""
        super().__init__(name, gym.spaces.Box(-1.0, 1.0, (sum(dims),), np.float32), num_envs, device)

    def unwrap(self, action: Action, step: Tensor | int | None = None) -> Tensor:
        """Return the action as a validated tensor ``[num_envs, action_dim]`` within [-clip, clip]."""
        return super().unwrap(action, step).clamp(-self.clip, self.clip)

    def control(self, action: Tensor, qpos: Tensor) -> Tensor:
        """Return controls ``[num_envs, nu]`` for a validated action and joint positions ``[num_envs, dofs]``."""
        if self._only is not None:
            used = self._only.control(action, qpos)
        else:
            parts = zip(self.arms.values(), action.split_with_sizes(self._dims, dim=1), strict=True)
            used = torch.cat([arm.control(part, qpos[:, arm.arm.columns]) for arm, part in parts], dim=-1)
        if self.robot.controls is None:
            return used
        return self.robot.idle_control.repeat(used.shape[0], 1).index_copy_(1, self.robot.controls, used)

    def encode(self, qpos: Tensor, twist: Tensor, grip: Tensor | None = None, arm: str | None = None) -> Tensor:
        """Return the action that moves the tool by ``twist`` ``[n, 6]``; ``grip`` ``[n, 1]`` defaults to closed (-1).

        ``qpos`` ``[n, dofs]`` are the joints of the whole robot. With several arms, ``arm`` names one of them, and the
        result is its part of the action.
        """
        if self._only is not None and arm is None:
            return self._only.encode(qpos, twist, grip)
        if arm is None or arm not in self.arms:
            raise ConfigError(f"encode: expected the name of an arm, one of {', '.join(self.arms)}, got {arm!r}")
        return self.arms[arm].encode(qpos[:, self.arms[arm].arm.columns], twist, grip)


class ArmActions:
    """One arm's part of the action: its term and its gripper."""

    def __init__(self, term: Term, arm: Arm) -> None:
        self.term, self.arm = term, arm
        self.dim = term.dim + (1 if arm.num_fingers else 0)
        # Maps position targets to controls; ``None`` if they are equal.
        self._scale = None if isinstance(term, Effort) else arm.control_scale

    def control(self, action: Tensor, qpos: Tensor) -> Tensor:
        """Return the controls of the arm's actuators for its part of the action and its joint positions."""
        if not self.arm.num_fingers:
            return self._scaled(self.term.target(action, qpos))
        target = self._scaled(self.term.target(action[:, : self.term.dim], qpos[:, : self.arm.num_joints]))
        openness = 0.5 * (action[:, self.term.dim :] + 1.0)
        return torch.cat((target, torch.lerp(self.arm.grip_closed, self.arm.grip_open, openness)), dim=-1)

    def encode(self, qpos: Tensor, twist: Tensor, grip: Tensor | None = None) -> Tensor:
        """Return the arm's part of the action that moves its tool by ``twist`` ``[n, 6]``."""
        if isinstance(self.term, Effort):
            raise ConfigError("env.actions.effort: an expert that moves a tool needs joint or tool commands")
        qpos = qpos[:, : self.arm.num_joints]
        displacement = chain_of(self.arm, "an expert").inverse_step(qpos, twist)
        action = self.term.encode(qpos, displacement, twist).clamp(-1.0, 1.0)
        if not self.arm.num_fingers:
            return action
        return torch.cat((action, -torch.ones_like(action[:, :1]) if grip is None else grip), dim=-1)

    def _scaled(self, target: Tensor) -> Tensor:
        return target if self._scale is None else torch.addcmul(self._scale[1], target, self._scale[0])


def _check_drives(term: str, arm: Arm) -> None:
    """Raise ``ConfigError`` unless the joints of an arm have the actuators that an action term needs."""
    if arm.has_motors if term == "effort" else arm.has_servos:
        return
    key = f"robot.arms.{arm.name}" if arm.name else "robot"
    if term == "effort":
        has, advice = "servos" if arm.has_servos else "other actuators", "choose delta_qpos, qpos or ee_delta"
        raise ConfigError(f"env.actions.effort: needs joints with motors, and this robot's have {has}; {advice}")
    has = "motors" if arm.has_motors else "no servos"
    advice = f"set {key}.servos to true to put servos in their place, or use env.actions.effort"
    raise ConfigError(f"env.actions.{term}: needs joints with servos, and this robot's have {has}; {advice}")


class MotorActionManager(ActionManager):
    """Actions for all motors of a model: [-1, 1] spans the control range of each; values beyond are clipped."""

    def __init__(self, model: mujoco.MjModel, num_envs: int, device: torch.device | str) -> None:
        bounds = torch.tensor(model.actuator_ctrlrange, dtype=torch.float32, device=device).double()  # as in Gymnasium
        self._half, self._middle = 0.5 * (bounds[:, 1] - bounds[:, 0]), 0.5 * (bounds[:, 1] + bounds[:, 0])
        self._is_identity = bool((self._half == 1.0).all() and (self._middle == 0.0).all())
        super().__init__("action", gym.spaces.Box(-1.0, 1.0, (int(model.nu),), np.float32), num_envs, device)

    def unwrap(self, action: Action, step: Tensor | int | None = None) -> Tensor:
        """Return the action as a validated tensor ``[num_envs, action_dim]`` within [-1, 1]."""
        return super().unwrap(action, step).clamp(-1.0, 1.0)

    def control(self, action: Tensor, qpos: Tensor) -> Tensor:
        """Return controls ``[num_envs, nu]``, rounded to float32 as in Gymnasium."""
        if self._is_identity:
            return action
        return torch.addcmul(self._middle, action.double(), self._half).float()
