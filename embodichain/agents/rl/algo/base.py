"""What every algorithm is: something that improves a policy by a rollout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase

from embodichain.agents.rl.buffer.layout import check_rollout, flatten_time_major
from embodichain.agents.rl.buffer.rollout_buffer import RolloutBuffer
from embodichain.agents.rl.collector.base import StepCallback
from embodichain.agents.rl.collector.sync_collector import RolloutStart, SyncCollector
from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.utils.config import AlgorithmCfg
from embodichain.agents.rl.utils.observations import Observation
from embodichain.agents.rl.utils.ranks import Ranks
from embodichain.envs.vec_env import VecEnv
from embodichain.errors import ConfigError, RolloutError

NORMALIZER_ROWS = 65_536
"""Transitions that running statistics take in at a time, which bounds the memory for it."""


class BaseAlgorithm(ABC):
    """Base class for RL algorithms: ``update(rollout)`` is all that a new one has to write.

    Trainers collect with a collector of their own and call ``update(rollout)``. The same can be had from the algorithm
    alone: ``initialize_buffer``, then ``collect_rollout`` and ``update()`` in turn.
    """

    device: torch.device
    """Where the policy is trained."""
    cfg_type: ClassVar[type[AlgorithmCfg]] = AlgorithmCfg
    """Class of the settings, so that a config can be checked before anything is built."""
    one_version_per_rollout: ClassVar[bool] = False
    """Whether all transitions of a rollout must come from one version of the policy."""

    def __init__(self, cfg: AlgorithmCfg, policy: Policy) -> None:
        self.cfg = cfg
        self.device = torch.device(cfg.device)
        self.policy = policy.to(self.device)
        self.policy.device = self.device
        self.ranks = Ranks()
        """The processes that train this policy together; see ``join``."""
        self.progress = 0.0
        """Share of the training that is over, in [0, 1]; set by the trainer, used by schedules."""
        self.buffer: RolloutBuffer | None = None
        self._collector: SyncCollector | None = None
        self._rollout: TensorDictBase | None = None

    @abstractmethod
    def update(self, rollout: TensorDictBase | None = None) -> dict[str, float]:
        """Improve the policy by a rollout ``[num_envs, num_steps]``; return losses and other measures.

        Without an argument, by the one that ``collect_rollout`` collected.
        """

    def start_rollout(self, env: VecEnv) -> Observation | None:
        """Prepare the environment for a rollout; collectors call it before each. By default it just goes on."""
        return None

    @property
    def rollout_start(self) -> RolloutStart | None:
        """What ``start_rollout`` does, as something that can be sent to a collecting process; ``None`` if nothing."""
        return None

    def check_num_envs(self, num_envs: int) -> None:
        """Raise ``ConfigError`` if the algorithm cannot work with so many envs; by default any number will do."""
        return

    def join(self, ranks: Ranks) -> None:
        """Train the policy together with other processes, each with envs and a copy of the policy of its own.

        An algorithm that can do so overrides this; all copies begin as the first one.
        """
        if ranks.count > 1:
            problem = f"{type(self).__name__} cannot train on several ranks: it does not add up gradients over them"
            raise ConfigError(problem, "algorithm")

    def initialize_buffer(
        self,
        num_steps: int,
        num_envs: int,
        obs_dim: int,
        action_dim: int,
        device: torch.device | str | None = None,
    ) -> None:
        """Make the buffer that ``collect_rollout`` writes to; nested observations are stored flat."""
        self.check_num_envs(num_envs)
        self.buffer = RolloutBuffer(num_steps, num_envs, obs_dim, action_dim, device or self.device)

    def collect_rollout(
        self,
        env: VecEnv,
        policy: Policy,
        obs: Observation | None,
        num_steps: int,
        on_step_callback: StepCallback | None = None,
    ) -> dict[str, Any]:
        """Collect ``num_steps`` of all envs; return logging info: reward parts, metrics, episode returns.

        ``obs`` is the environment's present observation; ``None`` goes on from where the last rollout ended, or resets
        the environment for the first one.
        """
        collector = self._collector
        if collector is None or collector.env is not env or collector.policy is not policy:
            collector = SyncCollector(env, policy, self.device, buffer=self.buffer, start_rollout=self.start_rollout)
            self._collector = collector
            if obs is not None:
                collector.begin(obs)
        elif obs is not None:
            collector.obs = obs.to(self.device)
        collector.callback = on_step_callback
        self._rollout = collector.collect(num_steps)
        return dict(collector.statistics())

    def state_dict(self) -> dict[str, Any]:
        """Return what ``update`` depends on besides policy, config and random state: nested dicts, tensors, numbers."""
        return {"progress": self.progress}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` returned."""
        self.progress = state["progress"]

    def _take(self, rollout: TensorDictBase | None, keys: Iterable[str]) -> TensorDictBase:
        """Return the rollout to learn from, on the algorithm's device, if its layout is right."""
        if rollout is None:
            rollout, self._rollout = self._rollout, None
            if rollout is None:
                raise RolloutError("update() without a rollout needs collect_rollout() before it, each time")
        check_rollout(rollout, keys)
        self.check_num_envs(rollout.batch_size[0])
        return rollout if rollout["reward"].device == self.device else rollout.to(self.device)

    def _finish_update(self, rollout: TensorDictBase) -> None:
        """Let the policy's running statistics see the rollout, and count the update."""
        with torch.no_grad():
            for part in flatten_time_major(rollout.select("observation")).split(NORMALIZER_ROWS):
                self.policy.update_normalizer(part["observation"])
            self.policy.version += 1
