"""``embodichain sweep CONFIG --space 'lr=log(1e-4,1e-2)' --trials 40``: tune hyperparameters with Optuna."""

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
    """Tune the hyperparameters of a training: each trial trains with settings sampled from a space, is scored by its
    evaluations, and is stopped early if most others were better. The best trials are confirmed with further seeds and
    compared with the original config. The same command continues an interrupted sweep. Any field of the config is also
    a flag, as in embodichain train."""

    config: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG")]
    """Config file, or the name of a task or of any Gymnasium environment."""
    space: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="FIELD=VALUES,...")] = ()
    """Search space, such as 'lr=log(1e-4,1e-2),ent=[0,0.01],n_epochs={3,5,10}': log-uniform, uniform, categorical.
    Fields may be abbreviated to the last part of their names. The option can be repeated."""
    trials: int = 20
    """Number of trials."""
    seeds: str = "0..2"
    """Seeds of every trial, such as 0..4 or 0,1,7; its value is their mean."""
    jobs: int = 1
    """Number of trials trained in parallel."""
    metric: str = "eval/return"
    """Objective: the name of a logged metric, such as eval/success."""
    score: Literal["mean", "last", "best"] = "mean"
    """Which evaluation of a run counts: the mean of all (area under the learning curve), the last, or the best."""
    direction: Literal["maximize", "minimize"] = "maximize"
    """Whether to maximize or minimize the objective."""
    prune: bool = True
    """Whether to stop trials early that are worse than the median of the others at the same evaluation."""
    confirm: int = 5
    """Number of further seeds with which the best three trials and the original config are trained at the end; the best
    of them is written out. 0 writes out the best trial."""
    sampler_seed: int = 0
    """Seed of the sampler."""
    worker: Literal["process", "ray"] = "process"
    """Where trials are trained: in local processes, or in a Ray cluster."""
    address: str | None = None
    """Address of a Ray cluster (default: start one for this sweep)."""
    num_cpus: float = 1.0
    """Ray: CPU cores reserved for a training."""
    num_gpus: float = 0.0
    """Ray: GPUs, or a fraction of one, reserved for a training."""
    trust: Trust = ()


def main(argv: Sequence[str]) -> Callable[[], int]:
    """Return a function that runs the sweep; the first output is printed before the slow imports."""
    switches = dict.fromkeys(("prune", "no_prune", "help", "h"), 0)
    words = positional_first(argv, switches, _LOOKS_LIKE_CONFIG)
    args, overrides = parse_known_options(SweepArgs, words, "embodichain sweep")
    require("optuna", extra="sweep")
    if args.config.suffix in (".json", ".yaml", ".yml"):
        load_config(find_shipped(args.config))  # report an invalid file before the slow imports
    if not args.space:
        raise ConfigError("--space: expected what is searched, such as --space 'lr=log(1e-4,1e-2)'", "command line")
    if "torch" not in sys.modules:
        print(f"{args.config}: loading torch and MuJoCo ...", file=sys.stderr, flush=True)
    from embodichain.agents.processes.ray_backend import PlacementCfg
    from embodichain.agents.rl.sweeps.group import GroupRequest
    from embodichain.agents.rl.sweeps.study import SweepSettings, sweep

    request = GroupRequest.of(args.config, overrides, args.trust, args.seeds, args.jobs)
    settings = SweepSettings(
        args.space, args.trials, args.metric, args.score, args.direction, args.prune, args.sampler_seed, args.confirm
    )
    cluster = PlacementCfg(num_cpus=args.num_cpus, num_gpus=args.num_gpus) if args.worker == "ray" else None
    return partial(sweep, request, settings, cluster, args.address)
