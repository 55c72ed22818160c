"""Exported policies do what the policies do, in another runtime."""

from __future__ import annotations

import json

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import nn

from embodichain.agents.rl import export
from embodichain.agents.rl.checkpoint import load_policy
from embodichain.agents.rl.export import export_onnx
from embodichain.agents.rl.models import build_policy
from embodichain.agents.rl.models.tokens import fit_tokenizer
from embodichain.agents.rl.train import train_from_config
from embodichain.cli.export import main as export_command
from embodichain.envs.observations import encode_instructions
from embodichain.errors import ExportError, OutputError
from tests.agents.rl.training_cases import write_config

onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra 'export'")
pytest.importorskip("onnxscript", reason="needs the extra 'export'")

pytestmark = pytest.mark.extra("export")

VECTORS = gym.spaces.Dict(
    {
        "robot": gym.spaces.Dict({"qvel": gym.spaces.Box(-9, 9, (2,)), "qpos": gym.spaces.Box(-9, 9, (3,))}),
        "goal": gym.spaces.Dict({"pos": gym.spaces.Box(-9, 9, (2,))}),
    }
)
PICTURES = gym.spaces.Dict(
    {**VECTORS.spaces, "image": gym.spaces.Dict({"top": gym.spaces.Box(0, 255, (12, 12, 3), np.uint8)})}
)
SMALL = {"type": "mlp", "hidden_sizes": [8]}
CASES = {
    "vectors": ({"normalize_obs": True, "critic_obs": ["goal"]}, VECTORS, gym.spaces.Box(-1, 1, (2,))),
    "no bounds": ({}, VECTORS, gym.spaces.Box(np.float32([-np.inf, 150.0]), np.float32([np.inf, np.inf]))),
    "lstm": ({"memory": {"type": "lstm", "hidden_size": 4, "num_layers": 2}}, VECTORS, gym.spaces.Box(-1, 1, (2,))),
    "memory, pictures": ({"memory": {"hidden_size": 4}}, PICTURES, gym.spaces.Discrete(3)),
}


def observation(batch, pictures=False):
    tensors = {
        "robot/qvel": torch.randn(batch, 2),
        "robot/qpos": torch.randn(batch, 3) * 3 + 5,
        "goal/pos": torch.randn(batch, 2),
    }
    if pictures:
        tensors["image/top"] = torch.randint(0, 256, (batch, 12, 12, 3), dtype=torch.uint8)
    nested = TensorDict({}, batch_size=[batch])
    for name, value in tensors.items():
        nested.set(tuple(name.split("/")), value)
    return nested, {name: value.numpy() for name, value in tensors.items()}


@pytest.mark.parametrize("case", CASES)
def test_exported_actions_equal_the_policys(tmp_path, case):
    settings, observations, actions = CASES[case]
    torch.manual_seed(0)
    policy = build_policy(
        {"name": "actor_critic", "actor": SMALL, "critic": SMALL, **settings}, observations, actions, "cpu"
    )
    pictures = observations is PICTURES
    with torch.no_grad():  # larger weights than at the start, so that actions differ and reach their bounds
        for layer in policy.actor:
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=3.0)
    policy.update_normalizer(observation(50, pictures)[0])
    session = onnxruntime.InferenceSession(str(export_onnx(policy, observations, actions, tmp_path / "p.onnx")))
    batch = 6
    state = policy.initial_state(batch)
    hidden = None if state is None else state.numpy()
    distinct = set()
    for _ in range(4):
        obs, feed = observation(batch, pictures)
        with torch.no_grad():
            wanted, _, _, state = policy.act(obs, state, deterministic=True)
        given = {**feed, "hidden": hidden} if hidden is not None else feed
        names = {entry.name for entry in session.get_inputs()}
        got = session.run(None, {name: value for name, value in given.items() if name in names})
        expected = wanted.numpy()
        if isinstance(actions, gym.spaces.Box):  # bounded as the environment would
            expected = np.clip(expected, actions.low, actions.high)
            assert not np.array_equal(expected, wanted)
            assert (np.abs(expected).max() > 1.0) == (case == "no bounds")
        assert np.allclose(got[0], expected, atol=1e-5)
        distinct |= set(np.round(got[0], 3).reshape(-1).tolist())
        hidden = got[1] if hidden is not None else None
    assert len(distinct) > 1
    entries = session.get_modelmeta().custom_metadata_map
    space = json.loads(entries["action_space"])
    assert space["type"] == ("discrete" if pictures else "box")
    assert case != "no bounds" or (space["low"], space["high"]) == ([None, 150.0], None)


def test_an_exported_policy_reads_instructions(tmp_path):
    text = gym.spaces.Box(0, 255, (32,), np.uint8)
    observations, actions = gym.spaces.Dict({**VECTORS.spaces, "instruction": text}), gym.spaces.Box(-1, 1, (2,))
    torch.manual_seed(0)
    block = {"name": "actor_critic", "actor": SMALL, "critic": SMALL, "normalize_obs": True, "text_encoder": {}}
    policy = build_policy(block, observations, actions, "cpu")
    nn.init.normal_(policy.actor[-1].weight, std=0.3)
    obs, feed = observation(4)
    texts = encode_instructions(["put red on blue", "put blue on red", "stop", "lift the green cube"], 32)
    obs["instruction"], feed["instruction"] = texts, texts.numpy()
    policy.update_normalizer(obs)
    session = onnxruntime.InferenceSession(str(export_onnx(policy, observations, actions, tmp_path / "p.onnx")))
    with torch.no_grad():
        wanted = policy.act(obs, deterministic=True)[0].clamp(-1.0, 1.0).numpy()
    assert np.allclose(session.run(None, feed)[0], wanted, atol=1e-5)
    swapped = {**feed, "instruction": feed["instruction"][[1, 0, 3, 2]]}
    assert np.abs(session.run(None, swapped)[0] - wanted).max(axis=1).min() > 1e-3


