"""The schema of an ``imitate_config.json``: source of demonstrations, policy, algorithm and trainer."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from embodichain.agents.engine.config import ActionSourceCfg, OnlineDataEngineCfg
from embodichain.agents.rl.algo.imitation import ImitationCfg
from embodichain.agents.rl.arguments import given_value
from embodichain.agents.rl.config import check_device, with_choices
from embodichain.agents.rl.default_config import shipped_config
from embodichain.agents.rl.models.registry import check_policy, policy_schemas
from embodichain.agents.rl.run_config import (
    FILE_SUFFIXES,
    RunConfig,
    RunSettings,
    Steps,
    attempt,
    initial_policy_block,
    joined_errors,
    known_environment,
)
from embodichain.config import Config, Count, Positive, configclass, load_config, merge, parse_overrides
from embodichain.config.files import find_beside, find_shipped
from embodichain.envs.env_cfg import GymCfg
from embodichain.envs.multi_task import task_entries
from embodichain.envs.registration import list_envs
from embodichain.errors import ConfigError, EmbodiChainError
from embodichain.extras import check_trusted, config_folders, import_trusted

_LOG = logging.getLogger(__name__)
SHIPPED_FILE = "imitate_config.json"
_ROWS, _ENVS = 256, 32
_NARROW = {"init_log_std": -1.8}  # imitation does not train it, and reinforcement learning explores with it
_NETWORK = {"type": "mlp", "network_cfg": {"hidden_sizes": [256, 256], "activation": "elu"}}
_DAGGER = {"expert_share": 0.5, "deterministic": True}
"""Default settings of ``--dagger``."""
_EXPERT = {"source": "expert", "only_success": True, "terminate_on_success": True, "noise_std": 0.1}
Gigabytes = Annotated[float, Field(gt=0.0, le=1e6)]


@configclass
class ImitationTrainerCfg(RunSettings):
    """The block ``trainer`` of an imitation. Steps are gradient steps."""

    total_steps: Count = 10_000
    """Number of gradient steps after which imitation ends."""
    log_freq: Count = 50
    """Gradient steps per log entry, which holds their means."""
    eval_freq: Steps = 2_000
    """Gradient steps between evaluations; 0 evaluates at the end only."""
    save_freq: Steps = 2_000
    """Gradient steps between checkpoints; 0 saves at the end only."""
    publish_freq: Count = 500
    """Gradient steps between publications of the policy to streams with the source ``dagger``; until the first one, the
    expert acts alone."""


@configclass
class PartCfg(Config):
    """One source of demonstrations: a stream or a folder."""

    stream: dict[str, Any] | None = None
    """Settings of a live stream (``OnlineDataEngineCfg``). Its ``gym_config`` defaults to the trainer's; one without an
    ``id`` overrides parts of it; a list makes a stream of several tasks."""
    dataset: str | None = None
    """Folder of a LeRobotDataset, relative to the config's folder or to the working directory."""
    keys: dict[str, str] = {}
    """Names of the policy's observations in the folder: ``{"robot/qpos": "state"}``."""
    memory: Gigabytes = 4.0
    """Gigabytes for decoded episodes of a folder. A larger folder is read in parts, shuffled anew in every epoch."""


@configclass
class MixedCfg(PartCfg):
    """One of several sources."""

    weight: Positive = 1.0
    """Relative share of all chunks."""


@configclass
class SourceCfg(PartCfg):
    """The block ``source``: a stream, a folder, or a mixture of several of them."""

    mixture: list[MixedCfg] = []
    """Several sources with weights."""

    def parts(self) -> list[MixedCfg]:
        """Return all sources with their weights."""
        if self.mixture:
            return self.mixture
        return [MixedCfg(stream=self.stream, dataset=self.dataset, keys=self.keys, memory=self.memory)]

    def problems(self) -> list[str]:
        """Return the problems of the settings, one line each."""
        if self.mixture and (self.stream is not None or self.dataset is not None):
            return ["source.mixture: expected it alone; put the stream or the dataset beside it into its list"]
        found = []
        for i, part in enumerate(self.parts()):
            name = f"source.mixture.{i}" if self.mixture else "source"
            if (part.stream is None) == (part.dataset is None):
                got = "both" if part.stream is not None else f"neither; --{name}.dataset FOLDER imitates a recording"
                others = "" if self.mixture else ", or a mixture"
                found.append(f"{name}: expected either a stream or a dataset{others}, got {got}")
            if part.keys and part.dataset is None:
                found.append(f"{name}.keys: only the observations of a dataset have other names")
        return found


