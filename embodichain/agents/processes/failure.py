"""What went wrong in a worker, carried as text into every process that samples."""

from __future__ import annotations

import builtins
import dataclasses
import json
import traceback
from dataclasses import dataclass

from embodichain import errors
from embodichain.errors import ConfigError, EmbodiChainError, WorkerError

_MAX_TEXT = 12_000
"""Messages and tracebacks are cut to this length, so that every report fits into the shared buffer and one packet."""


@dataclass(frozen=True)
class FailureReport:
    """One failure of one worker; plain data, because exceptions of user code cannot be trusted to unpickle."""

    worker: int
    what: str
    """What happened, to be read after "worker 3": ``raised ValueError``, ``was killed by SIGKILL``."""
    exception: str = ""
    message: str = ""
    traceback: str = ""
    problems: list[str] | None = None
    """The single problems of a ConfigError."""

    @classmethod
    def of_exception(cls, worker: int, error: Exception) -> FailureReport:
        """Describe an exception that is being handled."""
        text = "".join(traceback.format_exception(error))
        problems = [_cut(problem) for problem in error.problems[:20]] if isinstance(error, ConfigError) else None
        return cls(
            worker, f"raised {type(error).__name__}", type(error).__name__, _cut(str(error)), _cut(text), problems
        )

    @classmethod
    def from_json(cls, text: str) -> FailureReport:
        """Read what ``to_json`` wrote."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """Return the report as one line of text."""
        return json.dumps(dataclasses.asdict(self))

    def as_error(self) -> WorkerError:
        """Return the error to raise in a process that samples: the worker's traceback, caused by its exception."""
        text = f"simulation worker {self.worker} {self.what}"
        if self.message and not self.traceback:
            text += f": {self.message}"
        if self.traceback:
            text += f"\n\nIn the worker:\n{self.traceback}"
        error = WorkerError(text)
        error.__cause__ = self.original()
        return error

    def original(self) -> Exception | None:
        """Return the worker's exception again if its class is built in or one of this package's."""
        kind = getattr(errors, self.exception, None) or getattr(builtins, self.exception, None)
        if not isinstance(kind, type) or not issubclass(kind, Exception):
            return None
        if issubclass(kind, ConfigError):
            return kind(self.problems or self.message)
        try:
            return kind(self.message)
        except TypeError:  # UnicodeDecodeError and the like want more than a message
            return None

    def as_user_error(self) -> Exception:
        """Return the error to raise where the worker was asked for: a mistake in the settings keeps its own class."""
        original = self.original()
        if isinstance(original, EmbodiChainError):
            original.__cause__ = WorkerError(f"in simulation worker {self.worker}:\n{self.traceback}")
            return original
        return self.as_error()


def drop_locals(error: BaseException | None) -> None:
    """Let go of the variables of all functions that an error went through, and those before it.

    An error that is kept would otherwise keep whatever they were using: memory, handles, connections.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _cut(text: str) -> str:
    """Leave out the middle of a text that is too long."""
    half = _MAX_TEXT // 2
    return text if len(text) <= _MAX_TEXT else f"{text[:half]}\n... (cut) ...\n{text[-half:]}"
