"""Episodes that start from states of the expert's demonstrations."""

from contextlib import closing

import gymnasium
import pytest
import torch

from embodichain.envs import demonstrations
from embodichain.envs.demonstrations import HEAD_START, Demonstrations, DemonstrationStarts
from embodichain.envs.gymnasium_env import TaskGymnasiumEnv
from embodichain.envs.random import RandomStreams
from embodichain.envs.registration import make, make_to_watch
from embodichain.envs.task import ResetState
from embodichain.errors import ConfigError
from tests.envs.rollouts import assert_same_leaves, flat


@pytest.fixture(autouse=True)
def _few_demonstrations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demonstrations, "EPISODES", 12)


def starting(fraction: float | None, num_envs: int, id: str = "PlaceInBinRL", **others):
    return make(id, num_envs=num_envs, seed=0, env={"events": {"demonstration_starts": fraction}}, **others)


def test_the_chosen_fraction_starts_from_demonstrations_and_the_others_as_ever():
    with starting(0.5, 400) as env, starting(None, 400) as plain:
        mine, theirs = env.reset(seed=3)[0], plain.reset(seed=3)[0]
        same = torch.stack(
            [(a == b).flatten(1).all(1) for a, b in zip(flat(mine).values(), flat(theirs).values(), strict=True)]
        ).all(0)
        assert 160 <= int((~same).sum()) <= 240  # binomial, mean 200, standard deviation 10
        assert not bool((theirs["task", "held"] > 0).any())
        held = (mine["task", "held"] > 0).squeeze(1)
        assert bool(held.any())  # some demonstrations had grasped the cube
        assert not bool((held & same).any())


def test_the_expert_finishes_what_a_demonstration_has_begun():
    with starting(1.0, 64) as env:
        env.reset(seed=1)
        before = env.task.metrics(env.task.read())["distance"]
        assert float(before.min()) < 0.1 < float(before.max())  # from all stages
        solved = torch.zeros(64, dtype=torch.bool)
        for _ in range(env.max_episode_steps - 1):
            solved |= env.step(env.expert_action())[2]
        assert float(solved.float().mean()) >= 0.95


def test_states_shortly_before_success_are_the_likeliest():
    """Distances to success are squares of uniform numbers, and every demonstration is as likely as any other."""
    lengths = torch.tensor([100, 1, 50])
    number = torch.arange(151.0, dtype=torch.float64)
    states = ResetState(number.unsqueeze(1), number.unsqueeze(1), {}, {})
    starts, envs = DemonstrationStarts(Demonstrations(states, lengths), 1.0, 200), torch.arange(30_000)
    streams = RandomStreams(30_000, torch.device("cpu"))
    streams.seed(envs, 7)
    streams.next_episode(envs)
    sampled = ResetState(torch.full((30_000, 1), -1.0), torch.full((30_000, 1), -1.0), {}, {})
    starts.replace(envs, streams, sampled)
    skipped = sampled.variables.pop(HEAD_START)
    chosen = sampled.qpos.squeeze(1)
    first, second, third = (
        chosen[(low <= chosen) & (chosen < high)] for low, high in ((0, 100), (100, 101), (101, 151))
    )
    assert [len(part) / 30_000 for part in (first, second, third)] == pytest.approx([1 / 3] * 3, abs=0.015)
    for part, end, length in ((first, 100, 100), (third, 151, 50)):
        share = [float((end - part <= fraction * length).float().mean()) for fraction in (0.04, 0.25, 1.0)]
        assert share == pytest.approx([0.2, 0.5, 1.0], abs=0.025)
    left = 200 - skipped[chosen < 100]  # the time limit shrinks with the distance, down to a tenth
    torch.testing.assert_close(left.float(), 20.0 + 1.8 * (99.5 - first.float()), rtol=0.0, atol=2.9)
    assert int(left.min()) == 21  # a tenth, and what is left of a step


