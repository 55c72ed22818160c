"""The help of commands that take the settings of a stream as flags besides their own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import tyro

HELP = frozenset({"-h", "--help"})


def show_help(command: type[Any], prog: str, argv: Sequence[str]) -> int:
    """Print the options of a command and every setting of the engine, with the values of a config if one is given."""
    from embodichain.agents.engine import OnlineDataEngineCfg
    from embodichain.agents.engine.files import load_stream_config
    from embodichain.config.overrides import parse_overrides

    given = [word for word in argv[:1] if not word.startswith("-")]
    cfg = load_stream_config(given[0]) if given else OnlineDataEngineCfg()
    with suppress(SystemExit):
        tyro.cli(command, args=["--help"], prog=prog)
    where = f"as {given[0]} has them" if given else "and their defaults, which CONFIG changes"
    with suppress(SystemExit):
        parse_overrides(cfg, ["--help"], prog=f"{prog} CONFIG", description=f"The settings of the engine, {where}.")
    return 0
