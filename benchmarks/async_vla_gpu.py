"""Part (b): a VLA of 128 M parameters with a camera; simulation and pictures on the CPU, the rest on a GPU.

The policy first imitates the scripted expert, and its value head learns what that is worth. All runs start from there.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from benchmarks.async_vla_runs import Sizes, measure_stages, run
from benchmarks.timing import cores
from embodichain.agents.rl.algo import PPO, PPOCfg
from embodichain.agents.rl.algo.imitation import Imitation, ImitationCfg
from embodichain.agents.rl.collector import SyncCollector
from embodichain.agents.rl.models import VLAPolicy, build_policy
from embodichain.agents.rl.utils.evaluation import evaluate
from embodichain.envs.chunks import chunked
from embodichain.envs.env_cfg import LanguageCfg
from embodichain.envs.groups import make_grouped
from embodichain.envs.registration import make
from embodichain.envs.task_env import TaskEnv
from embodichain.envs.tasks.push_cube_language import named_goal
from embodichain.envs.vec_env import VecEnv

_ROOT = Path(__file__).parent.parent
GYM_CONFIG = _ROOT / "configs" / "agents" / "rl" / "push_cube" / "gym_config_language.json"
CHUNK = 4
_NOISE = 0.1  # on the expert's actions, so that there is something to correct
_MODEL = {"chunk_size": CHUNK, "num_points": 4, "init_log_std": -2.0}
_LARGE = {**_MODEL, "width": 1024, "depth": 6, "num_heads": 16, "hidden_size": 512}
_SMALL = {**_MODEL, "width": 32, "depth": 1, "num_heads": 2, "hidden_size": 32, "patch_size": 16}


def _make_task(num_threads: int, num_envs: int, cameras: bool = True) -> TaskEnv:
    overrides: dict[str, Any] = {} if cameras else {"env": {"observations": {"cameras": []}}}
    env = make(str(GYM_CONFIG), num_envs=num_envs, num_threads=num_threads, **overrides)
    if not isinstance(env, TaskEnv):
        raise TypeError(f"{GYM_CONFIG} is no task of this package")
    return env


def _make_chunked(num_threads: int, num_envs: int) -> VecEnv:
    return chunked(_make_task(num_threads, num_envs), CHUNK)


class CameraVLA:
    """``PushCubeLanguageRL`` seen through a camera of 64x64 pixels, four actions per decision."""

    packages = ("torch", "mujoco", "tensordict")
    title, score_name = "PushCubeLanguageRL, VLA on camera pictures", "success of finished episodes"

    def __init__(
        self, rollouts: int | None, small: bool, worker: Literal["thread", "process"], sizes: Sizes | None
    ) -> None:
        self.worker: Literal["thread", "process"] = worker
        self.small, self.device = small, torch.device("cpu" if small else "cuda")
        self._start: VLAPolicy | None = None
        self._last_score = 0.0
        if small:
            torch.set_num_threads(1)
        self.sizes = sizes or Sizes(8, 4, rollouts or 3, 1) if small else sizes or Sizes(64, 8, rollouts or 30, 1)
        self._eval_env = self._make(16 if small else 128)
        began = time.monotonic()
        self._prepare()
        self.seconds_to_prepare = time.monotonic() - began
        if sizes is None and not small:
            self.sizes = self._calibrated()

    # --- what is run ----------------------------------------------------------------------------------------------

    def maker(self, groups: int, num_envs: int) -> Callable[[], VecEnv]:
        """Return what makes environments of decisions."""
        return partial(make_grouped, partial(_make_chunked, 1 if self.small else 0), num_envs, groups)

    def learner(self, env: VecEnv, seed: int) -> PPO:
        """Return PPO with a copy of the policy that all runs start from."""
        torch.manual_seed(seed)
        self._last_score = 0.0
        return PPO(self._cfg(2e-5, self.sizes.epochs), copy.deepcopy(self._policy()))

    def score(self, learner: PPO, statistics: dict[str, float], rewards: float) -> float:
        """Return the share of episodes that succeeded among those that ended in a rollout."""
        self._last_score = statistics.get("episode/success", self._last_score)
        return self._last_score

    def final_score(self, learner: PPO) -> float | None:
        """Return the success over episodes that are the same for all."""
        return _success(evaluate(learner.policy, self._eval_env, 32 if self.small else 256, seed=12345))

    def machine(self) -> dict[str, str]:
        """Name the GPU."""
        return {"gpu": "none" if self.small else torch.cuda.get_device_name()}

    def words(self) -> list[str]:
        """Say what is measured."""
        parameters = sum(parameter.numel() for parameter in self._policy().parameters())
        return [
            f"a VLA of {parameters / 1e6:.1f} M parameters on {self.device}; simulation and pictures of 64x64 on "
            f"{cores()} cores of a CPU; gradient steps in float32, not recorded as CUDA graphs",
            f"it imitated the expert first: {self.start_success:.0%} of episodes succeed before any reinforcement "
            f"({self.seconds_to_prepare:.0f} s, shared by all runs)",
            "epochs are chosen so that an update takes at most as long as a rollout in two groups",
        ]

    # --- before the runs ------------------------------------------------------------------------------------------

    def _make(self, num_envs: int, cameras: bool = True) -> TaskEnv:
        return _make_task(1 if self.small else 0, num_envs, cameras)

    def _policy(self) -> VLAPolicy:
        if self._start is None:
            raise RuntimeError("the policy is not prepared")
        return self._start

    def _cfg(self, learning_rate: float, epochs: int) -> PPOCfg:
        batch = self.sizes.num_envs * self.sizes.num_steps // 4
        return PPOCfg(
            batch_size=batch,
            n_epochs=epochs,
            learning_rate=learning_rate,
            gamma=0.98,
            max_grad_norm=1.0,
            cuda_graphs=False,
        )

    def _prepare(self) -> None:
        torch.manual_seed(0)
        env = self._eval_env
        block = {"model_class": "tiny_vla", "model_config": _SMALL if self.small else _LARGE}
        spaces = env.observation_space, env.action_space
        policy = build_policy({"name": "vla", "vla_config": block}, *spaces, str(self.device))
        if not isinstance(policy, VLAPolicy):
            raise TypeError(f"expected a VLAPolicy, got {type(policy).__name__}")
        self._start = policy
        products = torch.backends.cuda.matmul
        products.fp32_precision = "tf32"  # for the imitation alone
        self._imitate(policy, *((2, 10, 16) if self.small else (64, 1000, 256)))
        products.fp32_precision = "ieee"
        self._learn_values(policy, 1 if self.small else 8)
        self.start_success = self.final_score(PPO(self._cfg(1e-5, 1), policy)) or 0.0

    def _imitate(self, policy: VLAPolicy, decisions: int, steps: int, batch_size: int) -> None:
        obs, action, points = (part.to(self.device) for part in self._demonstrations(decisions))
        imitation = Imitation(ImitationCfg(learning_rate=3e-4, total_steps=steps, warmup_steps=steps // 10), policy)
        for _ in range(steps):
            rows = torch.randint(len(points), (batch_size,), device=self.device)
            seen = obs[rows].unsqueeze(1).expand(batch_size, CHUNK)
            chunks = TensorDict({"observation": seen, "action": action[rows]}, batch_size=[batch_size, CHUNK])
            imitation.update(chunks, points[rows])

    def _learn_values(self, policy: VLAPolicy, rollouts: int) -> None:
        """Let the value head learn what the policy is worth, and nothing else."""
        for name, parameter in policy.named_parameters():
            parameter.requires_grad_("to_value" in name)
        env = self.maker(1, self.sizes.num_envs)()
        learner = PPO(self._cfg(1e-3, 4), policy)
        collector = SyncCollector(env, policy, self.device)
        collector.reset(seed=1)
        for _ in range(rollouts):
            learner.update(collector.collect(self.sizes.num_steps))
        env.close()
        policy.requires_grad_(True)

    def _demonstrations(self, decisions: int) -> tuple[TensorDict, Tensor, Tensor]:
        """Return what the expert sees ``[n]``, what it does ``[n, CHUNK, action_dim]``, and where cube and goal are.

        It is simulated without cameras; pictures of the states in which a decision is due are taken afterwards.
        """
        env = self._make(8 if self.small else 256, cameras=False)
        env.reset(seed=2)
        states, actions, whole = [], [], []
        for _ in range(decisions):
            states.append(env.get_state())
            taken, running = [], torch.ones(env.num_envs, dtype=torch.bool)
            for index in range(CHUNK):
                taken.append(env.expert_action())
                noisy = taken[-1] + _NOISE * torch.randn_like(taken[-1])
                _, _, terminated, truncated, _ = env.step(noisy.clamp(-1.0, 1.0))
                if index < CHUNK - 1:  # an end after the last action is none inside the chunk
                    running &= ~(terminated | truncated)
            actions.append(torch.stack(taken, dim=1))
            whole.append(running)
        env.close()
        keep = torch.cat(whole)
        obs = self._pictures(states)[keep]
        goal = named_goal(obs, env.cfg.env.language or LanguageCfg())
        return obs, torch.cat(actions)[keep], torch.cat((obs["object", "pos"][:, :2], goal), dim=1)

    def _pictures(self, states: Sequence[TensorDictBase]) -> TensorDict:
        """Return what is seen in all these states; several threads draw."""
        workers = 1 if self.small else min(8, cores())
        envs = [self._make(states[0].batch_size[0]) for _ in range(workers)]

        def look(worker: int) -> list[TensorDict]:
            return [envs[worker].set_state(state).clone() for state in states[worker::workers]]

        with ThreadPoolExecutor(workers) as pool:
            seen = list(pool.map(look, range(workers)))
        for env in envs:
            env.close()
        return torch.cat([seen[i % workers][i // workers] for i in range(len(states))])

    def _calibrated(self) -> Sizes:
        """Choose the number of epochs."""
        update = run(self, "sync", seed=0, rollouts=2).update
        collect = measure_stages(self, groups=2).bound(2, self.sizes.num_steps)
        return replace(self.sizes, epochs=min(10, max(1, int(collect / update))))


def _success(evaluation: Any) -> float:
    return float(evaluation.summary.success_rate or 0.0)
