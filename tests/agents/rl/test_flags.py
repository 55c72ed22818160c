"""Flags: every field of a training config is one with a help text, and all problems are reported at once."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from embodichain.agents.imitation.config import load_imitate_config
from embodichain.agents.rl.algo.base import ALGORITHMS
from embodichain.agents.rl.arguments import SWITCHES, parse_args
from embodichain.agents.rl.config import TrainCfg, load_train_config, override, schemas_of
from embodichain.agents.rl.models import ActorCritic, ActorCriticCfg, Policy
from embodichain.agents.rl.models.registry import POLICIES, arguments_of
from embodichain.config.command_line import flags_of
from embodichain.errors import ConfigError, UntrustedModuleError
from tests.agents.rl.training_cases import write_config


@pytest.mark.parametrize(
    ("words", "path", "value"),
    [
        (["--policy.critic_obs", "object"], ("policy", "critic_obs"), ["object"]),
        (["--policy.memory.type", "lstm"], ("policy", "memory"), {"type": "lstm"}),
        (["--policy.actor.network_cfg.hidden_sizes", "8", "8"], ("policy", "actor", "network_cfg"), None),
        (["--trainer.gym_config.max_episode_steps", "7"], ("trainer", "gym_config", "max_episode_steps"), 7),
        (["--trainer.gym_config.kwargs.render_mode", "human"], ("trainer", "gym_config", "kwargs"), None),
        (["--trainer.eval_gym_config.seed", "3"], ("trainer", "eval_gym_config"), {"seed": 3}),
        (["--algorithm.cfg.target_kl", "0.1"], ("algorithm", "cfg", "target_kl"), 0.1),
    ],
)
def test_fields_that_the_file_does_not_have_are_flags(tmp_path, words, path, value):
    file = tmp_path / "c.json"
    block = {"gym_config": "Pendulum-v1", "iterations": 1}
    file.write_text(json.dumps({"trainer": block, "policy": {"name": "actor_critic"}}))
    found: Any = override(load_train_config(file), words).to_dict()
    for key in path:
        found = found[key]
    assert value is None or found == value


def test_help_tells_meaning_range_choices_and_default_of_every_field(tmp_path, capsys):
    config = write_config(tmp_path / "c.json", tmp_path / "run")
    with pytest.raises(SystemExit):
        override(load_train_config(config), ["--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for part in (
        "--algorithm.cfg.learning_rate FLOAT Learning rate of Adam",
        "--algorithm.cfg.gamma FLOAT Discount per environment step. (0 to 1; default: 0.99)",
        "--algorithm.cfg.lr_schedule {constant,linear,adaptive} Learning rate: constant",
        "--policy.memory.type {gru,lstm} Kind of layer. (default: 'gru')",
        "--policy.normalize_obs [true|false] Whether vector observations",
        "--trainer.gym_config.env.substeps INT Physics steps per environment step. (1 to 1000;",
    ):
        assert part in shown
    blank = [part.split()[0] for part in shown.split(" --")[1:] if re.match(r"\S+ \S+ \((now|default|unset)", part)]
    assert blank == []


def shown_help(name, capsys):
    """Return the entries of the help of a shipped config, by flag."""
    with pytest.raises(SystemExit):
        override(load_train_config(name), ["--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    return {part.split()[0]: part for part in re.split(r" (?=--(?:trainer|policy|algorithm)\.)", shown)[1:]}


@pytest.mark.parametrize("name", ["press_button", "push_around", "push_cube/train_config_vla"])
def test_help_tells_the_meaning_of_entries_too(name, capsys):
    """Entries of mappings and lists, fixtures of several kinds, and settings of a model that the block names."""
    file = name if "/" in name else f"{name}/train_config"
    shown = shown_help(f"configs/agents/rl/{file}.json", capsys)
    blank = [part for part in shown.values() if re.match(r"\S+ \S+ \((now|default|unset)", part)]
    assert blank == []


def test_help_tells_the_types_of_fixtures_and_of_a_models_settings(capsys):
    shown = shown_help("PressButtonRL", capsys)
    panel = "--trainer.gym_config.env.scene.fixtures.panel"
    assert shown[f"{panel}.damping"].startswith(f"{panel}.damping FLOAT ")
    assert "(at least 0; default: 12.0)" in shown[f"{panel}.damping"]
    assert shown[f"{panel}.kind"].startswith(f"{panel}.kind {{button}} ")
    assert shown[panel].startswith(f"{panel} YAML Entry of fixtures: ")
    assert "rewards.weights.press FLOAT Entry of weights: " in shown["--trainer.gym_config.env.rewards.weights.press"]
    shown = shown_help("configs/agents/rl/push_cube/train_config_vla.json", capsys)
    model = "--policy.vla_config.model_config"
    assert shown[f"{model}.chunk_size"].startswith(f"{model}.chunk_size INT ")
    assert shown[f"{model}.head"].startswith(f"{model}.head {{gaussian,flow,tokens}} ")


def test_help_names_the_algorithms_and_policies_that_there_are(capsys):
    shown = shown_help("CartPoleRL", capsys)
    for registry, flag in ((ALGORITHMS, "--algorithm.name"), (POLICIES, "--policy.name")):
        own = [name for name in registry.names() if registry.get(name).__module__.startswith("embodichain.")]
        assert len(own) > 2
        assert all(name in shown[flag] for name in own)


def test_a_models_shapes_are_flags_as_they_are_in_a_file():
    config = load_train_config("configs/agents/rl/push_cube/train_config_vla.json")
    words = ["--policy.vla_config.model_config.cameras", "[front]", "--policy.vla_config.model_config.depth", "3"]
    found = override(config, words).policy["vla_config"]["model_config"]
    assert (found["cameras"], found["depth"]) == (["front"], 3)
    with pytest.raises(ConfigError, match=r"model_config\.dept: unknown flag. Did you mean .*model_config\.depth"):
        override(config, ["--policy.vla_config.model_config.dept", "3"])
    other = ["--policy.vla_config.model_class", "hf_vlm", "--policy.vla_config.model_config.backbone_path", "there"]
    assert override(config, other).policy["vla_config"]["model_config"]["backbone_path"] == "there"


def test_flags_of_the_environment_that_the_trainer_overrides_are_refused(tmp_path):
    cfg = load_train_config(write_config(tmp_path / "c.json", tmp_path / "run"))
    words = ["--trainer.gym_config.seed", "3", "--trainer.gym_config.num_envs", "4"]
    with pytest.raises(ConfigError) as caught:
        override(cfg.replace(trainer=cfg.trainer.replace(num_envs=2)), words)
    assert [problem.partition(": ")[2] for problem in caught.value.problems] == [
        "trainer.seed decides. Use --trainer.seed 3",
        "trainer.num_envs decides. Use --trainer.num_envs 4",
    ]
    free = cfg.replace(trainer=cfg.trainer.replace(num_envs=None))
    assert override(free, words[2:]).trainer.num_envs == 4


def test_all_problems_of_a_config_are_told_at_once(tmp_path):
    file = tmp_path / "c.json"
    broken = {
        "trainer": {"gym_config": {"id": "CartPoleRL", "num_env": 3}, "seeed": 1, "iterations": 0},
        "policy": {"name": "actor_critic", "normalise_obs": True, "actor": {"hidden_sizes": [0]}},
        "algorithm": {"cfg": {"lr": 1e-3, "gamma": 2.0, "ent": 0.1, "clip": 0.2}},
    }
    file.write_text(json.dumps(broken))
    parts = ["seeed", "iterations", "num_env", "normalise_obs", r"actor\.hidden_sizes\.0", "lr", "gamma", "ent", "clip"]
    with pytest.raises(ConfigError) as caught:
        load_train_config(file)
    told = "\n".join(caught.value.problems)
    assert all(re.search(rf"\b{part}: ", told) for part in parts), told
    assert "algorithm.cfg.lr: unknown key, got 0.001 (float). Did you mean 'learning_rate'" in told
    assert "'ent_coef'" in told
    assert "'clip_coef'" in told
    del broken["trainer"]["seeed"], broken["trainer"]["iterations"]
    file.write_text(json.dumps(broken))
    with pytest.raises(ConfigError) as caught:
        load_train_config(file)
    assert len(caught.value.problems) == len(parts) - 2


def test_an_unknown_environment_is_told_with_the_other_problems(tmp_path):
    file = tmp_path / "c.json"
    broken: dict[str, Any] = {
        "trainer": {"gym_config": "NoSuchRL", "itterations": 5, "num_envs": "four"},
        "policy": {"name": "actor_critik"},
        "algorithm": {"name": "ppoo"},
    }
    for names in (["itterations", "num_envs"], []):
        file.write_text(json.dumps(broken))
        with pytest.raises(ConfigError) as caught:
            load_train_config(file)
        told = "\n".join(caught.value.problems)
        assert all(name in told for name in ("NoSuchRL", "actor_critik", "ppoo", *names)), told
        broken["trainer"] = {"gym_config": "NoSuchRL"}


def test_a_config_of_another_command_names_the_command():
    with pytest.raises(ConfigError, match=r"embodichain imitate configs/\S+/imitate_config\.json"):
        load_train_config("configs/agents/rl/push_cube/imitate_config.json")
    with pytest.raises(ConfigError, match=r"embodichain train configs/\S+/train_config\.json"):
        load_imitate_config("configs/agents/rl/push_cube/train_config.json")


def test_flags_of_other_libraries_are_understood_as_questions(tmp_path):
    config = load_train_config(write_config(tmp_path / "c.json", tmp_path / "run"))
    for flag, meant in {"--lr": "algorithm.cfg.learning_rate", "--n_steps": "trainer.buffer_size"}.items():
        with pytest.raises(ConfigError, match=f"unknown flag. Did you mean --{meant}"):
            override(config, [flag, "1"])
    with pytest.raises(
        ConfigError, match=r"algorithm\.cfg\.gamma: .*\n.*policy\.actor\.activation: unknown activation"
    ):
        override(config, ["--algorithm.cfg.gamma", "2.0", "--policy.actor.activation", "tan"])


def test_settings_of_a_policy_of_ones_own_are_its_own():
    """A subclass with a ``build`` of its own may take what its base does not."""

    class Mine(ActorCritic):
        @classmethod
        def build(cls, cfg, *spaces):
            return super().build({key: value for key, value in cfg.items() if key != "temperature"}, *spaces)

    assert ActorCritic.settings_type() is ActorCriticCfg
    assert type("Plain", (ActorCritic,), {}).settings_type() is ActorCriticCfg
    assert Mine.settings_type() is None


DIRECT = r"(trainer|policy|algorithm\.cfg)\.\w+$"
GYM = "--trainer.gym_config."
CURRICULUM = {"curriculum": {"by": "steps", "from": [0.0, 0.0], "to": [-0.1, 0.1], "between": [0.0, 9.0]}}


def test_flags_of_an_environment_take_what_its_file_takes():
    config = load_train_config("PressButtonRL")
    delays = [f"{GYM}env.observations.delay.robot/qpos", "[1,3]", f"{GYM}env.events.heavy"]
    heavy = '{"func": "mass", "mode": "reset", "params": {"body": "panel", "scale": [1, 2]}}'
    words = [f"{GYM}env.scene.fixtures.panel.pose.y", json.dumps(CURRICULUM), *delays, heavy]
    found: Any = override(config, words).trainer.gym_config
    assert found["env"]["scene"]["fixtures"]["panel"]["pose"]["y"]["curriculum"]["to"] == [-0.1, 0.1]
    assert found["env"]["observations"]["delay"] == {"robot/qpos": [1, 3]}
    assert found["env"]["events"]["terms"]["heavy"]["func"] == "mass"
    with pytest.raises(ConfigError, match=r"panel.*pose\.y: expected \[low, high\] or"):
        override(config, [f"{GYM}env.scene.fixtures.panel.pose.y", '{"nonsense": 1}'])


def test_flags_of_a_range_take_a_curriculum():
    config = load_train_config("PushCubeRL")
    found: Any = override(config, [f"{GYM}env.events.randomize_target.y", json.dumps(CURRICULUM)]).trainer.gym_config
    assert found["env"]["events"]["randomize_target"]["y"]["curriculum"]["to"] == [-0.1, 0.1]
    with pytest.raises(ConfigError) as caught:
        override(config, [f"{GYM}env.events.randomize_target.y", "1.5", "0.5"])
    assert str(caught.value).count("got") == 1


@pytest.mark.parametrize("name", ["flow", "tokens"])
def test_networks_of_policies_that_decide_on_chunks_are_flags_and_checked_early(tmp_path, name):
    file = tmp_path / "c.json"
    block = {"gym_config": "Pendulum-v1", "iterations": 1}
    file.write_text(json.dumps({"trainer": block, "policy": {"name": name}}))
    config = load_train_config(file)
    assert override(config, ["--policy.critic.hidden_sizes", "8", "8"]).policy["critic"]["hidden_sizes"] == [8, 8]
    with pytest.raises(ConfigError, match=r"critic\.hidden_sizes\.0: expected"):
        override(config, ["--policy.critic.hidden_sizes", "0"])


@pytest.mark.parametrize(
    "words",
    [
        "--trainer.seed 1 CartPoleRL --policy.critic_obs robot/qvel robot/qpos",
        "--trainer.enable_eval CartPoleRL",
        "--trainer.enable_eval false CartPoleRL",
        "--policy.critic_obs robot/qvel CartPoleRL --trainer.eval_video",
    ],
)
def test_the_config_is_found_among_flags(words):
    args = parse_args(words.split())
    assert str(args.config) == "CartPoleRL"
    assert args.overrides == [word for word in words.split() if word != "CartPoleRL"]


def test_flags_without_a_value_are_known_beforehand():
    switches = set()
    for name in ("ppo", "grpo", "distill"):
        cfg = TrainCfg(algorithm={"name": name})
        flags = flags_of(cfg, TrainCfg, (), schemas_of(cfg))
        switches |= {flag.name for flag in flags if flag.annotation is bool and re.match(DIRECT, flag.name)}
    assert switches == set(SWITCHES)


def test_flags_that_something_else_decides_are_refused():
    config = load_train_config("CartPoleRL")
    for name in ("seed", "num_envs"):
        with pytest.raises(ConfigError, match=rf"gym_config\.{name}: .* Use --trainer\.{name} 3$"):
            override(config, [f"{GYM}{name}", "3"])
    with pytest.raises(UntrustedModuleError, match="--trust nosuch"):
        override(config, ["--trainer.import_modules", "nosuch"])
    trusted = override(config, ["--trainer.import_modules", "json"], trusted_modules=["json"])
    assert trusted.trainer.import_modules == ["json"]


def test_the_environments_file_and_its_fields_are_flags_together(tmp_path):
    file = tmp_path / "slow.json"
    file.write_text(json.dumps({"id": "CartPoleRL", "env": {"substeps": 3}}))
    words = [f"{GYM}max_episode_steps", "7", "--trainer.gym_config", str(file)]
    found: Any = override(load_train_config("CartPoleRL"), words).trainer.gym_config
    assert (found["env"]["substeps"], found["max_episode_steps"]) == (3, 7)


def test_flags_follow_the_algorithm_and_the_policy_that_flags_choose(caplog):
    config = load_train_config("CartPoleRL")
    with caplog.at_level("INFO"):
        words = ["--algorithm.name", "grpo", "--algorithm.cfg.group_size", "2"]
        chosen = override(config, [*words, "--policy.name=flow", "--policy.flow.num_steps", "2"])
    assert chosen.algorithm.cfg["group_size"] == 2
    assert chosen.algorithm.cfg["learning_rate"] == config.algorithm.cfg["learning_rate"] != 3e-4
    assert chosen.policy["flow"] == {"num_steps": 2}
    assert chosen.policy["critic"] == config.policy["critic"]
    assert "--policy.name flow leaves out what the config says for another one: policy.distribution" in caplog.text
    with pytest.raises(ConfigError, match=r"algorithm\.cfg\.vf_coef: unknown flag"):
        override(config, ["--algorithm.name", "grpo", "--algorithm.cfg.vf_coef", "1"])
    with pytest.raises(ConfigError) as caught:
        override(config, ["--algorithm.name", "distill"])
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["algorithm.cfg.teacher"]


class Constant(Policy):
    """A policy of a user, whose settings are its arguments."""

    def __init__(self, obs_space, action_space, device, std: float = 0.3, *, normalize_obs: bool = False) -> None:
        super().__init__()

    def get_action(self, obs, deterministic=False):
        raise NotImplementedError

    get_value = evaluate_actions = get_action


class Free(Constant):
    def __init__(self, *args, **settings) -> None:
        super().__init__(*args)


class Own(Constant):
    @classmethod
    def build(cls, cfg, obs_space, action_space, device):
        return cls(obs_space, action_space, device)


@pytest.mark.parametrize("load", [load_train_config, load_imitate_config])
def test_arguments_of_a_policy_without_a_config_class_decide_which_settings_it_takes(monkeypatch, caplog, load):
    from embodichain.agents.imitation.config import override as override_imitation

    monkeypatch.setitem(POLICIES.classes, "constant", Constant)
    assert (arguments_of(Constant), arguments_of(Free), arguments_of(Own)) == (["std", "normalize_obs"], None, None)
    change = override if load is load_train_config else override_imitation
    with caplog.at_level("INFO"):
        chosen = change(load("CartPoleRL"), ["--policy.name", "constant", "--policy.std", "0.5", *_RECORDING[load]])
    own = {name: value for name, value in chosen.policy.items() if name != "action_dim"}
    assert own == {"name": "constant", "normalize_obs": True, "std": 0.5}
    assert "--policy.name constant leaves out what the config says for another one: policy.actor" in caplog.text
    with pytest.raises(ConfigError, match=r"sdt: Constant has no such argument\. Did you mean 'std'"):
        change(load("CartPoleRL"), ["--policy.name", "constant", "--policy.sdt", "0.5", *_RECORDING[load]])


_RECORDING: dict[Any, list[str]] = {load_train_config: [], load_imitate_config: ["--source.dataset", "recordings/a"]}


def test_null_is_no_environment_rather_than_one_of_that_name():
    from embodichain.agents.imitation.config import override as override_imitation

    with pytest.raises(ConfigError, match=r"trainer\.gym_config: expected an environment, got none"):
        override(load_train_config("CartPoleRL"), ["--trainer.gym_config", "null"])
    words = ["--trainer.gym_config", "null", "--source.dataset", "recordings/a"]
    cfg = override_imitation(load_imitate_config("CartPoleRL"), words)
    assert not cfg.trainer.gym_config
    assert not cfg.trainer.enable_eval
