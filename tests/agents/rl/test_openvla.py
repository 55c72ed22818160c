"""OpenVLA as transformers saves it: the same tokens and actions, a policy for an environment, folders that do not fit.

``fixtures/openvla`` was written by ``openvla_peer.py`` with timm 1.0.30 and transformers 4.57.6. With
``LEROBOT_PYTHON``, the Python of an environment that has these, it is built and compared anew: ``make test-lerobot``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tensordict import TensorDict

from embodichain.agents.rl.algo import GRPO, PPO, GRPOCfg, PPOCfg
from embodichain.agents.rl.collector import SyncCollector
from embodichain.agents.rl.models import build_policy
from embodichain.agents.rl.models.vla import load_vla_model, save_vla_model
from embodichain.agents.rl.models.vla.loading import saved_config
from embodichain.agents.rl.models.vla.pretrained import read_tensors, weight_files
from embodichain.errors import CheckpointError, ConfigError, RolloutError
from tests.agents.rl.test_smolvla import as_bytes
from tests.agents.rl.vla_cases import language_env

pytestmark = [pytest.mark.extra("vla"), pytest.mark.usefixtures("one_thread")]

FOLDER = Path(__file__).parent / "fixtures" / "openvla"
TASKS = ["Push the red cube", "go"]


def load(folder: Path = FOLDER, **changes: Any) -> Any:
    settings = {**saved_config(folder)["model_config"], "unnorm_key": "first", **changes}
    return load_vla_model(folder, "openvla", settings)


def observation(images: torch.Tensor) -> TensorDict:
    seen = {"image": images.permute(0, 2, 3, 1)}
    return TensorDict({"image": seen, "instruction": as_bytes(TASKS)}, [len(TASKS)])


def check_equal(folder: Path) -> None:
    model, expected = load(folder), load_file(folder / "expected.safetensors")
    obs = observation(expected["images"])
    with torch.no_grad():
        action, log_prob, value, decision = model.decide(obs, deterministic=True)
        again, entropy, _ = model.evaluate_actions(obs, action, decision)
    assert log_prob.shape == again.shape == entropy.shape == (2, 1, 3)
    assert value.shape == (2,)
    torch.testing.assert_close(action, expected["actions"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(log_prob[:, 0], expected["log_probs"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(again, log_prob, rtol=1e-4, atol=1e-4)  # with the cache, and in one pass


def test_it_chooses_what_timm_and_transformers_choose():
    check_equal(FOLDER)


@pytest.mark.skipif("LEROBOT_PYTHON" not in os.environ, reason="needs timm, in an environment of its own")
@pytest.mark.timeout(600)
def test_the_real_libraries_agree(tmp_path):
    script = Path(__file__).with_name("openvla_peer.py")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    command = [os.environ["LEROBOT_PYTHON"], str(script), str(tmp_path / "policy")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    check_equal(tmp_path / "policy")


def test_names_are_those_of_the_public_repository():
    """Prismatic's modules, timm's inside the towers with the layer scale renamed, transformers' inside the Llama."""
    own = {name for name in load().state_dict() if not name.startswith(("head.", "to_value."))}
    for name in (
        "vision_backbone.featurizer.cls_token",
        "vision_backbone.featurizer.reg_token",
        "vision_backbone.featurizer.pos_embed",
        "vision_backbone.featurizer.patch_embed.proj.weight",
        "vision_backbone.featurizer.blocks.0.norm1.weight",
        "vision_backbone.featurizer.blocks.0.attn.qkv.weight",
        "vision_backbone.featurizer.blocks.0.attn.proj.bias",
        "vision_backbone.featurizer.blocks.0.ls1.scale_factor",
        "vision_backbone.featurizer.blocks.0.mlp.fc1.weight",
        "vision_backbone.featurizer.blocks.0.ls2.scale_factor",
        "vision_backbone.fused_featurizer.blocks.1.mlp.fc2.bias",
        "projector.fc1.weight",
        "projector.fc2.weight",
        "projector.fc3.bias",
        "language_model.model.embed_tokens.weight",
        "language_model.model.layers.1.self_attn.q_proj.weight",
        "language_model.model.layers.1.mlp.down_proj.weight",
        "language_model.model.norm.weight",
        "language_model.lm_head.weight",
    ):
        assert name in own, name
    saved = {name for file in weight_files(FOLDER) for name in read_tensors(file)}
    assert own <= saved
    assert all(".blocks.2." in name or ".norm." in name or ".attn_pool." in name for name in saved - own)


