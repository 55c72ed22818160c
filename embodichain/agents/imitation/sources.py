"""Sources of chunks to imitate: a live stream, a folder of recorded episodes, or a mixture of several.

A folder yields every frame once per epoch. Its order is determined by the seed and the number of chunks drawn, so that
a checkpoint needs this number only to continue with the same chunks. The state of a live stream is not saved.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from embodichain.agents.datasets.frames import INSTRUCTION, FrameLayout, Key, Leaf, bytes_of, unflatten
from embodichain.agents.datasets.lerobot.reader import LeRobotReader
from embodichain.agents.engine.config import OnlineDataEngineCfg
from embodichain.agents.engine.data import OnlineDataEngine
from embodichain.agents.rl.algo.imitation import MASK
from embodichain.agents.rl.models.observation import FeatureEncoder, ObservationEntry, space_entries
from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.models.vla.model import VLAModel
from embodichain.envs.registration import list_envs
from embodichain.errors import ConfigError, DatasetError, nearest

_LOG = logging.getLogger(__name__)
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Wanted:
    """The keys and shapes of a chunk that a policy needs."""

    observations: tuple[tuple[str, ...], ...]
    """Paths of the observations that the policy reads; empty for all of them."""
    shapes: Mapping[tuple[str, ...], tuple[int, ...]]
    """Shapes of these observations, if known."""
    action_shape: tuple[int, ...]
    """Shape of one action."""
    chunk_size: int
    """Steps per chunk."""
    all_steps: bool = False
    """Whether the policy reads the observations of all steps, or only of the first."""

    @classmethod
    def by(
        cls, policy: Policy, observation_space: Any, action_space: gym.Space[Any], chunk_size: int, more: Iterable[str]
    ) -> Wanted:
        """Return the needs of a policy, with ``more`` keys for its loss (``goal/{instruction}`` means all below
        ``goal/``)."""
        entries = [entry for entry in space_entries(observation_space) if entry.path]
        read = _read_by(policy, entries)
        for name in more:
            group = name.removesuffix("{instruction}")
            read += [entry for entry in entries if entry not in read and f"{entry.name}/".startswith(group)]
        shapes = {entry.path: entry.shape for entry in read}
        shape = tuple(action_space.shape or ())[-1:] if isinstance(action_space, gym.spaces.Box) else action_space.shape
        return cls(tuple(shapes), shapes, tuple(shape or ()), chunk_size, policy.is_recurrent)

    def problems(self, available: Mapping[Key, tuple[int, ...]]) -> list[str]:
        """Return the missing or misshapen arrays of a source with these shapes, one line each."""
        found, names = [], ["/".join(key[1:]) for key in available if key[0] == "observation"]
        for path in self.observations:
            name, shape = "/".join(path), available.get(("observation", *path))
            if shape is None and path == INSTRUCTION[1:]:
                found.append("instruction: the policy reads an instruction, and there is none")
            elif shape is None:
                found.append(f"observation {name} {list(self.shapes[path])}: it is missing.{nearest(name, names)}")
            elif shape != self.shapes[path] and (shape or (1,)) != (self.shapes[path] or (1,)):
                found.append(f"observation {name}: expected {list(self.shapes[path])}, got {list(shape)}")
        action = available.get(("action",))
        if action is None:
            found.append("action: it is missing")
        elif (action or (1,)) != (self.action_shape or (1,)):
            found.append(f"action: expected {list(self.action_shape)}, as the environment takes, got {list(action)}")
        return found

    def shaped(self, key: Key, values: Tensor, dims: int) -> Tensor:
        """Reshape an array to the policy's shape after ``dims`` dimensions; ``[]`` and ``[1]`` are equivalent."""
        shape = self.action_shape if key == ("action",) else self.shapes.get(key[1:])
        return values if shape is None else values.reshape(*values.shape[:dims], *shape)

    def select(self, chunks: TensorDictBase) -> TensorDict:
        """Return observation, action and mask of chunks ``[batch, n]``, in the same format for all sources."""
        obs = chunks["observation"]
        obs = obs.select(*self.observations) if self.observations else obs
        scalar = [key for key, leaf in _leaves(obs) if leaf.shape[2:] != self.shapes.get(key, leaf.shape[2:])]
        obs = obs.copy() if scalar else obs
        for key in scalar:
            obs[key] = self.shaped(("observation", *key), obs[key], 2)
        if not self.all_steps:
            obs = obs[:, 0].unsqueeze(1).expand(*chunks.batch_size)
        valid = chunks.get(MASK, None)
        mask = torch.ones(chunks.batch_size, dtype=torch.bool) if valid is None else valid
        parts = {
            "observation": obs,
            "action": self.shaped(("action",), chunks["action"], 2),
            MASK: mask.to(chunks["action"].device),
        }
        return TensorDict(parts, chunks.batch_size)


