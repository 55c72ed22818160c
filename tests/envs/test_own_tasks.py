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
from embodichain.envs.primitives import DOWN, press
from embodichain.envs.registration import load_gym_config, make
from embodichain.envs.task import ResetState, UnknownQuantityError
from embodichain.envs.task_env import TaskEnv
from embodichain.envs.tasks.kit import ur5
from embodichain.envs.tasks.reach import Reach
from embodichain.envs.terms import register_reward
from embodichain.errors import AssetError, ConfigError, EnvContractError, UnknownNameError

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


MISTAKES = """
import torch
from embodichain.envs.env_cfg import EventsCfg, PoseRangeCfg, SceneCfg
from embodichain.envs.fixtures import ButtonsCfg
from embodichain.envs.primitives import DOWN, press
from embodichain.envs.registration import register_task
from embodichain.envs.tasks.kit import KitTask, kit_cfg, observation, reward, ur5
from embodichain.envs.terms import register_observation, register_reward

@register_reward("own_reward")
def own_reward(task, scene, action):
    return REWARD(scene)

@register_observation("own_observation")
def own_observation(task, scene):
    return OBSERVATION(scene)

REWARD = OBSERVATION = lambda scene: scene["ee_pos"][:, 0]

class Own(KitTask):
    @staticmethod
    def default_cfg():
        scene = SceneCfg(fixtures={"panel": ButtonsCfg(pose=PoseRangeCfg(x=(0.4, 0.55)))})
        rewards = {"own": reward("own_reward"), "success": reward("success", 10.0)}
        observations = {"own": observation("own_observation")}
        return kit_cfg("Own", scene, rewards, steps=60, robot=ur5("pusher"), observations=observations)

    def success(self, scene):
        return scene["panel_button_0_opening"] > 0.01

class Pressing(Own):
    def expert_action(self, scene, actions):
        tool, button = self.arm(scene), scene["panel_button_0_pos"]
        return tool.act(actions, press(tool, button, DOWN, self.success(scene), clearance=0.06))

class Silent(KitTask):
    default_cfg = Own.default_cfg
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module with a task in which tests make mistakes."""
    (tmp_path / "mistakes.py").write_text(MISTAKES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registration, "_TASKS", dict(registration._TASKS))
    import mistakes

    yield mistakes
    sys.modules.pop("mistakes", None)


def build(task: Any, num_envs: int = 4, **settings: Any) -> TaskEnv:
    cfg = task.default_cfg().replace(num_envs=num_envs, **settings)
    return TaskEnv(cfg, task, MujocoCpuPhysics(task.build_model(cfg), num_envs, 1))


@pytest.mark.parametrize(
    ("method", "function", "error"),
    [
        ("success", lambda self, scene: None, r"Own\.success must return bool .*got None \(is there a return\?\)"),
        ("success", lambda self, scene: not scene["qpos"] > 0, r"Own\.success raised RuntimeError: Bo.*"
         r"test_own_tasks\.py, line \d+\)\. Values of all envs come together"),
        ("success", lambda self, scene: 1 / 0, r"Own\.success raised ZeroDivisionError.*test_own_tasks\.py, line \d+"),
        ("sample_start", lambda self, env_ids, streams: None, r"Own\.sample_start must return a ResetState.*got None"),
        ("sample_start", lambda self, env_ids, streams: ResetState(torch.zeros(4, 2), torch.zeros(4, 2)),
         r"sample_start must return a ResetState whose qpos is float64 \[num_envs, 7\].*got float32 \[4, 2\]"),
        ("read", lambda self, env_ids=None: {"qpos": torch.zeros(3)}, r"Own\.read must .*got 'qpos' as float32 \[3\]"),
        ("observe", lambda self, scene: {"robot": {"qpos": 1.0}}, r"Own\.observe must .*in 'robot', 'qpos' as float"),
        ("observe", lambda self, scene: None, r"Own\.observe must return a nested dict .*got None"),
    ],
)  # fmt: skip
def test_mistakes_in_methods_are_named_when_the_env_is_made(own, method, function, error) -> None:
    setattr(own.Own, method, function)
    with pytest.raises(EnvContractError, match=error):
        build(own.Own)