def test_bins_are_the_ends_of_the_vocabulary():
    model = load()
    edges = np.linspace(-1.0, 1.0, 16)
    numbers = np.concatenate([edges, np.random.default_rng(0).uniform(-1.2, 1.2, 200)]).astype(np.float32)
    digits = np.digitize(np.clip(numbers, -1.0, 1.0), edges)
    bins = model.tokens(torch.from_numpy(numbers))
    assert bins.tolist() == (digits - 1).tolist()
    middles = (edges[:-1] + edges[1:]) / 2
    expected = torch.from_numpy(middles[np.clip(digits - 1, 0, 14)]).float()
    torch.testing.assert_close(model.numbers(bins), expected)
    actions = torch.rand(9, 3)
    torch.testing.assert_close(model.actions_of(model.chunk_of(actions)), actions)
    assert torch.equal(model.actions_of(torch.zeros(1, 3))[0, 2], torch.tensor(0.0))  # the mask leaves it alone
    embedded = model.language_model.get_input_embeddings().weight
    vocabulary = embedded.shape[0] - 8
    assert torch.equal(model._embed(torch.tensor([0, 15])), embedded[[vocabulary - 1, vocabulary - 16]])


def test_it_learns_by_imitation_and_reinforcement(tmp_path):
    env = language_env(2)
    torch.manual_seed(0)
    vla = {"model_path": str(FOLDER), "model_config": {"unnorm_key": "first"}}
    policy = build_policy({"name": "vla", "vla_config": vla}, env.observation_space, env.action_space, "cpu")
    assert list(policy.model.cfg.cameras) == ["front"]  # the only one
    assert policy.chunk_size == 1
    for algorithm in (
        PPO(PPOCfg(batch_size=100, n_epochs=1, learning_rate=1e-4, log_prob_per="token"), policy),
        GRPO(GRPOCfg(batch_size=100, n_epochs=1, learning_rate=1e-4, group_size=2), policy),
    ):
        before = {name: p.detach().clone() for name, p in policy.named_parameters()}
        collector = SyncCollector(env, policy, start_rollout=algorithm.start_rollout)
        measured = algorithm.update(collector.collect(3))
        assert measured["approx_kl"] == pytest.approx(0.0, abs=1e-6)
        changed = {name.split(".")[1] for name, p in policy.named_parameters() if not torch.equal(p, before[name])}
        assert {"language_model", "projector"} <= changed <= {"language_model", "projector", "to_value"}
    obs = env.reset(seed=0)[0]
    actions = torch.rand(2, 1, 3)
    adam = torch.optim.Adam([p for p in policy.parameters() if p.requires_grad], 1e-3)
    losses = []
    for _ in range(5):
        loss = policy.model.imitation_loss(obs, actions)[0].mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    save_vla_model(policy.model, tmp_path / "mine")
    mine = {"model_path": str(tmp_path / "mine")}
    again = build_policy({"name": "vla", "vla_config": mine}, env.observation_space, env.action_space, "cpu")
    policy.eval()
    again.eval()
    with torch.no_grad():
        assert torch.equal(again.get_action(obs, True)[0], policy.get_action(obs, True)[0])
    env.close()


