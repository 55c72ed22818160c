"""``configclass``: a dataclass whose values are checked by pydantic, strictly, with one error for all problems.

::

    @configclass
    class OptimizerCfg:
        lr: Annotated[float, Field(gt=0)] = 3e-4
        '''Step size.'''
        betas: tuple[float, float] = (0.9, 0.999)
        '''Decay of the two moments.'''

What the decorator adds to a pydantic dataclass:

* numbers, booleans and strings are never converted (``"3"`` and ``True`` are no ints, an int is a float); lists are
  taken for tuples, mappings for nested configs, strings for paths and enums, so that a config can come from a file;
* NaN and infinity are refused (``Annotated[float, AllowInfNan(True)]`` lets them in), and so are unknown names;
* a default may be a plain list, dict or config: every instance gets its own copy;
* ``MISSING`` is a legal value of any field until ``validate`` lists the fields that still hold it;
* everything that is wrong raises one ``ConfigError``.

Inherit from ``Config`` where a type checker should see the methods; at run time the decorator adds them anyway.
"""

from __future__ import annotations

import copy as copying
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, TypeVar, cast, dataclass_transform, overload

import pydantic
from pydantic import ConfigDict, GetCoreSchemaHandler
from pydantic.dataclasses import is_pydantic_dataclass
from pydantic_core import PydanticSerializationError, core_schema, to_jsonable_python

from embodichain.config.problems import describe
from embodichain.errors import ConfigError

_T = TypeVar("_T")
_SETTINGS = ConfigDict(extra="forbid", allow_inf_nan=False, validate_default=True, validate_assignment=True)
_STRICT_TYPES = frozenset({"int", "float", "bool", "str"})
_SHAREABLE_DEFAULTS = (bool, int, float, complex, str, bytes, type(None), dataclasses.Field, property)


class _Missing:
    """The type of ``MISSING``; it stays the one object through copies and pickles."""

    def __repr__(self) -> str:
        return "MISSING"

    def __bool__(self) -> bool:
        return False

    def __reduce__(self) -> str:
        return "MISSING"


MISSING: Final[Any] = _Missing()
"""The value of a field that somebody has yet to fill in; ``validate`` lists such fields."""


class Config:
    """The methods of every configclass."""

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str | None = None) -> Self:
        """Build a checked config from nested mappings; ``source`` (a file name, say) opens the error message."""
        if not is_config_class(cls):
            raise TypeError(f"{cls.__name__} is no configclass: decorate it with @configclass")
        name = cls.__name__ if source is None else source
        if not isinstance(data, Mapping):
            raise ConfigError(f"expected a mapping of {cls.__name__} fields, got {type(data).__name__}", name)
        return _checked(cls, name, lambda: pydantic.TypeAdapter(cls).validate_python(dict(data)))

    def copy(self, **changes: Any) -> Self:
        """Return an independent, checked copy with some fields changed."""
        if not is_config(self):
            raise TypeError(f"expected a configclass object, got {type(self).__name__}")
        values = {f.name: copying.deepcopy(getattr(self, f.name)) for f in dataclasses.fields(self) if f.init}
        return type(self)(**(values | changes))

    def replace(self, **changes: Any) -> Self:
        """Return an independent, checked copy with some fields changed: the same as ``copy``."""
        return self.copy(**changes)

    def to_dict(self) -> dict[str, Any]:
        """Return nested dicts and lists that JSON can hold; ``MISSING`` fields are left out."""
        if not is_config(self):
            raise TypeError(f"expected a configclass object, got {type(self).__name__}")
        data: dict[str, Any] = to_data(self)
        return data

    def validate(self, prefix: str = "") -> list[str]:
        """Return the dotted names of all fields, nested ones included, that are still ``MISSING``."""
        return missing_fields(self, prefix)


@overload
def configclass(cls: type[_T], /) -> type[_T]: ...
@overload
def configclass(*, frozen: bool = False) -> Callable[[type[_T]], type[_T]]: ...
@dataclass_transform(field_specifiers=(dataclasses.field, pydantic.Field))
def configclass(cls: type[Any] | None = None, /, *, frozen: bool = False) -> Any:
    """Make a class a config; see the module's docstring. Usable bare or as ``@configclass(frozen=True)``."""
    return functools.partial(_make, frozen=frozen) if cls is None else _make(cls, frozen=frozen)


def is_config_class(cls: object) -> bool:
    """Tell whether a class was made by ``configclass``."""
    return isinstance(cls, type) and is_pydantic_dataclass(cls)