def _read_by(policy: Policy, entries: Sequence[ObservationEntry]) -> list[ObservationEntry]:
    """Return the observation entries that a policy reads; all of them if unknown."""
    encoder, model = getattr(policy, "encoder", None), getattr(policy, "model", None)
    if isinstance(encoder, FeatureEncoder):
        return [entry for entry in (*encoder.vectors, *encoder.images) if entry.path]
    if isinstance(model, VLAModel):
        names = {*(f"image/{name}" for name in model.cfg.cameras), *model.cfg.proprio}
        names |= {"instruction"} if model.cfg.instruction_length else set()
        return [entry for entry in entries if entry.name in names]
    return list(entries)


class ChunkSource(Protocol):
    """A source of chunks ``[batch, n]``."""

    is_exact: bool
    """Whether a resumed run gets the same chunks as an uninterrupted one."""

    def sample(self, batch_size: int) -> TensorDict:
        """Return the next chunks: ``observation``, ``action`` and a ``mask``."""

    def publish(self, policy: Policy) -> None:
        """Let the policy act with its current weights, if the source uses DAgger."""

    def statistics(self) -> dict[str, float]:
        """Return scalars for the log."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the source."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position returned by ``state_dict``."""

    def close(self) -> None:
        """Release all resources."""


class StreamSource:
    """Chunks of a live stream."""

    is_exact = False

    def __init__(self, cfg: OnlineDataEngineCfg, wanted: Wanted, acting: Policy | None = None) -> None:
        """Start the stream and wait until it can be sampled; ``acting`` is published before the start."""
        self.engine, self._wanted = OnlineDataEngine(cfg), wanted
        self._generator = np.random.default_rng([cfg.seed, 1])
        self._is_dagger = cfg.check().source == "dagger"
        self._by_expert = 1.0
        """Share of steps in the last batch in which the expert acted."""
        _LOG.info("the stream fills its buffer of %d episodes", cfg.buffer_size)
        if acting is not None:
            self.publish(acting)
        self.engine.start()
        try:
            buffer = self.engine.shared_buffer
            shapes = {key: tuple(leaf.shape[2:]) for key, leaf in _leaves(buffer)}
            if problems := wanted.problems(shapes):
                raise ConfigError(problems, "source.stream")
            self.engine.check_chunk_size(wanted.chunk_size)
        except BaseException:
            self.engine.stop()
            raise

    def sample(self, batch_size: int) -> TensorDict:
        chunks = self.engine.sample_batch(batch_size, self._wanted.chunk_size, generator=self._generator)
        if self._is_dagger:
            self._by_expert = float(chunks["expert_acted"].float().mean())
        return self._wanted.select(chunks)

    def publish(self, policy: Policy) -> None:
        if self._is_dagger:
            self.engine.publish(policy)

    def statistics(self) -> dict[str, float]:
        stats = self.engine.stats()
        numbers = {
            "stream/episodes": float(stats.episodes_written),
            "stream/refills": stats.refills,
            "stream/age_refills": stats.mean_age_refills,
            "stream/frames_per_second": stats.frames_per_second,
        }
        numbers |= {"stream/expert_acted": self._by_expert} if self._is_dagger else {}
        return numbers | ({} if stats.success_rate is None else {"stream/success": stats.success_rate})

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "stream"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: the stream continues with new episodes."""

    def close(self) -> None:
        self.engine.stop()


def _leaves(nested: TensorDictBase) -> Iterable[tuple[Key, Tensor]]:
    for name, leaf in nested.items(include_nested=True, leaves_only=True):
        yield (name,) if isinstance(name, str) else tuple(name), leaf


@dataclass(frozen=True)
class Pool:
    """Concatenated decoded episodes."""

    frames: dict[Key, Tensor]
    """``[num_frames, ...]``."""
    last: Indices
    """``[num_frames]``: index of the last frame of each frame's episode."""


