"""What the cameras of an environment observe: colours, depth and segmentation, in its spaces, steps and states."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from embodichain.agents.rl.models import build_policy
from embodichain.envs.checker import check_env
from embodichain.envs.gl_backend import choose_backend
from embodichain.envs.gymnasium_env import TaskGymnasiumEnv
from embodichain.envs.registration import EVENTS, make
from embodichain.envs.rendering import CameraCfg
from embodichain.envs.task_env import TaskEnv
from embodichain.errors import ConfigError, RenderingError

ALL = {"outputs": ["rgb", "depth", "segmentation"]}
CAMERAS = [
    {"name": "top", "width": 32, "height": 24, **ALL, "near": 0.5, "far": 1.1},
    {"name": "side", "width": 16, "height": 16, "outputs": ["depth"]},
]


@pytest.fixture(scope="module", autouse=True)
def backend() -> None:
    try:
        choose_backend()
    except RenderingError as error:
        pytest.skip(f"needs OpenGL: {error}")


def push(num_envs: int = 2, cameras: list[dict[str, Any]] = CAMERAS, **changes: Any) -> TaskEnv:
    env = make("PushCubeRL", num_envs=num_envs, seed=3, env={"observations": {"cameras": cameras}}, **changes)
    assert isinstance(env, TaskEnv)
    return env


@pytest.fixture(scope="module")
def env() -> Iterator[TaskEnv]:
    with push() as made:
        yield made


def test_outputs_are_observed_under_their_names(env: TaskEnv) -> None:
    obs, _ = env.reset(seed=5)
    shapes = {key: (list(obs[key].shape[1:]), obs[key].dtype) for key in obs.keys(True, True) if obs[key].dim() > 2}
    assert shapes == {
        ("image", "top"): ([24, 32, 3], torch.uint8),
        ("depth", "top"): ([24, 32, 1], torch.float32),
        ("depth", "side"): ([16, 16, 1], torch.float32),
        ("segmentation", "top"): ([24, 32, 1], torch.int32),
    }
    spaces: Any = env.observation_space
    assert spaces["depth"]["top"] == gym.spaces.Box(0.5, 1.1, (24, 32, 1), np.float32)
    assert spaces["depth"]["side"] == gym.spaces.Box(0.0, 10.0, (16, 16, 1), np.float32)
    count = env.physics.model.nbody
    assert spaces["segmentation"]["top"] == gym.spaces.Box(0, count, (24, 32, 1), np.int32)
    assert spaces.contains({g: {k: v[0].numpy() for k, v in obs[g].items()} for g in obs.keys()})  # noqa: SIM118


def test_depth_is_clipped_and_ids_have_names(env: TaskEnv) -> None:
    """From 1.15 m above the table nothing is farther than 1.1 m but the table itself, and the arm is nearer."""
    obs, _ = env.reset(seed=5)
    depth, ids, names = obs["depth", "top"], obs["segmentation", "top"], env.segmentation_names
    assert names[:4] == ("background", "world", "cube", "goal")
    assert depth[ids == names.index("world")] == pytest.approx(1.1)
    cube = depth[ids == names.index("cube")]  # its top is 5 cm above the table
    assert cube.numel() > 0
    assert cube.min() == pytest.approx(1.1, abs=1e-3)
    assert (depth[ids > names.index("robot/base")] < 1.1).float().mean() > 0.8


def test_last_images_of_an_episode_are_not_the_first_of_the_next() -> None:
    with push(max_episode_steps=2) as env:
        env.step(torch.zeros(2, 6))
        obs, _, _, truncated, info = env.step(torch.ones(2, 6))
        assert bool(truncated.all())
        for group in ("image", "depth"):
            assert not torch.equal(info["final_observation"][group, "top"], obs[group, "top"])
        again, _ = env.reset(seed=info["episode_seed"])
        for key in [("image", "top"), ("depth", "side"), ("segmentation", "top")]:
            assert torch.equal(again[key], obs[key])


def test_states_bring_all_outputs_back(env: TaskEnv) -> None:
    env.reset(seed=7)
    state = env.get_state()
    first = env.step(torch.ones(2, 6))[0].clone()
    env.set_state(state)
    again = env.step(torch.ones(2, 6))[0]
    for key in first.keys(True, True):
        assert torch.equal(first[key], again[key]), key


def test_the_checker_accepts_all_outputs() -> None:
    small = {"name": "top", "width": 8, "height": 8, **ALL}
    assert check_env(push(cameras=[small], max_episode_steps=8)) == []  # which closes it


def test_a_policy_sees_depth_and_segmentation(env: TaskEnv) -> None:
    """Depth is scaled by its largest value, and ids become channels: other ids are other features."""
    obs, _ = env.reset(seed=5)
    policy: Any = build_policy({"name": "actor_critic"}, env.observation_space, env.action_space, "cpu")
    encoder = policy.encoder
    images = {entry.name: made for entry, made in zip(encoder.images, encoder.image_encoders, strict=True)}
    assert list(images) == ["depth/side", "depth/top", "image/top", "segmentation/top"]
    assert images["depth/top"].largest == pytest.approx(1.1)
    assert images["depth/top"].convolutions[0].in_channels == 1
    assert images["segmentation/top"].convolutions[0].in_channels == len(env.segmentation_names)
    ids = obs["segmentation", "top"][:1]
    one_hot = torch.nn.functional.one_hot(ids[..., 0].long(), len(env.segmentation_names)).permute(0, 3, 1, 2)
    expected = images["segmentation/top"].convolutions(one_hot.float())
    with torch.no_grad():
        encoder = images["segmentation/top"]
        assert torch.allclose(encoder(ids), encoder.activation(encoder.project(expected.flatten(1))), atol=1e-6)
    action, _, value = policy.get_action(obs)
    assert torch.isfinite(action).all()
    assert torch.isfinite(value).all()
    many = gym.spaces.Dict({"segmentation": gym.spaces.Dict({"top": gym.spaces.Box(0, 300, (8, 8, 1), np.int32)})})
    with pytest.raises(ConfigError, match=r"segmentation/top: .* at most 256 ids, and here are 301"):
        build_policy({"name": "actor_critic"}, many, env.action_space, "cpu")


def test_the_snippets_of_the_documentation_run() -> None:
    text = (Path(__file__).parents[2] / "docs/cameras.md").read_text()
    snippets = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(snippets) == 2
    for snippet in snippets:
        names: dict[str, Any] = {}
        exec(snippet, names)
        env: TaskEnv = names["env"]
        assert env.step(torch.zeros(4, 6))[0]["image", "top"].shape == (4, 64, 64, 3)
        env.close()
        if "pixels" in names:
            assert int(names["pixels"].min()) > 0
    for block in re.findall(r"```json\n(.*?)```", text, re.DOTALL):
        build_policy(json.loads(block)["policy"], env.observation_space, env.action_space, "cpu")
    for name in re.findall(r"^\| `(\w+)` \| `", text, re.MULTILINE):
        assert name in EVENTS or name in CameraCfg.__dataclass_fields__, name


def test_a_gymnasium_env_of_a_task_has_all_outputs() -> None:
    made = TaskGymnasiumEnv("PushCubeRL", env={"observations": {"cameras": CAMERAS}})
    obs, _ = made.reset(seed=5)
    assert made.observation_space.contains(obs)
    assert obs["depth"]["top"].shape == (24, 32, 1)
    made.close()
