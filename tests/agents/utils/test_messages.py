"""What a command prints besides its results."""

from __future__ import annotations

import logging
import os
import sys

import pytest
from rich.console import Console
from rich.live import Live

from embodichain.utils.console import shown_messages

LOG = logging.getLogger("embodichain.some.part")


def test_the_log_is_printed_as_long_as_the_command_runs(capsys: pytest.CaptureFixture[str]) -> None:
    before = logging.getLogger("embodichain").level
    with shown_messages():
        LOG.info("worker %d goes on", 3)
        LOG.warning("it is late")
        LOG.debug("never")
    assert capsys.readouterr().err == "worker 3 goes on\nwarning: it is late\n"
    assert logging.getLogger("embodichain").level == before
    LOG.info("nobody asked")
    assert capsys.readouterr().err == ""


def test_what_cannot_be_printed_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def isatty(self) -> bool:
            return False

        def write(self, text: str) -> int:
            raise BrokenPipeError

        def flush(self) -> None:
            raise BrokenPipeError

    monkeypatch.delenv("RAY_DEDUP_LOGS_SKIP_REGEX", raising=False)
    with shown_messages():
        assert "RAY_DEDUP_LOGS_SKIP_REGEX" in os.environ
        with monkeypatch.context() as context:
            context.setattr(sys, "stderr", Broken())
            context.setattr(logging, "raiseExceptions", False)
            LOG.warning("worker 1 is gone")
    assert "RAY_DEDUP_LOGS_SKIP_REGEX" not in os.environ


def test_other_ranks_only_warn(capsys: pytest.CaptureFixture[str]) -> None:
    with shown_messages(rank=2):
        LOG.info("worker 3 goes on")
        LOG.warning("it is late\nTraceback")
    assert capsys.readouterr().err == "rank 2: warning: it is late\nTraceback\n"


def test_a_terminal_gets_lines_that_fit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with shown_messages():
        LOG.warning("rollouts are up to three updates old, which costs some learning")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "warning: rollouts are up to three"
    assert lines[1] == "  updates old, which costs some"
    assert max(map(len, lines)) < 40


def test_a_table_on_the_terminal_stays_whole(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(force_terminal=True, width=80)
    with shown_messages(), Live("the table", console=console, auto_refresh=False) as live:
        LOG.warning("a node is gone")
        live.refresh()
    said = capsys.readouterr()
    assert said.err == ""
    assert "warning: a node is gone\n" in said.out  # above the table, by whoever draws it


@pytest.mark.parametrize(
    "dump",
    [
        "Raylet is terminated. Termination is unexpected. Possible reasons include: ...\n    [2026-01-01] (raylet) ...",
        "The node with node id: 2c97e58c and address: 10.0.0.2 has been marked dead because ...",
        "A worker died or was killed while executing a task by an unexpected system error. To troubleshoot ...",
    ],
)
@pytest.mark.extra("ray")
def test_ray_does_not_print_of_a_death_what_the_log_says(dump: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import ray_logging

    monkeypatch.delenv("RAY_DEDUP_LOGS_SKIP_REGEX", raising=False)
    with shown_messages():
        filtered = ray_logging.LogDeduplicator(5, None, os.environ["RAY_DEDUP_LOGS_SKIP_REGEX"])
    lines = ["something else", dump]
    assert filtered.deduplicate({"pid": "raylet", "lines": lines})[0]["lines"] == ["something else"]
