"""Odd robots, scenes and terms: what can be understood works, and what is wrong is one message that says what to do."""

import json

import mujoco
import pytest
import torch

from embodichain.envs.env_cfg import RobotCfg
from embodichain.envs.registration import load_gym_config, make, make_to_watch
from embodichain.envs.robots import Robot, build_model, describe
from embodichain.errors import AssetError, ConfigError, EnvContractError, UnknownNameError

LINK = """<body name="l{i}" pos="0 0 0.2"><joint name="j{i}" axis="{axis}" range="-2 2" damping="1" armature="0.05"/>
  <geom type="capsule" fromto="0 0 0 0 0 0.2" size="0.03" mass="1"/>"""


HAND = """<body name="hand"><site name="tcp" pos="0 0 0.2"/><body name="finger">
  <joint name="f" type="slide" axis="1 0 0" range="0 0.04"/><geom size="0.02"/></body></body>"""


def robot(end="", motors="", more="", base=""):
    """The text of an arm of four joints."""
    links = "".join(LINK.format(i=i, axis="0 0 1" if i == 1 else "0 1 0") for i in range(1, 5))
    return f"""<mujoco><compiler angle="radian"/><worldbody><body name="base">{base}
      {links}{end}{"</body>" * 5}</worldbody>
      <actuator>{motors}</actuator>{more}</mujoco>"""


def built(tmp_path, text, **settings):
    (tmp_path / "mine.xml").write_text(text)
    cfg = RobotCfg(mjcf=str(tmp_path / "mine.xml"), **settings)
    model = build_model("table_scene.xml", cfg)
    return model, Robot(model, describe(cfg))


def key(qpos):
    return f'<keyframe><key name="home" qpos="{qpos}"/></keyframe>'


@pytest.mark.parametrize(
    ("parts", "site"),
    [
        ({"end": '<site pos="0 0 0.2"/>'}, "unnamed_site"),
        ({"end": '<site pos="0 0 0.2"/><site pos="0 0 0.1"/><site name="mount_of_hand"/>'}, "unnamed_site"),
        ({"end": '<site pos="0 0 0.1"/><site name="tcp" pos="0 0 0.2"/>'}, "tcp"),
        ({"motors": '<position name="j1_servo" joint="j2" kp="50"/>'}, "l4_tool_frame"),
        ({"base": '<site name="l4_tool_frame"/>'}, "l4_tool_frame_2"),
    ],
)
def test_names_that_are_missing_or_taken_are_no_obstacle(tmp_path, parts, site):
    model, found = built(tmp_path, robot(**parts), init_qpos=[0.1, 0.5, 1.0, 1.0])
    assert found.num_joints == 4
    assert found.arms[""].site == f"robot/{site}"
    data = mujoco.MjData(model)
    data.qpos[:] = found.home(torch.tensor(model.qpos0)).numpy()
    mujoco.mj_kinematics(model, data)
    reached = found.chain.position(found.init_qpos[None].float())[0]
    torch.testing.assert_close(reached, torch.tensor(data.site(f"robot/{site}").xpos).float(), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("text", "settings", "told"),
    [
        (robot(), {"arms": {"a": {}, "b": {}}}, "robot.arms.b: it moves the same joints as robot.arms.a"),
        (robot(), {"init_qpos": [0, 9, 0, 0]}, "robot.init_qpos has j2 at 9, outside its limits [-2, 2]"),
        (robot(more=key("0 0 -8 0")), {}, "keyframe of the model, which has j3 at -8, outside its limits"),
        (robot(more=key("0 0")), {}, "the keyframe 'home' has 2 positions (qpos), and the model 4"),
        (robot(HAND), {"init_qpos": [0, 0, 0, 0, 4]}, "robot.init_qpos has f at 4, outside its limits [0, 0.04]"),
        (robot(), {"quat": [0, 0, 0, 0]}, "quat: expected a rotation"),
        (robot(), {"joints": ["j1", "j1"]}, "robot.joints: j1 is given twice"),
    ],
)
def test_robots_that_cannot_be_meant_are_one_message(tmp_path, text, settings, told):
    (tmp_path / "mine.xml").write_text(text)
    given = {"mjcf": str(tmp_path / "mine.xml"), **settings}
    with pytest.raises((ConfigError, AssetError)) as caught:
        build_model("table_scene.xml", RobotCfg.from_dict(given))
    assert told in str(caught.value)


