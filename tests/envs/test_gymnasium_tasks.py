"""Our tasks as Gymnasium envs: single and batched, judged by Gymnasium's own checker and by the tasks themselves."""

import importlib
import inspect
import pkgutil
import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import embodichain.envs
from embodichain.envs import tasks
from embodichain.envs.gymnasium_env import GymnasiumVecEnv, TaskGymnasiumEnv, TaskGymnasiumVectorEnv, make_gymnasium
from embodichain.envs.registration import list_envs, make, register_task
from embodichain.envs.task import Task
from embodichain.envs.tasks.reach import Reach
from embodichain.errors import ActionError, EnvContractError

TASKS = sorted(embodichain.envs.TASKS)


@pytest.mark.parametrize("task", TASKS)
def test_gymnasium_finds_nothing_wrong(task):
    env = gym.make(f"embodichain/{task}-v0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*observation space (minimum|maximum) value is -?infinity.*")
        check_env(env.unwrapped, skip_render_check=True)  # drawing has tests of its own, for machines that can
    env.close()


def test_a_single_env_is_the_task_and_stops_at_the_end():
    env = TaskGymnasiumEnv("ReachRL", max_episode_steps=6)
    obs, info = env.reset(seed=5)
    task = make("ReachRL", num_envs=1, max_episode_steps=6)
    expected, _ = task.reset(seed=5)
    assert env.observation_space.contains(obs)
    np.testing.assert_array_equal(obs["robot"]["qpos"], expected["robot", "qpos"][0])
    seed = info["episode_seed"]
    for t in range(6):
        action = np.full(6, 0.3 * np.sin(t), np.float32)
        obs, reward, terminated, truncated, info = env.step(action)
        _, reward_, terminated_, truncated_, info_ = task.step(torch.from_numpy(action)[None])
        assert (reward, terminated, truncated) == (reward_.item(), terminated_.item(), truncated_.item())
        np.testing.assert_array_equal(obs["robot"]["qpos"], info_["final_observation"]["robot", "qpos"][0])
        assert info["metrics/success"] == info_["metrics"]["success"].item()
        parts = [value for name, value in info.items() if name.startswith("rewards/")]
        assert len(parts) == 3
        assert sum(parts) == pytest.approx(reward, rel=1e-4)
        assert info["is_success"] == info["metrics/success"]
    assert (terminated, truncated) == (False, True)
    with pytest.raises(gym.error.ResetNeeded):
        env.step(action)
    first, again = env.reset(seed=5)
    assert again["episode_seed"] == seed
    assert env.reset()[1]["episode_seed"] != seed
    np.testing.assert_array_equal(first["goal"]["pos"], expected["goal", "pos"][0])
    env.close()
    env.close()


def test_step_before_the_first_reset_is_an_error():
    with pytest.raises(gym.error.ResetNeeded):
        TaskGymnasiumEnv("CartPoleRL").step(np.zeros(1, np.float32))


def test_a_batch_cannot_be_a_single_env():
    with pytest.raises(EnvContractError, match="num_envs=1, got 2"):
        TaskGymnasiumEnv(make("CartPoleRL", num_envs=2))


def test_a_vector_env_reports_ends_as_gymnasium_does():
    env = gym.make_vec("embodichain/CartPoleRL-v0", num_envs=4, max_episode_steps=12)
    assert isinstance(env, TaskGymnasiumVectorEnv)
    assert env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    task = make("CartPoleRL", num_envs=4, max_episode_steps=12)
    obs, _ = env.reset(seed=3)
    expected, _ = task.reset(seed=3)
    assert env.observation_space.contains(obs)
    generator, ends = np.random.default_rng(0), 0
    for _ in range(40):
        action = generator.uniform(-1, 1, (4, 1)).astype(np.float32)
        obs, reward, terminated, truncated, info = env.step(action)
        expected, reward_, terminated_, truncated_, info_ = task.step(torch.from_numpy(action))
        np.testing.assert_array_equal(obs["robot"]["qpos"], expected["robot", "qpos"])
        np.testing.assert_array_equal(reward, reward_)
        np.testing.assert_array_equal(terminated, terminated_)
        np.testing.assert_array_equal(truncated, truncated_)
        done = terminated | truncated
        ends += done.sum()
        assert ("final_obs" in info) == done.any()
        for i in np.flatnonzero(done):
            reached = info_["final_observation"][int(i)]
            np.testing.assert_array_equal(info["final_obs"][i]["robot"]["qvel"], reached["robot", "qvel"])
            assert info["_final_obs"][i]
            assert info["final_info"]["metrics/success"][i] == info_["metrics"]["success"][i]
            assert info["final_info"]["_metrics/success"][i]
        if not done.all():
            assert info["_metrics/success"].tolist() == (~done).tolist()
    assert ends >= 12
    env.close()


