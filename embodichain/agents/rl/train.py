"""From a config to a trained policy: names become objects here, and nowhere else.

``python -m embodichain.agents.rl.train --config CONFIG`` does the same as ``embodichain train CONFIG``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from embodichain.agents.rl.algo.registry import build_algo
from embodichain.agents.rl.models.registry import build_policy
from embodichain.agents.rl.trainer import Trainer, TrainingResult
from embodichain.agents.rl.training.advice import tell_of_collection
from embodichain.agents.rl.training.agreement import check_same_config, open_folder, restarted_run
from embodichain.agents.rl.training.collection import EnvMaker, algorithm_settings, build_collector, in_chunks
from embodichain.agents.rl.training.config import TrainCfg, check_devices, complete, load_train_config, override
from embodichain.agents.rl.training.launch import command, for_rank, global_rank, joined_ranks
from embodichain.agents.rl.training.run_folder import RunFolder
from embodichain.agents.rl.utils.checkpoint import CHECKPOINTS, find_checkpoint, load_checkpoint
from embodichain.agents.rl.utils.random_state import seed_everything
from embodichain.agents.rl.utils.ranks import Ranks
from embodichain.agents.utils.messages import shown_messages
from embodichain.agents.utils.modules import module_folders, module_name
from embodichain.config import merge
from embodichain.envs.gl import choose_backend
from embodichain.envs.registration import list_envs, make
from embodichain.envs.vec_env import VecEnv
from embodichain.errors import ConfigError, EmbodiChainError, RenderingError, TrainingStateError

_USAGE = """usage: embodichain train CONFIG [--trainer.num_envs 128 ...] [--trust MODULE ...]
       embodichain train --resume RUN [--trainer.iterations 2000 ...] [--trust MODULE ...]

Train a policy as a train_config.json (or .yaml) says, or go on with a run as if it had never stopped.

  CONFIG, --config CONFIG   the config's file
  --resume RUN              folder of a run, or of one of its checkpoints
  --trust MODULE            import this module of your own (its name, or its .py file), which registers a policy,
                            algorithm or environment
  --SECTION.FIELD VALUE     change any field; 'embodichain train CONFIG --help' lists them
