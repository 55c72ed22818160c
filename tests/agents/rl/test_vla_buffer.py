"""The queue between collectors and a learner: nothing lost, nothing twice, whoever adds or takes."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from tensordict import TensorDict

from embodichain.agents.rl.buffer import VLABuffer, vla_buffer
from embodichain.errors import BufferWaitError, RolloutError
from tests.programs import run_program, wait_until

ROLLOUTS = 10_000


pytestmark = pytest.mark.usefixtures("one_thread")


def rollout(stamp: int, num_envs: int = 2, num_steps: int = 3) -> TensorDict:
    """Return a rollout whose every number is its stamp."""
    shape = [num_envs, num_steps]
    observation = TensorDict({"x": torch.full([*shape, 2], stamp, dtype=torch.int64)}, shape)
    return TensorDict({"observation": observation, "reward": torch.full(shape, float(stamp))}, shape)


def transition(stamp: int, *batch: int) -> TensorDict:
    return TensorDict({"reward": torch.full(batch, float(stamp))}, list(batch))


def stamp_of(entry) -> int:
    """Return the stamp, once sure that all of the entry carries it."""
    stamps = entry["observation", "x"].unique().tolist() + entry["reward"].unique().long().tolist()
    assert len(set(stamps)) == 1, stamps
    return stamps[0]


# --- what it returns ----------------------------------------------------------------------------------------------


def test_rollouts_come_out_whole_in_order_and_once():
    buffer = VLABuffer(buffer_size=18, device="cpu")
    for stamp in range(3):
        assert not buffer.is_full()
        buffer.add_rollout(rollout(stamp))
    assert buffer.is_full()
    assert len(buffer) == 18
    assert [stamp_of(buffer.get(flatten=False)) for _ in range(3)] == [0, 1, 2]
    assert len(buffer) == 0
    with pytest.raises(BufferWaitError, match="empty"):
        buffer.get()


def test_flattened_everything_comes_out_as_rows():
    buffer = VLABuffer(12)
    buffer.add(rollout(5))
    buffer.add_rollout(rollout(6))
    rows = buffer.get(flatten=True)
    assert rows.batch_size == (12,)
    assert rows["reward"].tolist() == [5.0] * 6 + [6.0] * 6
    assert len(buffer) == 0


@pytest.mark.parametrize(("batch", "shape"), [((), (1, 4)), ((3,), (3, 4))])
def test_transitions_are_stacked_along_time(batch, shape):
    buffer = VLABuffer(buffer_size=4 * max(1, *batch, 1))
    for stamp in range(4):
        buffer.add(transition(stamp, *batch))
    assert buffer.is_full()
    data = buffer.get(flatten=False)
    assert data.batch_size == shape
    assert data["reward"][0].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert len(buffer) == 0


def test_a_buffer_that_size_does_not_divide_is_full_without_room_for_another():
    buffer = VLABuffer(buffer_size=10)
    buffer.add_rollout(rollout(0))
    assert buffer.is_full()
    assert len(buffer) == 6


def test_what_was_added_can_be_written_to_afterwards():
    buffer, given = VLABuffer(6), rollout(1)
    buffer.add_rollout(given)
    given["reward"].zero_()
    assert stamp_of(buffer.get()) == 1


def test_overwriting_pushes_the_oldest_out_when_asked():
    buffer = VLABuffer(12, overwrite=True)
    for stamp in range(5):
        buffer.add_rollout(rollout(stamp))
    assert [stamp_of(buffer.get()), stamp_of(buffer.get())] == [3, 4]
    stats = buffer.get_stats()
    assert (stats["added"], stats["taken"], stats["dropped"]) == (30, 12, 18)


def test_clear_and_stats():
    buffer = VLABuffer(12)
    buffer.add_rollout(rollout(0))
    assert buffer.get_stats()["size"] == 6
    assert buffer.get_stats()["entries"] == 1
    buffer.clear()
    assert len(buffer) == 0
    assert not buffer.is_full()
    assert buffer.get_stats()["dropped"] == 6


def test_state_goes_to_another_buffer_and_numbers_go_on():
    buffer, other = VLABuffer(18), VLABuffer(18)
    for stamp in range(3):
        buffer.add_rollout(rollout(stamp))
    buffer.get()
    other.load_state_dict(buffer.state_dict())
    assert [number for number, _ in other.take(everything=True)] == [1, 2]
    assert other.add_rollout(rollout(9)) == 3
    assert len(buffer) == 12  # saving takes nothing away


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda: VLABuffer(0), "at least 1"),
        (lambda: VLABuffer(5).add_rollout(rollout(0)), "6 transitions does not fit into a buffer of 5"),
        (lambda: VLABuffer(9).add_rollout(transition(0, 3)), r"expected a rollout \[num_envs, num_steps\], got \[3\]"),
    ],
)
def test_bad_input_is_refused(action, message):
    with pytest.raises(RolloutError, match=message):
        action()


def test_rollouts_and_transitions_do_not_mix():
    buffer = VLABuffer(12)
    buffer.add_rollout(rollout(0))
    with pytest.raises(RolloutError, match="do not mix"):
        buffer.add(transition(0, 2))
    buffer.clear()
    buffer.add(transition(0, 2))


# --- waiting ------------------------------------------------------------------------------------------------------


def test_adding_waits_for_room_and_goes_on_when_there_is_some():
    buffer = VLABuffer(6)
    buffer.add_rollout(rollout(0))
    with pytest.raises(BufferWaitError, match="no room"):
        buffer.add_rollout(rollout(1), timeout=0.02)
    adder = threading.Thread(target=buffer.add_rollout, args=(rollout(1),))
    adder.start()
    wait_until(lambda: buffer._changed._waiters)  # it waits for room
    time.sleep(0.05)
    assert adder.is_alive()
    assert stamp_of(buffer.get()) == 0
    adder.join(60.0)
    assert not adder.is_alive()
    assert stamp_of(buffer.get()) == 1
    assert buffer.get_stats()["add_wait_seconds"] >= 0.04


def test_getting_waits_for_something_to_come():
    buffer = VLABuffer(6)
    timer = threading.Timer(0.05, buffer.add_rollout, [rollout(7)])
    timer.start()
    assert stamp_of(buffer.get(timeout=100.0)) == 7


def test_single_transitions_push_the_oldest_out_of_a_full_buffer():
    """The guide prints it: [T0, T1, T2, T3], then T4 in the place of T0."""
    buffer = VLABuffer(buffer_size=4, device="cpu")
    for stamp in range(5):
        buffer.add(transition(stamp))
        assert len(buffer) == min(stamp + 1, 4)
    assert buffer.is_full()
    assert buffer.get(flatten=True)["reward"].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert buffer.get_stats()["dropped"] == 1


ALONE = """
import torch
from tensordict import TensorDict
from embodichain.agents.rl.buffer import VLABuffer
from embodichain.errors import BufferWaitError

