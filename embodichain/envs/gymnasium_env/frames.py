"""Pictures of Gymnasium envs in the size that was asked for."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv, VectorEnv

from embodichain.errors import RenderingError


def draw(vector_env: VectorEnv, env_ids: list[int], camera: str | None, size: tuple[int, int]) -> np.ndarray:
    """Return uint8 frames ``[len(env_ids), H, W, 3]`` of the envs' present states."""
    if camera is not None:
        raise RenderingError(f"a Gymnasium env has one view of its own: expected camera=None, got {camera!r}")
    if vector_env.render_mode != "rgb_array":
        raise RenderingError('pass kwargs={"render_mode": "rgb_array"} when making the env, then it can be rendered')
    base = vector_env.unwrapped
    try:
        if isinstance(base, SyncVectorEnv):
            frames = [base.envs[i].render() for i in env_ids]
        else:
            every = vector_env.render() or ()
            frames = [every[i] for i in env_ids]
    except gym.error.DependencyNotInstalled as error:
        raise RenderingError(f"this Gymnasium env cannot be drawn: {error}") from error
    pictures = torch.from_numpy(np.stack([np.asarray(frame, dtype=np.uint8) for frame in frames]))
    if tuple(pictures.shape[1:3]) == size:
        return pictures.numpy()
    resized = torch.nn.functional.interpolate(
        pictures.permute(0, 3, 1, 2).to(torch.float32), size, mode="bilinear", antialias=True, align_corners=False
    )
    return resized.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
