"""Motion primitives: what they do to a point that follows them, and experts of real tasks made of them."""

import math

import pytest
import torch

from embodichain.envs.primitives import (
    CLOSED,
    DOWN,
    OPEN,
    Stage,
    Tool,
    ToolArm,
    either,
    grasp,
    hand_over,
    insert,
    move,
    place,
    pull,
    pull_arc,
    push,
    sequence,
    unless,
)
from embodichain.envs.registration import make
from tests.envs.test_tasks import success_rate

EYE = torch.eye(3)[None]


def tool_at(pos: torch.Tensor) -> Tool:
    """A tool that moves exactly as commanded: the primitives need no arm to decide that."""
    return Tool(None, pos, pos, EYE.expand(pos.shape[0], 3, 3), EYE)  # type: ignore[arg-type]


def follow(pos: torch.Tensor, stage: Stage) -> torch.Tensor:
    """Where such a tool is one step later."""
    return pos + 0.5 * tool_at(pos).twist(stage)[:, :3]


def points(count: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, 3, generator=torch.Generator().manual_seed(seed)) * 0.4 + torch.tensor([0.3, -0.2, 0.1])


def yes(count: int) -> torch.Tensor:
    return torch.ones(count, dtype=torch.bool)


def test_the_first_stage_that_is_not_done_acts_row_by_row():
    tool = tool_at(torch.zeros(4, 3))
    at = [torch.full((4, 3), float(i)) for i in range(3)]
    done = torch.tensor([[0, 0, 0], [1, 0, 1], [1, 1, 0], [1, 1, 1]], dtype=torch.bool)
    chosen = sequence(*(tool.stage(done[:, i], at[i], grip=i - 1.0, speed=0.1 * (i + 1)) for i in range(3)))
    assert chosen.pos[:, 0].tolist() == [0.0, 1.0, 2.0, 2.0]
    assert chosen.grip[:, 0].tolist() == [-1.0, 0.0, 1.0, 1.0]
    assert chosen.until.tolist() == [False, False, False, True]
    torch.testing.assert_close(chosen.speed[:, 0], torch.tensor([0.1, 0.2, 0.3, 0.3]))
    first, last = tool.stage(done[:, 0], at[0]), tool.stage(done[:, 1], at[2])
    assert either(done[:, 2], first, last).pos[:, 0].tolist() == [2.0, 0.0, 2.0, 0.0]
    assert unless(done[:, 1], first).until.tolist() == [False, True, True, True]


def test_a_move_is_no_faster_than_asked_and_arrives():
    pos, goal = points(50), points(50, 1)
    for _ in range(60):
        before, pos = pos, follow(pos, move(tool_at(pos), goal, speed=0.02))
        assert float((pos - before).norm(dim=1).max()) <= 0.02 + 1e-6
    assert bool(move(tool_at(pos), goal).until.all())
    torch.testing.assert_close(pos, goal, atol=1e-5, rtol=0)


def test_a_rotation_is_turned_to():
    tool = tool_at(points(1))
    angle = torch.tensor(0.1)
    turned = torch.tensor([[math.cos(0.1), -math.sin(0.1), 0.0], [math.sin(0.1), math.cos(0.1), 0.0], [0, 0, 1]])
    twist = tool.twist(tool.stage(yes(1), tool.pos, rotation=turned))
    torch.testing.assert_close(twist[0], torch.tensor([0, 0, 0, 0, 0, float(torch.sin(angle))]))