def copy(tmp_path: Path, **changes: Any) -> Path:
    folder = tmp_path / "copy"
    shutil.copytree(FOLDER, folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return folder


def without(folder: Path, name: str) -> None:
    for file in weight_files(folder):
        weights = load_file(file)
        if weights.pop(name, None) is not None:
            save_file(weights, file)


def reindex(folder: Path, name: str) -> None:
    file = folder / "model.safetensors.index.json"
    content = json.loads(file.read_text())
    content["weight_map"]["projector.fc1.weight"] = name
    file.write_text(json.dumps(content))


def outside(folder: Path) -> None:
    """A shard elsewhere, behind a link, as those of the Hub's cache are."""
    (folder.parent / "outside.safetensors").symlink_to(next(folder.glob("model-00001*")))
    reindex(folder, "../outside.safetensors")


def include(folder: Path, name: str) -> None:
    file = weight_files(folder)[0]
    save_file({**load_file(file), name: torch.zeros(1)}, file)


TEXT = json.loads((FOLDER / "config.json").read_text())["text_config"]
ONE = {"only": {"action": {"q01": [0.0, 0.0], "q99": [1.0, 1.0]}}}


@pytest.mark.parametrize(
    ("changes", "damage", "message"),
    [
        ({"norm_stats": {}}, None, "norm_stats: expected statistics of actions"),
        ({"norm_stats": {"a": {}}}, None, "norm_stats.a.action: expected q01 and q99, got None"),
        (
            {"norm_stats": {"a": {"action": {"q01": [0.0], "q99": [1.0, 2.0]}}}},
            None,
            "norm_stats.a.action: expected numbers of one action, got q01 1, q99 2",
        ),
        ({"timm_model_ids": ["vit_large_patch14_clip_224.openai"] * 3}, None, "expected one or two names"),
        ({"text_config": {"model_type": "phi"}}, None, "text_config.model_type: expected llama, got 'phi'"),
        (
            {"norm_stats": ONE},
            lambda f: without(f, "projector.fc2.bias"),
            r"does not fit OpenVLA: 1 of \d+ entries differ\n  - projector.fc2.bias: missing, expected \[32\]",
        ),
        ({}, lambda f: next(f.glob("model-00001*")).unlink(), "there is no model-00001.*copy the whole checkpoint"),
        ({}, lambda f: (f / "tokenizer.json").unlink(), "there is no tokenizer.json"),
        (
            {"norm_stats": {"a": {"action": {"q01": [0.0], "q99": [1.0], "mask": 5}}}},
            None,
            "norm_stats.a.action.mask: expected a list, got 5",
        ),
        ({}, lambda f: reindex(f, "a\0b.safetensors"), "weight_map: expected names of safetensors files in its folder"),
        ({}, lambda f: reindex(f, "config.json"), "weight_map: .*got 'config.json'"),
        ({}, outside, r"weight_map: .*got '\.\./outside.safetensors'"),
        (
            {"norm_stats": ONE, "text_config": {**TEXT, "attn_implementation": "some/kernel"}},
            None,
            "attn_implementation: 'some/kernel' names code of a repository, which is never run",
        ),
        (
            {"norm_stats": ONE},
            lambda f: include(f, "vision_backbone.featurizer.blocks.x.y"),
            "vision_backbone.featurizer.blocks.x.y: not in the model",
        ),
    ],
)
def test_a_folder_that_does_not_fit_is_one_message(changes, damage, message, tmp_path):
    folder = copy(tmp_path, **changes)
    if damage is not None:
        damage(folder)
    with pytest.raises(CheckpointError, match=message):
        load_vla_model(folder)


def test_the_data_and_the_environment_are_named():
    with pytest.raises(ConfigError, match=r"unnorm_key: expected the data.*statistics of: first, second"):
        load_vla_model(FOLDER)
    with pytest.raises(ConfigError, match=r"unnorm_key: there is no 'frist'.*first, second.*Did you mean 'first'"):
        load(unnorm_key="frist")
    for wrong, message in (
        ({"unnorm_key": 5}, r"unnorm_key: expected[\s\S]*got 5"),
        ({"statistics": "x"}, r"statistics: expected[\s\S]*got 'x'"),
        ({"statistics": {"first": {"q01": [0.0]}}}, "statistics.first: expected q01, q99 and mask of one action"),
        ({"towers": [{"std": [0.0, 1.0, 1.0]}]}, r"towers\.0\.std\.0: expected greater than 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(**wrong)
    camera = gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)
    space = gym.spaces.Dict({"image": gym.spaces.Dict({"a": camera, "b": camera})})
    block = {"name": "vla", "vla_config": {"model_path": str(FOLDER), "model_config": {"unnorm_key": "second"}}}
    with pytest.raises(ConfigError) as caught:
        build_policy(block, space, gym.spaces.Box(-1, 1, (3,)), "cpu")
    for line in (
        "image: there is no camera 'image' among image: a, b; set inputs.image to one of them",
        "instruction: the observations have none",
        "action: the policy chooses 7 numbers, the environment takes 3",
    ):
        assert line in str(caught.value), line


def test_a_decision_of_another_shape_is_named():
    model, images = load(), torch.rand(2, 3, 28, 28)
    with pytest.raises(RolloutError, match=r"expected tokens \[batch, 3\] of this policy, got \[2, 7\]"):
        model.evaluate_actions(observation(images), torch.zeros(2, 3), TensorDict({"tokens": torch.zeros(2, 7)}, [2]))
    with pytest.raises(RolloutError, match="got none"):
        model.evaluate_actions(observation(images), torch.zeros(2, 3))
