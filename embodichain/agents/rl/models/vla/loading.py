"""Checkpoints of vision-language-action models, freezing of parameters, and LoRA with peft.

``save_vla_model`` writes a self-contained folder with ``config.json``, ``model.safetensors`` and, for a pretrained
backbone, its config and tokenizer in ``backbone/``. ``load_vla_model`` reads such a folder, a ``.safetensors`` file, or
a torch file, of which it loads only tensors.
"""

import json
import os
import pickle
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from embodichain.agents.rl.models.observation import impossible_values
from embodichain.agents.rl.models.registry import networks_fit
from embodichain.agents.rl.models.vla.model import (
    VLAModel,
    get_registered_vla_model_names,
    get_vla_model_class,
    registered_name,
)
from embodichain.agents.rl.models.vla.pretrained import PretrainedVLA
from embodichain.config.classes import Config, Fraction, Positive, Size, configclass
from embodichain.config.files import save_config
from embodichain.errors import CheckpointError, ConfigError, writing
from embodichain.extras import require

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
FORMAT, VERSION = "embodichain-vla", 2
_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
_FILES = (CONFIG_FILE, WEIGHTS_FILE, "backbone")
_LORA = "_lora_settings"
"""Attribute of a model that holds its LoRA settings."""
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
    """Build a model and load its weights; return it in evaluation mode.

    ``model_class`` is a registered name, or ``module.Class`` of a trusted module. It and ``model_config`` default to
    the values in the folder's ``config.json``. Without a ``model_path``, the weights are random.
    """
    saved = saved_config(model_path)
    name = class_name(model_class, saved, model_path)
    if name is None and model_path is not None and not _settled(Path(model_path)).exists():
        raise CheckpointError(f"{model_path}: expected the folder or the file of a model, but there is none")
    if name is None:
        where = "" if model_path is None else f", and {model_path} does not say it"
        raise ConfigError(f"model_class: expected the name of a model class{where}", "load_vla_model")
    model_cls = get_vla_model_class(name, trusted_modules)
    settings = saved.get("model_config", {}) if model_config is None else dict(model_config)
    try:
        with networks_fit():
            model = model_cls(**settings)
    except TypeError as error:
        raise ConfigError(
            f"{model_cls.__name__} cannot be built from these settings: {error}", "model_config"
        ) from error
    if saved.get("lora") is not None:
        apply_lora(model, LoRACfg.from_dict(saved["lora"], source=str(Path(model_path or "") / CONFIG_FILE)))
    if model_path is not None:
        if saved.get("foreign") and isinstance(model, PretrainedVLA):
            weights = model.foreign_weights(_settled(Path(model_path)))
            set_weights(model, weights, str(model_path), model.new_parts)
        else:
            set_weights(model, read_weights(Path(model_path)), str(model_path))
    return model.to(device).eval()


def save_vla_model(model: nn.Module, folder: PathLike) -> Path:
    """Save a model to a folder for ``load_vla_model``: settings, weights, LoRA parameters, tokenizer.

    The folder is created or replaced atomically. If it contains other files, which are kept, or is the working
    directory, only each file is replaced atomically.
    """
    with writing(folder):
        target = Path(os.path.realpath(folder))
        former, is_whole = _former(target), _may_be_replaced(target)
        if former.exists() and not target.exists():  # a process was killed between the two renames
            former.rename(target)
            is_whole = _may_be_replaced(target)
        name = f".{target.name}.partial"
        partial = target.with_name(name) if is_whole else target / name
        for left in (partial, former):
            if left.exists():
                shutil.rmtree(left)
        partial.mkdir(parents=True)
        try:
            _write_model(model, partial)
            if is_whole:
                if target.exists():
                    os.rename(target, former)
                os.rename(partial, target)
            else:
                for file in sorted(partial.rglob("*"), reverse=True):
                    if file.is_file():
                        destination = target / file.relative_to(partial)
                        destination.parent.mkdir(parents=True, exist_ok=True)
                        file.replace(destination)
        except Exception:
            if not target.exists() and former.exists():
                former.rename(target)
            shutil.rmtree(partial, ignore_errors=True)
            raise
        for left in (partial, former):
            if left.exists():
                shutil.rmtree(left)
    return Path(folder)


def _settled(path: Path) -> Path:
    """Return a folder, or its temporary name if a process was killed while replacing it."""
    former = _former(Path(os.path.realpath(path)))
    return former if not path.exists() and former.is_dir() else path


def _former(target: Path) -> Path:
    """Return the temporary name of a folder that is being replaced."""
    return target.with_name(f".{target.name}.former")


def _may_be_replaced(target: Path) -> bool:
    """Return whether a folder can be replaced by a rename: it does not exist, or holds nothing but a model."""
    if not target.exists():
        return True
    if not target.is_dir() or target.is_mount() or Path.cwd().is_relative_to(target):
        return False
    names = {entry.name for entry in target.iterdir()}
    return bool(names) and names <= {*_FILES}


