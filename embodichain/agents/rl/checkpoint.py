"""Checkpoints: folders with ``state.json`` and ``tensors.safetensors``, written atomically.

``state.json`` is ``{"format": "embodichain-checkpoint", "version": 1, "tensors": {"bytes", "crc32"}, "crc32",
"state"}``. ``state`` is nested data that refers to the tensors by name. ``tensors.crc32`` is the checksum of the tensor
file, ``crc32`` that of ``state`` as JSON without whitespace. So any changed byte is detected.

Checkpoints of a run hold everything the next iteration depends on: ``config`` (the resolved config), ``spaces``,
``policy`` (with its normaliser), ``algorithm`` (optimiser and schedules), ``collector``, ``env`` (the simulation),
``random`` (all generators) and ``trainer`` (counters). In a data-parallel run, ``collector``, ``env`` and ``random``
are those of the first rank, and ``other_ranks`` lists those of the others.
"""

import contextlib
import errno
import json
import math
import os
import re
import shutil
import stat
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from embodichain.agents.rl.models.observation import ObservationSpace, impossible_values, is_from_camera, space_entries
from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.models.registry import build_policy
from embodichain.agents.rl.utils.tensordicts import space_from_data
from embodichain.envs.vec_env import VecEnv
from embodichain.errors import (
    CheckpointError,
    CheckpointUnreadableError,
    CheckpointVersionError,
    ConfigError,
    EmbodiChainError,
    EnvironmentHungError,
    NotFiniteError,
    OutputError,
    WorkerError,
)
from embodichain.extras import check_trusted, config_folders, import_trusted
from embodichain.utils.tensor_tree import flatten, unflatten

FORMAT, VERSION = "embodichain-checkpoint", 1
STATE_FILE, TENSOR_FILE = "state.json", "tensors.safetensors"
CHECKPOINTS, BEST = "checkpoints", "best"
_STEP = re.compile("step_([0-9]+)")
_COPY = re.compile(r"\.(step_[0-9]+)\.[0-9]+\.partial")
_FORMER = ".former"
"""Suffix of a checkpoint that is being replaced."""
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Errors that mean that files of a checkpoint are missing."""
_GIVEN_BY_ENV = ("observation", "reward")
"""Parts of a rollout that the environment returned."""
_FROM_ENV = "check how the environment computes it ('embodichain envs check ENV' looks for such values)"
_FROM_TRAINING = "lower the learning rate or look for what produced it"

PathLike = str | os.PathLike[str]


def save_checkpoint(path: PathLike, state: Mapping[str, Any]) -> Path:
    """Write nested data as a checkpoint folder, which atomically replaces one of the same name."""
    target = Path(path)
    data, tensors = flatten(dict(state), separate=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_file(tensors, partial / TENSOR_FILE)
        about = {"bytes": (partial / TENSOR_FILE).stat().st_size, "crc32": _file_crc(partial / TENSOR_FILE)}
        document = {"format": FORMAT, "version": VERSION, "tensors": about, "crc32": _data_crc(data), "state": data}
        (partial / STATE_FILE).write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        for written in (partial / TENSOR_FILE, partial / STATE_FILE, partial):
            _sync(written)
        _replace(partial, target)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise OutputError(f"cannot write the checkpoint {target}: {error}") from error
    return target


def load_checkpoint(path: PathLike) -> dict[str, Any]:
    """Read a checkpoint folder, with tensors on the CPU; raise ``CheckpointError`` if it is damaged."""
    folder = Path(path)
    with reading_checkpoint(str(folder)):
        document = _read_document(folder / STATE_FILE)
        about, file = document["tensors"], folder / TENSOR_FILE
        if not _is_file(file):
            raise CheckpointError(f"{file} cannot be read: it is missing, or no file")
        size = file.stat().st_size
        if size != about.get("bytes"):
            raise CheckpointError(f"{file} is truncated: expected {about.get('bytes')} bytes, found {size}")
        if _file_crc(file) != about.get("crc32"):
            raise CheckpointError(f"{file} is damaged: its content does not match its checksum")
        tensors = load_file(file)
        try:
            state = unflatten(document["state"], tensors)
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"{folder}: {STATE_FILE} and {TENSOR_FILE} do not belong together: {error}") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{folder / STATE_FILE}: state: expected a mapping, got {type(state).__name__}")
    return state


@contextlib.contextmanager
def reading_checkpoint(source: str) -> Iterator[None]:
    """Turn any error inside the block into a ``CheckpointError``.

    It is a ``CheckpointUnreadableError`` if the cause may not be the content, such as an I/O error.
    """
    try:
        yield
    except EmbodiChainError:
        raise
    except (OSError, MemoryError) as error:
        reason = "there is not enough memory" if isinstance(error, MemoryError) else error.strerror or str(error)
        if isinstance(error, _ABSENT):
            raise CheckpointError(f"{source} cannot be read: {reason}") from error
        raise CheckpointUnreadableError(
            f"{source} cannot be read: {reason}. That need not be its fault: try again, or move it away"
        ) from error
    except Exception as error:  # invalid content may raise anything
        reason = (str(error).strip() or "no further message").splitlines()[0]
        raise CheckpointError(f"{source} cannot be read: {type(error).__name__}: {reason}") from error


def check_parts(state: Mapping[str, Any], source: PathLike, *parts: str) -> None:
    """Raise ``CheckpointError`` if a checkpoint lacks one of these parts of a run."""
    for part in parts:
        if not isinstance(state.get(part), Mapping):
            raise CheckpointError(f"{source} is no checkpoint of a run: expected a mapping {part!r} in it")


def find_checkpoint(path: PathLike, which: Literal["best", "latest"] = "latest") -> Path:
    """Return the folder of a checkpoint, given it or the folder of a run; without a best one, it is the latest."""
    given = Path(path)
    if is_checkpoint(given):
        return given
    folder = given / CHECKPOINTS
    if which == "best" and is_checkpoint(folder / BEST):
        return folder / BEST
    steps = list_checkpoints(folder)
    if not steps:
        raise no_checkpoint(given)
    return steps[-1]


def no_checkpoint(path: Path) -> CheckpointError:
    """Return the error for a folder that is neither a checkpoint nor a run with one; it names runs in subfolders."""
    shown = str(path) if str(path).isprintable() else ascii(str(path))
    below = [] if "\0" in str(path) else sorted(found.parent for found in path.glob(f"*/{CHECKPOINTS}"))
    if not below:
        return CheckpointError(f"{shown}: expected a checkpoint or a run with a checkpoint in it, found neither")
    if len(below) == 1:
        return CheckpointError(f"{shown} is no run, but holds one: name that, {below[0]}")
    return CheckpointError(f"{shown} holds several runs: name one of them, {below[0]} or another one of {len(below)}")


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder looks like a checkpoint; ``load_checkpoint`` checks whether it is intact."""
    return os.path.isfile(path / STATE_FILE)


