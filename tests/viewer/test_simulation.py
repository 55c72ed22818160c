"""What the viewer simulates, without a browser: who acts, pulls, recordings, and policies that still train."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from embodichain.agents.rl.train import resume_training, train_from_config
from embodichain.cli.main import main
from embodichain.cli.view import ViewArgs, _opened
from embodichain.envs.registration import make_to_watch
from embodichain.envs.task_env import TaskEnv
from embodichain.errors import EmbodiChainError
from embodichain.viewer.live import LiveJob
from embodichain.viewer.playback import Playback
from embodichain.viewer.scene import Pull
from embodichain.viewer.simulation import RunPolicy, Simulation
from tests.envs.test_publishing import config

pytestmark = pytest.mark.usefixtures("one_thread")


def simulation(acts: str, num_envs: int = 1, **overrides: object) -> tuple[Simulation, TaskEnv]:
    env = make_to_watch("PickCubeRL", num_envs=num_envs, seed=0, num_threads=1, **overrides)
    assert isinstance(env, TaskEnv)
    return Simulation(env, "PickCubeRL", seed=0, acts=acts), env


def test_playing_goes_on_where_one_is_and_then_simulates_on():
    source, env = simulation("expert", num_envs=2)
    with env:
        playback = Playback(source)
        for _ in range(10):
            assert playback.step()
        assert [int(frame.step[0]) for frame in playback.frames] == list(range(10))
        seen = [frame.pose.qpos.copy() for frame in playback.frames if frame.pose is not None]
        playback.go_to(3)
        assert not playback.playing
        for index in range(4, 10):
            playback.step()
            assert playback.cursor == index
            np.testing.assert_array_equal(playback.frames[index].pose.qpos, seen[index])
        assert len(playback.frames) == 10, "frames that were there already were simulated again"
        playback.step()
        assert len(playback.frames) == 11
        assert (playback.episode_begin(), playback.episode_end()) == (0, 10)
        playback.playing, playback.speed = True, 0.5
        assert playback.play(elapsed=4.1 * source.seconds)
        assert playback.cursor == 12, "half the speed is half the steps"
        frame = playback.frame
        assert frame is not None
        parts = [values for name, values in frame.signals.items() if name.startswith("reward: ")]
        np.testing.assert_allclose(np.sum(parts, axis=0), frame.signals["reward"], atol=1e-5)


def test_an_episode_begins_without_the_reward_of_the_previous_one():
    source, env = simulation("expert", num_envs=2, max_episode_steps=5)
    with env:
        frames = [source.advance() for _ in range(8)]
    assert [int(frame.step[0]) for frame in frames] == [0, 1, 2, 3, 4, 0, 1, 2]
    for name in ("reward", "return", "action"):
        assert frames[4].signals[name].any()
        assert not frames[5].signals[name].any(), name
    np.testing.assert_allclose(frames[7].signals["return"], frames[6].signals["reward"] + frames[7].signals["reward"])


def test_an_episode_of_a_job_begins_without_the_reward_of_the_previous_one():
    job = LiveJob.__new__(LiveJob)
    copies = np.zeros((2, 1)), np.zeros((2, 0, 7)), np.array([0.0, 7.0]), np.array([2.0, 3.0])
    job._published = {"it": SimpleNamespace(states=SimpleNamespace(sequence=1, read=lambda: copies))}
    job._chosen, job._sequence = "it", 0
    assert job.advance().signals["reward"].tolist() == [0.0, 3.0]


def test_an_env_without_a_picture_says_why_and_is_asked_once(monkeypatch: pytest.MonkeyPatch):
    with make_to_watch("CartPole-v1", num_envs=1, seed=0) as env:
        asked = []

        def refuse(*args: object) -> None:
            asked.append(args)
            raise EmbodiChainError("pygame is not installed")

        monkeypatch.setattr(env, "render", refuse)
        playback = Playback(Simulation(env, "CartPole-v1", seed=0, acts="random"))
        for _ in range(3):
            playback.step()
        assert [frame.images for frame in playback.frames] == [{}, {}, {}]
        assert all("no picture: pygame is not installed" in frame.note for frame in playback.frames)
        assert len(asked) == 1


def test_the_tool_follows_a_person_and_the_other_envs_stay():
    source, env = simulation("person", num_envs=2)
    with env:
        source.person.activate(True)
        source.advance()
        before = env.robot.chain.position(env.physics.qpos[:, env.robot.qpos].float()[:, : env.robot.num_joints])
        for axis, sign, count in ((0, 1.0, 4), (1, -1.0, 3), (2, 1.0, 5)):
            for _ in range(count):
                source.person.move(axis, sign)
        for _ in range(60):
            source.advance()
        after = env.robot.chain.position(env.physics.qpos[:, env.robot.qpos].float()[:, : env.robot.num_joints])
        np.testing.assert_allclose(after[0] - before[0], (0.04, -0.03, 0.05), atol=4e-3)
        np.testing.assert_allclose(after[1], before[1], atol=4e-3)


@dataclass
class Mouse:
    """A scene in which the mouse pulls."""

    pull: Pull | None = None


def test_a_pulled_body_follows_the_mouse_and_is_let_go():
    source, env = simulation("zero", num_envs=2)
    with env:
        source.advance()
        cube = int(env.physics.model.body("cube").id)
        start = source.advance().signals["object/pos"][1]
        target = start + np.array([0.0, 0.1, 0.3])
        mouse = Mouse(Pull(1, cube, np.zeros(3), target))
        source.scene = mouse
        for _ in range(100):
            frame = source.advance()
        np.testing.assert_allclose(
            frame.signals["object/pos"][1], target - (0, 0, 9.81 / 400), atol=5e-3
        )  # it hangs on a spring
        mouse.pull = None
        source.advance()
        assert not env.physics.applied_forces().any()


@pytest.mark.extra("data")
def test_what_is_recorded_is_shown_again_in_3d(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from embodichain.viewer.replay import Recording

    source, env = simulation("expert", num_envs=2, max_episode_steps=20)
    source.recorder.out = tmp_path / "recorded"
    source.watched = 1
    with env:
        source.recorder.toggle()
        frames = [source.advance() for _ in range(47)]
        assert (source.recorder.episodes, source.recorder.frames) == (2, 40)
        source.recorder.toggle()
        recording = Recording(tmp_path / "recorded", episode=1)
        shown = [recording.advance() for _ in range(20)]
        assert recording.advance() is None
        assert recording.model.nq == env.physics.model.nq
        for frame, own in zip(shown, frames[20:40], strict=True):
            np.testing.assert_array_equal(frame.pose.qpos[0], own.pose.qpos[1])
            np.testing.assert_array_equal(frame.pose.mocap[0], own.pose.mocap[1])
            np.testing.assert_array_equal(frame.signals["robot/qpos"][0], own.signals["robot/qpos"][1].astype("f4"))
    steps = ["--gym_config.max_episode_steps", "20", "--gym_config.num_envs", "1", "--states"]
    assert main(["record", "PickCubeRL", "--out", str(tmp_path / "expert"), "--episodes", "1", *steps]) == 0
    folders = [str(tmp_path / name) for name in ("recorded", "expert")]
    assert main(["dataset", "merge", *folders, "--out", str(tmp_path / "both")]) == 0  # the same robot, names and rate
    assert Recording(tmp_path / "both").model is not None
    panel = MagicMock()
    panel.playback.step.return_value = False
    recording.add_controls(panel)
    panel.server.gui.add_slider.assert_called_once_with("Episode", 0, 1, 1, 1)  # the one that is shown
    scene = tmp_path / "both" / "meta" / "embodichain_scene.json"
    settings = json.loads(scene.read_text())["gym_config"]
    scene.write_text(json.dumps({"gym_config": settings | {"id": "MyTask"}}))
    problem = str(Recording(tmp_path / "both").problem)
    assert problem.startswith("No scene in 3D: add --trust MODULE, with the module or file that registers 'MyTask'")
    assert "PickCubeRL" not in problem
    (tmp_path / "recorded" / "meta" / "embodichain_scene.json").unlink()
    plain = Recording(tmp_path / "recorded")
    assert plain.model is None
    told = "No scene in 3D: the recording has none. 'embodichain record ... --states' records one."
    assert plain.problem == told
    with _opened(ViewArgs(str(tmp_path / "recorded"))):
        assert told in capsys.readouterr().out
    assert plain.advance().signals["reward"].shape == (1,)
    with pytest.raises(EmbodiChainError, match="episodes 0 to 1, got 2"):
        Recording(tmp_path / "recorded", episode=2)


@pytest.mark.extra("data")
@pytest.mark.parametrize("watched", [0, 1])
def test_the_env_that_is_watched_is_recorded_from_its_next_episode_on(tmp_path: Path, watched: int):
    from embodichain.viewer.replay import Recording

    source, env = simulation("expert", num_envs=2, max_episode_steps=20)
    source.recorder.out = tmp_path / "recorded"
    with env:
        frames = [source.advance() for _ in range(5)]
        source.recorder.toggle()
        source.watched = watched  # another one, or the same
        frames += [source.advance() for _ in range(42)]
        source.recorder.toggle()
        assert (source.recorder.episodes, source.recorder.frames) == (1, 20)
        recording = Recording(tmp_path / "recorded")
        for own in frames[20:40]:
            np.testing.assert_array_equal(recording.advance().pose.qpos[0], own.pose.qpos[watched])


def test_the_latest_checkpoint_of_a_run_is_loaded_when_there_is_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("embodichain.viewer.simulation._POLL_SECONDS", 0.0)
    run = tmp_path / "run"
    first = config(run)
    train_from_config(first.replace(trainer=first.trainer.replace(iterations=1)))
    with make_to_watch("CartPoleRL", num_envs=3, seed=0, num_threads=1) as env:
        policy = RunPolicy(run, "latest", env)
        observation = env.reset(seed=0)[0]
        before = policy(observation)
        assert (policy.step, policy.renew()) == (128, False)
        resume_training(run, ["--trainer.iterations", "3"])
        assert policy.renew()
        assert policy.step == 384
        assert not torch.equal(policy(observation), before)


@pytest.mark.extra("viewer")
def test_mistakes_are_answered_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    (tmp_path / "my_task.py").write_text("")
    for words, told in (
        (["view", "PickCubeRLL"], "unknown environment 'PickCubeRLL'. Did you mean 'PickCubeRL'"),
        (["view", "PickCubeRL", "--policy", "best"], "--policy best: PickCubeRL can be acted in by expert, random"),
        (["view", "PickCubeRL", "--port", "70000"], "--port: expected a number between 1 and 65535, got 70000"),
        (["view", "recordings/nope"], "recordings/nope: there is no such folder or file"),
        (["view", "nope.py"], "nope.py: there is no such folder or file"),
        (["view", "some/Env-v0"], "unknown environment 'some/Env-v0'"),
        (["view", f"{tmp_path}/my_task.py"], f"that it registers, ID --trust {tmp_path}/my_task.py"),
        (["view", str(tmp_path)], "expected a checkpoint or a run with a checkpoint in it"),
        (["view", str(tmp_path), "--max-episode-steps", "9"], "--max-episode-steps: expected an environment, got a"),
        (["view", "PickCubeRL", "--max-episode-steps", "0"], "--max-episode-steps"),
        (["view", "PickCubeRL", "--num-envs", "0"], "--num-envs"),
    ):
        assert main(words) == 2
        shown = capsys.readouterr().err
        assert told in shown
        assert "Traceback" not in shown