def test_some_envs_of_a_vector_env_are_reset_by_mask_and_seed():
    env = TaskGymnasiumVectorEnv("ReachRL", num_envs=3)
    env.reset(seed=0)
    before, *_ = env.step(np.ones((3, 6), np.float32))
    mask = np.array([False, True, True])
    after, info = env.reset(seed=[None, 11, 11], options={"reset_mask": mask})
    np.testing.assert_array_equal(after["robot"]["qpos"][0], before["robot"]["qpos"][0])
    np.testing.assert_array_equal(after["goal"]["pos"][1], after["goal"]["pos"][2])
    assert info["episode_seed"][1:].tolist() == [11, 11]
    with pytest.raises(ValueError, match="at least one true"):
        env.reset(options={"reset_mask": np.zeros(3, np.bool_)})
    with pytest.raises(ValueError, match="expected 3, got 2"):
        env.reset(seed=[1, 2])
    some, info = env.reset(seed=[11, None, 12])
    assert info["episode_seed"][[0, 2]].tolist() == [11, 12]
    np.testing.assert_array_equal(some["goal"]["pos"][0], after["goal"]["pos"][1])


def test_seeds_of_a_vector_env_decide_all_later_episodes():
    """As Gymnasium's own: whatever was drawn before, the same seeds give the same episodes, and those after them."""

    def seeds(env, given):
        drawn = [env.reset(seed=given)[1]["episode_seed"]]
        for _ in range(7):
            info = env.step(np.zeros((3, 1), np.float32))[-1]
            drawn.append(info["episode_seed"])
        return np.stack(drawn).tolist()

    first, second = (TaskGymnasiumVectorEnv("CartPoleRL", num_envs=3, max_episode_steps=2) for _ in range(2))
    for given in (5, [5, 6, 7]):
        assert seeds(first, given) == seeds(first, given) == seeds(second, given)
    assert seeds(first, [5, 6, 7]) != seeds(first, [5, 6, 8])


def test_gymnasiums_own_wrappers_work_on_it():
    env = gym.wrappers.vector.RecordEpisodeStatistics(
        TaskGymnasiumVectorEnv("CartPoleRL", num_envs=2, max_episode_steps=4)
    )
    env.reset(seed=0)
    returns = np.zeros(2)
    for _ in range(4):
        _, reward, *_, info = env.step(np.zeros((2, 1), np.float32))
        returns += reward
    np.testing.assert_allclose(info["episode"]["r"], returns, rtol=1e-6)
    assert info["episode"]["l"].tolist() == [4, 4]


def test_the_registered_name_works_through_the_adapter_too():
    with make_gymnasium("embodichain/CartPoleRL-v0", 2) as env:
        assert env.max_episode_steps == make("CartPoleRL").max_episode_steps
        obs, _ = env.reset(seed=0)
        assert obs["robot", "qpos"].shape == (2, 2)
        assert "success" in env.step(torch.zeros(2, 1))[4]["metrics"]


class Row(gym.Env):
    """Row ``index`` of a batch of ours as a single env, for Gymnasium's own vector envs to reset as they do."""

    metadata = {"render_modes": []}

    def __init__(self, index, **settings):
        self.index, self.env = index, make("CartPoleRL", num_envs=index + 1, **settings)
        self.observation_space, self.action_space = self.env.observation_space, self.env.action_space
        self.next = None

    def reset(self, *, seed=None, options=None):
        if seed is not None:  # Gymnasium counts up, we derive the stream of env i from one seed
            self.next = self.env.reset(seed=seed - self.index)
        elif self.next is None:
            self.next = self.env.reset(env_ids=[self.index])
        (obs, info), self.next = self.next, None
        self.seed = int(info["episode_seed"][self.index])
        return self._numpy(obs), {"episode_seed": self.seed}

    def step(self, action):
        actions = torch.zeros(self.index + 1, 1)
        actions[self.index] = torch.from_numpy(action)
        obs, reward, terminated, truncated, info = self.env.step(actions)
        ended = bool(terminated[self.index] | truncated[self.index])
        self.next = (obs, info) if ended else None
        groups = {name: info[name] for name in ("rewards", "metrics")}
        parts = {f"{group}/{k}": float(v[self.index]) for group, values in groups.items() for k, v in values.items()}
        about = {**parts, "is_success": np.float32(parts["metrics/success"]), "episode_seed": self.seed}
        flags = bool(terminated[self.index]), bool(truncated[self.index])
        return self._numpy(info["final_observation"]), float(reward[self.index]), *flags, about

    def _numpy(self, obs):
        return {"robot": {k: v[self.index].numpy() for k, v in obs["robot"].items()}}


