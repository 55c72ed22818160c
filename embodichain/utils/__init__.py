"""Helpers shared by all packages: tensor serialization, CUDA graphs, console output, threads and seeds."""
