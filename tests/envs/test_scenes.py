"""Scenes by config: what is built, where it is placed, what is measured, and what is wrong with a config."""

import dataclasses
import json
import math
import re
from pathlib import Path

import gymnasium as gym
import mujoco
import numpy as np
import pytest
import torch

from embodichain.envs import registration, scene_cfg
from embodichain.envs.env_cfg import GoalCfg, GymCfg, ObjectCfg, PoseRangeCfg, SceneCfg, ViewCfg
from embodichain.envs.fixtures import BinCfg, ButtonsCfg, PegCfg
from embodichain.envs.registration import load_gym_config, make, register_task
from embodichain.envs.scenes import TRIES, _first_free, about_vertical
from embodichain.envs.tasks.kit import KitTask, climb, kit_cfg, reward, stages
from embodichain.errors import ConfigError

AREA = PoseRangeCfg(x=(0.35, 0.7), y=(-0.3, 0.3), yaw=(-1.0, 1.0))
TETRA = "v 0 0 0\nv 0.05 0 0\nv 0 0.05 0\nv 0 0 0.05\nf 1 3 2\nf 1 2 4\nf 2 3 4\nf 1 4 3\n"


class Crowd(KitTask):
    """All kinds of things on one table."""

    @staticmethod
    def default_cfg() -> GymCfg:
        scene = SceneCfg(
            objects={
                "cube": ObjectCfg(color="red", pose=AREA, min_distance=0.1),
                "roll": ObjectCfg(
                    shape="cylinder", size=(0.02, 0.06), quat=(1.0, 1.0, 0.0, 0.0), pose=AREA, min_distance=0.1
                ),
                "ball": ObjectCfg(shape="sphere", size=(0.03,), pose=AREA, min_distance=0.1, observe=False),
                "wall": ObjectCfg(fixed=True, size=(0.02, 0.1, 0.05), pose=AREA, min_distance=0.1),
            },
            fixtures={"panel": ButtonsCfg(pose=AREA), "box": BinCfg(pos=(0.3, -0.5, 0.0)), "peg": PegCfg(pose=AREA)},
            goals={"target": GoalCfg(shape="disc", pose=AREA.replace(z=(0.1, 0.2)))},
            cameras={"front": ViewCfg(pos=(1.3, 0.0, 0.8), lookat=(0.5, 0.0, 0.0))},
        )
        return kit_cfg("CrowdTest", scene, {"reach": reward("near", of="ee", to="panel_button_0")}, steps=20)

    def success(self, scene):
        return scene["panel_button_0_opening"] > 0.01


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    """Register the task for the time of a test."""
    monkeypatch.setattr(registration, "_TASKS", dict(registration._TASKS))
    register_task("CrowdTest", Crowd)
    yield
    gym.registry.pop("embodichain/CrowdTest-v0", None)


def test_everything_is_placed_within_its_range_apart_from_the_others_and_at_rest():
    with make("CrowdTest", num_envs=64, seed=5) as env:
        obs, _ = env.reset()
        scene = env.task.read()
        for name in ("cube", "roll", "ball", "wall", "panel", "peg", "target"):
            x, y = scene[f"{name}_pos"][:, 0], scene[f"{name}_pos"][:, 1]
            assert bool(((x >= 0.35) & (x <= 0.7) & (y >= -0.3) & (y <= 0.3)).all())
            assert float(x.std()) > 0.05  # drawn anew in every env
        placed = [scene[f"{name}_pos"][:, :2] for name in ("panel", "peg", "cube", "roll", "ball", "wall")]
        for number in range(2, 6):  # those with a least distance, from all that came before
            gaps = torch.stack([(placed[number] - other).norm(dim=1) for other in placed[:number]])
            assert float(gaps.amin()) >= 0.1
        assert scene["box_pos"][0].tolist() == pytest.approx([0.3, -0.5, 0.0])
        heights = {"cube": 0.025, "roll": 0.02, "ball": 0.03, "wall": 0.05, "peg": 0.06}
        for name, height in heights.items():
            torch.testing.assert_close(scene[f"{name}_pos"][:, 2], torch.full((64,), height), atol=1e-5, rtol=0.0)
        assert 0.1 <= float(scene["target_pos"][:, 2].amin()) < float(scene["target_pos"][:, 2].amax()) <= 0.2
        assert "ball" not in obs.keys()  # noqa: SIM118
        assert set(obs["cube"].keys()) == {"pos", "quat", "linvel", "offset"}
        assert set(obs["panel_button_0"].keys()) == {"joint", "pos"}
        for _ in range(3):  # nothing falls, rolls or is pushed apart
            env.step(torch.zeros(64, env.action_manager.action_dim))
        after = env.task.read()
        for name in heights:
            assert float((after[f"{name}_pos"] - scene[f"{name}_pos"]).norm(dim=1).median()) < 1e-3


