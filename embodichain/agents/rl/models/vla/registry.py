"""Vision-language-action models by name; a class of the user's own only from a module that was allowed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, TypeVar, overload

from torch import nn

from embodichain.agents.utils.modules import allowed_modules, check_trusted
from embodichain.errors import ConfigError, UnknownNameError, nearest

M = TypeVar("M", bound=type[nn.Module])

_MODELS: dict[str, type[nn.Module]] = {}


@overload
def register_vla_model(name: str, model_cls: M) -> M: ...
@overload
def register_vla_model(name: str) -> Callable[[M], M]: ...
def register_vla_model(name: str, model_cls: Any = None) -> Any:
    """Make a model class available to configs: ``register_vla_model("mine", Mine)``, or as a decorator."""
    if model_cls is None:
        return partial(register_vla_model, name)
    _check_module(name, model_cls)
    if _MODELS.get(name, model_cls) is not model_cls:
        raise ConfigError(f"the model name {name!r} is taken by {_MODELS[name].__name__}", "register_vla_model")
    _MODELS[name] = model_cls
    return model_cls


def get_registered_vla_model_names() -> list[str]:
    """Return the names that a config may use, sorted."""
    return sorted(_MODELS)


def registered_name(model_cls: type[nn.Module]) -> str:
    """Return the name under which a class is registered, else its dotted path."""
    for name, known in _MODELS.items():
        if known is model_cls:
            return name
    return f"{model_cls.__module__}.{model_cls.__qualname__}"


def get_vla_model_class(name: str, trusted_modules: Collection[str] = ()) -> type[nn.Module]:
    """Return the class registered under a name, or ``module.Class`` of a module that may be imported.

    A module may be imported if it is among ``trusted_modules``, or was allowed when the program started (``--trust``).
    """
    if name in _MODELS:
        return _MODELS[name]
    module_name, _, class_name = name.rpartition(".")
    if not module_name:
        hint = "a class of your own is named by its module, as in my_module.MyVLA, or registered by it"
        raise UnknownNameError(f"unknown model class {name!r}.{nearest(name, _MODELS)} {hint.capitalize()}.")
    check_trusted([module_name], {*trusted_modules, *allowed_modules()}, "model_class")
    module = importlib.import_module(module_name)
    found = vars(module).get(class_name)
    if found is None:
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        raise UnknownNameError(f"module {module_name!r} has no class {class_name!r}.{nearest(class_name, classes)}")
    _check_module(name, found)
    return found


def _check_module(name: str, model_cls: object) -> None:
    if not isinstance(model_cls, type) or not issubclass(model_cls, nn.Module):
        raise ConfigError(f"{name!r}: expected a subclass of torch.nn.Module, got {model_cls!r}", "model_class")
