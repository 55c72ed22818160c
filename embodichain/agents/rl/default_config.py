"""The training config for an environment name: the shipped one, or defaults."""

import logging
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym

from embodichain.agents.rl.models.observation import space_entries
from embodichain.config import load_config
from embodichain.config.files import find_config, shipped_configs
from embodichain.envs.registration import is_simulated_here, load_gym_config, make
from embodichain.envs.vec_env import VecEnv
from embodichain.errors import ConfigError

_LOG = logging.getLogger(__name__)
_FILE = "train_config.json"
_GPU_FILE = "train_config_gpu.json"
_NETWORK = {"type": "mlp", "network_cfg": {"hidden_sizes": [64, 64], "activation": "tanh"}}
_CONTINUOUS = {"learning_rate": 3e-4, "n_epochs": 10, "batch_size": 64, "ent_coef": 0.0}
_CHOICES = {"learning_rate": 5e-4, "n_epochs": 10, "batch_size": 128, "ent_coef": 0.01}
_IMAGES = {"learning_rate": 2.5e-4, "n_epochs": 4, "batch_size": 256, "ent_coef": 0.01, "clip_coef": 0.1}


def config_of_environment(name: str, trusted_modules: Collection[str] = ()) -> tuple[dict[str, Any], Path]:
    """Return a training config for an environment, and its file (for defaults, the name as a path).

    The trusted modules must be imported already.
    """
    if Path(name).is_dir():
        raise ConfigError(
            f"expected a config file or the name of an environment, got a folder; embodichain train --resume {name} "
            "continues a run",
            name,
        )
    shipped = shipped_config(name)
    if shipped is not None:
        _LOG.info("config: %s", shipped)
        return load_config(shipped), shipped
    if (for_gpu := shipped_config(name, _GPU_FILE)) is not None:
        _LOG.info("a config for a GPU is shipped for %s: embodichain train %s", name, for_gpu)
    with make(name, trusted_modules, num_envs=1) as env:
        return default_config(name, env), Path(name)


def shipped_config(name: str, file_name: str = _FILE) -> Path | None:
    """Return the shipped config file for an environment, ignoring the case of its name; ``None`` if there is none."""
    for file in sorted(shipped_configs().glob(f"agents/rl/**/{file_name}")):
        given = load_config(file)["trainer"]["gym_config"]
        if isinstance(given, str) and given.endswith(".json"):
            given = load_config(find_config(given, file.parent))
        if str(given["id"] if isinstance(given, Mapping) else given).casefold() == name.casefold():
            return file
    return None


def default_config(name: str, env: VecEnv) -> dict[str, Any]:
    """Return default settings of PPO, chosen by the types of actions and observations."""
    is_batched = is_simulated_here(load_gym_config(name))
    is_continuous = isinstance(env.action_space, gym.spaces.Box)
    has_images = any(entry.is_image for entry in space_entries(env.observation_space))
    num_envs = 64 if is_batched else 8
    settings, num_steps, total = (_CONTINUOUS, 256, 1_000_000) if is_continuous else (_CHOICES, 128, 500_000)
    if has_images:
        settings, num_steps, total = _IMAGES, 128, 5_000_000
    if is_batched:  # twice as many steps per rollout, in larger minibatches
        settings, num_steps = settings | {"batch_size": 8 * settings["batch_size"]}, num_steps // 4
    kind = f"{'continuous' if is_continuous else 'discrete'} actions{' and images' if has_images else ''}"
    _LOG.info("no config is shipped for %s: PPO with the defaults for %s", name, kind)
    if "instruction" in getattr(env.observation_space, "spaces", {}):
        _LOG.info(
            "the policy reads the words of 'instruction' as bytes; one with a language model is vla (docs/vla.md)"
        )
    return {
        "trainer": {
            "exp_name": f"{re.sub(r'[^a-z0-9]+', '_', name.lower()).strip('_')}_ppo",
            "gym_config": {"id": name},
            "num_envs": num_envs,
            "buffer_size": num_steps,
            "total_steps": total,
            "eval_freq": total // 20,
            "save_freq": total // 10,
            "num_eval_episodes": 16,
            "num_eval_envs": 16 if is_batched else 8,
            "eval_video": is_batched,
        },
        "policy": {"name": "actor_critic", "actor": _NETWORK, "critic": _NETWORK, "normalize_obs": True},
        "algorithm": {"name": "ppo", "cfg": {**settings, "normalize_reward": True}},
    }