def test_episodes_end_the_earlier_the_closer_to_success_they_start():
    with starting(0.5, 64, max_episode_steps=100) as env:
        env.reset(seed=4)
        skipped = env.task.variables[HEAD_START].clone()
        assert 16 <= int((skipped == 0).sum()) <= 48
        assert int(skipped.max()) > 80
        ended, solved = torch.zeros(64, dtype=torch.int64), torch.zeros(64, dtype=torch.bool)
        for step in range(1, 101):
            _, _, terminated, truncated, _ = env.step(torch.zeros(64, env.action_manager.action_dim))
            solved |= terminated & (ended == 0)
            ended[truncated & (ended == 0)] = step
        assert int(solved.sum()) < 16  # without doing anything
        assert torch.equal(ended[~solved], 100 - skipped[~solved])


@pytest.mark.parametrize("id", ["PlaceInBinLanguageRL", "HandOverRL"])
def test_states_depend_on_the_seed_alone_and_carry_goals_and_instructions(id):
    """Neither on the number of envs nor on the seed with which the environment was made."""
    with starting(1.0, 3, id) as few, make(id, num_envs=16, seed=9, env=few.cfg.env.to_dict()) as many:
        mine, theirs = few.reset(seed=5)[0], many.reset(seed=5)[0]
        assert_same_leaves(flat(mine), flat(theirs[:3]))
        again = few.reset(seed=few.reset(seed=5)[1]["episode_seed"])[0]
        assert_same_leaves(flat(again), flat(mine))
        poses = list(few._resets.demonstrations._states.poses.values())
        assert poses
        assert all(float(pose.std(dim=0).sum()) > 0.01 for pose in poses)


def test_resets_by_mask_start_alike():
    """On a GPU envs are reset by mask."""
    env, masked = starting(0.5, 6, max_episode_steps=80), starting(0.5, 6, max_episode_steps=80)
    masked._masked, masked._before = True, masked._packed.copy()
    for one in (env, masked):
        one.reset(seed=2)
    for _ in range(81):
        mine, theirs = (one.step(one.expert_action()) for one in (env, masked))
        assert torch.equal(mine[2] | mine[3], theirs[2] | theirs[3])
        assert_same_leaves(flat(mine[0]), flat(theirs[0]))


def test_a_state_that_is_restored_goes_on_with_the_same_episodes():
    with starting(0.5, 4, max_episode_steps=3) as env:
        env.reset(seed=2)
        state = env.get_state()
        runs = []
        for _ in range(2):
            env.set_state(state)
            runs.append([flat(env.step(torch.zeros(4, env.action_manager.action_dim))[0].clone()) for _ in range(7)])
        for mine, theirs in zip(*runs, strict=True):
            assert_same_leaves(mine, theirs)


def test_evaluations_start_as_the_task_does():
    config = {"id": "PlaceInBinRL", "num_envs": 8, "seed": 0, "env": {"events": {"demonstration_starts": 1.0}}}
    with make_to_watch(config) as watched, starting(None, 8) as plain:
        assert_same_leaves(flat(watched.reset(seed=4)[0]), flat(plain.reset(seed=4)[0]))


def test_episodes_of_gymnasium_are_shortened_alike():
    """A limit that a wrapper keeps would not know how far an episode starts from success."""
    settings = {"env": {"events": {"demonstration_starts": 1.0}}}
    lengths = []
    for env in (
        TaskGymnasiumEnv("PlaceInBinRL", **settings),
        gymnasium.make("embodichain/PlaceInBinRL-v0", **settings),
    ):
        with closing(env):
            lengths.append([_steps(env, seed) for seed in range(4)])
    assert lengths[0] == lengths[1]
    assert max(lengths[0]) < 150


def _steps(env: gymnasium.Env, seed: int) -> int:
    """Return how long an episode takes in which nothing is done."""
    env.reset(seed=seed)
    for step in range(1, 200):
        if any(env.step(0.0 * env.action_space.sample())[2:4]):
            return step
    raise AssertionError("the episode does not end")


