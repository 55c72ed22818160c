"""SmolVLA as LeRobot saves it: the same actions and losses, policies for an environment, and folders that do not fit.

``fixtures/smolvla`` was written by LeRobot itself (``smolvla_peer.py``). With ``LEROBOT_PYTHON``, the Python of an
environment that has lerobot, other variants are built and compared, too: ``make test-lerobot``.
"""

from __future__ import annotations

import json
import math
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
from embodichain.envs.wrappers import chunked
from embodichain.errors import CheckpointError, ConfigError, RolloutError
from tests.agents.rl.vla_cases import CAMERA, language_env

pytestmark = [pytest.mark.extra("vla"), pytest.mark.usefixtures("one_thread")]

FOLDER = Path(__file__).parent / "fixtures" / "smolvla"
TINY_SETTINGS = {"cameras": {"front": (16, 16, 3)}, "proprio": {}, "instruction_length": 8, "action_dim": 3}
TASKS = ["push the red cube", "go", "push the cube to the blue goal\n"]


def as_bytes(texts: list[str], length: int = 48) -> torch.Tensor:
    rows = [list(text.encode()) + [0] * (length - len(text.encode())) for text in texts]
    return torch.tensor(rows, dtype=torch.uint8)


def observation(expected: dict[str, torch.Tensor]) -> TensorDict:
    """What the environment would show where LeRobot was shown ``expected``."""
    images = {key[19:]: value.permute(0, 2, 3, 1) for key, value in expected.items() if ".images." in key}
    state = {"qpos": expected["observation.state"]}
    return TensorDict({"image": images, "robot": state, "instruction": as_bytes(TASKS)}, [len(TASKS)])


def check_equal(folder: Path) -> None:
    """Compare actions from the same noise, and losses at the same time and noise, with what LeRobot wrote."""
    expected = load_file(folder / "expected.safetensors")
    for chunk in (3, 5):  # fewer actions than the checkpoint chooses are the first of them
        model = load_vla_model(folder, "smolvla", {**settings_of(folder), "chunk_size": chunk})
        obs, noise = observation(expected), expected["noise"][:, :chunk]
        with torch.no_grad():
            features = model.decode(obs).features
            x = noise
            for step in range(model.cfg.flow.num_steps):
                x = model.action_head.transition(features, x, torch.full((len(TASKS),), step))[0]
            actions = model.actions_of(x)
            time, target = expected["time"], model.chunk_of(expected["target"][:, :chunk])
            t = time.view(-1, 1, 1)
            velocity = model.action_head.velocity(features, t * noise + (1 - t) * target, 1.0 - time)
        assert float(actions.std()) > 0.1
        torch.testing.assert_close(actions, expected["actions"][:, :chunk], rtol=1e-4, atol=1e-4)
        loss = (velocity - (target - noise)).square()
        torch.testing.assert_close(loss, expected["loss"][:, :chunk], rtol=1e-4, atol=1e-4)


def settings_of(folder: Path) -> dict[str, Any]:
    from embodichain.agents.rl.models.vla.loading import saved_config

    return saved_config(folder)["model_config"]


def test_it_chooses_the_actions_that_lerobot_chooses():
    check_equal(FOLDER)


@pytest.mark.skipif("LEROBOT_PYTHON" not in os.environ, reason="needs lerobot, in an environment of its own")
@pytest.mark.timeout(600)
def test_the_real_lerobot_agrees(tmp_path):
    variants = ["plain", "special", "shallow", "selves"]
    command = [os.environ["LEROBOT_PYTHON"], str(Path(__file__).with_name("smolvla_peer.py")), str(tmp_path), *variants]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    for variant in variants:
        check_equal(tmp_path / variant)


def two_cameras(num_envs: int = 2) -> Any:
    cameras = [CAMERA, {**CAMERA, "name": "wrist", "pos": [0.9, 0.3, 0.75]}]
    return language_env(num_envs, env={"observations": {"cameras": cameras}})


def block(folder: Path = FOLDER, vla: dict[str, Any] | None = None, **model_config: Any) -> dict[str, Any]:
    settings = {"model_path": str(folder), "model_config": model_config, **(vla or {})}
    return {"name": "vla", "vla_config": settings}


@pytest.fixture(scope="module")
def env():
    env = two_cameras()
    yield env
    env.close()


