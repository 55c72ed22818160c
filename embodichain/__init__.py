"""EmbodiChain: embodied agents trained from live simulation."""

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_RL, _ENVS = "embodichain.agents.rl", "embodichain.envs"
ALIASES: dict[str, tuple[str, ...]] = {
    f"{_RL}.algo.warm_up": (f"{_RL}.algo.imitation",),
    f"{_RL}.buffer.standard_buffer": (f"{_RL}.buffer.rollout_buffer",),
    f"{_RL}.training": (),
    f"{_RL}.training.config": (f"{_RL}.config",),
    f"{_RL}.training.run_folder": (f"{_RL}.runs",),
    f"{_RL}.utils.async_collector": (f"{_RL}.collector.async_collector",),
    f"{_RL}.utils.checkpoint": (f"{_RL}.checkpoint",),
    f"{_RL}.utils.evaluation": (f"{_RL}.evaluation",),
    f"{_RL}.utils.helper": (f"{_RL}.utils.tensordicts", f"{_RL}.algo.advantages"),
    f"{_RL}.utils.trainer": (f"{_RL}.trainer",),
    f"{_ENVS}.episodes": (f"{_ENVS}.recording",),
    f"{_ENVS}.footage": (f"{_ENVS}.recording",),
    f"{_ENVS}.groups": (f"{_ENVS}.wrappers",),
    f"{_ENVS}.tasks.push_cube_language": (f"{_ENVS}.tasks.push_cube",),
}
"""Module paths that programs and documents use, and the modules that have their contents; none for a former package."""


class _AliasFinder(MetaPathFinder, Loader):
    """Finds modules of this package, and no others, by their other paths."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=not ALIASES[fullname]) if fullname in ALIASES else None

    def exec_module(self, module: ModuleType) -> None:
        modules = [importlib.import_module(name) for name in ALIASES[module.__name__]]
        if len(modules) == 1:
            sys.modules[module.__name__] = modules[0]
        for part in reversed(modules):  # of several, the first that has a name
            vars(module).update({name: value for name, value in vars(part).items() if not name.startswith("_")})


def reach_submodules(package: str, **names: Sequence[str]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a package that imports a module of it when it is first asked for.

    ``names`` are those of the package's names that its modules define, by module.
    """
    homes = {name: module for module, members in names.items() for name in members}

    def reach(name: str) -> Any:
        if name in homes:
            return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
        wanted = f"{package}.{name}"
        try:
            if not name.startswith("_"):
                return importlib.import_module(wanted)
        except ModuleNotFoundError as error:
            if error.name != wanted:
                raise
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return reach


sys.meta_path.append(_AliasFinder())
if not TYPE_CHECKING:  # a type checker looks at the modules themselves
    __getattr__ = reach_submodules(__name__)
