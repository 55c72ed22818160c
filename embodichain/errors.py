"""All exceptions that EmbodiChain raises on purpose, and helpers for their messages."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

_T = TypeVar("_T")
_MAX_PROBLEMS = 100
_MAX_SUGGESTIONS = 3


class EmbodiChainError(Exception):
    """Base of all errors raised on purpose by this package."""


class ConfigError(EmbodiChainError, ValueError):
    """A configuration is invalid; ``problems`` lists all problems, the message the first hundred."""

    def __init__(self, problems: Sequence[str] | str, source: str = "configuration") -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        self.source = source
        count = f"{len(self.problems)} problem{'s' if len(self.problems) != 1 else ''}"
        rest = len(self.problems) - _MAX_PROBLEMS
        shown = [f"  - {problem}" for problem in self.problems[:_MAX_PROBLEMS]]
        super().__init__("\n".join([f"{source}: {count}", *shown, *([f"  ... and {rest} more"] if rest > 0 else [])]))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[str], str]]:
        return type(self), (self.problems, self.source)


class UnknownNameError(EmbodiChainError, LookupError):
    """A name is not registered; the message suggests the nearest ones."""


class UntrustedModuleError(EmbodiChainError, PermissionError):
    """A config names a module that the caller has not allowed to be imported."""


class TrustedModuleError(EmbodiChainError, ImportError):
    """The import of a user's module failed; the message has the error and its line."""


class MissingExtraError(EmbodiChainError, ImportError):
    """An optional package is not installed; the message gives the extra to install."""


class AssetError(EmbodiChainError, ValueError):
    """A model file cannot be read or compiled."""


class ActionError(EmbodiChainError, ValueError):
    """An action has the wrong key, shape or values."""


class SimulationError(EmbodiChainError, RuntimeError):
    """The simulation cannot continue from its state."""


class EnvContractError(EmbodiChainError, RuntimeError):
    """An environment violates the contract of ``VecEnv``, or does not support a request."""


class PolicyContractError(EmbodiChainError, TypeError):
    """A method of a policy returned something else than the contract of ``Policy`` says."""


class RenderingError(EmbodiChainError, RuntimeError):
    """No image can be rendered on this machine."""


class OutputError(EmbodiChainError, OSError):
    """A file cannot be written to the requested path."""


class ExperienceError(EmbodiChainError, ValueError, AssertionError):
    """Experience is missing or has the wrong shape; also an ``AssertionError``, as ProtoMotions raises."""


class RolloutError(EmbodiChainError, ValueError):
    """A rollout has the wrong layout or lacks a key."""


class ObservationError(EmbodiChainError, ValueError):
    """An observation does not have the expected keys or shapes."""


class ChunkSizeError(EmbodiChainError, ValueError):
    """A chunk size is not a positive integer, or no stored episode is that long."""


class EngineStateError(EmbodiChainError, RuntimeError):
    """The data engine cannot do this in its current state, or in this process."""


class SharedMemoryError(EmbodiChainError, MemoryError):
    """The shared buffer does not fit into the available memory."""


class WorkerError(EmbodiChainError, RuntimeError):
    """A simulation worker failed permanently; the message includes its traceback."""


class ClusterError(EmbodiChainError, RuntimeError):
    """A Ray cluster cannot be reached, or lacks the requested resources."""


class StreamStalledError(EmbodiChainError, RuntimeError):
    """The stream has stalled: readers wait for episodes that no worker writes."""


class CheckpointError(EmbodiChainError, RuntimeError):
    """A checkpoint is corrupt, has a newer format, or belongs to another architecture."""


class CheckpointVersionError(CheckpointError):
    """A checkpoint is intact, but a newer version of this package wrote it."""


class CheckpointUnreadableError(CheckpointError):
    """A checkpoint may be intact, but cannot be read now because of the file system or a lack of memory."""


class NotFiniteError(EmbodiChainError, ArithmeticError):
    """NaN or infinity occurred in training; the message says where, and where the failing batch is saved."""