def test_a_folder_becomes_a_policy_that_learns(env, tmp_path):
    torch.manual_seed(0)
    policy = build_policy(block(flow={"num_steps": 2}), env.observation_space, env.action_space, "cpu")
    assert policy.chunk_size == 3  # n_action_steps
    assert policy.model.cfg.flow.num_steps == 2
    assert list(policy.model.cfg.cameras) == ["front", "wrist"]
    trained = {name.split(".")[1] for name, p in policy.named_parameters() if p.requires_grad}
    assert trained == {"action_head", "state_proj", "to_value"}  # train_expert_only
    for algorithm in (
        PPO(PPOCfg(batch_size=100, n_epochs=1, learning_rate=1e-4, log_prob_per="denoising_step"), policy),
        GRPO(GRPOCfg(batch_size=100, n_epochs=1, learning_rate=1e-4, group_size=2, kl_coef=0.1), policy),
    ):
        collector = SyncCollector(chunked(env, 3), policy, start_rollout=algorithm.start_rollout)
        before = {name: p.detach().clone() for name, p in policy.named_parameters()}
        measured = algorithm.update(collector.collect(2))
        assert measured["approx_kl"] == pytest.approx(0.0, abs=1e-6)
        changed = {name.split(".")[1] for name, p in policy.named_parameters() if not torch.equal(p, before[name])}
        assert {"action_head", "state_proj"} <= changed <= {"action_head", "state_proj", "to_value"}
    obs = env.reset(seed=0)[0]
    loss = policy.model.imitation_loss(obs, torch.zeros(2, 3, 3), generator=torch.Generator().manual_seed(0))[0]
    assert loss.shape == (2,)
    assert bool(loss.isfinite().all())
    save_vla_model(policy.model, tmp_path / "mine")
    again = build_policy(block(tmp_path / "mine"), env.observation_space, env.action_space, "cpu")
    with torch.no_grad():
        torch.testing.assert_close(
            again.get_action(obs, deterministic=True)[0], policy.get_action(obs, deterministic=True)[0]
        )
    assert not any("fixtures" in str(value) for value in again.model.cfg.to_dict().values())  # the folder is whole


def test_lora_trains_what_it_adds_and_the_expert(env):
    lora = {"rank": 2, "target_modules": ["q_proj"]}
    policy = build_policy(block(vla={"lora": lora}), env.observation_space, env.action_space, "cpu")
    trained = [name for name, p in policy.named_parameters() if p.requires_grad]
    assert any("text_model" in name and "lora" in name for name in trained)
    assert not any("text_model" in name and "lora" not in name for name in trained)
    assert any("action_out_proj" in name for name in trained)


def test_it_is_matched_by_name_and_all_that_is_missing_is_listed():
    space = gym.spaces.Dict(
        {
            "image": gym.spaces.Dict({"top": gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)}),
            "robot": gym.spaces.Dict({"qpos": gym.spaces.Box(-1, 1, (7,)), "grip": gym.spaces.Box(-1, 1, (2,))}),
        }
    )
    action = gym.spaces.Box(-1, 1, (7,))
    with pytest.raises(ConfigError) as caught:
        build_policy(block(chunk_size=9, inputs={"observation.images.frnt": "top"}), space, action, "cpu")
    text = str(caught.value)
    for line in (
        "inputs.observation.images.frnt: the policy does not expect it. Did you mean 'observation.images.front'",
        "observation.images.front: there is no camera 'front' among image: top; set inputs.observation.images.front",
        "observation.images.wrist: there is no camera 'wrist' among image: top",
        "observation.state: the policy expects 6 numbers, robot/qpos has 7; set inputs.observation.state to vectors of",
        "vectors of: robot/grip (2), robot/qpos (7)",
        "instruction: the observations have none; set model_config.instruction",
        "action: the policy chooses 3 numbers, the environment takes 7",
        "chunk_size: the policy chooses at most 5 actions at a time, got 9",
    ):
        assert line in text, line
    with pytest.raises(ConfigError, match="cameras: a pretrained policy expects inputs of its own"):
        build_policy(block(cameras=["top"]), space, action, "cpu")

    camera = gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)
    fitting = gym.spaces.Dict(
        {
            "image": gym.spaces.Dict({"top": camera, "hand": camera}),
            "arm": gym.spaces.Dict({"angles": gym.spaces.Box(-1, 1, (4,)), "grip": gym.spaces.Box(-1, 1, (2,))}),
        }
    )
    inputs = {
        "observation.images.front": "image/hand",
        "observation.images.wrist": "top",
        "observation.state": ["arm/grip", "arm/angles"],
    }
    model = build_policy(block(inputs=inputs, instruction="go"), fitting, gym.spaces.Box(-1, 1, (3,)), "cpu").model
    assert list(model.cfg.cameras) == ["hand", "top"]
    assert dict(model.cfg.proprio) == {"arm/grip": 2, "arm/angles": 4}
    inputs["observation.images.wrist"] = None  # as LeRobot, it does without an image
    one = build_policy(block(inputs=inputs, instruction="go"), fitting, gym.spaces.Box(-1, 1, (3,)), "cpu").model
    assert list(one.cfg.cameras) == ["hand"]
    none = dict.fromkeys(("observation.images.front", "observation.images.wrist"))
    with pytest.raises(ConfigError, match="every image is left out"):
        build_policy(block(inputs={**inputs, **none}), fitting, gym.spaces.Box(-1, 1, (3,)), "cpu")
    images = {name: torch.randint(0, 256, (2, 8, 8, 3), dtype=torch.uint8) for name in ("top", "hand")}
    seen = TensorDict({"image": images, "arm": {"angles": torch.randn(2, 4), "grip": torch.randn(2, 2)}}, [2])
    with torch.no_grad():
        same = model.decode(seen).features["state"]
        model.cfg.instruction = "push"
        assert not torch.equal(model.decode(seen).features["state"], same)
    assert math.isfinite(float(same.sum()))


