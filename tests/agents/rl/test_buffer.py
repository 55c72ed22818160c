"""The rollout buffer: order, layout, next values, single use, minibatches, errors."""

from __future__ import annotations

import functools
import operator

import pytest
import torch
from tensordict import TensorDict

from embodichain.agents.rl.buffer import ROLLOUT_KEYS, Minibatches, RolloutBuffer, check_rollout, flatten_time_major
from embodichain.errors import RolloutError

N, T = 3, 4


def step(t: int, **more: torch.Tensor) -> dict:
    """The parts of step ``t``; every number is ``10 * env + t``."""
    x = 10.0 * torch.arange(N) + t
    parts = {"obs": torch.stack([x, -x], -1), "action": x.unsqueeze(-1), "reward": x, "value": x + 0.5}
    return parts | {"done": torch.zeros(N, dtype=torch.bool), "logprob": -x} | more


def filled(buffer: RolloutBuffer | None = None) -> RolloutBuffer:
    buffer = buffer or RolloutBuffer(T, N, obs_dim=2, action_dim=1, device="cpu")
    for t in range(T):
        buffer.add(**step(t))
    return buffer


def test_documented_use() -> None:
    buffer = RolloutBuffer(4, 3, 2, 1, torch.device("cpu"))
    for t in range(4):
        s = step(t)
        buffer.add(s["obs"], s["action"], s["reward"], s["done"], s["value"], s["logprob"])
    buffer.finalize(torch.full((3,), 99.0), estimator=lambda r: (r["reward"], r["value"]))
    buffer.set_extras({"weight": torch.ones(4, 3)})
    assert buffer.advantages.shape == buffer.returns.shape == (4, 3)
    rows = torch.cat([batch["reward"] for batch in buffer.iterate_minibatches(5)])
    assert rows.sort().values.tolist() == sorted(10.0 * n + t for n in range(3) for t in range(4))


def test_rollout_is_envs_by_steps_and_time_major_underneath() -> None:
    buffer = filled()
    buffer.finalize()
    rollout = buffer.get()
    assert rollout.batch_size == (N, T)
    assert set(rollout.keys()) == set(ROLLOUT_KEYS)
    assert rollout["reward"].tolist() == [[10.0 * n + t for t in range(T)] for n in range(N)]
    assert rollout["reward"].t().is_contiguous()
    assert rollout["observation"][2, 1].tolist() == [21.0, -21.0]
    flat = flatten_time_major(rollout)
    assert flat["reward"].data_ptr() == buffer.storage["reward"].data_ptr()  # flattening copies nothing
    assert flat["reward"][:4].tolist() == [0.0, 10.0, 20.0, 1.0]
    assert buffer.get(flatten=True)["reward"][:5].tolist() == [0.0, 1.0, 2.0, 3.0, 10.0]


def test_nested_observations_and_images_are_stored_as_they_are() -> None:
    image = torch.randint(0, 256, (N, 4, 5, 3), dtype=torch.uint8)
    obs = TensorDict({"robot": TensorDict({"q": torch.randn(N, 2)}, [N]), "image": TensorDict({"c": image}, [N])}, [N])
    buffer = RolloutBuffer(2, N)
    for t in range(2):
        buffer.add(**step(t, obs=obs, action=torch.full((N,), t)))
    buffer.finalize()
    rollout = buffer.get()
    assert rollout["observation", "image", "c"].dtype == torch.uint8
    assert torch.equal(rollout["observation", "image", "c"][:, 1], image)
    assert torch.equal(rollout["observation", "robot", "q"][:, 0], obs["robot", "q"])
    assert rollout["action"].tolist() == [[0, 1]] * N


def test_a_flat_buffer_flattens_nested_observations() -> None:
    obs = TensorDict({"b": torch.ones(N, 1), "a": torch.zeros(N, 1)}, [N])
    buffer = RolloutBuffer(1, N, obs_dim=2, action_dim=1)
    buffer.add(**step(0, obs=obs))
    buffer.finalize()
    assert buffer.get()["observation"].tolist() == [[[0.0, 1.0]]] * N


