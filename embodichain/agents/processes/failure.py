"""What went wrong in a worker, carried as text into every process that has to know."""

from __future__ import annotations

import builtins
import dataclasses
import json
import traceback
from dataclasses import dataclass

from embodichain import errors
from embodichain.errors import ConfigError, EmbodiChainError, EngineStateError, WorkerError

ENGINE = -1
"""The ``worker`` of a report about what owns the workers."""
REPORT_BYTES = 1 << 16
"""The most bytes that a report has as JSON in UTF-8, so that every one fits into the shared buffer."""
_SHARES = {"what": 2 << 10, "exception": 1 << 10, "message": 16 << 10, "traceback": 28 << 10}
"""How many of them a text may take; longer ones lose their middle."""
_PROBLEMS, _PROBLEMS_BYTES = 20, 12 << 10
_LEFT_OUT = "\n... (cut) ...\n"


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
    final: bool = False
    """Whether another worker in its place would be no use."""

    def __post_init__(self) -> None:
        """Cut long texts."""
        for name, share in _SHARES.items():
            object.__setattr__(self, name, _cut(getattr(self, name), share))
        if self.problems:
            problems = self.problems[:_PROBLEMS]
            short = [_cut(problem, _PROBLEMS_BYTES // len(problems)) for problem in problems]
            object.__setattr__(self, "problems", short)

    @classmethod
    def of_exception(cls, worker: int, error: Exception) -> FailureReport:
        """Describe an exception that is being handled."""
        text = "".join(traceback.format_exception(error))
        problems = error.problems if isinstance(error, ConfigError) else None
        name = type(error).__name__
        return cls(worker, f"raised {name}", name, str(error), text, problems)

    @classmethod
    def from_json(cls, text: str) -> FailureReport:
        """Read what ``to_json`` wrote."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """Return the report as one line of text, of at most ``REPORT_BYTES`` bytes in UTF-8."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False)

    def describe(self) -> str:
        """Return in one line what happened."""
        return f"{self.what}: {self.message}" if self.message else self.what

    def as_error(
        self, who: str = "", replacements: int = 0, kind: type[EmbodiChainError] = WorkerError
    ) -> EmbodiChainError:
        """Return the error to raise where the worker was needed: its traceback, caused by its exception."""
        text = f"{who or self._who} {self.describe()}"
        if replacements:
            text += f", after {replacements} replacements"
        if self.traceback:
            text += f"\n\nIn the {'engine' if self.worker == ENGINE else 'worker'}:\n{self.traceback}"
        error = kind(text)
        error.__cause__ = self.original()
        return error

    def original(self) -> Exception | None:
        """Return the worker's exception again if its class is built in or one of this package's."""
        kind = getattr(errors, self.exception, None) or getattr(builtins, self.exception, None)
        if not isinstance(kind, type) or not issubclass(kind, Exception):
            return None
        if issubclass(kind, ConfigError):
            source = self.message.partition("\n")[0].rpartition(": ")[0]  # its first line is "source: 2 problems"
            return kind(self.problems or self.message, source or "configuration")
        try:
            return kind(self.message)
        except TypeError:  # UnicodeDecodeError and the like want more than a message
            return None

    def as_user_error(self) -> Exception:
        """Return the error to raise where the worker was asked for: a mistake in the settings keeps its own class."""
        original = self.original()
        if isinstance(original, EmbodiChainError):
            original.__cause__ = WorkerError(f"in {self._who}:\n{self.traceback}")
            return original
        return self.as_error(kind=EngineStateError if self.worker == ENGINE else WorkerError)

    @property
    def _who(self) -> str:
        return "the engine" if self.worker == ENGINE else f"simulation worker {self.worker}"


def drop_locals(error: BaseException | None) -> None:
    """Release the memory and connections that are kept by the variables of all functions that an error went through."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _cut(text: str, most: int) -> str:
    """Return a text that has at most so many bytes as JSON in UTF-8: of a longer one, whole characters of both ends."""
    if len(text) > most:
        text = text[:most] + text[-most:]
    text = text.encode(errors="backslashreplace").decode()  # half a surrogate pair has no UTF-8
    short, half = text, len(text) // 2
    while len(json.dumps(short, ensure_ascii=False).encode()) > most:
        half = half * 4 // 5
        short = f"{text[:half]}{_LEFT_OUT}{text[len(text) - half :]}"
    return short
