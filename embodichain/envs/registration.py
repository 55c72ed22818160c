"""Environments by name: ``make`` builds the ``VecEnv`` of an id or a config, a task of this package or of Gymnasium."""

import contextlib
import inspect
import logging
import os
import pkgutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym

from embodichain.config import load_config, merge
from embodichain.config.classes import Config, shorten
from embodichain.config.compat import translate_gym_config
from embodichain.config.files import find_shipped
from embodichain.envs import MUJOCO_SUITE, TASKS, register_with_gymnasium
from embodichain.envs.env_cfg import EnvCfg, EventsCfg, GymCfg, ObservationsCfg, RewardsCfg, RobotCfg, SceneCfg
from embodichain.envs.gl_backend import choose_backend
from embodichain.envs.gymnasium_env import make_gymnasium
from embodichain.envs.gymnasium_env.construct import resolve_spec
from embodichain.envs.model_files import find_file, mesh_centre
from embodichain.envs.multi_task import MULTI_TASK, make_multi_task
from embodichain.envs.physics.mujoco_cpu import MujocoCpuPhysics
from embodichain.envs.publishing import publish_if_asked
from embodichain.envs.randomization import EVENTS, spare_rows
from embodichain.envs.robot_files import is_ours
from embodichain.envs.task import Task
from embodichain.envs.task_contract import blamed_on, described, is_same_code
from embodichain.envs.task_env import TaskEnv
from embodichain.envs.terms import OBSERVATIONS, REWARDS
from embodichain.envs.vec_env import VecEnv
from embodichain.errors import (
    AssetError,
    ConfigError,
    EnvContractError,
    RenderingError,
    UnknownNameError,
    fits_memory,
    nearest,
    same_name,
)
from embodichain.extras import allowed_modules, available, config_folders, import_trusted

LONGEST_EPISODE = 10_000
"""Steps after which evaluation episodes are truncated if the environment has no time limit."""
_LOG = logging.getLogger(__name__)
_FUNCTIONS = {"events": EVENTS, "rewards": REWARDS, "observations": OBSERVATIONS}
"""Sections of ``env`` that call registered functions, as ``{"func": NAME, "params": {...}}``."""
_CALLS: dict[str, tuple[str, type[Config]]] = {
    "events": ('an event {"func": NAME, "mode": ..., "params": {...}}', EventsCfg),
    "rewards": ('a reward term {"func": NAME, "weight": ..., "params": {...}}', RewardsCfg),
    "observations": ('an observation {"func": NAME, "params": {...}}', ObservationsCfg),
}
"""How these sections call a function, and their other settings."""
_OF_CALLS = {"mode", "params", "weight", "interval_range_s"}
"""Keys of such a call."""

MAX_COPIES = 16_384
"""Maximum number of copies of a Gymnasium environment, as each is a Python object."""


@dataclass(frozen=True)
class EnvSpec:
    """A registered task, whose class is imported on first use."""

    id: str
    entry_point: str | type[Task]
    """The task class, or its entry point ``"module:Class"``."""

    @property
    def task(self) -> type[Task]:
        """The task class."""
        return pkgutil.resolve_name(self.entry_point) if isinstance(self.entry_point, str) else self.entry_point

    @property
    def description(self) -> str:
        """The first line of the task's docstring."""
        return ((self.task.__doc__ or "").strip() or "(no description)").splitlines()[0]


_TASKS: dict[str, EnvSpec] = {id: EnvSpec(id, entry_point) for id, entry_point in (TASKS | MUJOCO_SUITE).items()}
_SHIPPED = TASKS | MUJOCO_SUITE


