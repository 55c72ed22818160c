"""Imports on demand: optional packages, each behind an extra, and user modules that the caller trusts."""

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from embodichain.errors import (
    EmbodiChainError,
    MissingExtraError,
    TrustedModuleError,
    UnknownNameError,
    UntrustedModuleError,
)

DISTRIBUTION = "embodichain-agents"


def require(module: str, extra: str) -> ModuleType:
    """Import an optional module; ``MissingExtraError`` gives the command that installs its extra."""
    if not available(module):
        raise MissingExtraError(f"{module.partition('.')[0]} is not installed. Install it with: {advice(extra)}")
    return importlib.import_module(module)


def advice(extra: str) -> str:
    """Return the command that installs an extra, from the checkout or from the requirements in a wheel's metadata."""
    checkout = Path(__file__).parents[1]
    if (checkout / "pyproject.toml").is_file():
        return f'pip install -e "{checkout}[{extra}]"'
    try:
        needed = [
            text for text in metadata.requires(DISTRIBUTION) or [] if f"extra == '{extra}'" in text.replace('"', "'")
        ]
    except metadata.PackageNotFoundError:
        needed = []
    packages = [f'"{text.partition(";")[0].strip()}"' for text in needed]
    return f"pip install {' '.join(packages)}" if packages else f'pip install "{DISTRIBUTION}[{extra}]"'


def available(module: str) -> bool:
    """Return whether an optional module is installed, without importing it; a mere folder does not count."""
    spec = importlib.util.find_spec(module.partition(".")[0])
    return spec is not None and spec.origin is not None


_allowed: set[str] = set()
_joined: set[Path] = set()
"""Folders of trusted modules that were appended to ``sys.path``."""
_BEGIN = "/./"
"""In the path of a file, marks where the module's dotted name begins, for packages without ``__init__.py``."""


def module_name(entry: str) -> str:
    """Return the module name of a trusted entry: ``mine`` for both ``mine`` and ``some/where/mine.py``."""
    return _module_of(entry)[0] if entry.endswith(".py") else entry


def check_trusted(named: Iterable[str], trusted: Collection[str], source: str) -> None:
    """Raise ``UntrustedModuleError`` for modules that a config names but the caller has not allowed."""
    allowed = {name for entry in trusted for name in (module_name(entry), Path(entry.removesuffix(".py")).name)}
    for name in named:
        if name not in allowed:
            raise UntrustedModuleError(
                f"{source} names the module {name!r}, and importing a module runs its code. If you know what it does, "
                f"allow it: --trust {name}"
            )


def config_folders(config: object = None) -> list[Path]:
    """Return the folders searched for trusted modules besides ``sys.path``: that of the config file, and the working
    directory."""
    is_file = isinstance(config, str | os.PathLike) and str(config).endswith((".json", ".yaml", ".yml"))
    return [*([Path(str(config)).parent] if is_file else []), Path.cwd()]


def import_trusted(trusted: Iterable[str], folders: Iterable[Path] = ()) -> None:
    """Import modules that the caller allows, given by file, or by name on ``sys.path`` or in ``folders``.

    The folder of a module that is not on ``sys.path`` is appended to it. The module can then import its neighbours,
    also in worker processes, and they do not shadow installed packages.
    """
    searched = list(folders)
    for entry in trusted:
        name, folder = _locate(entry, searched)
        if folder is not None and str(folder) not in sys.path:
            _joined.add(folder)
            sys.path.append(str(folder))
        with _errors_of(entry):
            if entry.endswith(".py") and folder is not None and _BEGIN not in entry:
                _import_from(folder, name.partition(".")[0], entry)
            importlib.import_module(name)
        _allowed.add(name)


def locate_trusted(trusted: Iterable[str], folders: Iterable[Path] = ()) -> tuple[str, ...]:
    """Return the entries in a form that other processes can resolve, without importing anything: modules that are not
    on ``sys.path`` are given by file."""
    searched = list(folders)
    entries = []
    for entry in trusted:
        name, folder = _locate(entry, searched)
        parts = name.split(".")
        base = Path() if folder is None else folder.joinpath(*parts[:-1])
        files = [file for file in (base / parts[-1] / "__init__.py", base / f"{parts[-1]}.py") if file.is_file()]
        if folder is None or not files:
            entries.append(entry)
        elif _module_of(str(files[0])) == (name, folder):
            entries.append(str(files[0]))
        else:  # the name includes a folder without __init__.py
            entries.append(f"{folder}{_BEGIN}{files[0].relative_to(folder).as_posix()}")
    return tuple(dict.fromkeys(entries))