def rewards(**terms):
    return {"rewards": {"terms": terms}}


def observations(**terms):
    return {"observations": {"terms": terms}}


def events(**terms):
    return {"events": terms}


def masses(bounds):
    return events(a={"func": "mass", "params": {"range": bounds}})


def cameras(*names):
    return {"observations": {"cameras": [{"name": name, "pos": [1, 0, 1], "lookat": [0, 0, 0]} for name in names]}}


MOVING = {"curriculum": {"by": "success", "from": [0.9, 1.1], "to": [0.5, 1.5], "between": [0.1, 0.9]}}
POINT = {"func": "position", "params": {"of": "ee"}}
CAMERA = {"pos": [1.0, 0.0, 1.0], "lookat": [1.0, 0.0, 1.0]}


@pytest.mark.parametrize(
    ("id", "env", "told"),
    [
        ("CartPoleRL", {"scene": {"objects": {"cube": {}}}}, "env.scene: CartPoleRL has cart and pole alone"),
        ("CartPoleRL", {"scene": {"goals": {"there": {}}}}, "env.scene: CartPoleRL has cart and pole alone"),
        ("LiftBarRL", {"scene": {"objects": {"bar": None}}}, "env.scene: LiftBarRL needs the object 'bar'"),
        ("LiftBarRL", {"scene": {"goals": {"goal": None}}}, "and the goal 'goal'"),
        ("ReachRL", {"scene": {"objects": {"table": {}}}}, "has a geom 'table' already; choose another name"),
        (
            "ReachRL",
            {"scene": {"objects": {"cube": {"size": [1e20]}}}},
            "objects.cube.size: expected at most 1000 metres",
        ),
        ("ReachRL", {"scene": {"cameras": {"eye": CAMERA}}}, "lookat must differ from pos"),
        ("ReachRL", cameras(""), "env.observations.cameras.0.name: expected a name without slashes"),
        ("ReachRL", cameras("a/b"), "expected a name without slashes (attach names a camera of the model), got 'a/b'"),
        ("ReachRL", cameras("a", "a"), "two cameras are called 'a'"),
        (
            "ReachRL",
            events(g={"func": "gravity", "params": {"range": [0, 1], "distribution": "log_uniform"}}),
            "params.range: log_uniform needs positive numbers, got [0.0, 1.0]",
        ),
        ("HalfCheetah-v5", rewards(x={"func": "success"}), "env.rewards.terms.x: HalfCheetah.success returns None"),
        ("HalfCheetah-v5", rewards(x={"func": "joint_limits"}), "env.rewards.terms.x: HalfCheetah-v5 knows no robot"),
        (
            "HalfCheetah-v5",
            events(it={"func": "friction", "params": {"range": MOVING}}),
            "env.events.it.params.range.curriculum.by: the task has no success to follow",
        ),
        (
            "PushCubeRL",
            rewards(x={"func": "lifted", "params": {"of": "goal", "height": 0.1}}),
            "env.rewards.terms.x: expected a thing with a height, and 'goal' is measured in the shape [2]",
        ),
        (
            "PushCubeRL",
            rewards(x={"func": "near", "params": {"of": "distance", "to": "ee"}}),
            "env.rewards.terms.x: expected a thing or a place, and 'distance'",
        ),
        ("ReachRL", rewards(zzz=None), "env.rewards.terms.zzz: ReachRL has no such term to leave out."),
        ("ReachRL", observations(**{"robot/qpos/x": None}), "'qpos' is an observation, not a group"),
        ("ReachRL", observations(**{"": POINT}), "expected a path of names, such as 'cube/offset', got ''"),
        ("ReachRL", observations(**{"a//b/": POINT}), "got 'a//b/'"),
        ("ReachRL", observations(robot=POINT), "env.observations.terms.robot: this is a group, of robot/qpos"),
        ("CartPole-v1", events(it={"func": "mass"}), "env.events: CartPole-v1 is simulated by Gymnasium"),
        (
            "PushCubeRL",
            {"events": {"a": {"mode": "reset", "params": {"range": [1, 2]}}}},
            'env.events.a: expected an event {"func": NAME, "mode": ..., "params": {...}}, or one of the settings of '
            "env.events, got {'mode': 'reset', 'params': {'range': [...]}}, which has no func. Valid: dem",
        ),
        ("PushCubeRL", {"events": {"a": "mass"}}, 'env.events.a: expected an event {"func": NAME'),
        ("PushCubeRL", {"rewards": {"x": {"weight": 1.0}}}, "which has no func"),
        ("PushCubeRL", {"events": {"randomize_mas": {}}}, "unknown key, got {} (dict). Did you mean 'randomize_mass'"),
        ("PushCubeRL", masses(1.0), "env.events.a.params.range: expected two numbers [low, high], got 1.0"),
        ("PushCubeRL", masses([1, 2, 3]), "params.range: expected two numbers [low, high], got [1, 2, 3]"),
        (
            "PushCubeRL",
            masses({"curriculum": {"by": "steps", "from": [1], "to": [1, 2], "between": [3, 8]}}),
            "env.events.a.params.range.curriculum.from: expected two numbers [low, high], got [1]",
        ),
        (
            "PushCubeRL",
            masses({"curriculum": {"by": "steps", "from": [1, "a"], "to": [1, 2], "between": [3, 8]}}),
            "curriculum.from.1: expected a number, got 'a'",
        ),
        (
            "PushCubeRL",
            events(a={"func": "mass", "interval_range_s": [1, 2], "params": {"range": [1, 2]}}),
            "env.events.a.interval_range_s: expected in mode 'interval' only, and this event is of mode 'reset'",
        ),
        (
            "PushCubeRL",
            {"events": {"terms": {"nothing": None}}},
            "env.events.terms.nothing: null removes one of the task, which has none",
        ),
        ("PressButtonRL", {"scene": {"fixtures": {"pannel": None}}}, "none of that name. Did you mean 'panel'?"),
        ("PressButtonRL", {"scene": {"goals": {"x": None}}}, "env.scene.goals.x: null removes one of the task"),
        (
            "PressButtonRL",
            {"scene": {"fixtures": {"a": {}}}},
            "env.scene.fixtures.a.kind: expected the kind of the fixture, got none. Valid: bin, button, door,",
        ),
        ("PressButtonRL", {"scene": {"fixtures": {"a": "bin"}}}, 'expected a fixture {"kind": ...} (one of bin,'),
        (
            "ReachRL",
            {"scene": {"objects": {"1a": {}}}},
            "expected a name of letters, digits and _ that begins with a letter, got '1a'",
        ),
    ],
)
def test_worlds_that_cannot_be_meant_are_one_message(id, env, told):
    with pytest.raises(ConfigError) as caught:
        make({"id": id, "env": env}, num_envs=1, seed=0, num_threads=1)
    assert told in str(caught.value)
    assert len(caught.value.problems) == 1


