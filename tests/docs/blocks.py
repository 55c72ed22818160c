"""The fenced blocks of the documentation's pages, and what the tests do with each of them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from docs.tools import tasks

ROOT = Path(__file__).parents[2]
REASONS = ("needs CUDA", "needs several machines", "installs packages", "stops all of Ray")
"""Why a block may stay untested; ``<!-- not run: REASON -->`` above it says which."""
NOT_CODE = ("text", "mermaid", "math")
"""Languages of blocks that only show something: output, pictures, equations."""
Use = Literal["shown", "excused", "saved", "python", "lerobot", "json", "shell", "unknown"]
RUN: tuple[Use, ...] = ("saved", "python", "lerobot", "json", "shell")
_LANGUAGES: dict[str, Use] = {"python": "python", "json": "json", "": "shell", **dict.fromkeys(NOT_CODE, "shown")}
_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```\s*$", re.M | re.S)
_MARK = re.compile(r"<!-- (not run|part of): (.+?) -->\s*\Z")
_SAVED = re.compile(r"[Ss]ave [^`\n]*as `([\w.]+)`:\s*\Z")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    """Without one, it is what a reader types into a shell."""
    text: str
    not_run: str | None = None
    """Why it cannot run in a test: ``<!-- not run: REASON -->`` above it."""
    part_of: str | None = None
    """The config that it is a part of: ``<!-- part of: FILE or TASK -->`` above it."""
    saved_as: str | None = None
    """The file that the sentence above tells to save it as."""

    @property
    def place(self) -> str:
        """The page and the line."""
        return f"{self.page}:{self.line}"

    @property
    def use(self) -> Use:
        """What becomes of it in the tests; one that is unknown makes them fail."""
        if self.not_run is not None:
            return "excused" if self.not_run in REASONS else "unknown"
        if self.saved_as is not None:
            return "saved"
        if self.language == "python" and "from lerobot" in self.text:
            return "lerobot"
        return _LANGUAGES.get(self.language, "unknown")

    @property
    def commands(self) -> list[list[str]]:
        """The words of the commands in it, one command after the other."""
        lines = self.text.replace("\\\n", " ").splitlines()
        commands = [shlex.split(part, comments=True) for line in lines for part in line.split(" && ")]
        return [words for words in commands if words]


def blocks_in(text: str, page: str) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    found = []
    for match in _FENCE.finditer(text):
        before = text[: match.start()]
        mark, saved = _MARK.search(before), _SAVED.search(before)
        marks = {mark[1].replace(" ", "_"): mark[2]} if mark else {}
        line = before.count("\n") + 1
        found.append(Block(page, line, match[1], match[2], **marks, saved_as=saved and saved[1]))
    return found


def page_texts() -> dict[str, str]:
    """Return the text of every page by its name: the README, those in ``docs``, and those that are made for tasks."""
    files = [ROOT / "README.md", ROOT / "benchmarks/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in files}
    return texts | tasks.pages()


PAGES = {page: blocks_in(text, page) for page, text in page_texts().items()}
"""The blocks of every page."""
