"""From a config to environments and the collector that steps them."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from embodichain.agents.rl.algo.base import BaseAlgorithm
from embodichain.agents.rl.buffer.vla_buffer import VLABuffer
from embodichain.agents.rl.collector.async_collector import AsyncCollector
from embodichain.agents.rl.collector.config import AsyncCfg
from embodichain.agents.rl.collector.remote_env import RemoteEnv
from embodichain.agents.rl.collector.sync_collector import SyncCollector
from embodichain.agents.rl.training.config import TrainCfg, TrainerCfg
from embodichain.agents.utils.modules import import_trusted, module_name
from embodichain.envs.chunks import chunked
from embodichain.envs.groups import GroupedEnv, arrange, make_grouped
from embodichain.envs.physics.mujoco_cpu import available_cores
from embodichain.envs.registration import make
from embodichain.envs.vec_env import VecEnv

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class EnvMaker:
    """Makes the environments that a config describes, in this process or in another."""

    gym_config: dict[str, Any]
    trusted_modules: tuple[str, ...] = ()
    num_groups: int = 1
    """Groups that take turns at the policy."""
    chunk_size: int = 1
    """Actions per decision."""
    processes: int = 0
    """Processes that simulate; 0: none but this one."""
    folders: tuple[str, ...] = ()
    """Where trusted modules are that are not on Python's path."""

    def __call__(self) -> VecEnv:
        """Return new environments."""
        import_trusted(self.trusted_modules, [*map(Path, self.folders), Path.cwd()])
        num_envs = int(self.gym_config["num_envs"])
        if not self.processes:
            return make_grouped(self._make_group, num_envs, self.num_groups)
        threads = (self.gym_config.get("num_threads") or available_cores()) // self.processes
        part = self.gym_config | {"num_envs": num_envs // self.processes, "num_threads": max(1, threads)}
        maker = replace(self, gym_config=part, num_groups=1, processes=0)
        return arrange(RemoteEnv.several([maker] * self.processes), self.num_groups)

    def _make_group(self, num_envs: int) -> VecEnv:
        names = [module_name(entry) for entry in self.trusted_modules]
        return chunked(make(self.gym_config | {"num_envs": num_envs}, trusted_modules=names), self.chunk_size)


def in_chunks(env: VecEnv, chunk_size: int) -> VecEnv:
    """Return environments for decisions of so many actions."""
    if isinstance(env, GroupedEnv):
        return GroupedEnv([in_chunks(group, chunk_size) for group in env.groups]) if chunk_size > 1 else env
    return env.in_chunks(chunk_size) if isinstance(env, RemoteEnv) else chunked(env, chunk_size)


def build_collector(
    trainer: TrainerCfg, env: VecEnv, make_env: EnvMaker, algorithm: BaseAlgorithm, name: str = ""
) -> SyncCollector | AsyncCollector:
    """Return the collector that a config asks for; a collecting process makes environments of its own.

    In a cluster its workers are called ``name``, unless the config says otherwise.
    """
    if not trainer.collects_apart:
        return SyncCollector(
            env,
            algorithm.policy,
            algorithm.device,
            start_rollout=algorithm.start_rollout,
            num_threads=trainer.collect_threads,
            pipeline_stages=trainer.collector.pipeline_stages,
        )
    cfg = settle(trainer, algorithm)
    cfg = cfg.replace(name=cfg.name or name)
    room = (cfg.max_policy_lag + 1) * env.num_envs * trainer.buffer_size
    buffer = VLABuffer(room, algorithm.device)
    if cfg.worker != "thread":
        env.close()  # it has told its spaces; collecting processes make their own
        start = algorithm.rollout_start
        return AsyncCollector(make_env, algorithm.policy, buffer, algorithm.device, cfg=cfg, start_rollout=start)
    start = algorithm.start_rollout
    return AsyncCollector(env, algorithm.policy, buffer, algorithm.device, cfg=cfg, start_rollout=start)


def algorithm_settings(cfg: TrainCfg) -> dict[str, Any]:
    """Return the algorithm's settings, without what cannot be done while somebody else uses the same GPU.

    Whether a gradient step can be recorded as a graph is found out by forbidding the whole process to wait for the
    device, which a collecting thread does all the time.
    """
    trainer, settings = cfg.trainer, dict(cfg.algorithm.cfg)
    beside = trainer.model_type == "vla" and trainer.collector.worker == "thread"
    if beside and settings.get("cuda_graphs") and torch.device(trainer.device).type == "cuda":
        _LOG.info("gradient steps are not recorded as CUDA graphs, as a thread collects on the same GPU")
        settings["cuda_graphs"] = False
    return settings


def settle(trainer: TrainerCfg, algorithm: BaseAlgorithm) -> AsyncCfg:
    """Return the settings of asynchronous collection, with what the rest of the config says about it."""
    cfg = trainer.collector
    adopt = cfg.adopt
    if algorithm.one_version_per_rollout and adopt == "step":
        adopt = "rollout"
        _LOG.info("%s compares trajectories: new weights are adopted between rollouts", type(algorithm).__name__)
    return cfg.replace(
        adopt=adopt,
        num_steps=trainer.buffer_size,
        seed=trainer.seed if cfg.seed is None else cfg.seed,
        num_threads=trainer.collect_threads if cfg.num_threads is None else cfg.num_threads,
    )
