"""Triton kernels: generalised advantage estimation, and PPO's loss with its gradient, one launch each.

Signatures are long, as a kernel takes every pointer, stride and size as a separate parameter.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from tensordict import TensorDictBase
from torch import Tensor

from embodichain.agents.rl.utils.ratios import MAX_LOG_RATIO

GAE_BLOCK = 32
"""Envs per program: few, as only envs run in parallel, while steps are sequential."""


@triton.jit
def _walk_back(  # type: ignore[no-untyped-def]  # noqa: ANN202
    reward,  # noqa: ANN001
    value,  # noqa: ANN001
    next_value,  # noqa: ANN001
    terminated,  # noqa: ANN001
    done,  # noqa: ANN001
    gammas,  # noqa: ANN001
    decays,  # noqa: ANN001
    advantage,  # noqa: ANN001
    returns,  # noqa: ANN001
    gamma,  # noqa: ANN001
    decay,  # noqa: ANN001
    num_steps,  # noqa: ANN001
    num_envs,  # noqa: ANN001
    per_step: tl.constexpr,
    block: tl.constexpr,
):
    env = tl.program_id(0) * block + tl.arange(0, block)
    here = env < num_envs
    following = tl.zeros([block], tl.float32)
    for back in range(num_steps):
        at = (num_steps - 1 - back).to(tl.int64) * num_envs + env
        bootstraps = 1.0 - tl.load(terminated + at, mask=here, other=0).to(tl.float32)
        keeps = 1.0 - tl.load(done + at, mask=here, other=0).to(tl.float32)
        if per_step:
            bootstraps *= tl.load(gammas + at, mask=here, other=0.0)
            keeps *= tl.load(decays + at, mask=here, other=0.0)
        else:
            bootstraps *= gamma
            keeps *= decay
        v = tl.load(value + at, mask=here, other=0.0)
        delta = bootstraps * tl.load(next_value + at, mask=here, other=0.0)
        delta = delta + tl.load(reward + at, mask=here, other=0.0)
        delta = delta - v
        following = delta + keeps * following
        tl.store(advantage + at, following, mask=here)
        tl.store(returns + at, following + v, mask=here)


def accumulate_gae(rows: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Return advantages and returns on a GPU, one thread per env, bit-equal to the CPU."""
    rewards, values, next_values, terminations, dones, gamma, decay = rows
    num_steps, num_envs = rewards.shape
    advantage, returns = torch.empty_like(rewards), torch.empty_like(rewards)
    per_step = isinstance(gamma, Tensor)
    numbers: tuple[Any, Any] = (0.0, 0.0) if per_step else (gamma, decay)
    fields: tuple[Any, Any] = (gamma, decay) if per_step else (rewards, rewards)
    read = (rewards, values, next_values, terminations.view(torch.uint8), dones.view(torch.uint8), *fields)
    options: dict[str, Any] = {"block": GAE_BLOCK, "num_warps": 1, "enable_fp_fusion": False}
    with torch.cuda.device(rewards.device):
        launch = _walk_back[(triton.cdiv(num_envs, GAE_BLOCK),)]
        launch(*read, advantage, returns, *numbers, num_steps, num_envs, per_step=per_step, **options)
    return advantage, returns


LOSS_BLOCK = 256
"""Transitions per program."""
_READ = ("new_log_prob", "log_prob", "advantage", "new_value", "value", "return")
_SIZES = ["count", "clip", "vf_coef", *(f"{name}_stride" for name in _READ)]
"""Parameters that are not specialised, as the sizes of minibatches may differ by one."""


