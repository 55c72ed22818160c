"""Sources of episodes: a simulation with an actor, or a folder of recorded episodes."""

import functools
import os
from collections.abc import Callable, Sequence
from pkgutil import resolve_name
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from embodichain.agents.datasets.frames import (
    INSTRUCTION,
    Episode,
    EpisodeSource,
    FrameLayout,
    Frames,
    Leaf,
    flatten,
    words_of,
)
from embodichain.agents.engine.config import ACTORS, ActionSourceCfg, OnlineDataEngineCfg
from embodichain.agents.processes.channel import PublishedWeights
from embodichain.envs.multi_task import TaskView, open_views
from embodichain.envs.vec_env import ActionBounds, HasExpert, MarksSegments, VecEnv, random_actions
from embodichain.errors import ConfigError, EnvContractError, nearest
from embodichain.extras import config_folders, import_trusted

# Entry points, as in ``ACTORS``: only a worker that needs them imports all tasks, or the extra ``data``.
_MAKE_ENV = "embodichain.envs.registration:make_to_watch"
_LIST_ENVS = "embodichain.envs.registration:list_envs"
_TASK_ENV, _STEP_SECONDS = "embodichain.envs.task_env:TaskEnv", "embodichain.envs.publishing:step_seconds"
_RECORDED = "embodichain.agents.datasets.lerobot:RecordedEpisodes"
_LONGEST = 1000  # default time limit of environments without one, in steps


class Actor(Protocol):
    """Chooses the actions of all envs."""

    version: int = -1
    """Number of updates of the acting policy; -1 if there is no policy."""

    def __call__(self, observation: TensorDict) -> Tensor:
        """Return actions ``[num_envs, ...]`` for the current observation."""

    def reset(self, env_ids: list[int]) -> None:
        """Reset the per-episode state of these envs, whose episodes have ended. By default there is none."""
        return


@runtime_checkable
class LabellingActor(Protocol):
    """An actor that returns labels for imitation, while the envs execute another action."""

    extra: Frames
    """Additional frame keys of the last call, each ``[num_envs, ...]``: ``executed_action``, which the envs execute,
    and others."""

    def resume(self, steps: int, episodes: int) -> None:
        """Set the counts of environment steps and episodes to those of the worker that this one replaces."""


@runtime_checkable
class AdoptingActor(Protocol):
    """An actor that can load the weights that a learner publishes."""

    def adopt(self, weights: PublishedWeights) -> None:
        """Load these weights."""


class ExpertActor(Actor):
    """The scripted expert of the environment; it depends on the current state only."""

    def __init__(self, env: VecEnv, **_: object) -> None:
        if not isinstance(env, HasExpert) or not env.has_expert:
            raise ConfigError(
                f'source: {env.name} has no expert; use "random", or "policy" with a checkpoint', "action_config"
            )
        self._env: HasExpert = env

    def __call__(self, observation: TensorDict) -> Tensor:
        return self._env.expert_action()


class RandomActor(Actor):
    """Uniform samples from the action space; dimensions without bounds use [-1, 1]."""

    def __init__(self, env: VecEnv, seed: int, **_: object) -> None:
        self._env, self._generator = env, torch.Generator().manual_seed(seed)

    def __call__(self, observation: TensorDict) -> Tensor:
        env = self._env
        return random_actions(env.action_space, env.num_envs, self._generator).to(env.device)


def make_actor(
    cfg: ActionSourceCfg, env: VecEnv, seed: int, trusted_modules: Sequence[str] = (), num_workers: int = 1
) -> Actor:
    """Import the trusted modules, which may register actors, and build the actor that the config names."""
    import_trusted(trusted_modules, config_folders())
    factory = ACTORS.get(cfg.source)
    if factory is None:
        raise ConfigError(f"source: unknown name {cfg.source!r}.{nearest(cfg.source, ACTORS)}", "action_config")
    factory = resolve_name(factory) if isinstance(factory, str) else factory
    settings: dict[str, Any] = {"seed": seed, "trusted_modules": trusted_modules}
    if cfg.source == "dagger":
        settings |= {"cfg": cfg, "num_workers": num_workers}
    else:
        settings |= {"path": cfg.path, "deterministic": cfg.deterministic}
    actor: Actor = factory(env, **settings)
    return actor


