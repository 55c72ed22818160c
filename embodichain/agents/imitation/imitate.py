"""Builds and runs an imitation from a config: the command ``embodichain imitate`` and its Python API."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from rich.console import Console

from embodichain.agents.imitation.config import (
    ImitateCfg,
    MixedCfg,
    complete,
    load_imitate_config,
    override,
    stream_settings,
)
from embodichain.agents.imitation.sources import (
    ChunkSource,
    FolderSource,
    MixedSource,
    StreamSource,
    Wanted,
    spaces_of_folder,
)
from embodichain.agents.imitation.trainer import ImitationTrainer
from embodichain.agents.rl.algo.imitation import Imitation
from embodichain.agents.rl.arguments import given_origins
from embodichain.agents.rl.checkpoint import load_weights, reading_checkpoint
from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.models.registry import build_policy
from embodichain.agents.rl.run_loop import TrainingResult
from embodichain.agents.rl.run_records import RunOrigin
from embodichain.agents.rl.runs import RunFolder, locked_run, open_folder, read_saved, recording_failure
from embodichain.agents.rl.train import EXIT_INTERRUPTED, load_initial_weights, make_eval_env, report
from embodichain.agents.rl.utils.distributed import Ranks, is_launched
from embodichain.envs.registration import make_to_watch
from embodichain.errors import ConfigError
from embodichain.extras import config_folders, locate_trusted
from embodichain.utils.console import MessageConsole, printing, shown_messages
from embodichain.utils.torch_runtime import seed_everything

PathLike = str | os.PathLike[str]


def run(args: argparse.Namespace) -> int:
    """Run the command with parsed arguments (see ``parse_args``); return the exit code."""
    if is_launched() or args.distributed:
        raise ConfigError("embodichain imitate trains in one process: start it without torchrun", "command line")
    if args.viewer:
        problem = "--viewer: there are no environments to see; embodichain stream CONFIG --viewer shows a stream"
        raise ConfigError(problem, "command line")
    args.trust = locate_trusted(args.trust, config_folders(args.config))
    console = MessageConsole()
    with shown_messages():
        if args.resume is not None:
            result = resume_imitation(args.resume, args.overrides, args.trust, console)
        else:
            result = imitate_from_config(args.config, args.overrides, args.trust, console)
    with printing(console):
        text = report(result, args.trust, "imitate")
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    return EXIT_INTERRUPTED if result.reason == "interrupted" else 0


def imitate_from_config(
    config: PathLike | ImitateCfg,
    overrides: Sequence[str] = (),
    trusted_modules: Collection[str] = (),
    console: Console | None = None,
) -> TrainingResult:
    """Run an imitation from a config, its file, or the name of an environment, with overrides such as
    ``["--trainer.seed", "1"]``."""
    trusted_modules = locate_trusted(trusted_modules, config_folders(config))
    cfg = read_config(config, overrides, trusted_modules)
    given = "" if isinstance(config, ImitateCfg) else os.fspath(config)
    origin = RunOrigin(given, tuple(overrides), tuple(trusted_modules), "imitate")
    with opened_imitation(cfg, None, None, trusted_modules, console, origin) as trainer:
        return trainer.train()


def read_config(
    config: PathLike | ImitateCfg, overrides: Sequence[str] = (), trusted_modules: Collection[str] = ()
) -> ImitateCfg:
    """Load a config, complete it and apply overrides."""
    if isinstance(config, ImitateCfg):
        cfg = complete(config, trusted_modules)
    else:
        cfg = load_imitate_config(config, trusted_modules, *given_origins(overrides))
    return override(cfg, list(overrides), trusted_modules)


def resume_imitation(
    run: PathLike, overrides: Sequence[str] = (), trusted_modules: Collection[str] = (), console: Console | None = None
) -> TrainingResult:
    """Resume a run from its latest intact checkpoint, or from the given checkpoint."""
    trusted_modules = locate_trusted(trusted_modules, config_folders())
    with locked_run(run, Ranks()) as folder:
        with recording_failure(folder, trusted_modules, command="imitate"):
            file, config, state = read_saved(run, folder, "imitate")
            cfg = complete(ImitateCfg.from_dict(config, source=file), trusted_modules, file)
            cfg = override(cfg, list(overrides), trusted_modules)
        origin = RunOrigin(overrides=tuple(overrides))
        with opened_imitation(cfg, folder, state, trusted_modules, console, origin) as trainer:
            return trainer.train()


@contextmanager
def opened_imitation(
    cfg: ImitateCfg,
    folder: RunFolder | None = None,
    state: Mapping[str, Any] | None = None,
    trusted_modules: Collection[str] = (),
    console: Console | None = None,
    origin: RunOrigin | None = None,
) -> Iterator[ImitationTrainer]:
    """Build the trainer of a new run, or of the run in ``folder`` with its ``state`` restored; release it on exit.

    ``origin`` records in the folder how the run was started.
    """
    folder = open_folder(cfg, folder, Ranks(), restart=state is None)
    folder.origin = origin or folder.origin
    with ExitStack() as stack:
        stack.callback(folder.lock.release)
        stack.enter_context(recording_failure(folder, trusted_modules, command="imitate"))
        trainer = build_imitation(cfg, folder, trusted_modules, console, state)
        stack.callback(trainer.source.close)
        if trainer.eval_env is not None:
            stack.callback(trainer.eval_env.close)
        if state is not None:
            trainer.restore(state)
        yield trainer


def build_imitation(
    cfg: ImitateCfg,
    folder: RunFolder,
    trusted_modules: Collection[str] = (),
    console: Console | None = None,
    resumed: Mapping[str, Any] | None = None,
) -> ImitationTrainer:
    """Build the trainer from a completed config; this starts its streams."""
    settings = cfg.trainer
    seed_everything(settings.seed)
    spaces, longest = _spaces(cfg, trusted_modules)
    policy = build_policy(cfg.policy, spaces["observation"], spaces["action"], torch.device(settings.device))
    if settings.init_from is not None and resumed is None:
        load_initial_weights(settings.init_from, policy)
    chosen = cfg.algorithm.cfg
    learner = Imitation(chosen.replace(total_steps=chosen.total_steps or settings.total_steps), policy)
    wanted = Wanted.by(policy, spaces["observation"], spaces["action"], learner.chunk_size, chosen.points)
    _check_chunks_fit(cfg, learner.chunk_size, longest)
    with ExitStack() as undo:
        eval_env = make_eval_env(cfg, trusted_modules) if settings.enable_eval else None
        if eval_env is not None:
            undo.callback(eval_env.close)
        step = 0 if resumed is None else int(resumed["trainer"]["global_step"])
        if resumed is not None and step >= settings.publish_freq:  # it acts from the stream's first episodes on
            with reading_checkpoint("the checkpoint"):
                load_weights(policy, resumed["policy"], "the checkpoint")
        acting = policy if step >= settings.publish_freq else None
        source = open_source(cfg, wanted, step, trusted_modules, acting)
        undo.callback(source.close)
        trainer = ImitationTrainer(cfg, learner, source, spaces, folder, eval_env, console)
        undo.pop_all()
    return trainer


def _spaces(cfg: ImitateCfg, trusted_modules: Collection[str]) -> tuple[dict[str, Any], int | None]:
    """Return the observation and action spaces of the environment, or else of the first folder, and the time limit."""
    if cfg.trainer.gym_config:
        with make_to_watch(cfg.trainer.environment | {"num_envs": 1}, trusted_modules) as env:
            return {"observation": env.observation_space, "action": env.action_space}, env.max_episode_steps
    part = cfg.source.parts()[0]
    observation, action = spaces_of_folder(str(part.dataset), part.keys)
    return {"observation": observation, "action": action}, None


def _check_chunks_fit(cfg: ImitateCfg, chunk_size: int, usual: int | None) -> None:
    """Raise ``ConfigError`` if no episode of a stream can be as long as a chunk, before the stream fills its buffer.

    ``usual`` is the time limit of the trainer's environment.
    """
    trained_in = cfg.trainer.environment if cfg.trainer.gym_config else {}
    for part in cfg.source.parts():
        if part.stream is None:
            continue
        settings = stream_settings(cfg, part)
        environments = [entry.gym_config for entry in settings.tasks()]
        if not environments and isinstance(settings.gym_config, dict):
            environments = [settings.gym_config]
        own = None if "max_episode_steps" in trained_in else trained_in.get("id")
        limits = [
            given.get("max_episode_steps") or (usual if given.get("id") == own else settings.max_episode_steps)
            for given in environments
        ]
        known = [limit for limit in limits if limit is not None]
        if known and len(known) == len(limits) and chunk_size > max(known):
            problem = f"expected at most {max(known)} steps, as many as an episode has (max_episode_steps)"
            raise ConfigError(f"chunk_size: {problem}, got {chunk_size}", "policy")


def open_source(
    cfg: ImitateCfg,
    wanted: Wanted,
    step: int = 0,
    trusted_modules: Collection[str] = (),
    acting: Policy | None = None,
) -> ChunkSource:
    """Open the block ``source`` of a config. A resumed run passes its ``step``, and the policy that is ``acting``."""
    seed, parts = cfg.trainer.seed, cfg.source.parts()

    def open_part(index: int, part: MixedCfg) -> ChunkSource:
        if part.stream is not None:
            return StreamSource(stream_settings(cfg, part, step + 1_000_003 * index, trusted_modules), wanted, acting)
        return FolderSource(str(part.dataset), wanted, seed + index, part.keys, part.memory)

    with ExitStack() as undo:
        sources = []
        for index, part in enumerate(parts):
            sources.append(open_part(index, part))
            undo.callback(sources[-1].close)
        undo.pop_all()
    return sources[0] if not cfg.source.mixture else MixedSource(sources, [part.weight for part in parts], seed)
