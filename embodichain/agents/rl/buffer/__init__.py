"""Rollout storage; ``rollout_buffer.py`` documents the layout of a rollout."""

from embodichain.agents.rl.buffer.rollout_buffer import (
    ROLLOUT_KEYS,
    Minibatches,
    RolloutBuffer,
    check_rollout,
    count_transitions,
    flatten_time_major,
)
from embodichain.agents.rl.buffer.vla_buffer import VLABuffer

__all__ = [
    "ROLLOUT_KEYS",
    "Minibatches",
    "RolloutBuffer",
    "VLABuffer",
    "check_rollout",
    "count_transitions",
    "flatten_time_major",
]