class FolderSource:
    """Chunks of a LeRobotDataset folder; those that start near the end of an episode are padded and masked.

    Episodes are shuffled and divided into parts that fit into memory. Parts are loaded one at a time, and their frames
    are drawn in random order. A folder that fits into memory is loaded once.
    """

    is_exact = True

    def __init__(
        self, folder: str | Path, wanted: Wanted, seed: int, keys: Mapping[str, str] | None = None, memory: float = 4.0
    ) -> None:
        self.folder, self._wanted, self._seed = Path(folder), wanted, seed
        self._reader = LeRobotReader(folder)
        self._names = _renamed(self._reader.layout, keys or {}, self.folder)
        if self._reader.tasks_are_instructions:  # ``_read`` encodes the task with the policy's length
            self._names.pop(INSTRUCTION, None)
        self._instruction_length = 0  # bytes of instructions that come from tasks
        self._check()
        self._lengths = np.asarray(self._reader.lengths, np.int64)
        self._total = int(self._lengths.sum())
        self._frames_per_pool = max(1, int(memory * 2**30 / max(1, self._bytes_per_frame()) / 2))
        self.drawn = 0
        """Chunks drawn so far."""
        self._pools: dict[tuple[int, ...], Pool] = {}
        self._next: tuple[tuple[int, ...], Future[Pool]] | None = None
        self._executor = ThreadPoolExecutor(1, "folder")
        self._order: tuple[tuple[int, int], Indices] | None = None

    def _check(self) -> None:
        """Raise ``ConfigError`` if the folder lacks arrays that the policy needs; tasks can serve as instructions."""
        shapes = {key: leaf.shape for key, leaf in self._names.items()}
        shape = self._wanted.shapes.get(INSTRUCTION[1:])
        too_long: list[str] = []
        if shape is not None and INSTRUCTION not in shapes and _are_words(self._reader.tasks.values()):
            self._instruction_length, shapes[INSTRUCTION] = shape[0], shape
            words = next((task for task in self._reader.tasks.values() if len(task.encode()) > shape[0]), None)
            if words is not None:
                too_long = [
                    f"instruction: {words!r} has more than {shape[0]} bytes, which is all that the policy reads"
                ]
        problems = self._wanted.problems(shapes) + too_long
        for i, problem in enumerate(problems):
            if problem.startswith("instruction: the policy"):
                remedy = "record a task that has one, or give each episode a task in words (meta/tasks.parquet)"
                problems[i] = f"{problem}: {remedy}"
            elif "missing" in problem:
                problems[i] = f"{problem} source.keys says what the folder calls it"
        if problems:
            raise ConfigError(problems, str(self.folder))

    def _bytes_per_frame(self) -> int:
        return sum(leaf.nbytes for leaf in self._needed().values()) + self._instruction_length

    def _needed(self) -> dict[Key, Leaf]:
        """Return the arrays that are loaded, by the policy's names."""
        paths = {("observation", *path) for path in self._wanted.observations}
        return {
            key: leaf
            for key, leaf in self._names.items()
            if key == ("action",) or (key[0] == "observation" and (key in paths or not paths))
        }

    @property
    def epoch(self) -> float:
        """Number of passes over all frames; may be fractional."""
        return self.drawn / self._total

    def sample(self, batch_size: int) -> TensorDict:
        """Return the next chunks ``[batch_size, n]``."""
        parts: list[TensorDict] = []
        while batch_size > 0:
            epoch, position = divmod(self.drawn, self._total)
            index, episodes, position = self._locate(epoch, position)
            order = self._shuffled(epoch, index, int(self._lengths[list(episodes)].sum()))
            chosen = order[position : position + batch_size]
            parts.append(self._chunks(self._pool(epoch, index, episodes), chosen))
            self.drawn += len(chosen)
            batch_size -= len(chosen)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _parts_of(self, epoch: int) -> list[tuple[int, ...]]:
        """Return the episode indices of each part of an epoch."""
        if self._total <= self._frames_per_pool:
            return [tuple(range(len(self._lengths)))]
        order = np.random.default_rng([self._seed, epoch]).permutation(len(self._lengths)).tolist()
        parts, frames = [[order[0]]], int(self._lengths[order[0]])
        for episode in order[1:]:
            frames += int(self._lengths[episode])
            if frames > self._frames_per_pool:
                parts.append([])
                frames = int(self._lengths[episode])
            parts[-1].append(episode)
        return [tuple(part) for part in parts]

    def _locate(self, epoch: int, position: int) -> tuple[int, tuple[int, ...], int]:
        """Return the part of an epoch at a position, its episodes, and the position within the part."""
        for index, episodes in enumerate(self._parts_of(epoch)):
            frames = int(self._lengths[list(episodes)].sum())
            if position < frames:
                return index, episodes, position
            position -= frames
        raise AssertionError  # unreachable: an epoch has all frames

    def _shuffled(self, epoch: int, index: int, frames: int) -> Indices:
        """Return the random order of a part's frames; the last one is cached."""
        if self._order is None or self._order[0] != (epoch, index):
            order = np.random.default_rng([self._seed, epoch, index + 1]).permutation(frames)
            self._order = (epoch, index), order
        return self._order[1]

    def _pool(self, epoch: int, index: int, episodes: tuple[int, ...]) -> Pool:
        """Return the decoded episodes of a part, and prefetch the next part."""
        if episodes not in self._pools:
            ready = self._next[1].result() if self._next is not None and self._next[0] == episodes else None
            self._pools = {episodes: ready or self._read(episodes)}
            parts = self._parts_of(epoch)
            following = parts[index + 1] if index + 1 < len(parts) else self._parts_of(epoch + 1)[0]
            self._next = None
            if following != episodes:
                self._next = following, self._executor.submit(self._read, following)
        return self._pools[episodes]

    def _read(self, episodes: Sequence[int]) -> Pool:
        needed, pieces = self._needed(), dict[Key, list[Tensor]]()
        for index in episodes:
            episode = self._reader.read(index)
            for key, leaf in needed.items():
                pieces.setdefault(key, []).extend(episode.frames[leaf.key])
            if self._instruction_length:
                words = bytes_of(episode.task or "", self._instruction_length)
                pieces.setdefault(INSTRUCTION, []).append(words.expand(episode.length, -1))
        frames = {key: self._wanted.shaped(key, torch.cat(parts), 1) for key, parts in pieces.items()}
        for key, values in frames.items():
            if values.is_floating_point() and not bool(values.isfinite().all()):
                raise DatasetError(f"{self.folder}: {'/'.join(key)} holds NaN or infinity")
        lengths = self._lengths[list(episodes)]
        return Pool(frames, np.repeat(lengths.cumsum() - 1, lengths))

    def _chunks(self, pool: Pool, first: Indices) -> TensorDict:
        """Return the chunks that start at these frames, padded with the last frame of the episode."""
        steps, last = first[:, None] + np.arange(self._wanted.chunk_size), pool.last[first][:, None]
        at = torch.from_numpy(np.minimum(steps, last))
        observed = at if self._wanted.all_steps else at[:, :1]
        parts: dict[Key, Tensor] = {(MASK,): torch.from_numpy(steps <= last)}
        for key, values in pool.frames.items():
            found = values[at if key == ("action",) else observed]
            parts[key] = found if found.shape[1] == at.shape[1] else found.expand(-1, at.shape[1], *found.shape[2:])
        return TensorDict(unflatten(parts), at.shape)

    def publish(self, policy: Policy) -> None:
        """Do nothing: no policy acts in a recording."""

    def statistics(self) -> dict[str, float]:
        return {"source/epoch": self.epoch}

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "dataset", "drawn": self.drawn, "frames": self._total, "episodes": len(self._lengths)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        now = self.state_dict()
        if any(state.get(name) != now[name] for name in ("kind", "frames", "episodes")):
            _LOG.warning("%s holds other episodes than it did: its frames come in a new order", self.folder)
            return
        self.drawn = int(state["drawn"])

    def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)


