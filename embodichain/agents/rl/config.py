"""The config classes of ``train_config.json``; how a config is loaded, completed, overridden and checked."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch

from embodichain.agents.rl.algo.base import get_algo_class
from embodichain.agents.rl.arguments import NO_VALUE, given_environment, given_value
from embodichain.agents.rl.collector.config import AsyncCfg, CollectorBlock
from embodichain.agents.rl.default_config import config_of_environment
from embodichain.agents.rl.models.actor_critic import NetworkPolicy
from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.models.registry import (
    PolicyBlock,
    arguments_of,
    check_policy,
    get_policy_class,
    policy_schemas,
)
from embodichain.agents.rl.run_config import (
    FILE_SUFFIXES,
    NumEnvs,
    RunConfig,
    RunSettings,
    attempt,
    environment_settings,
    initial_policy_block,
    is_clone,
    joined_errors,
    known_environment,
    problem_lines,
)
from embodichain.agents.rl.utils import ClippedCfg
from embodichain.agents.rl.utils.distributed import Ranks, local_count, local_rank
from embodichain.config import (
    MISSING,
    Config,
    Count,
    Field,
    Threads,
    configclass,
    load_config,
    parse_overrides,
)
from embodichain.config.command_line import flags_of, to_plain
from embodichain.config.compat import translate_train_config
from embodichain.config.files import dotted, find_beside, find_shipped
from embodichain.envs.env_cfg import GymCfg
from embodichain.envs.physics.mujoco_cpu import available_cores
from embodichain.errors import ConfigError, EmbodiChainError
from embodichain.extras import check_trusted, config_folders, import_trusted

_CLONE_WARMUP = 10
"""Updates that train only the critic, for a policy that was imitated."""
_USED_BY_SYNC = ("pipeline_stages", "env_processes")
_USED_BY_ENV_PROCESSES = ("max_restarts", "step_timeout", "start_timeout")
_RANKS_OWN = ("trainer.run_dir", "trainer.output_dir")
"""Fields in which ranks may differ, as only the first rank uses them."""
_LOG = logging.getLogger(__name__)
_C = TypeVar("_C", bound=RunConfig)


@configclass
class TrainerCfg(RunSettings):
    """The block ``trainer``: length, rollouts, evaluation and output. Steps are counted over all envs and ranks."""

    num_envs: NumEnvs | None = None
    """Number of parallel environments on each rank; default: gym_config.num_envs."""
    buffer_size: Annotated[int, Field(ge=1, le=2**24)] = 32
    """Steps per environment and rollout."""
    iterations: Count | None = None
    """Training ends after this many rollouts."""
    total_steps: Count | None = None
    """Training ends after this many environment steps."""
    collector: CollectorBlock = AsyncCfg()
    """How rollouts are collected. Mode sync uses only pipeline_stages and env_processes, with their timeouts and
    restarts. Worker ``ray`` collects in a cluster, whatever the mode."""
    model_type: Literal["standard", "vla"] | None = None
    """Alias of collector.mode, which it overrides: standard is sync, vla is async."""
    collect_threads: Threads | None = None
    """Number of torch threads while collecting; default: one for small policies."""

    @property
    def collects_async(self) -> bool:
        """Whether rollouts are collected in the background or in a cluster."""
        return self.collector.mode == "async" or self.collector.worker == "ray"

    def with_mode(self) -> TrainerCfg:
        """Return these settings with the alias ``model_type`` replaced by ``collector.mode``."""
        if self.model_type is None:
            return self
        mode: Literal["sync", "async"] = "async" if self.model_type == "vla" else "sync"
        return self.replace(model_type=None, collector=self.collector.replace(mode=mode))


@configclass
class AlgorithmBlock(Config):
    """The block ``algorithm``."""

    name: str = "ppo"
    """Registered name: ppo, grpo, distill, or one that your own module registers."""
    cfg: dict[str, Any] = {}
    """Settings of the algorithm."""


@configclass
class TrainCfg(RunConfig):
    """A whole ``train_config.json``."""

    trainer: TrainerCfg = TrainerCfg()
    """Loop, evaluation and output."""
    algorithm: AlgorithmBlock = AlgorithmBlock()
    """Name and settings of the algorithm."""


def load_train_config(
    path: str | os.PathLike[str],
    trusted_modules: Collection[str] = (),
    gym_config: str | None = None,
    init_from: str | None = None,
) -> TrainCfg:
    """Load and complete a training config.

    ``path`` may also be the name of an environment: its shipped config is used, or else defaults, with the policy of
    the run ``init_from`` if given. ``gym_config`` replaces that of the file, which is then not read.
    """
    file = find_shipped(path)
    if file.suffix in FILE_SUFFIXES or file.is_file():
        given = load_config(file)
        if "source" in given:
            problem = f"it has a source to imitate, and is one of another command: embodichain imitate {path}"
            raise ConfigError(problem, str(file))
    else:
        import_trusted(trusted_modules, config_folders())
        given, file = config_of_environment(str(path), trusted_modules)
        given["policy"] = initial_policy_block(init_from, given["policy"])
        has_critic = bool(get_policy_class(given["policy"].get("name", PolicyBlock().name)).critic_parts)
        if has_critic and given["algorithm"]["name"] == "ppo" and is_clone(init_from):
            settings = {"value_warmup": _CLONE_WARMUP} | given["algorithm"]["cfg"]
            given["algorithm"] = given["algorithm"] | {"cfg": settings}
            _LOG.info("value_warmup: %d, as the critic of a clone is untrained", settings["value_warmup"])
    translated = translate_train_config(given, str(file))
    data, problems = translated.data, translated.problems
    if gym_config is not None and isinstance(data.get("trainer"), dict):
        data["trainer"]["gym_config"] = gym_config
    try:
        cfg = TrainCfg.from_dict(data, source=str(file))
    except ConfigError as error:
        problems += translated.as_given(error.problems)
    if problems:
        import_trusted(trusted_modules, config_folders(file))  # they may register the names
        raise ConfigError(problems + _problems_below(data, file.parent), str(file))
    return complete(cfg, trusted_modules, str(file), file.parent)


def _problems_below(data: Mapping[str, Any], folder: Path) -> list[str]:
    """Return further problems in the environment, algorithm and policy of an invalid config, to report all at once."""
    errors: list[EmbodiChainError] = []
    trainer, algorithm = (
        data[name] if isinstance(data.get(name), Mapping) else {} for name in ("trainer", "algorithm")
    )
    if isinstance(given := trainer.get("gym_config"), str | Mapping):
        attempt(errors, lambda: known_environment(given, folder))
    if not trainer.get("import_modules"):  # which may register the names
        name, settings, policy = algorithm.get("name", "ppo"), algorithm.get("cfg", {}), data.get("policy")
        if isinstance(settings, Mapping):
            attempt(errors, lambda: _algorithm_settings(str(name), settings))
        if isinstance(policy, Mapping):
            attempt(errors, lambda: check_policy(policy))
    return [line for error in errors for line in problem_lines(error)]


def _algorithm_settings(name: str, settings: Mapping[str, Any], folder: Path | None = None) -> Config:
    """Return the checked settings of an algorithm; relative paths are resolved against ``folder``."""
    return get_algo_class(name).cfg_type.from_dict(settings, source="algorithm.cfg").located(folder or Path.cwd())


def complete(
    cfg: TrainCfg, trusted_modules: Collection[str] = (), source: str = "config", folder: Path | None = None
) -> TrainCfg:
    """Import trusted modules, add environment settings and defaults, and resolve paths against ``folder``."""
    folder = Path.cwd() if folder is None else folder
    check_trusted(cfg.trainer.import_modules, trusted_modules, source)
    import_trusted(trusted_modules, [folder, Path.cwd()])
    missing = cfg.validate()
    errors: list[EmbodiChainError] = [ConfigError(f"{name}: expected a value, got none", "") for name in missing]
    environment = None if missing else attempt(errors, lambda: known_environment(cfg.trainer.gym_config, folder))
    settings = {"device": cfg.trainer.device, **cfg.algorithm.cfg}
    checked = attempt(errors, lambda: _algorithm_settings(cfg.algorithm.name, settings, folder))
    attempt(errors, lambda: check_policy(cfg.policy))
    if environment is None or checked is None or errors:
        raise joined_errors(errors, source)
    init_from = cfg.trainer.init_from if cfg.trainer.init_from is None else find_beside(cfg.trainer.init_from, folder)
    trainer = cfg.trainer.with_mode().replace(gym_config=environment, init_from=init_from)
    return cfg.replace(trainer=trainer, algorithm=cfg.algorithm.replace(cfg=checked.to_dict()))


def override(
    cfg: TrainCfg, words: list[str], prog: str = "embodichain train", trusted_modules: Collection[str] = ()
) -> TrainCfg:
    """Apply flags such as ``--trainer.num_envs 128`` to a completed config, and check the result."""
    cfg, words = with_choices(_with_algorithm(cfg, words), words)
    changed = parse_overrides(cfg, words, prog, "Train a policy.", schemas_of(cfg)) if words else cfg
    named = [name for name in changed.trainer.import_modules if name not in cfg.trainer.import_modules]
    check_trusted(named, trusted_modules, "--trainer.import_modules")
    if changed.trainer.gym_config is MISSING:
        raise ConfigError("trainer.gym_config: expected an environment, got none", "command line")
    _refuse_ignored(changed.trainer, words)
    device, before = changed.trainer.device, cfg.trainer.device
    is_set = any(word.partition("=")[0] == "--algorithm.cfg.device" for word in words)
    if device != before and changed.algorithm.cfg["device"] == before and not is_set:
        # --trainer.device moves the algorithm, too
        algorithm = changed.algorithm.replace(cfg=changed.algorithm.cfg | {"device": device})
        changed = changed.replace(algorithm=algorithm)
    return _checked(changed)


def with_choices(cfg: _C, words: list[str]) -> tuple[_C, list[str]]:
    """Apply the flags that choose an environment or a policy; return the config and the remaining flags.

    If the policy changes, settings of the old one are kept where the new one has them, and dropped otherwise.
    """
    if (given := given_environment(words)) is not None:
        cfg = cfg.replace(trainer=cfg.trainer.replace(gym_config=environment_settings(given, Path.cwd())))
        words = given_value(words, "trainer.gym_config")[1]
    elif given_value(words, "trainer.gym_config")[0] == NO_VALUE:
        cfg = cfg.replace(trainer=cfg.trainer.replace(gym_config=MISSING))
        words = given_value(words, "trainer.gym_config")[1]
    policy = given_value(words, "policy.name")[0]
    if policy is not None and policy != cfg.policy.get("name"):
        own = {key: value for key, value in cfg.policy.items() if key not in ("name", "action_dim", "cfg")}
        own |= cfg.policy.get("cfg", {})
        policy_cls = get_policy_class(policy)
        known = policy_cls.settings_type() or arguments_of(policy_cls)
        settings = _applicable_settings(own, known, f"policy.name {policy}", "policy")
        kept = {key: value for key, value in cfg.policy.items() if key == "action_dim"}
        cfg = cfg.replace(policy={"name": policy, **kept, **({"cfg": settings} if "cfg" in cfg.policy else settings)})
    return cfg.replace(policy=_with_model(cfg.policy, words)), words


def _with_model(policy: Mapping[str, Any], words: list[str]) -> dict[str, Any]:
    """Return the policy block with the model that flags choose, whose settings are flags as well."""
    chosen = {name: given_value(words, f"policy.vla_config.{name}")[0] for name in ("model_class", "model_path")}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    return {**policy, "vla_config": {**(policy.get("vla_config") or {}), **chosen}} if chosen else dict(policy)


def _with_algorithm(cfg: TrainCfg, words: list[str]) -> TrainCfg:
    """Apply the flag that chooses an algorithm; changed settings of the old one are kept where the new one has them."""
    algorithm = given_value(words, "algorithm.name")[0]
    if algorithm is None or algorithm == cfg.algorithm.name:
        return cfg
    usual = {flag.name: to_plain(flag.default) for flag in flags_of({}, get_algo_class(cfg.algorithm.name).cfg_type)}
    own = {key: value for key, value in cfg.algorithm.cfg.items() if key == "device" or value != usual.get(key)}
    known = get_algo_class(algorithm).cfg_type
    settings = _applicable_settings(own, known, f"algorithm.name {algorithm}", "algorithm.cfg")
    return cfg.replace(algorithm=AlgorithmBlock(name=algorithm, cfg=settings))


def _applicable_settings(
    settings: Mapping[str, Any], known: type[Config] | Collection[str] | None, chosen: str, block: str
) -> dict[str, Any]:
    """Return the settings of a block that a class or some names ``known`` accept, and log those that are dropped."""
    if known is None:
        return dict(settings)
    taken = {
        key: value
        for key, value in settings.items()
        if (_accepts(known, key, value) if isinstance(known, type) else key in known)
    }
    others = [f"{block}.{key}" for key in settings if key not in taken]
    if others:
        _LOG.info("--%s leaves out what the config says for another one: %s", chosen, ", ".join(others))
    return taken


def _accepts(cls: type[Config], key: str, value: Any) -> bool:
    """Return whether a config class has this field and accepts this value."""
    try:
        cls.from_dict({key: value})
    except ConfigError as error:
        return all(re.split(r"[.:]", problem)[0] != key for problem in error.problems)
    return True


def _refuse_ignored(trainer: TrainerCfg, words: list[str]) -> None:
    """Raise ``ConfigError`` for environment flags that a setting of the trainer overrides."""
    problems = []
    for name in ("seed",) if trainer.num_envs is None else ("seed", "num_envs"):
        value = given_value(words, f"trainer.gym_config.{name}")[0]
        if value is not None:
            problems.append(f"trainer.gym_config.{name}: trainer.{name} decides. Use --trainer.{name} {value}")
    if problems:
        raise ConfigError(problems, "command line")


def schemas_of(cfg: TrainCfg) -> dict[tuple[str | int, ...], tuple[type[Config], ...]]:
    """Return, by path, the config classes of the mappings in a completed config, so that their fields become flags."""
    schemas: dict[tuple[str | int, ...], tuple[type[Config], ...]] = {("trainer", "gym_config"): (GymCfg,)}
    schemas |= {("policy", *path): classes for path, classes in policy_schemas(cfg.policy).items()}
    return schemas | {("algorithm", "cfg"): (get_algo_class(cfg.algorithm.name).cfg_type,)}


def check_devices(cfg: TrainCfg) -> None:
    """Raise ``ConfigError`` if this machine lacks a device that the config names."""
    check_device(cfg.trainer.device, "trainer.device")
    check_device(cfg.algorithm.cfg["device"], "algorithm.cfg.device")


def check_device(given: str, name: str) -> None:
    """Raise ``ConfigError`` if this machine lacks the device ``given`` for the setting ``name``."""
    try:
        device = torch.device(given)
    except RuntimeError as error:
        raise ConfigError(f"{name}: expected a device of torch's, such as 'cpu' or 'cuda', got {given!r}") from error
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(f"{name}: expected a device of this machine, got {given!r}, but torch finds {count} GPUs")
    if device.type == "cuda":
        return  # not used here: each rank later uses its own GPU
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        problem = f"{name}: expected 'cpu', or another device of this machine that computes, got {given!r}"
        raise ConfigError(problem) from error


def check_same_config(cfg: TrainCfg, ranks: Ranks) -> None:
    """Raise ``ConfigError`` if a rank's config differs from the first rank's; the error names the first such field."""
    own = {key: value for key, value in dotted(cfg.to_dict()).items() if key not in _RANKS_OWN}
    first, *others = ranks.exchange(own)
    for rank, theirs in enumerate(others, start=1):
        keys = [key for key in sorted({*first, *theirs}) if first.get(key, "nothing") != theirs.get(key, "nothing")]
        if keys:
            key, more = keys[0], "" if len(keys) == 1 else f" (and {len(keys) - 1} more)"
            raise ConfigError(
                f"{key}: rank 0 has {first.get(key, 'nothing')!r}, rank {rank} {theirs.get(key, 'nothing')!r}{more}. "
                "Start all ranks with the same config file and the same options",
                "ranks",
            )


def for_rank(cfg: TrainCfg, ranks: Ranks) -> TrainCfg:
    """Return the config of one rank: with its own seed, its own GPU and its share of the CPU cores."""
    if ranks.count == 1:
        return cfg
    trainer, seed = cfg.trainer, ranks.seed(cfg.trainer.seed)
    environment = trainer.environment | {"seed": seed}
    environment["device"] = _own_device(str(environment.get("device", "cpu")))
    if not environment.get("num_threads"):
        environment["num_threads"] = max(1, available_cores() // local_count())
    changed = trainer.replace(seed=seed, device=_own_device(trainer.device), gym_config=environment)
    settings = dict(cfg.algorithm.cfg)
    settings["device"] = _own_device(str(settings.get("device", trainer.device)))
    return cfg.replace(trainer=changed, algorithm=cfg.algorithm.replace(cfg=settings))


def _own_device(name: str) -> str:
    """Return this rank's GPU if ``name`` is a CUDA device, else ``name``."""
    if torch.device(name).type != "cuda" or not torch.cuda.is_available():
        return name
    return f"cuda:{local_rank() % torch.cuda.device_count()}"


