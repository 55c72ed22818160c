"""``embodichain sweep CONFIG --space 'lr=log(1e-4,1e-2)' --trials 40``: search for better settings with Optuna."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import tyro

from embodichain.cli.options import Trust, parse_known_options
from embodichain.config.command_line import positional_first
from embodichain.config.files import find_shipped, load_config
from embodichain.errors import ConfigError
from embodichain.extras import require

_LOOKS_LIKE_CONFIG = r"\.(json|ya?ml)$|RL$|-v\d+$"


@dataclass(frozen=True)
class SweepArgs:
    """Search for better settings of a training: trials with settings drawn from a space are trained, judged by their
    evaluations, and stopped early if most others were better. The same command continues a sweep that was interrupted
    or killed. Any field of the config is a flag as well, as in embodichain train."""

    config: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG")]
    """The config's file, or the name of a task or of any Gymnasium environment."""
    space: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="FIELD=VALUES,...")] = ()
    """What is searched, such as 'lr=log(1e-4,1e-2),ent=[0,0.01],n_epochs={3,5,10}': magnitudes, an interval, a choice.
    Fields may be given by the last part of their names. The option can be repeated."""
    trials: int = 20
    """Number of trials."""
    seeds: str = "0"
    """Seeds that every trial is trained with, such as 0..4 or 0,1,7; its score is their mean."""
    jobs: int = 1
    """Number of trials that are trained at the same time."""
    metric: str = "eval/return"
    """What trials are judged by: the name of a logged number, such as eval/success."""
    score: Literal["last", "best", "mean"] = "last"
    """Which evaluation of a run counts: the last, the best, or the mean of all, which rewards learning early."""
    direction: Literal["maximize", "minimize"] = "maximize"
    """Whether more is better."""
    prune: bool = True
    """Whether trials are stopped early that are worse than the median of the others at the same evaluation."""
    sampler_seed: int = 0
    """Seed of what is drawn."""
    worker: Literal["process", "ray"] = "process"
    """Where trials are trained: in processes of this machine, or in a Ray cluster."""
    address: str | None = None
    """Of a Ray cluster: its address (default: one starts for this sweep alone)."""
    num_cpus: float = 1.0
    """In a Ray cluster: cores that are set aside for a training."""
    num_gpus: float = 0.0
    """In a Ray cluster: GPUs, or the part of one, that are set aside for a training."""
    trust: Trust = ()


def main(argv: Sequence[str]) -> Callable[[], int]:
    """Return the sweep, ready to be called; the first line is printed before what takes seconds to import."""
    switches = dict.fromkeys(("prune", "no_prune", "help", "h"), 0)
    words = positional_first(argv, switches, _LOOKS_LIKE_CONFIG)
    args, overrides = parse_known_options(SweepArgs, words, "embodichain sweep")
    require("optuna", extra="sweep")
    if args.config.suffix in (".json", ".yaml", ".yml"):
        load_config(find_shipped(args.config))  # what is no config is told at once
    if not args.space:
        raise ConfigError("--space: expected what is searched, such as --space 'lr=log(1e-4,1e-2)'", "command line")
    if "torch" not in sys.modules:
        print(f"{args.config}: loading torch and MuJoCo ...", file=sys.stderr, flush=True)
    from embodichain.agents.processes.ray_backend import PlacementCfg
    from embodichain.agents.rl.sweeps.group import GroupRequest
    from embodichain.agents.rl.sweeps.study import SweepSettings, sweep

    request = GroupRequest.of(args.config, overrides, args.trust, args.seeds, args.jobs)
    settings = SweepSettings(
        args.space, args.trials, args.metric, args.score, args.direction, args.prune, args.sampler_seed
    )
    cluster = PlacementCfg(num_cpus=args.num_cpus, num_gpus=args.num_gpus) if args.worker == "ray" else None
    return partial(sweep, request, settings, cluster, args.address)