def register_task(id: str, task: type[Task] | str) -> None:
    """Register a task class or its entry point ``"module:Class"`` under an id; an earlier task of that id is replaced.

    Ids of this package's own tasks are refused.
    """
    shipped = _SHIPPED.get(id)
    if shipped is not None and _entry_point(task) != shipped:
        problem = f"{id} is a task of this package, {shipped}, which {_entry_point(task)} would replace"
        raise ConfigError(f"{problem}; register it under another id", f"register_task({id!r})")
    steps = None if isinstance(task, str) else _default_cfg(task).max_episode_steps
    before = _TASKS.get(id)
    if before is not None and not is_same_code(before.entry_point, task):
        names = _entry_point(before.entry_point), _entry_point(task)
        _LOG.warning("register_task(%r): %s is replaced by %s; give one of them another id", id, *names)
    _TASKS[id] = EnvSpec(id, task)
    register_with_gymnasium(id, steps)


def _entry_point(task: type[Task] | str) -> str:
    """Return ``module:Class`` of a task."""
    return task if isinstance(task, str) else f"{task.__module__}:{task.__qualname__}"


def _default_cfg(task: type[Task]) -> GymCfg:
    """Return the default config of a task; ``EnvContractError`` if its method returns something else."""
    if not (isinstance(task, type) and issubclass(task, Task)):
        raise EnvContractError(f"register_task: expected a class derived from Task, or its entry point, got {task!r}")
    who = f"{task.__name__}.default_cfg"
    with blamed_on(who):
        cfg: object = task.default_cfg()
    if not isinstance(cfg, GymCfg):
        raise EnvContractError(f"{who} must return a GymCfg, as kit_cfg(...) does; got {described(cfg)}")
    return cfg


def list_envs() -> list[EnvSpec]:
    """Return all registered tasks, sorted by id."""
    return [_TASKS[name] for name in sorted(_TASKS)]


def is_simulated_here(cfg: GymCfg) -> bool:
    """Return whether an environment runs on this package's physics; Gymnasium makes all others."""
    if cfg.id not in MUJOCO_SUITE:
        return cfg.id in _TASKS
    can_simulate = cfg.device == "cpu" or available("mujoco_warp")
    return cfg.native and not cfg.asynchronous and can_simulate and _TASKS[cfg.id].task.understands(cfg.kwargs)


def load_gym_config(config: GymCfg | Mapping[str, Any] | str | os.PathLike[str], **overrides: Any) -> GymCfg:
    """Return the complete config of an id, a config file or a dict, merged with the defaults of the task."""
    if isinstance(config, GymCfg):
        return load_gym_config(config.to_dict(), **overrides) if overrides else config
    source, is_file = "gym_config", False
    if isinstance(config, str | os.PathLike):
        path = Path(config)
        is_file = path.suffix in (".json", ".yaml", ".yml")
        given: Mapping[str, Any] = load_config(find_shipped(path)) if is_file else {"id": str(config)}
        source = str(config)
    elif isinstance(config, Mapping):
        given = config
    else:
        raise ConfigError(f"expected a config, the path of one or an id, got {type(config).__name__}")
    folder = Path(config).parent if isinstance(config, str | os.PathLike) and is_file else None
    replaced = {key: given[key] for key in overrides if key in given and not isinstance(given[key], Mapping)}
    given = _with_found_files(_lay_over(given, overrides), folder)
    name = given.get("id")
    if not isinstance(name, str):
        problem = "none" if "id" not in given else repr(name)
        raise ConfigError(f'id: expected the name of an environment, such as "id": "ReachRL", got {problem}', source)
    if name not in gym.registry:
        name = same_name(name, _TASKS) or name
    takes = "takes the task of that name with the scene, robot, observations and rewards that it has here"
    hint = f'"gym_config": "{name}", or --trainer.gym_config {name}, {takes}'
    translated = translate_gym_config(given, source, hint if name in _TASKS else "", _FUNCTIONS)
    given, problems = translated.data, translated.problems
    problems += _take_incomplete_terms(given)
    base = _TASKS[name].task.default_cfg().to_dict() if name in _TASKS else {"id": name}
    try:
        cfg = GymCfg.from_dict(_lay_over(base, given) | {"id": name}, source)
    except ConfigError as error:
        problems += translated.as_given(error.problems)
    problems += _nothing_to_remove(given, base) if name in _TASKS else []
    try:  # a setting in the file must be valid, also if it is overridden
        GymCfg.from_dict(replaced | {"id": name}, source)
    except ConfigError as error:
        problems += error.problems
    if problems and (unknown := unknown_id(name)):
        problems.append(f"id: {unknown}")
    if problems:
        raise ConfigError(problems, source)
    return cfg