def test_next_value_is_that_of_the_state_really_reached() -> None:
    buffer = RolloutBuffer(T, N, 2, 1)
    terminated, truncated = torch.zeros(T, N, dtype=torch.bool), torch.zeros(T, N, dtype=torch.bool)
    terminated[1, 0] = truncated[2, 1] = truncated[0, 2] = True
    terminated[3, 2] = truncated[3, 2] = True  # both: a termination
    for t in range(T):
        buffer.add(**step(t, done=terminated[t] | truncated[t], terminated=terminated[t], truncated=truncated[t]))
    buffer.finalize(torch.tensor([100.0, 200.0, 300.0]), final_value=torch.tensor([-1.0, -2.0]))
    next_value = buffer.get()["next_value"]
    assert next_value.tolist() == [
        [1.5, 0.0, 3.5, 100.0],  # terminated at step 1
        [11.5, 12.5, -2.0, 200.0],  # cut at step 2: the second final value, in the order of steps
        [-1.0, 22.5, 23.5, 0.0],  # cut at step 0, terminated at step 3
    ]


def test_cut_transitions_need_their_final_values() -> None:
    buffer = RolloutBuffer(1, N, 2, 1)
    cut = torch.tensor([True, False, True])
    buffer.add(**step(0, done=cut, terminated=torch.zeros(N, dtype=torch.bool), truncated=cut))
    with pytest.raises(RolloutError, match="2 transitions were cut by a time limit, but 0 final values"):
        buffer.finalize(torch.zeros(N))


