"""Agents: online data streaming (``engine``, ``datasets``) and reinforcement learning (``rl``)."""
