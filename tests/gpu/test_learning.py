"""Learning on a GPU: replayed gradient steps do what ordinary ones do, and collecting never waits."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from embodichain.agents.rl.algo import ppo
from embodichain.agents.rl.algo.advantages import compute_gae
from embodichain.agents.rl.algo.base import MinibatchAlgorithm
from embodichain.agents.rl.algo.distillation import Distillation, DistillationCfg, Teacher
from embodichain.agents.rl.algo.grpo import GRPO, GRPOCfg
from embodichain.agents.rl.algo.ppo import PPO, PPOCfg
from embodichain.agents.rl.collector.sync_collector import SyncCollector
from embodichain.agents.rl.models import ActorCritic, build_policy
from embodichain.agents.rl.models.mlp import MLP, in_blocks
from embodichain.agents.rl.models.policy import Policy
from embodichain.extras import available
from tests.gpu.gpu import make_task, no_waiting, on_gpu

pytestmark = on_gpu
OBS, ACT, ENVS, STEPS = 12, 3, 64, 16


def make_policy(name: str = "actor_critic", **settings: Any) -> Policy:
    torch.manual_seed(0)
    return build_policy({"name": name, "normalize_obs": True, **settings}, OBS, ACT, "cuda")


def make_rollout(policy: Policy, seed: int) -> TensorDict:
    """What a policy might have done, time-major underneath as collectors store it."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (STEPS, ENVS)

    def normal(*more: int) -> Tensor:
        return torch.randn(*shape, *more, device="cuda", generator=generator)

    obs, action = normal(OBS), normal(ACT)
    done = normal() > 1.5
    parts = {
        "observation": obs,
        "action": action,
        "reward": normal(),
        "terminated": done,
        "truncated": torch.zeros_like(done),
        "done": done,
        "next_value": normal(),
        "policy_version": torch.zeros(shape, dtype=torch.int64, device="cuda"),
    }
    with torch.no_grad():
        hidden = policy.initial_state(ENVS)
        if hidden is not None:
            parts["hidden"] = hidden.expand(STEPS, *hidden.shape).contiguous()
        flat = TensorDict({"observation": obs.flatten(0, 1), "action": action.flatten(0, 1)}, [STEPS * ENVS])
        if not policy.is_recurrent:
            log_prob, _, value = policy.evaluate(flat)
            parts |= {"sample_log_prob": log_prob.view(shape), "value": value.view(shape)}
        else:
            parts |= {"sample_log_prob": normal() - 4.0, "value": normal()}
    return TensorDict(parts, batch_size=shape).transpose(0, 1)


def make_like(algorithm: MinibatchAlgorithm) -> Policy:
    """Return the policy as it was at first."""
    policy = algorithm.policy
    if isinstance(policy, _Waits | _CannotBeRecorded):
        torch.manual_seed(0)
        return type(policy)(OBS, ACT, "cuda", MLP(OBS, ACT, [32]), MLP(OBS, 1, [32]))
    memory = {"memory": {"hidden_size": 32}} if policy.is_recurrent else {}
    return make_policy("actor_critic" if policy.has_critic else "actor_only", **memory)


def train(algorithm: MinibatchAlgorithm, updates: int = 3) -> list[dict[str, float]]:
    metrics = []
    for seed in range(updates):
        torch.manual_seed(seed)
        algorithm.progress = seed / updates
        metrics.append(algorithm.update(make_rollout(algorithm.policy, seed)))
    return metrics


def parameters(algorithm: MinibatchAlgorithm) -> Tensor:
    return torch.cat([p.detach().flatten() for p in algorithm.policy.parameters()])


def assert_same_weights(a: MinibatchAlgorithm, b: MinibatchAlgorithm) -> None:
    """Both went the same way: apart by 2% of the way at most.

    Adam gives a weight whose gradient is nearly zero a step of full size in a direction that rounding decides.
    """
    start = torch.cat([p.detach().flatten() for p in make_like(a).parameters()])
    assert (parameters(a) - parameters(b)).norm() < 0.02 * (parameters(a) - start).norm()


def make_ppo(policy: Policy | None = None, **settings: Any) -> PPO:
    cfg = PPOCfg(device="cuda", batch_size=300, n_epochs=3, learning_rate=1e-3, **settings)
    return PPO(cfg, policy or make_policy())