def test_stamps_are_kept_per_step() -> None:
    buffer = RolloutBuffer(T, N, 2, 1)
    for t in range(T):
        buffer.add(**step(t, policy_version=torch.tensor(7 + t // 2)))
    buffer.finalize()
    assert buffer.get()["policy_version"].tolist() == [[7, 7, 8, 8]] * N


def test_is_used_once_and_then_again_in_the_same_memory() -> None:
    buffer = filled()
    assert buffer.is_full()
    assert len(buffer) == N * T
    with pytest.raises(RolloutError, match=r"all 4 steps are written: get\(\) or clear\(\)"):
        buffer.add(**step(0))
    buffer.finalize()
    buffer.set_extras({"advantage": torch.ones(T, N)})
    place = buffer.get()["reward"].data_ptr()
    buffer.add(**step(3))
    assert not buffer.is_full()
    assert len(buffer) == N
    for t in range(1, T):
        buffer.add(**step(t))
    buffer.finalize()
    rollout = buffer.get()
    assert rollout["reward"].data_ptr() == place
    assert rollout["reward"][0].tolist() == [3.0, 1.0, 2.0, 3.0]
    assert "advantage" not in rollout  # extras belong to one rollout
    assert buffer.get_stats()["transitions"] == N * T


def test_the_guides_form_takes_whole_rollouts() -> None:
    source = filled()
    source.finalize()
    rollout = source.get()
    buffer = RolloutBuffer(buffer_size=T, device="cpu")
    buffer.add(rollout)
    assert buffer.is_full()
    assert len(buffer) == N * T
    assert buffer.get(flatten=False) is rollout  # by reference
    copying = filled()
    copying.finalize()
    copying.get()
    copying.add_rollout(rollout)
    assert torch.equal(copying.get()["observation"], rollout["observation"])
    with pytest.raises(RolloutError, match=r"expected a rollout \[num_envs, 9\]"):
        RolloutBuffer(buffer_size=9).add(rollout)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda: RolloutBuffer(), "as num_steps or as buffer_size"),
        (lambda: RolloutBuffer(4, buffer_size=4), "as num_steps or as buffer_size"),
        (lambda: RolloutBuffer(T, N, 2, 1).get(), "0 of 4 steps are written"),
        (lambda: RolloutBuffer(T, N, 2, 1).finalize(), "needs a complete rollout"),
        (lambda: RolloutBuffer(T, N, 3, 1).add(**step(0)), "observation: expected 3 numbers"),
        (lambda: RolloutBuffer(T, N, 2, 5).add(**step(0)), "action: expected 5 numbers"),
        (lambda: RolloutBuffer(T, 7, 2, 1).add(**step(0)), "expected 7 envs"),
        (lambda: RolloutBuffer(T, N, 2, 1).add(**step(0, reward=torch.zeros(N, 1))), r"reward: expected \[3\], got"),
        (lambda: RolloutBuffer(T, N, 2, 1).add(**step(0, terminatd=torch.zeros(N))), "Did you mean 'terminated'"),
        (lambda: filled().set_extras({"x": torch.zeros(N, T)}), r"\[num_steps, num_envs, ...\] = \[4, 3\]"),
    ],
)
def test_wrong_use_says_what_was_expected(action, message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        action()


def test_flattened_and_incomplete_rollouts_are_refused() -> None:
    buffer = filled()
    buffer.finalize()
    rollout = buffer.get()
    with pytest.raises(RolloutError, match=r"got batch size \[12\].*flatten=False"):
        check_rollout(rollout.reshape(-1))
    with pytest.raises(RolloutError, match="lacks 'next_value'"):
        check_rollout(rollout.exclude("next_value"))
    with pytest.raises(RolloutError, match="got dict"):
        check_rollout({"reward": rollout["reward"]})


# --- minibatches ---


def rollout_of_numbers(num_envs: int = 6, num_steps: int = 8) -> TensorDict:
    number = torch.arange(num_envs * num_steps).view(num_steps, num_envs)
    storage = TensorDict({"x": number, "nested": {"y": 2 * number}, "done": number % 5 == 0}, [num_steps, num_envs])
    return storage.transpose(0, 1)


def test_an_epoch_sees_every_transition_once_and_the_next_another_order() -> None:
    torch.manual_seed(0)
    minibatches = Minibatches(rollout_of_numbers(), 10)
    epochs = [[batch["x"].tolist() for batch in minibatches] for _ in range(2)]
    assert [len(batch) for batch in epochs[0]] == [10, 10, 10, 9, 9]  # no small remainder
    assert len(minibatches) == 5
    for epoch in epochs:
        assert sorted(functools.reduce(operator.iadd, epoch, [])) == list(range(48))
    assert epochs[0] != epochs[1]
    assert all(torch.equal(batch["nested", "y"], 2 * batch["x"]) for batch in minibatches)


def test_a_batch_larger_than_the_rollout_is_all_of_it() -> None:
    (batch,) = Minibatches(rollout_of_numbers(), 1000)
    assert batch.batch_size == (48,)


def test_only_valid_transitions_are_drawn() -> None:
    rollout = rollout_of_numbers()
    valid = rollout["x"] % 3 == 0
    drawn = torch.cat([batch["x"] for batch in Minibatches(rollout, 4, valid=valid)])
    assert sorted(drawn.tolist()) == list(range(0, 48, 3))
    assert list(Minibatches(rollout, 4, valid=torch.zeros_like(valid))) == []


def test_sequences_are_pieces_of_trajectories() -> None:
    rollout = rollout_of_numbers()
    minibatches = Minibatches(rollout, 8, sequence_length=4)
    seen = []
    for batch in minibatches:
        assert batch.batch_size == (4, 2)
        assert torch.equal(batch["x"][1:] - batch["x"][:-1], torch.full((3, 2), 6))  # one step later, the same env
        expected = torch.zeros(4, 2, dtype=torch.bool)
        expected[1:] = batch["done"][:-1]
        assert torch.equal(batch["start"][1:], expected[1:])
        seen += batch["x"].flatten().tolist()
    assert sorted(seen) == list(range(48))
    assert "start" not in rollout
