"""Part (b): a VLA of 129 M parameters with a camera; simulation and pictures on the CPU, the rest on a GPU.

The recipe is that of ``examples/agents/rl/vla_sft_then_rl.py``, with a larger model and larger pictures: the policy
imitates the scripted expert, its value learns what that is worth, and then reinforcement trains the heads. All runs
start from the same policy.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from benchmarks.async_vla_runs import Sizes
from benchmarks.timing import cores
from embodichain.agents.rl.algo import PPO, PPOCfg
from embodichain.agents.rl.algo.imitation import Imitation, ImitationCfg
from embodichain.agents.rl.algo.warm_up import warm_up_value
from embodichain.agents.rl.models import VLAPolicy, build_policy
from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.models.vla import save_vla_model
from embodichain.agents.rl.models.vla.freezing import freeze_but
from embodichain.agents.rl.utils.evaluation import evaluate
from embodichain.config import load_config
from embodichain.envs.chunks import chunked
from embodichain.envs.env_cfg import LanguageCfg
from embodichain.envs.groups import make_grouped
from embodichain.envs.registration import make
from embodichain.envs.task_env import TaskEnv
from embodichain.envs.tasks.push_cube_language import named_goal
from embodichain.envs.vec_env import VecEnv

CONFIGS = Path(__file__).parent.parent / "configs" / "agents" / "rl" / "push_cube"
CHUNK = 4
_EXPERT_STEPS = 40  # the expert is careful and needs more time than an episode has
_NOISE = 0.1  # on the expert's actions, so that there is something to correct
_TRAINED = ["to_action", "to_value"]
_MODEL = {"chunk_size": CHUNK, "num_points": 4, "init_log_std": -1.8, "value_shapes_perception": False}


@dataclass(frozen=True)
class Scale:
    """What is large on a GPU and small on a CPU."""

    model: dict[str, Any]
    pixels: int
    sizes: Sizes
    expert_envs: int
    expert_decisions: int
    imitation_steps: int
    imitation_batch: int
    eval_envs: int
    episodes: int
    """Of an evaluation."""
    num_threads: int
    """Of a simulation; 0: all cores."""


LARGE = Scale(
    model={"width": 1024, "depth": 6, "num_heads": 16, "hidden_size": 512, "patch_size": 16},
    pixels=128,
    sizes=Sizes(num_envs=64, num_steps=16, rollouts=25, epochs=4),
    expert_envs=256,
    expert_decisions=64,
    imitation_steps=800,
    imitation_batch=256,
    eval_envs=128,
    episodes=256,
    num_threads=0,
)
SMALL = Scale(
    model={"width": 32, "depth": 1, "num_heads": 2, "hidden_size": 32, "patch_size": 16},
    pixels=48,
    sizes=Sizes(num_envs=8, num_steps=4, rollouts=3, epochs=1),
    expert_envs=8,
    expert_decisions=2,
    imitation_steps=10,
    imitation_batch=16,
    eval_envs=16,
    episodes=32,
    num_threads=1,
)


def _make_task(scale: Scale, num_envs: int, cameras: bool = True, max_episode_steps: int | None = None) -> TaskEnv:
    config = load_config(CONFIGS / "gym_config_language_small.json")
    seen = config["env"]["observations"]
    seen["cameras"] = [{**cfg, "width": scale.pixels, "height": scale.pixels} for cfg in seen["cameras"] if cameras]
    config["max_episode_steps"] = max_episode_steps or config["max_episode_steps"]
    env = make(config, num_envs=num_envs, num_threads=scale.num_threads)
    if not isinstance(env, TaskEnv):
        raise TypeError(f"{config['id']} is no task of this package")
    return env


def _make_chunked(scale: Scale, num_envs: int) -> VecEnv:
    return chunked(_make_task(scale, num_envs), CHUNK)


class CameraVLA:
    """``PushCubeLanguageRL`` seen through a camera, four actions per decision."""

    packages = ("torch", "mujoco", "tensordict")
    title, score_name = "PushCubeLanguageRL, VLA on camera pictures", "success of finished episodes"

    def __init__(
        self,
        small: bool,
        worker: Literal["thread", "process"],
        sizes: Sizes | None = None,
        rollouts: int | None = None,
        start: Path | None = None,
    ) -> None:
        """Prepare the policy that all runs start from; it is kept in ``start``, or taken from there."""
        self.worker: Literal["thread", "process"] = worker
        self.small, self.device = small, torch.device("cpu" if small else "cuda")
        self.scale = SMALL if small else LARGE
        self.sizes = sizes or replace(self.scale.sizes, rollouts=rollouts or self.scale.sizes.rollouts)
        self._last_score = 0.0
        if small:
            torch.set_num_threads(1)
        else:
            torch.backends.cuda.matmul.fp32_precision = "tf32"  # everywhere: acting and learning agree
        began = time.monotonic()
        self._eval_env = _make_task(self.scale, self.scale.eval_envs)
        self._start = self._prepared(start)
        self.start_success = self._success(self._start)
        self.seconds_to_prepare = time.monotonic() - began

    # --- what is run ----------------------------------------------------------------------------------------------

    def maker(self, groups: int, num_envs: int) -> Callable[[], VecEnv]:
        """Return what makes environments of decisions."""
        return partial(make_grouped, partial(_make_chunked, self.scale), num_envs, groups)

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
        return {"gpu": "none" if self.small else torch.cuda.get_device_name()}

    def words(self) -> list[str]:
        """Say what is measured."""
        sizes = [(parameter.numel() / 1e6, parameter.requires_grad) for parameter in self._start.parameters()]
        every, trained = sum(n for n, _ in sizes), sum(n for n, is_trained in sizes if is_trained)
        pixels = self.scale.pixels
        return [
            f"a VLA of {every:.1f} M parameters on {self.device}, of which reinforcement trains {trained:.1f} M (the "
            "heads); gradient steps with TF32 products, no CUDA graphs",
            f"simulation on {cores()} cores, pictures of {pixels}x{pixels} drawn there, too: one thread for each group",
            f"it imitated the expert first: {self.start_success:.0%} of episodes succeed before any reinforcement "
            f"(made or loaded in {self.seconds_to_prepare:.0f} s, shared by all runs)",
        ]

    # --- before the runs ------------------------------------------------------------------------------------------

    def _cfg(self) -> PPOCfg:
        recipe = load_config(CONFIGS / "train_config_vla.json")["algorithm"]["cfg"]
        batch = self.sizes.num_envs * self.sizes.num_steps // 2
        own = {"batch_size": batch, "n_epochs": self.sizes.epochs, "mixed_precision": "tf32", "cuda_graphs": False}
        return PPOCfg.from_dict({**recipe, **own})

    def _success(self, policy: Policy) -> float:
        return float(evaluate(policy, self._eval_env, self.scale.episodes, seed=12345).summary.success_rate or 0.0)

    def _prepared(self, start: Path | None) -> VLAPolicy:
        """Return the policy that all runs start from."""
        torch.manual_seed(0)
        made = start is not None and (start / "config.json").exists()
        settings: dict[str, Any] = {"model_path": str(start)} if made else {"model_config": _MODEL | self.scale.model}
        spaces = self._eval_env.observation_space, self._eval_env.action_space
        block = {"name": "vla", "vla_config": {"model_class": "tiny_vla", **settings}}
        policy = build_policy(block, *spaces, str(self.device))
        if not isinstance(policy, VLAPolicy):
            raise TypeError(f"expected a VLAPolicy, got {type(policy).__name__}")
        if not made:
            self._imitate(policy)
            value = self._cfg().replace(learning_rate=1e-3, lr_schedule="constant")
            env = self.maker(1, self.sizes.num_envs)()
            warm_up_value(policy, env, value, self.sizes.num_steps, rollouts=3)
            env.close()
            if start is not None:
                save_vla_model(policy.model, start)
        freeze_but(policy.model, _TRAINED)
        return policy

    def _imitate(self, policy: VLAPolicy) -> None:
        scale = self.scale
        obs, action, points = (part.to(self.device) for part in self._demonstrations())
        steps, batch_size = scale.imitation_steps, scale.imitation_batch
        cfg = ImitationCfg(learning_rate=3e-4, total_steps=steps, warmup_steps=max(1, steps // 10))
        imitation = Imitation(cfg, policy)
        for _ in range(steps):
            rows = torch.randint(len(points), (batch_size,), device=self.device)
            seen = obs[rows].unsqueeze(1).expand(batch_size, CHUNK)
            chunks = TensorDict({"observation": seen, "action": action[rows]}, batch_size=[batch_size, CHUNK])
            imitation.update(chunks, points[rows])

    def _demonstrations(self) -> tuple[TensorDict, Tensor, Tensor]:
        """Return what the expert sees ``[n]``, what it does ``[n, CHUNK, action_dim]``, and where cube and goal are.

        It is simulated without cameras; pictures of the states in which a decision is due are taken afterwards.
        """
        env = _make_task(self.scale, self.scale.expert_envs, cameras=False, max_episode_steps=_EXPERT_STEPS)
        env.reset(seed=2)
        states, actions, whole = [], [], []
        for _ in range(self.scale.expert_decisions):
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
        count = states[0].batch_size[0]
        envs = [_make_task(self.scale, count, max_episode_steps=_EXPERT_STEPS) for _ in range(workers)]

        def look(worker: int) -> list[TensorDict]:
            return [envs[worker].set_state(state).clone() for state in states[worker::workers]]

        with ThreadPoolExecutor(workers) as pool:
            seen = list(pool.map(look, range(workers)))
        for env in envs:
            env.close()
        return torch.cat([seen[i % workers][i // workers] for i in range(len(states))])
