"""The task that an instruction decides."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from embodichain.envs.observations import decode_instructions, encode_instructions
from embodichain.envs.recording import Summary, roll
from embodichain.envs.registration import make
from embodichain.errors import ConfigError

CONFIG = Path(__file__).parents[2] / "configs/agents/rl/push_cube/gym_config_language.json"


def language_env(num_envs: int = 32, **changes):
    return make("PushCubeLanguageRL", num_envs=num_envs, seed=0, num_threads=1, **changes)


def test_expert_follows_the_instruction():
    env = language_env(64)
    ended = [e for step in roll(env, lambda obs: env.expert_action(), 128, seed=0) for e in step.ended]
    assert Summary.of(ended).success_rate >= 0.95


def test_expert_of_another_colour_does_not_succeed():
    """The same episodes with the same pictures; only the words differ, and with them what success is."""
    told, doing = language_env(), language_env()
    told.reset(seed=2)
    doing.reset(seed=2)
    state = doing.get_state()
    state["variables", "target"] = (state["variables", "target"] + 1) % 3  # the expert goes for the next colour
    doing.set_state(state)
    running = torch.ones(32, dtype=torch.bool)
    succeeded = {"told": torch.zeros(32, dtype=torch.bool), "doing": torch.zeros(32, dtype=torch.bool)}
    wrong = torch.zeros(32)
    for _ in range(100):
        action = doing.expert_action()
        ended = torch.zeros(32, dtype=torch.bool)
        for name, env in (("told", told), ("doing", doing)):
            _, _, terminated, truncated, info = env.step(action)
            succeeded[name] |= running & (info["metrics"]["success"] > 0)
            ended |= terminated | truncated
            if name == "told":
                wrong += running * info["metrics"]["wrong_goal"]
        running &= ~ended
    assert succeeded["doing"].float().mean() >= 0.9
    assert succeeded["told"].float().mean() <= 0.1  # a cube may cross the named goal on its way
    assert (wrong > 0).float().mean() >= 0.9


def test_the_instruction_names_the_goal_that_counts():
    env = language_env(64)
    obs, _ = env.reset(seed=4)
    texts = decode_instructions(obs["instruction"])
    for row, text in enumerate(texts):
        color = text.removeprefix("push the cube to the ").removesuffix(" target")
        assert torch.equal(obs["goal", color][row], env.task.goal()[row])
    assert {text.split()[-2] for text in texts} == {"red", "green", "blue"}
    assert obs["instruction"].shape == (64, 48)
    assert obs["instruction"].dtype == torch.uint8
    assert env.observation_space["instruction"].contains(obs["instruction"][0].numpy())


def test_nothing_but_the_instruction_tells_which_goal_is_meant():
    env = language_env(4)
    obs, _ = env.reset(seed=0)
    state = env.get_state()
    state["variables", "target"] = (state["variables", "target"] + 1) % 3
    other = env.set_state(state)
    for key, leaf in obs.items(include_nested=True, leaves_only=True):
        same = torch.equal(leaf, other[key])
        assert same == (key != "instruction"), key


def test_goals_keep_their_distance_and_every_colour_takes_every_place():
    env = language_env(256)
    env.reset(seed=1)
    goals = env.task.variables["goals"]
    pairs = torch.stack([(goals[:, i] - goals[:, j]).norm(dim=1) for i, j in ((0, 1), (0, 2), (1, 2))])
    assert pairs.min() >= 0.1  # 2.5 times the threshold
    assert {tuple(order) for order in goals[:, :, 1].argsort(dim=1).tolist()} == {
        (0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0),
    }  # fmt: skip
    assert torch.bincount(env.task.variables["target"]).min() > 60


def test_phrases_are_drawn_and_survive_a_restart_from_the_seed():
    phrases = ["push the cube to the {color} target", "bring it to {color}"]
    env = language_env(64, env={"language": {"phrases": phrases}})
    obs, info = env.reset(seed=0)
    texts = decode_instructions(obs["instruction"])
    assert {text.split()[0] for text in texts} == {"push", "bring"}
    env.step(torch.zeros(64, 6))
    again, _ = env.reset(seed=info["episode_seed"])
    assert decode_instructions(again["instruction"]) == texts


def test_the_pictures_show_the_goals_in_their_colours():
    env = make(CONFIG, num_envs=4, seed=0, num_threads=1)
    obs, _ = env.reset(seed=0)
    picture = obs["image", "front"].float()
    assert picture.shape == (4, 64, 64, 3)
    for channel, color in enumerate(("red", "green", "blue")):
        rest = [c for c in range(3) if c != channel]
        vivid = picture[..., channel] - picture[..., rest].amax(-1) > 100
        assert vivid.flatten(1).sum(1).min() > 8, color


def test_colours_that_are_left_out_are_not_on_the_table():
    env = make(CONFIG, num_envs=2, seed=0, num_threads=1, env={"language": {"colors": ["blue", "yellow"]}})
    obs, _ = env.reset(seed=0)
    picture = obs["image", "front"].float()
    assert set(obs["goal"].keys()) == {"blue", "yellow"}
    assert not (picture[..., 0] - picture[..., 1:].amax(-1) > 100).any()


def test_what_cannot_be_said_is_refused():
    with pytest.raises(ConfigError, match=r"expected .\{color\}. once"):
        language_env(1, env={"language": {"phrases": ["push it"]}})
    with pytest.raises(ConfigError, match="1 to 10 bytes"):
        language_env(1, env={"language": {"length": 10}})
    with pytest.raises(ConfigError, match=r"need a range of 0\.30 m, got 0\.20"):
        language_env(1, env={"events": {"randomize_target": {"x": [0.6, 0.7], "y": [-0.1, 0.1]}}})
    with pytest.raises(ConfigError, match="PushCubeRL takes no instructions"):
        make("PushCubeRL", num_envs=1, env={"language": {}})


def test_bytes_and_texts():
    texts = ["stoß", "push"]
    coded = encode_instructions(texts, 6)
    assert coded.tolist()[1] == [*b"push", 0, 0]
    assert decode_instructions(coded) == texts
