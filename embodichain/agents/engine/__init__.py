"""Online data streaming: simulation fills a shared buffer while training samples from it. Read ``data.py`` first."""

from embodichain.agents.datasets.frames import EpisodeInfo
from embodichain.agents.engine.config import ActionSourceCfg, ExpertShareCfg, OnlineDataEngineCfg, register_actor
from embodichain.agents.engine.data import OnlineDataEngine, StreamStats, WorkerStats
from embodichain.agents.processes.ray_backend import PlacementCfg

__all__ = [
    "ActionSourceCfg",
    "EpisodeInfo",
    "ExpertShareCfg",
    "OnlineDataEngine",
    "OnlineDataEngineCfg",
    "PlacementCfg",
    "StreamStats",
    "WorkerStats",
    "register_actor",
]