def copy(tmp_path: Path, **changes: Any) -> Path:
    folder = tmp_path / "copy"
    shutil.copytree(FOLDER, folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return folder


def rewrite(file: Path, change) -> None:
    weights = load_file(file)
    change(weights)
    save_file(weights, file)


def edit(file: Path, place: tuple[Any, ...], value: Any) -> None:
    content = json.loads(file.read_text())
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda f: rewrite(f / "model.safetensors", lambda w: w.pop("model.state_proj.bias")),
            "state_proj.bias: missing",
        ),
        (
            lambda f: rewrite(f / "model.safetensors", lambda w: w.update({"model.new.weight": torch.zeros(1)})),
            "model.new.weight: not in the model",
        ),
        (
            lambda f: rewrite(
                f / "model.safetensors", lambda w: w.update({"model.action_in_proj.weight": torch.zeros(2, 2)})
            ),
            r"action_in_proj.weight: expected \[12, 6\], got \[2, 2\]",
        ),
        (
            lambda f: rewrite(
                f / "policy_preprocessor_step_5_normalizer_processor.safetensors",
                lambda w: w.update({"observation.state.mean": torch.zeros(9)}),
            ),
            "observation.state: expected statistics of 6 numbers, as the config says, got 9 and 6",
        ),
        (
            lambda f: rewrite(
                f / "policy_postprocessor_step_0_unnormalizer_processor.safetensors", lambda w: w.pop("action.std")
            ),
            "action is normalised by MEAN_STD, and std of it are not there: save the policy's processors",
        ),
        (lambda f: (f / "policy_preprocessor.json").unlink(), "mean and std of it are not there"),
        (lambda f: (f / "model.safetensors").unlink(), r"there is no model.safetensors; copy the whole checkpoint"),
        (lambda f: (f / "model.safetensors").write_bytes(b"no"), "model.safetensors cannot be read"),
        (lambda f: shutil.rmtree(f / "backbone"), "set model_config.backbone_path"),
        (lambda f: (f / "config.json").write_text('{"type": "act"}'), "config of a 'act'.*smolvla"),
        (
            lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
            "pytorch_model.bin is not read, as pickled files can run code",
        ),
        (
            lambda f: rewrite(
                f / "model.safetensors", lambda w: w.update({"model.state_proj.bias": torch.zeros(16).char()})
            ),
            "state_proj.bias: expected floating-point numbers, got torch.int8",
        ),
        (
            lambda f: rewrite(
                f / "policy_postprocessor_step_0_unnormalizer_processor.safetensors",
                lambda w: w.update({"action.mean": torch.full((3,), math.nan)}),
            ),
            "action: expected finite statistics, got NaN",
        ),
        (lambda f: edit(f / "policy_preprocessor.json", ("steps", 5, "config", "eps"), "x"), "eps: expected.*got 'x'"),
        (
            lambda f: edit(f / "policy_preprocessor.json", ("steps", 5, "config"), []),
            "config: expected dict, got",
        ),
        (
            lambda f: edit(f / "backbone" / "config.json", ("text_config", "model_type"), "gpt2"),
            "text_config.model_type: expected llama, got 'gpt2'",
        ),
        (
            lambda f: edit(f / "backbone" / "config.json", ("text_config", "attn_implementation"), "some/kernel"),
            "attn_implementation: 'some/kernel' names code of a repository, which is never run",
        ),
        (lambda f: (f / "config.json").write_text('{"type": "smolvla"}'), "input_features is missing"),
    ],
)
def test_a_folder_that_does_not_fit_is_one_message(damage, message, tmp_path):
    folder = copy(tmp_path)
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        load_vla_model(folder)


