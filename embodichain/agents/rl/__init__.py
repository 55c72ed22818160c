"""Reinforcement learning: PPO and GRPO on TensorDict rollouts.

Read ``models/policy.py`` (what a policy is), ``collector/sync_collector.py`` (how a rollout comes about) and
``algo/ppo.py`` (what is done with it), in this order.
"""
