"""From a name or a config to an environment."""

import json
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import pytest
import torch
import yaml

from embodichain import envs
from embodichain.envs import MUJOCO_SUITE, registration
from embodichain.envs.env_cfg import GymCfg
from embodichain.envs.registration import list_envs, load_gym_config, make, register_task
from embodichain.envs.task_env import TaskEnv
from embodichain.envs.tasks.reach import Reach
from embodichain.errors import ConfigError, UnknownNameError
from tests.envs.rollouts import assert_same, random_actions, record

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "configs").rglob("gym_config.json"))


@pytest.fixture
def registry(monkeypatch):
    """A registry that is as it was after the test."""
    monkeypatch.setattr(registration, "_TASKS", dict(registration._TASKS))
    before = set(gym.registry)
    yield
    for name in set(gym.registry) - before:
        del gym.registry[name]


def test_every_task_is_listed_with_a_line_about_it():
    assert [spec.id for spec in list_envs()] == sorted([*envs.TASKS, *MUJOCO_SUITE])
    for spec in list_envs():
        assert spec.description.endswith(".")
        assert spec.task.default_cfg().id == spec.id


@pytest.mark.parametrize("name", ["ReachRL", "reachrl", "REACHRL"])
def test_a_task_is_found_whatever_the_case_of_its_name(name):
    assert load_gym_config(name).id == "ReachRL"
    assert (
        load_gym_config({"id": name, "num_envs": 2}).max_episode_steps == load_gym_config("ReachRL").max_episode_steps
    )


def test_a_shipped_config_says_what_the_task_says_anyway():
    """The files spell out the defaults, so reading one teaches what can be set."""
    assert {load_gym_config(path).id for path in SHIPPED} == set(envs.TASKS)
    for path in SHIPPED:
        cfg = load_gym_config(path)
        default = load_gym_config(cfg.id, num_envs=cfg.num_envs, seed=cfg.seed).to_dict()
        weights = next(spec.task.reward_weights for spec in list_envs() if spec.id == cfg.id)
        default["env"]["rewards"]["weights"] = weights
        assert cfg.to_dict() == default


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.parent.name)
def test_a_shipped_config_makes_its_env(path):
    with make(path, num_envs=2) as env:
        assert isinstance(env, TaskEnv)
        env.step(torch.zeros(env.action_manager.shape))


def test_json_yaml_a_dict_and_a_config_make_the_same_env(tmp_path):
    given = {"id": "PushCubeRL", "num_envs": 3, "seed": 5, "env": {"substeps": 4, "actions": {"qpos": {"scale": 0.2}}}}
    (tmp_path / "a.json").write_text(json.dumps(given))
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(given))
    sources = [given, tmp_path / "a.json", str(tmp_path / "a.yaml"), load_gym_config(given)]
    assert len({json.dumps(load_gym_config(source).to_dict()) for source in sources}) == 1
    traces = []
    for source in sources:
        with make(source) as env:
            traces.append(record(env, random_actions(env, 3)))
    for trace in traces[1:]:
        assert_same(trace, traces[0])


@pytest.mark.parametrize("base", ["ReachRL", {"id": "ReachRL"}, load_gym_config("ReachRL")], ids=["id", "dict", "cfg"])
def test_overrides_go_deep_and_leave_the_rest(base):
    cfg = load_gym_config(base, num_envs=7, env={"substeps": 3, "events": {"randomize_target": {"x": [0.4, 0.5]}}})
    default = Reach.default_cfg()
    assert cfg.num_envs == 7
    assert cfg.env.substeps == 3
    assert cfg.env.events.randomize_target.x == (0.4, 0.5)
    assert cfg.env.events.randomize_target.y == default.env.events.randomize_target.y
    assert cfg.env.actions == default.env.actions
    assert cfg.robot == default.robot
    assert load_gym_config(base).env.substeps == default.env.substeps


