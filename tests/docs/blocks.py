"""The fenced blocks of the documentation's pages, the commands in them, and what cannot run in a test."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```\s*$", re.M | re.S)
_NOT_RUN = re.compile(r"<!-- not run: (.+?) -->\s*\Z")
_SAVED = re.compile(r"[Ss]ave [^`\n]*as `([\w.]+)`:\s*\Z")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str
    not_run: str | None
    """Why it cannot run in a test: ``<!-- not run: REASON -->`` above it."""
    saved_as: str | None
    """The file that the sentence above tells to save it as."""

    @property
    def commands(self) -> list[list[str]]:
        """The words of the ``embodichain`` commands in it; those that torchrun starts included."""
        if self.language not in ("", "bash", "sh", "console"):
            return []
        found = []
        for line in self.text.replace("\\\n", " ").splitlines():
            for part in line.split(" && "):
                command = re.match(r"(?:torchrun .*?-m )?embodichain (.*)", part.strip())
                if command and "│" not in part:
                    found.append(shlex.split(command[1], comments=True))
        return found


def blocks_of(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    return blocks_in(page.read_text(encoding="utf-8"), page.relative_to(ROOT).as_posix())


def blocks_in(text: str, name: str) -> list[Block]:
    """Return the fenced blocks of a page's text."""
    found = []
    for match in _FENCE.finditer(text):
        before = text[: match.start()]
        reason, saved = _NOT_RUN.search(before), _SAVED.search(before)
        line = before.count("\n") + 1
        found.append(Block(name, line, match[1], match[2], reason and reason[1], saved and saved[1]))
    return found
