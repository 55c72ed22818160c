"""Train a policy from a config: the only place that turns the names in a config into objects.

``python -m embodichain.agents.rl.train --config CONFIG`` is equivalent to ``embodichain train CONFIG``.
"""

import logging
import math
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from embodichain.agents.processes.shared_memory import format_bytes
from embodichain.agents.rl.algo.base import BaseAlgorithm, Teacher, build_algo
from embodichain.agents.rl.arguments import given_origins, parse_args
from embodichain.agents.rl.buffer.vla_buffer import VLABuffer
from embodichain.agents.rl.checkpoint import (
    check_parts,
    find_checkpoint,
    list_checkpoints,
    load_checkpoint,
    load_policy,
    load_weights,
)
from embodichain.agents.rl.collector.async_collector import AsyncCollector
from embodichain.agents.rl.collector.recovery import EnvRecovery
from embodichain.agents.rl.collector.remote_env import START_TIMEOUT, STEP_TIMEOUT, RemoteEnv
from embodichain.agents.rl.collector.sync_collector import SyncCollector
from embodichain.agents.rl.collector.weights import content_digest
from embodichain.agents.rl.config import (
    TrainCfg,
    TrainerCfg,
    check_devices,
    check_same_config,
    complete,
    for_rank,
    load_train_config,
    log_run_size,
    override,
    warn_about_clone,
    warn_about_config,
)
from embodichain.agents.rl.models.mlp import free_memory
from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.models.registry import build_policy
from embodichain.agents.rl.run_config import RunConfig
from embodichain.agents.rl.run_loop import TrainingResult
from embodichain.agents.rl.run_records import RunOrigin
from embodichain.agents.rl.runs import (
    RunFolder,
    locked_run,
    open_folder,
    read_saved,
    recording_failure,
    resume_command,
    run_to_resume,
)
from embodichain.agents.rl.trainer import Trainer
from embodichain.agents.rl.utils.distributed import Ranks, global_rank, is_launched, is_torchrun, joined_ranks
from embodichain.agents.rl.utils.tensordicts import space_bytes, space_from_data
from embodichain.config import merge
from embodichain.envs.physics.mujoco_cpu import available_cores
from embodichain.envs.registration import make, make_to_watch
from embodichain.envs.vec_env import VecEnv
from embodichain.envs.wrappers import GroupedEnv, arrange, chunked, make_grouped
from embodichain.errors import CheckpointError, ConfigError
from embodichain.extras import config_folders, import_trusted, locate_trusted
from embodichain.utils.console import MessageConsole, printing, shown_messages
from embodichain.utils.torch_runtime import seed_everything

