"""Tasks and scenes of a user's own, in a folder of their own: with or without an expert, with own parts and meshes."""

from __future__ import annotations

import json
import sys
import textwrap
from typing import Any

import pytest
import torch

from embodichain.agents.engine import OnlineDataEngine, OnlineDataEngineCfg
from embodichain.agents.engine.sources import open_source
from embodichain.cli import play
from embodichain.cli.main import main
from embodichain.cli.stream import load_stream_config
from embodichain.envs import registration
from embodichain.envs.checker import run_checks
from embodichain.envs.physics.mujoco_cpu import MujocoCpuPhysics
from embodichain.envs.registration import load_gym_config, make
from embodichain.envs.task import UnknownQuantityError
from embodichain.envs.task_env import TaskEnv
from embodichain.envs.tasks.reach import Reach
from embodichain.errors import AssetError, ConfigError, EnvContractError

TASK = """
import torch
from embodichain.envs.env_cfg import EventsCfg, GymCfg, PoseRangeCfg, RobotCfg
from embodichain.envs.registration import register_task
from embodichain.envs.task import Task
from embodichain.envs.tasks.arm import ArmTask, arm_cfg

class Hover(ArmTask):
    '''Hold the tool anywhere: written as the docs tell, without an expert.'''

    scene_file = "hover.xml"
    goal_area = PoseRangeCfg(x=(0.5, 0.5), z=(0.3, 0.3))
    reward_weights = {"distance": -1.0}

    @staticmethod
    def default_cfg():
        return arm_cfg("Hover", 7, threshold=0.001, events=EventsCfg(), scale=0.1, robot=RobotCfg(tool="pusher"))

    def reward_terms(self, scene, action):
        return {"distance": scene["distance"]}

class Skilled(Hover):
    def expert_action(self, scene, actions):
        return torch.full((len(scene["qpos"]), 6), 0.5)

register_task("Hover", Hover)
register_task("Skilled", Skilled)
"""
SCENE = """
<mujoco model="hover">
  <compiler meshdir="meshes"/>
  <include file="table.xml"/>
  <include file="parts/wall.xml"/>
  <asset><mesh name="tetra" file="tetra.obj"/></asset>
  <worldbody>
    <body name="goal" mocap="true"><geom name="mark" type="mesh" mesh="tetra" contype="0" conaffinity="0"/></body>
  </worldbody>
</mujoco>
"""
GEOM = "<mujocoinclude><worldbody><geom {}/></worldbody></mujocoinclude>"
WALL = GEOM.format('name="wall" type="box" size="0.01 0.2 0.1" pos="0.9 0 0.1"')
OWN_TABLE = GEOM.format('name="bench" type="box" size="1 1 0.01"')
TETRA = "v 0 0 0\nv 0.05 0 0\nv 0 0.05 0\nv 0 0 0.05\nf 1 3 2\nf 1 2 4\nf 2 3 4\nf 1 4 3\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a module ``own_tasks`` and what its scene needs."""
    (tmp_path / "own_tasks.py").write_text(textwrap.dedent(TASK))
    (tmp_path / "hover.xml").write_text(SCENE)
    for name, text in {"parts/wall.xml": WALL, "meshes/tetra.obj": TETRA}.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(registration, "_TASKS", dict(registration._TASKS))
    yield tmp_path
    sys.modules.pop("own_tasks", None)


@pytest.fixture
def tasks(folder):
    import own_tasks

    return own_tasks


def settings(id, **changes):
    gym_config = {"id": id, "num_envs": 2, "num_threads": 1}
    return {"buffer_size": 2, "gym_config": gym_config, "trusted_modules": ["own_tasks"], "progress": False} | changes


def test_scene_of_a_task_lies_beside_its_module(tasks):
    """Parts of the package are found by their name, own parts and meshes relative to the scene."""
    with make("Hover", num_envs=2) as env:
        model = env.physics.model
        names = {model.geom(i).name for i in range(model.ngeom)}
        assert {"table", "wall", "mark"} <= names
        assert model.mesh("tetra").vertnum == 4
        env.reset(seed=0)
        assert torch.isfinite(env.step(torch.zeros(2, 6))[1]).all()