def assert_alike(ours, theirs, where=""):
    if isinstance(theirs, dict):
        assert set(ours) == set(theirs), where
        for key in theirs:
            assert_alike(ours[key], theirs[key], f"{where}/{key}")
    elif isinstance(theirs, np.ndarray) and theirs.dtype == object:
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert (a is None) == (b is None), f"{where}[{i}]"
            if b is not None:
                assert_alike(a, b, f"{where}[{i}]")
    else:
        np.testing.assert_array_equal(ours, theirs, err_msg=where)
        assert np.asarray(ours).dtype.kind == np.asarray(theirs).dtype.kind, where


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("spelled", ["enum", "value"])
def test_autoreset_modes_are_gymnasiums(mode, spelled):
    """Bit for bit what ``SyncVectorEnv`` makes of the same envs: observations, flags, infos and their masks."""
    settings = {"max_episode_steps": 25, "num_threads": 1}
    given = mode if spelled == "enum" else mode.value
    ours = gym.make_vec("embodichain/CartPoleRL-v0", num_envs=4, autoreset_mode=given, **settings)
    theirs = SyncVectorEnv([lambda i=i: Row(i, **settings) for i in range(4)], autoreset_mode=mode)
    assert ours.metadata["autoreset_mode"] is mode
    assert TaskGymnasiumVectorEnv.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP  # of the class, left alone
    for a, b in zip(ours.reset(seed=3), theirs.reset(seed=3), strict=True):
        assert_alike(a, b)
    generator, ends = np.random.default_rng(0), np.zeros(2, int)
    push = np.array([1.0, -0.3, 0.0, 0.6])[:, None]  # the first falls soon, the third stands until time is up
    for t in range(70):
        action = np.clip(push + 0.1 * generator.standard_normal((4, 1)), -1, 1).astype(np.float32)
        step, step_ = ours.step(action), theirs.step(action)
        for name, a, b in zip(("obs", "reward", "terminated", "truncated", "info"), step, step_, strict=True):
            if name == "reward":
                np.testing.assert_array_equal(a, b, err_msg=f"step {t}")
            else:
                assert_alike(a, b, f"step {t}: {name}")
        ends += step[2].sum(), step[3].sum()
        done = step[2] | step[3]
        if mode is AutoresetMode.DISABLED and done.any():
            for a, b in zip(*(e.reset(options={"reset_mask": done.copy()}) for e in (ours, theirs)), strict=True):
                assert_alike(a, b, f"reset after step {t}")
    assert ends.min() >= 2
    ours.close()


def test_next_step_ignores_the_action_of_an_env_that_resets():
    env = TaskGymnasiumVectorEnv("CartPoleRL", num_envs=2, max_episode_steps=3, autoreset_mode="NextStep")
    env.reset(seed=0)
    for _ in range(3):
        *_, truncated, _ = env.step(np.zeros((2, 1), np.float32))
    assert truncated.all()
    _, reward, *flags, info = env.step(np.full((2, 1), np.nan, np.float32))
    assert reward.tolist() == [0, 0]
    assert not np.any(flags)
    assert not [name for name in info if "rewards" in name]
    with pytest.raises(ActionError):
        env.step(np.full((2, 1), np.nan, np.float32))


def test_disabled_refuses_to_step_an_env_that_ended():
    env = TaskGymnasiumVectorEnv("CartPoleRL", num_envs=2, max_episode_steps=1, autoreset_mode="Disabled")
    env.reset(seed=0)
    env.step(np.zeros((2, 1), np.float32))
    env.reset(options={"reset_mask": np.array([True, False])})
    with pytest.raises(gym.error.ResetNeeded, match=r"env\(s\) 1"):
        env.step(np.zeros((2, 1), np.float32))


def test_unknown_autoreset_mode_and_envs_that_cannot_wait():
    with pytest.raises(ValueError, match="NextStep"):
        TaskGymnasiumVectorEnv("CartPoleRL", autoreset_mode="later")
    with (
        make_gymnasium("CartPole-v1", 2) as env,
        pytest.raises(EnvContractError, match="SAME_STEP"),
    ):
        TaskGymnasiumVectorEnv(env, autoreset_mode="NextStep")


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_there_and_back_again(mode):
    """Our task as a vector env of any mode, made a VecEnv again, keeps its episodes."""
    vector = gym.make_vec("embodichain/CartPoleRL-v0", num_envs=3, autoreset_mode=mode, max_episode_steps=9)
    with GymnasiumVecEnv(vector, seed=4) as env:
        assert env.max_episode_steps == 9
        lengths, length = [], torch.zeros(3)
        env.reset()
        for _ in range(30):
            *_, terminated, truncated, _ = env.step(torch.zeros(3, 1))
            length += 1
            done = terminated | truncated
            lengths += length[done].tolist()
            length[done] = 0
        assert lengths == [9] * 9