class SimulatedEpisodes:
    """Steps a ``VecEnv`` and keeps the last ``max_episode_steps`` frames of every env.

    Frames are kept in a time-major ring buffer ``[max_steps, num_envs, ...]``: a step is one contiguous write per key,
    and an episode of env ``i`` is a slice of column ``i``, or two if it wraps around.
    """

    def __init__(self, env: VecEnv, actor: Actor, seed: int, noise_std: float = 0.0, task_index: int = 0) -> None:
        self.env, self.actor, self._noise_std, self._task_index = env, actor, noise_std, task_index
        self.num_envs = env.num_envs
        if env.max_episode_steps is None:
            raise EnvContractError("episodes of any length cannot be stored: give max_episode_steps")
        self.max_steps = env.max_episode_steps
        self.step_seconds = _step_seconds(env)
        self._bounds = ActionBounds(env.action_space)
        self._generator = torch.Generator().manual_seed(seed)
        self._observation, info = env.reset(seed=seed)
        self._seeds = _episode_seeds(info, env.num_envs)
        self._labelling = actor if isinstance(actor, LabellingActor) else None
        action = actor(self._observation)
        self.layout = FrameLayout.of_step(self._observation, action, self._labelling.extra if self._labelling else {})
        actor.reset(list(range(env.num_envs)))  # that call only determined the layout
        self.resume(0, 0)
        self._ring = self.layout.empty(self.max_steps, env.num_envs)
        self._begin = [0] * env.num_envs
        self._step = 0
        self._measures: list[Callable[[], Frames]] = []

    def also_keep(self, measure: Callable[[], Frames]) -> None:
        """Add keys to every frame: the tensors ``[num_envs, ...]`` that ``measure()`` returns before each step."""
        leaves = [Leaf(key, value.dtype, tuple(value.shape[1:])) for key, value in measure().items()]
        self._ring |= FrameLayout(tuple(leaves)).empty(self.max_steps, self.env.num_envs)
        self.layout = FrameLayout((*self.layout.leaves, *leaves))
        self._measures.append(measure)

    def resume(self, steps: int, episodes: int) -> None:
        """Set the actor's counts of environment steps and episodes to those of the worker that this one replaces."""
        if self._labelling is not None:
            self._labelling.resume(steps, episodes)

    def adopt(self, weights: PublishedWeights) -> None:
        """Load published weights into the actor."""
        if isinstance(self.actor, AdoptingActor):
            self.actor.adopt(weights)

    def advance(self) -> list[Episode]:
        at, env = self._step % self.max_steps, self.env
        action = self.actor(self._observation)
        for key, value in flatten(self._observation).items():
            self._ring[("observation", *key)][at] = value
        self._ring[("action",)][at] = action
        for measure in self._measures:
            for key, value in measure().items():
                self._ring[key][at] = value
        if self._labelling is not None:
            action = self._labelling.extra[("executed_action",)]
        if self._noise_std and action.is_floating_point():
            noise = torch.randn(action.shape, generator=self._generator).to(action.device)
            action = self._bounds.clip(action + self._noise_std * noise)
        if self._labelling is not None:
            for name, value in (self._labelling.extra | {("executed_action",): action}).items():
                self._ring[name][at] = value
        self._observation, reward, terminated, truncated, info = env.step(action)
        self._ring[("reward",)][at] = reward
        self._ring[("terminated",)][at] = terminated
        self._ring[("truncated",)][at] = truncated
        self._step += 1
        ended = torch.nonzero(terminated | truncated).reshape(-1).tolist()
        return self._collect(ended, info) if ended else []

    def _collect(self, ended: list[int], info: dict[str, Any]) -> list[Episode]:
        """Return the finished episodes of these envs as views of the ring buffer, and start their next ones."""
        success = info.get("metrics", {}).get("success")
        solved = None if success is None else (success > 0.5).tolist()
        next_seeds = _episode_seeds(info, self.env.num_envs)
        episodes = []
        for index in ended:
            length = self._step - self._begin[index]
            if length > self.max_steps:
                raise EnvContractError(
                    f"env {index} ran {length} steps without ending, but max_episode_steps is {self.max_steps}"
                )
            frames = {key: self._column(ring, index, length) for key, ring in self._ring.items()}
            known = None if solved is None else bool(solved[index])
            words = words_of(frames[INSTRUCTION][0][0]) if INSTRUCTION in frames else None
            about = (self._seeds[index], known, self.actor.version, words, self._task_index)
            episodes.append(Episode(frames, length, *about))
            self._begin[index] = self._step
            self._seeds[index] = next_seeds[index]
        self.actor.reset(ended)
        return episodes

    def _column(self, ring: Tensor, env: int, length: int) -> tuple[Tensor, ...]:
        first, column = self._begin[env] % self.max_steps, ring.select(1, env)
        if first + length <= self.max_steps:
            return (column.narrow(0, first, length),)
        return column[first:], column[: first + length - self.max_steps]

    def close(self) -> None:
        self.env.close()