def test_own_part_goes_before_the_packages(tasks, folder):
    (folder / "table.xml").write_text(OWN_TABLE)
    with make("Hover") as env:
        names = {env.physics.model.geom(i).name for i in range(env.physics.model.ngeom)}
    assert "bench" in names
    assert "table" not in names


def test_scene_that_is_nowhere_is_named(tasks, folder):
    (folder / "hover.xml").unlink()
    with pytest.raises(AssetError, match=rf"hover\.xml.*{folder}.*assets"):
        make("Hover")
    (folder / "hover.xml").write_text(SCENE.replace("tetra.obj", "gone.obj"))
    with pytest.raises(AssetError, match=r"gone\.obj"):
        make("Hover")


def test_task_needs_no_expert(tasks):
    with make("Hover", num_envs=2) as env:
        assert not env.has_expert
        with pytest.raises(ConfigError, match=r"Hover has no expert.*expert_action"):
            env.expert_action()
    with make("Skilled", num_envs=2) as env:
        assert env.has_expert
        assert env.expert_action().tolist() == [[0.5] * 6] * 2
    results = {r.name: r for r in run_checks(make("Hover", num_envs=2), lambda n: make("Hover", num_envs=n))}
    assert [r.problems for r in results.values() if r.problems] == []
    with pytest.raises(EnvContractError, match="Hover has no expert: use --policy random"):
        play.main(["Hover"])


@pytest.mark.parametrize("id", ["Hover", "HalfCheetah-v5"])
def test_stream_and_record_say_the_same_of_a_task_without_an_expert(folder, id):
    cfg = OnlineDataEngineCfg(**settings(id, action_config={"source": "expert"}))
    with pytest.raises(ConfigError, match=f'source: {id} has no expert.*"random"') as recorded:
        open_source(cfg)
    engine = OnlineDataEngine(cfg)
    with pytest.raises(ConfigError) as streamed:
        engine.start()
    assert str(streamed.value) == str(recorded.value)


def test_tasks_of_trusted_modules_are_streamed(folder):
    """A worker knows no more than what the trusted modules register."""
    with OnlineDataEngine(OnlineDataEngineCfg(**settings("Skilled"))) as engine:
        batch = engine.sample_batch(2, 4)
        assert (batch["action"] == 0.5).all()


def test_rows_are_as_long_as_episodes_unless_it_is_set(folder):
    for given, length in ((None, 7), (9, 9)):
        with OnlineDataEngine(OnlineDataEngineCfg(**settings("Skilled", max_episode_steps=given))) as engine:
            assert engine.shared_buffer.batch_size == (2, length)
            assert engine.sample_batch(1, 7).batch_size == (1, 7)


def test_rows_of_gymnasium_envs_too():
    changes = {"action_config": {"source": "random"}}
    with OnlineDataEngine(OnlineDataEngineCfg(**settings("MountainCar-v0", trusted_modules=[], **changes))) as engine:
        assert engine.shared_buffer.batch_size == (2, 200)
    with open_source(OnlineDataEngineCfg(**settings("Blackjack-v1", trusted_modules=[], **changes))).env as env:
        assert env.max_episode_steps == 1000  # it states none, and rows need an end


def test_settings_of_an_id_leave_the_length_to_the_env(tasks):
    assert load_stream_config("PushCubeRL").max_episode_steps is None
    assert load_stream_config("PushCubeRL").action_config == {}
    assert load_stream_config("Hover").action_config == {"source": "random"}
    assert load_stream_config("HalfCheetah-v5").action_config == {"source": "random"}
    assert load_stream_config("Skilled").action_config == {}


@pytest.mark.extra("data")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_episode_steps": 5}, "max_episode_steps: episodes may take 7 steps"),
        ({"state_dim": 9}, "state_dim: expected 9"),
        ({"gym_config": {"id": "Hover"}}, "source: Hover has no expert"),
        ({}, None),
    ],
)
def test_record_and_stream_agree(folder, capfd, changes, words):
    path = folder / "stream.json"
    path.write_text(json.dumps(settings("Skilled", **changes)))
    commands = {
        "stream": ["stream", str(path), "--duration", "0.2", "--chunk-size", "2", "--trust", "own_tasks"],
        "record": ["record", str(path), "--out", str(folder / "out"), "--episodes", "2", "--trust", "own_tasks"],
    }
    codes, told = {}, {}
    for name, command in commands.items():
        codes[name] = main(command)
        told[name] = capfd.readouterr().err
    assert set(codes.values()) == {0 if words is None else 2}, told
    if words is not None:
        assert all(words in text for text in told.values())


