"""``embodichain imitate CONFIG``: train a policy by imitation, or continue a run."""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial

from embodichain.agents.rl.arguments import parse_args
from embodichain.config.files import find_shipped, load_config

USAGE = """usage: embodichain imitate CONFIG [--trainer.total_steps 9000 ...] [--seeds 0..4 --jobs 2] [--trust MODULE]
       embodichain imitate --resume RUN [--trainer.total_steps 40000 ...] [--trust MODULE ...]

Let a policy imitate demonstrations as an imitate_config.json (or .yaml) says, or continue a run.

  CONFIG, --config CONFIG   the config's file; or the name of a task, which is imitated with the config that is shipped
                            for it, or else with defaults
  --source.dataset FOLDER   imitate a recording (a LeRobotDataset) in place of what the config imitates
  --dagger                  let the policy act in the stream, and the expert label every state that it reaches
  --resume RUN              folder of a run, or of one of its checkpoints
  --seeds 0..4              imitate once with each seed, in a folder of their own; the same command continues it
  --jobs 2                  with --seeds: how many learn at the same time
  --trust MODULE            import this module of your own (its name, or its .py file), which registers a policy, an
                            environment or an actor
  --SECTION.FIELD VALUE     change any field; 'embodichain imitate CONFIG --help' lists them
"""


def main(argv: Sequence[str]) -> Callable[[], int]:
    """Return a function that runs the imitation; the first output is printed before the slow imports."""
    args = parse_args(argv, USAGE)
    if args.config is not None and args.config.suffix in (".json", ".yaml", ".yml"):
        load_config(find_shipped(args.config))  # report an invalid file before the slow imports
    if "torch" not in sys.modules and not {"-h", "--help"} & set(args.overrides):
        print(f"{args.resume or args.config}: loading torch and MuJoCo ...", file=sys.stderr, flush=True)
    if args.seeds is not None:
        return partial(_imitate_seeds, args)
    from embodichain.agents.imitation.imitate import run

    return partial(run, args)


def _imitate_seeds(args: argparse.Namespace) -> int:
    """Imitate with several seeds, each in its own process; return the exit code."""
    from embodichain.agents.imitation import imitate
    from embodichain.agents.rl.sweeps.group import GroupRequest, train_seeds
    from embodichain.agents.rl.sweeps.jobs import Program

    program = Program("imitate", imitate.imitate_from_config, imitate.resume_imitation)
    jobs = 1 if args.jobs is None else args.jobs
    request = GroupRequest.of(args.config, args.overrides, args.trust, args.seeds, jobs, program)
    return train_seeds(request, imitate.read_config(request.config, request.overrides, request.trusted_modules))