def test_tasks_of_several_start_as_they_do_where_they_are_watched():
    own = {"id": "PlaceInBinRL", "env": {"events": {"demonstration_starts": 1.0}}}
    config = {"id": "MultiTask", "num_envs": 8, "seed": 0, "kwargs": {"tasks": [own, "PlaceInBinRL"]}}
    with make_to_watch(config) as watched, make(config) as trained:
        held = [float((env.reset(seed=4)[0]["task", "held"] > 0).float().mean()) for env in (watched, trained)]
    assert held[0] == 0.0 < held[1]
    with make(config | {"env": {"curricula": "final"}}) as trained:  # a setting for training, too
        assert float((trained.reset(seed=4)[0]["task", "held"] > 0).float().mean()) == held[1]
    config["env"] = own["env"]
    with pytest.raises(ConfigError, match=r"env\.events of each task of kwargs\.tasks"):
        make(config)


def test_tasks_in_lists_within_lists_start_as_they_do_where_they_are_watched():
    own = {"id": "PlaceInBinRL", "env": {"events": {"demonstration_starts": 1.0}}}
    inner = {"id": "MultiTask", "kwargs": {"tasks": [own, own]}}
    config = {"id": "MultiTask", "num_envs": 12, "seed": 0, "kwargs": {"tasks": [inner, "PlaceInBinRL"]}}
    with make_to_watch(config) as watched, make(config) as trained:
        held = [float((env.reset(seed=4)[0]["task", "held"] > 0).float().mean()) for env in (watched, trained)]
    assert held[0] == 0.0 < held[1]


@pytest.mark.parametrize("pose", [{"x": [-0.05, 0.05], "y": [-0.05, 0.05]}, None])
def test_reset_events_leave_demonstrated_states_where_they_are(pose):
    """Otherwise a cube that is held would leave the gripper."""
    terms = {} if pose is None else {"moved": {"func": "body_pose", "params": {"body": "cube", "pose_range": pose}}}
    events = {"demonstration_starts": 1.0, "terms": terms}
    with make("PlaceInBinRL", num_envs=200, seed=0, env={"events": events}) as env:
        held = env.reset(seed=1)[0]["task", "held"] > 0
    assert float(held.float().mean()) > 0.3


def test_demonstrations_begin_where_reset_events_place_things():
    """Events that change the model, or act later, take no part."""
    terms = {
        "moved": {"func": "body_pose", "params": {"body": "cube", "pose_range": {"x": [0.1, 0.1]}}},
        "heavy": {"func": "mass", "params": {"bodies": "cube", "range": [1000.0, 1000.0]}},
        "pushed": {"func": "push", "params": {"body": "cube", "velocity_range": {"z": [9.0, 9.0]}}},
    }
    starts = []
    for chosen in ({}, terms):
        events = {"demonstration_starts": 1.0, "terms": chosen}
        with make("PlaceInBinRL", num_envs=1, seed=0, env={"events": events}) as env:
            recorded = env._resets.demonstrations
            first = recorded._lengths.cumsum(0) - recorded._lengths
            starts.append(recorded._states.qpos[first])
    moved = starts[1] - starts[0]
    assert float(moved.abs().max()) == pytest.approx(0.1)
    assert int((moved.abs() > 1e-9).sum()) == len(moved)  # one coordinate of each


def test_what_a_task_stores_while_it_is_scored_counts_and_solved_starts_do_not(monkeypatch: pytest.MonkeyPatch):
    """The task is solved after five steps near the goal, which its reward counts; half of its starts are solved."""
    from embodichain.envs.tasks.reach import Reach

    sampled, terms = Reach.sample_start, Reach.reward_terms

    def sample_start(self, env_ids, streams):
        start = sampled(self, env_ids, streams)
        start.variables["near"] = torch.where(start.qpos[:, 0] > -0.22, 9, 0)
        return start

    def reward_terms(self, scene, action):
        near = self.variables["near"]
        near.copy_(torch.where(scene["distance"] < 0.02, near + 1, 0))
        return terms(self, scene, action)

    monkeypatch.setattr(Reach, "sample_start", sample_start)
    monkeypatch.setattr(Reach, "reward_terms", reward_terms)
    monkeypatch.setattr(Reach, "success", lambda self, scene: self.variables["near"] >= 5)
    with starting(1.0, 64, "ReachRL") as env:
        demonstrated = env._resets.demonstrations._lengths
        assert 0 < demonstrated.numel() < 12
        assert int(demonstrated.min()) >= 5
        env.reset(seed=0)
        assert int(env.task.variables["near"].max()) == 5  # success follows in the next step


