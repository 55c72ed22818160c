"""A user's own modules: imported only when the caller allows them by name."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Collection, Iterable
from importlib.machinery import PathFinder
from pathlib import Path

from embodichain.errors import UnknownNameError, UntrustedModuleError


def check_trusted(named: Iterable[str], trusted: Collection[str], source: str) -> None:
    """Refuse modules that a config names and the caller did not allow."""
    for name in named:
        if name not in trusted:
            raise UntrustedModuleError(
                f"{source} names the module {name!r}, and importing a module runs its code. If you know what it does, "
                f"allow it: --trust {name}"
            )


def import_trusted(modules: Iterable[str], folders: Iterable[Path] = ()) -> None:
    """Import modules by name: from Python's own path, else from one of the folders.

    The folders are searched for these names alone; they do not become part of Python's path.
    """
    places = list(folders)
    for name in modules:
        top = name.partition(".")[0]
        if top not in sys.modules and importlib.util.find_spec(top) is None:
            _import_from(top, places)
        importlib.import_module(name)


def _import_from(name: str, folders: list[Path]) -> None:
    spec = PathFinder.find_spec(name, [str(folder) for folder in folders])
    if spec is None or spec.loader is None:
        looked = ", ".join(map(str, folders)) or "no further folder"
        raise UnknownNameError(f"there is no module {name!r} on Python's path, nor in: {looked}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
