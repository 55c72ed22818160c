"""Same seed, same trajectory, bit for bit: across runs, threads, batch sizes and restarts of an episode."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from embodichain.envs.resets import Resets
from tests.envs.rollouts import TASKS, assert_same, digest, random_actions, record, rows, settings, small

ROOT = Path(__file__).resolve().parents[2]
STEPS = 30  # two and a half of the short episodes


@pytest.fixture(scope="module", params=TASKS)
def reference(request):
    """A trace of 64 envs, with everything that is random turned on."""
    env = small(request.param, 64, env=settings(request.param))
    trace = record(env, random_actions(env, STEPS))
    env.close()
    assert any(bool(said["truncated"].any()) for said in trace)
    return request.param, trace


@pytest.mark.parametrize("num_envs", [1, 3, 17])
def test_an_env_does_not_notice_how_many_others_there_are(reference, num_envs):
    task, trace = reference
    env = small(task, num_envs, env=settings(task))
    assert_same(record(env, random_actions(env, STEPS)), rows(trace, slice(0, num_envs)))
    env.close()


@pytest.mark.parametrize("threads", [1, 4])
def test_simulation_threads_change_nothing(reference, threads):
    task, trace = reference
    env = small(task, 64, env=settings(task), num_threads=threads)
    assert_same(record(env, random_actions(env, 15)), trace[:15])
    env.close()


def test_preparing_changes_nothing_but_who_waits(reference, monkeypatch):
    """Starts are drawn when nobody waits; then no step has to draw any, and all say the same."""
    task, trace = reference
    env = small(task, 64, env=settings(task))
    drawn, begin = [], Resets.begin

    def counted(self, env_ids, episodes=None):
        drawn.append(len(env_ids))
        begin(self, env_ids, episodes)

    monkeypatch.setattr(Resets, "begin", counted)
    for index, action in enumerate(random_actions(env, STEPS)):
        wanted = env.expert_action()
        env.prepare()
        assert torch.equal(env.expert_action(), wanted)
        before = len(drawn)
        assert_same(record(env, action.unsqueeze(0)), trace[index : index + 1])
        assert len(drawn) == before
    ended = sum(int((said["terminated"] | said["truncated"]).sum()) for said in trace[:-1])
    assert sum(drawn) == 64 + ended
    env.close()


def test_torch_threads_change_nothing():
    """At this size torch splits its work among threads, at places that depend on their number."""
    before, traces = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            env = small("PickCubeRL", 1500, env={**settings("PickCubeRL"), "substeps": 1, "actions": {"ee_delta": {}}})
            traces.append(record(env, random_actions(env, 2)))
            env.close()
    finally:
        torch.set_num_threads(before)
    assert_same(*traces)


@pytest.mark.parametrize("task", TASKS)
def test_the_expert_does_not_notice_how_many_others_there_are(task):
    said = []
    for num_envs in (1, 5, 40):
        env, heard = small(task, num_envs), []
        for _ in range(25):
            heard.append(env.expert_action()[0].clone())
            env.step(env.expert_action())
        said.append(torch.stack(heard))
        env.close()
    assert torch.equal(said[0], said[1])
    assert torch.equal(said[0], said[2])


@pytest.mark.parametrize("term", ["qpos", "ee_delta"])
def test_other_action_terms_are_as_steady(term):
    traces = []
    for num_envs in (2, 33):
        env = small("PickCubeRL", num_envs, env={"actions": {term: {}}})
        traces.append(rows(record(env, random_actions(env, 15)), slice(0, 2)))
        env.close()
    assert_same(*traces)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("randomized", [False, True])
def test_restarting_by_mask_equals_restarting_by_index(task, randomized):
    """On a GPU, envs restart by mask; the same code on the CPU must do what restarting by index does."""
    traces = []
    for masked in (False, True):
        env = small(task, 5, env=settings(task) if randomized else {})
        env._masked = masked
        traces.append(record(env, random_actions(env, STEPS)))
        env.close()
    assert_same(*traces)


SCRIPT = """
from embodichain.envs.resets import Resets
from tests.envs.rollouts import *
env = small("PickCubeRL", 5, env=settings("PickCubeRL"))
print(digest(record(env, random_actions(env, 30))))
"""


def test_another_process_sees_the_same():
    env = small("PickCubeRL", 5, env=settings("PickCubeRL"))
    here = digest(record(env, random_actions(env, STEPS)))
    env.close()
    environment = os.environ | {"PYTHONHASHSEED": "5", "OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == here


def test_reset_with_a_seed_starts_over():
    env = small("PushCubeRL", 6, env=settings("PushCubeRL"))
    actions = random_actions(env, 20)
    env.reset(seed=7)
    first = record(env, actions)
    env.reset(seed=8)
    other = record(env, actions)
    env.reset(seed=7)
    assert_same(record(env, actions), first)
    assert not torch.equal(other[0]["obs/goal/pos"], first[0]["obs/goal/pos"])
    env.close()


def test_a_new_env_is_where_reset_with_its_seed_leads():
    env, other = small("PushCubeRL", 3, seed=5), small("PushCubeRL", 3, seed=6)
    other.reset(seed=5)
    assert_same(record(env, random_actions(env, 5)), record(other, random_actions(env, 5)))


def test_without_a_seed_two_envs_differ():
    first, second = small("ReachRL", 3, seed=None), small("ReachRL", 3, seed=None)
    assert first.seed != second.seed
    assert not torch.equal(first.reset()[1]["episode_seed"], second.reset()[1]["episode_seed"])


def test_resetting_one_env_leaves_the_others_on_their_way():
    env, undisturbed = (small("PushCubeRL", 4, env=settings("PushCubeRL")) for _ in range(2))
    actions = random_actions(env, 20)
    assert_same(record(env, actions[:6]), record(undisturbed, actions[:6]))
    env.reset(env_ids=[2])
    others = [0, 1, 3]
    assert_same(rows(record(env, actions[6:]), others), rows(record(undisturbed, actions[6:]), others))


def test_an_episode_seed_replays_the_episode_in_any_env():
    """An episode of env 3, some auto-resets later, again in env 0 of another, smaller environment."""
    env = small("PickCubeRL", 4, env=settings("PickCubeRL"))
    record(env, random_actions(env, 24))
    obs, info = env.reset()
    actions = random_actions(env, 11, seed=3)
    original = rows(record(env, actions), [3])
    replay = small("PickCubeRL", 1, seed=99, env=settings("PickCubeRL"))
    again, replayed = replay.reset(seed=info["episode_seed"][3:4])
    assert replayed["episode_seed"].tolist() == [info["episode_seed"][3].item()]
    assert torch.equal(again["goal", "pos"][0], obs["goal", "pos"][3])
    assert_same(record(replay, actions[:, 3:4]), original)


def test_episode_seeds_name_the_episodes_that_auto_resets_start():
    env = small("ReachRL", 3)
    trace = record(env, torch.zeros(14, 3, 6))
    assert torch.equal(trace[0]["seed"], trace[10]["seed"])
    assert not bool((trace[10]["seed"] == trace[11]["seed"]).any())  # the twelfth step ended the episodes
    again, _ = env.reset(seed=trace[11]["seed"])
    assert torch.equal(again["robot", "qpos"], trace[11]["obs/robot/qpos"])
    assert torch.equal(again["goal", "pos"], trace[11]["obs/goal/pos"])