CAMERA = {"cameras": [{"name": "track"}]}


@pytest.mark.parametrize("id", ["HalfCheetah-v5", "CartPole-v1"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("observations", CAMERA),
        ("observations", {"noise": {"state": 0.1}}),
        ("observations", {"delay": {"state": [0, 2]}}),
        ("substeps", 3),
        ("timestep", 0.004),
        ("success_threshold", 0.2),
        ("terminate_on_success", None),
        ("language", {}),
        ("command", {}),
        ("rewards", {"mode": "sparse"}),
    ],
)
def test_gymnasiums_own_environments_refuse_what_they_would_ignore(id, key, value):
    if key == "terminate_on_success":  # the opposite of the default
        value = id == "HalfCheetah-v5"
    with pytest.raises(ConfigError, match=f"env.{key}: {id} is simulated by Gymnasium, where this cannot be set"):
        make({"id": id, "num_envs": 1, "native": False, "env": {key: value}})


def test_own_environments_in_place_of_gymnasiums_are_pointed_to():
    weights = {"id": "HalfCheetah-v5", "native": False, "env": {"rewards": {"weights": {"x": 1.0}}}}
    with pytest.raises(ConfigError, match=r"env\.rewards: .* leave it out, or leave out native: false"):
        make(weights, num_envs=1)


