"""Motion primitives for scripted experts: move, grasp, place, push, press, pull, insert, hand over.

A primitive is a :class:`Stage`: a target pose of the tool, a grip, and a completion condition. It is a function of the
current measurements without memory, so an expert can act in any state that a policy reaches. :func:`sequence` combines
stages into one::

    def expert_action(self, scene, actions):
        tool = self.tool.at(scene["qpos"])
        carry = move(tool, scene["goal"], speed=0.03)
        return tool.act(actions, sequence(grasp(tool, scene["cube_pos"], DOWN, scene["held"] > 0), carry))

Every stage belongs to a segment of the task (``reach``, ``grasp``, ``move``, ``place`` and others of ``SEGMENTS``),
which streams can store and samplers can weight; :func:`part` sets it.

All is batched torch without data-dependent branches: rows are independent, and CUDA graphs can capture it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from embodichain.envs.actions import RobotActionManager, chain_of
from embodichain.envs.kinematics import SerialChain, dot, length, rotation_error
from embodichain.envs.robots import Arm, Robot
from embodichain.envs.vec_env import SEGMENTS
from embodichain.errors import ConfigError, EnvContractError, nearest

Direction: TypeAlias = Sequence[float] | Tensor
"""A unit vector in the world, ``(x, y, z)`` for all envs or ``[n, 3]``."""

OPEN, CLOSED = 1.0, -1.0
UP, DOWN, FORWARD, BACKWARD = (0.0, 0.0, 1.0), (0.0, 0.0, -1.0), (1.0, 0.0, 0.0), (-1.0, 0.0, 0.0)
GAIN = 2.0
"""Factor on the displacements of a tool: servos reach only part of them within one step."""
_SATURATES = 0.02  # radians; servos whose torque ends at a smaller displacement brake late, and get half of the gain
_MAX_TURN = 0.15  # maximum rotation per step, in radians
_CLEARANCE = 0.1  # distance from which a tool approaches an object, in metres


class Stage(NamedTuple):
    """A target of the tool, until a condition is met."""

    until: Tensor
    """Whether the stage is complete, bool ``[n]``."""
    pos: Tensor
    """Target position of the tool, ``[n, 3]``."""
    rotation: Tensor
    """Target orientation, ``[n, 3, 3]``."""
    grip: Tensor
    """Target of the fingers, ``[n, 1]``: 1 open, -1 closed."""
    speed: Tensor
    """Maximum displacement per step in metres, ``[n, 1]``."""
    segment: Tensor
    """Segment of the stage, int64 indices into ``SEGMENTS`` ``[n]``."""


@dataclass(frozen=True)
class Tool:
    """The measured tool of an arm."""

    chain: SerialChain
    qpos: Tensor
    """Joint positions of the robot, ``[n, dofs]``."""
    pos: Tensor
    """Position of the tool, ``[n, 3]``."""
    rotation: Tensor
    """Its rotation matrix, ``[n, 3, 3]``."""
    home: Tensor
    """Initial orientation of the tool, ``[1, 3, 3]``, which stages keep by default."""
    arm: str | None = None
    """Name of the arm that carries it, if there are several."""
    gain: float = GAIN
    """Factor on displacements: servos reach only part of them within one step."""

    def stage(
        self,
        until: Tensor,
        pos: Tensor,
        grip: float | Tensor = CLOSED,
        speed: float = 0.03,
        rotation: Tensor | None = None,
        segment: str = "move",
    ) -> Stage:
        """Return a stage of this tool; ``grip`` is a number or ``[n]``, ``rotation`` ``[3, 3]`` or ``[n, 3, 3]``."""
        _check_flags("until", until)
        column = torch.ones_like(self.pos[:, :1])
        fingers = grip.to(column.dtype).unsqueeze(1) if isinstance(grip, Tensor) else grip * column
        turned = self.home if rotation is None else rotation
        number = torch.full_like(until, _number(segment), dtype=torch.int64)
        return Stage(until, pos, turned.expand_as(self.rotation), fingers, speed * column, number)

    def act(self, actions: RobotActionManager, stage: Stage) -> Tensor:
        """Return the action for a stage, ``[n, action_dim]``; with several arms, this arm's part of it.

        ``actions.segment`` is set to the stage's segment; with several arms, to that of the first.
        """
        actions.segment = stage.segment if actions.segment is None else actions.segment
        return actions.encode(self.qpos, self.twist(stage), stage.grip, self.arm)

    def twist(self, stage: Stage) -> Tensor:
        """Return the displacement and rotation of the tool for one step of a stage, ``[n, 6]``."""
        way = stage.pos - self.pos
        by = way * (stage.speed / length(way).unsqueeze(1).clamp_min(1e-9)).clamp_max(1.0)
        turn = rotation_error(stage.rotation, self.rotation).clamp(-_MAX_TURN, _MAX_TURN)
        return torch.cat((self.gain * by, turn), dim=1)


class ToolArm:
    """The arm that carries a tool, named by ``arm`` if there are several; :meth:`at` measures the tool."""

    def __init__(self, robot: Robot, wanted_by: str = "an expert", arm: str | None = None) -> None:
        self._chain, self._name = chain_of(robot if arm is None else robot.arms[arm], wanted_by), arm
        own = next(iter(robot.arms.values())) if arm is None else robot.arms[arm]
        self._gain = gain_of(own)
        first = own.columns.start
        self._joints = slice(first, first + own.num_joints)
        self._home = self._chain.pose(own.init_qpos[: own.num_joints].to(torch.float32).unsqueeze(0))[1]

    def position(self, qpos: Tensor) -> Tensor:
        """Return the tool's position ``[n, 3]`` at joint positions of the robot ``[n, dofs]``."""
        return self._chain.position(qpos[:, self._joints])

    def at(self, qpos: Tensor) -> Tool:
        """Return the tool at joint positions of the robot ``[n, dofs]``."""
        pos, rotation = self._chain.pose(qpos[:, self._joints])
        return Tool(self._chain, qpos, pos, rotation, self._home, self._name, self._gain)


