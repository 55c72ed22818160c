"""``embodichain export RUN --onnx FILE``: export a trained policy for use without this package."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from embodichain.cli.options import Trust, loading, parse_options


@dataclass(frozen=True)
class ExportArgs:
    """Export the policy of a run, including its normaliser, to an ONNX file, and check that the outputs agree."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of a run, or of one of its checkpoints."""
    onnx: Path
    """The file to write (.onnx)."""
    checkpoint: Literal["best", "latest"] = "best"
    """Which checkpoint of the run; without evaluations in the run, 'best' is the latest."""
    trust: Trust = ()


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    args = parse_options(ExportArgs, argv, "embodichain export")

    with loading():
        from embodichain.agents.rl.checkpoint import find_checkpoint, load_checkpoint, load_policy
        from embodichain.agents.rl.export import export_onnx
        from embodichain.agents.rl.utils.tensordicts import space_from_data

    folder = find_checkpoint(args.run, args.checkpoint)
    state = load_checkpoint(folder)
    policy = load_policy(folder, trusted_modules=args.trust)  # validates the spaces, too
    observation_space, action_space = (space_from_data(state["spaces"][name]) for name in ("observation", "action"))
    print(export_onnx(policy, observation_space, action_space, args.onnx))
    return 0
