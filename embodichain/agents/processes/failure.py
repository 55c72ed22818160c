"""``FailureReport``: a failure of a worker as plain text, which can be sent to any process."""

from __future__ import annotations

import builtins
import dataclasses
import json
import traceback
from dataclasses import dataclass

from embodichain import errors
from embodichain.errors import (
    ConfigError,
    EmbodiChainError,
    EngineStateError,
    EnvContractError,
    PolicyContractError,
    UnknownNameError,
    WorkerError,
)

ENGINE = -1
"""The ``worker`` of a report about the engine itself."""
REPORT_BYTES = 1 << 16
"""Maximum size of a report as JSON in UTF-8, for which the shared buffer has room."""
_SHARES = {"what": 2 << 10, "exception": 1 << 10, "message": 16 << 10, "traceback": 28 << 10}
"""Maximum bytes per field; the middle of a longer text is cut out."""
_PROBLEMS, _PROBLEMS_BYTES = 20, 12 << 10
_LEFT_OUT = "\n... (cut) ...\n"


@dataclass(frozen=True)
class FailureReport:
    """One failure of one worker, as plain data because exceptions of user code may not unpickle."""

    worker: int
    what: str
    """Predicate of a sentence about the worker: ``raised ValueError``, ``was killed by SIGKILL``."""
    exception: str = ""
    message: str = ""
    traceback: str = ""
    problems: list[str] | None = None
    """The problems of a ``ConfigError``."""
    hung: bool = False
    """Whether the process exists but sends no heartbeat."""
    lost: bool = False
    """Whether the worker was lost with its node, which does not count as a fault."""
    final: bool = False
    """Whether a replacement would fail as well."""
    transient: bool = False
    """Whether memory was lacking, so that a replacement may not fail."""

    def __post_init__(self) -> None:
        """Shorten long texts."""
        for name, share in _SHARES.items():
            object.__setattr__(self, name, _cut(getattr(self, name), share))
        if self.problems:
            problems = self.problems[:_PROBLEMS]
            short = [_cut(problem, _PROBLEMS_BYTES // len(problems)) for problem in problems]
            object.__setattr__(self, "problems", short)

    @classmethod
    def of_exception(cls, worker: int, error: Exception) -> FailureReport:
        """Build the report of an exception."""
        text = "".join(traceback.format_exception(error))
        problems = error.problems if isinstance(error, ConfigError) else None
        name = next((kind.__name__ for kind in type(error).__mro__ if vars(errors).get(kind.__name__) is kind), "")
        name = name or type(error).__name__
        message = "\n".join([str(error), *getattr(error, "__notes__", [])])
        cause = error.__cause__
        transient = isinstance(cause, Exception) and errors.lacks_memory(cause)
        return cls(worker, f"raised {type(error).__name__}", name, message, text, problems, transient=transient)

    @classmethod
    def from_json(cls, text: str) -> FailureReport:
        """Parse the output of ``to_json``."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """Return the report as one line of JSON, at most ``REPORT_BYTES`` in UTF-8."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False)

    def describe(self) -> str:
        """Return ``what`` with the message of the exception."""
        return f"{self.what}: {self.message}" if self.message else self.what

    def as_error(
        self, who: str = "", replacements: int = 0, kind: type[EmbodiChainError] = WorkerError
    ) -> EmbodiChainError:
        """Return the error to raise in the owner: it quotes the worker's traceback, and its cause is the worker's
        exception if that can be rebuilt."""
        text = f"{who or self._who} {self.describe()}"
        if replacements:
            text += f", after {replacements} replacements"
        if self.traceback:
            text += f"\n\nIn the {'engine' if self.worker == ENGINE else 'worker'}:\n{self.traceback}"
        error = kind(text)
        error.__cause__ = self.original()
        return error

    def original(self) -> Exception | None:
        """Rebuild the worker's exception if it is a built-in or one of this package; else None."""
        kind = getattr(errors, self.exception, None) or getattr(builtins, self.exception, None)
        if not isinstance(kind, type) or not issubclass(kind, Exception):
            return None
        if issubclass(kind, ConfigError):
            source = self.message.partition("\n")[0].rpartition(": ")[0]  # the first line is "source: 2 problems"
            return kind(self.problems or self.message, source or "configuration")
        try:
            return kind(self.message)
        except TypeError:  # e.g. UnicodeDecodeError takes more arguments
            return None

    def as_user_error(self) -> Exception:
        """Return the error to raise in user code: errors of this package keep their class, others are wrapped."""
        original = self.original()
        if isinstance(original, EmbodiChainError):
            original.__cause__ = WorkerError(f"in {self._who}:\n{self.traceback}")
            return original
        return self.as_error(kind=EngineStateError if self.worker == ENGINE else WorkerError)

    @property
    def is_mistake(self) -> bool:
        """Whether a config, a task or a policy is wrong, so that a replacement would fail as well."""
        mistakes = ConfigError | EnvContractError | PolicyContractError | UnknownNameError
        return not self.transient and isinstance(self.original(), mistakes)

    @property
    def _who(self) -> str:
        return "the engine" if self.worker == ENGINE else f"simulation worker {self.worker}"


def drop_locals(error: BaseException | None) -> None:
    """Clear the local variables in an error's traceback, which may hold memory and connections."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _cut(text: str, max_bytes: int) -> str:
    """Cut out the middle of a text so that it has at most ``max_bytes`` as JSON in UTF-8."""
    if len(text) > max_bytes:
        text = text[:max_bytes] + text[-max_bytes:]
    text = text.encode(errors="backslashreplace").decode()  # lone surrogates have no UTF-8
    short, half = text, len(text) // 2
    while len(json.dumps(short, ensure_ascii=False).encode()) > max_bytes:
        half = half * 4 // 5
        short = f"{text[:half]}{_LEFT_OUT}{text[len(text) - half :]}"
    return short