def num_iterations(trainer: TrainerCfg, ranks: int = 1, iteration: int = 0, global_step: int = 0) -> int | None:
    """Return the iteration at which training ends, given the current counters; ``None`` if only time limits it."""
    limits = [] if trainer.iterations is None else [trainer.iterations]
    if trainer.total_steps is not None:
        per_rollout = ranks * (trainer.num_envs or 1) * trainer.buffer_size
        limits.append(iteration + math.ceil(max(0, trainer.total_steps - global_step) / per_rollout))
    return min(limits) if limits else None


def _checked(cfg: TrainCfg) -> TrainCfg:
    """Validate a config across its fields, and resolve ``num_envs`` and ``seed``, which two blocks have."""
    trainer = cfg.trainer.with_mode()
    environment = environment_settings(trainer.gym_config, Path.cwd())
    num_envs = trainer.num_envs or environment.get("num_envs", 1)
    resolved = trainer.replace(num_envs=num_envs, gym_config=environment | {"num_envs": num_envs, "seed": trainer.seed})
    problems = []
    if trainer.iterations is None and trainer.total_steps is None and trainer.max_seconds is None:
        problems.append("trainer: expected iterations, total_steps or max_seconds, got none of them")
    if (trainer.target_return is not None or trainer.target_success is not None) and not trainer.enable_eval:
        problems.append("trainer.enable_eval: expected true, as a target is judged by evaluations, got false")
    if trainer.collects_async:
        problems += [f"trainer.collector.{problem}" for problem in trainer.collector.problems()]
    problems += [f"trainer.{problem}" for problem in trainer.collector.group_problems(num_envs)]
    simulated = str(environment.get("device", "cpu"))
    if trainer.collector.env_processes and simulated != "cpu":
        problems.append(
            f"trainer.collector.env_processes: expected 0, as processes of their own simulate on the CPU, and "
            f"gym_config.device is {simulated!r}; got {trainer.collector.env_processes}"
        )
    errors: list[EmbodiChainError] = [ConfigError(problems, "")] if problems else []
    algorithm = attempt(errors, lambda: _algorithm_settings(cfg.algorithm.name, cfg.algorithm.cfg))
    attempt(errors, lambda: check_policy(cfg.policy))
    if algorithm is None or errors:
        raise joined_errors(errors)
    return cfg.replace(trainer=resolved, algorithm=cfg.algorithm.replace(cfg=algorithm.to_dict()))


