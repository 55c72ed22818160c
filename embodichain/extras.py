"""Modules imported on demand: optional packages, each behind an extra, and a user's own, if the caller allows it."""

import importlib
import importlib.util
import sys
from collections.abc import Collection, Iterable
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

from embodichain.errors import MissingExtraError, UnknownNameError, UntrustedModuleError

DISTRIBUTION = "embodichain-agents"


def require(module: str, extra: str) -> ModuleType:
    """Import an optional module, or say which extra of this distribution brings it."""
    if not available(module):
        top = module.partition(".")[0]
        raise MissingExtraError(f'{top} is not installed. Install it with: pip install "{DISTRIBUTION}[{extra}]"')
    return importlib.import_module(module)


def available(module: str) -> bool:
    """Tell whether an optional module is installed, without importing it."""
    return importlib.util.find_spec(module.partition(".")[0]) is not None


_allowed: set[str] = set()


def module_name(entry: str) -> str:
    """Return the module that a trusted entry means: ``mine`` for ``mine`` as well as for ``some/where/mine.py``."""
    return Path(entry).stem if entry.endswith(".py") else entry


def check_trusted(named: Iterable[str], trusted: Collection[str], source: str) -> None:
    """Refuse modules that a config names and the caller did not allow."""
    allowed = {module_name(entry) for entry in trusted}
    for name in named:
        if name not in allowed:
            raise UntrustedModuleError(
                f"{source} names the module {name!r}, and importing a module runs its code. If you know what it does, "
                f"allow it: --trust {name}"
            )


def import_trusted(trusted: Iterable[str], folders: Iterable[Path] = ()) -> None:
    """Import files where they are, names from Python's path or else from the folders, which do not join that path."""
    searched = list(folders)
    for entry in trusted:
        name = module_name(entry)
        top = name.partition(".")[0]
        if top not in sys.modules and (entry.endswith(".py") or not available(top)):
            _import_from(top, _folder_of(entry) if entry.endswith(".py") else searched)
        importlib.import_module(name)
        _allowed.add(name)


def _folder_of(file: str) -> list[Path]:
    return [] if "\0" in file else [Path(file).resolve().parent]


def module_folders(trusted: Iterable[str]) -> tuple[str, ...]:
    """Return the folders from which modules were imported, for another process to find them."""
    modules = [sys.modules.get(module_name(entry).partition(".")[0]) for entry in trusted]
    files = [Path(module.__file__).resolve() for module in modules if module is not None and module.__file__]
    folders = [file.parents[1] if file.name == "__init__.py" else file.parent for file in files]
    return tuple(dict.fromkeys(map(str, folders)))


def allowed_modules() -> frozenset[str]:
    """Return the modules that the caller allowed in this process so far."""
    return frozenset(_allowed)


def _import_from(name: str, folders: list[Path]) -> None:
    spec = PathFinder.find_spec(name, [str(folder) for folder in folders])
    if spec is None or spec.loader is None:
        looked = ", ".join(dict.fromkeys(map(str, folders))) or "any other folder"
        raise UnknownNameError(
            f"there is no module {name!r} on Python's path, nor in {looked}. A file can be given as it is: "
            f"--trust some/where/{name}.py"
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
