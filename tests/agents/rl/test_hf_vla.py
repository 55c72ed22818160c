"""VLAs on a backbone of the transformers library, and LoRA through peft, with small random weights."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from embodichain.agents.rl.algo import PPO, PPOCfg
from embodichain.agents.rl.collector import SyncCollector
from embodichain.agents.rl.models import build_policy
from embodichain.agents.rl.models.vla import load_vla_model, merge_lora, save_vla_model
from embodichain.config import merge
from embodichain.envs.wrappers import chunked
from embodichain.errors import CheckpointError, ConfigError, EmbodiChainError
from tests.agents.rl.vla_cases import language_env, vla_block

pytestmark = pytest.mark.extra("vla")

BACKBONE = {
    "model_type": "smolvlm",
    "scale_factor": 2,
    "image_token_id": 257,
    "vision_config": {
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "image_size": 16,
        "patch_size": 8,
    },
    "text_config": {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "vocab_size": 512,
        "pad_token_id": 0,
        "bos_token_id": 256,
        "eos_token_id": 258,
    },
}
SMALL = {"chunk_size": 2, "backbone": BACKBONE}


@pytest.fixture
def env():
    env = language_env(2)
    yield env
    env.close()


def hf_policy(env: Any, lora: dict[str, Any] | None = None, **settings: Any) -> Any:
    block = vla_block("hf_vlm", **{**SMALL, **settings})
    if lora is not None:
        block["vla_config"]["lora"] = lora
    torch.manual_seed(0)
    return build_policy(block, env.observation_space, env.action_space, "cpu")


def changed(before: dict[str, torch.Tensor], policy: torch.nn.Module) -> set[str]:
    return {name for name, value in policy.named_parameters() if not torch.equal(value.detach(), before[name])}


def train_once(env: Any, policy: Any) -> dict[str, torch.Tensor]:
    """One PPO update; return the parameters as they were before."""
    before = {name: value.detach().clone() for name, value in policy.named_parameters()}
    collector = SyncCollector(chunked(env, policy.chunk_size), policy, "cpu")
    algorithm = PPO(PPOCfg(batch_size=4, n_epochs=1, learning_rate=1e-3), policy)
    losses = algorithm.update(collector.collect(4))
    assert all(torch.isfinite(torch.tensor(value)) for value in losses.values())
    return before


def test_a_backbone_decides_and_values_its_decisions_again(env):
    policy = hf_policy(env)
    obs, _ = env.reset()
    action, log_prob, value = policy.get_action(obs)
    assert (action.shape, log_prob.shape, value.shape) == ((2, 2, env.action_space.shape[-1]), (2, 2), (2,))
    again, entropy, same_value = policy.evaluate_actions(obs, action)
    torch.testing.assert_close(again, log_prob, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(same_value, value, rtol=1e-4, atol=1e-5)
    assert entropy.shape == (2, 2)


@pytest.mark.parametrize("head", ["flow", "tokens"])
def test_a_backbone_with_another_head_is_trained(env, head):
    small = {"flow": {"num_steps": 2}, "velocity_sizes": [32], "tokens": {"width": 16, "num_heads": 2, "num_bins": 8}}
    policy = hf_policy(env, head=head, **small)
    obs, _ = env.reset()
    action, log_prob, _, decision = policy.decide(obs)
    torch.testing.assert_close(policy.evaluate_actions(obs, action, decision)[0], log_prob, rtol=1e-3, atol=1e-3)
    names = changed(train_once(env, policy), policy)
    assert any("backbone.text_model" in name for name in names)
    assert any("action_head" in name for name in names)


def test_padding_of_a_short_instruction_changes_nothing(env):
    """The mask hides padding, so only what the bytes say may matter."""
    policy = hf_policy(env).eval()
    obs, _ = env.reset()
    other = obs.clone()
    other["instruction"] = other["instruction"].flip(0)
    mean = policy.get_action(obs, deterministic=True)[0]
    swapped = policy.get_action(other, deterministic=True)[0]
    if torch.equal(obs["instruction"][0], obs["instruction"][1]):
        torch.testing.assert_close(mean, swapped)
    else:
        assert not torch.allclose(mean, swapped, atol=1e-7)


def test_ppo_trains_backbone_and_heads(env):
    policy = hf_policy(env)
    names = changed(train_once(env, policy), policy)
    assert any("backbone.text_model" in name for name in names)
    assert any("backbone.vision_model" in name for name in names)
    assert any("to_value" in name for name in names)


def test_frozen_parts_stay_as_they_are(env):
    policy = hf_policy(env, freeze=["vision", "language"])
    names = changed(train_once(env, policy), policy)
    assert names
    assert not any("backbone" in name for name in names)


def test_lora_trains_additions_and_heads_alone_and_merges_into_an_ordinary_model(env):
    policy = hf_policy(env, lora={"rank": 2, "alpha": 4.0, "target_modules": ["q_proj", "v_proj"]})
    plain = hf_policy(env)
    obs, _ = env.reset()
    torch.testing.assert_close(
        policy.get_action(obs, deterministic=True)[0], plain.get_action(obs, deterministic=True)[0]
    )
    names = changed(train_once(env, policy), policy)
    assert any("lora_" in name for name in names)
    assert not any("backbone" in name and "lora_" not in name for name in names)
    policy.eval()
    before = policy.get_action(obs, deterministic=True)[0]
    merge_lora(policy.model)
    assert set(policy.model.state_dict()) == set(plain.model.state_dict())
    torch.testing.assert_close(policy.get_action(obs, deterministic=True)[0], before, rtol=1e-4, atol=1e-5)


def test_dropout_of_backbone_and_additions_is_off_while_ratios_are_computed(env):
    parts = {"vision_config": {"attention_dropout": 0.2}, "text_config": {"attention_dropout": 0.2}}
    lora = {"rank": 2, "target_modules": ["q_proj", "v_proj"], "dropout": 0.2}
    policy = hf_policy(env, lora=lora, backbone=merge(BACKBONE, parts), init_log_std=-3.0)
    obs, _ = env.reset()
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name or "to_action.weight" in name:
                parameter.normal_(0.0, 0.5)
    mean = policy.get_action(obs, deterministic=True)[0]
    assert not torch.equal(policy.get_action(obs, deterministic=True)[0], mean)  # there is dropout, for imitation
    collector = SyncCollector(chunked(env, policy.chunk_size), policy, "cpu")
    algorithm = PPO(PPOCfg(batch_size=4, n_epochs=1, learning_rate=1e-30), policy)
    metrics = algorithm.update(collector.collect(4))
    assert metrics["approx_kl"] < 1e-4
    assert metrics["clip_fraction"] == 0.0


def test_lora_names_the_layers_there_are(env):
    with pytest.raises(ConfigError, match=r"no linear layer ends in 'nope'.*q_proj"):
        hf_policy(env, lora={"target_modules": ["nope"]})


def test_a_saved_model_is_read_back(env, tmp_path: Path):
    policy = hf_policy(env).eval()
    folder = save_vla_model(policy.model, tmp_path / "vla")
    loaded = load_vla_model(folder)
    obs, _ = env.reset()
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), policy.model.parameters(), strict=True))
    torch.testing.assert_close(loaded(obs, True)[0], policy.get_action(obs, deterministic=True)[0])


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    """The folder of a small backbone with a tokenizer, as transformers saves both."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    folder, settings = tmp_path / "pretrained", dict(BACKBONE)
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(1)
    transformers.AutoModel.from_config(config).save_pretrained(folder)
    words = Tokenizer(WordLevel({"[UNK]": 0, "push": 1, "red": 2, "blue": 3, "goal": 4}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(folder)
    return folder


def from_folder(env: Any, folder: Path, **settings: Any) -> Any:
    return hf_policy(env, backbone=None, backbone_path=str(folder), **settings)


def test_a_pretrained_folder_gives_its_weights(env, pretrained: Path):
    from safetensors.torch import load_file

    policy = from_folder(env, pretrained)
    ours = policy.model.backbone.state_dict()
    assert all(torch.equal(ours[name], value) for name, value in load_file(pretrained / "model.safetensors").items())
    obs, _ = env.reset()
    assert torch.isfinite(policy.get_action(obs)[0]).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_model_is_whole_without_the_folder_of_its_backbone(env, pretrained: Path, tmp_path: Path, dtype: str):
    policy = from_folder(env, pretrained, dtype=dtype).eval()
    obs, _ = env.reset()
    expected = policy.get_action(obs, deterministic=True)[0]
    first = save_vla_model(policy.model, tmp_path / "first")
    shutil.rmtree(pretrained)
    loaded = load_vla_model(first)
    assert torch.equal(loaded(obs, True)[0], expected)
    assert loaded.words.tokenizer("push red")["input_ids"] == [1, 2]
    moved = save_vla_model(loaded, tmp_path / "second").rename(tmp_path / "moved")
    shutil.rmtree(first)
    assert torch.equal(load_vla_model(moved)(obs, True)[0], expected)
    block = {"name": "vla", "vla_config": {"model_path": str(moved)}}
    again = build_policy(block, env.observation_space, env.action_space, "cpu").eval()
    assert torch.equal(again.get_action(obs, deterministic=True)[0], expected)


def test_a_saved_model_keeps_its_low_rank_parts(env, pretrained: Path, tmp_path: Path):
    lora = {"rank": 2, "alpha": 4.0, "target_modules": ["q_proj", "v_proj"]}
    policy = from_folder(env, pretrained, lora=lora)
    train_once(env, policy)
    policy.eval()
    obs, _ = env.reset()
    expected = policy.get_action(obs, deterministic=True)[0]
    folder = save_vla_model(policy.model, tmp_path / "vla")
    shutil.rmtree(pretrained)
    loaded = load_vla_model(folder)
    assert torch.equal(loaded(obs, True)[0], expected)
    trained = {name for name, value in policy.model.named_parameters() if value.requires_grad}
    assert {name for name, value in loaded.named_parameters() if value.requires_grad} == trained
    block = {"name": "vla", "vla_config": {"model_path": str(folder), "lora": lora}}
    again = build_policy(block, env.observation_space, env.action_space, "cpu").eval()
    assert torch.equal(again.get_action(obs, deterministic=True)[0], expected)
    block["vla_config"]["lora"] = {**lora, "rank": 3}
    with pytest.raises(ConfigError, match="rank 2"):
        build_policy(block, env.observation_space, env.action_space, "cpu")
    merged = save_vla_model(merge_lora(loaded), tmp_path / "merged")
    torch.testing.assert_close(load_vla_model(merged)(obs, True)[0], expected, rtol=1e-4, atol=1e-5)


def test_files_of_a_saved_model_are_looked_for_inside_its_folder(env, pretrained: Path, tmp_path: Path):
    folder = save_vla_model(from_folder(env, pretrained).model, tmp_path / "vla")
    about = json.loads((folder / "config.json").read_text())
    for outside in ("../pretrained", str(pretrained), 7):
        (folder / "config.json").write_text(json.dumps({**about, "files": {"backbone_path": outside}}))
        with pytest.raises(CheckpointError, match="inside the folder"):
            load_vla_model(folder)


def test_a_backbone_without_a_tokenizer_gets_one_line(env, pretrained: Path):
    for file in pretrained.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer.*save_pretrained") as caught:
        from_folder(env, pretrained)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("config.json", "{"),
        ("config.json", "[1]"),
        ("model.safetensors", "no weights"),
        ("tokenizer.json", "{"),
        ("tokenizer_config.json", "{"),
    ],
)
def test_a_damaged_backbone_gets_one_line(env, pretrained: Path, file: str, damage: str):
    (pretrained / file).write_text(damage)
    with pytest.raises(CheckpointError, match="pretrained") as caught:
        from_folder(env, pretrained)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("model_type", ["smolvlm", "of_its_own"])