def test_measurements_are_those_of_mujoco():
    with make("CrowdTest", num_envs=3, seed=1) as env:
        env.reset()
        for _ in range(4):
            env.step(torch.full((3, 4), 0.4))
        model = env.physics.model
        scene, data = env.task.read(torch.tensor([2])), mujoco.MjData(model)
        env.physics.load(data, 2)
        mujoco.mj_forward(model, data)
        for name in ("cube", "wall", "panel", "target", "peg"):
            np.testing.assert_allclose(scene[f"{name}_pos"][0], data.body(name).xpos, atol=1e-6)
            np.testing.assert_allclose(scene[f"{name}_quat"][0], data.body(name).xquat, atol=1e-6)
        np.testing.assert_allclose(scene["panel_button_0_pos"][0], data.site("panel/button_0").xpos, atol=1e-6)
        np.testing.assert_allclose(scene["panel_button_0_opening"][0], data.joint("panel/button_0").qpos[0], atol=1e-7)
        np.testing.assert_allclose(scene["cube_linvel"][0], data.joint("cube").qvel[:3], atol=1e-6)


def test_an_env_is_the_same_in_any_batch_and_replays_from_its_seed():
    with make("CrowdTest", num_envs=5, seed=3) as many, make("CrowdTest", num_envs=2, seed=3) as few:
        wide, info = many.reset()
        narrow, _ = few.reset()
        for key, value in narrow.flatten_keys("/").items():
            assert torch.equal(value, wide.flatten_keys("/")[key][:2]), key
        state = many.get_state()
        for _ in range(25):  # beyond the end of an episode
            later = many.step(torch.full((5, 4), 0.3))[0]
        back = many.set_state(state)
        assert torch.equal(back["wall", "pos"], wide["wall", "pos"])
        assert not torch.equal(back["wall", "pos"], later["wall", "pos"])
        again, _ = many.reset(seed=info["episode_seed"])
        assert torch.equal(again["wall", "pos"], wide["wall", "pos"])
        assert torch.equal(again["cube", "pos"], wide["cube", "pos"])


def test_the_first_free_place_is_taken_or_else_the_farthest():
    spots = torch.tensor([[[0.0, 0.0], [1.0, 0.0], [2.0, 0.0]]]).repeat(2, 1, 1)
    taken = [torch.tensor([[0.1, 0.0], [1.2, 0.0]])]
    assert _first_free(spots, taken, 0.5).tolist() == [[1.0, 0.0], [0.0, 0.0]]
    assert _first_free(spots, taken, 5.0).tolist() == [[2.0, 0.0], [0.0, 0.0]]
    assert TRIES > 1
    lying = torch.tensor([[math.sqrt(0.5), math.sqrt(0.5), 0.0, 0.0]], dtype=torch.float64)
    turned, expected = about_vertical(torch.tensor([0.7], dtype=torch.float64), lying), np.empty(4)
    mujoco.mju_mulQuat(expected, np.array([math.cos(0.35), 0, 0, math.sin(0.35)]), lying[0].numpy())
    np.testing.assert_allclose(turned[0], expected)


def test_a_mesh_is_an_object_that_lies_on_the_table(tmp_path):
    (tmp_path / "tetra.obj").write_text(TETRA)
    mesh = {"shape": "mesh", "file": "tetra.obj", "pose": {"x": [0.4, 0.5]}}  # beside the config
    scene = {"objects": {"tetra": mesh, "ball": None}}
    (tmp_path / "crowd.json").write_text(json.dumps({"id": "CrowdTest", "seed": 0, "env": {"scene": scene}}))
    with make(tmp_path / "crowd.json") as env:
        obs, _ = env.reset()
        for _ in range(10):
            after = env.step(torch.zeros(1, 4))[0]
        assert float((after["tetra", "pos"] - obs["tetra", "pos"]).norm()) < 2e-3
        data = mujoco.MjData(env.physics.model)
        env.physics.load(data, 0)
        mujoco.mj_forward(env.physics.model, data)
        model = env.physics.model
        geom = model.geom("tetra")
        points = model.mesh_vert @ data.geom("tetra").xmat.reshape(3, 3).T + data.geom("tetra").xpos
        assert abs(points[:, 2].min()) < 2e-3
        middle = 0.5 * (points.min(axis=0) + points.max(axis=0))  # it stands upright, turned by 0: the file's own box
        np.testing.assert_allclose(after["tetra", "pos"][0].numpy(), middle, atol=2e-3)
        assert int(geom.type[0]) == int(mujoco.mjtGeom.mjGEOM_MESH)


