"""``configclass``: a dataclass that pydantic validates strictly, with one ``ConfigError`` for all problems.

::

    @configclass
    class OptimizerCfg:
        lr: Annotated[float, Field(gt=0)] = 3e-4
        '''Step size.'''

Differences from a pydantic dataclass:

* Numbers, booleans and strings are not converted: ``"3"`` and ``True`` are not ints. Values from files are: lists to
  tuples, mappings to nested configs, strings to paths and enums.
* NaN, infinity (unless ``Annotated[float, AllowInfNan(True)]``) and unknown names are rejected.
* A default may be a plain list, dict or config: every instance gets its own copy.
* ``MISSING`` is a valid value of any field; ``validate`` lists the fields that still hold it.

Inherit from ``Config`` so that type checkers see its methods; at run time the decorator adds them anyway.
"""

import copy as copying
import dataclasses
import difflib
import functools
import inspect
import re
import reprlib
import types
import typing
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Final,
    Protocol,
    Self,
    TypeVar,
    cast,
    dataclass_transform,
    overload,
    runtime_checkable,
)

import pydantic
from pydantic import ConfigDict, GetCoreSchemaHandler
from pydantic.dataclasses import is_pydantic_dataclass
from pydantic_core import PydanticSerializationError, core_schema, to_jsonable_python

from embodichain.errors import ConfigError, nearest

Count = Annotated[int, pydantic.Field(ge=1, le=2**53)]
Size = Annotated[int, pydantic.Field(ge=1, le=16_384)]
"""Width of a layer; bounded, as memory grows with its square."""
Layers = Annotated[int, pydantic.Field(ge=1, le=256)]
Threads = Annotated[int, pydantic.Field(ge=1, le=1024)]
Number = Annotated[float, pydantic.Field(ge=-1e30, le=1e30)]
Positive = Annotated[float, pydantic.Field(gt=0.0, le=1e30)]
NotNegative = Annotated[float, pydantic.Field(ge=0.0, le=1e30)]
"""The bounds of ``Number``, ``Positive`` and ``NotNegative`` keep values within float32."""
Fraction = Annotated[float, pydantic.Field(ge=0.0, le=1.0)]

_CALLED_ELSEWHERE = {
    "learning_rate": ("lr", "step_size", "actor_lr", "alpha"),
    "batch_size": ("minibatch_size", "mini_batch_size"),
    "gamma": ("discount", "discount_factor"),
    "gae_lambda": ("lam", "lambda", "lambda_", "gae_lam"),
    "max_grad_norm": ("grad_clip", "grad_norm", "clip_grad_norm"),
    "n_epochs": ("epochs", "num_epochs", "update_epochs", "num_learning_epochs"),
    "clip_coef": ("clip", "clip_range", "clip_param", "clip_ratio", "eps_clip"),
    "ent_coef": ("ent", "entropy", "entropy_coef", "entropy_coeff"),
    "vf_coef": ("vf", "value_coef", "value_loss_coef"),
    "kl_coef": ("kl", "beta"),
    "clip_coef_high": ("clip_ratio_high", "clip_range_high", "eps_clip_high", "epsilon_high"),
    "value_learning_rate": ("critic_lr", "value_lr", "lr_critic", "critic_learning_rate"),
    "lr_warmup": ("warmup_steps", "lr_warmup_steps", "num_warmup_steps"),
    "buffer_size": ("n_steps", "num_steps", "rollout_length", "num_steps_per_env", "horizon", "unroll_length"),
    "total_steps": (
        "total_timesteps",
        "timesteps",
        "num_timesteps",
        "max_steps",
        "total_frames",
        "iterations",
        "updates",
    ),
    "iterations": ("num_iterations", "max_iterations", "num_updates"),
    "num_envs": ("n_envs", "envs", "num_workers"),
    "num_eval_episodes": ("n_eval_episodes", "eval_episodes"),
    "eval_freq": ("eval_interval", "evaluation_interval"),
    "save_freq": ("save_interval", "checkpoint_freq"),
    "output_dir": ("log_dir", "logdir", "out"),
    "exp_name": ("run_name", "experiment_name"),
    "gym_config": ("env", "env_id", "environment"),
    "hidden_sizes": ("net_arch", "hidden_dims", "hidden", "hiddens", "layers"),
    "activation": ("activation_fn", "nonlinearity"),
    "memory": ("rnn", "lstm", "gru", "recurrent"),
    "normalize_obs": ("norm_obs", "obs_norm", "empirical_normalization"),
    "normalize_reward": ("norm_reward",),
    "critic_obs": ("privileged", "privileged_obs"),
}
"""Names of our settings in other libraries, used to suggest ours."""