def list_checkpoints(folder: Path, damaged: bool = False) -> list[Path]:
    """Return the checkpoints ``step_000000001234`` in a folder, including those being replaced, oldest first.

    ``damaged`` adds folders of that name without ``state.json``. Other names are ignored, as they belong to the user.
    """
    try:
        names = sorted(os.listdir(folder))  # .step_... comes before step_..., which takes precedence
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError) as error:  # a NUL in the name
        raise CheckpointError(f"{str(folder)!r} cannot be read: {error}") from None
    found: dict[int, Path] = {}
    for path in map(folder.joinpath, names):
        if _STEP.fullmatch(_final_name(path)) and (is_checkpoint(path) or (damaged and os.path.isdir(path))):
            found[checkpoint_step(path)] = path
    return [found[step] for step in sorted(found)]


def checkpoint_step(checkpoint: Path) -> int:
    """Return the step at which a checkpoint of ``list_checkpoints`` was saved."""
    return int(_final_name(checkpoint).removeprefix("step_"))


def restore_former(folder: Path) -> None:
    """Finish or undo the renames of a process that was killed while saving; no other process may write to the folder.

    A complete new checkpoint gets its final name if that is free. Otherwise, one that was being replaced gets its name
    back.
    """
    copies = [copy for copy in folder.glob(".step_*.partial") if _COPY.fullmatch(copy.name) and is_checkpoint(copy)]
    for copy in sorted(copies, key=lambda copy: (copy / STATE_FILE).stat().st_mtime_ns, reverse=True):
        target = copy.with_name(copy.name.split(".")[1])
        try:
            if not target.exists() and load_checkpoint(copy):
                copy.rename(target)
        except CheckpointUnreadableError:
            raise
        except CheckpointError:  # incomplete
            continue
    for former in folder.glob(f".*{_FORMER}"):
        target = former.with_name(_final_name(former))
        if target.exists():
            shutil.rmtree(former, ignore_errors=True)
        else:
            former.rename(target)