def _are_words(tasks: Iterable[str]) -> bool:
    """Return whether all tasks of a folder are instructions, not just names of environments."""
    names, texts = {spec.id for spec in list_envs()}, [task.strip() for task in tasks]
    return bool(texts) and all(text and text not in names for text in texts)


def _renamed(layout: FrameLayout, keys: Mapping[str, str], folder: Path) -> dict[Key, Leaf]:
    """Return the arrays of a folder by the policy's names."""
    names = {leaf.key: leaf for leaf in layout.leaves}
    for wanted, given in keys.items():
        stored = ("observation", *given.split("/"))
        if stored not in names:
            known = ["/".join(key[1:]) for key in names if key[0] == "observation"]
            raise ConfigError(f"keys: the folder has no {given!r}.{nearest(given, known)}", str(folder))
        names["observation", *wanted.split("/")] = names[stored]
    return names


class MixedSource:
    """Chunks of several sources; the share of each in a batch is drawn from a multinomial distribution."""

    def __init__(self, sources: Sequence[ChunkSource], weights: Sequence[float], seed: int) -> None:
        self.sources = list(sources)
        self._shares, self._seed = np.asarray(weights, np.float64) / sum(weights), seed
        self.is_exact = all(source.is_exact for source in sources)
        self.batches = 0
        """Batches drawn so far."""

    def sample(self, batch_size: int) -> TensorDict:
        counts = np.random.default_rng([self._seed, self.batches]).multinomial(batch_size, self._shares).tolist()
        self.batches += 1
        drawn = [source.sample(count) for source, count in zip(self.sources, counts, strict=True) if count]
        device = drawn[0]["action"].device
        return drawn[0] if len(drawn) == 1 else torch.cat([part.to(device) for part in drawn])

    def publish(self, policy: Policy) -> None:
        for source in self.sources:
            source.publish(policy)

    def statistics(self) -> dict[str, float]:
        numbers = {}
        for i, source in enumerate(self.sources):
            for name, value in source.statistics().items():
                group, _, rest = name.partition("/")
                numbers[f"{group}_{i}/{rest}"] = value
        return numbers

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "mixture", "batches": self.batches, "parts": [source.state_dict() for source in self.sources]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("kind") != "mixture" or len(state["parts"]) != len(self.sources):
            _LOG.warning("the run mixed other sources: their chunks come in a new order")
            return
        self.batches = int(state["batches"])
        for source, part in zip(self.sources, state["parts"], strict=True):
            source.load_state_dict(part)

    def close(self) -> None:
        for source in self.sources:
            source.close()


