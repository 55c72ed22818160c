"""Settings that all runs share: output, evaluation, environment."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator

from embodichain.agents.rl.run_records import CONFIG_FILE, command_of
from embodichain.config import (
    MISSING,
    Config,
    Count,
    Field,
    Fraction,
    Positive,
    Threads,
    configclass,
    load_config,
)
from embodichain.config.files import find_config
from embodichain.envs.registration import list_envs, load_gym_config, unknown_id
from embodichain.errors import ConfigError, EmbodiChainError, UnknownNameError
from embodichain.extras import check_trusted, config_folders, import_trusted

_T = TypeVar("_T")
_LOG = logging.getLogger(__name__)
Steps = Annotated[int, Field(ge=0, le=2**53)]
NumEnvs = Annotated[int, Field(ge=1, le=2**20)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
FILE_SUFFIXES = (".json", ".yaml", ".yml")
BLOCKS = ("algorithm.cfg", "policy")
"""Blocks of a config that separate config classes check."""


def _plain_name(name: str) -> str:
    if not re.fullmatch(r"[\w.+-]+", name):
        raise ValueError(f"expected a name of letters, digits and . _ + -, got {name!r}")
    return name


@configclass
class RunSettings(Config):
    """Settings that every block ``trainer`` has: output, evaluation and stop criteria."""

    exp_name: Annotated[str, AfterValidator(_plain_name)] = "run"
    """Name of the experiment, the prefix of the run's folder."""
    seed: Seed = 0
    """Seed of networks, actions, minibatches and environments."""
    device: str = "cpu"
    """Device on which the policy acts and is trained."""
    gym_config: str | dict[str, Any] = MISSING
    """The environment: a file (relative to this one), an id, or the settings themselves."""
    eval_gym_config: dict[str, Any] = {}
    """Environment settings that differ in evaluations."""
    max_seconds: Positive | None = None
    """Training ends after this time, in seconds."""
    target_return: float | None = None
    """Training ends when an evaluation's mean return reaches this."""
    target_success: Fraction | None = None
    """Training ends when an evaluation's success rate reaches this."""
    enable_eval: bool = True
    """Whether to evaluate the policy, in separate environments."""
    eval_freq: Steps = 200_000
    """Steps between evaluations; 0 evaluates at the end only."""
    num_eval_episodes: Count = 32
    """Number of episodes per evaluation."""
    num_eval_envs: NumEnvs = 32
    """Number of parallel environments in evaluations."""
    eval_seed: Seed = 1_000_003
    """Seed of the evaluation episodes, which are the same every time."""
    eval_deterministic: bool = True
    """Whether evaluations use the most likely actions; false samples them, as training does."""
    eval_video: bool = True
    """Whether to record a video of one episode of each evaluation."""
    save_freq: Steps = 200_000
    """Steps between checkpoints; 0 saves at the end only."""
    keep_checkpoints: Count = 2
    """Number of latest checkpoints to keep, besides the best one."""
    nan_guard: bool = True
    """Whether to stop at the first NaN or infinity, and save the batch and the simulation."""
    update_threads: Threads | None = None
    """Number of torch threads while learning; default: one for small minibatches."""
    use_wandb: bool = False
    """Whether to log to Weights & Biases as well."""
    wandb_project: str = "embodichain"
    """Project at Weights & Biases."""
    output_dir: str = "runs"
    """Parent folder of runs."""
    init_from: str | None = None
    """Run (its best checkpoint) or checkpoint with the policy's initial weights, relative to the config's folder or the
    working directory. A critic that it lacks starts untrained."""
    run_dir: str | None = None
    """Folder of this run; default: a new one in output_dir, named after exp_name and the time."""
    import_modules: list[str] = []
    """Modules that define the policy, algorithm or task; each must be allowed with --trust."""

    @property
    def environment(self) -> dict[str, Any]:
        """The environment's settings as a mapping."""
        return {"id": self.gym_config} if isinstance(self.gym_config, str) else self.gym_config


@configclass
class RunConfig(Config):
    """Base class of the configs of runs."""

    trainer: RunSettings = RunSettings()
    """Loop, evaluation and output."""
    policy: dict[str, Any] = {"name": "actor_critic"}
    """Name and settings of the policy."""