def _final_name(checkpoint: Path) -> str:
    former = checkpoint.name.startswith(".") and checkpoint.name.endswith(_FORMER)
    return checkpoint.name[1 : -len(_FORMER)] if former else checkpoint.name


def load_weights(module: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Load weights into a module; raise ``CheckpointError`` for the first parameter that does not fit."""
    here, there = ({name: list(tensor.shape) for name, tensor in w.items()} for w in (module.state_dict(), weights))
    for name in here | there:
        if name not in there:
            problem = f"it lacks {name} {here[name]}"
        elif name not in here:
            problem = f"it has {name}, which does not exist here"
        elif there[name] != here[name]:
            problem = f"{name} is {there[name]} there and {here[name]} here"
        else:
            continue
        raise CheckpointError(f"{source} is of another architecture: {problem}")
    if problems := impossible_values(module, weights):
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise CheckpointError(f"{source} holds impossible weights: {problems[0]}{more}")
    module.load_state_dict(weights)


def load_policy(
    path: PathLike,
    env: VecEnv | None = None,
    device: torch.device | str = "cpu",
    which: Literal["best", "latest"] = "best",
    trusted_modules: Collection[str] = (),
) -> Policy:
    """Return the trained policy of a run or checkpoint, in evaluation mode and without gradients.

    It is built for the spaces of ``env`` if given, else for those it was trained with. The module of a user-defined
    policy class must be in ``trusted_modules``. To train it further, call ``policy.requires_grad_()``.
    """
    folder = find_checkpoint(path, which)
    state = load_checkpoint(folder)
    check_parts(state, folder, "config", "spaces", "policy")
    with reading_checkpoint(str(folder)):
        named = state["config"]["trainer"].get("import_modules", [])
        check_trusted(named, trusted_modules, str(folder))
    import_trusted(trusted_modules, config_folders())
    with reading_checkpoint(str(folder)):
        spaces = state["spaces"]
        observation_space = env.observation_space if env is not None else space_from_data(spaces["observation"])
        action_space = env.action_space if env is not None else space_from_data(spaces["action"])
        try:
            policy = build_policy(state["config"]["policy"], observation_space, action_space, device)
            load_weights(policy, state["policy"], str(folder))
        except (CheckpointError, ConfigError) as error:
            trained = space_from_data(spaces["observation"])
            if differences := _compare_observations(trained, observation_space):
                what = "was trained with other observations than the environment has"
                raise CheckpointError(f"{folder} {what}: {'; '.join(differences)}") from error
            raise
    return policy.eval().requires_grad_(False)


def _compare_observations(trained: ObservationSpace, here: ObservationSpace) -> list[str]:
    """Return how the observations of an environment differ from those of a run, and which settings change them."""
    before, now = ({entry.name: list(entry.shape) for entry in space_entries(space)} for space in (trained, here))
    problems = []
    for name in sorted(before.keys() | now.keys()):
        setting = "env.observations.cameras" if is_from_camera(name) else "env.observations or env.scene"
        if name not in before:
            problems.append(f"{name} {now[name]} is unknown to the run, so leave it out of {setting}")
        elif name not in now:
            problems.append(f"{name} {before[name]} is missing here, so add it in {setting}")
        elif before[name] != now[name]:
            problems.append(f"{name} is {before[name]} in the run and {now[name]} here, so change it in {setting}")
    return problems


def _read_document(file: Path) -> dict[str, Any]:
    if not _is_file(file):
        raise CheckpointError(f"{file.parent} is no checkpoint: there is no {file.name} in it")
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged or truncated: {error}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CheckpointError(f"{file} is no checkpoint of this package")
    version = document.get("version")
    if type(version) is not int or version < 1:
        raise CheckpointError(f"{file} is damaged: it has format version {version!r}, expected {VERSION}")
    if version > VERSION:
        raise CheckpointVersionError(
            f"{file} has format version {version}; this version of the package reads up to {VERSION}. Upgrade it."
        )
    if not isinstance(document.get("tensors"), dict) or _data_crc(document.get("state")) != document.get("crc32"):
        raise CheckpointError(f"{file} is damaged: its content does not match its checksum")
    return document


def _is_file(path: Path) -> bool:
    """Return whether a path is a file; unlike ``os.path.isfile``, I/O errors are raised."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (*_ABSENT, ValueError):  # a NUL in the name
        return False
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENAMETOOLONG):
            return False
        raise