def gain_of(arm: Arm) -> float:
    """Return the factor on the displacements of an arm's tool."""
    return GAIN if arm.saturation > _SATURATES else 0.5 * GAIN


def _check_flags(name: str, flags: Tensor) -> None:
    """Raise ``EnvContractError`` if a condition is not bool ``[n]``."""
    if not isinstance(flags, Tensor) or flags.dtype != torch.bool:
        got = f"{str(flags.dtype)[6:]} {list(flags.shape)}" if isinstance(flags, Tensor) else type(flags).__name__
        advice = "compare with a threshold: opening > 0.01"
        raise EnvContractError(f"{name}: expected a condition, bool [num_envs], got {got}; {advice}")


def sequence(*stages: Stage) -> Stage:
    """Return in each env the first stage that is not complete, or the last one."""
    chosen = stages[-1]
    done = chosen.until
    for stage in reversed(stages[:-1]):
        chosen = either(stage.until, chosen, stage)
        done = done & stage.until
    return chosen._replace(until=done)


def either(condition: Tensor, one: Stage, other: Stage) -> Stage:
    """Return ``one`` where ``condition`` ``[n]`` is true, and ``other`` elsewhere."""
    _check_flags("condition", condition)
    parts = (torch.where(_like(condition, a), a, b) for a, b in zip(one, other, strict=True))
    return Stage(*parts)


def part(segment: str, stage: Stage) -> Stage:
    """Return a stage with a segment, one of ``SEGMENTS``."""
    return stage._replace(segment=torch.full_like(stage.segment, _number(segment)))


def _number(segment: str) -> int:
    if segment not in SEGMENTS:
        raise ConfigError(f"segment: unknown name {segment!r}.{nearest(segment, SEGMENTS)}")
    return SEGMENTS.index(segment)