PPO_CASES: list[dict[str, Any]] = [
    {},
    {"lr_schedule": "adaptive", "desired_kl": 1e-3},
    {"lr_schedule": "linear", "clip_value_loss": True},
    {"target_kl": 1e-3},
    {"mixed_precision": "bf16"},
    {"mixed_precision": "tf32"},
    {"clip_coef_high": 0.3, "kl_coef": 0.1, "weight_decay": 0.1},
    {"clip_coef": 0.02, "clip_coef_final": 0.2, "ent_coef": 0.0, "ent_coef_final": 0.1, "clip_value_loss": True},
    {"value_learning_rate": 1e-2, "lr_warmup": 4, "weight_decay": 0.1},
    {"value_learning_rate": 1e-2, "lr_schedule": "adaptive", "desired_kl": 1e-3, "lr_warmup": 1},
]


@pytest.mark.parametrize("settings", PPO_CASES, ids=str)
def test_ppo_learns_the_same_from_replayed_steps(settings: dict[str, Any]) -> None:
    replayed, ordinary = make_ppo(**settings), make_ppo(cuda_graphs=False, **settings)
    for a, b in zip(train(replayed), train(ordinary), strict=True):
        assert a == pytest.approx(b, rel=2e-3, abs=1e-4)
    assert replayed.graphs is not None
    assert sorted(replayed.graphs._graphs) == [256]  # 1024 transitions in four minibatches
    assert sorted(replayed.graphs._evaluations) == ([256] if replayed.optimizer.is_reduced else [])
    assert_same_weights(replayed, ordinary)


def test_ppo_with_memory_learns_the_same() -> None:
    memory = {"memory": {"hidden_size": 32}}
    replayed = make_ppo(make_policy(**memory), sequence_length=8)
    ordinary = make_ppo(make_policy(**memory), sequence_length=8, cuda_graphs=False)
    train(replayed), train(ordinary)
    assert replayed.graphs is not None
    assert replayed.graphs._graphs
    assert_same_weights(replayed, ordinary)


GRPO_CASES: list[dict[str, Any]] = [
    {},
    {"kl_coef": 0.05},
    {"advantage": "trajectory", "ent_coef": 0.01},
    {"baseline": "leave_one_out", "lr_schedule": "adaptive", "desired_kl": 1e-3},
    {"clip_coef": 0.02, "clip_coef_high": 0.05, "clip_coef_final": 0.2, "ent_coef_final": 0.1},
]


@pytest.mark.parametrize("settings", GRPO_CASES, ids=str)
def test_grpo_learns_the_same_from_minibatches_that_are_filled_up(settings: dict[str, Any]) -> None:
    made = [
        GRPO(
            GRPOCfg(device="cuda", batch_size=300, n_epochs=3, learning_rate=1e-3, group_size=8, **settings, **more),
            make_policy("actor_only"),
        )
        for more in ({}, {"cuda_graphs": False})
    ]
    for a, b in zip(*(train(algorithm) for algorithm in made), strict=True):
        assert a == pytest.approx(b, rel=2e-3, abs=1e-3)
    assert made[0].graphs is not None
    assert list(made[0].graphs._graphs) == [300]
    assert_same_weights(made[0], made[1])