def _step_seconds(env: VecEnv) -> float | None:
    """Return the simulated seconds per step; None if the environment does not report it."""
    env = env.env if isinstance(env, TaskView) else env
    seconds: float | None = resolve_name(_STEP_SECONDS)(env) if isinstance(env, resolve_name(_TASK_ENV)) else None
    return seconds


class MixedEpisodes:
    """Several tasks, each in its own environment, of which one is stepped at a time.

    The caller chooses the task; the default is the one furthest below its weight. With ``numbered``, every frame has a
    ``task_index``.
    """

    def __init__(self, sources: Sequence[SimulatedEpisodes], weights: Sequence[float], numbered: bool) -> None:
        self.sources, self._weights = list(sources), list(weights)
        for index, source in enumerate(self.sources if numbered else ()):
            number = torch.full((source.env.num_envs,), index, dtype=torch.int64)
            source.also_keep(functools.partial(dict, [(("task_index",), number)]))
        self.layout, self.max_steps = self.sources[0].layout, max(source.max_steps for source in self.sources)
        seconds = {source.step_seconds for source in self.sources}
        self.step_seconds = seconds.pop() if len(seconds) == 1 else None
        self.num_envs = round(sum(source.num_envs for source in self.sources) / len(self.sources))
        """Mean number of envs per step."""
        self.kept = [0] * len(self.sources)
        """Episodes returned per task; with ``only_success``, only the successful ones."""
        self.only_success = False
        self.quotas: Sequence[int] | None = None
        """If set, the number of episodes to return per task, counted as in ``kept``; the others are left out."""

    def advance(self, task: int | None = None) -> list[Episode]:
        """Step the envs of one task and return the episodes that ended."""
        if task is None:
            shares = self.quotas or self._weights
            task = min((i for i, share in enumerate(shares) if share), key=lambda i: self.kept[i] / shares[i])
        episodes = list[Episode]()
        for episode in self.sources[task].advance():
            counts = not self.only_success or bool(episode.success)
            if counts and self.quotas and self.kept[task] == self.quotas[task]:
                continue
            self.kept[task] += counts
            episodes.append(episode)
        return episodes

    def adopt(self, weights: PublishedWeights) -> None:
        """Load published weights into all actors."""
        for source in self.sources:
            source.adopt(weights)

    def resume(self, steps: int, episodes: int) -> None:
        """Set the actors' counts of environment steps and episodes to those of the worker that this one replaces."""
        for source in self.sources:
            source.resume(steps, episodes)

    def close(self) -> None:
        for source in self.sources:
            source.close()


def _episode_seeds(info: dict[str, Any], num_envs: int) -> list[int]:
    """Return the seed of each env's current episode; -1 if the environment does not report it."""
    seeds = info.get("episode_seed")
    return [-1] * num_envs if seeds is None else [int(seed) for seed in seeds.tolist()]


def open_source(
    cfg: OnlineDataEngineCfg, worker: int = 0, incarnation: int = 0, numbered: bool = True
) -> EpisodeSource:
    """Open the source of one worker; its replacement (the next ``incarnation``) gets other seeds.
    With several tasks and ``numbered``, every frame has a ``task_index``."""
    source = _open(cfg, stream_seed(cfg.seed, worker, incarnation), numbered)
    try:
        check_layout(cfg, source.layout, source.max_steps)
    except ConfigError:
        source.close()
        raise
    return source


