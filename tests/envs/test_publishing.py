"""What a job publishes for a viewer: the states that it really has, only while somebody watches, and nothing else."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from embodichain.agents.rl.config import TrainCfg
from embodichain.agents.rl.train import train_from_config
from embodichain.envs import publishing
from embodichain.envs.publishing import FOLDER_VARIABLE, MAX_ENVS, PublishedStates, Publisher, positions
from embodichain.envs.registration import make
from embodichain.envs.task_env import TaskEnv

pytestmark = pytest.mark.usefixtures("one_thread")


def opened(folder: Path) -> list[PublishedStates]:
    """Return what a viewer finds in a folder."""
    found = []
    for file in sorted(folder.glob("*_*.json")):
        about = json.loads(file.read_text())
        found.append(PublishedStates(file.with_suffix(".states"), about["shown"], about["nq"], about["nmocap"]))
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "published"
    path.mkdir()
    monkeypatch.setenv(FOLDER_VARIABLE, str(path))
    monkeypatch.setattr(publishing, "_PERIOD", 0.0)
    return path


def test_states_are_published_while_somebody_watches(folder: Path):
    env = make("PushCubeRL", num_envs=MAX_ENVS + 4, seed=0)
    assert isinstance(env, TaskEnv)
    with env:
        (states,) = opened(folder)
        action = torch.zeros(env.num_envs, env.action_manager.action_dim)
        env.step(action)
        assert states.sequence == 0, "nobody watches, and a state was copied"
        assert states.read() is None
        assert states.steps == 1
        states.watch(60.0)
        reward = env.step(action)[1]
        copies = states.read()
        assert copies is not None
        qpos, mocap = positions(env, MAX_ENVS)
        for copy, own in zip(copies, (qpos, mocap, np.full(MAX_ENVS, 2), reward[:MAX_ENVS]), strict=True):
            np.testing.assert_array_equal(copy, own)
        goal = env.physics.mocap_id("goal")
        np.testing.assert_array_equal(copies[1][:, goal, :3], env.task.markers()["goal"][:MAX_ENVS].numpy())
        states.watch(0.0)
        env.step(action)
        assert states.sequence == 2
        states.header[0] = 1e-3  # a viewer that was killed: its time is over
        env.step(action)
        assert states.sequence == 2
        assert states.header[0] == 0.0
        assert states.steps == 4


def config(run_dir: Path) -> TrainCfg:
    return TrainCfg.from_dict(
        {
            "trainer": {
                "gym_config": {"id": "CartPoleRL", "num_threads": 1},
                "num_envs": 4,
                "buffer_size": 32,
                "iterations": 3,
                "seed": 3,
                "enable_eval": False,
                "run_dir": str(run_dir),
            },
            "policy": {"name": "actor_critic"},
            "algorithm": {"name": "ppo", "cfg": {"batch_size": 64, "n_epochs": 2}},
        }
    )


def weights(run_dir: Path) -> bytes:
    (newest,) = sorted(run_dir.glob("checkpoints/step_*"))[-1:]
    return (newest / "tensors.safetensors").read_bytes()


def test_attached_and_detached_twenty_times_a_training_stays_as_it_was_to_the_bit(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv(FOLDER_VARIABLE)
    train_from_config(config(tmp_path / "alone"))
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
    own_call, seen = Publisher.__call__, []
    descriptors = len(os.listdir("/proc/self/fd"))

    def call(self: Publisher, reward: torch.Tensor) -> None:
        """Let a viewer attach before every fourth step, and detach after it."""
        (states,) = opened(folder)
        if states.steps % 4 == 0:
            states.watch(60.0)
        own_call(self, reward)
        if (copies := states.read()) is not None and states.header[0]:
            seen.append(copies[0])
        states.watch(0.0)

    monkeypatch.setattr(Publisher, "__call__", call)
    train_from_config(config(tmp_path / "watched"))
    assert len(seen) == 24
    assert len({states.tobytes() for states in seen}) == 24, "the states that were shown did not move"
    assert weights(tmp_path / "alone") == weights(tmp_path / "watched")
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 2