"""
EXIT_INTERRUPTED = 130


@dataclass(frozen=True)
class TrainArgs:
    """The command line, taken apart."""

    config: Path | None
    """File of the config."""
    resume: Path | None
    """Run or checkpoint to go on with."""
    trust: tuple[str, ...]
    """Modules that may be imported."""
    overrides: list[str]
    """Words that change fields of the config."""


def parse_args(argv: Sequence[str] | None = None) -> TrainArgs:
    """Parse command line arguments; what belongs to no option of this command is left for the config."""
    words = list(sys.argv[1:] if argv is None else argv)
    leading = words.pop(0) if words and not words[0].startswith("-") else None
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, usage=_USAGE, exit_on_error=False)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--trust", action="append", default=[])
    try:
        known, rest = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error), "command line") from None
    config = known.config if leading is None else Path(leading)
    if config is None and known.resume is None and {"-h", "--help"} & set(rest):
        print(_USAGE, end="")
        raise SystemExit(0)
    if (config is None) == (known.resume is None) or (leading is not None and known.config is not None):
        raise ConfigError(f"expected either a config or --resume RUN\n\n{_USAGE}", "command line")
    return TrainArgs(config, known.resume, tuple(known.trust), rest)


def main(argv: Sequence[str] | None = None) -> int:
    """Main entry point for command-line training; return the exit code."""
    args, rank = parse_args(argv), global_rank()
    console = Console(stderr=True, quiet=rank > 0)
    with shown_messages(rank):
        if args.resume is not None:
            result = resume_training(args.resume, args.overrides, args.trust, console)
        else:
            result = train_from_config(_given(args.config), args.overrides, args.trust, console)
    console.print(report(result), highlight=False, markup=False, soft_wrap=True)
    return EXIT_INTERRUPTED if result.reason == "interrupted" else 0


def train_from_config(
    config_path: str | os.PathLike[str] | TrainCfg,
    overrides: Sequence[str] = (),
    trusted_modules: Collection[str] = (),
    console: Console | None = None,
) -> TrainingResult:
    """Run training from a config file path (or a config): ``train_from_config(path, ["--trainer.seed", "1"])``."""
    if isinstance(config_path, TrainCfg):
        cfg = complete(config_path, trusted_modules)
    else:
        cfg = load_train_config(config_path, trusted_modules)
    cfg = override(cfg, list(overrides))
    with joined_ranks() as ranks:
        restarted = restarted_run(cfg.trainer, ranks)
        if restarted is None:
            return _train(cfg, None, trusted_modules, console, ranks)
        run, has_checkpoint = restarted
        if not has_checkpoint:
            return _train(cfg, (run, None), trusted_modules, console, ranks)
        return _resume(run, overrides, trusted_modules, console, ranks)


def resume_training(
    run: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    trusted_modules: Collection[str] = (),
    console: Console | None = None,
) -> TrainingResult:
    """Go on with a run from its latest checkpoint (or from the checkpoint given), as if it had never stopped."""
    with joined_ranks() as ranks:
        return _resume(run, overrides, trusted_modules, console, ranks)


def build_trainer(
    cfg: TrainCfg,
    folder: RunFolder,
    trusted_modules: Collection[str] = (),
    console: Console | None = None,
    ranks: Ranks | None = None,
) -> Trainer:
    """Construct everything a completed config describes, and the trainer that holds it."""
    ranks = Ranks() if ranks is None else ranks
    given, cfg = cfg, for_rank(cfg, ranks)
    settings = cfg.trainer
    if ranks.is_first:
        tell_of_collection(given)
    seed_everything(settings.seed)
    stages, processes = settings.collector.pipeline_stages, settings.collector.env_processes
    folders = module_folders(trusted_modules)
    environment = dict(_mapping(settings.gym_config))
    maker = EnvMaker(environment, tuple(trusted_modules), stages, processes=processes, folders=folders)
    with ranks.together("building"):
        env = maker()
        policy = build_policy(cfg.policy, env.observation_space, env.action_space, torch.device(settings.device))
        env, maker = in_chunks(env, policy.chunk_size), replace(maker, chunk_size=policy.chunk_size)
        algorithm = build_algo(cfg.algorithm.name, algorithm_settings(cfg), policy)
        eval_env = make_eval_env(cfg, trusted_modules) if settings.enable_eval and ranks.is_first else None
    algorithm.join(ranks)
    collector = build_collector(settings, env, maker, algorithm, folder.name_of(ranks.rank, ranks.count))
    return Trainer(given, env, algorithm, folder, eval_env, console, collector)


def make_eval_env(cfg: TrainCfg, trusted_modules: Collection[str] = (), **changes: Any) -> VecEnv:
    """Return the environments that a policy of this config is evaluated in."""
    settings = cfg.trainer
    num_envs = min(settings.num_eval_envs, settings.num_eval_episodes)
    chosen: dict[str, Any] = {"num_envs": num_envs, "seed": settings.eval_seed} | changes
    given = merge(merge(_mapping(settings.gym_config), settings.eval_gym_config), chosen)
    if settings.eval_video and given["id"] not in {spec.id for spec in list_envs()}:
        given = merge({"kwargs": {"render_mode": "rgb_array"}}, given)  # Gymnasium wants to know beforehand
        with contextlib.suppress(RenderingError):  # its MuJoCo envs take the backend from MUJOCO_GL; others need none
            choose_backend()
    return make(given, trusted_modules=[module_name(entry) for entry in trusted_modules])


def report(result: TrainingResult) -> str:
    """Return what a person wants to know after a run."""
    speed = result.global_step / result.seconds if result.seconds else 0.0
    end = "interrupted" if result.reason == "interrupted" else f"ended by {result.reason}"
    lines = [f"{result.global_step} steps in {result.seconds:.0f} s ({speed:.0f} steps/s), {end}"]
    if result.evaluation is not None:
        lines.append(f"last evaluation: {result.evaluation}")
    lines.append(f"run: {result.run_dir}")
    if result.reason == "interrupted":
        lines.append(f"go on with: {command()} train --resume {result.run_dir}")
    return "\n".join(lines)


def _resume(
    run: str | os.PathLike[str],
    overrides: Sequence[str],
    trusted_modules: Collection[str],
    console: Console | None,
    ranks: Ranks,
) -> TrainingResult:
    saved: tuple[str, dict[str, Any]] | None = None
    with ranks.together("reading the checkpoint"):
        if ranks.is_first:
            saved = _read_run(run)
    checkpoint, state = ranks.from_first(saved)
    cfg = complete(TrainCfg.from_dict(state["config"], source=checkpoint), trusted_modules, checkpoint)
    folder = Path(checkpoint).parent.parent
    return _train(override(cfg, list(overrides)), (folder, state), trusted_modules, console, ranks)


def _train(
    cfg: TrainCfg,
    saved: tuple[Path, dict[str, Any] | None] | None,
    trusted_modules: Collection[str],
    console: Console | None,
    ranks: Ranks,
) -> TrainingResult:
    """Build, restore if there is something to restore, train, and release the environments.

    ``saved`` is the folder of a run that was begun before, and its checkpoint if it has one.
    """
    with ranks.together("looking for its device"):
        check_devices(cfg)
    check_same_config(cfg, ranks)
    run, state = (None, None) if saved is None else saved
    folder = open_folder(cfg, run, ranks, is_new=state is None)
    console = console if ranks.is_first else Console(stderr=True, quiet=True)
    trainer = build_trainer(cfg, folder, trusted_modules, console, ranks)
    try:
        if state is not None:
            trainer.restore(state)
        return trainer.train()
    except (EmbodiChainError, KeyboardInterrupt) as error:
        _tell_how_to_go_on(error, folder)
        raise
    finally:
        trainer.env.close()
        if trainer.eval_env is not None:
            trainer.eval_env.close()


def _tell_how_to_go_on(error: BaseException, folder: RunFolder) -> None:
    """Note on an error how the run is resumed, if it can be."""
    if "--resume" in str(error):
        return
    with contextlib.suppress(EmbodiChainError):
        find_checkpoint(folder.path, "latest")
        error.add_note(f"go on with: {command()} train --resume {folder.path}")


def _read_run(run: str | os.PathLike[str]) -> tuple[str, dict[str, Any]]:
    """Return the checkpoint that a run goes on from, and its content."""
    checkpoint = find_checkpoint(run, "latest").resolve()
    state = load_checkpoint(checkpoint)
    if checkpoint.parent.name != CHECKPOINTS:
        raise TrainingStateError(f"{checkpoint} does not lie in the folder of a run, which is needed to go on with it")
    return str(checkpoint), state


def _mapping(value: str | Mapping[str, Any]) -> Mapping[str, Any]:
    return {"id": value} if isinstance(value, str) else value


def _given(path: Path | None) -> Path:
    if path is None:
        raise ConfigError("expected the file of a config", "command line")
    return path


if __name__ == "__main__":
    from embodichain.cli.main import main as command_line

    sys.exit(command_line(["train", *sys.argv[1:]]))
