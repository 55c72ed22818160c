"""Several tasks in one environment.

:class:`TaskView` converts a task to common spaces, and :class:`MultiTaskEnv` steps several tasks together.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch.nn import functional as F

from embodichain.config import Config, Positive, configclass, load_config, merge
from embodichain.config.files import find_config, find_shipped
from embodichain.envs.vec_env import Action, ActionManager, EnvIds, HasExpert, MarksSegments, StepResult, VecEnv
from embodichain.envs.wrappers import EnvWrapper, GroupedEnv
from embodichain.errors import ConfigError, EnvContractError

MULTI_TASK = "MultiTask"
"""Id of the multi-task environment; its settings, a :class:`MultiTaskCfg`, are in ``kwargs``."""
Agree = Literal["same", "common", "padded"]
Path_ = tuple[str, ...]
_LOG = logging.getLogger(__name__)
_INSTRUCTION: Path_ = ("instruction",)
_SUFFIXES = (".json", ".yaml", ".yml")
_WORD = 4
"""Instructions are padded to a multiple of this many bytes."""


@configclass
class TaskEntryCfg(Config):
    """Settings of one task in a list, besides those of its environment."""

    weight: Positive = 1.0
    """Share of the envs, relative to the other tasks."""
    task: str | None = None
    """Instruction, if the environment has none of its own; default: its id."""


@configclass
class MultiTaskCfg(Config):
    """Settings of the environment ``MultiTask``."""

    tasks: list[Any] = []
    """The tasks: ids, files, or settings of environments with optional ``weight`` and ``task``, as for a stream."""
    observations: Agree = "same"
    """How to unify observations that differ: see :func:`agree`."""


@dataclass(frozen=True)
class TaskEntry:
    """One task of several."""

    name: str
    """Its id, followed by a number if an earlier task has the same id."""
    gym_config: dict[str, Any]
    weight: float = 1.0
    words: str = ""
    """Instruction, if the environment has none of its own."""


def task_entries(given: Sequence[Any], folder: Path | None = None, key: str = "gym_config") -> list[TaskEntry]:
    """Parse a list of tasks: ids, paths of files (relative to ``folder``), or settings of an environment.

    Settings may override a file: ``{"gym_config": FILE, "num_envs": 8}``; ``weight`` and ``task`` go beside them.
    """
    entries: list[TaskEntry] = []
    problems: list[str] = []
    for index, item in enumerate(given):
        try:
            settings = _settings(item, folder)
            own = {name: settings.pop(name) for name in TaskEntryCfg.__dataclass_fields__ if name in settings}
            cfg = TaskEntryCfg.from_dict(own)
            if not isinstance(settings.get("id"), str):
                raise ConfigError(f"id: expected the name of an environment, got {settings.get('id')!r}")
        except ConfigError as error:
            problems += [f"{key}[{index}].{problem}" for problem in error.problems]
            continue
        before = sum(entry.gym_config["id"] == settings["id"] for entry in entries)
        name = f"{settings['id']} {before + 1}" if before else settings["id"]
        entries.append(TaskEntry(name, settings, cfg.weight, cfg.task or settings["id"]))
    if not given:
        problems.append(f"{key}: expected at least one task, got []")
    if problems:
        raise ConfigError(problems)
    return entries


def _settings(item: Any, folder: Path | None) -> dict[str, Any]:
    """Return the settings of one entry of a list."""
    if isinstance(item, str):
        if not item.endswith(_SUFFIXES):
            return {"id": item}
        return load_config(find_shipped(item) if folder is None else find_config(item, folder))
    if not isinstance(item, Mapping):
        raise ConfigError(f"gym_config: expected settings, a file or an id, got {item!r:.80}")
    settings = dict(item)
    base = settings.pop("gym_config", None)
    return settings if base is None else merge(_settings(base, folder), settings)


def shares_of(weights: Sequence[float], total: int) -> list[int]:
    """Return integers that sum to ``total``, at least 1 each, in proportion to weights (largest remainder method)."""
    exact = [weight * total / sum(weights) for weight in weights]
    parts = [max(1, int(part)) for part in exact]
    while sum(parts) != total:
        step = 1 if sum(parts) < total else -1
        able = [i for i, part in enumerate(parts) if step > 0 or part > 1]
        if not able:
            raise ConfigError(f"expected at least {len(weights)}, one for each task, got {total}")
        parts[max(able, key=lambda i: step * (exact[i] - parts[i]))] += step
    return parts


@dataclass(frozen=True)
class Agreement:
    """The common observation and action spaces of several environments."""

    observation_space: gym.spaces.Dict
    action_space: gym.Space[Any]
    leaves: dict[Path_, gym.spaces.Box] = field(default_factory=dict)
    """Observations by path."""


def agree(envs: Mapping[str, VecEnv], how: Agree, words: Mapping[str, str], key: str = "observations") -> Agreement:
    """Return the common spaces of environments, given by name.

    ``same`` requires equal observations and actions. ``common`` drops observations that some of them lack or have in
    another shape. ``padded`` fills missing arrays with zeros, and pads shorter vectors and actions with zeros. Every
    environment has an ``instruction``: its own, or the words of its task.
    """
    names = list(envs)
    spaces = {name: dict(_boxes(env.observation_space)) for name, env in envs.items()}
    problems: list[str] = []
    leaves: dict[Path_, gym.spaces.Box] = {}
    left_out = []
    for path in sorted({path for space in spaces.values() for path in space}):
        boxes = {name: spaces[name][path] for name in names if path in spaces[name]}
        kinds = {(box.shape, str(box.dtype)) for box in boxes.values()}
        can_pad = len({dtype for _, dtype in kinds}) == 1 and all(len(shape) == 1 for shape, _ in kinds)
        if path == _INSTRUCTION:
            continue
        if len(boxes) == len(names) and len(kinds) == 1:
            leaves[path] = _joined(list(boxes.values()), next(iter(kinds))[0])
        elif how == "padded" and (can_pad or len(kinds) == 1):
            leaves[path] = _joined([*boxes.values()], tuple(np.max([shape for shape, _ in kinds], axis=0)), pad=True)
        elif how == "common" and (len(boxes) < len(names) or can_pad):
            left_out.append("/".join(path))
        else:
            problems.append(f"observation {'/'.join(path)}: {_describe_boxes(boxes, names)}")
    actions = {name: env.action_space for name, env in envs.items()}
    action_space = next(iter(actions.values()))
    if any(space != action_space for space in actions.values()):
        boxes = {name: space for name, space in actions.items() if isinstance(space, gym.spaces.Box)}
        sizes = {box.shape for box in boxes.values()}
        vectors = len(boxes) == len(names) and all(len(shape) == 1 for shape in sizes)
        if vectors and (len(sizes) == 1 or how == "padded"):
            action_space = _joined(list(boxes.values()), tuple(np.max(list(sizes), axis=0)), pad=True)
        else:
            types = {name: f"{env.action_manager.action_type} {env.action_space.shape}" for name, env in envs.items()}
            listed = ", ".join(f"{kind} in {name}" for name, kind in types.items())
            problems.append(f"action: {listed}; env.actions of each task says what its actions are")
    if problems:
        common = '"common" observes only what all of them do'
        padded = '"padded" fills up with zeros what is missing or shorter, in observations and actions'
        others = {"same": f" {common}, {padded}.", "common": f" {padded}.", "padded": ""}[how]
        advice = "make them alike, with the same robot, cameras and env.actions."
        raise ConfigError([*problems, f"the tasks differ, and {key} is {how!r}: {advice}{others}"])
    if left_out:
        _log_left_out(", ".join(names), ", ".join(left_out))
    own = {name: space[_INSTRUCTION].shape[0] for name, space in spaces.items() if _INSTRUCTION in space}
    lengths = {name: -(-len(text.encode()) // _WORD) * _WORD for name, text in words.items()} | own
    leaves[_INSTRUCTION] = gym.spaces.Box(0, 255, (max(lengths.values()),), np.uint8)
    return Agreement(_nested(leaves), action_space, leaves)


@functools.cache
def _log_left_out(names: str, keys: str) -> None:
    """Log once which observations are dropped."""
    _LOG.info("not all of %s observe %s: left out", names, keys)


def _describe_boxes(boxes: Mapping[str, gym.spaces.Box], names: Sequence[str]) -> str:
    """Describe which environments have an array, and of which shape and dtype."""
    kinds = {name: f"{list(box.shape)} {box.dtype}" for name, box in boxes.items()}
    if len(set(kinds.values())) == 1 and len(boxes) < len(names):
        missing = ", ".join(name for name in names if name not in boxes)
        return f"{', '.join(boxes)} has it ({next(iter(kinds.values()))}), {missing} has not"
    return ", ".join(f"{kind} in {name}" for name, kind in kinds.items())


def _boxes(space: gym.Space[Any], path: Path_ = ()) -> Iterator[tuple[Path_, gym.spaces.Box]]:
    if isinstance(space, gym.spaces.Dict):
        for key, value in space.spaces.items():
            yield from _boxes(value, (*path, key))
    elif isinstance(space, gym.spaces.Box):
        yield path, space
    else:
        raise EnvContractError(f"observation {'/'.join(path)}: expected a Box, got {space}")


def _joined(boxes: Sequence[gym.spaces.Box], shape: tuple[int, ...], pad: bool = False) -> gym.spaces.Box:
    """Return a box of this shape that contains all of these; with ``pad``, also zero."""
    if not pad and all(box == boxes[0] for box in boxes):
        return boxes[0]
    low, high = min(float(box.low.min()) for box in boxes), max(float(box.high.max()) for box in boxes)
    return gym.spaces.Box(min(low, 0.0) if pad else low, max(high, 0.0) if pad else high, shape, boxes[0].dtype.type)


def _nested(leaves: Mapping[Path_, gym.spaces.Box]) -> gym.spaces.Dict:
    groups: dict[str, Any] = {}
    for path, box in leaves.items():
        inner = groups
        for name in path[:-1]:
            inner = inner.setdefault(name, {})
        inner[path[-1]] = box
    return _as_dict(groups)


def _as_dict(groups: Mapping[str, Any]) -> gym.spaces.Dict:
    return gym.spaces.Dict({k: _as_dict(v) if isinstance(v, Mapping) else v for k, v in groups.items()})


class TaskView(EnvWrapper):
    """Converts one environment to the common spaces."""

    def __init__(self, env: VecEnv, task: TaskEntry, agreement: Agreement) -> None:
        super().__init__(env)
        self.task, self._agreement, self.max_episode_steps = task, agreement, env.max_episode_steps
        self.observation_space, self.action_space = agreement.observation_space, agreement.action_space
        self.has_expert = isinstance(env, HasExpert) and env.has_expert
        action_type = env.action_manager.action_type
        self.action_manager = ActionManager(action_type, self.action_space, self.num_envs, self.device)
        self._is_vector = isinstance(self.action_space, gym.spaces.Box) and len(self.action_space.shape) == 1
        length = agreement.leaves[_INSTRUCTION].shape[0]
        text = task.words.encode()[:length].decode(errors="ignore").encode()
        instruction = torch.tensor([*text, *[0] * (length - len(text))], dtype=torch.uint8, device=self.device)
        self._instruction = instruction.expand(self.num_envs, length)

    @property
    def name(self) -> str:
        return self.task.name

    def view(self, obs: TensorDictBase) -> TensorDict:
        """Return an observation of the environment in the common format."""
        shown = TensorDict({}, batch_size=obs.batch_size, device=self.device)
        for path, box in self._agreement.leaves.items():
            value = obs.get(path, None)
            if value is None and path == _INSTRUCTION:
                value = self._instruction
            elif value is None:
                dtype = torch.from_numpy(np.empty(0, box.dtype)).dtype
                value = torch.zeros(box.shape, dtype=dtype, device=self.device).expand(self.num_envs, *box.shape)
            elif value.dim() == 2 and value.shape[1] < box.shape[0]:
                value = F.pad(value, (0, box.shape[0] - value.shape[1]))
            shown.set(path, value)
        return shown

    def reset(self, seed: int | Tensor | None = None, env_ids: EnvIds = None) -> tuple[TensorDict, dict[str, Any]]:
        obs, info = self.env.reset(seed, env_ids)
        return self.view(obs), info

    def step(self, action: Action) -> StepResult:
        given = self.action_manager.unwrap(action)
        if self._is_vector:
            given = given[:, : self.env.action_manager.action_dim]
        obs, reward, terminated, truncated, info = self.env.step(given)
        shown, final = self.view(obs), info["final_observation"]
        info = {**info, "final_observation": shown if final is obs else self.view(final)}
        return shown, reward, terminated, truncated, info

    def expert_action(self) -> Tensor:
        """Return the expert's action, zero-padded to the common size."""
        if not isinstance(self.env, HasExpert):
            raise EnvContractError(f"{self.name} has no expert")
        return self._filled(self.env.expert_action())

    def expert_segment(self) -> Tensor:
        """Return the segment of the last expert action, int64 indices into ``SEGMENTS``; 0 if the expert sets none."""
        if isinstance(self.env, MarksSegments):
            return self.env.expert_segment()
        return torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)

    def create_demo_action_list(self) -> list[Tensor]:
        """Return the expert's actions from the current state to the end of the episodes; the state is preserved."""
        if not isinstance(self.env, HasExpert):
            raise EnvContractError(f"{self.name} has no expert")
        return [self._filled(action) for action in self.env.create_demo_action_list()]

    def _filled(self, action: Tensor) -> Tensor:
        missing = self.action_manager.action_dim - action.shape[1] if self._is_vector else 0
        return F.pad(action, (0, missing)) if missing else action

    def set_state(self, state: TensorDictBase, env_ids: EnvIds = None) -> TensorDict:
        return self.view(self.env.set_state(state, env_ids))


