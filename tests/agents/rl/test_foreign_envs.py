"""Environments as people write them: trained with the defaults, evaluated, and filmed where they can be."""

from __future__ import annotations

import json
from pathlib import Path

import gymnasium as gym
import imageio.v3 as iio
import numpy as np
import pytest
import torch

from embodichain.agents.rl.config import TrainCfg
from embodichain.agents.rl.evaluation import evaluate
from embodichain.agents.rl.models import build_policy
from embodichain.agents.rl.runs import read_metrics
from embodichain.agents.rl.train import make_eval_env, train_from_config
from embodichain.envs.gymnasium_env import GymnasiumVecEnv
from tests.agents.rl.training_cases import train_config
from tests.programs import run_program

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "agents" / "rl" / "custom_everything.json"
MINIMAL = """
import gymnasium as gym, numpy as np
class PointMass(gym.Env):
    observation_space = gym.spaces.Box(-9, 9, (1,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x, self.t = self.np_random.uniform(-1, 1, 1).astype(np.float32), 0
        return self.x, {}
    def step(self, action):
        self.x, self.t = np.clip(self.x + 0.1 * action, -9, 9).astype(np.float32), self.t + 1
        return self.x, -float(abs(self.x[0])), self.t == 12, False, {}
gym.register("PointMass-v7", entry_point=PointMass)
"""


def command(folder, *words):
    return run_program("-m", "embodichain", *words, cwd=folder)