def test_a_flow_with_one_noisy_step_is_exported_and_begins_with_zero_noise(tmp_path, caplog):
    block = {"name": "flow", "actor": SMALL, "critic": SMALL, "flow": {"num_steps": 2, "noise_at": "one"}}
    drawing = {**block["flow"], "start": "drawn"}
    actions = gym.spaces.Box(-1, 1, (2,))
    policy, drawn = (
        (torch.manual_seed(0), build_policy({**block, "chunk_size": 2, "flow": flow}, VECTORS, actions, "cpu"))[1]
        for flow in (block["flow"], drawing)
    )
    with torch.no_grad():  # larger than at the start, where a flow hardly moves
        for p in (policy, drawn):
            p.head.velocity_net[-1].weight.fill_(0.1)
    assert export_onnx(drawn, VECTORS, actions, tmp_path / "drawn.onnx").exists()
    assert "draws no noise" in caplog.text
    assert drawn.head.cfg.start == "drawn"
    obs, feed = observation(3)
    with torch.no_grad():
        zero = policy.get_action(obs, deterministic=True)[0].clamp(-1, 1)
    session = onnxruntime.InferenceSession(str(tmp_path / "drawn.onnx"))
    assert np.allclose(session.run(None, feed)[0], zero.numpy(), atol=1e-5)
    assert float(zero.abs().max()) > 0.05


def test_fast_tokens_are_exported_and_what_cannot_be_is_one_message(tmp_path, monkeypatch):
    torch.manual_seed(0)
    fast = {"vocab_size": 32, "scale": 3.0, "max_tokens": 3}
    tokens = {"encoding": "fast", "fast": fast, "width": 8, "depth": 1, "num_heads": 2}
    block, actions = {"name": "tokens", "chunk_size": 2, "critic": SMALL, "tokens": tokens}, gym.spaces.Box(-1, 1, (2,))
    policy = build_policy(block, VECTORS, actions, "cpu")
    fit_tokenizer(policy, torch.rand(100, 2, 2) * 2 - 1)
    nn.init.normal_(policy.head.out.weight)
    session = onnxruntime.InferenceSession(str(export_onnx(policy, VECTORS, actions, tmp_path / "p.onnx")))
    obs, feed = observation(6)
    with torch.no_grad():
        wanted, _, _, decision = policy.decide(obs, deterministic=True)
    assert np.allclose(session.run(None, feed)[0], wanted.clamp(-1, 1).numpy(), atol=1e-5)
    assert int(decision["num_factors"].max()) > 1

    def fail(*args, **kwargs):
        raise torch.onnx.OnnxExporterError("step 3 of 3\nlong advice") from ValueError("no such operator\nsecond line")

    monkeypatch.setattr(torch.onnx, "export", fail)
    with pytest.raises(ExportError, match=r"^TokenPolicy cannot be written as ONNX: no such operator$"):
        export_onnx(policy, VECTORS, actions, tmp_path / "q.onnx")
    assert [file.name for file in tmp_path.iterdir()] == ["p.onnx"]


def test_command_exports_a_run(tmp_path, capsys):
    train_from_config(write_config(tmp_path / "c.json", tmp_path / "run", trainer={"iterations": 2}))
    assert export_command([str(tmp_path / "run"), "--onnx", str(tmp_path / "out" / "p.onnx")]) == 0
    assert str(tmp_path / "out" / "p.onnx") in capsys.readouterr().out
    session = onnxruntime.InferenceSession(str(tmp_path / "out" / "p.onnx"))
    feed = {"robot/qpos": np.full((1, 2), 0.3, np.float32), "robot/qvel": np.full((1, 2), -0.2, np.float32)}
    policy = load_policy(tmp_path / "run")
    obs = TensorDict({"robot": {name[6:]: torch.from_numpy(value) for name, value in feed.items()}}, batch_size=[1])
    assert np.allclose(session.run(None, feed)[0], policy.get_action(obs, deterministic=True)[0].detach(), atol=1e-5)


def test_difference_is_noticed_and_no_file_is_left(tmp_path, monkeypatch):
    policy = build_policy({"name": "actor_only", "actor": SMALL}, VECTORS, gym.spaces.Box(-1, 1, (2,)), "cpu")
    check = export.check_parity

    def changed(acting, *rest):
        with torch.no_grad():
            acting.policy.actor[-1].bias += 0.5
        return check(acting, *rest)

    monkeypatch.setattr(export, "check_parity", changed)
    with pytest.raises(ExportError, match=r"action of the exported policy differs by 0\.5"):
        export_onnx(policy, VECTORS, gym.spaces.Box(-1, 1, (2,)), tmp_path / "p.onnx")
    assert list(tmp_path.iterdir()) == []


def test_file_name_must_say_onnx(tmp_path):
    policy = build_policy({"name": "actor_only", "actor": SMALL}, VECTORS, 2, "cpu")
    with pytest.raises(OutputError, match=r"\.onnx"):
        export_onnx(policy, VECTORS, gym.spaces.Box(-1, 1, (2,)), tmp_path / "p.pt")
