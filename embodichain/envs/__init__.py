"""Environments: batched physics, tasks written on it, and adapters; ``vec_env.py`` states the contract."""
