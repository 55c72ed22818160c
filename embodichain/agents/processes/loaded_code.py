"""Whether a process that has been there for long would load the same code if it began now."""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder

_BEGAN = time.time_ns()
_SLACK_NS = 1_000_000_000
"""Times of files are rounded, and the modules before this one were loaded a moment ago."""
_INSTALLED = tuple(
    os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib", "purelib", "platlib")
)

State = tuple[int, int, int, int]


class LoadedCode:
    """The files from which this process has loaded its modules, as they were at the time."""

    def __init__(self) -> None:
        self._seen: dict[str, State | None] = {}
        self.note()

    def note(self) -> None:
        """Remember the files of modules that were loaded since the last time."""
        for _, file in _loaded():
            if file not in self._seen:
                state = _state(file)
                changed = state is not None and state[0] > _BEGAN - _SLACK_NS  # before or after it was loaded?
                self._seen[file] = None if changed else state

    def what_changed(self, path: Sequence[str]) -> str:
        """Return a file that a process with this ``sys.path`` would not load, or not as it is here; "" if none."""
        self.note()
        for file, state in list(self._seen.items()):
            if state is None or _state(file) != state:
                return file
        importlib.invalidate_caches()
        for name, file in _loaded():
            if "." in name or file.startswith(_INSTALLED):
                continue
            found = PathFinder.find_spec(name, path)
            if found is not None and found.origin and os.path.realpath(found.origin) != os.path.realpath(file):
                return found.origin
        return ""


def _loaded() -> Iterator[tuple[str, str]]:
    """Return the names and files of all modules that have one."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(file, str) and name != "__main__" and os.path.isfile(file):
            yield name, file


def _state(file: str) -> State | None:
    """Return what no change of a file leaves as it is; ``None`` if it is gone."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_ctime_ns, found.st_mtime_ns, found.st_size, found.st_ino
