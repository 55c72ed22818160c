"""Imitation as a run: chunks of a live stream, of recordings or of a mixture, learned by any policy."""