PathLike = str | os.PathLike[str]
EXIT_INTERRUPTED = 130
_LOG = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Main entry point for command-line training; return the exit code."""
    args, rank = parse_args(argv), global_rank()
    args.trust = locate_trusted(args.trust, config_folders(args.config))
    _check_launch(args.distributed)
    console = MessageConsole(quiet=rank > 0)
    with shown_messages(rank):
        if args.resume is not None:
            result = resume_training(args.resume, args.overrides, args.trust, console)
        else:
            result = train_from_config(args.config, args.overrides, args.trust, console)
    with printing(console):
        console.print(report(result, args.trust), highlight=False, markup=False, soft_wrap=True)
    return EXIT_INTERRUPTED if result.reason == "interrupted" else 0


def _check_launch(distributed: bool | None) -> None:
    """Raise ``ConfigError`` if ``--distributed`` or ``--no-distributed`` contradicts how the process was launched."""
    if distributed and not is_torchrun() and not is_launched():
        command = "torchrun --nproc-per-node=2 -m embodichain train CONFIG"
        raise ConfigError(f"--distributed: torchrun starts the processes, one for each GPU: {command}", "command line")
    if distributed is False and is_launched():
        raise ConfigError("--no-distributed: start it without torchrun to train in one process", "command line")


def report(result: TrainingResult, trusted_modules: Collection[str] = (), command: str = "train") -> str:
    """Return the summary that is printed after a run."""
    speed = result.global_step / result.seconds if result.seconds else 0.0
    end = "interrupted" if result.reason == "interrupted" else f"ended by {result.reason}"
    lines = [f"{result.global_step} steps in {result.seconds:.0f} s ({speed:.0f} steps/s), {end}"]
    if result.evaluation is not None:
        lines.append(f"last evaluation: {result.evaluation}")
    lines.append(f"run: {result.run_dir}")
    if result.reason == "interrupted":
        lines.append(f"continue with: {resume_command(result.run_dir, trusted_modules, command)}")
    return "\n".join(lines)


def train_from_config(
    config_path: PathLike | TrainCfg,
    overrides: Sequence[str] = (),
    trusted_modules: Collection[str] = (),
    console: Console | None = None,
) -> TrainingResult:
    """Train from a config or its path, with overrides such as ``["--trainer.seed", "1"]``.

    When torchrun restarts the processes, the run continues from its latest checkpoint.
    """
    trusted_modules = locate_trusted(trusted_modules, config_folders(config_path))
    if isinstance(config_path, TrainCfg):
        cfg = complete(config_path, trusted_modules)
    else:
        cfg = load_train_config(config_path, trusted_modules, *given_origins(overrides))
    cfg = override(cfg, list(overrides), trusted_modules=trusted_modules)
    with joined_ranks() as ranks:
        run = run_to_resume(cfg.trainer, ranks)
        if run is not None:
            return _continue(run, overrides, trusted_modules, console, ranks)
        given = "" if isinstance(config_path, TrainCfg) else os.fspath(config_path)
        origin = RunOrigin(given, tuple(overrides), tuple(trusted_modules))
        with opened_trainer(cfg, None, None, trusted_modules, console, ranks, origin) as trainer:
            return trainer.train()


def resume_training(
    run: PathLike, overrides: Sequence[str] = (), trusted_modules: Collection[str] = (), console: Console | None = None
) -> TrainingResult:
    """Resume a run from its latest intact checkpoint, or from the given checkpoint."""
    trusted_modules = locate_trusted(trusted_modules, config_folders())
    with joined_ranks() as ranks:
        return _continue(run, overrides, trusted_modules, console, ranks)


def _continue(
    run: PathLike, overrides: Sequence[str], trusted_modules: Collection[str], console: Console | None, ranks: Ranks
) -> TrainingResult:
    with locked_run(run, ranks) as folder:
        with recording_failure(folder, trusted_modules, ranks):
            cfg, state = _read_run(run, folder, overrides, trusted_modules, ranks)
        origin = RunOrigin(overrides=tuple(overrides))
        with opened_trainer(cfg, folder, state, trusted_modules, console, ranks, origin) as trainer:
            return trainer.train()


def _read_run(
    run: PathLike, folder: RunFolder, overrides: Sequence[str], trusted_modules: Collection[str], ranks: Ranks
) -> tuple[TrainCfg, dict[str, Any] | None]:
    """Return the config and checkpoint of a run to resume; the first rank reads them and sends them to the others.

    The checkpoint is ``None`` if the run was killed before it saved one.
    """
    saved: tuple[str, dict[str, Any], dict[str, Any] | None] | None = None
    with ranks.together("reading the checkpoint"):
        if ranks.is_first:
            saved = read_saved(run, folder, "train")
    source, config, state = ranks.from_first(saved)
    cfg = complete(TrainCfg.from_dict(config, source=source), trusted_modules, source)
    return override(cfg, list(overrides), trusted_modules=trusted_modules), state


@contextmanager
def opened_trainer(
    cfg: TrainCfg,
    folder: RunFolder | None,
    state: Mapping[str, Any] | None,
    trusted_modules: Collection[str],
    console: Console | None,
    ranks: Ranks,
    origin: RunOrigin | None = None,
) -> Iterator[Trainer]:
    """Build a trainer, restore ``state`` if given, and close its environments and collector on exit.

    ``folder`` is the folder of the run to resume, ``None`` for a new run. ``origin`` is stored in it.
    """
    with ranks.together("looking for its device"):
        check_devices(cfg)
    check_same_config(cfg, ranks)
    folder = open_folder(cfg, folder, ranks, restart=state is None)
    folder.origin = origin or folder.origin
    console = console if ranks.is_first else MessageConsole(quiet=True)
    with ExitStack() as stack:
        stack.callback(folder.lock.release)
        stack.enter_context(recording_failure(folder, trusted_modules, ranks))
        trainer = build_trainer(cfg, folder, trusted_modules, console, ranks, resumed=state)
        stack.callback(trainer.env.close)
        stack.callback(trainer.collector.close)
        if trainer.eval_env is not None:
            stack.callback(trainer.eval_env.close)
        if state is not None:
            trainer.restore(state)
        yield trainer


def build_trainer(
    cfg: TrainCfg,
    folder: RunFolder,
    trusted_modules: Collection[str] = (),
    console: Console | None = None,
    ranks: Ranks | None = None,
    resumed: Mapping[str, Any] | None = None,
) -> Trainer:
    """Build everything that a completed config describes, and return the trainer.

    ``resumed`` is the checkpoint of this run that the caller restores afterwards. If given, ``init_from`` is ignored
    and the teacher is the one that the run used before.
    """
    ranks = Ranks() if ranks is None else ranks
    given, cfg = cfg, for_rank(cfg, ranks)
    settings = cfg.trainer
    if ranks.is_first:
        warn_about_config(given)
    seed_everything(settings.seed)
    stages, processes = settings.collector.pipeline_stages, settings.collector.env_processes
    maker = EnvMaker(
        settings.environment,
        tuple(trusted_modules),
        stages,
        processes=processes,
        timeouts=(settings.collector.start_timeout, settings.collector.step_timeout),
    )
    with ExitStack() as undo:  # if something fails
        with ranks.together("building"):
            env = maker()
            undo.callback(env.close)
            policy = build_policy(cfg.policy, env.observation_space, env.action_space, torch.device(settings.device))
            if settings.init_from is not None and resumed is None:
                load_initial_weights(settings.init_from, policy)
                if ranks.is_first:
                    warn_about_clone(given, policy)
            env, maker = in_chunks(env, policy.chunk_size), replace(maker, chunk_size=policy.chunk_size)
            algorithm = build_algo(cfg.algorithm.name, algorithm_settings(cfg), policy)
            if algorithm.teacher_source is not None:
                teacher = _previous_teacher(cfg, resumed, trusted_modules) or load_teacher(
                    algorithm.teacher_source, settings.device, trusted_modules
                )
                algorithm.teach(teacher, env, _actions(settings.environment))
                _LOG.info("learning from %s", teacher.source)
            eval_env = make_eval_env(cfg, trusted_modules) if settings.enable_eval and ranks.is_first else None
            if eval_env is not None:
                undo.callback(eval_env.close)
            check_rollouts_fit(settings, env, policy)
        if ranks.is_first and not resumed:
            log_run_size(settings, ranks.count, policy.chunk_size)
        if ranks.is_first and algorithm.start_rollout is not None:
            warn_about_length(settings.buffer_size, env.max_episode_steps, type(algorithm).__name__)
        algorithm.join(ranks)
        collector = build_collector(settings, env, maker, algorithm)
        trainer = Trainer(given, env, algorithm, collector, folder, eval_env, console)
        undo.pop_all()
        return trainer


def load_initial_weights(source: str, policy: Policy) -> None:
    """Load the weights of a run or checkpoint into a new policy, and reset its version to 0.

    If only one of the two has a critic or an ``auxiliary`` head, that part is skipped.
    """
    try:
        folder = find_checkpoint(source, "best")
        state = load_checkpoint(folder)
    except CheckpointError as error:
        raise ConfigError(f"trainer.init_from: {error}") from error
    check_parts(state, folder, "policy")
    own = policy.state_dict()
    lacking = {name: value for name, value in own.items() if policy.in_critic(name) or _part(name) == "auxiliary"}
    unused = {"auxiliary"} if policy.has_critic else {"auxiliary", "critic"}
    given = {name: value for name, value in state["policy"].items() if name in own or _part(name) not in unused}
    try:
        load_weights(policy, lacking | given, f"trainer.init_from: {folder}")
    except CheckpointError as error:
        hint = f"the block 'policy' has to be that of {source}, which its train_config.json holds"
        raise CheckpointError(f"{error}; {hint}") from error
    policy.version.zero_()


def _part(name: str) -> str:
    return name.partition(".")[0]


def _previous_teacher(
    cfg: TrainCfg, resumed: Mapping[str, Any] | None, trusted_modules: Collection[str]
) -> Teacher | None:
    """Return the teacher that a resumed run used before, found by the digest of its weights.

    ``None`` if the config names another teacher, or if no checkpoint of the teacher's run has these weights any more.
    """
    known = {} if resumed is None else resumed["algorithm"].get("teacher", {})
    named = cfg.algorithm.cfg.get("teacher")
    if resumed is None or not known.get("source") or resumed["config"]["algorithm"]["cfg"].get("teacher") != named:
        return None
    recorded = Path(known["source"])
    for folder in (recorded, *reversed(list_checkpoints(recorded.parent))):
        with suppress(ConfigError):  # a damaged checkpoint
            teacher = load_teacher(str(folder), cfg.trainer.device, trusted_modules)
            if content_digest(teacher.policy) == known["digest"]:
                return teacher
    return None


def load_teacher(source: str, device: str, trusted_modules: Collection[str]) -> Teacher:
    """Return the policy of a run or checkpoint as a teacher."""
    try:
        folder = find_checkpoint(source, "best")
        state = load_checkpoint(folder)
        policy = load_policy(folder, None, device, trusted_modules=trusted_modules)
    except CheckpointError as error:
        problem = f"teacher: {error}. Train one first, or name another with --algorithm.cfg.teacher"
        raise ConfigError(problem, "algorithm.cfg") from error
    spaces = {name: space_from_data(state["spaces"][name]) for name in ("observation", "action")}
    actions = _actions(state["config"]["trainer"].get("gym_config"))
    return Teacher(policy, spaces["observation"], spaces["action"], str(folder), actions)


def _actions(environment: Any) -> Any:
    """Return ``env.actions`` of an environment config, ``None`` if it is not set."""
    settings = environment.get("env") if isinstance(environment, Mapping) else None
    return settings.get("actions") if isinstance(settings, Mapping) else None


def warn_about_length(buffer_size: int, limit: int | None, algorithm: str) -> None:
    """Warn if rollouts start with new episodes and are shorter than the episodes' time limit."""
    if limit is not None and buffer_size < limit:
        _LOG.warning(
            "trainer.buffer_size is %d, an episode has up to %d steps: %s begins every rollout with new episodes, so "
            "it never learns from what comes later, and logs episodes as they are when the rollout cuts them. Add "
            "--trainer.buffer_size %d to train on whole ones",
            *(buffer_size, limit, algorithm, limit),
        )