def _data_crc(data: Any) -> int:
    return zlib.crc32(json.dumps(data, separators=(",", ":")).encode())


def _file_crc(file: Path) -> int:
    crc = 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc


def _sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _replace(partial: Path, target: Path) -> None:
    """Rename a complete folder; an older one keeps a name that ``list_checkpoints`` finds until that is done."""
    former = target.with_name(f".{target.name}{_FORMER}")
    if target.exists():
        shutil.rmtree(former, ignore_errors=True)
        target.rename(former)
    try:
        partial.rename(target)
    except OSError:
        restore_former(target.parent)
        raise
    _sync(target.parent)
    shutil.rmtree(former, ignore_errors=True)


class NanGuard:
    """Stops a run at the first NaN or infinity in a rollout or an update, and saves the data to find its cause.

    ``load_checkpoint`` reads that data: ``rollout`` (the failing batch ``[num_envs, num_steps]``), ``env_before``
    (replay it with ``set_state`` and the rollout's actions), ``env_after`` and ``policy``.
    """

    def __init__(self, env: VecEnv | None, policy: Policy, folder: Path) -> None:
        """``env`` is saved as well; ``None`` if another thread or process steps it."""
        self.env, self.policy, self.folder = env, policy, folder
        self._before: TensorDict | None = None

    def before_rollout(self) -> None:
        """Keep the state of the simulation, so that a failing rollout can be replayed."""
        self._before = self._simulation()

    def check_rollout(self, rollout: TensorDictBase, step: int) -> None:
        """Raise ``NotFiniteError`` if anything in a rollout is not finite."""
        items = rollout.items(include_nested=True, leaves_only=True)
        leaves = [("/".join(key) if isinstance(key, tuple) else key, leaf) for key, leaf in items]
        leaves.sort(key=lambda item: not item[0].startswith(_GIVEN_BY_ENV))  # the causes first
        found = _not_finite(leaves)
        if found is not None:
            name, leaf = found
            env, when = (~leaf.isfinite()).reshape(*leaf.shape[:2], -1).any(-1).nonzero()[0].tolist()
            where = f"{name} of env {env} in step {when} of the rollout that began at step {step}"
            what = f"{where} is {leaf[env, when].flatten()[:8].tolist()}"
            self._fail(what, rollout, _FROM_ENV if name.startswith(_GIVEN_BY_ENV) else _FROM_TRAINING)

    def check_update(self, measures: Mapping[str, float], rollout: TensorDictBase, step: int) -> None:
        """Raise ``NotFiniteError`` if an update gave a loss or a parameter that is not finite."""
        bad = next((name for name, value in measures.items() if not math.isfinite(value)), None)
        if bad is not None:
            self._fail(f"{bad} is {measures[bad]} after the update at step {step}", rollout)
        found = _not_finite((name, parameter.detach()) for name, parameter in self.policy.named_parameters())
        if found is not None:
            self._fail(f"the parameter {found[0]} is not finite after the update at step {step}", rollout)

    def _simulation(self) -> TensorDict | None:
        try:
            return self.env.get_state() if self.env is not None and self.env.supports_state else None
        except (WorkerError, EnvironmentHungError):  # the collector handles a lost process
            return None

    def _fail(self, what: str, rollout: TensorDictBase, advice: str = _FROM_TRAINING) -> None:
        state = {"message": what, "rollout": rollout, "env_before": self._before, "env_after": self._simulation()}
        saved = save_checkpoint(self.folder, state | {"policy": self.policy.state_dict()})
        raise NotFiniteError(
            f"{what}. The rollout, the simulation before and after it, and the policy are saved in {saved}; {advice}. "
            "trainer.nan_guard=false trains on regardless."
        )


def _not_finite(named: Iterable[tuple[str, Tensor]]) -> tuple[str, Tensor] | None:
    """Return name and tensor of the first floating-point tensor that contains NaN or infinity."""
    # The sums detect any without allocating memory. A sum may also overflow, so the tensors are checked afterwards.
    floating = [(name, tensor) for name, tensor in named if tensor.is_floating_point()]
    if not floating or bool(torch.stack([t.sum(dtype=torch.float64) for _, t in floating]).isfinite().all()):
        return None
    return next(((name, tensor) for name, tensor in floating if not bool(tensor.isfinite().all())), None)