@configclass
class ImitationBlock(Config):
    """The block ``algorithm``."""

    name: Literal["imitation"] = "imitation"
    """The algorithm; always ``imitation``."""
    cfg: ImitationCfg = ImitationCfg()
    """Settings of the algorithm."""


@configclass
class ImitateCfg(RunConfig):
    """A whole ``imitate_config.json``."""

    trainer: ImitationTrainerCfg = ImitationTrainerCfg()
    """Loop, evaluation and output."""
    algorithm: ImitationBlock = ImitationBlock()
    """Learning algorithm."""
    source: SourceCfg = SourceCfg()
    """Source of the demonstrations."""


def load_imitate_config(
    path: str | os.PathLike[str],
    trusted_modules: Collection[str] = (),
    gym_config: str | None = None,
    init_from: str | None = None,
) -> ImitateCfg:
    """Load and complete the config of an imitation; ``gym_config`` replaces the environment of the file.

    ``path`` may also be the name of an environment: then its shipped config is used, or else defaults, with the policy
    of the run ``init_from`` if given.
    """
    file = find_shipped(path)
    if file.suffix in FILE_SUFFIXES or file.is_file():
        data = load_config(file)
    else:
        import_trusted(trusted_modules, config_folders())
        data, file = config_of_environment(str(path))
        data["policy"] = initial_policy_block(init_from, data["policy"])
    if "source" not in data and {"collector", "buffer_size"} & set(data.get("trainer", {})):
        problem = f"it has no source to imitate, and looks like one of another command: embodichain train {path}"
        raise ConfigError(problem, str(file))
    if gym_config is not None and isinstance(data.get("trainer"), dict):
        data["trainer"]["gym_config"] = gym_config
    return complete(ImitateCfg.from_dict(data, source=str(file)), trusted_modules, str(file), file.parent)


def config_of_environment(name: str) -> tuple[dict[str, Any], Path]:
    """Return the shipped or default config of an imitation in an environment, and its file."""
    if Path(name).is_dir():
        hint = f"embodichain imitate --resume {name} continues a run, and --source.dataset {name} imitates a recording"
        raise ConfigError(f"expected a config file or the name of an environment, got a folder; {hint}", name)
    if (shipped := shipped_config(name, SHIPPED_FILE)) is not None:
        _LOG.info("config: %s", shipped)
        return load_config(shipped), shipped
    _LOG.info("no config is shipped for imitating in %s: a Gaussian policy with defaults", name)
    short = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    policy: dict[str, Any] = {"name": "actor_critic", "actor": _NETWORK, "critic": _NETWORK, "normalize_obs": True}
    trainer = {"exp_name": f"{short}_imitate", "gym_config": {"id": name}, "num_eval_episodes": 64}
    has_expert = _has_expert(name)
    source = {"stream": {"action_config": _EXPERT}} if has_expert else {}
    if has_expert:  # actions of scripted experts are continuous
        policy["distribution"] = _NARROW
    return {"trainer": trainer, "policy": policy, "source": source}, Path(name)


def _has_expert(name: str) -> bool:
    """Return whether an environment of this name has a scripted expert."""
    return any(spec.id == name and spec.task.has_expert() for spec in list_envs())


def complete(
    cfg: ImitateCfg, trusted_modules: Collection[str] = (), source: str = "config", folder: Path | None = None
) -> ImitateCfg:
    """Import trusted modules, then load the files that a config refers to; paths are relative to ``folder``."""
    folder = Path.cwd() if folder is None else folder
    check_trusted(cfg.trainer.import_modules, trusted_modules, source)
    for part in cfg.source.parts():
        named = (part.stream or {}).get("trusted_modules", [])
        if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
            raise ConfigError(f"source.stream.trusted_modules: expected a list of names, got {named!r:.80}", source)
        check_trusted(named, trusted_modules, source)
    import_trusted(trusted_modules, [folder, Path.cwd()])
    errors: list[EmbodiChainError] = []
    if (given := cfg.trainer.gym_config) != {} and given:
        environment = attempt(errors, lambda: known_environment(given, folder))
        if environment is not None:
            cfg = cfg.replace(trainer=cfg.trainer.replace(gym_config=environment))
    located = _located(cfg.source, folder, errors)
    attempt(errors, lambda: check_policy(cfg.policy))
    if errors:
        raise joined_errors(errors, source)
    init_from = cfg.trainer.init_from if cfg.trainer.init_from is None else find_beside(cfg.trainer.init_from, folder)
    return cfg.replace(trainer=cfg.trainer.replace(init_from=init_from), source=located)