def spaces_of_folder(folder: str | Path, keys: Mapping[str, str]) -> tuple[gym.spaces.Dict, gym.spaces.Box]:
    """Return the observation and action spaces of a folder, for a policy without an environment."""
    reader = LeRobotReader(folder)
    names = _renamed(reader.layout, keys, Path(folder))
    if reader.tasks_are_instructions and not _are_words(reader.tasks.values()):
        names.pop(INSTRUCTION, None)
    boxes: dict[Key, gym.Space[Any]] = {}
    for key, leaf in names.items():
        if key[0] == "observation" and (leaf.dtype == torch.uint8 or leaf.dtype.is_floating_point):
            bounds = (0, 255, np.uint8) if leaf.dtype == torch.uint8 else (-np.inf, np.inf, np.float32)
            boxes[key[1:]] = gym.spaces.Box(bounds[0], bounds[1], leaf.shape, bounds[2])
    action = names.get(("action",))
    if action is None or not boxes:
        raise ConfigError("expected observations and actions, which a policy can be built for", str(folder))
    return _space(unflatten(boxes)), gym.spaces.Box(-np.inf, np.inf, action.shape, np.float32)


def _space(nested: Mapping[str, Any]) -> gym.spaces.Dict:
    return gym.spaces.Dict({key: _space(part) if isinstance(part, Mapping) else part for key, part in nested.items()})
