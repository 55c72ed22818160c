"""``embodichain imitate CONFIG``: let a policy imitate demonstrations, or continue a run."""

import sys
from collections.abc import Callable, Sequence
from functools import partial

from embodichain.agents.rl.arguments import parse_args
from embodichain.config.files import find_shipped, load_config
from embodichain.errors import ConfigError

USAGE = """usage: embodichain imitate CONFIG [--trainer.total_steps 20000 ...] [--trust MODULE ...]
       embodichain imitate --resume RUN [--trainer.total_steps 40000 ...] [--trust MODULE ...]

Let a policy imitate demonstrations as an imitate_config.json (or .yaml) says, or continue a run.

  CONFIG, --config CONFIG   the config's file; or the name of a task, which is imitated with the config that is shipped
                            for it, or else with defaults
  --source.dataset FOLDER   imitate a recording (a LeRobotDataset) in place of what the config imitates
  --dagger                  let the policy act in the stream, and the expert label every state that it reaches
  --resume RUN              folder of a run, or of one of its checkpoints
  --trust MODULE            import this module of your own (its name, or its .py file), which registers a policy, an
                            environment or an actor
  --SECTION.FIELD VALUE     change any field; 'embodichain imitate CONFIG --help' lists them
"""


def main(argv: Sequence[str]) -> Callable[[], int]:
    """Return the imitation, ready to be called; the first line is printed before what takes seconds to import."""
    args = parse_args(argv, USAGE)
    if args.seeds is not None:
        raise ConfigError("--seeds: expected --trainer.seed, as embodichain imitate makes one run", "command line")
    if args.config is not None and args.config.suffix in (".json", ".yaml", ".yml"):
        load_config(find_shipped(args.config))  # what is no config is told at once
    if "torch" not in sys.modules and not {"-h", "--help"} & set(args.overrides):
        print(f"{args.resume or args.config}: loading torch and MuJoCo ...", file=sys.stderr, flush=True)
    from embodichain.agents.imitation.imitate import run

    return partial(run, args)