class MultiTaskEnv(GroupedEnv):
    """Several tasks in one environment, each in a part of the envs.

    ``info["metrics"]`` has the metrics that all tasks share, and ``task/<name>/<metric>`` for each task, which is NaN
    in the envs of others.
    """

    groups: list[TaskView]  # type: ignore[assignment]
    is_divisible = False

    def __init__(self, views: Sequence[TaskView]) -> None:
        longest = [view.max_episode_steps for view in views]
        for view in views:
            view.max_episode_steps = None if None in longest else max(steps for steps in longest if steps)
        super().__init__(views)
        self.task_names = [view.name for view in views]
        """Names of the tasks, in the order of their envs."""

    @property
    def has_expert(self) -> bool:  # type: ignore[override]
        """Whether all tasks have an expert."""
        return all(view.has_expert for view in self.groups)

    @property
    def name(self) -> str:
        return f"{MULTI_TASK} ({', '.join(self.task_names)})"

    def expert_action(self) -> Tensor:
        """Return the actions of the experts of all tasks."""
        return torch.cat([view.expert_action() for view in self.groups])

    def create_demo_action_list(self) -> list[Tensor]:
        """Return the experts' actions from the current state; tasks that end first repeat their last action."""
        lists = [view.create_demo_action_list() for view in self.groups]
        longest = max(map(len, lists))
        return [torch.cat([own[min(step, len(own) - 1)] for own in lists if own]) for step in range(longest)]

    def join(self, results: Sequence[StepResult], obs: TensorDict | None = None) -> StepResult:
        measures = [result[4].get("metrics", {}) for result in results]
        shared = [name for name in measures[0] if all(name in own for own in measures)]
        kept = [{**r[4], "metrics": {name: r[4]["metrics"][name] for name in shared}} for r in results]
        joined = super().join([(*r[:4], info) for r, info in zip(results, kept, strict=True)], obs)
        metrics = joined[4].setdefault("metrics", {})
        for name, rows, own in zip(self.task_names, self.slices, measures, strict=True):
            for measure, value in own.items():
                if measure == "success" or measure not in shared:
                    metrics[f"task/{name}/{measure}"] = whole = value.new_full((self.num_envs,), torch.nan)
                    whole[rows] = value
        return joined

    def get_state(self) -> TensorDict:
        states = {}
        for number, (view, rows) in enumerate(zip(self.groups, self.slices, strict=True)):
            own = view.get_state()
            whole = own.apply(lambda leaf: leaf.new_zeros((self.num_envs, *leaf.shape[1:])), batch_size=[self.num_envs])
            whole[rows] = own
            states[f"task_{number}"] = whole
        return TensorDict(states, batch_size=[self.num_envs], device=self.device)

    def set_state(self, state: TensorDictBase, env_ids: EnvIds = None) -> TensorDict:
        for index, (view, mine, local) in enumerate(self._rows_of(self.resolve_ids(env_ids))):
            own = state[f"task_{index}"]
            self._obs[index] = view.set_state(own[mine.to(own.device or "cpu")], local)
        return self._joined_obs()


