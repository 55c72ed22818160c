"""The simulation on a GPU: the same as on the CPU within tolerances, restarts by mask, and nothing that waits."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from embodichain.envs.env_cfg import GymCfg
from embodichain.envs.registration import load_gym_config
from embodichain.envs.task_env import TaskEnv
from embodichain.envs.tasks.reach import Reach
from embodichain.errors import ConfigError, SimulationError
from tests.gpu.gpu import make_task, no_waiting, simulates

pytestmark = simulates
TASKS = ["CartPoleRL", "ReachRL", "PushCubeRL", "PickCubeRL"]
WALKERS = ["QuadrupedVelocityRL", "BipedVelocityRL"]
NOISY = {"env": {"observations": {"noise": {"robot/qpos": 0.01}}}}
RANDOMISED = {"env": {"events": {"randomize_friction": {"scale": [0.5, 2.0]}, "randomize_mass": {"scale": [0.5, 2.0]}}}}


def leaves(obs: Any) -> list[Tensor]:
    return [obs[key].cpu() for key in sorted(obs.keys(True, True), key=str)]


def difference(a: Any, b: Any, velocities: bool = True) -> Tensor:
    """Largest difference of each env's observations ``[num_envs]``."""
    pairs = [
        (a[key].cpu(), b[key].cpu())
        for key in a.keys(True, True)
        if velocities or key[-1] not in ("qvel", "linvel", "held")
    ]
    return torch.stack([(x - y).abs().flatten(1).amax(1) for x, y in pairs]).amax(0)


def actions(env: TaskEnv, count: int) -> Tensor:
    return (
        torch.rand(count, env.num_envs, env.action_manager.action_dim, generator=torch.Generator().manual_seed(0)) * 2
        - 1
    )


@pytest.mark.parametrize("task", TASKS)
def test_trajectories_agree_with_the_cpu(task: str) -> None:
    """Half of the envs to 5e-5 per step, nine in ten to 5 cm and 0.05 rad: contacts amplify the rounding of float32."""
    with make_task(task, "cpu") as cpu, make_task(task) as gpu:
        running = torch.ones(cpu.num_envs, dtype=torch.bool)
        for step in range(20):
            action = cpu.expert_action()
            _, reward, terminated, truncated, info = cpu.step(action)
            _, reward2, terminated2, truncated2, info2 = gpu.step(action.cuda())
            error = difference(info["final_observation"], info2["final_observation"], velocities=False)[running]
            assert error.median() < 5e-5 * (step + 1), step
            assert error.quantile(0.9) < 5e-2, step
            assert ((reward - reward2.cpu())[running].abs() < 1e-2).float().mean() > 0.9
            assert (terminated == terminated2.cpu())[running].float().mean() > 0.95
            assert torch.equal(truncated, truncated2.cpu())
            running &= ~(terminated | truncated | terminated2.cpu() | truncated2.cpu())
            if running.sum() < 8:
                break


@pytest.mark.parametrize("task", WALKERS)
def test_walkers_move_as_on_the_cpu(task: str) -> None:
    """Small actions from the same starts, over a change of command and a time limit; rewards agree term by term."""
    changes = {"num_envs": 64, "max_episode_steps": 12, "env": {"command": {"interval": 0.1}}}
    with make_task(task, "cpu", **changes) as cpu, make_task(task, **changes) as gpu:
        cpu.reset(seed=3), gpu.reset(seed=3)
        for step, action in enumerate(0.3 * actions(cpu, 20)):
            obs, reward, _, truncated, info = cpu.step(action)
            obs2, reward2, _, truncated2, info2 = gpu.step(action.cuda())
            error = difference(obs, obs2, velocities=False)
            assert error.median() < 2e-4 * (step % 12 + 1), step
            assert torch.equal(obs["command", "velocity"], obs2["command", "velocity"].cpu())
            assert torch.equal(obs["robot", "action"], obs2["robot", "action"].cpu())
            assert torch.equal(truncated, truncated2.cpu())
            assert ((reward - reward2.cpu()).abs() < 2e-2).float().mean() > 0.9
            assert info["rewards"].keys() == info2["rewards"].keys()
        assert gpu._graphed is not None
        assert gpu._graphed._replay is not None