@pytest.mark.parametrize("base", ["ReachRL", load_gym_config("ReachRL")], ids=["id", "cfg"])
def test_an_action_term_replaces_the_one_before(base):
    cfg = load_gym_config(base, env={"actions": {"ee_delta": {"scale": 0.02}}})
    assert cfg.env.actions.delta_qpos is None
    assert cfg.env.actions.ee_delta.scale == 0.02


def test_a_config_object_is_not_changed_by_overrides():
    cfg = load_gym_config("ReachRL")
    load_gym_config(cfg, num_envs=9, env={"substeps": 2})
    assert cfg == Reach.default_cfg()


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [("PushCubRL", "PushCubeRL"), ("pushcubrl", "PushCubeRL"), ("Reach", "ReachRL"), ("CartPole-v11", "CartPole-v1")],
)
def test_an_unknown_id_gets_the_nearest_names(name, suggestion):
    with pytest.raises(UnknownNameError) as caught:
        make(name)
    assert repr(name) in str(caught.value)
    assert repr(suggestion) in str(caught.value)
    assert f"Tasks: {', '.join(sorted(envs.TASKS))}; or any Gymnasium id" in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"id": "ReachRL", "num_env": 3}, r"num_env: unknown key.*Did you mean 'num_envs'"),
        ({"id": "ReachRL", "env": {"substep": 3}}, r"env\.substep: unknown key.*Did you mean 'substeps'"),
        (
            {"id": "ReachRL", "env": {"actions": {"delta_qps": {}}}},
            r"env\.actions\.delta_qps: unknown key.*'delta_qpos'",
        ),
        ({"id": "ReachRL", "num_envs": 0}, r"num_envs: expected greater than or equal to 1, got 0"),
        ({"id": "ReachRL", "num_envs": "4"}, r"num_envs: expected an integer, got '4'"),
        ({"id": "ReachRL", "env": {"events": {"randomize_target": {"x": [0.6, 0.3]}}}}, r"low <= high"),
        ({"id": "ReachRL", "env": {"rewards": {"mode": "dence"}}}, r"mode: expected .*Did you mean 'dense'"),
        ({"id": "ReachRL", "env": None}, r"env: expected a mapping"),
        ({"id": "ReachRL", "env": {"actions": None}}, r"env\.actions: expected a mapping"),
        ({"num_envs": 3}, r"id: expected the name of an environment, .*got none"),
        ({"id": 3}, r"id: expected the name of an environment, .*got 3"),
        (17, r"expected a config, the path of one or an id, got int"),
        ("nothing.json", r"nothing\.json.*\n.*no such file"),
    ],
)
def test_a_wrong_config_is_one_clear_error(config, message):
    with pytest.raises(ConfigError, match=message):
        make(config)


def test_all_problems_come_at_once():
    with pytest.raises(ConfigError) as caught:
        load_gym_config("ReachRL", num_envs=-1, sed=3, env={"substeps": 0})
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize(
    ("robot", "message"),
    [({"uid": "ur6"}, r"robot 'ur6'\. Did you mean 'ur5'"), ({"tool": "griper"}, r"tool 'griper'\. Did you mean 'gri")],
)
def test_unknown_robots_and_tools_get_the_nearest_names(robot, message):
    with pytest.raises(UnknownNameError, match=message):
        make("ReachRL", robot=robot)


def test_a_task_of_ones_own(registry):
    class FarReach(Reach):
        """Reach further.

        More about it.
        """

        @staticmethod
        def default_cfg() -> GymCfg:
            return Reach.default_cfg().replace(id="FarReachRL", max_episode_steps=5)

    register_task("FarReachRL", FarReach)
    assert "FarReachRL" in [spec.id for spec in list_envs()]
    assert next(spec for spec in list_envs() if spec.id == "FarReachRL").description == "Reach further."
    with make("FarReachRL", num_envs=2) as env:
        assert env.max_episode_steps == 5
        assert isinstance(env.task, FarReach)