def _locate(entry: str, folders: Iterable[Path]) -> tuple[str, Path | None]:
    """Return the name of a module and its folder; None if the module is on the original ``sys.path``."""
    if entry.endswith(".py"):
        return _module_of(entry)
    if not all(part.isidentifier() for part in entry.split(".")):
        raise UnknownNameError(
            f"expected the name of a module, such as my_tasks, or its file, such as folder/my_tasks.py, got {entry!r}"
        )
    top = entry.partition(".")[0]
    if top in sys.modules or importlib.util.find_spec(top) is not None:
        spec = getattr(sys.modules.get(top), "__spec__", None) or PathFinder.find_spec(top)
        places = [Path(spec.origin)] if spec and spec.origin else [Path(p) for p in (_portions(spec) if spec else [])]
        return entry, next((folder for folder in _joined if any(folder in place.parents for place in places)), None)
    searched = list(dict.fromkeys(folder.resolve() for folder in folders))
    for folder in searched:
        if PathFinder.find_spec(top, [str(folder)]) is not None:
            return entry, folder
    looked = ", ".join(map(str, searched)) or "any other folder"
    file, is_part = entry.replace(".", "/"), "." in entry
    raise UnknownNameError(
        f"there is no module {top!r} on Python's path, nor in {looked}. A file can be given as it is: "
        f"--trust some/where/{file}.py" + ("" if is_part else f", or some/where/{file}/__init__.py of a package")
    )


def _portions(spec: ModuleSpec) -> list[str]:
    """Return the folders of a namespace package."""
    return list(spec.submodule_search_locations or [])


def _module_of(file: str) -> tuple[str, Path]:
    """Return the dotted module name of a file, including its packages, and the folder above them."""
    if "\0" in file or not Path(file).is_file():
        shown = file if file.isprintable() else ascii(file)
        raise UnknownNameError(f"there is no file {shown} (looked in {Path.cwd()})")
    above, mark, rest = file.partition(_BEGIN)
    if mark and above and ".." not in Path(rest).parts:
        parts = list(Path(rest.removesuffix(".py")).parts)
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts), Path(above).resolve()
    path = Path(file).resolve()
    names, folder = ([] if path.name == "__init__.py" else [path.stem]), path.parent
    while (folder / "__init__.py").is_file():
        names, folder = [folder.name, *names], folder.parent
    return ".".join(names), folder


def _import_from(folder: Path, name: str, entry: str) -> None:
    """Import the module or package ``name`` from a folder, regardless of ``sys.path``."""
    spec = PathFinder.find_spec(name, [str(folder)])
    if spec is None or spec.loader is None:
        raise UnknownNameError(f"{entry} is no module that Python can import")
    imported = getattr(sys.modules.get(name), "__file__", None)
    if imported is not None and spec.origin is not None and Path(imported).resolve() != Path(spec.origin).resolve():
        raise UnknownNameError(f"{entry}: another module {name!r} is imported already, {imported}: rename the file")
    if name in sys.modules:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


@contextmanager
def _errors_of(entry: str) -> Iterator[None]:
    """Convert errors in a trusted module's import to ``TrustedModuleError`` with the module and the line."""
    try:
        yield
    except EmbodiChainError:
        raise
    except (Exception, SystemExit) as error:  # user code may raise anything
        passed = traceback.extract_tb(error.__traceback__)
        frames = [frame for frame in passed if "importlib" not in frame.filename and frame.filename != __file__]
        line = (error.filename, error.lineno) if isinstance(error, SyntaxError) else None
        file, number = line or ((frames[-1].filename, frames[-1].lineno) if frames else (entry, None))
        where = f" ({file}, line {number})" if number is not None else ""
        if isinstance(error, SystemExit):
            problem = f"it exits (sys.exit({error.code!r})) instead of defining things"
        else:
            problem = f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"
        raise TrustedModuleError(f"the module {entry!r} cannot be imported: {problem}{where}") from error


def allowed_modules() -> frozenset[str]:
    """Return the trusted modules that this process has imported so far."""
    return frozenset(_allowed)
