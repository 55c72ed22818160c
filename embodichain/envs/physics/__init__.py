"""Batched physics: many copies of one MuJoCo model as tensors, with no notion of a task."""

from embodichain.envs.physics.base import Physics

__all__ = ["Physics"]