def test_code_in_the_folder_of_a_backbone_is_never_run(env, pretrained: Path, monkeypatch, file: str, model_type: str):
    """Somebody says yes to whatever is asked: nothing is, and the code leaves no trace."""
    marker = pretrained.parent / "marker"
    names = ("AutoConfig", "AutoModel", "AutoTokenizer", "AutoProcessor")
    classes = "".join(f"class {name}:\n    pass\n" for name in names)
    (pretrained / "code.py").write_text(f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n{classes}")
    config = {**json.loads((pretrained / "config.json").read_text()), "model_type": model_type}
    (pretrained / "config.json").write_text(json.dumps(config))
    settings = json.loads((pretrained / file).read_text())
    code = {name: ["code.AutoTokenizer", None] if name == "AutoTokenizer" else f"code.{name}" for name in names}
    (pretrained / file).write_text(json.dumps({**settings, "auto_map": code}))
    answers = io.StringIO("y\n" * 10)
    monkeypatch.setattr("sys.stdin", answers)
    with pytest.raises(EmbodiChainError) as caught:
        from_folder(env, pretrained)
    assert "\n" not in str(caught.value)
    assert not marker.exists()
    if model_type == "smolvlm":
        assert f"{file} names code" in str(caught.value)
    assert answers.tell() == 0  # nobody asked


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"backbone": None}, "either backbone"),
        ({"backbone_path": "nowhere"}, "either backbone"),
        ({"backbone": None, "backbone_path": "nowhere"}, "config.json"),
        ({"backbone": {**BACKBONE, "model_type": "smolvml"}}, "smolvlm"),
    ],
)
def test_wrong_settings_are_refused_with_what_to_do(env, settings, words):
    with pytest.raises(EmbodiChainError, match=words):
        hf_policy(env, **settings)