_T = TypeVar("_T")
_SETTINGS = ConfigDict(extra="forbid", allow_inf_nan=False, validate_default=True, validate_assignment=True)
_UNKNOWN = ("unexpected_keyword_argument", "no_such_attribute")
_SHAREABLE_DEFAULTS = (bool, int, float, complex, str, bytes, type(None), dataclasses.Field, property)


class _Missing:
    """The type of ``MISSING``, a singleton that survives copying and pickling."""

    def __repr__(self) -> str:
        return "MISSING"

    def __bool__(self) -> bool:
        return False

    def __reduce__(self) -> str:
        return "MISSING"


MISSING: Final[Any] = _Missing()
"""Value of a field that has not been set yet."""


class Config:
    """The methods of every configclass."""

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str | None = None) -> Self:
        """Build and validate a config from nested mappings; error messages begin with ``source`` (e.g. a file name)."""
        if not is_config_class(cls):
            raise TypeError(f"{cls.__name__} is no configclass: decorate it with @configclass")
        name = cls.__name__ if source is None else source
        if not isinstance(data, Mapping):
            raise ConfigError(f"expected a mapping of {cls.__name__} fields, got {type(data).__name__}", name)
        with _config_errors(cls, name):
            return pydantic.TypeAdapter(cls).validate_python(dict(data))

    def copy(self, **changes: Any) -> Self:
        """Return a validated deep copy with some fields changed."""
        values = {f.name: copying.deepcopy(getattr(self, f.name)) for f in _fields(self) if f.init}
        return type(self)(**(values | changes))

    replace = copy

    def to_dict(self) -> dict[str, Any]:
        """Return nested dicts and lists of JSON values, without ``MISSING`` fields."""
        return cast(dict[str, Any], to_data({f.name: getattr(self, f.name) for f in _fields(self)}))

    def validate(self, prefix: str = "") -> list[str]:
        """Return the dotted names of all fields, including nested ones, that are still ``MISSING``."""
        return missing_fields(self, prefix)


@dataclass(frozen=True)
class Shorthand:
    """``Annotated[AsyncCfg, Shorthand("worker")]`` accepts a string or number in place of the nested config:
    ``ray`` means ``{"worker": "ray"}``, in files and on the command line."""

    field: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        def expand(given: Any) -> Any:
            return {self.field: given} if isinstance(given, str | int | float) else given

        return core_schema.no_info_before_validator_function(expand, handler(source))


@overload
def configclass(cls: type[_T], /) -> type[_T]: ...
@overload
def configclass(*, frozen: bool = False) -> Callable[[type[_T]], type[_T]]: ...
@dataclass_transform(field_specifiers=(dataclasses.field, pydantic.Field))
def configclass(cls: type[Any] | None = None, /, *, frozen: bool = False) -> Any:
    """Turn a class into a config; see the module docstring. Use it bare or as ``@configclass(frozen=True)``."""
    return functools.partial(_make, frozen=frozen) if cls is None else _make(cls, frozen=frozen)


def is_config_class(cls: object) -> bool:
    """Return whether a class is a configclass or another pydantic dataclass."""
    return isinstance(cls, type) and is_pydantic_dataclass(cls)


def is_config(value: object) -> bool:
    """Return whether a value is an instance of a configclass."""
    return is_config_class(type(value))


def missing_fields(cfg: object, prefix: str = "") -> list[str]:
    """Return the dotted names of all ``MISSING`` entries of a config; ``TypeError`` if it is not a config."""
    _fields(cfg)
    return _missing(cfg, prefix)


@runtime_checkable
class WritesItself(Protocol):
    """A config value that defines its own representation in files."""

    def to_data(self) -> Any:
        """Return data from which the value can be rebuilt."""


def to_data(value: Any, path: str = "") -> Any:
    """Convert configs, containers, paths and enums to JSON values; ``path`` is used in errors."""
    if isinstance(value, WritesItself):
        value = value.to_data()
    if is_config(value):
        value = {f.name: getattr(value, f.name) for f in _fields(value)}
    if isinstance(value, Mapping):
        return {str(k): to_data(v, _join(path, k)) for k, v in value.items() if v is not MISSING}
    if isinstance(value, (list, tuple)):
        return [to_data(v, _join(path, i)) for i, v in enumerate(value)]
    try:
        return to_jsonable_python(value, inf_nan_mode="constants")
    except PydanticSerializationError as error:
        raise ConfigError(f"{path}: expected data that a file can hold, got {type(value).__name__}: {error}") from None


def _fields(cfg: Any) -> tuple[dataclasses.Field[Any], ...]:
    if not is_config(cfg):
        raise TypeError(f"expected a configclass object, got {type(cfg).__name__}: {cfg!r:.80}")
    return dataclasses.fields(cfg)