@pytest.mark.parametrize(
    ("method", "value", "error"),
    [
        ("metrics", {"height": 1.0}, r"Own\.metrics must return a dict of metrics.*got 'height' as float"),
        ("reward_terms", {}, r"Own\.reward_terms must .*among them 'speed' of reward_weights; got none"),
        ("reward_terms", {"speed": torch.zeros(4, 1)}, r"Own\.reward_terms .*got 'speed' as float32 \[4, 1\]"),
        ("expert_action", torch.zeros(4, 2), r"Own\.expert_action must .*here \[4, 3\]; got float32 \[4, 2\]"),
    ],
)
def test_mistakes_that_only_a_step_shows(own, method, value, error) -> None:
    own.Own.reward_weights = {"speed": 1.0}
    own.Own.reward_terms = lambda self, scene, action: {"speed": scene["ee_pos"][:, 0]}
    setattr(own.Own, method, lambda *args: value)
    with build(own.Own) as env:
        for _ in range(2):  # it stays an error
            with pytest.raises(EnvContractError, match=error):
                env.step(env.expert_action() if method == "expert_action" else torch.zeros(4, 3))


@pytest.mark.parametrize("returned", [1.0, None, torch.zeros(3)])
def test_values_of_own_functions_are_checked(own, returned) -> None:
    got = {float: "float", type(None): "None"}.get(type(returned), r".*\[3\]")
    own.REWARD = lambda scene: returned
    with pytest.raises(ConfigError, match=rf"env\.rewards\.terms\.own: .*a tensor \[4\], got {got}.* of 'own_reward'"):
        build(own.Own)
    own.REWARD, own.OBSERVATION = (lambda scene: scene["ee_pos"][:, 0]), (lambda scene: returned)
    with pytest.raises(ConfigError, match=rf"env\.observations\.terms\.own: .*got {got}.* of 'own_observation'"):
        build(own.Own)


def test_exceptions_of_own_functions_name_them(own) -> None:
    own.REWARD = lambda scene: scene["ee_pos"] @ scene["ee_pos"]
    with pytest.raises(
        EnvContractError, match=r"the reward function 'own_reward' \(env\.rewards\.terms\.own\) raised Run"
    ):
        build(own.Own)
    own.REWARD = lambda scene: scene["after_a_step"]  # may be measured later
    with build(own.Own) as env, pytest.raises(UnknownQuantityError, match="after_a_step"):
        env.step(torch.zeros(4, 3))


def test_task_without_success_is_told_what_to_write(own) -> None:
    with pytest.raises(EnvContractError, match=r"Silent\.success: expected a method success\(self, scene\)"):
        build(own.Silent)


def test_methods_are_checked_once(own) -> None:
    with build(own.Pressing) as env:
        env.step(env.expert_action())
        names = {"sample_start", "read", "observe", "success", "failed", "reward_terms", "metrics", "expert_action"}
        assert not names & vars(env.task).keys()


def test_expert_condition_that_is_no_condition_is_named(own) -> None:
    def expert_action(self: Any, scene: Any, actions: Any) -> Any:
        tool = self.arm(scene)
        return tool.act(actions, press(tool, scene["ee_pos"], DOWN, scene["panel_button_0_opening"]))

    own.Own.expert_action = expert_action
    with (
        build(own.Own) as env,
        pytest.raises(EnvContractError, match=r"until: expected .*bool.*got float32 \[4\]") as raised,
    ):
        env.expert_action()
    assert "Own.expert_action" in raised.value.__notes__[0]


def test_joints_that_start_beyond_their_limits_are_warned_of(own, caplog) -> None:
    def sample_start(self: Any, env_ids: Any, streams: Any) -> Any:
        start = self.start_robot(env_ids, streams)
        start.qpos[:, 1] = 7.0
        return start

    own.Own.sample_start = sample_start
    words = "joint 'robot/shoulder_pan' starts at 7, beyond its limits -6.283 to 6.283"
    reset = next(result for result in run_checks(build(own.Own)) if result.name == "reset")
    assert reset.warnings == (words,)
    told = [record.getMessage() for record in caplog.records if "task_contract" in record.name]
    assert told == [f"Own.sample_start: {words}"]


def test_randomised_joints_stay_within_their_limits() -> None:
    events = {"randomize_robot": {"position": 10.0}}
    with make("ReachRL", num_envs=64, env={"events": events}) as env:
        qpos, robot = env.physics.qpos[:, env.robot.qpos], env.robot
        assert (qpos >= robot.lower - 1e-6).all()
        assert (qpos <= robot.upper + 1e-6).all()
        assert qpos.std() > 1.0
    with make("CartPoleRL", num_envs=64) as env:  # a joint without limits
        assert env.physics.qpos[:, 0].std() > 0.01