def _take_incomplete_terms(given: dict[str, Any]) -> list[str]:
    """Remove entries that are meant to call a registered function but do not name it; return their problems."""
    problems = []
    for section, (call, cfg) in _CALLS.items():
        entries = _below(given, "env", section)
        for name, entry in list(entries.items()):
            if name in cfg.__dataclass_fields__ or not isinstance(entry, str | Mapping):
                continue
            known = nearest(str(name), cfg.__dataclass_fields__)
            calls = isinstance(entry, Mapping) and bool(_OF_CALLS & entry.keys())
            if "Did you mean" in known and not calls:  # a typing error in a setting
                continue
            del entries[name]
            got = f"got {shorten(entry)}{', which has no func' if isinstance(entry, Mapping) else ''}"
            wanted = f"expected {call}, or one of the settings of env.{section}"
            problems.append(f"env.{section}.{name}: {wanted}, {got}.{known}")
    return problems


def _nothing_to_remove(given: Mapping[str, Any], base: Mapping[str, Any]) -> list[str]:
    """Return the problems of events and parts of the scene that are ``null`` without the task having them."""
    problems = []
    for path in (*(("env", "scene", kind) for kind in SceneCfg.__dataclass_fields__), ("env", "events", "terms")):
        own = _below(base, *path)
        for name, entry in _below(given, *path).items():
            if entry is None and name not in own:
                problem = f"null removes one of the task, which has none of that name.{nearest(str(name), own)}"
                problems.append(f"{'.'.join(path)}.{name}: {problem}")
    return problems


def _below(tree: Any, *path: str) -> dict[str, Any]:
    """Return the block at a path of a config; an empty one if there is none."""
    for key in path:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree if isinstance(tree, dict) else {}


def unknown_id(name: str) -> str | None:
    """Return the error message for an unregistered id; ``None`` if it is known, or its module is to be imported."""
    if ":" in name or name in _TASKS or name in gym.registry or name == MULTI_TASK:
        return None
    names = [*_TASKS, *(name for name in gym.registry if not name.startswith(("phys2d/", "tabular/")))]
    close = nearest(name, names).split(" Valid:")[0]
    tasks = ", ".join(sorted(_TASKS.keys() - MUJOCO_SUITE.keys()))
    hint = "If a module of your own registers it, name that module: --trust MODULE, or trusted_modules in Python."
    imported = sorted(allowed_modules())
    if imported and not _TASKS.keys() - _SHIPPED.keys():
        modules = f"{', '.join(imported)} {'was' if len(imported) == 1 else 'were'} imported, and registered no task"
        call = f'"from embodichain.envs.registration import register_task", register_task("{name}", YOUR_CLASS)'
        hint += f" {modules}: add {call} at the end of the file."
    return f"unknown environment {name!r}.{close} Tasks: {tasks}; or any Gymnasium id. {hint}"


