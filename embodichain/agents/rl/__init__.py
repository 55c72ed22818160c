"""Reinforcement learning: PPO and GRPO on TensorDict rollouts.

Read ``models/policy.py``, ``collector/sync_collector.py`` and ``algo/ppo.py`` first, in this order.
"""

from typing import TYPE_CHECKING

from embodichain import reach_submodules

if not TYPE_CHECKING:
    __getattr__ = reach_submodules(__name__)
