"""Part (b): a VLA of 129 M parameters with a camera; simulation and pictures on the CPU, the rest on a GPU.

The recipe is that of ``examples/agents/rl/vla_sft_then_rl.py``, with a larger model and larger pictures: the policy
imitates the scripted expert, its value learns what that is worth, and then reinforcement trains the heads. All runs
start from the same policy.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from tensordict import TensorDict

from benchmarks.async_vla_runs import Sizes
from benchmarks.async_vla_task import CHUNK, CONFIGS, Scale, demonstrations, make_chunked, make_task
from benchmarks.timing import cores
from embodichain.agents.rl.algo import PPO, PPOCfg
from embodichain.agents.rl.algo.imitation import Imitation, ImitationCfg, warm_up_value
from embodichain.agents.rl.evaluation import evaluate
from embodichain.agents.rl.models import VLAPolicy, build_policy
from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.models.vla import save_vla_model
from embodichain.agents.rl.models.vla.loading import freeze_but
from embodichain.config import load_config
from embodichain.envs.vec_env import VecEnv

TRAINED = {"gaussian": ["to_action", "to_value"], "flow": ["action_head", "to_value"]}
HEADS: dict[str, dict[str, Any]] = {
    "gaussian": {"head": "gaussian"},
    "flow": {"head": "flow", "flow": {"imitation_samples": 8}},
}
_MODEL = {"chunk_size": CHUNK, "num_points": 4, "init_log_std": -1.8, "value_shapes_perception": False}


class CameraVLA:
    """``PushCubeLanguageRL`` seen through a camera, four actions per decision."""

    packages = ("torch", "mujoco", "tensordict")
    title, score_name = "PushCubeLanguageRL, VLA on camera pictures", "success of finished episodes"

    def __init__(
        self,
        scale: Scale,
        sizes: Sizes | None = None,
        rollouts: int | None = None,
        start: Path | None = None,
        head: Literal["gaussian", "flow"] = "gaussian",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Prepare the policy that all runs start from; it is kept in ``start``, or taken from there.

        ``settings`` of PPO take the place of the recipe's.
        """
        self.head, self.settings = head, dict(settings or {})
        self.scale, self.device = scale, torch.device(scale.device)
        self.sizes = sizes or replace(self.scale.sizes, rollouts=rollouts or self.scale.sizes.rollouts)
        self.make_env, self.processes = partial(make_chunked, scale), scale.processes
        threads = scale.num_threads or max(1, cores() // scale.processes)
        self.make_apart = partial(make_chunked, replace(scale, num_threads=threads))
        self._last_score = 0.0
        if scale.device == "cpu":
            torch.set_num_threads(1)
        else:
            torch.backends.cuda.matmul.fp32_precision = "tf32"  # everywhere: acting and learning agree
        began = time.monotonic()
        self._eval_env = make_task(self.scale, self.scale.eval_envs)
        self._start = self._prepared(start)
        self.seconds_to_prepare = time.monotonic() - began

    @cached_property
    def start_success(self) -> float:
        """Success of the policy that all runs start from."""
        return self._success(self._start)

    # --- what is run ----------------------------------------------------------------------------------------------

    def learner(self, env: VecEnv, seed: int) -> PPO:
        """Return PPO with a copy of the policy that all runs start from."""
        torch.manual_seed(seed)
        self._last_score = 0.0
        return PPO(self._cfg(), copy.deepcopy(self._start))

    def score(self, learner: PPO, statistics: dict[str, float], rewards: float) -> float:
        """Return the share of episodes that succeeded among those that ended in a rollout."""
        self._last_score = statistics.get("episode/success", self._last_score)
        return self._last_score

    def final_score(self, learner: PPO) -> float | None:
        """Return the success over episodes that are the same for all."""
        return self._success(learner.policy)

    def machine(self) -> dict[str, str]:
        """Name the GPU."""
        return {"gpu": torch.cuda.get_device_name() if self.device.type == "cuda" else "none"}

    def words(self) -> list[str]:
        """Say what is measured."""
        sizes = [(parameter.numel() / 1e6, parameter.requires_grad) for parameter in self._start.parameters()]
        every, trained = sum(n for n, _ in sizes), sum(n for n, is_trained in sizes if is_trained)
        pixels = self.scale.pixels
        return [
            f"a VLA of {every:.1f} M parameters ({self.head}) on {self.device}, of which reinforcement trains "
            f"{trained:.1f} M (the heads); gradient steps with TF32 products, no CUDA graphs",
            f"simulation on {cores()} cores, pictures of {pixels}x{pixels} drawn there, too: a thread for each group, "
            f"or, apart, {self.processes} processes",
            f"it imitated the expert first: {self.start_success:.0%} of episodes succeed before any reinforcement "
            f"(made or loaded in {self.seconds_to_prepare:.0f} s, shared by all runs)",
        ]

    # --- before the runs ------------------------------------------------------------------------------------------

    def _cfg(self) -> PPOCfg:
        recipe = load_config(CONFIGS / "train_config_vla.json")["algorithm"]["cfg"]
        batch = self.sizes.num_envs * self.sizes.num_steps // 2
        own: dict[str, Any] = {"batch_size": batch, "n_epochs": self.sizes.epochs, "device": str(self.device)}
        if self.head == "flow":
            # The likelihood of the whole chain; without the warm-up Adam's first steps move it by tens of nats.
            own |= {"log_prob_per": "chunk", "lr_warmup": 10}
        return PPOCfg.from_dict({**recipe, **own, "mixed_precision": "tf32", "cuda_graphs": False, **self.settings})

    def _success(self, policy: Policy) -> float:
        return float(evaluate(policy, self._eval_env, self.scale.episodes, seed=12345).summary.success_rate or 0.0)

    def _prepared(self, start: Path | None) -> VLAPolicy:
        """Return the policy that all runs start from."""
        torch.manual_seed(0)
        made = start is not None and (start / "config.json").exists()
        settings: dict[str, Any] = (
            {"model_path": str(start)} if made else {"model_config": _MODEL | self.scale.model | HEADS[self.head]}
        )
        spaces = self._eval_env.observation_space, self._eval_env.action_space
        block = {"name": "vla", "vla_config": {"model_class": "tiny_vla", **settings}}
        policy = build_policy(block, *spaces, str(self.device))
        if not isinstance(policy, VLAPolicy):
            raise TypeError(f"expected a VLAPolicy, got {type(policy).__name__}")
        if not made:
            self._imitate(policy)
            print("the value head learns what that is worth", flush=True)
            value = self._cfg().replace(learning_rate=1e-3, lr_schedule="constant")
            env = self.make_env(self.sizes.num_envs)
            warm_up_value(policy, env, value, self.sizes.num_steps, rollouts=3)
            env.close()
            if start is not None:
                save_vla_model(policy.model, start)
        freeze_but(policy.model, TRAINED[self.head])
        return policy

    def _imitate(self, policy: VLAPolicy) -> None:
        scale = self.scale
        began = time.monotonic()
        obs, action, points = (part.to(self.device) for part in demonstrations(scale))
        print(f"{len(points)} demonstrated decisions in {time.monotonic() - began:.0f} s", flush=True)
        is_flow = self.head == "flow"  # it learns a whole field of velocities, for which it takes longer
        steps, batch_size = scale.imitation_steps * (3 if is_flow else 1), scale.imitation_batch
        cfg = ImitationCfg(learning_rate=5e-4 if is_flow else 3e-4, total_steps=steps, warmup_steps=max(1, steps // 10))
        imitation = Imitation(cfg, policy)
        for step in range(steps):
            if step % 100 == 0:
                print(f"imitation: {step} of {steps} steps, {time.monotonic() - began:.0f} s", flush=True)
            rows = torch.randint(len(points), (batch_size,), device=self.device)
            seen = obs[rows].unsqueeze(1).expand(batch_size, CHUNK)
            chunks = TensorDict({"observation": seen, "action": action[rows]}, batch_size=[batch_size, CHUNK])
            imitation.update(chunks, points[rows])