def unless(condition: Tensor, stage: Stage) -> Stage:
    """Return a stage that is also complete where ``condition`` ``[n]`` is true, such as a grasp of a placed object."""
    _check_flags("condition", condition)
    return stage._replace(until=stage.until | condition)


def move(
    tool: Tool,
    to: Tensor,
    tolerance: float = 0.01,
    grip: float | Tensor = CLOSED,
    speed: float = 0.03,
    rotation: Tensor | None = None,
) -> Stage:
    """Move the tool to a point ``[n, 3]``."""
    return tool.stage(length(to - tool.pos) < tolerance, to, grip, speed, rotation)


def grasp(
    tool: Tool,
    at: Tensor,
    along: Direction,
    held: Tensor,
    clearance: float = _CLEARANCE,
    tolerance: float = 0.012,
    speed: float = 0.03,
    rotation: Tensor | None = None,
) -> Stage:
    """Approach a point ``[n, 3]`` along a direction with open fingers, and close them; complete where ``held``."""
    _check_flags("held", held)
    ahead, aside, direction = _split(at - tool.pos, along)
    aligned = (length(aside) < tolerance) | held
    far = (ahead > 0.5 * clearance) | aligned
    near = (length(at - tool.pos) < min(tolerance, 0.012)) | held
    back = tool.pos + (ahead - clearance).unsqueeze(1) * direction
    return sequence(
        tool.stage(far, back, OPEN, speed, rotation, "reach"),
        tool.stage(aligned, at - clearance * direction, OPEN, speed, rotation, "reach"),
        tool.stage(near, at, OPEN, 0.6 * speed, rotation, "reach"),
        tool.stage(held, at, CLOSED, 0.6 * speed, rotation, "grasp"),
    )


def place(
    tool: Tool,
    what: Tensor,
    to: Tensor,
    released: Tensor,
    along: Direction = DOWN,
    clearance: float = _CLEARANCE,
    tolerance: float = 0.01,
    speed: float = 0.03,
    rotation: Tensor | None = None,
) -> Stage:
    """Carry a held object at ``what`` ``[n, 3]`` above ``to``, lower it along a direction, release it and leave.

    ``released`` ``[n]`` is whether the fingers are open. Complete where the object is at ``to`` and the tool has left.
    """
    _check_flags("released", released)
    _, aside, direction = _split(to - what, along)
    placed = length(to - what) < tolerance
    over = to - clearance * direction
    left = length(tool.pos - what) > 0.7 * clearance
    leave = tool.pos - clearance * direction
    return sequence(
        tool.stage((length(aside) < tolerance) | placed, tool.pos + over - what, CLOSED, speed, rotation),
        tool.stage(placed, tool.pos + to - what, CLOSED, 0.5 * speed, rotation, "place"),
        tool.stage(released | left, tool.pos, OPEN, speed, rotation, "place"),
        tool.stage(placed & left, leave, OPEN, speed, rotation, "leave"),
    )


def push(
    tool: Tool,
    what: Tensor,
    to: Tensor,
    reach: float,
    low: float,
    high: float,
    tolerance: float = 0.01,
    speed: float = 0.04,
    push_speed: float = 0.012,
) -> Stage:
    """Push an object at ``what`` ``[n, 2 or 3]`` across a table to a point, correcting for drift, and raise the tool.

    ``reach`` is the distance of the two centres at contact. ``low`` and ``high`` are heights of the tool for pushing
    and for passing over the object. Complete where it is within ``tolerance`` of the point.
    """
    way = to[:, :2] - what[:, :2]
    direction = way / length(way).unsqueeze(1).clamp_min(1e-6)
    done = length(way) < tolerance
    tip, height = tool.pos[:, :2], tool.pos[:, 2]
    from_it = tip - what[:, :2]
    along = dot(from_it, direction)
    aside = from_it - along.unsqueeze(1) * direction
    behind = what[:, :2] - reach * direction
    # Push when behind the object and on the line to the goal. The cone widens with the distance.
    ready = (along < -0.6 * reach) & (length(aside) < 0.012 + 0.3 * (-along - reach).clamp_min(0.0))
    clear = length(from_it) > 1.6 * reach  # far enough from the object to move and lower freely
    sink = ready | (length(behind - tip) < 0.015) | (clear & (along < 0.0))
    at = lambda xy, z: torch.cat((xy, torch.full_like(xy[:, :1], z)), dim=1)  # noqa: E731
    return sequence(
        tool.stage(sink | clear | (height > high - 0.03) | done, at(tip, high), CLOSED, speed, segment="reach"),
        tool.stage(sink | done, at(behind, high), CLOSED, speed, segment="reach"),
        tool.stage((ready & (height < low + 0.02)) | done, at(behind, low), CLOSED, speed, segment="reach"),
        tool.stage(done, at(tip + push_speed * direction - 0.5 * aside, low), CLOSED, speed, segment="push"),
        tool.stage(done, at(tip, high), CLOSED, speed, segment="leave"),
    )


