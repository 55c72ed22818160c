"""Whole iterations of PPO, collecting and learning, by this package and by a bare loop; and collection alone.

Every function returns a call that does one iteration. What the other libraries do is in ``rl_end_to_end_peers.py``.
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from benchmarks.rl_work import Call, Work, is_discrete, sizes, tanh_network, vector_env
from embodichain.agents.rl.config import TrainCfg, complete, override
from embodichain.agents.rl.runs import RunFolder
from embodichain.agents.rl.train import build_trainer
from embodichain.agents.rl.trainer import Trainer
from embodichain.utils.torch_runtime import torch_threads

LOG_2PI_HALF = 0.9189385
PUSH_CUBE = {"num_envs": 256, "num_steps": 32, "std": 0.6}
"""As in the shipped config; the deviation of an untrained policy's actions is exp(-0.5)."""

_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends


def trainer_for(work: Work, gym_config: dict[str, Any]) -> Trainer:
    """Return a trainer as ``embodichain train`` makes it, logs and NaN guard included, without evaluations."""
    network = {"type": "mlp", "network_cfg": {"hidden_sizes": [work.width, work.width], "activation": "tanh"}}
    _FOLDERS.append(tempfile.TemporaryDirectory())
    cfg = TrainCfg.from_dict(
        {
            "trainer": {
                "gym_config": gym_config,
                "num_envs": work.num_envs,
                "buffer_size": work.num_steps,
                "iterations": 10**9,
                "enable_eval": False,
                "save_freq": 0,
                "run_dir": _FOLDERS[-1].name,
            },
            "policy": {"name": "actor_critic", "actor": network, "critic": network},
            "algorithm": {
                "name": "ppo",
                "cfg": {
                    "learning_rate": work.learning_rate,
                    "n_epochs": work.epochs,
                    "batch_size": work.batch_size,
                    "gamma": work.gamma,
                    "gae_lambda": work.gae_lambda,
                    "clip_coef": work.clip,
                    "vf_coef": work.value_weight,
                    "max_grad_norm": work.max_grad_norm,
                },
            },
        }
    )
    settled = override(complete(cfg), [])
    trainer = build_trainer(settled, RunFolder.create(settled), console=Console(quiet=True))
    trainer.collector.reset(seed=0)
    return trainer


def iteration(trainer: Trainer) -> Call:
    """Return a call that does what the loop of ``Trainer.train`` does between two evaluations."""

    def call() -> None:
        began, before = time.perf_counter(), trainer.global_step
        rollout = trainer._collect()
        collected = time.perf_counter()
        trainer.algorithm.progress = trainer._progress()
        with torch_threads(trainer._update_threads):
            measures = trainer.algorithm.update(rollout)
        if trainer.guard is not None:
            trainer.guard.check_update(measures, rollout, before)
        trainer.collector.publish()
        trainer._log_iteration(rollout, measures, began, collected)

    return call


def ours(work: Work) -> Call:
    """EmbodiChain on the same Gymnasium task."""
    return iteration(trainer_for(work, {"id": work.env}))


def ours_cart_pole(work: Work) -> Call:
    """EmbodiChain on its own ``CartPoleRL``, with the same settings."""
    return iteration(trainer_for(work, {"id": "CartPoleRL"}))


