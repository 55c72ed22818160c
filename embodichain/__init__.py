"""EmbodiChain: embodied agents trained from live simulation."""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__version__ = "0.1.0"

_RL, _ENVS = "embodichain.agents.rl", "embodichain.envs"
ALIASES = {
    f"{_RL}.algo.warm_up": f"{_RL}.algo.imitation",
    f"{_RL}.training": "",
    f"{_RL}.training.config": f"{_RL}.config",
    f"{_RL}.training.run_folder": f"{_RL}.runs",
    f"{_RL}.utils.checkpoint": f"{_RL}.checkpoint",
    f"{_RL}.utils.evaluation": f"{_RL}.evaluation",
    f"{_ENVS}.episodes": f"{_ENVS}.recording",
    f"{_ENVS}.footage": f"{_ENVS}.recording",
    f"{_ENVS}.groups": f"{_ENVS}.wrappers",
    f"{_ENVS}.tasks.push_cube_language": f"{_ENVS}.tasks.push_cube",
}
"""Former module paths that programs still import, and the modules that replace them; empty for a former package."""


class _AliasFinder(MetaPathFinder, Loader):
    """Finds modules of this package, and no others, by their former paths."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=not ALIASES[fullname]) if fullname in ALIASES else None

    def exec_module(self, module: ModuleType) -> None:
        if name := ALIASES[module.__name__]:
            sys.modules[module.__name__] = importlib.import_module(name)


sys.meta_path.append(_AliasFinder())