def saved_run_config(
    config: Mapping[str, Any],
    trusted_modules: Collection[str],
    source: str,
    environment: Mapping[str, Any] | None = None,
) -> RunConfig:
    """Return the common settings of a checkpoint's config, whichever command wrote it; imports the trusted modules.

    A run that was made without an environment gets ``environment``.
    """
    trainer, known = config.get("trainer"), RunSettings.__dataclass_fields__
    own = {name: value for name, value in trainer.items() if name in known} if isinstance(trainer, Mapping) else trainer
    cfg = RunConfig.from_dict({"trainer": own, "policy": config.get("policy")}, source)
    check_trusted(cfg.trainer.import_modules, trusted_modules, source)
    import_trusted(trusted_modules, config_folders())
    if cfg.trainer.gym_config in (MISSING, {}):
        if environment is None:
            problem = "the run was made without an environment: --config gym_config.json says which one to use"
            raise ConfigError(problem, source)
        cfg = cfg.replace(trainer=cfg.trainer.replace(gym_config=dict(environment)))
    if missing := cfg.validate():
        raise ConfigError([f"{name}: expected a value, got none" for name in missing], source)
    settings = environment_settings(cfg.trainer.gym_config, Path.cwd())
    return cfg.replace(trainer=cfg.trainer.replace(gym_config=settings))


def initial_policy_block(run: str | None, block: Mapping[str, Any]) -> dict[str, Any]:
    """Return the block ``policy`` of the run ``run``, or ``block`` if there is none to read.

    ``block`` still decides whether the policy has a critic, and which one.
    """
    saved = _saved_config(run).get("policy")
    if not isinstance(saved, Mapping):
        return dict(block)
    _LOG.info("the policy is built as that of %s", run)
    if {saved.get("name"), block.get("name")} == {"actor_critic", "actor_only"}:
        critic = {name: value for name, value in block.items() if name in ("name", "critic")}
        return {name: value for name, value in saved.items() if name != "critic"} | critic
    return dict(saved)


def is_clone(run: str | None) -> bool:
    """Return whether ``run`` is the run of an imitation, or one of its checkpoints: its critic is untrained."""
    saved = _saved_config(run)
    return bool(saved) and command_of(saved) == "imitate"


def _saved_config(run: str | None) -> Mapping[str, Any]:
    """Return the config of a run, given its folder or one of its checkpoints; empty if there is none to read."""
    folders = [] if run is None else [Path(run), *Path(run).resolve().parents[:2]]
    file = next((folder / CONFIG_FILE for folder in folders if (folder / CONFIG_FILE).is_file()), None)
    return {} if file is None else load_config(file)


def environment_settings(given: str | Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return an environment's settings as a mapping; those of this package's tasks include all defaults."""
    source: str | Path | Mapping[str, Any] = given
    if isinstance(given, str):
        source = find_config(given, folder) if given.endswith(FILE_SUFFIXES) else given
        given = load_config(source) if isinstance(source, Path) else {"id": given}
    checked = load_gym_config(source)
    # A Gymnasium id has its own defaults, such as its time limit, so only the given settings are passed on.
    return checked.to_dict() if checked.id in {spec.id for spec in list_envs()} else dict(given)


def known_environment(given: str | Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return ``environment_settings``; raise ``UnknownNameError`` if the environment's id is not registered."""
    settings = environment_settings(given, folder)
    if unknown := unknown_id(settings["id"]):
        raise UnknownNameError(unknown)
    return settings


def attempt(errors: list[EmbodiChainError], call: Callable[[], _T]) -> _T | None:
    """Return the result of a call; if it raises a config error, append that to ``errors`` and return ``None``."""
    try:
        return call()
    except (ConfigError, UnknownNameError) as error:
        errors.append(error)
        return None


def problem_lines(error: EmbodiChainError) -> list[str]:
    """Return the problems of an error, each with its full key or its file."""
    if not isinstance(error, ConfigError):
        return [str(error)]
    prefix = f"{error.source}{'.' if error.source in BLOCKS else ': '}" if error.source else ""
    return [f"{prefix}{problem}" for problem in error.problems]


def joined_errors(errors: list[EmbodiChainError], source: str = "configuration") -> EmbodiChainError:
    """Return one error with all problems; a single error that names its own file is returned unchanged."""
    only = errors[0] if len(errors) == 1 else None
    if only is not None and not (isinstance(only, ConfigError) and only.source in ("", *BLOCKS)):
        return only
    return ConfigError([line for error in errors for line in problem_lines(error)], source)
