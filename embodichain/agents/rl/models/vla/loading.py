"""Checkpoints of vision-language-action models: safetensors, every key and shape checked before a weight is set.

``save_vla_model`` writes a folder with ``config.json`` (``model_class`` and ``model_config``) and
``model.safetensors``; ``load_vla_model`` reads such a folder, a single ``.safetensors`` file, or a plain torch file,
from which nothing but tensors is taken.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from embodichain.agents.rl.models.vla.model import VLAModel, get_vla_model_class, registered_name
from embodichain.errors import CheckpointError, ConfigError

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
FORMAT, VERSION = "embodichain-vla", 1
SHOWN = 5
"""Misfits that an error names; the rest are counted."""
_TORCH_SUFFIXES = (".pt", ".pth", ".bin")
_NESTED = ("model_state_dict", "state_dict", "model")

PathLike = str | os.PathLike[str]


def load_vla_model(
    model_path: PathLike | None,
    model_class: str | None = None,
    model_config: Mapping[str, Any] | None = None,
    device: torch.device | str = "cpu",
    *,
    trusted_modules: Collection[str] = (),
) -> nn.Module:
    """Build a model and load its weights; the model is returned in evaluation mode.

    ``model_class`` is a registered name, or ``module.Class`` of a module that may be imported; it and ``model_config``
    default to what a folder's ``config.json`` says. Without a ``model_path`` the weights are random.
    """
    saved = _read_config(Path(model_path)) if model_path is not None else {}
    name = model_class if model_class is not None else saved.get("model_class")
    if name is None:
        place = "" if model_path is None else f", and {model_path} does not say it"
        raise ConfigError(f"model_class: expected the name of a model class{place}", "load_vla_model")
    model_cls = get_vla_model_class(name, trusted_modules)
    settings = saved.get("model_config", {}) if model_config is None else dict(model_config)
    try:
        model = model_cls(**settings)
    except TypeError as error:
        raise ConfigError(
            f"{model_cls.__name__} cannot be built from these settings: {error}", "model_config"
        ) from error
    if model_path is not None:
        set_weights(model, read_weights(Path(model_path)), str(model_path))
    return model.to(device).eval()


def saved_model_config(model_path: PathLike) -> tuple[str | None, dict[str, Any]]:
    """Return the model class and the settings that a folder's ``config.json`` names; nothing for a single file."""
    saved = _read_config(Path(model_path))
    return saved.get("model_class"), dict(saved.get("model_config", {}))


def save_vla_model(model: nn.Module, folder: PathLike) -> Path:
    """Write a model's settings and weights to a folder that ``load_vla_model`` reads."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    settings = model.cfg.to_dict() if isinstance(model, VLAModel) else {}
    about = {
        "format": FORMAT,
        "version": VERSION,
        "model_class": registered_name(type(model)),
        "model_config": settings,
    }
    (target / CONFIG_FILE).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    # Tensors that share memory are written once each: the format has no word for sharing.
    weights = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, target / WEIGHTS_FILE)
    return target


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint by name; no code in it is run."""
    file = path / WEIGHTS_FILE if path.is_dir() else path
    if not file.is_file():
        raise CheckpointError(f"{path}: there is no checkpoint; expected a folder with {WEIGHTS_FILE}, or a file")
    if file.suffix == ".safetensors":
        try:
            return load_file(file)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from None
    if file.suffix not in _TORCH_SUFFIXES:
        known = ", ".join((".safetensors", *_TORCH_SUFFIXES))
        raise CheckpointError(f"{file}: expected a checkpoint with one of the endings {known}")
    return _read_torch_file(file)


def set_weights(model: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Load weights of exactly the right names and shapes; ``CheckpointError`` names the first five that do not fit."""
    own = model.state_dict()
    misfits = [f"{name}: missing, expected {list(own[name].shape)}" for name in own if name not in weights]
    misfits += [f"{name}: not in the model" for name in weights if name not in own]
    misfits += [
        f"{name}: expected {list(own[name].shape)}, got {list(weights[name].shape)}"
        for name in own
        if name in weights and weights[name].shape != own[name].shape
    ]
    if misfits:
        shown = "".join(f"\n  - {misfit}" for misfit in misfits[:SHOWN])
        rest = f"\n  ... and {len(misfits) - SHOWN} more" if len(misfits) > SHOWN else ""
        raise CheckpointError(
            f"{source} does not fit {type(model).__name__}: {len(misfits)} of {len(own)} entries differ{shown}{rest}"
        )
    model.load_state_dict(dict(weights))


def _read_torch_file(file: Path) -> dict[str, Tensor]:
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        first = str(error).splitlines()[0]
        raise CheckpointError(
            f"{file} cannot be read as plain weights: {first} Save it as safetensors where it comes from."
        ) from None
    for key in _NESTED:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(f"{file}: expected tensors by name, or those under one of {', '.join(_NESTED)}")
    return dict(content)


def _read_config(path: Path) -> dict[str, Any]:
    """Return what a folder's config says about the model; nothing for a file or a folder without one."""
    file = path / CONFIG_FILE
    if not path.is_dir() or not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{file} is no config of a model saved by save_vla_model")
    if not isinstance(content.get("version"), int) or content["version"] > VERSION:
        raise CheckpointError(f"{file} has version {content.get('version')}; this package reads up to {VERSION}")
    return content
