"""The arguments of ``embodichain train``; parsing them imports nothing heavy, so that mistakes are reported at once."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from embodichain.config.command_line import positional_first
from embodichain.errors import ConfigError

_USAGE = """usage: embodichain train CONFIG [--trainer.num_envs 128 ...] [--seeds 0..4 --jobs 2] [--trust MODULE ...]
       embodichain train --resume RUN [--trainer.iterations 2000 ...] [--trust MODULE ...]

Train a policy from a train_config.json (or .yaml), or resume a run exactly where it stopped.

  CONFIG, --config CONFIG   config file; or the name of a task or of any Gymnasium environment, which uses the config
                            shipped for it, or else defaults
  --resume RUN              folder of a run, or of one of its checkpoints
  --seeds 0..4              train once with each of these seeds, in a common folder; the same command resumes it
  --jobs 2                  with --seeds: number of trainings at the same time
  --trust MODULE            import your own module (its name, or its .py file), which registers a policy, algorithm or
                            environment
  --viewer                  show the environments in the browser during training
  --SECTION.FIELD VALUE     change any field; 'embodichain train CONFIG --help' lists them
"""

SWITCHES = (
    *(f"trainer.{name}" for name in ("enable_eval", "eval_deterministic", "eval_video", "nan_guard", "use_wandb")),
    *(f"policy.{name}" for name in ("normalize_obs", "normalize_value", "critic_images")),
    *(f"algorithm.cfg.{name}" for name in ("normalize_advantage", "normalize_reward", "clip_value_loss")),
    *(f"algorithm.cfg.{name}" for name in ("cuda_graphs", "reset_every_rollout", "truncate_at_first_done")),
)
"""Flags that need no value, listed here so that parsing imports nothing heavy."""
NO_VALUE = "null"
"""What a flag is given for no value, as in JSON and YAML."""
_LOOKS_LIKE_CONFIG = r"\.(json|ya?ml)$|RL$|-v\d+$"


def parse_args(argv: Sequence[str] | None = None, usage: str = _USAGE) -> argparse.Namespace:
    """Parse a command line; the result has ``config`` or ``resume`` (paths), the other options, and ``overrides``."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not {"--config", "--resume"} & {word.partition("=")[0] for word in words}:
        own = ("distributed", "no_distributed", "viewer", "dagger", "help", "h")
        words = positional_first(words, dict.fromkeys((*own, *SWITCHES), 0), _LOOKS_LIKE_CONFIG)
    leading = words.pop(0) if words and not words[0].startswith("-") else None
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, usage=usage, exit_on_error=False)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--trust", action="append", default=[])
    parser.add_argument("--viewer", action="store_true")
    parser.add_argument("--seeds")
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--distributed", action=argparse.BooleanOptionalAction)
    try:
        args, overrides = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error), "command line") from None
    given = [*([] if leading is None else [leading]), *filter(None, (args.config, args.resume))]
    if not given and {"-h", "--help"} & set(overrides):
        print(usage, end="")
        raise SystemExit(0)
    if len(given) != 1:
        raise ConfigError(f"expected either a config or --resume RUN\n\n{usage}", "command line")
    if args.seeds is not None and args.resume is not None:
        raise ConfigError("--seeds: expected a config; the command that began them continues them", "command line")
    if args.seeds is not None and args.viewer:
        raise ConfigError("--viewer: expected one training, got --seeds", "command line")
    if args.jobs is not None and args.seeds is None:
        raise ConfigError("--jobs: expected --seeds with it, as one training is one job", "command line")
    args.config, args.overrides = args.config if leading is None else Path(leading), overrides
    return args


def given_environment(overrides: Sequence[str]) -> str | None:
    """Return the value of ``--trainer.gym_config`` if it names an environment or file, else ``None``."""
    given = given_value(overrides, "trainer.gym_config")[0]
    return None if given in (None, NO_VALUE) or given.lstrip().startswith("{") else given


def given_origins(overrides: Sequence[str]) -> tuple[str | None, str | None]:
    """Return the values of ``--trainer.gym_config`` and ``--trainer.init_from``, ``None`` if not given."""
    return given_environment(overrides), given_value(overrides, "trainer.init_from")[0]


def given_value(overrides: Sequence[str], name: str) -> tuple[str | None, list[str]]:
    """Return the value of a flag (``None`` if it is not given), and the other words."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(f"--{name}", dest="given")
    with suppress(argparse.ArgumentError):  # reported later, when all flags are parsed
        args, others = parser.parse_known_args(list(overrides))
        return args.given, others
    return None, list(overrides)