def open_views(
    entries: Sequence[TaskEntry], how: Agree, make: Callable[[TaskEntry], VecEnv], key: str = "observations"
) -> list[TaskView]:
    """Make the environments of tasks and unify their spaces; if one fails, all are closed.
    ``key`` is the setting that holds ``how``, for error messages."""
    envs: dict[str, VecEnv] = {}
    try:
        for entry in entries:
            envs[entry.name] = make(entry)
        agreement = agree(envs, how, {entry.name: entry.words for entry in entries}, key)
        return [TaskView(envs[entry.name], entry, agreement) for entry in entries]
    except BaseException:
        for env in envs.values():
            env.close()
        raise


def shared_out(kwargs: Mapping[str, Any], num_envs: int) -> tuple[list[TaskEntry], Agree]:
    """Return the tasks of a ``MultiTask`` environment with their shares of the envs, and how to unify them."""
    cfg = MultiTaskCfg.from_dict(dict(kwargs), source="kwargs")
    entries = task_entries(cfg.tasks, key="kwargs.tasks")
    shares = shares_of([entry.weight for entry in entries], max(num_envs, len(entries)))
    pairs = zip(entries, shares, strict=True)
    return [replace(e, gym_config=e.gym_config | {"num_envs": share}) for e, share in pairs], cfg.observations


def make_multi_task(kwargs: Mapping[str, Any], num_envs: int, make: Callable[[dict[str, Any]], VecEnv]) -> MultiTaskEnv:
    """Make a ``MultiTask`` environment from its ``kwargs``; tasks share the envs in proportion to their weights.
    With fewer envs than tasks, the first tasks get one each; the spaces are those of all tasks."""
    entries, how = shared_out(kwargs, num_envs)
    views = open_views(entries, how, lambda entry: make(entry.gym_config), "kwargs.observations")
    for view in views[num_envs:]:
        _LOG.debug("%s is left out: there are %d envs for %d tasks", view.name, num_envs, len(views))
        view.close()
    return MultiTaskEnv(views[:num_envs])