@triton.jit(do_not_specialize=_SIZES)
def _clipped_loss(  # type: ignore[no-untyped-def]  # noqa: ANN202
    new_log_prob,  # noqa: ANN001
    log_prob,  # noqa: ANN001
    advantage,  # noqa: ANN001
    new_value,  # noqa: ANN001
    value,  # noqa: ANN001
    returns,  # noqa: ANN001
    scale,  # noqa: ANN001
    log_prob_grad,  # noqa: ANN001
    value_grad,  # noqa: ANN001
    sums,  # noqa: ANN001
    new_log_prob_stride,  # noqa: ANN001
    log_prob_stride,  # noqa: ANN001
    advantage_stride,  # noqa: ANN001
    new_value_stride,  # noqa: ANN001
    value_stride,  # noqa: ANN001
    return_stride,  # noqa: ANN001
    count,  # noqa: ANN001
    clip,  # noqa: ANN001
    vf_coef,  # noqa: ANN001
    max_log_r: tl.constexpr,
    clip_value: tl.constexpr,
    scaled: tl.constexpr,
    block: tl.constexpr,
):
    at = tl.program_id(0) * block + tl.arange(0, block)
    here = at < count
    share = 1.0 / count

    # ratio = pi(a|s) / pi_old(a|s);  L_policy = -E min(ratio A, clip(ratio, 1 - c, 1 + c) A)
    gain = tl.load(advantage + at * advantage_stride, mask=here, other=0.0)
    log_r = tl.load(new_log_prob + at * new_log_prob_stride, mask=here, other=0.0)
    log_r -= tl.load(log_prob + at * log_prob_stride, mask=here, other=0.0)
    within = ~(log_r > max_log_r)
    log_r = tl.where(within, log_r, max_log_r)  # keeps NaN, unlike tl.minimum
    ratio = tl.exp(log_r)
    clipped = tl.minimum(tl.maximum(ratio, 1.0 - clip), 1.0 + clip) * gain
    policy_loss = -tl.minimum(ratio * gain, clipped)
    # The gradient is zero if the clipped term is the smaller one, and beyond the bound of the log-ratio.
    log_prob_slope = tl.where((ratio * gain <= clipped) & within, -gain * ratio, 0.0)

    # L_value = E (V - R)^2; clipped: E max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2)
    unit = 1.0
    if scaled:
        unit = tl.load(scale)
    now = tl.load(new_value + at * new_value_stride, mask=here, other=0.0) / unit
    target = tl.load(returns + at * return_stride, mask=here, other=0.0) / unit
    error = now - target
    value_loss = error * error
    value_slope = 2.0 * error / unit
    if clip_value:
        before = tl.load(value + at * value_stride, mask=here, other=0.0) / unit
        step = now - before
        bounded = before + tl.minimum(tl.maximum(step, -clip), clip) - target
        larger = bounded * bounded > value_loss
        moves = tl.where((step >= -clip) & (step <= clip), 2.0 * bounded / unit, 0.0)
        value_slope = tl.where(larger, moves, value_slope)
        value_loss = tl.where(larger, bounded * bounded, value_loss)

    tl.store(log_prob_grad + at, log_prob_slope * share, mask=here)
    tl.store(value_grad + at, value_slope * (vf_coef * share), mask=here)

    # KL(pi_old || pi) = E[ratio - 1 - log ratio], by its series near 1, where the difference cancels
    series = log_r * log_r * (0.5 + log_r * (1.0 / 6.0 + log_r * (1.0 / 24.0 + log_r / 120.0)))
    kl = tl.where(tl.abs(log_r) < 0.1, series, ratio - 1.0 - log_r)
    is_clipped = (tl.abs(ratio - 1.0) > clip).to(tl.float32)
    row = sums + tl.program_id(0) * 5
    tl.store(row, tl.sum(tl.where(here, policy_loss + vf_coef * value_loss, 0.0)) * share)
    tl.store(row + 1, tl.sum(tl.where(here, policy_loss, 0.0)) * share)
    tl.store(row + 2, tl.sum(tl.where(here, value_loss, 0.0)) * share)
    tl.store(row + 3, tl.sum(tl.where(here, kl, 0.0)) * share)
    tl.store(row + 4, tl.sum(tl.where(here, is_clipped, 0.0)) * share)


class _Loss(torch.autograd.Function):
    """The forward kernel also computes the gradient; the backward pass only scales it."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        new_log_prob, new_value, log_prob, value, advantage, returns, scale, clip, vf_coef, clip_value = given
        count = new_log_prob.numel()
        log_prob_grad, value_grad = torch.empty_like(new_log_prob), torch.empty_like(new_value)
        blocks = triton.cdiv(count, LOSS_BLOCK)
        sums = torch.empty(blocks, 5, device=new_value.device)
        read = (new_log_prob, log_prob, advantage, new_value, value, returns)
        scaled = isinstance(scale, Tensor)
        unit = scale if scaled else new_value
        written = (log_prob_grad, value_grad, sums)
        strides = (tensor.stride(0) for tensor in read)
        options = {"max_log_r": MAX_LOG_RATIO, "clip_value": clip_value, "scaled": scaled, "block": LOSS_BLOCK}
        with torch.cuda.device(new_value.device):
            _clipped_loss[(blocks,)](*read, unit, *written, *strides, count, clip, vf_coef, **options, num_warps=4)
        totals = sums.sum(0)
        ctx.save_for_backward(log_prob_grad, value_grad)
        ctx.mark_non_differentiable(totals)
        return totals[0].clone(), totals

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        log_prob_grad, value_grad = ctx.saved_tensors
        return (log_prob_grad * grads[0], value_grad * grads[0], *[None] * 8)


def clipped_loss(
    log_prob: Tensor,
    value: Tensor,
    batch: TensorDictBase,
    scale: Tensor | float,
    coefficients: tuple[float, float, bool],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ``L_policy + c_value L_value`` ``[]`` and metrics, for transitions ``[rows]`` on a GPU.

    The equations are those of ``PPO._loss`` (about fifty kernels in torch), for one probability ratio per transition.
    ``log_prob`` and ``value`` require gradients; ``coefficients`` are ``clip_coef``, ``vf_coef``, ``clip_value_loss``.
    """
    old = (batch[key] for key in ("sample_log_prob", "value", "advantage", "return"))
    loss, totals = _Loss.apply(log_prob, value, *old, scale, *coefficients)
    names = ("policy_loss", "value_loss", "approx_kl", "clip_fraction")
    return loss, dict(zip(names, totals[1:].unbind(), strict=True))
