"""Imitation learning runs: any policy learns from a live stream, from recordings, or from a mixture."""