@pytest.mark.parametrize("task", TASKS + WALKERS)
def test_episodes_start_as_on_the_cpu(task: str) -> None:
    with make_task(task, "cpu") as cpu, make_task(task) as gpu:
        (obs, info), (obs2, info2) = cpu.reset(seed=11), gpu.reset(seed=11)
        assert torch.equal(info["episode_seed"], info2["episode_seed"].cpu())
        assert difference(obs, obs2).max() < 1e-6
        again, _ = gpu.reset(seed=info["episode_seed"].cuda())
        assert difference(obs2, again).max() == 0.0


def test_seeds_give_the_same_run_twice() -> None:
    """The same episodes to the bit; the same movements up to the order in which contacts are added up."""
    runs = []
    for _ in range(2):
        with make_task(num_envs=128, max_episode_steps=6, **NOISY) as env:
            env.reset(seed=1)
            runs.append([env.step(action.cuda()) for action in actions(env, 14)])
    for (obs, _, _, truncated, info), (obs2, _, _, truncated2, info2) in zip(*runs, strict=True):
        begins = truncated.cpu()
        assert torch.equal(info["episode_seed"], info2["episode_seed"])
        assert torch.equal(truncated, truncated2)
        assert (difference(obs, obs2)[begins] == 0.0).all()
        assert difference(info["final_observation"], info2["final_observation"]).quantile(0.9) < 1e-4


@pytest.mark.parametrize("changes", [{}, RANDOMISED, NOISY])
def test_a_recorded_step_is_the_ordinary_step(changes: dict[str, Any]) -> None:
    with make_task(max_episode_steps=7, **changes) as plain, make_task(max_episode_steps=7, **changes) as recorded:
        plain._graphed = None
        for action in actions(plain, 25):
            recorded.set_state(plain.get_state())
            a, b = plain.step(action.cuda()), recorded.step(action.cuda())
            assert difference(a[0], b[0]).max() < 1e-4
            assert difference(a[4]["final_observation"], b[4]["final_observation"]).max() < 1e-4
            torch.testing.assert_close(a[1], b[1], rtol=1e-4, atol=1e-4)
            assert torch.equal(a[2], b[2])
            assert torch.equal(a[3], b[3])
            assert torch.equal(a[4]["episode_seed"], b[4]["episode_seed"])
        assert recorded._graphed is not None
        assert recorded._graphed._replay is not None
        state, state2 = plain.get_state(), recorded.get_state()
        for key in ("streams", "step"):
            assert torch.equal(state[key], state2[key])
        for key in state["model"].keys():  # noqa: SIM118 - a TensorDict iterates over its rows
            assert torch.equal(state["model", key], state2["model", key])


@pytest.mark.parametrize("changes", [{}, RANDOMISED])
def test_nothing_in_a_step_waits_for_the_device(changes: dict[str, Any]) -> None:
    with make_task(num_envs=256, max_episode_steps=5, **changes) as env:
        given = actions(env, 30).cuda()
        for action in given[:6]:
            env.step(action)
        with no_waiting():
            results = [env.step(action) for action in given[6:]]
        assert sum(int(result[3].sum()) for result in results) >= 4 * env.num_envs


def test_what_was_returned_stays() -> None:
    with make_task(num_envs=16) as env:
        given = actions(env, 8).cuda()
        seen = [env.step(action) for action in given]
        copies = [[leaf.clone() for leaf in leaves(obs)] for obs, *_ in seen]
        for _ in range(3):
            env.step(given[0])
        for (obs, *_), copy in zip(seen, copies, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(leaves(obs), copy, strict=True))