def _write_model(model: nn.Module, target: Path) -> None:
    """Write the files of a model into a new folder."""
    settings = {**model.cfg.to_dict(), **model.save_files(target)} if isinstance(model, VLAModel) else {}
    files = {name: value.as_posix() for name, value in settings.items() if isinstance(value, Path)}
    if settings:  # the fitted tokenizer is saved with the weights
        settings["tokens"]["fast"]["tokenizer"] = None
    lora = lora_of(model)
    about = {
        "model_class": registered_name(type(model)),
        "model_config": {name: value for name, value in settings.items() if name not in files},
        "files": files,
        "lora": None if lora is None else lora.to_dict(),
    }
    save_config({"format": FORMAT, "version": VERSION, **about}, target / CONFIG_FILE)
    # Tensors that share memory are copied: safetensors does not support sharing.
    weights = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, target / WEIGHTS_FILE)


def saved_config(model_path: PathLike | None) -> dict[str, Any]:
    """Return a folder's ``config.json``: ``model_class``, ``model_config``, ``lora``; an empty dict without one."""
    file = _settled(Path(model_path or "")) / CONFIG_FILE
    if model_path is None or not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    if isinstance(content, dict) and content.get("format") != FORMAT:
        return _foreign_config(content, file)
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} is no config of a model saved by save_vla_model")
    if type(content.get("version")) is not int or content["version"] > VERSION:
        raise CheckpointError(f"{file} has version {content.get('version')}; this package reads up to {VERSION}")
    settings, files = content.get("model_config", {}), content.get("files", {})
    kinds = {"model_class": str | None, "model_config": dict, "files": dict, "lora": dict | None}
    wrong = next(
        (name for name, kind in kinds.items() if name in content and not isinstance(content[name], kind)), None
    )
    if wrong is not None:
        raise CheckpointError(f"{file}: {wrong}: save_vla_model does not write {content[wrong]!r:.80}")
    for name, path in files.items():
        if (
            not isinstance(path, str)
            or "\0" in path
            or not (file.parent / path).resolve().is_relative_to(file.parent.resolve())
        ):
            raise CheckpointError(f"{file}: {name}: expected a path inside the folder, got {path!r}")
        settings[name] = str(file.parent / path)
    return content


def _foreign_config(content: dict[str, Any], file: Path) -> dict[str, Any]:
    """Convert the config of another library's policy."""
    kind = next((content[key] for key in ("type", "model_type") if isinstance(content.get(key), str)), None)
    model_cls = get_vla_model_class(kind) if kind in get_registered_vla_model_names() else None
    if kind is None or model_cls is None or not issubclass(model_cls, PretrainedVLA):
        read = " and ".join(name for name in ("smolvla", "openvla") if name in get_registered_vla_model_names())
        is_a = "no config of a model saved by save_vla_model" if kind is None else f"the config of a {kind!r}"
        raise CheckpointError(f"{file} is {is_a}; of other libraries' policies, those of type {read} are read")
    return {"model_class": kind, "model_config": model_cls.read_config(file.parent, content), "foreign": True}