def _located(source: SourceCfg, folder: Path, errors: list[EmbodiChainError]) -> SourceCfg:
    """Return a source with absolute paths and loaded environment configs, so that a run can be resumed from any
    folder."""

    def locate(part: PartCfg) -> dict[str, Any]:
        changes: dict[str, Any] = {}
        if part.dataset is not None:
            changes["dataset"] = find_beside(part.dataset, folder)
        given = (part.stream or {}).get("gym_config")
        settings: Any = None
        if isinstance(given, str):
            settings = attempt(errors, lambda: known_environment(given, folder))
        elif isinstance(given, list):  # several tasks in one stream
            entries = attempt(errors, lambda: task_entries(given, folder, "source.stream.gym_config")) or []
            settings = [entry.gym_config | {"weight": entry.weight, "task": entry.words} for entry in entries]
        return changes if settings is None else changes | {"stream": (part.stream or {}) | {"gym_config": settings}}

    return source.replace(**locate(source), mixture=[part.replace(**locate(part)) for part in source.mixture])


def override(cfg: ImitateCfg, words: list[str], trusted_modules: Collection[str] = ()) -> ImitateCfg:
    """Return a completed and validated config with flags such as ``--source.dataset recordings/a`` applied."""
    prog = "embodichain imitate"
    dagger, words = "--dagger" in words, [word for word in words if word != "--dagger"]
    cfg, words = with_choices(cfg, words)
    source, replacing = _without_replaced(cfg.source, words)
    if dagger and not replacing:
        source = with_dagger(source)
    cfg = cfg.replace(source=source)
    changed = parse_overrides(cfg, words, prog, "Imitate demonstrations.", schemas_of(cfg)) if words else cfg
    if dagger and replacing:
        changed = changed.replace(source=with_dagger(changed.source))
    named = [name for name in changed.trainer.import_modules if name not in cfg.trainer.import_modules]
    check_trusted(named, trusted_modules, "--trainer.import_modules")
    return _checked(complete(changed, trusted_modules, "command line"))


def _without_replaced(source: SourceCfg, words: list[str]) -> tuple[SourceCfg, bool]:
    """Return a source without what a flag replaces, which is logged, and whether there is such a flag."""
    if given_value(words, "source.dataset")[0] is not None:
        flag, kept = "source.dataset", source.replace(stream=None, mixture=[])
    elif any(word.startswith("--source.mixture") and word[16:17] in ("", "=") for word in words):
        flag, kept = "source.mixture", source.replace(stream=None, dataset=None, keys={})
    else:
        return source, False
    names = ("stream", "dataset", "keys", "mixture")
    dropped = [f"source.{name}" for name in names if getattr(source, name) and not getattr(kept, name)]
    if dropped:
        _LOG.info("--%s leaves out what the config says for another source: %s", flag, ", ".join(dropped))
    return kept, True


def with_dagger(source: SourceCfg) -> SourceCfg:
    """Return the source for ``--dagger``: in its streams, the policy acts and the expert labels every state."""

    def corrected(part: PartCfg) -> dict[str, Any]:
        if part.stream is None:
            return {}
        action_config = part.stream.get("action_config") or {}
        if not isinstance(action_config, Mapping):
            problem = f"source.stream.action_config: expected a mapping, got {action_config!r:.80}"
            raise ConfigError(problem, "command line")
        given = dict(action_config)
        if given.get("source", "expert") not in ("expert", "dagger"):
            problem = f"expected a stream of the expert, which labels what the policy does, got {given['source']!r}"
            raise ConfigError(f"--dagger: {problem}", "command line")
        given.pop("only_success", None)  # DAgger learns from the policy's failures
        return {"stream": part.stream | {"action_config": _DAGGER | given | {"source": "dagger"}}}

    if all(part.stream is None for part in source.parts()):
        raise ConfigError("--dagger: expected a stream, whose expert can be asked, got recordings", "command line")
    return source.replace(**corrected(source), mixture=[part.replace(**corrected(part)) for part in source.mixture])