@pytest.mark.parametrize("along", [DOWN, (1.0, 0.0, 0.0), torch.tensor([0.6, 0.0, -0.8])])
def test_a_grasp_comes_along_its_direction_with_open_fingers(along):
    count = 60
    pos, at, direction = points(count), points(count, 1), torch.as_tensor(along)
    held = torch.zeros(count, dtype=torch.bool)
    for _ in range(120):
        stage = grasp(tool_at(pos), at, along, held)
        assert torch.equal(stage.until, held)
        way = at - pos
        ahead = (way * direction).sum(1)
        aside = (way - ahead[:, None] * direction).norm(dim=1)
        # Near the object, the tool is on the line: it does not sweep sideways into it.
        after = follow(pos, stage)
        sideways = (after - pos - ((after - pos) * direction).sum(1, keepdim=True) * direction).norm(dim=1)
        near = (ahead.abs() < 0.04) & (aside > 0.013) & ~held
        assert float(sideways[near].max() if near.any() else 0.0) < 1e-5
        assert bool(((stage.grip[:, 0] == OPEN) | (way.norm(dim=1) < 0.012) | held).all())
        held = held | ((stage.grip[:, 0] == CLOSED) & (way.norm(dim=1) < 0.012))
        pos = after
    assert bool(held.all())


def test_a_place_sets_down_opens_and_leaves():
    count = 40
    pos, goal = points(count), points(count, 1) * torch.tensor([1.0, 1.0, 0.0]) + torch.tensor([0.0, 0.0, 0.025])
    hand = torch.tensor([0.0, 0.0, -0.01])
    what, opened = pos + hand, torch.zeros(count, dtype=torch.bool)
    for _ in range(150):
        stage = place(tool_at(pos), what, goal, opened)
        lowered = (what[:, 2] < 0.08) & ~opened  # it comes down on its place, not beside it
        assert bool(((what - goal)[:, :2].norm(dim=1)[lowered] < 0.012).all())
        opened = opened | (stage.grip[:, 0] == OPEN)
        pos = follow(pos, stage)
        what = torch.where(opened[:, None], what, pos + hand)
    final = place(tool_at(pos), what, goal, opened)
    assert bool(final.until.all())
    assert float((what - goal).norm(dim=1).max()) < 0.01
    assert float((pos - what)[:, 2].min()) > 0.06


def test_an_arc_is_followed_about_its_pivot():
    count, radius = 20, 0.25
    pivot = points(count)
    pos = pivot + torch.tensor([0.0, -radius, 0.1])
    angle = torch.zeros(count)
    for _ in range(200):
        stage = pull_arc(tool_at(pos), angle > 1.2, pos, pivot, DOWN, speed=0.02)
        pos = torch.where(stage.until[:, None], pos, follow(pos, stage))
        lever = pos - pivot
        angle = torch.atan2(-lever[:, 0], -lever[:, 1])
        pos = pivot + torch.cat((lever[:, :2] * (radius / lever[:, :2].norm(dim=1, keepdim=True)), lever[:, 2:]), 1)
    assert bool((angle > 1.2).all())
    assert float(angle.max()) < 1.4
    torch.testing.assert_close(pos[:, 2], pivot[:, 2] + 0.1)


def test_a_pull_goes_straight_until_it_is_told():
    pos = points(5)
    stage = pull(tool_at(pos), pos[:, 0] < 0.4, pos, (-1.0, 0.0, 0.0), speed=0.01)
    moved = follow(pos, stage) - pos
    torch.testing.assert_close(moved, torch.tensor([[-0.01, 0.0, 0.0]]).expand(5, 3))
    assert stage.until.tolist() == (pos[:, 0] < 0.4).tolist()


def test_a_peg_enters_its_hole_aligned_and_is_pulled_out_where_it_is_not():
    count = 60
    pos, hole = points(count), points(count, 1) * torch.tensor([1.0, 1.0, 0.0]) + torch.tensor([0.0, 0.0, 0.06])
    down = torch.tensor([0.0, 0.0, -0.08])
    for _ in range(200):
        tip = pos + down
        inside = tip[:, 2] < 0.02
        stage = insert(tool_at(pos), tip, hole, inside)
        aside = (tip - hole)[:, :2].norm(dim=1)
        after = follow(pos, stage)
        enters = ((after + down)[:, 2] < hole[:, 2]) & (tip[:, 2] > hole[:, 2])
        assert float(aside[enters].max() if enters.any() else 0.0) < 0.003
        pos = after
    assert bool((pos + down)[:, 2].le(0.021).all())
    off = hole + torch.tensor([0.02, 0.0, -0.01]) - down  # half a centimetre in, beside the axis
    assert float(insert(tool_at(off), off + down, hole, ~yes(count)).pos[:, 2].min()) > float(off[:, 2].max())