def test_a_network_that_does_not_fit_into_memory_is_refused_before_it_is_filled(tmp_path, env):
    folder = copy(tmp_path, expert_width_multiplier=1e6)
    with pytest.raises(ConfigError, match="does not fit into the memory there is"):
        load_vla_model(folder)
    with pytest.raises(ConfigError, match=r"inputs: expected[\s\S]*got 'front'"):
        build_policy(block(inputs="front"), env.observation_space, env.action_space, "cpu")
    with pytest.raises(ConfigError, match=r"inputs.observation.state[\s\S]*got 5"):
        load_vla_model(FOLDER, "smolvla", {**settings_of(FOLDER), "inputs": {"observation.state": 5}})


def test_policies_it_cannot_reproduce_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="adapt_to_pi_aloha"):
        load_vla_model(copy(tmp_path / "aloha", adapt_to_pi_aloha=True))
    with pytest.raises(CheckpointError, match="policies whose images are normalised are not read"):
        load_vla_model(copy(tmp_path / "images", normalization_mapping={"VISUAL": "MEAN_STD"}))
    (tmp_path / "run").mkdir()
    shutil.copytree(FOLDER, tmp_path / "run" / "pretrained_model")
    with pytest.raises(CheckpointError, match=r"Did you mean .*run/pretrained_model\?"):
        load_vla_model(tmp_path / "run", "tiny_vla", TINY_SETTINGS)
    with pytest.raises(
        ConfigError, match=r"model_class: .*holds a policy of type 'smolvla', got 'tiny_vla'; leave it out"
    ):
        load_vla_model(FOLDER, "tiny_vla")
    with pytest.raises(ConfigError, match=r"head[\s\S]*flow"):
        load_vla_model(FOLDER, "smolvla", {**settings_of(FOLDER), "head": "gaussian"})


def test_a_backbone_in_half_precision_chooses_nearly_the_same():
    expected = load_file(FOLDER / "expected.safetensors")
    chosen = []
    for dtype in ("float32", "bfloat16"):
        model = load_vla_model(FOLDER, "smolvla", {**settings_of(FOLDER), "dtype": dtype})
        model.action_head.start.copy_(expected["noise"][0, :3])
        with torch.no_grad():
            chosen.append(model(observation(expected), deterministic=True)[0])
    assert model.vlm.text_model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert chosen[1].dtype == torch.float32
    torch.testing.assert_close(chosen[1], chosen[0], rtol=0.1, atol=0.1)


def test_statistics_of_older_releases_lie_among_the_weights(tmp_path):
    folder = copy(tmp_path)
    (mean, std), (low, high) = torch.randn(2, 6), torch.randn(2, 3)
    for name in ("pre", "post"):
        (folder / f"policy_{name}processor.json").unlink()
    old = {
        "normalize_inputs.buffer_observation_state.mean": mean,
        "normalize_inputs.buffer_observation_state.std": std,
        "unnormalize_outputs.buffer_action.mean": low,
        "unnormalize_outputs.buffer_action.std": high,
    }
    rewrite(folder / "model.safetensors", lambda w: w.update({k: v.clone() for k, v in old.items()}))
    model = load_vla_model(folder)
    torch.testing.assert_close(model.state_offset, mean)
    torch.testing.assert_close(model.action_scale, high)


def test_a_decision_of_another_shape_is_named(env):
    policy = build_policy(block(), env.observation_space, env.action_space, "cpu")
    obs = env.reset(seed=0)[0]
    wrong = TensorDict({"chain": torch.zeros(2, 4, 5, 6)}, [2])
    with pytest.raises(RolloutError, match=r"expected a chain \[batch, 4, 3, 6\] of this policy, got \[2, 4, 5, 6\]"):
        policy.evaluate_actions(obs, torch.zeros(2, 3, 3), wrong)
