"""Optional packages, each behind an extra of this distribution."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from embodichain.errors import MissingExtraError

DISTRIBUTION = "embodichain-agents"


def require(module: str, extra: str) -> ModuleType:
    """Import an optional module, or say which extra of this distribution brings it."""
    top = module.partition(".")[0]
    if importlib.util.find_spec(top) is None:
        raise MissingExtraError(f'{top} is not installed. Install it with: pip install "{DISTRIBUTION}[{extra}]"')
    return importlib.import_module(module)


def available(module: str) -> bool:
    """Tell whether an optional module is installed, without importing it."""
    return importlib.util.find_spec(module.partition(".")[0]) is not None
