"""Reinforcement learning: PPO and GRPO on TensorDict rollouts.

Read ``models/policy.py``, ``collector/sync_collector.py`` and ``algo/ppo.py``, in this order.
"""