def test_an_entry_point_is_imported_when_the_task_is_made(registry):
    register_task("OtherReachRL", "embodichain.envs.tasks.reach:Reach")
    spec = next(spec for spec in list_envs() if spec.id == "OtherReachRL")
    assert spec.entry_point == "embodichain.envs.tasks.reach:Reach"
    assert spec.task is Reach
    with make("OtherReachRL", num_envs=1) as env:
        assert isinstance(env.task, Reach)
    assert "embodichain/OtherReachRL-v0" in gym.registry


def test_listing_the_tasks_imports_none_of_them():
    script = (
        "import sys; from embodichain.envs.registration import list_envs; ids = [spec.id for spec in list_envs()]; "
        f"assert len(ids) == {len(envs.TASKS) + len(MUJOCO_SUITE)}; "
        "assert not any(m.startswith('embodichain.envs.tasks') for m in sys.modules); "
        "assert 'matplotlib' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_a_task_without_a_docstring_has_none_to_show(registry):
    class Silent(Reach):
        pass

    register_task("SilentRL", Silent)
    assert next(spec for spec in list_envs() if spec.id == "SilentRL").description == "(no description)"


def test_a_gymnasium_id_makes_an_env_too():
    with make("CartPole-v1", num_envs=3, seed=0) as env:
        obs, _ = env.reset(seed=0)
        assert obs.batch_size == (3,)
        assert env.max_episode_steps == 500


def test_a_gymnasium_env_has_a_bounded_number_of_copies():
    with pytest.raises(ConfigError, match=r"num_envs: expected at most 16384 copies .* got 100000"):
        make("CartPole-v1", num_envs=100_000)


def test_envs_that_do_not_fit_into_memory_are_refused(monkeypatch):
    def fails(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(registration, "MujocoCpuPhysics", fails)
    with pytest.raises(ConfigError, match=r"num_envs: a number of 7 environments does not fit into the memory"):
        make("CartPoleRL", num_envs=7)


def test_every_task_has_a_page_a_picture_a_config_and_a_measured_expert():
    page = (ROOT / "docs/tasks.md").read_text(encoding="utf-8")
    measured = json.loads((ROOT / "benchmarks/results/experts.json").read_text())["tasks"]
    configs: dict[str, list[str]] = {}
    for path in (ROOT / "configs/agents/rl").rglob("gym_config*.json"):
        configs.setdefault(json.loads(path.read_text())["id"], []).append(path.parent.name)
    lacking = []
    for spec in list_envs():
        if spec.id not in envs.TASKS:
            continue
        lacking += [] if f"\n## {spec.id}\n" in page else [f"{spec.id}: entry in docs/tasks.md"]
        lacking += [] if (ROOT / f"docs/images/tasks/{spec.id}.jpg").is_file() else [f"{spec.id}: picture"]
        lacking += [] if spec.id in configs else [f"{spec.id}: gym_config.json"]
        lacking += [] if spec.task.has_expert() == (spec.id in measured) else [f"{spec.id}: experts.json"]
    assert not lacking
    assert measured.keys() <= envs.TASKS.keys()


def test_configs_leave_the_size_of_actions_to_the_robot():
    """Only those state it that are for the robot of the task alone, so that another robot needs no further flag."""
    stating = set()
    for path in (ROOT / "configs/agents/rl").rglob("train_config*.json"):
        if "action_dim" in json.loads(path.read_text())["policy"]:
            stating.add(str(path.parent.relative_to(ROOT / "configs/agents/rl")).split("/")[0])
    assert stating == {"push_cube", "basic", "gymnasium"}


def test_a_wrong_argument_of_a_gymnasium_environment_is_told_with_the_nearest():
    with pytest.raises(ConfigError, match=r"kwargs\.frameskip: .* no such argument\. Did you mean 'frame_skip'"):
        make("Ant-v5", kwargs={"frameskip": 2})
