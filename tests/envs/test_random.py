"""Random streams: the hash against SplitMix64 in plain Python, simple statistics, and what belongs to whom."""

import math

import pytest
import torch

from embodichain.envs.random import DRAWS, EPISODE, SEED, RandomStreams, combine, mix

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15


def splitmix(state: int) -> int:
    """The finaliser of SplitMix64 on Python's own integers."""
    z = state & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def plain_combine(a: int, b: int) -> int:
    return splitmix(splitmix(a) + (b + 1) * GAMMA)


def unsigned(values: torch.Tensor) -> list[int]:
    return [v & MASK for v in values.tolist()]


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_mix_gives_the_published_sequence():
    """The first outputs of SplitMix64 for the seed 1234567, as published with its reference implementation."""
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    counters = torch.arange(1, 6) * (GAMMA - (1 << 64)) + 1234567
    assert unsigned(mix(counters)) == published


def test_mix_and_combine_equal_plain_python():
    numbers = [0, 1, -1, 42, 2**62 - 1, -(2**63), 2**63 - 1, -987654321987654321]
    column = torch.tensor(numbers)
    assert unsigned(mix(column)) == [splitmix(n) for n in numbers]
    for other in (0, 7, 2**40):
        expected = [plain_combine(n, other) for n in numbers]
        assert unsigned(combine(column, torch.full_like(column, other))) == expected
        assert unsigned(mix(mix(column) + (other + 1) * torch.tensor(GAMMA - (1 << 64)))) == expected  # as on a GPU


def test_a_draw_is_a_function_of_seed_env_episode_and_number():
    """The whole chain from the seed to the n-th number of an episode, in plain Python."""
    streams = RandomStreams(5, seed=9)
    streams.next_episode(ids(0, 1, 2, 3, 4))
    streams.next_episode(ids(3))
    drawn = torch.cat((streams.uniform(ids(3), 2), streams.uniform(ids(3), 3)), dim=1)
    key = plain_combine(9, 3)
    episode_seed = plain_combine(key, 1) & ((1 << 62) - 1)
    assert streams.episode_seed[3].item() == episode_seed
    assert drawn[0].tolist() == [(plain_combine(episode_seed, n) >> 11) * 2.0**-53 for n in range(5)]


def test_uniform_numbers_are_uniform():
    streams = RandomStreams(400, seed=1)
    every = torch.arange(400)
    streams.next_episode(every)
    u = streams.uniform(every, 500)
    assert u.dtype == torch.float64
    assert u.min() >= 0.0
    assert u.max() < 1.0
    counts = torch.histc(u, bins=100, min=0.0, max=1.0)
    chi2 = float(((counts - 2000.0) ** 2 / 2000.0).sum())
    assert 50.0 < chi2 < 160.0  # 99 degrees of freedom; both tails below 1e-4
    for one, other in ((u[:, 1:], u[:, :-1]), (u[1:], u[:-1])):  # neighbouring draws, neighbouring envs
        correlation = float(((one - 0.5) * (other - 0.5)).mean() * 12.0)
        assert abs(correlation) < 5.0 / math.sqrt(one.numel())


def test_neighbouring_seeds_are_unrelated():
    every = torch.arange(2000)
    drawn = []
    for seed in (0, 1, 2):
        streams = RandomStreams(2000, seed=seed)
        streams.next_episode(every)
        drawn.append(streams.uniform(every, 8) - 0.5)
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert abs(float((drawn[a] * drawn[b]).mean() * 12.0)) < 5.0 / math.sqrt(16000)


def test_uniform_takes_bounds_per_column():
    streams = RandomStreams(3000, seed=0)
    every = torch.arange(3000)
    streams.next_episode(every)
    low, high = torch.tensor([-1.0, 5.0], dtype=torch.float64), torch.tensor([1.0, 5.0], dtype=torch.float64)
    drawn = streams.uniform(every, 2, low, high)
    assert drawn[:, 0].min() >= -1.0
    assert drawn[:, 0].max() < 1.0
    assert abs(float(drawn[:, 0].mean())) < 0.06
    assert bool((drawn[:, 1] == 5.0).all())