def press(
    tool: Tool,
    at: Tensor,
    along: Direction,
    until: Tensor,
    clearance: float = 0.05,
    tolerance: float = 0.015,
    speed: float = 0.02,
    rotation: Tensor | None = None,
) -> Stage:
    """Approach a point ``[n, 3]`` with closed fingers and push against it, as for a button or a drawer.

    What is pushed may push the tool aside: where it touches, it is allowed thrice the tolerance before it starts anew.
    """
    ahead, aside, direction = _split(at - tool.pos, along)
    off = length(aside)
    touches = (ahead < tolerance) & (off < 3.0 * tolerance)
    aligned = ((off < tolerance) | touches) & (ahead > -2.0 * tolerance)
    far = (ahead > 0.5 * clearance) | aligned
    back = tool.pos + (ahead - clearance).unsqueeze(1) * direction
    return sequence(
        tool.stage(far, back, CLOSED, speed, rotation, "reach"),
        tool.stage(aligned, at - clearance * direction, CLOSED, speed, rotation, "reach"),
        part("press", pull(tool, until, at, along, CLOSED, speed, rotation)),
    )


def pull(
    tool: Tool, until: Tensor, at: Tensor, along: Direction, grip: float | Tensor = CLOSED, speed: float = 0.01,
    rotation: Tensor | None = None,
) -> Stage:  # fmt: skip
    """Pull (or push) the part grasped ``at`` a point ``[n, 3]`` in a direction, until a condition ``[n]`` is met.

    The target always stays ahead of the tool, on the line through the point, whether or not the part follows.
    """
    _, aside, direction = _split(at - tool.pos, along)
    return tool.stage(until, tool.pos + aside + speed * direction, grip, speed, rotation, "pull")


def pull_arc(
    tool: Tool,
    until: Tensor,
    at: Tensor,
    pivot: Tensor,
    axis: Direction = UP,
    grip: float | Tensor = CLOSED,
    speed: float = 0.01,
    rotation: Tensor | None = None,
) -> Stage:
    """Pull the part grasped ``at`` a point ``[n, 3]`` around a ``pivot`` ``[n, 3]``, such as a door about its hinges.

    The rotation is counterclockwise about the axis.
    """
    _, lever, direction = _split(at - pivot, axis)
    tangent = torch.linalg.cross(direction.expand_as(lever), lever, dim=1)
    # A chord deviates from the arc by half its angle: a step of ``speed`` metres rotates by speed / radius.
    radius = length(lever).unsqueeze(1).clamp_min(speed)
    ahead = tangent / radius - (0.5 * speed / radius) * (lever / radius)
    return pull(tool, until, at, ahead / length(ahead).unsqueeze(1), grip, speed, rotation)


