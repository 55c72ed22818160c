"""``embodichain train CONFIG``: train a policy, or go on with a run."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    from embodichain.agents.rl.train import main as train

    return train(argv)