def _missing(value: object, path: str) -> list[str]:
    if value is MISSING:
        return [path]
    if is_config(value):
        entries: Any = ((f.name, getattr(value, f.name)) for f in _fields(value))
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
    """Apply pydantic's dataclass decorator with our settings, and convert its errors to ``ConfigError``."""
    for name in inspect.get_annotations(cls):
        default = cls.__dict__.get(name)
        if not isinstance(default, (*_SHAREABLE_DEFAULTS, pydantic.fields.FieldInfo)):  # copy mutable defaults
            setattr(cls, name, dataclasses.field(default_factory=functools.partial(copying.deepcopy, default)))
    if not issubclass(cls, Config):
        for name, method in vars(Config).items():
            if not name.startswith("_") and name not in cls.__dict__:
                setattr(cls, name, method)
    if "__get_pydantic_core_schema__" not in cls.__dict__:
        setattr(cls, "__get_pydantic_core_schema__", classmethod(_core_schema))  # noqa: B010 - unknown to mypy
    made: Any = pydantic.dataclasses.dataclass(cls, config=_SETTINGS, frozen=frozen)
    made.__init__, made.__setattr__ = _with_config_errors(made.__init__), _with_config_errors(made.__setattr__)
    return cast(type[Any], made)


def _with_config_errors(method: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(method)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        with _config_errors(type(self), type(self).__name__):
            method(self, *args, **kwargs)

    return checked


@contextmanager
def _config_errors(cls: type[Any], source: str) -> Iterator[None]:
    """Convert a pydantic ``ValidationError`` to a ``ConfigError``."""
    try:
        yield
    except pydantic.ValidationError as error:
        raise ConfigError(describe(cls, error), source) from None


def _core_schema(cls: type[Any], source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
    """Allow ``MISSING`` in every field, and validate scalars strictly while containers are still converted."""
    schema = handler(source)
    body: Any = handler.resolve_ref_schema(schema)
    while body["type"] != "dataclass-args":
        body = body["schema"]
    for entry in body["fields"]:
        _make_scalars_strict(entry["schema"])
        holder = entry["schema"] if entry["schema"]["type"] == "default" else entry
        holder["schema"] = core_schema.no_info_wrap_validator_function(
            lambda value, check: value if value is MISSING else check(value), holder["schema"]
        )
    return schema


def _make_scalars_strict(schema: Any) -> None:
    if isinstance(schema, dict):
        if schema.get("type") in ("int", "float", "bool", "str"):
            schema.setdefault("strict", True)
        for key, part in schema.items():
            if key not in ("default", "metadata", "cls", "expected"):
                _make_scalars_strict(part)
    elif isinstance(schema, (list, tuple)):
        for part in schema:
            _make_scalars_strict(part)


def describe(cls: type[Any], error: pydantic.ValidationError) -> list[str]:
    """Return one line per problem: the dotted path, the expected and the given value, and the nearest valid name."""
    expected: dict[str, list[str]] = {}
    got: dict[str, str] = {}
    listed: set[str] = set()
    entries = error.errors(include_url=False)
    locations = [_locate(cls, entry["loc"], entry["type"]) for entry in entries]
    for entry, (path, owner, declared) in zip(entries, locations, strict=True):
        kind, cause = entry["type"], entry.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):
            for problem in cause.problems:
                expected.setdefault(f"{path}.{problem}" if path else problem, [])
            continue
        depends = kind in ("literal_error", "too_short") or kind.endswith("_type")
        if depends and any(
            other.startswith(f"{path}.") for other, _, _ in locations
        ):  # the cause is the problem inside
            continue
        wanted, given = _explain(entry, owner, declared)
        if kind in _UNKNOWN:  # list the valid names once per block
            block = path.rpartition(".")[0]
            given = given.split(" Valid:")[0] if block in listed else given
            listed.add(block)
        got[path or cls.__name__] = given
        others = expected.setdefault(path or cls.__name__, [])
        wanted = wanted.removeprefix("expected ") if others else wanted
        if wanted not in (other.removeprefix("expected ") for other in others):
            others.append(wanted)
    return [f"{path}: {' or '.join(wanted)}{got[path]}" if wanted else path for path, wanted in expected.items()]


def _explain(entry: Any, owner: Any, declared: Any) -> tuple[str, str]:
    """Return the description of the expected value, and that of the given one with the nearest valid name."""
    kind, value = entry["type"], entry["input"]
    given = f", got {shorten(value)} ({type(value).__name__})"
    if kind in _UNKNOWN:
        name = str(entry["loc"][-1])
        if not is_config_class(owner):
            return f"unknown key{given}", ""
        fields = owner.__pydantic_fields__
        return f"unknown key{given}", f".{nearest(name, fields, first=usual_names(name, fields))}"
    size, is_list = _tuple_size(declared), isinstance(value, list | tuple)
    if size and (kind == "tuple_type" or (is_list and kind in ("missing", "too_long"))):
        return f"expected {size}", f", got {len(value)}: {shorten(value)}" if is_list else given
    if kind in ("too_short", "too_long"):
        limit = entry["ctx"]["min_length" if kind == "too_short" else "max_length"]
        wanted = f"expected at {'least' if kind == 'too_short' else 'most'} {limit} entr{'y' if limit == 1 else 'ies'}"
        return wanted, f", got {entry['ctx']['actual_length']}: {shorten(value)}"
    if kind == "tuple_type":
        return "expected a list", given
    if kind == "missing":
        return "expected a value, got none", ""
    if kind in ("dataclass_type", "dataclass_exact_type"):
        return f"expected a mapping of {entry['ctx']['class_name']} fields", given
    if kind in ("literal_error", "enum"):
        wanted = entry["ctx"]["expected"]
        options = [part.strip().strip("'") for part in wanted.replace(" or ", ", ").split(",")]
        hint = "." + nearest(value, options) if isinstance(value, str) else ""
        return f"expected {wanted}", given + hint
    if kind in ("value_error", "assertion_error"):
        text = str(entry["ctx"]["error"])
        return text, "" if ", got " in text else given
    message = entry["msg"].replace("Input should be", "expected").replace("a valid dictionary", "a mapping")
    message = re.sub(r"\ba valid (\w)", lambda found: f"a{'n' * (found[1] in 'aeiou')} {found[1]}", message)
    return message[0].lower() + message[1:], given


def usual_names(name: str, options: Container[str], is_near: bool = False) -> list[str]:
    """Return those of ``options`` that other libraries call ``name``, or similarly (``is_near``)."""
    known = {other: own for own, others in _CALLED_ELSEWHERE.items() for other in others if own in options}
    near = difflib.get_close_matches(name.lower(), known, 1) if is_near else []
    return [known[other] for other in near or [name.lower()] if other in known]


def shorten(value: object) -> str:
    """Return a ``repr`` short enough for one line."""
    short = reprlib.Repr()
    short.maxlevel, short.maxdict, short.maxstring, short.maxother = 2, 3, 60, 60
    return short.repr(value)


def _tuple_size(declared: Any) -> str:
    """Return what a tuple of fixed length holds, such as ``3 numbers``; "" for other types."""
    declared = strip(declared)
    inside = [] if isinstance(declared, tuple) else typing.get_args(declared)
    if typing.get_origin(declared) is not tuple or Ellipsis in inside:
        return ""
    return f"{len(inside)} {'numbers' if all(strip(part) in (int, float) for part in inside) else 'values'}"


def _locate(cls: Any, location: Sequence[int | str], kind: str) -> tuple[str, Any, Any]:
    """Return the dotted path of a pydantic location, without union alternatives and ``[key]``, the type that owns the
    last key, and the declared type. That of a number that a tuple lacks is the tuple."""
    path: list[str] = []
    owner = here = cls
    for key in location:
        here = strip(here)
        if isinstance(here, tuple):
            here = next((option for option in here if _is_option(option, str(key))), Any)
        elif key != "[key]" and not (kind == "missing" and _tuple_size(here)):
            path.append(str(key))
            owner, here = here, entry_type(here, key)
    return ".".join(path), owner, here


def _is_option(option: Any, key: str) -> bool:
    """Return whether pydantic calls an alternative of a union ``key``."""
    return option.__name__ == key if is_config_class(option) else _tuple_size(option) != "" and "tuple[" in key


def strip(annotation: Any) -> Any:
    """Return a type without ``Annotated`` and ``None``; a union becomes a tuple of its other alternatives."""
    while typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        options = tuple(option for option in typing.get_args(annotation) if option is not type(None))
        return strip(options[0]) if len(options) == 1 else options
    return annotation


def entry_type(holder: Any, key: object) -> Any:
    """Return the declared type of an entry of a config, mapping or sequence; ``Any`` if none is declared."""
    if is_config_class(holder):
        declared = holder.__pydantic_fields__.get(key)
        return Any if declared is None else declared.annotation
    origin, args = typing.get_origin(holder), typing.get_args(holder)
    if not isinstance(origin, type) or not args:
        return Any
    if issubclass(origin, Mapping):
        return args[1]
    if issubclass(origin, tuple) and Ellipsis not in args:
        return args[key] if isinstance(key, int) and key < len(args) else Any
    return args[0] if issubclass(origin, (Sequence, set, frozenset)) else Any
