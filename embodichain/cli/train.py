"""``embodichain train CONFIG``: train a policy, or continue a run."""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial

from embodichain.agents.rl.arguments import parse_args
from embodichain.config.files import find_shipped, load_config
from embodichain.extras import require


def main(argv: Sequence[str]) -> Callable[[], int]:
    """Return a function that runs the training; the first output is printed before the slow imports."""
    args = parse_args(argv)
    if args.config is not None and args.config.suffix in (".json", ".yaml", ".yml"):
        load_config(find_shipped(args.config))  # report an invalid file before the slow imports
    wants_help = {"-h", "--help"} & set(args.overrides)
    is_shown = os.environ.get("RANK", "0") == "0" and not wants_help
    if args.viewer:
        require("viser", extra="viewer")
    if is_shown and "torch" not in sys.modules:
        print(f"{args.resume or args.config}: loading torch and MuJoCo ...", file=sys.stderr, flush=True)
    if args.seeds is not None and is_shown:
        group = importlib.import_module("embodichain.agents.rl.sweeps.group")  # not needed for a single run
        jobs = 1 if args.jobs is None else args.jobs
        return partial(
            group.train_seeds, group.GroupRequest.of(args.config, args.overrides, args.trust, args.seeds, jobs)
        )
    from embodichain.agents.rl.train import main as train

    training = partial(train, argv)
    return partial(_with_viewer, str(args.resume or args.config), training) if args.viewer and is_shown else training


def _with_viewer(title: str, training: Callable[[], int]) -> int:
    """Train with a viewer in another process; with several ranks, it shows the environments of the first."""
    from embodichain.viewer.launch import viewer_beside

    with viewer_beside(title) as address:
        print(f"viewer: {address}", file=sys.stderr, flush=True)
        return training()
