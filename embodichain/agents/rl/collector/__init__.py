"""Collectors run a policy in an environment and return rollouts."""

from embodichain.agents.rl.collector.async_collector import AsyncCollector
from embodichain.agents.rl.collector.base import BaseCollector, StepCallback
from embodichain.agents.rl.collector.config import AsyncCfg
from embodichain.agents.rl.collector.remote_env import RemoteEnv
from embodichain.agents.rl.collector.sync_collector import SyncCollector

__all__ = ["AsyncCfg", "AsyncCollector", "BaseCollector", "RemoteEnv", "StepCallback", "SyncCollector"]
