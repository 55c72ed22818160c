"""Small environments, models and policies for the tests of vision-language-action models."""

from __future__ import annotations

from typing import Any

from embodichain.agents.rl.models import Policy, build_policy
from embodichain.config import merge
from embodichain.envs.registration import make
from embodichain.envs.vec_env import VecEnv
from embodichain.envs.wrappers import chunked

CAMERA = {
    "name": "front",
    "width": 16,
    "height": 16,
    "pos": [1.15, 0.0, 0.75],
    "lookat": [0.56, 0.0, 0.0],
    "fovy": 32.0,
}
TINY = {"chunk_size": 3, "width": 32, "depth": 1, "num_heads": 2, "patch_size": 8}


def language_env(num_envs: int = 4, **changes: Any) -> VecEnv:
    """Return the language task with one small image, in steps of single actions."""
    base = {
        "max_episode_steps": 10,
        "num_threads": 1,
        "seed": 0,
        "env": {"observations": {"cameras": [CAMERA]}, "actions": {"ee_delta": {"scale": 0.04}}},
    }
    return make({"id": "PushCubeLanguageRL", "num_envs": num_envs, **merge(base, changes)})


def vla_block(model_class: str = "tiny_vla", model_path: str | None = None, **model_config: Any) -> dict[str, Any]:
    """Return the policy block of a config."""
    settings = {**(TINY if model_class == "tiny_vla" else {}), **model_config}
    return {
        "name": "vla",
        "vla_config": {"model_path": model_path, "model_class": model_class, "model_config": settings},
    }


def vla_policy(env: VecEnv, **model_config: Any) -> Policy:
    """Return a small policy for an environment of single actions."""
    return build_policy(vla_block(**model_config), env.observation_space, env.action_space, "cpu")


def chunked_pair(num_envs: int = 4, **model_config: Any) -> tuple[VecEnv, Policy]:
    """Return an environment that takes the chunks of the policy beside it."""
    env = language_env(num_envs)
    policy = vla_policy(env, **model_config)
    return chunked(env, policy.chunk_size), policy
