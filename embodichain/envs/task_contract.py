"""What an author's code returns: the methods of a task, and functions of rewards and observations.

A mistake is one error that names the method, what it must return and what it returned, or where it raised what. Every
method is checked the first time that it is called; afterwards it is called directly, so that steps cost nothing.
"""

import inspect
import logging
import os
import sys
import sysconfig
import traceback
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from embodichain.envs.task import ResetState, Scene, Task
from embodichain.errors import EmbodiChainError, EnvContractError, lacks_memory

_LOG = logging.getLogger(__name__)
_LIBRARIES = tuple(
    f"{folder}{os.sep}"
    for folder in (Path(__file__).parents[1], *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
)
"""Folders of this package, of Python and of installed packages."""
_FLAGS_ADVICE = 'Compare with a threshold, one result per env: scene["distance"] < 0.02'
_BATCHED = "Values of all envs come together: use torch.where, & and |, not if, and, or"
_SLACK = 0.01
"""Share of a joint's range by which it may start beyond its limits, which are soft."""
_OWN_SLACK = 0.2
"""The same, if the model itself starts beyond the limits of the joint, as ``Ant`` does."""


def author_line(error: BaseException) -> str | None:
    """Return ``FILE, line N`` of the innermost line of a traceback in an author's file; None if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((*_LIBRARIES, "<frozen"))]
    return f"{own[-1].filename}, line {own[-1].lineno}" if own else None


@contextmanager
def blamed_on(who: str, passes: type[Exception] = OSError) -> Iterator[None]:
    """Convert exceptions of an author's code to ``EnvContractError`` that says who raised it, and where.

    Errors of this package stay as they are, with a note, and so do those in ``passes`` and what may not happen again: a
    lack of memory, errors of CUDA and of files.
    """
    try:
        yield
    except EmbodiChainError as error:
        line = author_line(error)
        if line is not None and not hasattr(error, "__notes__"):
            error.add_note(f"in {who} ({line})")
        raise
    except Exception as error:  # an author's code may raise anything
        if isinstance(error, OSError | passes) or lacks_memory(error) or "CUDA error" in str(error):
            raise
        last = traceback.extract_tb(error.__traceback__)[-1]
        line = author_line(error) or f"{last.filename}, line {last.lineno}"
        hint = f". {_BATCHED}" if "Boolean value of Tensor" in str(error) else ""
        raise EnvContractError(f"{who} raised {type(error).__name__}: {error} ({line}){hint}") from error


def described(value: object) -> str:
    """Return what a value is, in a few words: ``float32 [4, 3]``, ``None``, ``float``."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"a NumPy array, {value.dtype} {list(value.shape)}"
    return "None (is there a return?)" if value is None else type(value).__name__


def is_same_code(one: object, other: object) -> bool:
    """Return whether two functions, classes or entry points are the same, imported twice or defined anew."""
    return one == other or _places_of(one) & _places_of(other) != set()


def _places_of(code: object) -> set[tuple[str, str]]:
    """Return module and file of a function or class, each with its name; an entry point has a module alone."""
    if isinstance(code, str):
        module, _, name = code.partition(":")
        return {(module, name)}
    name, module = getattr(code, "__qualname__", repr(code)), getattr(code, "__module__", "")
    file = getattr(sys.modules.get(module), "__file__", None)
    return {(module, name), *([(file, name)] if file else [])}


def check_first_calls(task: Task, num_envs: int, action_dim: int, rewards: Collection[str]) -> None:
    """Check what each method of a task returns the first time; ``rewards`` are the terms that it has to return."""
    model = task.physics.model

    def rows_of(scene: Scene) -> int:
        tensors = [value for value in scene.values() if isinstance(value, Tensor) and value.dim()]
        return num_envs if any(len(value) == num_envs for value in tensors) or not tensors else len(tensors[0])

    def flags(value: Any, scene: Scene) -> str | None:
        return _wrong_flags(value, rows_of(scene))

    def success(value: Any, scene: Scene) -> str | None:
        if value is None and task_class.needs_success:
            return f"bool [num_envs], here [{num_envs}]; got {described(value)}. {_FLAGS_ADVICE}"
        return flags(value, scene)

    def read(value: Any, env_ids: Tensor | None = None) -> str | None:
        if isinstance(value, dict):  # numbers are constants of all envs
            value = {name: entry for name, entry in value.items() if not isinstance(entry, Tensor) or entry.dim()}
            value = {name: entry for name, entry in value.items() if not isinstance(entry, float | int)}
        return _wrong_values(value, num_envs if env_ids is None else len(env_ids), None, "measurements")

    def expert(value: Any, scene: Scene, actions: Any) -> str | None:
        shape = [rows_of(scene), action_dim]
        if isinstance(value, Tensor) and value.is_floating_point() and list(value.shape) == shape:
            return None
        return f"an action per env, float32 [num_envs, action_dim], here {shape}; got {described(value)}"

    task_class = type(task)
    checks: dict[str, Callable[..., str | None]] = {
        "sample_start": lambda value, env_ids, streams: _wrong_start(value, len(env_ids), model, task_class.__name__),
        "read": read,
        "observe": lambda value, scene: _wrong_values(value, rows_of(scene), None, "observations", nested=True),
        "success": success,
        "failed": flags,
        "reward_terms": lambda value, scene, action: _wrong_values(value, rows_of(scene), (), "terms", needed=rewards),
        "metrics": lambda value, scene: _wrong_values(value, rows_of(scene), (), "metrics"),
        "expert_action": expert,
        **dict.fromkeys(("before_step", "take_action", "after_step"), lambda value, *args: None),
    }
    for name, check in checks.items():
        if name not in vars(task):
            setattr(task, name, _first_call(weakref.ref(task), name, check))


def _first_call(owner: "weakref.ref[Task]", name: str, check: Callable[..., str | None]) -> Callable[..., Any]:
    """Return a stand-in for a method, which checks what it returns and then gives way to it."""

    def first(*args: Any, **kwargs: Any) -> Any:
        task: Any = owner()
        who = f"{type(task).__name__}.{name}"
        method = inspect.getattr_static(type(task), name).__get__(task, type(task))
        with blamed_on(who):
            value = method(*args, **kwargs)
        wrong = check(value, *args, **kwargs)
        if wrong is not None:
            raise EnvContractError(f"{who} must return {wrong}")
        if vars(task).get(name) is first:  # and nothing that was put around it
            del vars(task)[name]
        return value

    return first


def _wrong_flags(value: Any, num_envs: int) -> str | None:
    """Return what is wrong with flags that must be bool ``[num_envs]`` or None."""
    if value is None or (isinstance(value, Tensor) and value.dtype == torch.bool and list(value.shape) == [num_envs]):
        return None
    return f"bool [num_envs], here [{num_envs}], or None; got {described(value)}. {_FLAGS_ADVICE}"


def _wrong_values(
    values: Any, rows: int, shape: tuple[()] | None, what: str, nested: bool = False, needed: Collection[str] = ()
) -> str | None:
    """Return what is wrong with a dict of tensors ``[rows, ...]``, or of ``[rows]`` if a shape is given."""
    size = "[num_envs, ...]" if shape is None else "[num_envs]"
    expected = f"a {'nested ' if nested else ''}dict of {what}, tensors {size} (num_envs is {rows} here)"
    if not isinstance(values, dict if nested else Mapping | TensorDictBase):
        return f"{expected}; got {described(values)}"
    values = dict(values.items())
    for name, value in values.items():
        if nested and isinstance(value, dict):
            wrong = _wrong_values(value, rows, shape, what, nested)
            if wrong is not None:
                return wrong.replace("; got ", f"; got, in {name!r}, ", 1)
        elif (
            not isinstance(value, Tensor) or not value.dim() or len(value) != rows or (shape == () and value.dim() > 1)
        ):
            return f"{expected}; got {name!r} as {described(value)}"
    missing = [name for name in needed if name not in values]
    if missing:
        has = ", ".join(map(repr, values)) or "none"
        return f"{expected}, among them {', '.join(map(repr, missing))} of reward_weights; got {has}"
    return None


def _wrong_start(start: Any, rows: int, model: mujoco.MjModel, task: str) -> str | None:
    """Return what is wrong with reset states; joints that start beyond their limits are warned of."""
    if not isinstance(start, ResetState):
        return f"a ResetState, as start_robot(env_ids, streams) does; got {described(start)}"
    for name, columns in (("qpos", int(model.nq)), ("qvel", int(model.nv))):
        value = getattr(start, name)
        expected = f"a ResetState whose {name} is float64 [num_envs, {columns}] (num_envs is {rows} here)"
        if not isinstance(value, Tensor) or not value.is_floating_point() or list(value.shape) != [rows, columns]:
            return f"{expected}; got {described(value)}"
        if not bool(torch.isfinite(value).all()):
            return f"{expected} and finite; got NaN or infinity"
    for group, values in (("variables", start.variables), ("poses", start.poses)):
        wrong = _wrong_values(values, rows, None, group)
        if wrong is not None:
            return f"a ResetState with {wrong}"
    beyond = beyond_limits(model, start.qpos)
    if beyond:
        _LOG.warning("%s.sample_start: %s", task, "; ".join(beyond))
    return None


def beyond_limits(model: mujoco.MjModel, qpos: Tensor, most: int = 4) -> list[str]:
    """Return which joints lie beyond their limits at positions ``[n, nq]``: name, value and limits of the first few."""
    rows, found = qpos.detach().cpu().numpy(), []
    simple = (int(mujoco.mjtJoint.mjJNT_HINGE), int(mujoco.mjtJoint.mjJNT_SLIDE))
    for j in range(model.njnt):
        if not model.jnt_limited[j] or int(model.jnt_type[j]) not in simple:
            continue
        (low, high), home = model.jnt_range[j], model.qpos0[model.jnt_qposadr[j]]
        values = rows[:, model.jnt_qposadr[j]]
        over = np.maximum(min(low, home) - values, values - max(high, home))
        worst = int(over.argmax())
        if over[worst] > (_SLACK if low <= home <= high else _OWN_SLACK) * (high - low) + 1e-6:
            limits = f"beyond its limits {low:.4g} to {high:.4g}"
            found.append(f"joint {model.joint(j).name!r} starts at {values[worst]:.4g}, {limits}")
    return [*found[:most], *([f"and {len(found) - most} more"] if len(found) > most else [])]


def wrong_number(value: object, num_envs: int) -> str | None:
    """Return what is wrong with the value of a reward function, which must be a tensor ``[num_envs]``."""
    if isinstance(value, Tensor) and list(value.shape) == [num_envs]:
        return None
    got = f"shape {list(value.shape)}" if isinstance(value, Tensor) else described(value)
    return f"expected a function that returns one number per env, a tensor [{num_envs}], got {got}"


def wrong_rows(value: object, num_envs: int) -> str | None:
    """Return what is wrong with the value of an observation function: a tensor ``[num_envs, ...]``."""
    if isinstance(value, Tensor) and value.dim() and len(value) == num_envs:
        return None
    expected = f"expected a function that returns one row per env, a tensor [{num_envs}] or [{num_envs}, size]"
    return f"{expected}, got {described(value)}"
