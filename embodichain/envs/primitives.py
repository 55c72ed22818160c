"""Motion primitives of which scripted experts are made: move, grasp, place, push, press, pull, insert, hand over.

A primitive is a :class:`Stage`: where the tool should be, how it holds its fingers, and when that is done. It is a
function of what is measured now and remembers nothing, so an expert answers in any state that a policy may reach.
:func:`sequence` puts stages one after the other, and the result is a stage again::

    def expert_action(self, scene, actions):
        tool = self.tool.at(scene["qpos"])
        carry = move(tool, scene["goal"], speed=0.03)
        return tool.act(actions, sequence(grasp(tool, scene["cube_pos"], DOWN, scene["held"] > 0), carry))

Every stage is part of a segment of the task (``reach``, ``grasp``, ``move``, ``place`` and others of ``SEGMENTS``),
which streams can store and samplers weigh; :func:`part` says which.

All is batched torch without branches on values: rows do not depend on each other, and CUDA graphs can record it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from embodichain.envs.actions import RobotActionManager, chain_of
from embodichain.envs.kinematics import SerialChain, dot, length, rotation_error
from embodichain.envs.robots import Robot
from embodichain.envs.vec_env import SEGMENTS
from embodichain.errors import ConfigError, nearest

Direction: TypeAlias = Sequence[float] | Tensor
"""A unit vector in the world, ``(x, y, z)`` for all envs or ``[n, 3]``."""

OPEN, CLOSED = 1.0, -1.0
UP, DOWN, FORWARD, BACKWARD = (0.0, 0.0, 1.0), (0.0, 0.0, -1.0), (1.0, 0.0, 0.0), (-1.0, 0.0, 0.0)
_GAIN = 2.0  # the servos reach part of a displacement in one step, so the expert asks for more
_MAX_TURN = 0.15  # rotation that is asked for in one step, in radians
_CLEARANCE = 0.1  # distance from which a tool comes to what it takes hold of


class Stage(NamedTuple):
    """Where the tool should go until a condition holds."""

    until: Tensor
    """Where this is done, bool ``[n]``."""
    pos: Tensor
    """Where the tool should be, ``[n, 3]``."""
    rotation: Tensor
    """How it should be turned, ``[n, 3, 3]``."""
    grip: Tensor
    """Its fingers, ``[n, 1]``: 1 open, -1 closed."""
    speed: Tensor
    """Metres that are asked for in one step at most, ``[n, 1]``."""
    segment: Tensor
    """What it is part of, numbers of ``SEGMENTS``, int64 ``[n]``."""


@dataclass(frozen=True)
class Tool:
    """The tool of an arm as it is measured now."""

    chain: SerialChain
    qpos: Tensor
    """Joint positions of the robot, ``[n, dofs]``."""
    pos: Tensor
    """Position of the tool, ``[n, 3]``."""
    rotation: Tensor
    """Its rotation matrix, ``[n, 3, 3]``."""
    home: Tensor
    """How the tool is turned where episodes begin, ``[1, 3, 3]``: so it is kept unless a stage says otherwise."""
    arm: str | None = None
    """Which of several arms carries it."""

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
        column = torch.ones_like(self.pos[:, :1])
        fingers = grip.to(column.dtype).unsqueeze(1) if isinstance(grip, Tensor) else grip * column
        turned = self.home if rotation is None else rotation
        number = torch.full_like(until, _number(segment), dtype=torch.int64)
        return Stage(until, pos, turned.expand_as(self.rotation), fingers, speed * column, number)

    def act(self, actions: RobotActionManager, stage: Stage) -> Tensor:
        """Return the action that carries out a stage, ``[n, action_dim]``; of several arms, this one's part of it.

        It is marked by the stage's segment; of several arms, by that of the first.
        """
        actions.segment = stage.segment if actions.segment is None else actions.segment
        return actions.encode(self.qpos, self.twist(stage), stage.grip, self.arm)

    def twist(self, stage: Stage) -> Tensor:
        """Return how a stage moves and turns the tool in one step, ``[n, 6]``."""
        way = stage.pos - self.pos
        by = way * (stage.speed / length(way).unsqueeze(1).clamp_min(1e-9)).clamp_max(1.0)
        turn = rotation_error(stage.rotation, self.rotation).clamp(-_MAX_TURN, _MAX_TURN)
        return torch.cat((_GAIN * by, turn), dim=1)


class ToolArm:
    """The arm that carries a tool, which ``arm`` names if there are several; :meth:`at` measures it."""

    def __init__(self, robot: Robot, wanted_by: str = "an expert", arm: str | None = None) -> None:
        self._chain, self._name = chain_of(robot if arm is None else robot.arms[arm], wanted_by), arm
        own = next(iter(robot.arms.values())) if arm is None else robot.arms[arm]
        first = own.columns.start
        self._joints = slice(first, first + own.num_joints)
        self._home = self._chain.pose(own.init_qpos[: own.num_joints].to(torch.float32).unsqueeze(0))[1]

    def position(self, qpos: Tensor) -> Tensor:
        """Return where the tool is, ``[n, 3]``, at joint positions of the robot ``[n, dofs]``."""
        return self._chain.position(qpos[:, self._joints])

    def at(self, qpos: Tensor) -> Tool:
        """Return the tool at joint positions of the robot ``[n, dofs]``."""
        pos, rotation = self._chain.pose(qpos[:, self._joints])
        return Tool(self._chain, qpos, pos, rotation, self._home, self._name)


def sequence(*stages: Stage) -> Stage:
    """Return the stage that acts in each env: the first that is not done, or the last where all are."""
    chosen = stages[-1]
    done = chosen.until
    for stage in reversed(stages[:-1]):
        chosen = either(stage.until, chosen, stage)
        done = done & stage.until
    return chosen._replace(until=done)


def either(condition: Tensor, one: Stage, other: Stage) -> Stage:
    """Return ``one`` where ``condition`` ``[n]`` holds, and ``other`` elsewhere."""
    parts = (torch.where(_like(condition, a), a, b) for a, b in zip(one, other, strict=True))
    return Stage(*parts)


def part(segment: str, stage: Stage) -> Stage:
    """Return a stage that is part of a segment, one of ``SEGMENTS``."""
    return stage._replace(segment=torch.full_like(stage.segment, _number(segment)))


def _number(segment: str) -> int:
    if segment not in SEGMENTS:
        raise ConfigError(f"segment: unknown name {segment!r}.{nearest(segment, SEGMENTS)}")
    return SEGMENTS.index(segment)


def unless(condition: Tensor, stage: Stage) -> Stage:
    """Return a stage that also counts as done where ``condition`` ``[n]`` holds, such as a grasp of what is placed."""
    return stage._replace(until=stage.until | condition)


def move(
    tool: Tool,
    to: Tensor,
    tolerance: float = 0.01,
    grip: float | Tensor = CLOSED,
    speed: float = 0.03,
    rotation: Tensor | None = None,
) -> Stage:
    """Bring the tool to a point ``[n, 3]``."""
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
    """Come to a point ``[n, 3]`` along a direction with open fingers, and close them; done where ``held`` ``[n]``."""
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
    """Carry ``what`` is held, now at ``[n, 3]``, over ``to``, set it down along a direction, open and leave.

    ``released`` ``[n]`` tells where the fingers are open. Done where it lies at ``to`` and the tool has left it.
    """
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
    """Slide ``what`` ``[n, 2 or 3]`` over a table to a point: pass over it, come down behind it, push, steer, rise.

    ``reach`` is the distance of the two centres at which they touch. ``low`` and ``high`` are heights of the tool for
    pushing and for passing over it. Done where it lies within ``tolerance`` of the point.
    """
    way = to[:, :2] - what[:, :2]
    direction = way / length(way).unsqueeze(1).clamp_min(1e-6)
    done = length(way) < tolerance
    tip, height = tool.pos[:, :2], tool.pos[:, 2]
    from_it = tip - what[:, :2]
    along = dot(from_it, direction)
    aside = from_it - along.unsqueeze(1) * direction
    behind = what[:, :2] - reach * direction
    # Behind it and on the line to the goal: push. The cone widens with the distance behind.
    ready = (along < -0.6 * reach) & (length(aside) < 0.012 + 0.3 * (-along - reach).clamp_min(0.0))
    clear = length(from_it) > 1.6 * reach  # far enough to the side to move and sink freely
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
    """Come before a point ``[n, 3]`` with closed fingers and push against it in a direction: a button, a drawer."""
    ahead, aside, direction = _split(at - tool.pos, along)
    aligned = (length(aside) < tolerance) & (ahead > -2.0 * tolerance)
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
    """Pull (or push) what is taken hold of ``at`` a point ``[n, 3]`` in a direction, until a condition ``[n]`` holds.

    The tool goes on and on, whether or not the point follows, and stays on the line through it.
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
    """Pull what is taken hold of ``at`` a point ``[n, 3]`` round a pivot ``[n, 3]``, such as a door about its hinges.

    It turns counterclockwise about the axis; the other way round about the opposite one.
    """
    _, lever, direction = _split(at - pivot, axis)
    tangent = torch.linalg.cross(direction.expand_as(lever), lever, dim=1)
    # A chord leaves the arc by half of its angle: a step of ``speed`` metres turns by speed / radius.
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
    """Bring the ``tip`` ``[n, 3]`` of what is held before a ``hole`` ``[n, 3]``, and push it in along a direction.

    It comes down a funnel: the nearer to the hole, the better it has to be aligned, to ``tolerance`` at its rim.
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
    """Pass an object from one arm to another: return what each of the two does.

    The giver takes hold of ``grips[0]`` ``[n, 3]`` along ``along[0]`` and brings the point ``grips[1]`` to ``meet``,
    where the taker takes hold of it along ``along[1]``. Once both hold it (``held``, two bools ``[n]``), the giver
    opens its fingers and leaves. Done where the taker alone holds the object and the giver is away from it.
    """
    given, taken = held
    at, there = grips
    arrived = (length(meet - there) < 0.02) | taken
    away = length(giver.pos - at) > 0.7 * clearance
    back = giver.pos - clearance * _direction(along[0], giver.pos)
    giving = sequence(
        grasp(giver, at, along[0], given | taken, clearance, speed=speed),
        # Half of the way: what is held by one end swings, and would be swung the more.
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
    """Split a way ``[n, 3]`` into how far it goes along a direction ``[n]`` and the rest; return the direction too."""
    direction = _direction(along, way)
    ahead = dot(way, direction)
    return ahead, way - ahead.unsqueeze(1) * direction, direction


def _like(mask: Tensor, value: Tensor) -> Tensor:
    """Return a mask ``[n]`` in a shape that broadcasts with ``value`` ``[n, ...]``."""
    return mask.view(-1, *[1] * (value.dim() - 1))