def class_name(given: str | None, saved: Mapping[str, Any], model_path: PathLike | None) -> str | None:
    """Return the given model class, or that of the folder; ``ConfigError`` if another library's policy differs."""
    own = saved.get("model_class")
    if given is not None and saved.get("foreign") and given != own:
        raise ConfigError(
            f"model_class: {model_path} holds a policy of type {own!r}, got {given!r}; leave it out", "policy"
        )
    return own if given is None else given


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint by name."""
    path = _settled(path)
    file = path / WEIGHTS_FILE if path.is_dir() else path
    if not file.is_file():
        inner = path / "pretrained_model"  # in runs of LeRobot
        hint = f". Did you mean {inner}?" if inner.is_dir() else ""
        raise CheckpointError(f"{path}: there is no checkpoint; expected a folder with {WEIGHTS_FILE}, or a file{hint}")
    if file.suffix not in _SUFFIXES:
        raise CheckpointError(f"{file}: expected a checkpoint with one of the endings {', '.join(_SUFFIXES)}")
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        content = torch.load(file, map_location="cpu", weights_only=True)
    except SafetensorError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = f"{str(error).splitlines()[0]} Save it as safetensors where it comes from."
        raise CheckpointError(f"{file} cannot be read as plain weights: {reason}") from None
    for key in _NESTED:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(f"{file}: expected tensors by name, or those under one of {', '.join(_NESTED)}")
    return dict(content)


def set_weights(model: nn.Module, weights: Mapping[str, Tensor], source: str, new: Collection[str] = ()) -> None:
    """Load weights; raise ``CheckpointError`` with the first five that differ in name or shape, or are impossible.

    Weights of the submodules ``new`` may be missing; they keep their values.
    """
    present = {name: value for name, value in model.state_dict().items() if any(_belongs(name, part) for part in new)}
    weights = {**present, **weights}
    own = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    given = {name: list(tensor.shape) for name, tensor in weights.items()}
    misfits = [f"{name}: missing, expected {shape}" for name, shape in own.items() if name not in given]
    misfits += [f"{name}: not in the model" for name in given if name not in own]
    differing = [name for name in own if name in given and own[name] != given[name]]
    misfits += [f"{name}: expected {own[name]}, got {given[name]}" for name in differing]
    for name, tensor in model.state_dict().items():
        if name in weights and tensor.is_floating_point() and not weights[name].is_floating_point():
            misfits.append(f"{name}: expected floating-point numbers, got {weights[name].dtype}")
    what = "differ" if misfits else "have impossible values"
    misfits = misfits or impossible_values(model, weights)
    if misfits:
        shown = "".join(f"\n  - {misfit}" for misfit in misfits[:5])
        rest = f"\n  ... and {len(misfits) - 5} more" if len(misfits) > 5 else ""
        raise CheckpointError(
            f"{source} does not fit {type(model).__name__}: {len(misfits)} of {len(own)} entries {what}{shown}{rest}"
        )
    model.load_state_dict(dict(weights))


def freeze_but(module: nn.Module, parts: Collection[str]) -> None:
    """Freeze all parameters except those in ``parts`` (submodules or parameters); frozen ones stay frozen."""
    names = [name for name, _ in module.named_parameters()]
    for part in parts:
        if not any(_belongs(name, part) for name in names):
            depth = part.count(".") + 1
            known = ", ".join(sorted({".".join(name.split(".")[:depth]) for name in names}))
            raise ConfigError(f"trainable: no parameter is or lies in {part!r}; there are: {known}", "policy")
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and any(_belongs(name, part) for part in parts))


@contextmanager
def only_trained(module: nn.Module, *parts: str) -> Iterator[None]:
    """Freeze all parameters except those in ``parts`` inside the block."""
    before = [parameter.requires_grad for parameter in module.parameters()]
    try:
        freeze_but(module, parts)
        yield
    finally:
        for parameter, was in zip(module.parameters(), before, strict=True):
            parameter.requires_grad_(was)


def _belongs(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}.")


@configclass
class LoRACfg(Config):
    """Settings of low-rank adapters (LoRA)."""

    rank: Size = 16
    """Rank of the adapters."""
    alpha: Positive = 32.0
    """Adapters are scaled by ``alpha / rank``."""
    dropout: Fraction = 0.0
    """Dropout of the adapters' input in imitation; reinforcement learning disables it."""
    target_modules: Annotated[tuple[str, ...], Field(min_length=1)] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Suffixes of the names of the layers that get adapters."""
    trainable: tuple[str, ...] = ("head", "action_head", "to_action", "to_value", "to_points", "body", "queries")
    """Submodules and parameters that stay trainable: those that are new, not pretrained."""


def lora_of(model: nn.Module) -> LoRACfg | None:
    """Return the LoRA settings of a model; ``None`` if it has no adapters."""
    return vars(model).get(_LORA)


def apply_lora(model: nn.Module, cfg: LoRACfg) -> nn.Module:
    """Freeze the model and add low-rank adapters to the chosen layers, in place; their initial output is zero.

    A model that has the same adapters already keeps them.
    """
    present = lora_of(model)
    if present is not None:
        if present != cfg:
            raise ConfigError(
                f"the model has low-rank parts of rank {present.rank} on {', '.join(present.target_modules)} already; "
                "leave out lora to keep them, or save the model after merge_lora",
                "lora",
            )
        return model
    peft = require("peft", extra="vla")
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for end in cfg.target_modules:
        if not any(f".{name}".endswith(f".{end}") for name in names):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
            raise ConfigError(f"target_modules: no linear layer ends in {end!r}; there are: {known}", "lora")
    targets = list(cfg.target_modules)
    settings = peft.LoraConfig(r=cfg.rank, lora_alpha=cfg.alpha, lora_dropout=cfg.dropout, target_modules=targets)
    peft.inject_adapter_in_model(settings, model)  # freezes everything but the adapters
    for name, parameter in model.named_parameters():
        if any(_belongs(name, part) for part in cfg.trainable):
            parameter.requires_grad_(True)
    vars(model)[_LORA] = cfg
    return model


def merge_lora(model: nn.Module) -> nn.Module:
    """Merge the adapters into their layers, in place; the model then has its original parameter names."""
    layers = require("peft.tuners.lora", extra="vla")
    for name, module in list(model.named_modules()):
        if isinstance(module, layers.LoraLayer):
            module.merge()
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, module.get_base_layer())
    vars(model).pop(_LORA, None)
    return model.requires_grad_(True)
