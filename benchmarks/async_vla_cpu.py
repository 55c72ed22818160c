"""Part (a): a policy whose inference happens elsewhere and takes 100 ms, real simulation, real updates."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.async_vla_runs import Sizes, Way, measure_stages, run
from embodichain.agents.rl.algo import PPO, PPOCfg
from embodichain.agents.rl.models import Policy, build_policy
from embodichain.envs.registration import make
from embodichain.envs.vec_env import VecEnv

INFERENCE_SECONDS = 0.1
_STEP = 1.8
"""Inferences that a simulated step of all envs lasts; half of them then take little less than one."""
_NETWORK = {"type": "mlp", "hidden_sizes": [128, 128], "activation": "elu"}
"""That of the task's own config. What it computes is computed here, inside of the 100 ms, and takes about 5 of them."""
_PROBE_ENVS = 256


class RemotePolicy(Policy):
    """A policy whose inference happens elsewhere: every call takes the same time, in which this machine is free."""

    def __init__(self, inner: Policy) -> None:
        super().__init__()
        self.inner = inner

    def _elsewhere(self, function: Callable[..., Any], *args: Any) -> Any:
        began = time.perf_counter()
        result = function(*args)
        time.sleep(max(0.0, INFERENCE_SECONDS - (time.perf_counter() - began)))
        return result

    def act(self, obs: Any, state: Tensor | None = None, deterministic: bool = False) -> Any:
        """Choose actions."""
        self.inner.generator = self.generator
        return self._elsewhere(self.inner.act, obs, state, deterministic)

    def state_value(self, obs: Any, state: Tensor | None = None) -> Tensor:
        """Return values."""
        return self._elsewhere(self.inner.state_value, obs, state)

    def get_action(self, obs: Any, deterministic: bool = False) -> Any:
        """Choose actions."""
        return self.act(obs, None, deterministic)[:3]

    def get_value(self, obs: Any) -> Tensor:
        """Return values."""
        return self.state_value(obs)

    def evaluate_actions(self, obs: Any, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Evaluate actions for an update, which happens here."""
        return self.inner.evaluate_actions(obs, actions)

    def update_normalizer(self, obs: Any) -> None:
        """Take in observations."""
        self.inner.update_normalizer(obs)


def _make_env(num_envs: int) -> VecEnv:
    return make("PushCubeRL", num_envs=num_envs, seed=0, num_threads=1)


class RemoteInference:
    """``PushCubeRL``; simulation and update have a core each.

    A simulated step of all envs takes somewhat less than two inferences, so that two groups keep both sides busy, and
    an update nearly as long as collecting a rollout in two groups: all three stages are comparable.
    """

    packages = ("torch", "mujoco")
    title, score_name = "PushCubeRL, inference of 100 ms", "mean reward"

    def __init__(self, rollouts: int, sizes: Sizes | None = None) -> None:
        torch.set_num_threads(1)
        self.make_env = self.make_apart = _make_env
        self.processes = 2
        self.sizes = sizes or self._calibrated(rollouts)

    def _calibrated(self, rollouts: int) -> Sizes:
        env = _make_env(_PROBE_ENVS)
        env.reset(seed=0)
        action = torch.zeros(_PROBE_ENVS, *(env.action_space.shape or ()))
        began = time.perf_counter()
        for _ in range(10):
            env.step(action)
        step = (time.perf_counter() - began) / 10
        env.close()
        num_envs = max(2, int(_PROBE_ENVS * _STEP * INFERENCE_SECONDS / step) // 64 * 64)
        self.sizes = Sizes(num_envs, 8, rollouts, epochs=1)
        update = run(self, "sync", seed=0, rollouts=2).update
        rest = measure_stages(self, Way(1)).rest
        collect = measure_stages(self, Way(2)).bound(2, self.sizes.num_steps, rest)
        return replace(self.sizes, epochs=max(1, int(collect / update)))

    def learner(self, env: VecEnv, seed: int) -> PPO:
        """Return PPO with a small network."""
        torch.manual_seed(seed)
        block = {"name": "actor_critic", "actor": _NETWORK, "critic": _NETWORK, "normalize_obs": True}
        policy = RemotePolicy(build_policy(block, env.observation_space, env.action_space, "cpu"))
        batch = self.sizes.num_envs * self.sizes.num_steps // 4
        epochs = self.sizes.epochs
        return PPO(PPOCfg(batch_size=batch, n_epochs=epochs, learning_rate=1e-3, gamma=0.98, ent_coef=0.002), policy)

    def score(self, learner: PPO, statistics: dict[str, float], rewards: float) -> float:
        """Return the mean reward of a rollout."""
        return rewards

    def final_score(self, learner: PPO) -> float | None:
        """Return nothing: the last rollouts tell."""
        return None

    def machine(self) -> dict[str, str]:
        """Return nothing: the processor is described already."""
        return {}

    def words(self) -> list[str]:
        """Say what is measured."""
        return [
            f"inference is a sleep of {1000 * INFERENCE_SECONDS:.0f} ms per call, off the cores; simulation and update "
            "are real, on a core each",
            f"sizes are chosen so that a step of all envs takes {_STEP} inferences, and an update at most as long as a "
            "rollout in two groups",
        ]
