"""Translates configs of DexForce's EmbodiChain: renames entries, and ignores those without an equivalent.

Only entries that do not affect learning are ignored. All others without an equivalent are reported in one error.
"""

import difflib
import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from embodichain.errors import nearest

_LOG = logging.getLogger(__name__)
_RUNTIME = ("distributed", "enable_rt", "gpu_id", "headless", "renderer")
"""Settings of DexForce's simulator and its windows; ``distributed`` is up to torchrun."""
_TRAINER = {"rollout_steps": "buffer_size", "wandb_project_name": "wandb_project"}
_SCENE = ("articulation", "background", "light", "rigid_object", "rigid_object_group", "sensor")
_ROBOT = ("control_parts", "drive_pros", "fpath", "init_pos", "init_rot", "robot_type", "solver_cfg", "urdf_cfg")
_TERMS = {"delta_qpos": "DeltaQposTerm"}
"""Action terms that exist in both, and their names there."""


@dataclass
class _Translation:
    """A config during its translation."""

    data: dict[str, Any]
    ignored: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    """The given dotted names of entries that have another one here, by the latter."""

    def block(self, *path: str) -> dict[str, Any]:
        """Replace the mapping at a path by a copy and return it; a new empty dict if there is none."""
        here = self.data
        for key in path:
            below = here.get(key)
            if not isinstance(below, Mapping):
                return {}
            here[key] = here = dict(below)
        return here

    def ignore(self, block: dict[str, Any], names: tuple[str, ...], prefix: str) -> None:
        """Remove entries that have no equivalent and no effect on learning."""
        for name in names:
            if name in block:
                del block[name]
                self.ignored.append(f"{prefix}{name}")

    def rename(self, block: dict[str, Any], old: str, new: str, prefix: str) -> None:
        """Rename an entry."""
        if old in block:
            self.put(block, new, block.pop(old), f"{prefix}{old}", f"{prefix}{new}")

    def put(self, block: dict[str, Any], new: str, value: Any, old: str, called: str) -> None:
        """Move the value of the key ``old`` to ``block[new]``, the key ``called``; both of them are a problem."""
        if new in block:
            self.problems.append(f"{old}: is called {called} here, and both are given")
        else:
            self.renamed[called] = old
        block.setdefault(new, value)

    def mapping(self, value: Any, key: str) -> dict[str, Any]:
        """Return a copy of a mapping, or an empty one for None; anything else is a problem."""
        if value is not None and not isinstance(value, Mapping):
            self.problems.append(f"{key}: expected a mapping, got {value!r:.80}")
        return dict(value) if isinstance(value, Mapping) else {}

    def finish(self, source: str, hint: str = "") -> "Translated":
        """Return the result; logs one warning about all ignored entries."""
        if self.unknown:
            what = f"{', '.join(self.unknown)}: not understood, as they describe things to another simulator"
            self.problems.append(f"{what}; {hint}" if hint else what)
        if self.ignored:
            _LOG.warning("%s: ignored %s, which mean nothing here", source, ", ".join(self.ignored))
        return Translated(self.data, self.problems, self.renamed)


class Translated(NamedTuple):
    """A translated config."""

    data: dict[str, Any]
    problems: list[str]
    """Entries that cannot be translated."""
    renamed: Mapping[str, str]
    """The given dotted names of entries that have another one in ``data``, by the latter."""

    def as_given(self, problems: Iterable[str]) -> list[str]:
        """Return problems of ``data`` with the names that the user gave."""
        named = []
        for problem in problems:
            key = problem.split(":", 1)[0]
            new = next((new for new in self.renamed if key == new or key.startswith(f"{new}.")), None)
            named.append(problem if new is None else self.renamed[new] + problem.removeprefix(new))
        return named


def translate_train_config(given: Mapping[str, Any], source: str) -> Translated:
    """Return the translated training config."""
    work = _Translation(dict(given))
    trainer = work.block("trainer")
    work.ignore(trainer, _RUNTIME, "trainer.")
    for old, new in _TRAINER.items():
        work.rename(trainer, old, new, "trainer.")
    _translate_events(work, trainer)
    policy = work.block("policy")
    if "initial_log_std" in policy:
        distribution = policy["distribution"] = work.mapping(policy.get("distribution"), "policy.distribution")
        given_std = policy.pop("initial_log_std")
        called = "policy.distribution.init_log_std"
        work.put(distribution, "init_log_std", given_std, "policy.initial_log_std", called)
    for network in ("actor", "critic"):
        layers, prefix = work.block("policy", network, "network_cfg"), f"policy.{network}.network_cfg."
        if layers.get("orthogonal_init", True) in (False, []):
            got = f"got {layers.pop('orthogonal_init')!r}"
            what = "expected true or gains, as weights are always orthogonal here"
            work.problems.append(f"{prefix}orthogonal_init: {what}, {got}")
        work.ignore(layers, ("orthogonal_init",), prefix)
    _translate_optimizer(work, work.block("algorithm", "cfg"))
    return work.finish(source)