@pytest.mark.parametrize("changes", [{}, RANDOMISED])
def test_a_state_is_restored(changes: dict[str, Any]) -> None:
    with make_task(max_episode_steps=9, **changes) as env:
        given = actions(env, 16).cuda()
        for action in given[:6]:
            env.step(action)
        state = env.get_state()
        first = [env.step(action) for action in given[6:]]
        env.set_state(state)
        assert (env.get_state() == state).all()
        second = [env.step(action) for action in given[6:]]
        for a, b in zip(first, second, strict=True):
            assert difference(a[4]["final_observation"], b[4]["final_observation"]).quantile(0.9) < 1e-4
            assert torch.equal(a[4]["episode_seed"], b[4]["episode_seed"])
        env.set_state(state[:3], env_ids=[5, 6, 7])
        assert (env.get_state()[5:8] == state[:3]).all()


def test_friction_and_mass_are_drawn_per_env_and_act() -> None:
    with make_task(max_episode_steps=4, **RANDOMISED) as env, make_task(device="cpu", **RANDOMISED) as cpu:
        body = env.physics.model.body("cube").id
        nominal = float(env.physics.model.body_mass[body])
        mass = env.physics.model_field("body_mass")[:, body].clone()
        assert mass.min() < 0.8 * nominal < 1.5 * nominal < mass.max()
        assert torch.allclose(mass.cpu().double(), cpu.physics.model_field("body_mass")[:, body], rtol=1e-6)
        for action in actions(env, 6).cuda():
            env.step(action)
        assert (env.physics.model_field("body_mass")[:, body] != mass).all()
        derived = env.physics._wp.to_torch(env.physics._model.body_invweight0)[:, body, 0]  # type: ignore[attr-defined]
        fresh = env.physics.model_field("body_mass")[:, body]
        env.step(torch.zeros(env.num_envs, 6, device="cuda"))
        assert torch.allclose(derived * fresh, torch.ones_like(fresh), rtol=1e-3)  # 1 / mass for a free body


def test_a_world_that_breaks_starts_over_alone() -> None:
    with make_task(num_envs=8) as env:
        for action in actions(env, 5).cuda():
            env.step(action)
        env.physics.qvel[3] = float("nan")
        obs, reward, terminated, truncated, info = env.step(torch.zeros(8, 6, device="cuda"))
        assert truncated.tolist() == [i == 3 for i in range(8)]
        assert not terminated.any()
        assert all(leaf.isfinite().all() for leaf in [*leaves(obs), *leaves(info["final_observation"]), reward.cpu()])


class _Waits(Reach):
    """Looks at a number in the middle of a step."""

    def success(self, scene: dict[str, Tensor]) -> Tensor:
        near = super().success(scene)
        return near if float(near.sum()) >= 0 else ~near


def test_a_task_that_waits_runs_unrecorded(caplog: pytest.LogCaptureFixture) -> None:
    from embodichain.envs.physics.mujoco_warp import MujocoWarpPhysics

    cfg: GymCfg = load_gym_config("ReachRL", num_envs=16, seed=3)
    env = TaskEnv(cfg, _Waits, MujocoWarpPhysics(_Waits.build_model(cfg), 16))
    with caplog.at_level(logging.WARNING), env, make_task("ReachRL", num_envs=16) as plain:
        for action in actions(env, 10).cuda():
            a, b = env.step(action), plain.step(action)
            assert difference(a[4]["final_observation"], b[4]["final_observation"]).max() < 1e-3
    assert "runs without CUDA graphs" in caplog.text


def test_errors_say_what_to_change() -> None:
    from embodichain.envs.physics.mujoco_warp import MujocoWarpPhysics

    with pytest.raises(ConfigError, match="this machine has"):
        make_task(device="cuda:99")
    with pytest.raises(ConfigError, match="num_envs"):
        make_task(num_envs=20_000_000)
    model = Reach.build_model(load_gym_config("ReachRL"))
    for num_envs in (20_000_000, 2_000_000_000):
        with pytest.raises(SimulationError, match="use fewer num_envs"):
            MujocoWarpPhysics(model, num_envs)
    with make_task(num_envs=8) as env:  # and the device still works
        env.step(torch.zeros(8, 6, device="cuda"))