class BareLoop:
    """PPO without a framework, as single-file recipes have it."""

    def __init__(self, work: Work, threads: int | None = None) -> None:
        self.work, self.env, self.threads = work, vector_env(work), threads
        self.discrete = is_discrete(self.env)
        inputs, outputs = sizes(self.env)
        self.actor = tanh_network(inputs, outputs, work.width, 0.01)
        self.critic = tanh_network(inputs, 1, work.width, 1.0)
        self.log_std = nn.Parameter(torch.zeros(outputs))
        self.parameters = [*self.actor.parameters(), *self.critic.parameters()]
        self.parameters += [] if self.discrete else [self.log_std]
        self.adam = torch.optim.Adam(self.parameters, lr=work.learning_rate, eps=1e-5)
        shape = (work.num_steps, work.num_envs)
        self.obs = torch.zeros(*shape, inputs)
        self.action = torch.zeros(shape, dtype=torch.int64) if self.discrete else torch.zeros(*shape, outputs)
        self.log_prob, self.value, self.reward, self.done = (torch.zeros(shape) for _ in range(4))
        self.now = self._tensor(self.env.reset(seed=0)[0])

    def __call__(self) -> None:
        """Collect and learn once."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads or before)
        with torch.no_grad():
            advantage = self._collect()
        columns = (self.obs, self.action, self.log_prob, advantage, advantage + self.value)
        flat = [column.flatten(0, 1) for column in columns]
        for _ in range(self.work.epochs):
            for index in torch.randperm(self.work.transitions).chunk(self.work.minibatches):
                self._step(*(column[index] for column in flat))
        torch.set_num_threads(before)

    def _collect(self) -> Tensor:
        """Fill the columns; return advantages ``[num_steps, num_envs]``."""
        work = self.work
        for t in range(work.num_steps):
            self.obs[t], self.value[t] = self.now, self.critic(self.now).squeeze(-1)
            self.action[t], self.log_prob[t] = self._sample(self.actor(self.now))
            obs, reward, terminated, truncated, _ = self.env.step(self.action[t].numpy())
            self.reward[t] = torch.from_numpy(reward)
            self.done[t] = torch.from_numpy(terminated | truncated)
            self.now = self._tensor(obs)
        alive = 1.0 - self.done
        following = torch.cat([self.value[1:], self.critic(self.now).squeeze(-1).unsqueeze(0)])
        advantage = self.reward + work.gamma * alive * following - self.value
        for t in range(work.num_steps - 2, -1, -1):
            advantage[t].addcmul_(alive[t], advantage[t + 1], value=work.gamma * work.gae_lambda)
        return advantage

    def _sample(self, params: Tensor) -> tuple[Tensor, Tensor]:
        if self.discrete:
            log_probs = params.log_softmax(-1)
            action = torch.multinomial(log_probs.exp(), 1)
            return action.squeeze(-1), log_probs.gather(-1, action).squeeze(-1)
        noise = torch.randn_like(params)
        log_prob = (-0.5 * noise.square() - self.log_std - LOG_2PI_HALF).sum(-1)
        return params + noise * self.log_std.exp(), log_prob

    def _step(self, obs: Tensor, action: Tensor, old: Tensor, advantage: Tensor, target: Tensor) -> None:
        params = self.actor(obs)
        if self.discrete:
            log_prob = params.log_softmax(-1).gather(-1, action.unsqueeze(-1)).squeeze(-1)
        else:
            noise = (action - params) * (-self.log_std).exp()
            log_prob = (-0.5 * noise.square() - self.log_std - LOG_2PI_HALF).sum(-1)
        weight = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        ratio = (log_prob - old).exp()
        clipped = ratio.clamp(1 - self.work.clip, 1 + self.work.clip)
        loss = torch.max(-weight * ratio, -weight * clipped).mean()
        loss = loss + self.work.value_weight * (self.critic(obs).squeeze(-1) - target).square().mean()
        self.adam.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, self.work.max_grad_norm)
        self.adam.step()

    @staticmethod
    def _tensor(obs: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(obs, dtype=np.float32))


def push_cube_collection() -> Call:
    """Collect rollouts of ``PushCubeRL`` with the shipped policy, untrained."""
    work = Work("PushCubeRL", num_envs=int(PUSH_CUBE["num_envs"]), num_steps=int(PUSH_CUBE["num_steps"]), width=128)
    collector = trainer_for(work, {"id": work.env}).collector
    return lambda: collector.collect(work.num_steps)


def push_cube_simulation() -> Call:
    """Step the same environments with actions drawn beforehand, as widely spread as those of that policy."""
    num_envs, num_steps = int(PUSH_CUBE["num_envs"]), int(PUSH_CUBE["num_steps"])
    env = trainer_for(Work("PushCubeRL", num_envs=num_envs), {"id": "PushCubeRL"}).env
    actions = (torch.randn(num_steps, num_envs, 6) * PUSH_CUBE["std"]).clamp(-1.0, 1.0).unbind(0)

    def call() -> None:
        for action in actions:
            env.step(action)

    return call
