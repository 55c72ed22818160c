"""A stream of several tasks: shares of the buffer, what chunks carry, and what is recorded."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from typing import Any

import pytest
import torch

from embodichain.agents.datasets.frames import words_of
from embodichain.agents.engine import OnlineDataEngine, OnlineDataEngineCfg
from embodichain.agents.engine.sources import MixedEpisodes, open_source
from embodichain.errors import ConfigError

TASKS = [
    {"id": "PushCubeLanguageRL", "num_envs": 3, "max_episode_steps": 6, "weight": 2},
    {
        "id": "PressButtonLanguageRL",
        "num_envs": 2,
        "max_episode_steps": 4,
        "env": {"actions": {"delta_qpos": {"scale": 0.08}}},
    },
]


def settings(**changes: Any) -> OnlineDataEngineCfg:
    given = {"buffer_size": 9, "gym_config": TASKS, "task_observations": "common", "seed": 1, "refill_threshold": 4}
    return OnlineDataEngineCfg.from_dict({**given, **changes})


def test_every_chunk_carries_its_task_and_its_instruction() -> None:
    with OnlineDataEngine(settings()) as engine:
        assert engine.tasks == ["PushCubeLanguageRL", "PressButtonLanguageRL"]
        rows = [engine.episode_info(row) for row in range(9)]
        assert Counter(info.task_index for info in rows) == {0: 6, 1: 3}
        assert {(info.task_index, info.length) for info in rows} == {(0, 6), (1, 4)}
        batch = engine.sample_batch(400, 3)
        numbers = batch["task_index"]
        assert (numbers == numbers[:, :1]).all()
        assert 0.2 < (numbers[:, 0] == 1).double().mean() < 0.47  # a third
        words = [words_of(row) or "" for row in batch["observation", "instruction"][:, 0]]
        starts = {0: "push the cube to the ", 1: "press the "}
        assert all(text.startswith(starts[int(number)]) for text, number in zip(words, numbers[:, 0], strict=True))
        for _ in range(40):
            engine.sample_batch(36, 3)
        assert Counter(engine.episode_info(row).task_index for row in range(9)) == {0: 6, 1: 3}  # refilled
        stats = engine.task_stats()
        assert stats["PushCubeLanguageRL"].episodes_written >= 6
        assert stats["PressButtonLanguageRL"].success_rate == 0.0
        assert sum(task.episodes_written for task in stats.values()) == engine.stats().episodes_written


def test_without_being_told_the_weights_decide() -> None:
    with closing(open_source(settings(), numbered=False)) as source:
        assert isinstance(source, MixedEpisodes)
        assert source.layout.shape_of("task_index") is None
        seen: Counter[int] = Counter()
        while sum(seen.values()) < 60:
            seen.update(episode.task_index for episode in source.advance())
        assert abs(seen[0] - 2 * seen[1]) <= 6  # a round of envs


def test_the_environment_of_several_tasks_is_streamed_as_a_list() -> None:
    kwargs = {"tasks": TASKS, "observations": "common"}
    cfg = settings(gym_config={"id": "MultiTask", "num_envs": 6, "kwargs": kwargs}, task_observations="same")
    assert [(entry.name, entry.gym_config["num_envs"]) for entry in cfg.tasks()] == [
        ("PushCubeLanguageRL", 4),
        ("PressButtonLanguageRL", 2),
    ]
    with closing(open_source(cfg)) as source:
        assert source.layout.shape_of("task_index") == ()
        assert source.layout.shape_of("observation", "instruction") == (48,)
        assert torch.int64 in {leaf.dtype for leaf in source.layout.leaves if leaf.key == ("task_index",)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"buffer_size": 1}, r"buffer_size: expected at least one row per task and worker \(2 x 1\), got 1"),
        ({"gym_config": [{"id": "PushCubeRL", "weight": -1}]}, r"gym_config\[0\].weight"),
        ({"gym_config": []}, "gym_config: expected the config of an environment"),
    ],
)
def test_what_is_wrong_with_a_list_is_said(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        OnlineDataEngine(settings(**changes))


def test_tasks_that_differ_are_refused_with_all_differences() -> None:
    with pytest.raises(ConfigError, match=r"(?s)goal/blue: PushCube.*task_observations is 'same'"):
        open_source(settings(task_observations="same"))