def test_check_says_how_often_the_expert_succeeds(own, monkeypatch) -> None:
    registration.register_task("Own", own.Pressing)
    factory = lambda num_envs: make("Own", num_envs=num_envs)  # noqa: E731
    results = {result.name: result for result in run_checks(factory(2), factory)}
    assert results["demonstration"].warnings == ()
    assert results["demonstration"].skipped is None
    monkeypatch.setattr(own.Pressing, "expert_action", lambda self, scene, actions: torch.zeros(len(scene["qpos"]), 3))
    results = {result.name: result for result in run_checks(factory(2), factory)}
    assert results["demonstration"].warnings[0].startswith("the expert solved 0 of 8 starts")
    assert not results["demonstration"].problems


def test_default_cfg_that_returns_nothing(own) -> None:
    own.Own.default_cfg = staticmethod(lambda: None)
    with pytest.raises(EnvContractError, match=r"Own\.default_cfg must return a GymCfg.*got None"):
        registration.register_task("Own", own.Own)
    with pytest.raises(UnknownNameError, match=r"'pushr'.*'pusher'"):
        ur5("pushr")


def test_names_of_the_package_are_not_replaced(own, caplog) -> None:
    with pytest.raises(
        ConfigError, match=r"PushCubeRL is a task of this package, .*push_cube:PushCube, which mistakes:Own"
    ):
        registration.register_task("PushCubeRL", own.Own)
    with pytest.raises(
        ConfigError, match=r"'near' is a reward function of this package, embodichain\.envs\.terms\.near"
    ):
        register_reward("near")(own.own_reward)
    registration.register_task("Own", own.Own)
    del sys.modules["mistakes"]
    import mistakes  # again, as under another name

    assert mistakes.own_reward is not own.own_reward
    registration.register_task("Own", mistakes.Own)
    assert not caplog.records
    registration.register_task("Own", mistakes.Pressing)
    assert "mistakes:Own is replaced by mistakes:Pressing" in caplog.text


def test_modules_that_register_nothing_or_exit(tmp_path, capfd) -> None:
    for name, text, words in (
        ("own_nothing", "", "own_nothing"),
        ("own_exit", "import sys\nsys.exit(3)", "it exits (sys.exit(3)) instead of defining things ("),
    ):
        (tmp_path / f"{name}.py").write_text(text)
        assert main(["envs", "check", "Nothing", "--trust", str(tmp_path / f"{name}.py")]) == 2
        told = capfd.readouterr().err
        assert words in told
        assert ("registered no task: add" in told) == (name == "own_nothing")


def test_mistake_that_shows_later_ends_a_stream_at_once(folder, caplog) -> None:
    """Workers are replaced after accidents; a task that breaks its contract would do so again."""
    text = "class Late(Hover):\n    def metrics(self, scene):\n        return {'steps': 3}\n"
    text += "    def expert_action(self, scene, actions):\n        return torch.zeros(len(scene['qpos']), 6)\n"
    (folder / "own_tasks.py").write_text(TASK + text + "register_task('Late', Late)\n")
    with (
        pytest.raises(EnvContractError, match=r"Late\.metrics must return"),
        OnlineDataEngine(OnlineDataEngineCfg(**settings("Late"))) as engine,
    ):
        engine.sample_batch(1, 2)
    assert "replacing it" not in caplog.text


def test_stream_says_that_actions_are_random(folder, capfd) -> None:
    words = ["stream", "Hover", "--duration", "0.1", "--chunk-size", "2", "--buffer_size", "2"]
    assert main([*words, "--gym_config.num_envs", "2", "--trust", str(folder / "own_tasks.py")]) == 0
    assert "Hover has no scripted expert, so random actions are streamed" in capfd.readouterr().err


def test_what_is_put_around_a_method_stays_there():
    with make("PushCubeRL", num_envs=2, seed=0) as env:
        calls, method = [], env.task.reward_terms
        env.task.reward_terms = lambda scene, action: calls.append(1) or method(scene, action)
        for _ in range(3):
            env.step(env.expert_action())
    assert len(calls) == 3