def _policy_name(cfg: TrainCfg) -> str:
    return str(cfg.policy.get("name", PolicyBlock().name))


def log_run_size(trainer: TrainerCfg, ranks: int = 1, chunk_size: int = 1) -> None:
    """Log the number of envs and the total number of steps, which is rounded up to whole rollouts."""
    per_rollout = ranks * (trainer.num_envs or 1) * trainer.buffer_size
    count, total = num_iterations(trainer, ranks), trainer.total_steps
    steps = "" if count is None else f", {count * per_rollout:,} steps in all"
    is_more = count is not None and total is not None and count * per_rollout > total
    rounded = f" (total_steps, {total:,}, rounded up to whole rollouts)" if is_more else ""
    envs = f"{trainer.num_envs or 1} envs" if ranks == 1 else f"{ranks} ranks of {trainer.num_envs or 1} envs"
    if chunk_size > 1:  # the number of steps of a chunk is not known in advance
        _LOG.info("%s, rollouts of %d decisions on up to %d actions", envs, trainer.buffer_size, chunk_size)
        return
    _LOG.info("%s, rollouts of %d steps%s%s", envs, trainer.buffer_size, steps, rounded)


def warn_about_clone(cfg: TrainCfg, policy: Policy) -> None:
    """Warn that a run begins with an untrained critic, if the policy can train the critic alone."""
    if not cfg.algorithm.cfg.get("value_warmup", 1) and policy.trains_critic_alone and is_clone(cfg.trainer.init_from):
        _LOG.warning(
            "the critic of %s is untrained, and what it estimates may destroy the policy: add "
            "--algorithm.cfg.value_warmup %d",
            cfg.trainer.init_from,
            _CLONE_WARMUP,
        )