def test_no_episode_begins_with_an_action_of_the_expert():
    terms = {"last": {"func": "last_action"}}
    env = {"events": {"demonstration_starts": 1.0}, "observations": {"terms": terms}}
    with make("PlaceInBinRL", num_envs=16, seed=0, env=env) as made:
        assert not made.reset(seed=1)[0]["last"].any()


def test_none_start_from_demonstrations_if_the_fraction_is_zero():
    with starting(0.0, 8) as env, starting(None, 8) as plain:
        assert_same_leaves(flat(env.reset(seed=4)[0]), flat(plain.reset(seed=4)[0]))


def test_slow_experts_and_experts_that_fail_on_the_way(monkeypatch: pytest.MonkeyPatch):
    slow = {"substeps": 2, "actions": {"ee_delta": {"scale": 0.012}}, "events": {"demonstration_starts": 1.0}}
    with make("PlaceInBinRL", num_envs=2, seed=0, max_episode_steps=900, env=slow) as env:
        assert int(env._resets.demonstrations._lengths.max()) > 200
    from embodichain.envs.tasks.place_in_bin import PlaceInBin

    monkeypatch.setattr(PlaceInBin, "failed", lambda self, scene: scene["cube_pos"][:, 2] > 0.12)
    with pytest.raises(ConfigError, match="none of the expert's demonstrations"):
        starting(1.0, 2)


def test_an_expert_that_gets_nowhere_does_not_demonstrate_for_ever(monkeypatch: pytest.MonkeyPatch):
    """Gymnasium limits the length of episodes in a wrapper around the environment, which has no limit of its own."""
    from embodichain.envs.tasks.place_in_bin import PlaceInBin

    usual = PlaceInBin.success

    def success(self, scene):
        reached = usual(self, scene)
        return reached & (torch.arange(reached.numel()) != 3) if reached.numel() == 12 else reached

    monkeypatch.setattr(PlaceInBin, "success", success)
    monkeypatch.setattr(demonstrations, "LONGEST", 220)
    settings = {"env": {"events": {"demonstration_starts": 1.0}}}
    with closing(gymnasium.make("embodichain/PlaceInBinRL-v0", **settings)) as env:
        starts = env.unwrapped.vec_env._resets.demonstrations
        assert starts._lengths.numel() == 11
        assert int(starts._lengths.max()) < 200
        held = [float(env.reset(seed=seed)[0]["task"]["held"][0]) for seed in range(12)]
    assert max(held) == 1.0


def test_bad_requests_say_what_to_do(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match=r"demonstration_starts: QuadrupedVelocityRL has no expert .* leave it out"):
        starting(0.5, 2, "QuadrupedVelocityRL")
    with pytest.raises(ConfigError, match="demonstration_starts: HalfCheetah-v5 has no such settings; leave it out"):
        starting(0.5, 2, "HalfCheetah-v5")
    with pytest.raises(ConfigError, match=r"demonstration_starts.*1\.5"):
        starting(1.5, 2)
    with pytest.raises(ConfigError, match="CartPoleRL is solved from the start, so there is nothing to demonstrate"):
        starting(0.5, 2, "CartPoleRL")
    grows = {"curriculum": {"by": "success", "from": [0.0, 0.0], "to": [-0.18, 0.18], "between": [0.3, 0.8]}}
    curriculum = {"randomize_target": {"y": grows}}
    with pytest.raises(ConfigError, match="demonstrations do not follow a curriculum"):
        make("PushCubeRL", num_envs=2, env={"events": {"demonstration_starts": 0.5, **curriculum}})
    from embodichain.envs.tasks.place_in_bin import PlaceInBin

    monkeypatch.setattr(PlaceInBin, "success", lambda self, scene: scene["held"] < -1.0)
    with pytest.raises(
        ConfigError, match="none of the expert's demonstrations of PlaceInBinRL succeeds within 200 steps"
    ):
        starting(0.5, 2)