def insert(
    tool: Tool,
    tip: Tensor,
    hole: Tensor,
    until: Tensor,
    along: Direction = DOWN,
    clearance: float = 0.03,
    tolerance: float = 0.0025,
    speed: float = 0.03,
    rotation: Tensor | None = None,
) -> Stage:
    """Move the ``tip`` ``[n, 3]`` of a held object in front of a ``hole`` ``[n, 3]``, and insert it along a direction.

    The tolerance is a funnel: alignment must improve towards the hole, to ``tolerance`` at its rim.
    """
    ahead, aside, direction = _split(hole - tip, along)
    off, inside = length(aside), ahead < -0.003
    aligned = (off < tolerance) | (inside & (off < 4.0 * tolerance))
    height = (6.0 * (off - tolerance)).clamp(0.0, clearance).unsqueeze(1)
    away = (ahead > 1.5 * clearance) & ~aligned
    over = tool.pos + aside + (ahead - clearance).unsqueeze(1) * direction
    funnel = tool.pos + 0.5 * (aside + ahead.unsqueeze(1) * direction - height * direction)
    further = tool.pos + 0.5 * aside + 0.2 * speed * direction
    return sequence(
        tool.stage(~away, over, CLOSED, speed, rotation),
        tool.stage(aligned, funnel, CLOSED, 0.3 * speed, rotation, "insert"),
        tool.stage(until, further, CLOSED, 0.3 * speed, rotation, "insert"),
    )


def hand_over(
    giver: Tool,
    taker: Tool,
    grips: tuple[Tensor, Tensor],
    meet: Tensor,
    held: tuple[Tensor, Tensor],
    along: tuple[Direction, Direction],
    speed: float = 0.03,
    clearance: float = _CLEARANCE,
) -> tuple[Stage, Stage]:
    """Return the stages of the two arms that pass an object from one to the other.

    The giver grasps ``grips[0]`` ``[n, 3]`` along ``along[0]`` and brings the point ``grips[1]`` to ``meet``, where the
    taker grasps it along ``along[1]``. Once both hold it (``held``, two bools ``[n]``), the giver releases it and
    leaves. Complete where only the taker holds the object and the giver is away from it.
    """
    given, taken = held
    at, there = grips
    arrived = (length(meet - there) < 0.02) | taken
    away = length(giver.pos - at) > 0.7 * clearance
    back = giver.pos - clearance * _direction(along[0], giver.pos)
    giving = sequence(
        grasp(giver, at, along[0], given | taken, clearance, speed=speed),
        # Half of the distance: an object held at one end swings.
        giver.stage(arrived, giver.pos + 0.5 * (meet - there), CLOSED, speed),
        giver.stage(taken, giver.pos, CLOSED, speed, segment="hand_over"),
        giver.stage(~given, giver.pos, OPEN, speed, segment="hand_over"),
        giver.stage(away, back, OPEN, speed, segment="leave"),
    )
    wait = meet - clearance * _direction(along[1], taker.pos)
    taking = sequence(
        taker.stage(arrived, wait, OPEN, speed),
        grasp(taker, there, along[1], taken, clearance, speed=0.5 * speed),
        taker.stage(taken & ~given & away, taker.pos, CLOSED, speed),
    )
    return giving, taking


def _direction(along: Direction, like: Tensor) -> Tensor:
    """Return a direction as ``[1, 3]`` or ``[n, 3]``; numbers become a tensor without a copy from the host."""
    if isinstance(along, Tensor):
        return along if along.dim() == 2 else along.unsqueeze(0)
    return torch.cat([torch.full_like(like[:, :1], value) for value in along], dim=1)


def _split(way: Tensor, along: Direction) -> tuple[Tensor, Tensor, Tensor]:
    """Split a vector ``[n, 3]`` into its length along a direction ``[n]`` and the rest; also return the direction."""
    direction = _direction(along, way)
    ahead = dot(way, direction)
    return ahead, way - ahead.unsqueeze(1) * direction, direction


def _like(mask: Tensor, value: Tensor) -> Tensor:
    """Return a mask ``[n]`` reshaped to broadcast with ``value`` ``[n, ...]``."""
    return mask.view(-1, *[1] * (value.dim() - 1))