def _open(cfg: OnlineDataEngineCfg, seed: int, numbered: bool) -> EpisodeSource:
    action = cfg.check()
    if action.source == "dataset":
        recorded: EpisodeSource = resolve_name(_RECORDED)(str(action.path), seed)
        return recorded
    import_trusted(cfg.trusted_modules, config_folders())
    entries = cfg.tasks()
    if not entries:
        return _simulated(cfg, action, _make_env(cfg, action, dict(cfg.gym_config)), seed)
    views = open_views(entries, cfg.agreement, lambda e: _make_env(cfg, action, e.gym_config), "task_observations")
    try:
        sources = [_simulated(cfg, action, view, seed + 2 * number, number) for number, view in enumerate(views)]
    except BaseException:
        for view in views:
            view.close()
        raise
    mixed = MixedEpisodes(sources, [entry.weight for entry in entries], numbered)
    mixed.only_success = action.only_success
    return mixed


def _simulated(
    cfg: OnlineDataEngineCfg, action: ActionSourceCfg, env: VecEnv, seed: int, task_index: int = 0
) -> SimulatedEpisodes:
    """Build the actor and return the simulation; closes ``env`` on failure."""
    try:
        actor = make_actor(action, env, seed + 1, cfg.trusted_modules, cfg.num_workers)
        source = SimulatedEpisodes(env, actor, seed, action.noise_std, task_index)
        if action.segments:
            if not isinstance(env, MarksSegments):
                raise ConfigError(f"segments: the expert of {env.name} does not mark any", "action_config")
            marking: MarksSegments = env
            source.also_keep(lambda: {("segment",): marking.expert_segment()})
        return source
    except BaseException:  # an environment may hold processes and windows
        env.close()
        raise


def _make_env(cfg: OnlineDataEngineCfg, action: ActionSourceCfg, gym_config: dict[str, Any]) -> VecEnv:
    """Make an environment, with the termination rule of the source and a share of the CPU cores."""
    overrides: dict[str, Any] = {}
    labelled = action.source in ("expert", "dagger")
    ends = False if labelled and action.terminate_on_success is None else action.terminate_on_success
    if ends is not None and _is_task(gym_config.get("id")):
        overrides["env"] = {"terminate_on_success": ends}
    elif action.terminate_on_success is not None:
        raise ConfigError(
            f"terminate_on_success: only tasks have this setting, and {gym_config.get('id')} is none", "action_config"
        )
    if cfg.num_workers > 1 and "num_threads" not in gym_config:
        overrides["num_threads"] = max(1, len(os.sched_getaffinity(0)) // cfg.num_workers)
    longest = cfg.max_episode_steps or _LONGEST
    env: VecEnv = resolve_name(_MAKE_ENV)(gym_config, cfg.trusted_modules, longest=longest, **overrides)
    return env


def _is_task(name: object) -> bool:
    return any(spec.id == name for spec in resolve_name(_LIST_ENVS)())


def check_layout(cfg: OnlineDataEngineCfg, layout: FrameLayout, max_steps: int) -> None:
    """Raise ``ConfigError`` if the environment contradicts ``max_episode_steps`` or ``state_dim``."""
    problems = []
    if cfg.max_episode_steps is not None and max_steps > cfg.max_episode_steps:
        problems.append(
            f"max_episode_steps: episodes may take {max_steps} steps, but a row has room for {cfg.max_episode_steps}; "
            f"set it to at least {max_steps}, or leave it out"
        )
    if cfg.state_dim is not None:
        name = "robot/qpos" if layout.shape_of("observation", "robot", "qpos") is not None else "state"
        shape = layout.shape_of("observation", *name.split("/"))
        if shape is None:
            problems.append(f"state_dim: expected {cfg.state_dim}, but there is neither robot/qpos nor state")
        elif shape != (cfg.state_dim,):
            problems.append(
                f"state_dim: expected {cfg.state_dim}, but the environment's {name} has shape {list(shape)}"
            )
    if problems:
        raise ConfigError(problems, "OnlineDataEngineCfg")


def stream_seed(seed: int, worker: int, incarnation: int) -> int:
    """Return the seed of a worker's simulation."""
    sequence = np.random.SeedSequence(seed, spawn_key=(worker, incarnation))
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(3))
