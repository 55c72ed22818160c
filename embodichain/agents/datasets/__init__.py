"""PyTorch datasets over a live stream of episodes, and samplers of chunk sizes."""

from embodichain.agents.datasets.online_data import OnlineDataset
from embodichain.agents.datasets.sampler import ChunkSizeSampler, GMMChunkSampler, UniformChunkSampler

__all__ = ["ChunkSizeSampler", "GMMChunkSampler", "OnlineDataset", "UniformChunkSampler"]