def test_progress_up_a_ladder_counts_the_highest_stage():
    yes, no = torch.tensor([True]), torch.tensor([False])
    part = torch.tensor([0.5])
    assert climb((no, part), (no, part)).item() == 0.25
    assert climb((yes, part), (yes, part)).item() == 0.75
    assert climb((no, part), (no, part), (yes, 3.0 * part)).item() == 1.0  # a hand that has left what it placed
    term = stages(reward("near", 0.9, of="ee", to="cube"), reward("lifted", 1.0, of="cube", height=0.1))
    assert [stage["done"] for stage in term.params["stages"]] == [0.9, 1.0]


@pytest.mark.parametrize(
    ("scene", "error", "messages"),
    [
        ({"objects": {"x": {"shape": "bx"}}}, ConfigError, ["env.scene.objects.x.shape", "'box'"]),
        ({"objects": {"x": {"size": [0.1, 0.1]}}}, ConfigError, ["objects.x.size: a box has 3 numbers, got 2"]),
        ({"objects": {"x": {"mass": -1.0}}}, ConfigError, ["env.scene.objects.x.mass"]),
        ({"objects": {"x y": {}}}, ConfigError, ["env.scene.objects"]),
        ({"objects": {"robot": {}}}, ConfigError, ["env.scene.objects.robot: this name is taken"]),
        ({"objects": {"x": {"shape": "mesh"}}}, ConfigError, ["objects.x.file: expected a file"]),
        (
            {"objects": {"x": {"shape": "mesh", "file": "no.obj"}}},
            ConfigError,
            ["env.scene.objects.x.file: no such file: no.obj"],
        ),
        ({"objects": {"x": {"quat": [0, 0, 0, 0]}}}, ConfigError, ["objects.x.quat: expected a rotation"]),
        ({"fixtures": {"x": {"kind": "drawr"}}}, ConfigError, ["env.scene.fixtures.x.kind: unknown", "'drawer'"]),
        ({"fixtures": {"x": {"kind": "bin", "wal": 1.0}}}, ConfigError, ["fixtures.x.wal: unknown key", "'wall'"]),
        ({"goals": {"cube": {}}}, ConfigError, ["env.scene.goals.cube: this name is taken"]),
        (
            {"cameras": {"x": {"pos": [0, 0, 1], "lookat": [1, 0, 0], "body": "cub"}}},
            ConfigError,
            ["cameras.x.body: no such body 'cub'. Did you mean 'cube'"],
        ),
    ],
)
def test_a_wrong_scene_is_one_error_with_its_path(scene, error, messages):
    with pytest.raises(error) as caught:
        make({"id": "CrowdTest", "env": {"scene": scene}})
    for message in messages:
        assert message in str(caught.value)


def test_a_scene_is_kept_by_a_saved_config_and_refused_where_it_cannot_be_built():
    cfg = load_gym_config("CrowdTest")
    again = load_gym_config(cfg.to_dict())
    assert again.to_dict() == cfg.to_dict()
    assert again.env.scene.fixtures["panel"] == cfg.env.scene.fixtures["panel"]
    with pytest.raises(ConfigError, match=r"env.scene: .* has a scene of its own"):
        make({"id": "HalfCheetah-v5", "env": {"scene": {"objects": {"ball": {"shape": "sphere"}}}}})