def _translate_events(work: _Translation, trainer: dict[str, Any]) -> None:
    """Translate a camera that records evaluations to ``eval_video``, which uses the task's own camera."""
    for phase, entries in work.mapping(trainer.pop("events", None), "trainer.events").items():
        for name, entry in work.mapping(entries, f"trainer.events.{phase}").items():
            key = f"trainer.events.{phase}.{name}"
            if phase == "eval" and _function(entry).startswith("record_camera"):
                trainer.setdefault("eval_video", True)
                work.ignored.append(f"{key}.params")
            else:
                work.unknown.append(key)


def _translate_optimizer(work: _Translation, settings: dict[str, Any]) -> None:
    """Translate the blocks ``optimizer`` and ``lr_scheduler`` to single settings."""
    prefix = "algorithm.cfg.optimizer"
    for key, value in work.mapping(settings.pop("optimizer", None), prefix).items():
        if key == "learning_rate":
            work.put(settings, key, value, f"{prefix}.{key}", f"algorithm.cfg.{key}")
        elif key != "name" or str(value).lower() != "adam":
            work.problems.append(f"{prefix}.{key}: expected Adam as it is, got {value!r}")
    prefix = "algorithm.cfg.lr_scheduler"
    given = settings.pop("lr_scheduler", None)
    scheduler = work.mapping(given, prefix)
    expected = "expected constant, or linear, which falls to zero (set lr_schedule)"
    name, arguments = scheduler.pop("name", None), work.mapping(scheduler.pop("kwargs", None), f"{prefix}.kwargs")
    if name in ("constant", "linear"):
        work.put(settings, "lr_schedule", name, f"{prefix}.name", "algorithm.cfg.lr_schedule")
    elif isinstance(given, Mapping):
        work.problems.append(f"{prefix}: {expected}, got {dict(given)!r}")
    if arguments.get("end_factor") in (0, None):
        arguments.pop("end_factor", None)
    for key, value in (scheduler | {f"kwargs.{key}": value for key, value in arguments.items()}).items():
        work.problems.append(f"{prefix}.{key}: {expected}, got {value!r:.80}")


def translate_gym_config(
    given: Mapping[str, Any], source: str, hint: str, functions: Mapping[str, Collection[str]] = MappingProxyType({})
) -> Translated:
    """Return the translated environment config.

    ``hint`` tells the user how to solve them. ``functions`` has the registered functions by section; there,
    ``{"name": {"func": ..., "params": ...}}`` becomes an entry of ``terms``."""
    work = _Translation(dict(given))
    work.ignore(work.data, (*_RUNTIME, "max_episodes"), "")
    for name in _SCENE:
        if work.data.pop(name, None):
            work.unknown.append(name)
    if any(name in work.block("robot") for name in _ROBOT):
        del work.data["robot"]
        work.unknown.append("robot")
    env = work.block("env")
    work.ignore(env, ("dataset",), "env.")  # recording is a command of its own
    for name, value in work.mapping(env.pop("extensions", None), "env.extensions").items():
        if name == "success_threshold":
            work.put(env, name, value, f"env.extensions.{name}", f"env.{name}")
        else:
            work.unknown.append(f"env.extensions.{name}")
    for section in ("events", "observations", "rewards", "actions"):
        entries = work.block("env", section)
        for name, entry in list(entries.items()):
            function = _function(entry)
            if section == "actions" and function and function == _TERMS.get(name):
                entries[name] = work.mapping(entry.get("params"), f"env.{section}.{name}.params")
            elif function:
                del entries[name]
                if function.startswith("record_camera"):
                    work.ignored.append(f"env.{section}.{name}")
                elif section in functions:
                    _translate_term(work, entries, (section, name), entry, functions[section])
                else:
                    work.unknown.append(f"env.{section}.{name}")
    return work.finish(source, hint)


def _translate_term(
    work: _Translation, entries: dict[str, Any], at: tuple[str, str], entry: Any, known: Collection[str]
) -> None:
    """Move an entry that calls a function to ``terms``; an unknown function is a problem."""
    (section, name), term = at, dict(entry)
    key, function = f"env.{section}.{name}", _function(entry)
    if function not in known and not difflib.get_close_matches(function, known, cutoff=0.75):  # typos are found later
        work.unknown.append(f"{key} (func {function!r}: no such function here.{nearest(function, known)})")
        return
    if section != "events":  # the mode of an event is when it happens
        mode = term.pop("mode", "add")
        if mode != "add":
            work.problems.append(f"{key}.mode: expected 'add', got {mode!r}")
    path = term.pop("name", name) if section == "observations" else name
    entries["terms"] = work.mapping(entries.get("terms"), f"env.{section}.terms")
    work.put(entries["terms"], path, term, key, f"env.{section}.terms.{path}")


def _function(entry: Any) -> str:
    """Return the name of the function that an entry calls, or ""."""
    return str(entry["func"]) if isinstance(entry, Mapping) and "func" in entry else ""