class TrainingStateError(EmbodiChainError, RuntimeError):
    """A run cannot be started or resumed in its current state."""


class RankError(EmbodiChainError, RuntimeError):
    """Another rank of a data-parallel training failed, exited, or has different weights."""


class ExportError(EmbodiChainError, RuntimeError):
    """An exported policy does not produce the same outputs as the original."""


class DatasetError(EmbodiChainError, ValueError):
    """A recorded dataset cannot be read or written."""


class WeightsError(EmbodiChainError, RuntimeError):
    """Weights sent to a collector are corrupt, mismatched, too old, or did not arrive."""


class CollectorError(EmbodiChainError, RuntimeError):
    """Collection failed, or does not support a request in its current state; the message includes the traceback."""


class EnvironmentHungError(CollectorError):
    """An environment did not return from a step in time; the message says where it hangs."""


class BufferWaitError(EmbodiChainError, TimeoutError):
    """A buffer stayed full or empty for longer than the timeout."""


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert an ``OSError`` inside the block, or an invalid name, to an ``OutputError`` that names the path."""
    text = os.fspath(path)
    shown = text if text.isprintable() else ascii(text)
    if "\0" in text or text != text.encode(errors="replace").decode():
        raise OutputError(f"cannot write to {shown}: expected a name in UTF-8 without NUL. Choose another place.")
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(f"cannot write to {shown}: {error.strerror or error}. Choose another place.") from error


_NO_MEMORY = ("allocate memory", "out of memory", "not enough memory", "bad_alloc", "array is too big")


def lacks_memory(error: Exception) -> bool:
    """Return whether an exception, not one of this package, means that memory cannot be allocated."""
    if isinstance(error, EmbodiChainError) or not isinstance(error, MemoryError | RuntimeError | ValueError):
        return False
    return isinstance(error, MemoryError) or any(part in str(error) for part in _NO_MEMORY)


@contextmanager
def fits_memory(key: str, what: str, source: str = "configuration") -> Iterator[None]:
    """Convert a failed allocation inside the block to a ``ConfigError``: ``key: what does not fit ...``."""
    try:
        yield
    except (MemoryError, RuntimeError, ValueError) as error:
        if not lacks_memory(error):
            raise
        problem = f"{key}: {what} does not fit into the memory there is; choose a smaller one"
        raise ConfigError(problem, source) from error


def _similar(name: str, known: Sequence[str]) -> list[str]:
    """Return the most similar names: nearly equal ones, then those of which one begins with the other, then others."""
    close = difflib.get_close_matches(name, known, n=_MAX_SUGGESTIONS, cutoff=0.5)
    begun = [other for other in known if min(len(name), len(other)) > 2 and _begins(name.lower(), other.lower())]
    if not begun:
        return close
    equal = [other for other in close if difflib.SequenceMatcher(None, other, name).ratio() >= 0.75]
    return list(dict.fromkeys([*equal, *begun]))[:_MAX_SUGGESTIONS]


def _begins(one: str, other: str) -> bool:
    return one.startswith(other) or other.startswith(one)


def nearest(name: str, options: Iterable[str], first: Sequence[str] = ()) -> str:
    """Return `` Did you mean ...? Valid: ...`` for an unknown name; ``first`` lists preferred suggestions."""
    known = sorted(set(options))
    close = list(dict.fromkeys([*first, *_similar(name, known)]))
    hint = f" Did you mean {' or '.join(repr(c) for c in close)}?" if close else ""
    return f"{hint} Valid: {', '.join(known) if known else '(none)'}."


def look_up(kind: str, name: str, known: Mapping[str, _T]) -> _T:
    """Look up a name, ignoring case; ``UnknownNameError`` suggests the nearest names."""
    found = same_name(name, known)
    if found is None:
        raise UnknownNameError(f"unknown {kind} {name!r}.{nearest(name, known)}")
    return known[found]


def same_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that equals ``name``, or else that equals it up to case; None if there is none."""
    options = {option.casefold(): option for option in known} | {option: option for option in known}
    return options.get(name, options.get(name.casefold()))