def schemas_of(cfg: ImitateCfg) -> dict[tuple[str | int, ...], tuple[type[Config], ...]]:
    """Return the classes that validate the mappings of a completed config, by path; their fields are flags as well."""
    schemas: dict[tuple[str | int, ...], tuple[type[Config], ...]] = {("trainer", "gym_config"): (GymCfg,)}
    schemas |= {("policy", *path): classes for path, classes in policy_schemas(cfg.policy).items()}
    streams: list[tuple[tuple[str | int, ...], PartCfg]] = [(("source",), cfg.source)]
    streams += [(("source", "mixture", i), part) for i, part in enumerate(cfg.source.mixture)]
    for path, part in streams:
        schemas[*path, "stream"] = (OnlineDataEngineCfg,)
        schemas[*path, "stream", "action_config"] = (ActionSourceCfg,)
        if not isinstance((part.stream or {}).get("gym_config", {}), list):
            schemas[*path, "stream", "gym_config"] = (GymCfg,)
    return schemas


def _checked(cfg: ImitateCfg) -> ImitateCfg:
    """Validate a config before anything is built; without an environment, evaluation is disabled."""
    trainer = cfg.trainer
    problems = cfg.source.problems()
    has_environment = bool(trainer.gym_config)
    if has_environment and cfg.source == SourceCfg() and not _has_expert(name := str(trainer.environment.get("id"))):
        problems = [f"source: {name} has no scripted expert to imitate; --source.dataset FOLDER imitates a recording"]
    only_folders = all(part.dataset is not None for part in cfg.source.parts())
    if not has_environment and not only_folders:
        problems.append("trainer.gym_config: expected an environment, which the stream simulates, got none")
    if (trainer.target_return is not None or trainer.target_success is not None) and not trainer.enable_eval:
        problems.append("trainer.enable_eval: expected true, as a target is judged by evaluations, got false")
    if trainer.target_success is not None and not has_environment:
        problems.append("trainer.gym_config: expected an environment, as a target is judged by evaluations, got none")
    errors: list[EmbodiChainError] = [ConfigError(problems, "")] if problems else []
    attempt(errors, lambda: check_policy(cfg.policy))
    attempt(errors, lambda: check_device(trainer.device, "trainer.device"))
    for part in cfg.source.parts() if not problems else ():
        if part.stream is not None:
            attempt(errors, lambda part=part: _check_stream(stream_settings(cfg, part)))  # type: ignore[misc]
    if errors:
        raise joined_errors(errors)
    if not has_environment and trainer.enable_eval:
        trainer = trainer.replace(enable_eval=False)
        _LOG.info("the policy is not evaluated, as there is no environment: --trainer.gym_config names one")
    return cfg.replace(trainer=trainer)


def _check_stream(settings: OnlineDataEngineCfg) -> None:
    settings.check()
    settings.check_policy_exists()


def stream_settings(
    cfg: ImitateCfg, part: PartCfg, resumed: int = 0, trusted_modules: Collection[str] = ()
) -> OnlineDataEngineCfg:
    """Return the engine settings of one stream; ``resumed``, the step at which a run continues, changes the seed."""
    given = dict(part.stream or {})
    gym_config, environment = given.get("gym_config") or {}, cfg.trainer.environment if cfg.trainer.gym_config else {}
    rows, workers = given.get("buffer_size", _ROWS), given.get("num_workers", 1)
    defaults: dict[str, Any] = {"buffer_size": rows, "refill": "continuous", "seed": cfg.trainer.seed}
    if isinstance(gym_config, Mapping) and "id" not in gym_config:
        num_envs = min(_ENVS, rows // workers) if isinstance(rows, int) and isinstance(workers, int) and workers else 1
        gym_config = merge(merge(environment, {"num_envs": max(1, num_envs)}), gym_config)
    settings = defaults | given | {"gym_config": gym_config}
    checked = OnlineDataEngineCfg.from_dict(settings, source="source.stream")
    trusted = dict.fromkeys((*checked.trusted_modules, *trusted_modules))
    return checked.replace(seed=checked.seed + resumed, trusted_modules=list(trusted))
