"""Datasets over the live stream, and how long their chunks are."""

from embodichain.agents.datasets.online_data import OnlineDataset
from embodichain.agents.datasets.sampler import ChunkSizeSampler, GMMChunkSampler, UniformChunkSampler

__all__ = ["ChunkSizeSampler", "GMMChunkSampler", "OnlineDataset", "UniformChunkSampler"]
