"""Before reinforcement learning goes on from a policy that was trained otherwise: let its value catch up.

A cloned policy acts well and judges badly. Advantages from a value that knows nothing would undo what was cloned, so
the value learns first, from what the policy does as it is.
"""

from __future__ import annotations

from embodichain.agents.rl.algo.ppo import PPO, PPOCfg
from embodichain.agents.rl.collector.sync_collector import SyncCollector
from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.models.vla.freezing import only_trained
from embodichain.envs.vec_env import VecEnv

VALUE_HEAD = "model.to_value"
"""The value head of a ``VLAPolicy``."""


def warm_up_value(
    policy: Policy, env: VecEnv, cfg: PPOCfg, num_steps: int, rollouts: int, head: str = VALUE_HEAD
) -> list[float]:
    """Let the value head alone learn from rollouts ``[num_envs, num_steps]``; the policy acts as before.

    ``env`` takes the policy's chunks. Returns the explained variance before each update: 1 is a perfect value.
    """
    with only_trained(policy, head):
        algorithm = PPO(cfg.replace(cuda_graphs=False), policy)  # too few updates to be worth recording
        collector = SyncCollector(env, policy, algorithm.device)
        return [algorithm.update(collector.collect(num_steps))["explained_variance"] for _ in range(rollouts)]
