"""Closed forms against torch.distributions and against samples."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import distributions as td

from embodichain.agents.rl.models.distributions import (
    SQUASHED_LIMIT,
    CategoricalHead,
    DistributionCfg,
    GaussianHead,
    SquashedGaussianHead,
    build_head,
)
from embodichain.errors import ConfigError


def params(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))


def reference_gaussian(head: GaussianHead, raw: torch.Tensor) -> td.Independent:
    if head.state_dependent:
        mean, log_std = raw.chunk(2, -1)
        std = (log_std + head.cfg.init_log_std).clamp(head.cfg.min_log_std, head.cfg.max_log_std).exp()
        return td.Independent(td.Normal(mean, std), 1)
    return td.Independent(td.Normal(raw, head.log_std.exp().expand_as(raw)), 1)


@pytest.mark.parametrize("std", ["learnable", "state"])
def test_gaussian_equals_torch(std: str) -> None:
    head = GaussianHead(4, DistributionCfg(std=std, init_log_std=-0.3))
    raw = params(50, head.param_dim)
    action, log_prob = head.sample(raw)
    reference = reference_gaussian(head, raw)
    again, entropy = head.evaluate(raw, action)
    assert action.shape == (50, 4)
    assert torch.allclose(log_prob, reference.log_prob(action), atol=1e-4)
    assert torch.allclose(again, reference.log_prob(action), atol=1e-5)
    assert torch.allclose(entropy, reference.entropy(), atol=1e-5)
    mean, at_mean = head.sample(raw, deterministic=True)
    assert torch.equal(mean, reference.mean)
    assert torch.allclose(at_mean, reference.log_prob(mean), atol=1e-5)


def test_gaussian_gradients_equal_torch() -> None:
    head = GaussianHead(3)
    action = params(20, 3) * 0.5
    ours, theirs = (params(20, 3).requires_grad_() for _ in range(2))
    log_prob, entropy = head.evaluate(ours, action)
    (log_prob.sum() + entropy.sum()).backward()
    own_std_grad = head.log_std.grad.clone()
    head.log_std.grad = None
    reference = reference_gaussian(head, theirs)
    (reference.log_prob(action).sum() + reference.entropy().sum()).backward()
    assert torch.allclose(ours.grad, theirs.grad, atol=1e-5)
    assert torch.allclose(own_std_grad, head.log_std.grad, atol=1e-4)


def test_gaussian_samples_have_the_moments() -> None:
    torch.manual_seed(0)
    head = GaussianHead(2, DistributionCfg(init_log_std=-1.0))
    action, _ = head.sample(torch.tensor([[0.3, -2.0]]).expand(20000, 2))
    assert torch.allclose(action.mean(0), torch.tensor([0.3, -2.0]), atol=0.02)
    assert torch.allclose(action.std(0), torch.full((2,), float(np.exp(-1.0))), atol=0.02)


@pytest.mark.parametrize("std", ["learnable", "state"])
def test_squashed_gaussian_equals_torch(std: str) -> None:
    head = SquashedGaussianHead(3, DistributionCfg(std=std, squash=True))
    raw = params(200, head.param_dim)
    action, log_prob = head.sample(raw)
    assert action.abs().max() < 1.0
    reference = td.TransformedDistribution(reference_gaussian(head, raw).base_dist, td.TanhTransform())
    inside = (action.abs() < 0.999).all(-1)
    expected = reference.log_prob(action.double()).sum(-1).float()
    assert torch.allclose(log_prob[inside], expected[inside], atol=1e-3)
    # sampling and evaluating agree to the last bit: the first ratio of an update is exactly 1
    assert torch.equal(head.evaluate(raw, action)[0], log_prob)


def test_squashed_density_integrates_to_one() -> None:
    head = SquashedGaussianHead(1, DistributionCfg(squash=True))
    grid = torch.linspace(-SQUASHED_LIMIT, SQUASHED_LIMIT, 400001).unsqueeze(-1)
    log_prob, _ = head.evaluate(torch.full_like(grid, 0.4), grid)
    assert abs(torch.trapezoid(log_prob.exp().double(), grid.squeeze(-1).double()) - 1.0) < 1e-3


def test_squashed_saturated_actions_stay_finite() -> None:
    head = SquashedGaussianHead(2, DistributionCfg(squash=True))
    raw = torch.tensor([[60.0, -60.0]])
    action, log_prob = head.sample(raw)
    again, entropy = head.evaluate(raw, action)
    assert action.tolist() == [[pytest.approx(SQUASHED_LIMIT), pytest.approx(-SQUASHED_LIMIT)]]
    assert torch.isfinite(log_prob).all()
    assert torch.isfinite(again).all()
    assert torch.isfinite(entropy).all()


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, -1.0), (0.8, -0.5), (-1.5, 0.0)])
def test_squashed_entropy_equals_that_of_samples(mean: float, log_std: float) -> None:
    torch.manual_seed(0)
    head = SquashedGaussianHead(1, DistributionCfg(squash=True, init_log_std=log_std))
    raw = torch.full((200000, 1), mean)
    action, log_prob = head.sample(raw)
    _, entropy = head.evaluate(raw[:1], action[:1])
    assert abs(float(entropy.detach()) + float(log_prob.detach().mean())) < 0.02


def integrated_entropy(mean: float, std: float) -> float:
    """Return the entropy of tanh(u), u ~ N(mean, std^2), by the trapezoidal rule in float64 over u."""
    u = np.linspace(mean - 12.0 * std, mean + 12.0 * std, 200_001)
    log_density = -0.5 * ((u - mean) / std) ** 2 - np.log(std) - 0.5 * np.log(2.0 * np.pi)
    log_slope = 2.0 * (np.log(2.0) - np.logaddexp(u, -u))  # log(1 - tanh(u)^2)
    return float(np.trapezoid(np.exp(log_density) * (log_slope - log_density), u))


@pytest.mark.parametrize("std", [0.1, 0.3, 1.0, 2.7, 7.4, 10.0, 50.0])
def test_squashed_entropy_equals_numerical_integration(std: float) -> None:
    means = [0.0, 0.02, 0.4, -1.3, 3.0, -8.0, 30.0]
    head = SquashedGaussianHead(1, DistributionCfg(squash=True, init_log_std=float(np.log(std))))
    _, entropy = head.evaluate(torch.tensor(means).unsqueeze(-1), torch.zeros(len(means), 1))
    expected = [integrated_entropy(mean, std) for mean in means]
    assert entropy.tolist() == pytest.approx(expected, abs=3e-4)


def test_squashed_entropy_has_the_gradient_of_the_integral() -> None:
    step = 1e-3
    for mean, log_std in [(0.0, -2.0), (0.5, 0.0), (-1.5, 1.0), (2.0, 2.0), (0.1, 2.3)]:
        head = SquashedGaussianHead(1, DistributionCfg(squash=True, init_log_std=log_std))
        raw = torch.tensor([[mean]], requires_grad=True)
        head.evaluate(raw, torch.zeros(1, 1))[1].sum().backward()
        std = np.exp(log_std)
        by_mean = integrated_entropy(mean + step, std) - integrated_entropy(mean - step, std)
        wider, narrower = (integrated_entropy(mean, np.exp(log_std + d)) for d in (step, -step))
        assert raw.grad is not None
        assert head.log_std.grad is not None
        assert raw.grad.item() == pytest.approx(by_mean / (2.0 * step), abs=2e-3)
        assert head.log_std.grad.item() == pytest.approx((wider - narrower) / (2.0 * step), abs=2e-3)


def test_categorical_equals_torch() -> None:
    head = CategoricalHead(5)
    raw = params(40, 5, scale=2.0)
    action, log_prob = head.sample(raw)
    reference = td.Categorical(logits=raw)
    again, entropy = head.evaluate(raw, action)
    assert action.shape == (40,)
    assert action.dtype == torch.int64
    assert torch.allclose(log_prob, reference.log_prob(action), atol=1e-6)
    assert torch.equal(again, log_prob)
    assert torch.allclose(entropy, reference.entropy(), atol=1e-6)
    assert torch.equal(head.sample(raw, deterministic=True)[0], raw.argmax(-1))


def test_categorical_samples_have_the_frequencies() -> None:
    torch.manual_seed(0)
    probabilities = torch.tensor([0.1, 0.6, 0.3])
    action, _ = CategoricalHead(3).sample(probabilities.log().expand(50000, 3))
    assert torch.allclose(torch.bincount(action).float() / 50000, probabilities, atol=0.01)


def test_half_precision_parameters_are_evaluated_in_float32() -> None:
    raw = params(10, 3)
    head = GaussianHead(3)
    exact, _ = head.evaluate(raw.bfloat16().float(), raw)
    half, _ = head.evaluate(raw.bfloat16(), raw)
    assert half.dtype == torch.float32
    assert torch.equal(half, exact)


def test_heads_follow_the_action_space() -> None:
    assert isinstance(build_head(gym.spaces.Discrete(4)), CategoricalHead)
    box = gym.spaces.Box(-1, 1, (6,), np.float32)
    assert build_head(box).param_dim == 6
    assert build_head(box, DistributionCfg(std="state")).param_dim == 12
    assert isinstance(build_head(3, DistributionCfg(squash=True)), SquashedGaussianHead)
    for space in (
        gym.spaces.Tuple([gym.spaces.Discrete(2)]),
        gym.spaces.Discrete(3, start=1),
        gym.spaces.Box(-1, 1, (2, 2)),
    ):
        with pytest.raises(ConfigError, match="expected"):
            build_head(space)


NVEC = [3, 1, 5, 2]


def test_several_choices_are_independent_categoricals() -> None:
    head = build_head(gym.spaces.MultiDiscrete(NVEC))
    assert (head.action_dim, head.param_dim) == (4, sum(NVEC))
    params = (3.0 * torch.randn(2000, sum(NVEC), generator=torch.Generator().manual_seed(0))).requires_grad_()
    reference = [torch.distributions.Categorical(logits=part) for part in params.split(NVEC, dim=-1)]
    torch.manual_seed(0)
    action, log_prob = head.sample(params)
    wanted = sum(part.log_prob(action[:, i]) for i, part in enumerate(reference))
    assert torch.allclose(log_prob, wanted, atol=1e-5)
    again, entropy = head.evaluate(params, action)
    assert torch.equal(again, log_prob)  # so that the ratio of unchanged weights is exactly 1
    assert torch.allclose(entropy, sum(part.entropy() for part in reference), atol=1e-5)
    best, _ = head.sample(params, deterministic=True)
    assert torch.equal(best, torch.stack([part.argmax(-1) for part in params.split(NVEC, dim=-1)], dim=-1))
    gradient = torch.autograd.grad(again.sum() + entropy.sum(), params)[0]
    assert torch.allclose(
        gradient, torch.autograd.grad(wanted.sum() + sum(p.entropy().sum() for p in reference), params)[0], atol=1e-5
    )
    logits = torch.randn(1, sum(NVEC)).expand(20_000, -1)
    drawn, _ = head.sample(logits)
    for i, part in enumerate(logits[0].split(NVEC)):
        frequency = torch.bincount(drawn[:, i], minlength=NVEC[i]) / len(drawn)
        assert torch.allclose(frequency, part.softmax(-1), atol=0.02)


def test_switches_are_independent_bernoullis() -> None:
    head = build_head(gym.spaces.MultiBinary(3))
    assert (head.action_dim, head.param_dim) == (3, 3)
    params = (4.0 * torch.randn(2000, 3, generator=torch.Generator().manual_seed(0))).requires_grad_()
    reference = torch.distributions.Bernoulli(logits=params)
    torch.manual_seed(0)
    action, log_prob = head.sample(params)
    wanted = reference.log_prob(action.float()).sum(-1)
    assert torch.allclose(log_prob, wanted, atol=1e-5)
    again, entropy = head.evaluate(params, action)
    assert torch.equal(again, log_prob)
    assert torch.allclose(entropy, reference.entropy().sum(-1), atol=1e-5)
    assert torch.equal(head.sample(params, deterministic=True)[0], (params > 0).long())
    gradient = torch.autograd.grad(again.sum() + entropy.sum(), params)[0]
    expected = torch.autograd.grad(wanted.sum() + reference.entropy().sum(), params)[0]
    assert torch.allclose(gradient, expected, atol=1e-5)
    logits = torch.tensor([[-2.0, 0.0, 3.0]]).expand(20_000, -1)
    assert torch.allclose(head.sample(logits)[0].float().mean(0), logits[0].sigmoid(), atol=0.02)
    extreme = torch.tensor([[100.0, -100.0, 0.0]])
    assert head.evaluate(extreme, torch.tensor([[1, 0, 1]]))[0].isfinite().all()


def test_choices_that_count_from_elsewhere_are_refused() -> None:
    for space in (
        gym.spaces.MultiDiscrete([2, 2], start=[0, 1]),
        gym.spaces.MultiDiscrete([[2, 2]]),
        gym.spaces.MultiBinary([2, 2]),
    ):
        with pytest.raises(ConfigError, match="action_space"):
            build_head(space)