def check_rollouts_fit(trainer: TrainerCfg, env: VecEnv, policy: Policy) -> None:
    """Raise ``ConfigError`` if rollouts need more memory than is free."""
    device, count = policy.device, trainer.collector.max_policy_lag + 2 if trainer.collects_async else 1
    numbers = 16 + math.prod(env.action_space.shape or (1,))  # besides observations: rewards, values, flags, ...
    needed = env.num_envs * trainer.buffer_size * count * (space_bytes(env.observation_space) + 4 * numbers)
    room = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
    if needed > room:
        raise ConfigError(
            f"trainer.buffer_size: {count} rollout(s) of {env.num_envs} envs and {trainer.buffer_size} steps need "
            f"{format_bytes(needed)}, but {format_bytes(room)} are free: choose fewer steps or envs"
        )


@dataclass(frozen=True)
class EnvMaker:
    """A picklable factory of the environments that a config describes."""

    gym_config: dict[str, Any]
    trusted_modules: tuple[str, ...] = ()
    num_groups: int = 1
    """Groups of environments for pipelined collection."""
    chunk_size: int = 1
    """Actions per decision."""
    processes: int = 0
    """Number of simulation processes; 0 simulates in the calling process."""
    timeouts: tuple[float, float] = (START_TIMEOUT, STEP_TIMEOUT)
    """Timeouts of a simulation process in seconds: for its start and for each step."""

    def __call__(self) -> VecEnv:
        """Return new environments."""
        import_trusted(self.trusted_modules, config_folders())
        num_envs = int(self.gym_config["num_envs"])
        if not self.processes:
            return make_grouped(self._make_group, num_envs, self.num_groups)
        threads = (self.gym_config.get("num_threads") or available_cores()) // self.processes
        part = self.gym_config | {"num_envs": num_envs // self.processes, "num_threads": max(1, threads)}
        maker = replace(self, gym_config=part, num_groups=1, processes=0)
        start, step = self.timeouts
        envs = RemoteEnv.several([maker] * self.processes, start_timeout=start, step_timeout=step)
        return arrange(envs, self.num_groups)

    def _make_group(self, num_envs: int) -> VecEnv:
        return chunked(make(self.gym_config | {"num_envs": num_envs}, self.trusted_modules), self.chunk_size)


def make_eval_env(cfg: RunConfig, trusted_modules: Collection[str] = (), **changes: Any) -> VecEnv:
    """Return the evaluation environments of a config; ``changes`` override its environment settings."""
    settings = cfg.trainer
    num_envs = min(settings.num_eval_envs, settings.num_eval_episodes)
    chosen: dict[str, Any] = {"num_envs": num_envs, "seed": settings.eval_seed} | changes
    given = merge(merge(settings.environment, settings.eval_gym_config), chosen)
    return make_to_watch(given, trusted_modules, video=settings.eval_video)


def in_chunks(env: VecEnv, chunk_size: int) -> VecEnv:
    """Wrap environments so that each step takes a chunk of ``chunk_size`` actions."""
    if isinstance(env, GroupedEnv) and env.is_divisible:
        return GroupedEnv([in_chunks(group, chunk_size) for group in env.groups]) if chunk_size > 1 else env
    return env.in_chunks(chunk_size) if isinstance(env, RemoteEnv) else chunked(env, chunk_size)


def algorithm_settings(cfg: TrainCfg) -> dict[str, Any]:
    """Return the algorithm's settings, with CUDA graphs disabled if a collector thread uses the same GPU.

    The test whether a step can be captured forbids GPU synchronisation in the whole process, including that thread.
    """
    trainer, settings = cfg.trainer, dict(cfg.algorithm.cfg)
    in_thread = trainer.collects_async and trainer.collector.worker == "thread"
    if in_thread and settings.get("cuda_graphs") and torch.device(trainer.device).type == "cuda":
        _LOG.info("gradient steps are not recorded as CUDA graphs, as a thread collects on the same GPU")
        settings["cuda_graphs"] = False
    return settings


def build_collector(
    trainer: TrainerCfg, env: VecEnv, make_env: EnvMaker, algorithm: BaseAlgorithm
) -> SyncCollector | AsyncCollector:
    """Build the collector of a config; with worker processes, ``env`` is closed and each makes its own."""
    policy, device = algorithm.acting, algorithm.device
    options: dict[str, Any] = {"start_rollout": algorithm.start_rollout, "return_discount": algorithm.return_discount}
    if not trainer.collects_async:
        threads, stages = trainer.collect_threads, trainer.collector.pipeline_stages
        sync = SyncCollector(env, policy, device, num_threads=threads, pipeline_stages=stages, **options)
        if trainer.collector.env_processes:  # only processes are replaced: an error in this process is a bug to show
            sync.recovery = EnvRecovery(trainer.collector.max_restarts, silence=max(make_env.timeouts))
        return sync
    cfg, adopt = trainer.collector, trainer.collector.adopt
    if algorithm.one_version_per_rollout and adopt == "step":
        adopt = "rollout"
        _LOG.info("%s compares trajectories: new weights are adopted between rollouts", type(algorithm).__name__)
    cfg = cfg.replace(
        adopt=adopt,
        num_steps=trainer.buffer_size,
        seed=trainer.seed if cfg.seed is None else cfg.seed,
        num_threads=trainer.collect_threads if cfg.num_threads is None else cfg.num_threads,
    )
    buffer = VLABuffer((cfg.max_policy_lag + 1) * env.num_envs * trainer.buffer_size, device)
    if cfg.worker != "thread":
        env.close()  # only its spaces were needed
    source = env if cfg.worker == "thread" else make_env
    return AsyncCollector(source, policy, buffer, device, cfg=cfg, make_env=make_env, **options)


if __name__ == "__main__":
    from embodichain.cli.main import main as command_line

    sys.exit(command_line(["train", *sys.argv[1:]]))
