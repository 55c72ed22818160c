"""Checkpoints: one folder with ``state.json`` and ``tensors.safetensors``, written whole or not at all.
 ``state.json`` is ``{"format": "embodichain-checkpoint", "version": 1, "tensors": {"bytes", "crc32"}, "crc32",
"state"}``. ``state`` is nested data as ``tree.py`` describes it, which names the tensors of the other file; the first
``crc32`` is that of the tensor file, the second that of ``state`` written without blanks. Any change of a byte is
noticed.

A run's checkpoints hold ``config`` (the resolved config), ``spaces``, ``policy`` (its normaliser included),
``algorithm`` (optimiser and schedules), ``collector``, ``env`` (the simulation), ``random`` (all generators) and
``trainer`` (counters and schedules): everything the next iteration depends on. In a data-parallel run,
``collector``, ``env`` and ``random`` are the first rank's, and ``other_ranks`` lists those of the others.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.models.registry import build_policy
from embodichain.agents.rl.utils.spaces import space_from_data
from embodichain.agents.rl.utils.tree import put_together, take_apart
from embodichain.agents.utils.modules import check_trusted, import_trusted
from embodichain.envs.vec_env import VecEnv
from embodichain.errors import CheckpointError, OutputError

FORMAT, VERSION = "embodichain-checkpoint", 1
STATE_FILE, TENSOR_FILE = "state.json", "tensors.safetensors"
CHECKPOINTS, BEST = "checkpoints", "best"

PathLike = str | os.PathLike[str]


def save_checkpoint(path: PathLike, state: Mapping[str, Any]) -> Path:
    """Write nested data as a checkpoint folder; it appears complete, and replaces one of the same name."""
    target = Path(path)
    data, tensors = take_apart(dict(state))
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write(partial, data, tensors)
        _take_place(partial, target)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise OutputError(f"cannot write the checkpoint {target}: {error}") from error
    return target


def load_checkpoint(path: PathLike) -> dict[str, Any]:
    """Read a checkpoint folder, tensors on the CPU; ``CheckpointError`` if anything in it is not as it was written."""
    folder = Path(path)
    document = _read_document(folder / STATE_FILE)
    tensors = _read_tensors(folder / TENSOR_FILE, document["tensors"])
    try:
        state: dict[str, Any] = put_together(document["state"], tensors)
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{folder}: {STATE_FILE} and {TENSOR_FILE} do not belong together: {error}") from None
    return state


def find_checkpoint(path: PathLike, which: Literal["best", "latest"] = "latest") -> Path:
    """Return a checkpoint's folder, given that folder or the folder of a run; without a best one, it is the latest."""
    given = Path(path)
    if (given / STATE_FILE).is_file():
        return given
    folder = given / CHECKPOINTS
    if which == "best" and (folder / BEST / STATE_FILE).is_file():
        return folder / BEST
    steps = list_checkpoints(folder)
    if not steps:
        raise CheckpointError(f"{given}: expected a checkpoint or a run with a checkpoint in it, found neither")
    return steps[-1]


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints ``step_000000001234`` of a folder, the oldest first."""
    return sorted(file.parent for file in folder.glob(f"step_*/{STATE_FILE}"))


def load_weights(module: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Load weights into a module; ``CheckpointError`` names the first parameter that does not fit."""
    own = module.state_dict()
    for name, tensor in own.items():
        if name not in weights:
            raise CheckpointError(f"{source} is of another architecture: it lacks {name} {list(tensor.shape)}")
        if weights[name].shape != tensor.shape:
            raise CheckpointError(
                f"{source} is of another architecture: {name} is {list(weights[name].shape)} there and "
                f"{list(tensor.shape)} here"
            )
    extra = next((name for name in weights if name not in own), None)
    if extra is not None:
        raise CheckpointError(f"{source} is of another architecture: it has {extra}, which does not exist here")
    module.load_state_dict(weights)


def load_policy(
    path: PathLike,
    env: VecEnv | None = None,
    device: torch.device | str = "cpu",
    which: Literal["best", "latest"] = "best",
    trusted_modules: Collection[str] = (),
) -> Policy:
    """Return the trained policy of a run or checkpoint, in evaluation mode.

    It is built for the spaces of ``env`` where one is given, else for those it was trained with. A policy class of the
    user's own needs its module among ``trusted_modules``.
    """
    folder = find_checkpoint(path, which)
    state = load_checkpoint(folder)
    named = state["config"]["trainer"].get("import_modules", [])
    check_trusted(named, trusted_modules, str(folder))
    import_trusted(trusted_modules, [Path.cwd()])
    spaces = state["spaces"]
    observation_space = env.observation_space if env is not None else space_from_data(spaces["observation"])
    action_space = env.action_space if env is not None else space_from_data(spaces["action"])
    policy = build_policy(state["config"]["policy"], observation_space, action_space, device)
    load_weights(policy, state["policy"], str(folder))
    return policy.eval()


def _write(folder: Path, data: Any, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, folder / TENSOR_FILE)
    about = {"bytes": (folder / TENSOR_FILE).stat().st_size, "crc32": _file_crc(folder / TENSOR_FILE)}
    document = {"format": FORMAT, "version": VERSION, "tensors": about, "crc32": _data_crc(data), "state": data}
    (folder / STATE_FILE).write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    for written in (folder / TENSOR_FILE, folder / STATE_FILE, folder):
        _sync(written)


def _read_document(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file.parent} is no checkpoint: there is no {file.name} in it") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is damaged or truncated: {error}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CheckpointError(f"{file} is no checkpoint of this package")
    version = document.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise CheckpointError(
            f"{file} has format version {version}; this version of the package reads up to {VERSION}. Upgrade it."
        )
    if not isinstance(document.get("tensors"), dict) or _data_crc(document.get("state")) != document.get("crc32"):
        raise CheckpointError(f"{file} is damaged: its content does not match its checksum")
    return document


def _read_tensors(file: Path, about: Mapping[str, Any]) -> dict[str, Tensor]:
    try:
        size = file.stat().st_size
        if size != about.get("bytes"):
            raise CheckpointError(f"{file} is truncated: expected {about.get('bytes')} bytes, found {size}")
        if _file_crc(file) != about.get("crc32"):
            raise CheckpointError(f"{file} is damaged: its content does not match its checksum")
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None


def _data_crc(data: Any) -> int:
    return zlib.crc32(json.dumps(data, separators=(",", ":")).encode())


def _file_crc(file: Path) -> int:
    crc = 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc


def _sync(path: Path) -> None:
    """Have the operating system write a file, or the entries of a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _take_place(partial: Path, target: Path) -> None:
    """Give a finished folder its name; an older one of that name goes away only then."""
    former = target.with_name(f".{target.name}.{os.getpid()}.former")
    if target.exists():
        target.rename(former)
    partial.rename(target)
    _sync(target.parent)
    shutil.rmtree(former, ignore_errors=True)
