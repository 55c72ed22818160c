"""``embodichain train CONFIG``: train a policy, or continue a run."""

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial

from embodichain.agents.rl.arguments import parse_args
from embodichain.config.files import find_shipped, load_config


def main(argv: Sequence[str]) -> Callable[[], int]:
    """Return the training, ready to be called; the first line is printed before what takes seconds to import."""
    args = parse_args(argv)
    if args.config is not None and args.config.suffix in (".json", ".yaml", ".yml"):
        load_config(find_shipped(args.config))  # what is no config is told at once
    is_shown = os.environ.get("RANK", "0") == "0" and not {"-h", "--help"} & set(args.overrides)
    if is_shown and "torch" not in sys.modules:
        print(f"{args.resume or args.config}: loading torch and MuJoCo ...", file=sys.stderr, flush=True)
    from embodichain.agents.rl.train import main as train

    return partial(train, argv)