def _lay_over(base: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two configs; a given action term or robot replaces the one of ``base`` instead of being merged with it."""
    merged = merge(base, given)
    env, robot, before = given.get("env"), given.get("robot"), base.get("robot")
    if isinstance(env, Mapping) and env.get("actions") is not None:
        merged["env"]["actions"] = env["actions"]
    if isinstance(robot, Mapping) and isinstance(before, Mapping):
        differs = [robot.get(key) is not None and robot[key] != before.get(key) for key in ("uid", "mjcf")]
        if any(differs):  # init_qpos, tool and arms belong to the previous robot
            merged["robot"] = dict(robot)
        else:
            merged["robot"] = merge(_without_replaced(before, robot), robot)
    return merged


def _without_replaced(before: Mapping[str, Any], robot: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a robot with arms, and only the places of those that ``robot`` replaces by other models.

    What all its arms share is a setting of each arm that is left, so that other models do not inherit it.
    """
    own, given = before.get("arms") or {}, robot.get("arms")
    if not own or not isinstance(given, Mapping):
        return dict(before)
    replaced = {name for name, arm in given.items() if isinstance(arm, Mapping) and (arm.get("mjcf") or arm.get("uid"))}
    replaced -= {name for name in replaced if not given[name].get("mjcf") and given[name]["uid"] == before.get("uid")}
    if not replaced:
        return dict(before)
    plain = RobotCfg().to_dict()
    shared = {key: at for key, at in before.items() if key not in ("uid", "arms", *robot) and at != plain[key]}
    arms: dict[str, Any] = {}
    for name, arm in own.items():
        if name not in replaced:
            arms[name] = arm | {key: value for key, value in shared.items() if arm.get(key) == plain[key]}
            continue
        turned = any(given[name].get(key) is not None for key in ("yaw", "quat"))
        kept = ("pos",) if turned else ("pos", "yaw", "quat")
        arms[name] = {key: arm[key] for key in kept if key in arm}
    return {key: value for key, value in before.items() if key not in shared} | {"arms": arms}


def _with_found_files(given: Mapping[str, Any], folder: Path | None) -> Mapping[str, Any]:
    """Return settings with absolute paths of robot and scene files, valid in any process and working directory."""
    given = _with_found_meshes(given, folder)
    robot = given.get("robot")
    if not isinstance(robot, Mapping):
        return given
    arms = robot.get("arms")
    found = _found(robot, folder)
    if isinstance(arms, Mapping):
        found["arms"] = {k: _found(arm, folder) if isinstance(arm, Mapping) else arm for k, arm in arms.items()}
    return dict(given) | {"robot": found}


def _with_found_meshes(given: Mapping[str, Any], folder: Path | None) -> Mapping[str, Any]:
    """Return settings with absolute paths of the meshes in ``env.scene.objects``."""
    here: Any = given
    for key in ("env", "scene", "objects"):
        here = here.get(key) if isinstance(here, Mapping) else None
    if not isinstance(here, Mapping):
        return given
    found = {}
    for name, thing in here.items():
        if isinstance(thing, Mapping) and isinstance(thing.get("file"), str):
            try:
                found[name] = {"file": str(find_file(thing["file"], folder))}
            except AssetError as error:
                raise ConfigError(f"env.scene.objects.{name}.file: {error}") from error
    return merge(given, {"env": {"scene": {"objects": found}}}) if found else given


def _found(robot: Mapping[str, Any], folder: Path | None) -> dict[str, Any]:
    out = dict(robot)
    for key in ("mjcf", "tool"):
        name = out.get(key)
        if isinstance(name, str) and (key == "mjcf" or name.endswith(".xml")) and not name.startswith("package://"):
            out[key] = str(find_file(name, folder))
    return out


def make(
    config: GymCfg | Mapping[str, Any] | str | os.PathLike[str], trusted_modules: Collection[str] = (), **overrides: Any
) -> VecEnv:
    """Build the environment of an id or a config: ``make("PushCubeRL", num_envs=64, seed=0)``.

    ``trusted_modules`` (names or .py files) are imported first; they may register tasks and environments. All other ids
    are Gymnasium's; ``module:Name-v0`` is imported only if ``module`` is trusted.
    """
    import_trusted(trusted_modules, config_folders(config))
    return _make_fitting(load_gym_config(config, **overrides), trusted_modules)


def _make_fitting(cfg: GymCfg, trusted_modules: Collection[str], to_watch: bool = False) -> VecEnv:
    with fits_memory("num_envs", f"a number of {cfg.num_envs} environments", cfg.id):
        return _make(cfg, trusted_modules, to_watch)


def _make(cfg: GymCfg, trusted_modules: Collection[str], to_watch: bool) -> VecEnv:
    """Build the environment of a complete config."""
    if cfg.id == MULTI_TASK:
        return _make_several_tasks(cfg, trusted_modules, to_watch)
    if is_simulated_here(cfg):
        return publish_if_asked(_make_simulated(cfg))
    if unknown := unknown_id(cfg.id):
        raise UnknownNameError(unknown)
    return _make_in_gymnasium(cfg, trusted_modules)


def _make_several_tasks(cfg: GymCfg, trusted_modules: Collection[str], to_watch: bool) -> VecEnv:
    """Build the environments of several tasks, which share device, threads, time limit, seed and curricula."""
    common: dict[str, Any] = {"device": cfg.device, "num_threads": cfg.num_threads}
    common |= {} if cfg.max_episode_steps is None else {"max_episode_steps": cfg.max_episode_steps}
    if cfg.env.events.demonstration_starts:
        problem = "expected in the env.events of each task of kwargs.tasks that is to have it"
        raise ConfigError(f"env.events.demonstration_starts: {problem}; leave it out here", cfg.id)
    given = _given_of_env(cfg, EnvCfg())
    if given:
        problem = "expected in the env of each task of kwargs.tasks that is to have it; leave it out here"
        raise ConfigError([f"env.{name}: {problem}" for name in given], cfg.id)
    common |= {"seed": cfg.seed, "env": {"curricula": cfg.env.curricula}}
    if to_watch:
        common["env"]["events"] = {"demonstration_starts": None}
    return make_multi_task(
        cfg.kwargs,
        cfg.num_envs,
        lambda one: _make_fitting(load_gym_config(one, **common), trusted_modules, to_watch),
    )


def _make_simulated(cfg: GymCfg) -> TaskEnv:
    """Build a task of this package on its physics backend."""
    task = _TASKS[cfg.id].task
    with _naming_meshes(cfg):
        differs = cfg.robot != task.default_cfg().robot or not is_ours(cfg.robot)
        if differs and cfg.id not in MUJOCO_SUITE:  # whose tasks refuse robots
            from embodichain.envs.task_starts import with_start  # slow to import, and for other robots only

            cfg = with_start(cfg, task)
        model = task.build_model(cfg)
    if cfg.device == "cpu":
        return TaskEnv(cfg, task, MujocoCpuPhysics(model, cfg.num_envs, cfg.num_threads, task.outputs))
    from embodichain.envs.physics.mujoco_warp import MujocoWarpPhysics  # optional dependency

    rows = spare_rows(cfg.env.events, model)
    return TaskEnv(cfg, task, MujocoWarpPhysics(model, cfg.num_envs, cfg.device, task.outputs, rows))


def _make_in_gymnasium(cfg: GymCfg, trusted_modules: Collection[str]) -> VecEnv:
    """Build a Gymnasium environment; ``ConfigError`` for settings that only tasks simulated here have."""
    default = _TASKS[cfg.id].task.default_cfg() if cfg.id in _TASKS else GymCfg(cfg.id)
    given = [f"env.{name}" for name in _given_of_env(cfg, default.env)]
    given += ["robot"] if cfg.robot != default.robot else []
    if given:
        problem = "is simulated by Gymnasium, where this cannot be set; leave it out"
        problem += ", or leave out native: false" if cfg.id in _TASKS and not cfg.native else ""
        raise ConfigError([f"{name}: {cfg.id} {problem}" for name in given])
    if cfg.num_envs > MAX_COPIES:
        problem = f"num_envs: expected at most {MAX_COPIES} copies of a Gymnasium environment, got {cfg.num_envs}"
        raise ConfigError(problem, cfg.id)
    try:
        return make_gymnasium(
            cfg.id,
            cfg.num_envs,
            cfg.kwargs,
            max_episode_steps=cfg.max_episode_steps,
            asynchronous=cfg.asynchronous,
            trusted_modules=tuple(trusted_modules),
            device=cfg.device,
            seed=cfg.seed,
        )
    except TypeError as error:
        refused = [name for name in cfg.kwargs if f"argument '{name}'" in str(error)]
        if refused:
            known = _arguments(cfg.id, trusted_modules)
            hint = nearest(refused[0], known) if known else f" ({error})"
            raise ConfigError(f"kwargs.{refused[0]}: {cfg.id} takes no such argument.{hint}") from error
        raise


@contextlib.contextmanager
def _naming_meshes(cfg: GymCfg) -> Iterator[None]:
    """Name the object whose mesh is the reason why a model does not compile."""
    try:
        yield
    except AssetError:
        for name, thing in cfg.env.scene.objects.items():
            if thing is not None and thing.file is not None:
                mesh_centre(thing.file, f"env.scene.objects.{name}.file")
        raise


def _given_of_env(cfg: GymCfg, default: EnvCfg) -> list[str]:
    """Return the settings of ``env`` that differ from ``default``.

    Not ``curricula``, which evaluations set everywhere: where no range can be given, none has a curriculum.
    """
    names = (name for name in EnvCfg.__dataclass_fields__ if name != "curricula")
    return [name for name in names if getattr(cfg.env, name) != getattr(default, name)]


def _arguments(name: str, trusted_modules: Collection[str]) -> list[str]:
    """Return the names of the arguments that the constructor of a Gymnasium environment takes."""
    spec = resolve_spec(name, trusted_modules)
    entry_point = spec.entry_point
    maker = pkgutil.resolve_name(entry_point) if isinstance(entry_point, str) else entry_point
    if maker is None:
        return []
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    found = inspect.signature(maker).parameters.values()
    return sorted({parameter.name for parameter in found if parameter.kind in plain} | spec.kwargs.keys())


def make_to_watch(
    config: GymCfg | Mapping[str, Any] | str | os.PathLike[str],
    trusted_modules: Collection[str] = (),
    video: bool = False,
    longest: int = LONGEST_EPISODE,
    **overrides: Any,
) -> VecEnv:
    """Build an environment to evaluate or record whole episodes; ``video`` enables rendering where it is supported.

    Without a time limit, episodes are truncated after ``longest`` steps. A Gymnasium env is made with
    ``render_mode="rgb_array"`` if it accepts that.
    """
    import_trusted(trusted_modules, config_folders(config))
    cfg = load_gym_config(config, **overrides)
    events = cfg.env.events.replace(demonstration_starts=None)
    cfg = cfg.replace(env=cfg.env.replace(curricula="final", events=events))  # as in evaluation
    is_foreign = not is_simulated_here(cfg) and cfg.id != MULTI_TASK
    if is_foreign and (unknown := unknown_id(cfg.id)):
        raise UnknownNameError(unknown)
    env = _make_with_images(cfg, trusted_modules) if video and is_foreign else None
    env = _make_fitting(cfg, trusted_modules, to_watch=True) if env is None else env
    if env.max_episode_steps is not None:
        return env
    env.close()
    _LOG.info(
        "%s has no time limit: its episodes are cut after %d steps here; max_episode_steps in gym_config sets another",
        cfg.id,
        longest,
    )
    return make_to_watch(cfg, trusted_modules, video, max_episode_steps=longest)


def _make_with_images(cfg: GymCfg, trusted_modules: Collection[str]) -> VecEnv | None:
    """Build a Gymnasium env that renders, or return ``None`` if it does not support that."""
    with contextlib.suppress(RenderingError):  # Gymnasium's MuJoCo envs read MUJOCO_GL; others do not need it
        choose_backend()
    entry_point = resolve_spec(cfg.id, trusted_modules).entry_point
    with contextlib.suppress(Exception):  # any other error occurs again, and is reported, without the render mode
        maker = pkgutil.resolve_name(entry_point) if isinstance(entry_point, str) else entry_point
        metadata = getattr(maker, "metadata", None)  # a factory function has none
        if not isinstance(metadata, Mapping) or "rgb_array" in metadata.get("render_modes", ()):
            return make(cfg.replace(kwargs={"render_mode": "rgb_array"} | cfg.kwargs), trusted_modules)
    return None