def is_config(value: object) -> bool:
    """Tell whether a value is an instance of a configclass."""
    return is_config_class(type(value))


def missing_fields(cfg: object, prefix: str = "") -> list[str]:
    """Return the dotted names of all ``MISSING`` entries of a config; ``TypeError`` for anything else."""
    if not is_config(cfg):
        raise TypeError(f"expected a configclass object, got {type(cfg).__name__}: {cfg!r:.80}")
    return _missing(cfg, prefix)


def to_data(value: Any, path: str = "") -> Any:
    """Turn configs, containers, paths and enums into what JSON can hold."""
    if is_config(value):
        entries = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {k: to_data(v, _join(path, k)) for k, v in entries.items() if v is not MISSING}
    if isinstance(value, Mapping):
        return {str(k): to_data(v, _join(path, k)) for k, v in value.items() if v is not MISSING}
    if isinstance(value, (list, tuple)):
        return [to_data(v, _join(path, i)) for i, v in enumerate(value)]
    try:
        return to_jsonable_python(value, inf_nan_mode="constants")
    except PydanticSerializationError as error:
        raise ConfigError(f"{path}: expected data that a file can hold, got {type(value).__name__}: {error}") from None


def _missing(value: object, path: str) -> list[str]:
    if value is MISSING:
        return [path]
    if is_config(value):
        entries: Any = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))  # type: ignore[arg-type]
    elif isinstance(value, Mapping):
        entries = value.items()
    elif isinstance(value, (list, tuple)):
        entries = enumerate(value)
    else:
        return []
    return [name for key, entry in entries for name in _missing(entry, _join(path, key))]


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _make(cls: type[Any], *, frozen: bool) -> type[Any]:
    """Apply the pydantic decorator with our settings, and make its errors ours."""
    for name in inspect.get_annotations(cls):
        default = cls.__dict__.get(name, dataclasses.MISSING)
        if default is not dataclasses.MISSING and not isinstance(default, _SHAREABLE_DEFAULTS):
            _own_default(cls, name, default)
    if not issubclass(cls, Config):
        for name, method in vars(Config).items():
            if not name.startswith("_") and name not in cls.__dict__:
                setattr(cls, name, method)
    if "__get_pydantic_core_schema__" not in cls.__dict__:
        setattr(cls, "__get_pydantic_core_schema__", classmethod(_core_schema))  # noqa: B010 - mypy knows no such name
    made: Any = pydantic.dataclasses.dataclass(cls, config=_SETTINGS, frozen=frozen)
    made.__init__ = _raising_ours(made.__init__)
    made.__setattr__ = _raising_ours(made.__setattr__)
    return cast(type[Any], made)


def _own_default(cls: type[Any], name: str, default: Any) -> None:
    """Replace a plain default by a factory, so that no two instances share a mutable value."""
    if not isinstance(default, pydantic.fields.FieldInfo):
        setattr(cls, name, dataclasses.field(default_factory=functools.partial(copying.deepcopy, default)))


def _raising_ours(method: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(method)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        _checked(type(self), type(self).__name__, lambda: method(self, *args, **kwargs))

    return checked


def _checked(cls: type[Any], source: str, action: Callable[[], _T]) -> _T:
    """Run a validating action; what pydantic finds wrong becomes one ``ConfigError``."""
    try:
        return action()
    except pydantic.ValidationError as error:
        raise ConfigError(describe(cls, error), source) from None


def _core_schema(cls: type[Any], source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
    """Let each field hold ``MISSING``, and keep scalars as they are while containers still convert."""
    schema = handler(source)
    body: Any = handler.resolve_ref_schema(schema)
    while body["type"] != "dataclass-args":
        body = body["schema"]
    for entry in body["fields"]:
        _make_scalars_strict(entry["schema"])
        holder = entry["schema"] if entry["schema"]["type"] == "default" else entry
        holder["schema"] = core_schema.no_info_wrap_validator_function(_allow_missing, holder["schema"])
    return schema


def _make_scalars_strict(schema: Any) -> None:
    if isinstance(schema, dict):
        if schema.get("type") in _STRICT_TYPES:
            schema.setdefault("strict", True)
        for key, part in schema.items():
            if key not in ("default", "metadata", "cls", "expected"):
                _make_scalars_strict(part)
    elif isinstance(schema, (list, tuple)):
        for part in schema:
            _make_scalars_strict(part)


def _allow_missing(value: Any, handler: core_schema.ValidatorFunctionWrapHandler) -> Any:
    return value if value is MISSING else handler(value)