@pytest.mark.skipif(not available("triton"), reason="needs Triton")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("given", [torch.uint8, torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("shape", [(5, 64, 64, 3), (70_000, 10, 6, 4), (2, 224, 224, 1), (0, 8, 8, 3)], ids=str)
def test_images_are_arranged_in_blocks(
    shape: tuple[int, ...], channels_last: bool, given: torch.dtype, dtype: torch.dtype
) -> None:
    from embodichain.agents.rl.models.image_kernel import arrange_in_blocks

    image = torch.randint(0, 256, shape).to(given).permute(0, 3, 1, 2)
    image = image if channels_last else image.contiguous()
    channels = -(-(4 * shape[3] + 1) // 8) * 8
    found, expected = arrange_in_blocks(image.cuda(), channels, dtype), in_blocks(image, channels, dtype)
    assert found.stride() == expected.stride()
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("loss", ["kl", "mse", "nll"])
def test_a_student_learns_the_same_from_replayed_steps(loss: Any) -> None:
    made = []
    for more in ({}, {"cuda_graphs": False}):
        cfg = DistillationCfg(device="cuda", batch_size=300, n_epochs=3, learning_rate=1e-3, loss=loss, **more)
        algorithm = Distillation(cfg, make_policy())
        torch.manual_seed(7)
        teacher = build_policy({"name": "actor_critic"}, OBS, ACT, "cuda")
        algorithm.teach(Teacher(teacher, OBS, ACT, "there"))
        made.append(algorithm)
    for a, b in zip(*(train(algorithm) for algorithm in made), strict=True):
        assert a == pytest.approx(b, rel=2e-3, abs=1e-4)
    assert made[0].graphs is not None
    assert list(made[0].graphs._graphs) == [256]
    assert_same_weights(made[0], made[1])


def test_a_teacher_acts_in_recorded_decisions() -> None:
    env = make_task("CartPoleRL", num_envs=8)
    spaces = env.observation_space, env.action_space
    cfg = DistillationCfg(device="cuda", teacher_share=(0.5, 0.5), loss="mse", cuda_graphs=False)
    algorithm = Distillation(cfg, build_policy({"name": "actor_critic"}, *spaces, "cuda"))
    algorithm.teach(Teacher(build_policy({"name": "actor_critic"}, *spaces, "cuda"), *spaces, "there"))
    collector = SyncCollector(env, algorithm.acting)
    rollout = collector.collect(12)
    assert collector._decider._choose._recorded is not None
    wanted = algorithm._labels(rollout)
    unclipped = rollout["action"].clamp(-1.0, 1.0)
    torch.testing.assert_close(unclipped[:4], wanted[:4], rtol=1e-4, atol=1e-5)
    assert (unclipped[4:] - wanted[4:]).abs().mean() > 0.1
    env.close()


class _Waits(ActorCritic):
    """Looks at a number in the middle of its evaluation."""

    def evaluate_actions(self, obs: Any, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        log_prob, entropy, value = super().evaluate_actions(obs, actions)
        return log_prob, entropy, value if float(value.detach().sum()) < float("inf") else -value


class _CannotBeRecorded(ActorCritic):
    """Copies from memory that the device cannot reach while it records, without waiting."""

    def evaluate_actions(self, obs: Any, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        log_prob, entropy, value = super().evaluate_actions(obs, actions)
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("not while recording")
        return log_prob, entropy, value


@pytest.mark.parametrize("kind", [_Waits, _CannotBeRecorded])
def test_a_policy_that_cannot_be_recorded_learns_as_usual(
    kind: type[ActorCritic], caplog: pytest.LogCaptureFixture
) -> None:
    def build() -> Policy:
        torch.manual_seed(0)
        return kind(OBS, ACT, "cuda", MLP(OBS, ACT, [32]), MLP(OBS, 1, [32]))

    with caplog.at_level(logging.WARNING):
        replayed, ordinary = make_ppo(build()), make_ppo(build(), cuda_graphs=False)
        for a, b in zip(train(replayed), train(ordinary), strict=True):
            assert a == pytest.approx(b, rel=2e-3, abs=1e-4)
    assert caplog.text.count("runs without CUDA graphs") == 1
    assert_same_weights(replayed, ordinary)


def test_training_goes_on_from_a_saved_state() -> None:
    whole, first = make_ppo(lr_schedule="adaptive"), make_ppo(lr_schedule="adaptive")
    train(whole, 2), train(first, 2)
    second = make_ppo(lr_schedule="adaptive")
    second.policy.load_state_dict(first.policy.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    first.load_state_dict(copy.deepcopy(first.state_dict()))  # its graphs point to memory that is no longer used
    for algorithm in (whole, first, second):
        train(algorithm, 2)
    assert_same_weights(whole, first)
    assert_same_weights(whole, second)
    policy = build_policy({"name": "actor_critic", "normalize_obs": True}, OBS, ACT, "cpu")
    on_cpu = PPO(PPOCfg(batch_size=300, learning_rate=1e-3, lr_schedule="adaptive"), policy)
    on_cpu.load_state_dict(first.state_dict())
    assert on_cpu.optimizer.learning_rate == pytest.approx(first.optimizer.learning_rate)


def test_nothing_waits_between_the_first_step_of_an_update_and_its_report(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = make_ppo(lr_schedule="adaptive")
    train(algorithm, 2)
    calls = []

    def watch(owner: Any, name: str) -> None:
        method = getattr(owner, name)

        def watched(*args: Any) -> Any:
            calls.append(name)
            with no_waiting():
                return method(*args)

        monkeypatch.setattr(owner, name, watched)

    watch(algorithm.graphs, "run_epoch")
    watch(algorithm.optimizer, "adapt_learning_rate")
    algorithm.update(make_rollout(algorithm.policy, 9))
    assert calls == ["run_epoch", "adapt_learning_rate"] * 3


@pytest.mark.parametrize("settings", [{}, {"clip_value_loss": True, "clip_coef": 0.1, "ent_coef": 0.01}], ids=str)
@pytest.mark.parametrize(("rows", "far"), [(1, 0), (255, 0), (4096, 0), (255, 100)])
def test_the_loss_in_one_kernel_is_the_loss_of_the_equations(
    settings: dict[str, Any], rows: int, far: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = make_ppo(make_policy(normalize_value=True), **settings)
    algorithm.policy.update_value_normalizer(torch.randn(64, device="cuda") * 3.0)
    table = torch.randn(rows, OBS + ACT + 4, device="cuda")  # as replayed steps keep it: columns of one table
    names = ("sample_log_prob", "value", "advantage", "return")
    parts = {name: table[:, OBS + ACT + i] for i, name in enumerate(names)}
    batch = TensorDict({"observation": table[:, :OBS], "action": table[:, OBS : OBS + ACT], **parts}, [rows])
    with torch.no_grad():
        batch["sample_log_prob"] = algorithm.policy.evaluate(batch)[0] + 0.2 * batch["sample_log_prob"]
        batch["sample_log_prob"][:far] -= 3000.0  # what is that unlikely would have an infinite ratio
        batch["advantage"][: far // 2] = 0.0
    found = []
    for works in (True, False):
        monkeypatch.setattr(ppo, "kernels_work", lambda _, works=works: works)
        loss, measures = algorithm._loss(batch)
        gradient = torch.autograd.grad(loss, list(algorithm.policy.parameters()))
        found.append((loss, measures, torch.cat([part.flatten() for part in gradient])))
    (loss, measures, gradient), (loss2, measures2, gradient2) = found
    torch.testing.assert_close(loss, loss2, rtol=1e-4, atol=1e-5)
    assert {n: float(x.detach()) for n, x in measures.items()} == pytest.approx(
        {n: float(x.detach()) for n, x in measures2.items()}, rel=1e-3, abs=1e-5
    )
    assert (gradient - gradient2).norm() < 1e-4 * gradient2.norm()


def test_the_loss_in_one_kernel_hides_nothing() -> None:
    from embodichain.agents.rl.algo.kernels import clipped_loss

    log_prob, others = torch.zeros(256, device="cuda"), torch.ones(256, device="cuda")
    log_prob[7] = float("nan")
    batch = TensorDict(dict.fromkeys(("sample_log_prob", "value", "advantage", "return"), others), [256])
    parts = clipped_loss(log_prob, others, batch, 1.0, (0.2, 0.5, False))[1]
    assert parts["approx_kl"].isnan()  # so that a training stops and says so


@pytest.mark.parametrize(("num_envs", "num_steps"), [(1, 1), (5, 3), (4096, 24), (1000, 128)])
@pytest.mark.parametrize("per_step", [False, True])
def test_advantages_are_those_of_the_cpu(num_envs: int, num_steps: int, per_step: bool) -> None:
    torch.manual_seed(num_envs)
    reward, value, next_value = (torch.randn(num_steps, num_envs).t() for _ in range(3))
    terminated = torch.rand(num_steps, num_envs).t() < 0.1
    done = terminated | (torch.rand(num_steps, num_envs).t() < 0.1)
    gamma: float | Tensor = torch.rand(num_steps, num_envs).t() if per_step else 0.97
    inputs = (reward, value, next_value, terminated, done, gamma)
    expected = compute_gae(*inputs, 0.95)  # type: ignore[arg-type]
    found = compute_gae(*(x.cuda() if isinstance(x, Tensor) else x for x in inputs), 0.95)  # type: ignore[arg-type]
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a, b.cpu())


@pytest.mark.skipif(not available("mujoco_warp"), reason="needs the extra 'gpu'")
def test_collecting_never_waits() -> None:
    with make_task(num_envs=128, max_episode_steps=6) as env:
        policy = build_policy({"name": "actor_critic"}, env.observation_space, env.action_space, "cuda")
        collector = SyncCollector(env, policy)
        collector.collect(8)
        with no_waiting():
            rollout = collector.collect(8)
        cut = rollout["truncated"] & ~rollout["terminated"]
        assert cut.sum() > 100
        plain = ~rollout["done"]
        plain[:, -1] = False
        assert torch.equal(rollout["next_value"][:, :-1][plain[:, :-1]], rollout["value"][:, 1:][plain[:, :-1]])
        assert (rollout["next_value"][rollout["terminated"]] == 0.0).all()
        assert (rollout["next_value"][cut] != rollout["value"].roll(-1, 1)[cut]).float().mean() > 0.99
        assert len(collector.episodes) == int(rollout["done"].sum())
        assert {leaf.device.type for leaf in rollout.values(True, True)} == {"cuda"}