def test_arguments_that_do_not_exist_raise_type_errors_as_others_do():
    """TorchRL and others try ``frameskip`` and go on without it if it is a TypeError that says so."""
    for maker in (gym.make, gym.make_vec):
        with pytest.raises(TypeError, match="got an unexpected keyword argument 'frameskip'"):
            maker("embodichain/PushCubeRL-v0", frameskip=1)
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'frameskip'"):
        gym.make("CartPole-v1", frameskip=1)


def test_a_batch_of_a_single_env_explains_itself():
    with pytest.raises(EnvContractError, match=r"make_vec\('embodichain/PushCubeRL-v0', num_envs=2\)"):
        gym.make("embodichain/PushCubeRL-v0", num_envs=2)
    gym.make("embodichain/PushCubeRL-v0", num_envs=1).close()


def task_classes():
    """All tasks written for this package; those of Gymnasium's suite are registered by Gymnasium."""
    names = [m.name for m in pkgutil.iter_modules(tasks.__path__) if m.name != "mujoco_suite"]
    modules = [importlib.import_module(f"{tasks.__name__}.{name}") for name in names]
    found = {c for module in modules for c in vars(module).values() if inspect.isclass(c) and issubclass(c, Task)}
    return {c for c in found if not inspect.isabstract(c)}


def test_every_task_is_registered():
    assert {spec.task for spec in list_envs() if spec.id in TASKS} == task_classes()
    assert {f"embodichain/{id}-v0" for id in TASKS} | set(embodichain.envs.MUJOCO_SUITE) <= set(gym.registry)


@pytest.mark.parametrize("id", TASKS)
def test_specs_state_the_time_limit(id):
    name, limit = f"embodichain/{id}-v0", make(id).max_episode_steps
    assert gym.spec(name).max_episode_steps == limit
    assert gym.make(name).spec.max_episode_steps == limit
    vector = gym.make_vec(name, num_envs=2)
    assert vector.spec.max_episode_steps == vector.max_episode_steps == limit


@pytest.mark.parametrize("limit", [None, 3, 700])
def test_the_time_limit_of_gymnasium_make_holds(limit):
    """Shorter as well as longer than the task's own of 500 steps, as for every env of Gymnasium's."""
    env = gym.make("embodichain/CartPoleRL-v0", max_episode_steps=limit)
    env.reset(seed=0)
    gain = np.array([0.0912, 0.1923, 2.9310, 0.7344])  # of the expert
    obs, steps, over = env.reset(seed=0)[0], 0, False
    while not over:
        state = np.stack([obs["robot"]["qpos"], obs["robot"]["qvel"]], 1).reshape(-1)
        obs, _, terminated, truncated, _ = env.step(np.clip([gain @ state], -1, 1).astype(np.float32))
        steps, over = steps + 1, terminated or truncated
    assert (steps, terminated) == (limit or 500, False)


def test_without_a_wrapper_there_is_no_limit_to_state():
    with GymnasiumVecEnv.from_factory(lambda: gym.make("embodichain/CartPoleRL-v0").unwrapped, 1) as env:
        assert env.max_episode_steps is None


def test_a_config_with_a_time_limit_of_its_own_holds(tmp_path):
    path = tmp_path / "gym_config.json"
    path.write_text('{"id": "ReachRL", "max_episode_steps": 4}')
    env = gym.make("embodichain/ReachRL-v0", config=str(path))
    env.reset(seed=0)
    flags = [env.step(np.zeros(6, np.float32))[3] for _ in range(4)]
    assert flags == [False, False, False, True]


def test_tasks_of_ones_own_are_registered_with_gymnasium(monkeypatch):
    for name in ("embodichain/OwnReach-v0", "embodichain/OwnReachByName-v0"):
        monkeypatch.delitem(gym.registry, name, raising=False)
    monkeypatch.setattr("embodichain.envs.registration._TASKS", dict(embodichain.envs.registration._TASKS))
    register_task("OwnReach", Reach)
    register_task("OwnReachByName", "embodichain.envs.tasks.reach:Reach")
    assert gym.spec("embodichain/OwnReach-v0").max_episode_steps == 100
    env = gym.make("embodichain/OwnReachByName-v0")  # a name is not imported before it is made: its own limit holds
    env.reset(seed=0)
    assert [env.step(np.zeros(6, np.float32))[3] for _ in range(100)] == [False] * 99 + [True]


def test_the_last_image_of_an_episode_is_its_last_state(monkeypatch):
    env = TaskGymnasiumEnv("CartPoleRL", max_episode_steps=2, render_mode="rgb_array")
    seen = []
    monkeypatch.setattr(env.vec_env, "render", lambda: seen.append(env.vec_env.physics.qpos.clone()) or [None])
    env.reset(seed=0)
    for _ in range(2):
        obs, *_ = env.step(np.ones(1, np.float32))
        env.render()
        np.testing.assert_array_equal(seen[-1][0].float(), obs["robot"]["qpos"])