def warn_about_config(cfg: TrainCfg) -> None:
    """Warn about settings that have no effect or hurt learning; log how an asynchronous run collects."""
    trainer, settings = cfg.trainer, cfg.algorithm.cfg
    collector, level = trainer.collector, settings.get("log_prob_per")
    if level in ("token", "denoising_step") and issubclass(get_policy_class(_policy_name(cfg)), NetworkPolicy):
        _LOG.warning(
            "algorithm.cfg.log_prob_per: %s has no effect, as actions of %s have no such factors: it is for policies "
            "such as tokens, flow and vla",
            level,
            _policy_name(cfg),
        )
    if not trainer.collects_async:
        usual = AsyncCfg().to_dict()
        changed = [name for name, value in collector.to_dict().items() if value != usual[name]]
        used = _USED_BY_SYNC + (_USED_BY_ENV_PROCESSES if collector.env_processes else ())
        ignored = [name for name in changed if name not in used]
        if ignored:
            _LOG.warning(
                "this run collects and learns in turn, and ignores trainer.collector.%s: add --trainer.collector.mode "
                "async to do both at once (docs/async.md)",
                ", ".join(ignored),
            )
        return
    where = {"thread": "a thread", "process": "a process of its own", "ray": "a cluster"}[collector.worker]
    lag = collector.max_policy_lag
    _LOG.info("collecting in %s, by weights that are at most %d update(s) old", where, lag)
    has_ratios = issubclass(get_algo_class(cfg.algorithm.name).cfg_type, ClippedCfg)
    if lag == 0 or settings.get("correction") != "none" or not has_ratios:
        return
    if settings.get("lr_schedule") == "adaptive":
        bound = "lr_schedule: adaptive"
    elif settings.get("target_kl") is not None:
        bound = "target_kl"
    elif settings.get("advantage_estimator") == "vtrace":
        return
    else:
        bound = "the clip"
    _LOG.warning(
        "rollouts may be %d update(s) old (max_policy_lag): %s mistakes what those updates changed for its own step, "
        "and the policy may learn far less. Add --algorithm.cfg.correction decoupled (docs/async.md)",
        lag,
        bound,
    )
