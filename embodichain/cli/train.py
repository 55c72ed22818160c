"""``embodichain train CONFIG``: train a policy, or continue a run."""

from embodichain.agents.rl.train import main

__all__ = ["main"]