def test_a_config_adds_distractors_and_a_camera_at_the_hand_to_a_task_of_the_package():
    area = {"x": [0.6, 0.7], "y": [-0.2, 0.2]}
    scene = {
        "objects": {
            "ball": {"shape": "sphere", "size": [0.02], "pose": area},
            "post": {"shape": "cylinder", "size": [0.02, 0.05], "fixed": True, "pose": area, "observe": False},
        },
        "cameras": {"hand": {"pos": [0.06, 0.0, 0.06], "lookat": [0.0, 0.15, 0.0], "body": "robot/tool/pusher"}},
    }
    term = {"func": "distance", "weight": -0.1, "params": {"of": "cube", "to": "ball"}}
    env_cfg = {"scene": scene, "rewards": {"terms": {"ball": term}}}
    plain = {"id": "PushCubeRL", "num_envs": 2, "seed": 4}
    with make(plain) as known, make({**plain, "env": env_cfg}) as env:
        before, _ = known.reset()
        obs, _ = env.reset()
        assert set(obs.keys()) == {"robot", "object", "goal", "ball"}
        assert torch.equal(obs["robot", "qpos"], before["robot", "qpos"])  # drawn before the scene
        gap = env.step(torch.zeros(2, 6))[4]["rewards"]["ball"]
        scene = env.task.read()
        torch.testing.assert_close(gap, -0.1 * (scene["cube_pos"] - scene["ball_pos"]).norm(dim=1))
        model = env.physics.model
        assert model.body(int(model.camera("hand").bodyid[0])).name == "robot/tool/pusher"
        data = mujoco.MjData(model)
        env.physics.load(data, 0)
        mujoco.mj_forward(model, data)
        ahead = -data.camera("hand").xmat.reshape(3, 3)[:, 2]  # towards the tip of the tool
        body = data.body("robot/tool/pusher")
        tip = body.xpos + body.xmat.reshape(3, 3) @ np.array([0.0, 0.15, 0.0]) - data.camera("hand").xpos
        np.testing.assert_allclose(ahead, tip / np.linalg.norm(tip), atol=1e-6)
    with pytest.raises(ConfigError, match="has a body 'cube' already"):
        make({"id": "PushCubeRL", "env": {"scene": {"objects": {"cube": {}}}}})


def test_ranges_of_a_scene_may_follow_a_curriculum():
    grow = {"curriculum": {"by": "steps", "from": [0.4, 0.4], "to": [0.6, 0.6], "between": [0, 10]}}
    given = {"id": "CrowdTest", "seed": 0, "max_episode_steps": 5}
    with make({**given, "env": {"scene": {"objects": {"cube": {"pose": {"x": grow}, "min_distance": 0.0}}}}}) as env:
        obs, _ = env.reset()
        assert float(obs["cube", "pos"][0, 0]) == pytest.approx(0.4)
        for _ in range(15):
            obs = env.step(torch.zeros(1, 4))[0]
        assert float(obs["cube", "pos"][0, 0]) == pytest.approx(0.6)


def test_the_guide_has_every_setting_of_a_scene_with_its_default():
    def shown(value) -> str | None:
        if isinstance(value, tuple):
            return f"[{', '.join(str(shown(entry)) for entry in value)}]"
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, int | float):
            return f"{value:g}"
        return value if isinstance(value, str) else None

    common = {field.name for field in dataclasses.fields(scene_cfg.FixtureCfg)}
    classes = {"objects": ObjectCfg, "goals": scene_cfg.GoalCfg, "cameras": scene_cfg.ViewCfg}
    classes |= {"fixtures": scene_cfg.FixtureCfg, **scene_cfg._KINDS}
    text = (Path(__file__).parents[2] / "docs" / "own_task.md").read_text()
    table = text.partition("| in `env.scene` |")[2].partition("\n\n")[0].splitlines()[2:]
    found = {}
    for row in table:
        name, settings = re.findall(r"`(\w+)`", row.split("|")[1])[-1], row.split("|")[2]
        found[name] = {key: value or None for key, value in re.findall(r"`(\w+)`(?: \(([^)]*)\))?", settings)}
    expected = {}
    for name, cls in classes.items():
        inherited = (
            common | {"kind"} if name not in ("fixtures", "peg") and cls in scene_cfg._KINDS.values() else {"kind"}
        )
        own = {field.name: field for field in dataclasses.fields(cls) if field.name not in inherited}
        expected[name] = {
            key: shown(field.default if field.default_factory is dataclasses.MISSING else field.default_factory())
            for key, field in own.items()
        }
    for name in expected:
        given = {key: value for key, value in found[name].items() if key not in ("fixtures", "kind")}
        assert given == expected[name], name