def test_noise_is_standard_normal_and_new_at_every_step():
    streams = RandomStreams(500, seed=2)
    every = torch.arange(500)
    streams.next_episode(every)
    noise = torch.stack([streams.noise(every, torch.full((500,), t), 20) for t in range(20)])
    assert abs(float(noise.mean())) < 5.0 / math.sqrt(noise.numel())
    assert float(noise.var()) == pytest.approx(1.0, abs=0.02)
    assert float((noise**4).mean()) == pytest.approx(3.0, abs=0.12)
    assert abs(float((noise[1:] * noise[:-1]).mean())) < 5.0 / math.sqrt(noise.numel())
    assert torch.unique(noise).numel() == noise.numel()


def test_noise_can_be_asked_for_twice_and_moves_no_stream():
    streams = RandomStreams(4, seed=2)
    streams.next_episode(ids(0, 1, 2, 3))
    before = streams.state.clone()
    first = streams.noise(ids(2, 1), torch.tensor([5, 6]), 3)
    assert torch.equal(first, streams.noise(ids(2, 1), torch.tensor([5, 6]), 3))
    assert torch.equal(streams.state, before)


@pytest.mark.parametrize("num_envs", [1, 2, 9, 64])
def test_an_env_draws_the_same_whatever_num_envs_is(num_envs):
    large, small = RandomStreams(200, seed=4), RandomStreams(num_envs, seed=4)
    large.next_episode(torch.arange(200))
    small.next_episode(torch.arange(num_envs))
    steps = torch.arange(200)
    assert torch.equal(large.uniform(torch.arange(200), 7)[:num_envs], small.uniform(torch.arange(num_envs), 7))
    assert torch.equal(
        large.noise(torch.arange(200), steps, 5)[:num_envs],
        small.noise(torch.arange(num_envs), steps[:num_envs], 5),
    )


def test_drawing_for_some_leaves_the_others_alone():
    streams = RandomStreams(4, seed=0)
    streams.next_episode(ids(0, 1, 2, 3))
    before = streams.state.clone()
    streams.uniform(ids(2, 0), 3)
    assert streams.state[:, DRAWS].tolist() == [3, 0, 3, 0]
    assert torch.equal(streams.state[[1, 3]], before[[1, 3]])


def test_an_episode_seed_starts_the_episode_again_and_the_stream_goes_on():
    streams = RandomStreams(3, seed=0)
    every = ids(0, 1, 2)
    streams.next_episode(every)
    seeds = streams.episode_seed
    first = streams.uniform(every, 4)
    streams.next_episode(every)
    second_seeds = streams.episode_seed
    assert not torch.equal(seeds, second_seeds)
    streams.next_episode(ids(1), seeds[ids(0)])  # env 1 repeats the first episode of env 0
    assert torch.equal(streams.uniform(ids(1), 4)[0], first[0])
    assert streams.state[:, EPISODE].tolist() == [2, 3, 2]


def test_the_state_is_everything():
    streams, copy = RandomStreams(3, seed=5), RandomStreams(3, seed=99)
    every = ids(0, 1, 2)
    streams.next_episode(every)
    streams.uniform(every, 5)
    copy.state.copy_(streams.state)
    streams.next_episode(every)
    copy.next_episode(every)
    assert torch.equal(streams.uniform(every, 6), copy.uniform(every, 6))


def test_episode_seeds_differ_and_are_not_negative():
    streams = RandomStreams(1000, seed=0)
    seen = []
    for _ in range(20):
        streams.next_episode(torch.arange(1000))
        seen.append(streams.episode_seed)
    seeds = torch.cat(seen)
    assert torch.unique(seeds).numel() == 20_000
    assert int(seeds.min()) >= 0
    assert int(seeds.max()) < 2**62
    assert streams.episode_seed.data_ptr() != streams.state[:, SEED].data_ptr()
