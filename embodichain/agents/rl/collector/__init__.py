"""Collectors let a policy act in an environment and return rollouts."""

from __future__ import annotations

from embodichain.agents.rl.collector.base import BaseCollector, StepCallback, bound_action
from embodichain.agents.rl.collector.sync_collector import SyncCollector

__all__ = ["BaseCollector", "StepCallback", "SyncCollector", "bound_action"]