@pytest.mark.parametrize(("native", "told"), [(False, "sub_envs is missing"), (True, "sub_envs is unknown here")])
def test_a_state_of_another_environment_is_refused(native, told):
    with make("HalfCheetah-v5", num_envs=2, native=not native) as other:
        other.reset(seed=0)
        state = other.get_state()
    with make("HalfCheetah-v5", num_envs=2, native=native) as env, pytest.raises(EnvContractError, match=told):
        env.set_state(state)


@pytest.mark.parametrize("text", ["no mesh at all", ""])
@pytest.mark.parametrize("name", ["bad.stl", "bad.obj", "bad.txt"])
def test_a_bad_mesh_is_named_by_its_setting(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    scene = {"objects": {"a": {"shape": "mesh", "file": str(tmp_path / name)}}}
    with pytest.raises(ConfigError, match=rf"env\.scene\.objects\.a\.file: expected a mesh .*{name} is none"):
        make({"id": "ReachRL", "env": {"scene": scene}}, num_envs=1)


@pytest.mark.parametrize(("key", "value"), [("num_envs", -1), ("num_envs", 2.5), ("num_envs", "4"), ("seed", -1)])
def test_a_wrong_setting_of_a_file_is_an_error_also_where_it_is_overridden(tmp_path, key, value):
    file = tmp_path / "gym.json"
    file.write_text(json.dumps({"id": "ReachRL", key: value}))
    with pytest.raises(ConfigError, match=f"{key}: expected"):
        make_to_watch(file, num_envs=1, seed=0)
    file.write_text(json.dumps({key: 1}))
    with pytest.raises(ConfigError, match=r"gym\.json: 1 problem\n.*id: expected the name of an environment.*got none"):
        make(file)


def test_an_unknown_robot_may_be_one_of_a_module_of_the_users():
    with pytest.raises(UnknownNameError, match=r"'xarm7'.* calls register_robot, name it: --trust MODULE"):
        make({"id": "ReachRL", "robot": {"uid": "xarm7"}})


def test_gymnasiums_own_environments_have_no_robot_of_ours():
    with pytest.raises(ConfigError, match="robot: CartPole-v1 is simulated by Gymnasium"):
        make({"id": "CartPole-v1", "robot": {"uid": "panda"}})


def test_gymnasiums_own_environments_take_the_defaults_written_out():
    for id in ("HalfCheetah-v5", "CartPole-v1"):
        written = load_gym_config({"id": id, "native": False}, seed=0).to_dict()
        with make(written) as env, make_to_watch(written) as watched:
            assert env.observation_space == watched.observation_space


def test_tasks_together_have_their_own_settings():
    tasks = {"kwargs": {"tasks": ["ReachRL", "CartPoleRL"], "observations": "padded"}}
    with pytest.raises(ConfigError, match=r"env.observations: expected in the env of each task of kwargs.tasks"):
        make({"id": "MultiTask", "num_envs": 2, **tasks, "env": {"observations": CAMERA}})


def test_a_stage_may_be_the_rate_of_actions():
    """The last action is kept for a stage as it is for a term, and is zero at the start."""
    stages = [{"func": "action_rate", "done": 0.25}, {"func": "success"}]
    terms = {"x": {"func": "staged", "params": {"stages": stages}}}
    with make({"id": "ReachRL", "env": {"rewards": {"terms": terms}}}, num_envs=1, seed=0, num_threads=1) as env:
        size = env.action_space.shape[-1]
        for action, expected in ((0.25, 0.125), (0.25, 0.0), (-0.25, 0.5)):
            *_, info = env.step(torch.full((1, size), action))
            assert info["rewards"]["x"].item() == pytest.approx(expected, abs=1e-6)