def test_one_arm_hands_over_to_the_other():
    """The object follows whoever holds it; it is never let go by both."""
    count = 20
    left, right = points(count) + torch.tensor([0.0, 0.3, 0.0]), points(count, 1) - torch.tensor([0.0, 0.3, 0.0])
    bar = points(count, 2) + torch.tensor([0.0, 0.2, 0.0])
    ends = torch.tensor([[0.0, 0.06, 0.0], [0.0, -0.06, 0.0]])
    meet = torch.tensor([[0.45, 0.0, 0.35]]).expand(count, 3)
    along = (DOWN, (0.0, 1.0, 0.0))
    given = taken = torch.zeros(count, dtype=torch.bool)
    for _ in range(250):
        giver, taker = tool_at(left), tool_at(right)
        give, take = hand_over(giver, taker, (bar + ends[0], bar + ends[1]), meet, (given, taken), along)
        was_held = given | taken
        near = ((bar + ends[0] - left).norm(dim=1) < 0.012, (bar + ends[1] - right).norm(dim=1) < 0.012)
        given = (give.grip[:, 0] == CLOSED) & (given | near[0])
        taken = (take.grip[:, 0] == CLOSED) & (taken | near[1])
        assert bool(((given | taken) | ~was_held).all())
        moved = follow(left, give)
        bar = torch.where((given & ~taken)[:, None], bar + moved - left, bar)
        left = torch.where((given & taken)[:, None], left, moved)
        right = torch.where(taken[:, None], right, follow(right, take))
    assert bool(taken.all())
    assert not bool(given.any())
    assert bool(give.until.all())
    assert bool(take.until.all())


def picks(task, scene, actions):
    """PickCube's expert in three lines."""
    tool, held = ToolArm(task.robot).at(scene["qpos"]), scene["held"] > 0
    take = grasp(tool, scene["cube_pos"], DOWN, held, rotation=None)
    return tool.act(actions, sequence(take, move(tool, tool.pos + scene["to_goal"])))


def pushes(task, scene, actions):
    """PushCube's."""
    tool = ToolArm(task.robot).at(scene["qpos"])
    goal = scene["cube_pos"][:, :2] + scene["to_goal"]
    return tool.act(actions, push(tool, scene["cube_pos"], goal, reach=0.05, low=0.03, high=0.1, tolerance=0.035))


@pytest.mark.parametrize(
    ("task", "expert", "yaw"), [("PickCubeRL", picks, [-0.1, 0.1]), ("PushCubeRL", pushes, [-0.6, 0.6])]
)
def test_experts_of_real_tasks_are_made_of_primitives(task, expert, yaw):
    events = {"randomize_object_pose": {"yaw": yaw}}
    with make(task, num_envs=40, seed=3, env={"events": events}) as env:
        env.task.expert_action = lambda scene, actions: expert(env.task, scene, actions)
        assert success_rate(env) >= 0.95


def test_a_row_does_not_depend_on_the_others():
    pos, at = points(33), points(33, 1)
    held = torch.arange(33) % 3 == 0

    def decide(rows: slice) -> torch.Tensor:
        tool = tool_at(pos[rows])
        return tool.twist(sequence(grasp(tool, at[rows], DOWN, held[rows]), move(tool, at[rows] + 0.1)))

    together = decide(slice(None))
    for i in (0, 7, 31, 32):
        assert torch.equal(decide(slice(i, i + 1))[0], together[i])
