"""Parsing of command options, with errors as one ``ConfigError``."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Iterator, Sequence
from typing import Annotated, TypeVar

import tyro
from rich.console import Console

from embodichain.config.command_line import plain_text
from embodichain.errors import ConfigError

_Args = TypeVar("_Args")

Trust = Annotated[
    tuple[str, ...],
    tyro.conf.UseAppendAction,
    tyro.conf.arg(
        metavar="MODULE",
        help="Module of your own (its name, or its .py file) that registers a task, an environment, a policy or "
        "another part: it is imported first. It is looked for on Python's path, beside the config and in this folder. "
        "The option can be repeated.",
    ),
]
"""The option ``--trust`` of every command. It takes one value, so that a positional argument may follow."""


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Show a status on a terminal during the slow imports of torch and MuJoCo."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status("loading torch and MuJoCo ..."):
        yield


def parse_options(command: type[_Args], argv: Sequence[str], prog: str) -> _Args:
    """Return the options of a command; ``--help`` prints them, and errors raise a ``ConfigError``."""
    with _errors_in_one_line():
        return tyro.cli(command, args=list(argv), prog=prog)


def parse_known_options(command: type[_Args], argv: Sequence[str], prog: str) -> tuple[_Args, list[str]]:
    """Return the options of a command and the unknown arguments."""
    with _errors_in_one_line():
        return tyro.cli(command, args=list(argv), prog=prog, return_unknown_args=True)


@contextlib.contextmanager
def _errors_in_one_line() -> Iterator[None]:
    """Turn the errors that tyro prints into a ``ConfigError``."""
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            yield
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ConfigError(plain_text(output.getvalue()), "command line") from None


def trusted_modules_in(argv: Sequence[str]) -> list[str]:
    """Return the values of ``--trust`` on a command line that is not parsed otherwise."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--trust", action="append", default=[])
    with contextlib.suppress(argparse.ArgumentError):
        trusted: list[str] = parser.parse_known_args(list(argv))[0].trust
        return trusted
    return []