def test_minimal_env_is_trained_with_the_default_config(tmp_path):
    """Ten lines in an empty folder, no constructor, no time limit, no image: what is asked for is a few numbers."""
    (tmp_path / "point_mass.py").write_text(MINIMAL)
    config = {
        "trainer": {"gym_config": {"id": "PointMass-v7"}, "import_modules": ["point_mass"], "iterations": 3},
        "policy": {"name": "actor_critic"},
        "algorithm": {"name": "ppo"},
    }
    (tmp_path / "train.json").write_text(json.dumps(config))
    flags = ["--trainer.run_dir", "run", "--trainer.num_envs", "8", "--trainer.buffer_size", "16"]
    flags += ["--trainer.eval_freq", "128"]
    done = command(tmp_path, "train", "train.json", "--trust", "point_mass", *flags)
    assert done.returncode == 0, done.stderr
    lengths = [row["eval/length"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "eval/length" in row]
    assert lengths == [12.0] * 3
    assert done.stderr.count("no video") == 1, done.stderr
    shown = command(tmp_path, "eval", "run", "--episodes", "2", "--video", "--trust", "point_mass")
    assert shown.returncode == 0, shown.stderr
    assert "No video: " in shown.stdout


def test_example_of_everything_trains_with_a_video_asked_for(tmp_path):
    words = ["--trainer.run_dir", str(tmp_path / "run"), "--trainer.eval_video", "true", "--trainer.iterations", "3"]
    done = command(ROOT, "train", str(EXAMPLE), "--trust", "custom_everything", *words)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no video") == 1


class Drawn(gym.Env):
    """Ends after ten steps; ``frame`` is what ``render`` does with it."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    observation_space = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
    action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(self, frame=None, render_mode="rgb_array"):
        self.frame, self.render_mode = frame, render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observation_space.sample() * 0, {}

    def step(self, action):
        self.steps += 1
        return self.observation_space.sample() * 0, 1.0, self.steps == 10, False, {}

    def render(self):
        return self.frame(self)  # fails before the first reset, as ``steps`` is not known then


def grey(env):
    return np.full((8, 12), 9 * env.steps, np.uint8)


def rgba(env):
    return np.full((8, 12, 4), 9 * env.steps, np.uint8)


def sizes(env):
    return np.full((8 + env.steps, 12 + env.steps % 3, 3), 9 * env.steps, np.uint8)


def frames(env):
    return [np.zeros((8, 12, 3), np.uint8), np.full((8, 12, 3), 9 * env.steps, np.uint8)]


def nothing(env):
    return None


def no_frames(env):
    return []


def raises(env):
    raise KeyError("no such body")


def later(env):
    return 1 / 0 if env.steps == 4 else np.zeros((8, 12, 3), np.uint8)


def floats(env):
    return np.full((8, 12, 3), 0.5)


def flat(env):
    return np.zeros(96, np.uint8)


def film(env, path, episodes=2):
    policy = build_policy({"name": "actor_critic"}, env.observation_space, env.action_space, "cpu")
    return evaluate(policy, env, episodes, seed=0, video=path)


@pytest.mark.parametrize("frame", [grey, rgba, sizes, frames])
def test_whatever_can_be_shown_is_filmed(tmp_path, frame):
    with GymnasiumVecEnv.from_factory(lambda: Drawn(frame), 2) as env:
        result = film(env, tmp_path / "clip.mp4")
    assert result.problem is None
    video = iio.imread(tmp_path / "clip.mp4")
    assert video.shape[1:] == (240, 320, 3)
    brightness = video[:10, 60:120].mean(axis=(1, 2, 3))
    np.testing.assert_allclose(brightness, 9 * np.arange(10), atol=6)  # one frame per step, from the reset on


@pytest.mark.parametrize("frame", [nothing, no_frames, raises, later, floats, flat])
def test_whatever_cannot_be_shown_is_one_note(tmp_path, frame):
    with GymnasiumVecEnv.from_factory(lambda: Drawn(frame), 2) as env:
        result = film(env, tmp_path / "clip.mp4", episodes=4)
    assert [episode.length for episode in result.episodes] == [10] * 4
    assert result.problem
    assert "\n" not in result.problem
    assert result.files == []
    assert list(tmp_path.iterdir()) == []


def test_folder_that_cannot_be_written_is_one_note(tmp_path):
    (tmp_path / "videos").touch()
    with GymnasiumVecEnv.from_factory(lambda: Drawn(grey), 1) as env:
        result = film(env, tmp_path / "videos" / "clip.mp4")
    assert "cannot write" in result.problem


@pytest.mark.parametrize("leaf", ["goal", "robot", "object"])
def test_plain_leaves_with_names_of_groups(tmp_path, leaf):
    """A name that is a group of positions in our tasks is an array, or something else, in another's."""

    parts = {leaf: Drawn.observation_space, "x": gym.spaces.Dict({"pos": gym.spaces.Discrete(3)})}
    zeros = {leaf: np.zeros(3, np.float32), "x": {"pos": 1}}

    def named():
        env = Drawn(grey)
        env.reset()
        return gym.wrappers.TransformObservation(env, lambda _: zeros, gym.spaces.Dict(parts))

    with GymnasiumVecEnv.from_factory(named, 2) as env:
        assert film(env, tmp_path / "clip.mp4").problem is None


def registered(monkeypatch, name, entry_point, **settings):
    monkeypatch.delitem(gym.registry, name, raising=False)
    gym.register(name, entry_point=entry_point, **settings)
    return name


class Endless(Drawn):
    def step(self, action):
        return super().step(action)[0], 1.0, False, False, {}


def eval_env(tmp_path, name, **trainer):
    cfg = train_config(tmp_path / "run")
    cfg["trainer"] |= {"gym_config": {"id": name}, "eval_video": True, "num_eval_envs": 2} | trainer
    return make_eval_env(TrainCfg.from_dict(cfg))


def test_episodes_of_an_env_that_never_ends_are_cut_in_evaluations(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    name = registered(monkeypatch, "Endless-v3", lambda render_mode=None: Endless(grey, render_mode))
    with eval_env(tmp_path, name) as env:
        assert env.max_episode_steps == 10_000
    assert "Endless-v3 has no time limit" in caplog.text
    assert "max_episode_steps" in caplog.text
    with eval_env(tmp_path, name, eval_gym_config={"max_episode_steps": 7}) as env:
        result = film(env, None)
    assert [episode.length for episode in result.episodes] == [7, 7]


def test_training_in_an_env_that_never_ends(tmp_path, monkeypatch):
    name = registered(monkeypatch, "Endless-v3", lambda **kwargs: Endless(grey, **kwargs))
    cfg = train_config(tmp_path / "run", trainer={"gym_config": {"id": name}, "eval_video": True})
    cfg["trainer"]["gym_config"] = {"id": name}
    cfg["trainer"]["eval_gym_config"] = {"max_episode_steps": 9}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(cfg))
    result = train_from_config(path)
    assert result.evaluation.summary.mean_length == 9
    assert len(list((tmp_path / "run" / "videos").glob("*.mp4"))) == 2


@pytest.mark.parametrize("takes", ["nothing", "everything", "render_mode"])
def test_render_mode_reaches_only_those_that_take_it(tmp_path, monkeypatch, takes):
    """A class says so itself; a function that makes one is asked by trying."""

    class Plain(Drawn):
        metadata = {"render_modes": []}
        render_mode = None

        def __init__(self):
            pass

    makers = {
        "nothing": lambda: Plain(),
        "everything": lambda **kwargs: Plain(**kwargs),
        "render_mode": lambda render_mode=None: Drawn(grey, render_mode),
    }
    name = registered(monkeypatch, "Asked-v0", makers[takes])
    with eval_env(tmp_path, name) as env:
        assert env.vector_env.render_mode == ("rgb_array" if takes == "render_mode" else None)


def test_error_of_the_env_itself_is_shown(tmp_path, monkeypatch):
    def broken(**kwargs):
        raise RuntimeError("the robot is not plugged in")

    name = registered(monkeypatch, "Broken-v0", broken)
    with pytest.raises(RuntimeError, match="not plugged in"):
        eval_env(tmp_path, name)


def test_wrapped_envs_are_filmed(tmp_path):
    def wrapped():
        env = gym.wrappers.ClipAction(gym.wrappers.TransformReward(Drawn(grey), lambda r: 2 * r))
        return gym.wrappers.FlattenObservation(gym.wrappers.OrderEnforcing(env))

    with GymnasiumVecEnv.from_factory(wrapped, 2) as env:
        result = film(env, tmp_path / "clip.mp4")
    assert result.problem is None
    assert result.summary.mean_return == 20.0
    assert torch.is_tensor(env.reset()[0]["state"])


def test_an_observation_that_is_not_finite_is_named_and_the_run_can_be_continued(tmp_path):
    broken = MINIMAL.replace("return self.x, -float", "return self.x * (np.nan if self.t == 5 else 1), -float")
    (tmp_path / "point_mass.py").write_text(broken)
    config = {
        "trainer": {"gym_config": "PointMass-v7", "iterations": 2, "run_dir": "run", "num_envs": 2, "eval_freq": 0},
        "policy": {"name": "actor_critic"},
        "algorithm": {"name": "ppo"},
    }
    (tmp_path / "train.json").write_text(json.dumps(config))
    unknown = command(tmp_path, "train", "train.json")
    assert "--trust MODULE" in unknown.stderr
    done = command(tmp_path, "train", "train.json", "--trust", "point_mass")
    assert done.returncode == 2, done.stderr
    assert "observation 'state' of env" in done.stderr
    assert "--resume run --trust point_mass" in done.stderr