@pytest.mark.parametrize("command", ["stream", "record"])
def test_modules_that_a_file_trusts_are_not_imported(folder, capfd, command):
    """A config is data: only the command line allows a module, by its name or as a file."""
    (folder / "own_tasks.py").write_text(f"open({str(folder / 'imported')!r}, 'w')\n" + TASK)
    path = folder / "stream.json"
    path.write_text(json.dumps(settings("Skilled")))
    rest = ["--out", str(folder / "out")] if command == "record" else ["--duration", "0.1"]
    assert main([command, str(path), *rest]) == 2
    assert "--trust own_tasks" in capfd.readouterr().err
    assert not (folder / "imported").exists()


def test_trusted_file_is_streamed(folder, capfd, monkeypatch):
    (folder / "own_tasks.py").rename(folder / "elsewhere.py")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(folder)])
    words = ["stream", "Skilled", "--duration", "0.1", "--chunk-size", "2", "--buffer_size", "2"]
    words += ["--gym_config.num_envs", "2", "--trust", str(folder / "elsewhere.py")]
    assert main(words) == 0, capfd.readouterr().err
    sys.modules.pop("elsewhere", None)


def test_sparse_reward_needs_success() -> None:
    class Endless(Reach):
        def success(self, scene: Any) -> Any:
            return None

        def reward_terms(self, scene: Any, action: Any) -> dict[str, Any]:
            return {"distance": scene["distance"], "effort": scene["distance"], "success": scene["distance"]}

    cfg = load_gym_config("ReachRL", num_envs=1)
    for mode in ("dense", "sparse"):
        chosen = cfg.replace(env=cfg.env.replace(rewards=cfg.env.rewards.replace(mode=mode)))
        physics = MujocoCpuPhysics(Endless.build_model(chosen), 1, 1)
        with TaskEnv(chosen, Endless, physics) as env:
            if mode == "dense":
                assert "success" not in env.step(torch.zeros(1, 6))[4]["metrics"]
            else:
                with pytest.raises(ConfigError, match=r"rewards\.mode"):
                    env.step(torch.zeros(1, 6))


@pytest.mark.parametrize("method", ["success", "failed"])
@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda flags: flags.float(), r"float32 \[2\]"),
        (lambda flags: flags.unsqueeze(1), r"bool \[2, 1\]"),
        (lambda flags: False, "bool"),
    ],
)
def test_flags_of_a_task_are_checked_when_it_is_made(method: str, change: Any, got: str) -> None:
    def returned(self: Reach, scene: Any) -> Any:
        return change(scene["distance"] < 0.02)

    task = type("Loose", (Reach,), {method: returned})
    cfg = load_gym_config("ReachRL", num_envs=2)
    with pytest.raises(EnvContractError, match=rf"Loose\.{method} must return bool \[num_envs\].*; got {got}\. Comp"):
        TaskEnv(cfg, task, MujocoCpuPhysics(task.build_model(cfg), 2, 1))


def test_failed_may_read_what_a_step_adds_to_the_scene() -> None:
    class Careful(Reach):
        def failed(self, scene: Any) -> Any:
            return (scene["distance"] > 5.0) & (scene["success"] == 0)

    cfg = load_gym_config("ReachRL", num_envs=2)
    with TaskEnv(cfg, Careful, MujocoCpuPhysics(Careful.build_model(cfg), 2, 1)) as env:
        env.reset(seed=0)
        assert not env.step(torch.zeros(2, 6))[2].any()


def test_failed_that_reads_what_is_not_measured_names_what_is() -> None:
    task = type("Typo", (Reach,), {"failed": lambda self, scene: scene["distanse"] > 5.0})
    cfg = load_gym_config("ReachRL", num_envs=2)
    with pytest.raises(UnknownQuantityError, match=r"scene\['distanse'\].*Did you mean 'distance'"):
        TaskEnv(cfg, task, MujocoCpuPhysics(task.build_model(cfg), 2, 1))
