"""What went wrong in a worker, carried as text into every process that has to know."""

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
    hung: bool = False
    """Whether the worker is alive, but shows no sign of life."""
    lost: bool = False
    """Whether the worker ended with its machine, which is no fault of its own."""

    @classmethod
    def of_exception(cls, worker: int, error: Exception) -> FailureReport:
        """Describe an exception that is being handled."""
        text = "".join(traceback.format_exception(error))
        problems = [_cut(problem) for problem in error.problems[:20]] if isinstance(error, ConfigError) else None
        name = type(error).__name__
        return cls(worker, f"raised {name}", name, _cut(str(error)), _cut(text), problems)

    @classmethod
    def from_json(cls, text: str) -> FailureReport:
        """Read what ``to_json`` wrote."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """Return the report as one line of text."""
        return json.dumps(dataclasses.asdict(self))

    def describe(self) -> str:
        """Return in one line what happened."""
        return f"{self.what}: {self.message}" if self.message else self.what

    def as_error(
        self, who: str = "", replacements: int = 0, kind: type[EmbodiChainError] = WorkerError
    ) -> EmbodiChainError:
        """Return the error to raise where the worker was needed: its traceback, caused by its exception."""
        text = f"{who or f'simulation worker {self.worker}'} {self.describe()}"
        if replacements:
            text += f", after {replacements} replacements"
        if self.traceback:
            text += f"\n\nIn the worker:\n{self.traceback}"
        error = kind(text)
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
    """Release the memory and connections that are kept by the variables of all functions that an error went through."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _cut(text: str) -> str:
    half = _MAX_TEXT // 2
    return text if len(text) <= _MAX_TEXT else f"{text[:half]}\n... (cut) ...\n{text[-half:]}"
