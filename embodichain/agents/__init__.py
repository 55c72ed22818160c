"""Agents: online data streaming (``engine``, ``datasets``) and reinforcement learning (``rl``)."""

from typing import TYPE_CHECKING

from embodichain import reach_submodules

if not TYPE_CHECKING:
    __getattr__ = reach_submodules(__name__)
