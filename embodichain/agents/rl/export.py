"""Export of a trained policy to ONNX: maps observations to the most likely action, with normalisation included.

Each vector and image of the observation is a separate input, named as in configs (``robot/qpos``), with a dynamic batch
dimension. The output ``action`` is clipped to the action space. A recurrent policy also has the input ``hidden`` (at
the start of an episode, the value of the metadata entry ``initial_hidden``) and the output ``next_hidden``.
"""

import json
import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from embodichain import __version__
from embodichain.agents.rl.models.actor_critic import NetworkPolicy
from embodichain.agents.rl.models.flow import FlowHead
from embodichain.agents.rl.models.observation import ObservationEntry, space_entries
from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.utils.tensordicts import space_to_data
from embodichain.envs.recording import prepare_output
from embodichain.envs.vec_env import ActionBounds
from embodichain.errors import ExportError
from embodichain.extras import require

_LOG = logging.getLogger(__name__)
_TOLERANCE = 1e-4  # largest difference of an exported action
_PARITY_STEPS = 4  # steps in a row that are compared


class ExportedPolicy(nn.Module):
    """A policy as a function of tensors: maps the leaves of an observation (and a state) to an action (and a state)."""

    def __init__(self, policy: Policy, leaves: list[ObservationEntry], action_space: gym.Space[Any]) -> None:
        super().__init__()
        self.policy, self.leaves, self.bounds = policy, leaves, ActionBounds(action_space)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return ``(action,)``, or ``(action, next_hidden)`` of a recurrent policy."""
        state = inputs[-1] if self.policy.is_recurrent else None
        obs = TensorDict({}, batch_size=[inputs[0].shape[0]])
        for leaf, value in zip(self.leaves, inputs, strict=False):
            obs.set(leaf.path or "observation", value)
        action, _, _, state = self.policy.act(obs, state, deterministic=True)
        bounded = self.bounds.clip(action)
        return (bounded,) if state is None else (bounded, state)


def export_onnx(
    policy: Policy, observation_space: gym.Space[Any], action_space: gym.Space[Any], path: str | Path
) -> Path:
    """Write a policy as an ONNX file, and check that ONNX Runtime computes the same actions."""
    onnx = require("onnx", extra="export")
    require("onnxscript", extra="export")
    require("onnxruntime", extra="export")
    target = prepare_output(path, (".onnx",))
    leaves = space_entries(observation_space)
    if isinstance(policy, NetworkPolicy):  # ignored observations are no inputs
        leaves = [leaf for leaf in leaves if leaf in (*policy.encoder.vectors, *policy.encoder.images)]
    acting = ExportedPolicy(policy.eval().cpu(), leaves, action_space).eval()
    inputs = example_inputs(policy, leaves, batch=2)
    names = [leaf.name or "observation" for leaf in leaves] + ["hidden"] * policy.is_recurrent
    batch = torch.export.Dim("batch")
    partial = target.with_name(f".{target.name}.partial")
    with _without_draws(policy):
        with _quiet(), torch.no_grad():
            try:
                program = torch.onnx.export(
                    acting,
                    inputs,
                    input_names=names,
                    output_names=["action", "next_hidden"][: 1 + policy.is_recurrent],
                    dynamic_shapes=(tuple({0: batch} for _ in inputs),),
                    dynamo=True,
                    verbose=False,
                )
            except torch.onnx.OnnxExporterError as error:
                reason = str(error.__cause__ or error).strip().splitlines()[0]
                raise ExportError(f"{type(policy).__name__} cannot be written as ONNX: {reason:.300}") from error
        if program is None:
            raise ExportError("the exporter returned nothing")
        program.save(str(partial), external_data=False)
        model = onnx.load(str(partial))
        onnx.helper.set_model_props(model, _metadata(policy, action_space))
        onnx.save(model, str(partial))
        try:
            check_parity(acting, partial, names)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    return target


@contextmanager
def _without_draws(policy: Policy) -> Iterator[None]:
    """Make flows start from zero noise inside the block, as an ONNX file samples none."""
    heads = [module for module in policy.modules() if isinstance(module, FlowHead) and module.cfg.start == "drawn"]
    if heads:
        _LOG.warning('flow.start is "drawn", and an exported policy draws no noise: its chunks begin with zero noise')
    before = [head.cfg for head in heads]
    try:
        for head in heads:
            head.cfg = replace(head.cfg, start="zero")
        yield
    finally:
        for head, cfg in zip(heads, before, strict=True):
            head.cfg = cfg


def check_parity(acting: ExportedPolicy, file: Path, names: list[str]) -> None:
    """Raise ``ExportError`` if the file's actions differ from the policy's, for several batch sizes and steps."""
    runtime = require("onnxruntime", extra="export")
    session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    for batch in (1, 5):
        theirs: list[np.ndarray] = []
        ours: tuple[Tensor, ...] = ()
        for step in range(_PARITY_STEPS):
            inputs = list(example_inputs(acting.policy, acting.leaves, batch, seed=step))
            if step and acting.policy.is_recurrent:
                inputs[-1] = ours[1]
            feed = {name: value.numpy() for name, value in zip(names, inputs, strict=True)}
            if theirs and acting.policy.is_recurrent:
                feed["hidden"] = theirs[1]
            with torch.no_grad():
                ours = acting(*inputs)
            theirs = session.run(None, feed)
            for name, wanted, got in zip(("action", "next_hidden"), ours, theirs, strict=False):
                apart = float(np.abs(wanted.numpy().astype(np.float64) - got).max())
                if not apart <= _TOLERANCE:
                    raise ExportError(f"{name} of the exported policy differs by {apart:.3g} in a batch of {batch}")


def example_inputs(policy: Policy, leaves: list[ObservationEntry], batch: int, seed: int = 0) -> tuple[Tensor, ...]:
    """Return random observations ``[batch, ...]``, one tensor per leaf, and the initial recurrent state, if any."""
    generator = torch.Generator().manual_seed(seed)
    inputs = []
    for leaf in leaves:
        if leaf.is_bytes:
            inputs.append(torch.randint(0, 256, (batch, *leaf.shape), dtype=torch.uint8, generator=generator))
        elif leaf.is_image:
            inputs.append(torch.rand(batch, *leaf.shape, generator=generator) * leaf.largest)
        else:
            inputs.append(torch.randn(batch, *leaf.shape, generator=generator))
    state = policy.initial_state(batch)
    return (*inputs,) if state is None else (*inputs, state.clone())


def _metadata(policy: Policy, action_space: gym.Space[Any]) -> dict[str, str]:
    data = space_to_data(action_space)
    entries = {"producer": f"embodichain {__version__}", "action_space": json.dumps(_plain(data), allow_nan=False)}
    state = policy.initial_state(1)
    return entries if state is None else entries | {"initial_hidden": json.dumps(state[0].tolist())}


def _plain(value: Any) -> Any:
    """Return nested data for JSON; infinite bounds become null."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the exporter's warnings about its own code."""
    exporter = logging.getLogger("torch.onnx")
    before = exporter.level
    exporter.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        exporter.setLevel(before)
