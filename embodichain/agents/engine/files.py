"""Engine settings from a file, a ``gym_config.json`` or the mere name of an environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from embodichain.agents.engine.config import OnlineDataEngineCfg
from embodichain.config import load_config
from embodichain.envs.registration import list_envs, load_gym_config

_ENVS, _ROWS_PER_ENV = 8, 4


def load_stream_config(source: str | os.PathLike[str]) -> OnlineDataEngineCfg:
    """Return the settings in a file of them (whose ``gym_config`` may be the path of another file), or defaults that
    suit the environment of a ``gym_config.json`` or of an id."""
    path = Path(source)
    if path.suffix not in (".json", ".yaml", ".yml"):
        return _for_environment({"id": str(source), "num_envs": _ENVS})
    data = load_config(path)
    if "id" in data:
        return _for_environment(data)
    nested = data.get("gym_config")
    if isinstance(nested, str):
        data["gym_config"] = load_config(path.parent / nested)
    return OnlineDataEngineCfg.from_dict(data, source=str(source))


def _for_environment(gym_config: dict[str, Any]) -> OnlineDataEngineCfg:
    """Return settings for an environment: rows as long as its episodes, and a few for each env."""
    cfg = load_gym_config(gym_config)
    settings: dict[str, Any] = {"gym_config": gym_config, "buffer_size": max(16, _ROWS_PER_ENV * cfg.num_envs)}
    if cfg.id in {spec.id for spec in list_envs()}:
        settings["max_episode_steps"] = cfg.max_episode_steps
    else:  # Gymnasium environments have no expert, and tell their time limit only when they are built
        settings["action_config"] = {"source": "random"}
        settings["max_episode_steps"] = 1000
    return OnlineDataEngineCfg.from_dict(settings, source=str(gym_config.get("id")))