rollout, transition = (TensorDict({"reward": torch.zeros(shape)}, shape) for shape in ([2, 3], [2]))
for overwrite, entry in ((None, rollout), (False, rollout), (False, transition)):
    for takes in (False, True):
        buffer = VLABuffer(entry.numel(), overwrite=overwrite)
        buffer.add(entry)
        if takes:
            buffer.get()
            buffer.add(entry)
        try:
            buffer.add(entry)
        except BufferWaitError as error:
            print(error)
try:
    VLABuffer(4).get(timeout=None)
except BufferWaitError as error:
    print(error)
"""


def test_whoever_would_wait_for_itself_gets_an_error():
    """One thread adds and takes, so nobody makes room while it waits."""
    done = run_program("-c", ALONE)
    assert done.returncode == 0, done.stderr
    *lines, empty = done.stdout.splitlines()
    assert len(lines) == 6
    assert "empty, and no other thread could add" in empty
    for line in lines:
        assert "would wait for itself" in line
        assert "overwrite=True" in line


def test_a_thread_that_takes_later_is_waited_for():
    buffer = VLABuffer(6)
    buffer.add_rollout(rollout(0))
    taker = threading.Timer(0.3, buffer.get)
    taker.start()
    assert buffer.add_rollout(rollout(1)) == 1
    assert stamp_of(buffer.get()) == 1
    taker.join()


def test_threads_that_never_take_are_not_waited_for_without_end(monkeypatch):
    monkeypatch.setattr(vla_buffer, "PATIENCE_SECONDS", 0.2)
    buffer, end = VLABuffer(6), threading.Event()
    other = threading.Thread(target=end.wait)
    other.start()
    try:
        buffer.add_rollout(rollout(0))
        with pytest.raises(BufferWaitError, match=r"would wait for itself.*overwrite=True"):
            buffer.add_rollout(rollout(1))
    finally:
        end.set()
        other.join()


# --- many at once -------------------------------------------------------------------------------------------------


def add_stamps(buffer: VLABuffer, first: int, count: int) -> None:
    torch.set_num_threads(1)
    for stamp in range(first, first + count):
        buffer.add_rollout(rollout(stamp))


def collect_stamps(buffer: VLABuffer, count: int) -> list[int]:
    return [stamp_of(buffer.get(timeout=60.0)) for _ in range(count)]


def test_ten_thousand_rollouts_from_threads_arrive_once_each():
    buffer, taken = VLABuffer(600), [[], []]
    share = ROLLOUTS // 4
    adders = [threading.Thread(target=add_stamps, args=(buffer, i * share, share)) for i in range(4)]
    takers = [
        threading.Thread(target=lambda out: out.extend(collect_stamps(buffer, ROLLOUTS // 2)), args=(out,))
        for out in taken
    ]
    for thread in adders + takers:
        thread.start()
    for thread in adders + takers:
        thread.join()
    assert sorted(taken[0] + taken[1]) == list(range(ROLLOUTS))
    for own in taken:  # whoever takes sees every producer's rollouts in order
        for producer in range(4):
            mine = [stamp for stamp in own if stamp // share == producer]
            assert mine == sorted(mine)
    assert buffer.get_stats()["taken"] == 6 * ROLLOUTS
    assert len(buffer) == 0
