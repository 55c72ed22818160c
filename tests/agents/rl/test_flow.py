"""Flow policies: the chain's probability in closed form, imitation of two ways at once, and reinforcement."""

from __future__ import annotations

import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

from embodichain.agents.rl.algo import GRPO, PPO, GRPOCfg, PPOCfg
from embodichain.agents.rl.collector import SyncCollector
from embodichain.agents.rl.models import build_policy
from embodichain.agents.rl.models.flow import TIME_WAVES, FlowCfg, FlowHead
from embodichain.envs.registration import make
from embodichain.envs.wrappers import chunked
from embodichain.errors import ConfigError, RolloutError

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, CHUNK, DIM = 3, 2, 2
SIZE = CHUNK * DIM


class Linear(nn.Module):
    """The velocity ``A x + b + c . features``, whatever the time."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.a = nn.Parameter(0.5 * torch.randn(SIZE, SIZE, generator=draw))
        self.b = nn.Parameter(torch.randn(SIZE, generator=draw))
        self.c = nn.Parameter(torch.randn(SIZE, WIDTH, generator=draw))

    def forward(self, inputs: Tensor) -> Tensor:
        features, x, _ = inputs.split([WIDTH, SIZE, 2 * TIME_WAVES], dim=-1)
        return x @ self.a.T + self.b + features @ self.c.T


def linear_head(**settings) -> FlowHead:
    return FlowHead(Linear(), WIDTH, CHUNK, DIM, FlowCfg(**settings))


@torch.no_grad()
def joint_log_prob(head: FlowHead, features: Tensor, chain: Tensor) -> float:
    """Return the density of ``x_1 ... x_K`` given ``x_0`` as one Gaussian over all of them, in float64."""
    cfg, net = head.cfg, head.velocity_net
    dt, eye = 1.0 / cfg.num_steps, torch.eye(SIZE, dtype=torch.float64)
    a, b = net.a.double(), net.b.double() + net.c.double() @ features.double()
    mean, cross = chain[0].double().flatten(), []
    means, covariance = [], torch.zeros(SIZE, SIZE, dtype=torch.float64)
    blocks: list[list[Tensor]] = []
    for k in range(cfg.num_steps):
        tau = k * dt
        if cfg.exploration == "sde":
            scale = cfg.sde_level * math.sqrt((1.0 - tau) / max(tau, dt))
            damp = scale**2 / (2.0 * (1.0 - tau))
            matrix, shift, var = (1 + damp * tau) * a - damp * eye, (1 + damp * tau) * b, scale**2 * dt
        else:  # an untrained network stands in the middle of the range of logarithms
            matrix, shift, var = a, b, cfg.std_range[0] * cfg.std_range[1]
        step = eye + dt * matrix
        mean = step @ mean + dt * shift
        cross = [step @ block for block in cross]  # Cov(x_k+1, x_j) for j <= k
        covariance = step @ covariance @ step.T + var * eye
        cross.append(covariance)
        means.append(mean)
        blocks.append(list(cross))
    count = cfg.num_steps
    rows = [
        torch.cat([blocks[max(i, j)][min(i, j)].T if j > i else blocks[i][j] for j in range(count)], 1)
        for i in range(count)
    ]
    whole = torch.cat(rows)
    normal = MultivariateNormal(torch.cat(means), 0.5 * (whole + whole.T))
    return float(normal.log_prob(chain[1:].double().flatten()))


@pytest.mark.parametrize("exploration", ["noise", "sde"])
def test_the_probability_of_a_chain_is_that_of_the_closed_form(exploration):
    head, features = linear_head(exploration=exploration, num_steps=4), torch.randn(5, WIDTH)
    _, log_prob, decision = head.sample(features)
    again, entropy = head.evaluate(features, decision)
    assert log_prob.shape == again.shape == entropy.shape == (5, 1, 4)
    for i in range(5):
        expected = joint_log_prob(head, features[i], decision["chain"][i])
        assert float(log_prob[i].detach().double().sum()) == pytest.approx(expected, abs=1e-5 * max(1.0, abs(expected)))
        assert float(again[i].detach().double().sum()) == pytest.approx(expected, abs=1e-5 * max(1.0, abs(expected)))


def test_noise_has_the_spread_it_says():
    head = linear_head(exploration="noise", std_range=(0.1, 0.4), num_steps=1)
    features = torch.zeros(20000, WIDTH)
    chunk, _, decision = head.sample(features)
    follows = decision["chain"][:, 0] + head.velocity(features, decision["chain"][:, 0], torch.zeros(20000))
    assert float((chunk - follows).std()) == pytest.approx(0.2, rel=0.02)
    entropy = head.evaluate(features, decision)[1]
    assert float(entropy[0, 0, 0]) == pytest.approx(SIZE * (0.5 * math.log(2 * math.pi * math.e) + math.log(0.2)))


def test_the_stochastic_equation_keeps_the_distribution_of_the_flow():
    """For Gaussian actions N(m, s^2) the best velocity is known: both samplers must arrive at N(m, s^2)."""
    m, s = 0.7, 0.3

    class Best(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            x, waves = inputs[..., WIDTH : WIDTH + SIZE], inputs[..., WIDTH + SIZE :]
            tau = torch.atan2(waves[..., :1], waves[..., TIME_WAVES : TIME_WAVES + 1]) * 4.0 / (2 * math.pi)
            mean, var = tau * m, tau**2 * s**2 + (1 - tau) ** 2
            # E[a - noise | x] with Cov(a - noise, x) = tau s^2 - (1 - tau)
            return m + (tau * s**2 - (1 - tau)) / var * (x - mean)

    for exploration in ("ode", "sde"):
        cfg = FlowCfg(num_steps=50, exploration="sde", sde_level=0.7)
        head = FlowHead(Best(), WIDTH, CHUNK, DIM, cfg)
        torch.manual_seed(0)
        features = torch.zeros(20000, WIDTH)
        if exploration == "sde":
            chunk = head.sample(features)[0]
        else:
            chunk = torch.randn(20000, CHUNK, DIM)
            for k in range(50):
                chunk = chunk + head.velocity(features, chunk, torch.full((20000,), k / 50)) / 50
        assert float(chunk.mean()) == pytest.approx(m, abs=0.02), exploration
        assert float(chunk.std()) == pytest.approx(s, abs=0.03), exploration


def test_one_noisy_step_has_one_factor():
    head, features = linear_head(noise_at="one", num_steps=4), torch.randn(64, WIDTH)
    _, log_prob, decision = head.sample(features)
    assert log_prob.shape == (64, 1, 1)
    assert decision["chain"].shape == (64, 2, CHUNK, DIM)
    assert set(decision["step"].tolist()) == {0, 1, 2, 3}
    torch.testing.assert_close(head.evaluate(features, decision)[0], log_prob, rtol=1e-4, atol=1e-4)


def test_without_noise_the_chunk_depends_on_the_observation_alone():
    head, features = linear_head(num_steps=8), torch.randn(6, WIDTH)
    first, second = head.sample(features, deterministic=True)[0], head.sample(features, deterministic=True)[0]
    assert torch.equal(first, second)
    x = head.start.expand(6, CHUNK, DIM)
    for k in range(8):
        x = x + head.velocity(features, x, torch.full((6,), k / 8)) / 8
    torch.testing.assert_close(first, x)
    assert not torch.equal(head.sample(features)[0], first)


def test_without_noise_nothing_is_drawn():
    head, features = linear_head(noise_at="one", num_steps=4), torch.randn(6, WIDTH)
    state = torch.get_rng_state()
    chunk, log_prob, decision = head.sample(features, deterministic=True)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(head.evaluate(features, decision)[0], log_prob, rtol=1e-4, atol=1e-4)
    assert torch.equal(chunk, head.sample(features, deterministic=True)[0])


def test_the_first_noise_can_be_drawn_for_every_chunk():
    head, features = linear_head(num_steps=4, start="drawn"), torch.randn(6, WIDTH)
    chunk, again = (head.sample(features, True, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(chunk[0], again[0])
    assert not torch.equal(chunk[0], head.sample(features, deterministic=True)[0])
    chain = chunk[2]["chain"]
    for k in range(4):  # no noise on the way
        x = chain[:, k] + head.velocity(features, chain[:, k], torch.full((6,), k / 4)) / 4
        torch.testing.assert_close(chain[:, k + 1], x)


def test_times_of_imitation_are_those_of_pi0():
    """u = 1 - tau / 0.999 is Beta(1.5, 1): its mean is 0.6."""
    head = linear_head()
    times = []
    head.velocity = lambda features, x, time: (times.append(time), x)[1]  # type: ignore[method-assign]
    head.imitation_loss(torch.zeros(50000, WIDTH), torch.zeros(50000, CHUNK, DIM))
    assert float(times[0].max()) <= 0.999
    assert float((1.0 - times[0] / 0.999).mean()) == pytest.approx(0.6, abs=0.005)


def test_several_samples_of_a_chunk_are_as_many_chunks():
    """The loss of three samples per chunk is the mean of the losses of three copies of the chunks, each with one."""
    head, features = linear_head(), torch.randn(5, WIDTH)
    actions, valid = torch.randn(5, CHUNK, DIM), torch.tensor([[True, False]] * 3 + [[True, True]] * 2)
    torch.manual_seed(0)
    copies = head.imitation_loss(*(x.repeat_interleave(3, dim=0) for x in (features, actions, valid)))
    head.cfg = head.cfg.replace(imitation_samples=3)
    torch.manual_seed(0)
    torch.testing.assert_close(head.imitation_loss(features, actions, valid), copies.view(5, 3).mean(1))


def test_actions_that_do_not_count_do_not_teach():
    """Not even through the velocity, which mixes all actions of a chunk."""
    head, features = linear_head(), torch.randn(8, WIDTH)
    actions, valid = torch.randn(8, CHUNK, DIM), torch.tensor([[True, False]] * 8)
    losses = []
    for other in (0.0, 100.0):
        torch.manual_seed(0)
        changed = actions.clone()
        changed[:, 1] = other
        losses.append(head.imitation_loss(features, changed, valid))
    torch.testing.assert_close(losses[0], losses[1])
    torch.manual_seed(0)
    short = head.imitation_loss(features, actions[:, :1])
    torch.testing.assert_close(short, losses[0])


def make_flow(env, **settings):
    small = {"type": "mlp", "network_cfg": {"hidden_sizes": [16], "activation": "tanh"}}
    block = {"name": "flow", "actor": small, "critic": small, "normalize_obs": True, **settings}
    return build_policy(block, env.observation_space, env.action_space, "cpu")


def test_two_ways_are_both_learned():
    """Actions are -1 or 1, whatever is observed: the mean of a Gaussian is 0, the flow gives one or the other."""
    torch.manual_seed(0)
    space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
    wide = {"type": "mlp", "network_cfg": {"hidden_sizes": [64, 64], "activation": "silu"}}
    policy = build_policy({"name": "flow", "actor": wide, "flow": {"num_steps": 8}}, 2, space, "cpu")
    adam = torch.optim.Adam(policy.head.velocity_net.parameters(), 3e-3)
    for _ in range(800):
        actions = torch.randint(0, 2, (256, 1, 1)).float() * 2.0 - 1.0
        loss = policy.imitation_loss(torch.randn(256, 2), actions).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
    with torch.no_grad():
        x = torch.randn(1000, 1, 1)
        for k in range(8):
            x = x + policy.head.velocity(torch.randn(1000, 2), x, torch.full((1000,), k / 8)) / 8
    near = (x.abs() - 1.0).abs() < 0.3
    assert float(near.float().mean()) > 0.85
    assert 0.35 < float((x > 0).float().mean()) < 0.65


@pytest.mark.parametrize("chunk_size", [1, 3])
@pytest.mark.parametrize("settings", [{}, {"exploration": "sde"}, {"noise_at": "one"}])
@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_it_is_learned_with(name, settings, chunk_size):
    torch.manual_seed(0)
    env = make("CartPoleRL", num_envs=4, seed=0, num_threads=1, max_episode_steps=12)
    policy = make_flow(env, flow={"num_steps": 3, **settings}, chunk_size=chunk_size)
    common = {"batch_size": 10**6, "n_epochs": 1, "learning_rate": 1e-3, "log_prob_per": "denoising_step"}
    algorithm = PPO(PPOCfg(**common), policy)
    if name == "grpo":
        algorithm = GRPO(GRPOCfg(**common, group_size=2, kl_coef=0.01), policy)
    collector = SyncCollector(chunked(env, chunk_size), policy, start_rollout=algorithm.start_rollout)
    before = policy.head.velocity_net[0].weight.clone()
    rollout = collector.collect(8)
    assert rollout["action"].shape[2:] == ((1,) if chunk_size == 1 else (3, 1))
    first = algorithm.update(rollout)
    assert first["approx_kl"] == pytest.approx(0.0, abs=1e-9)
    assert first["clip_fraction"] == 0.0
    assert not torch.equal(policy.head.velocity_net[0].weight, before)
    assert math.isfinite(algorithm.update(collector.collect(8))["policy_loss"])


def test_ppo_finds_the_better_action():
    """Reward is minus the squared distance of a single action from 0.5."""
    torch.manual_seed(0)
    policy = build_policy(
        {"name": "flow", "flow": {"num_steps": 3, "std_range": [0.1, 0.3]}, "actor": {"hidden_sizes": [32, 32]}},
        2, gym.spaces.Box(-1.0, 1.0, (1,), np.float32), "cpu",
    )  # fmt: skip
    algorithm = PPO(PPOCfg(batch_size=256, n_epochs=4, learning_rate=3e-3, ent_coef=0.0), policy)
    distances = []
    for _ in range(60):
        obs = torch.randn(256, 2)
        with torch.no_grad():
            action, log_prob, value, decision = policy.decide(obs)
        reward = -(action[:, 0] - 0.5).square()
        distances.append(float(-reward.mean()))
        over, zero = torch.ones(256, 1, dtype=torch.bool), torch.zeros(256, 1)
        parts = {"observation": obs, "action": action, "sample_log_prob": log_prob, "decision": decision}
        rollout = TensorDict(parts, [256]).unsqueeze(1)
        rollout.update({"reward": reward.unsqueeze(1), "terminated": over, "truncated": ~over, "done": over})
        rollout.update({"value": value.unsqueeze(1), "next_value": zero, "policy_version": zero.long()})
        algorithm.update(rollout)
    assert distances[0] > 0.5
    assert np.mean(distances[-5:]) < 0.15 * distances[0]


def test_wrong_settings_and_chains_are_named():
    with pytest.raises(ConfigError, match="std_range"):
        FlowCfg(std_range=(0.3, 0.1))
    with pytest.raises(ConfigError, match="expected continuous actions"):
        build_policy({"name": "flow"}, 2, gym.spaces.Discrete(3), "cpu")
    with pytest.raises(ConfigError, match=r"flow\.num_stepz.*num_steps"):
        build_policy({"name": "flow", "flow": {"num_stepz": 3}}, 2, gym.spaces.Box(-1.0, 1.0, (1,)), "cpu")
    head = linear_head(num_steps=4)
    other = linear_head(num_steps=3).sample(torch.zeros(2, WIDTH))[2]
    with pytest.raises(RolloutError, match=r"expected a chain \[batch, 5, 2, 2\].*got \[2, 4, 2, 2\]"):
        head.evaluate(torch.zeros(2, WIDTH), other)
