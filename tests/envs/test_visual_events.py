"""Looks that differ from env to env: colours, textures, lights and cameras, drawn from the episode's seed."""

from __future__ import annotations

import math
from typing import Any

import mujoco
import numpy as np
import pytest
import torch
from torch import Tensor

from embodichain.envs.gl_backend import choose_backend
from embodichain.envs.registration import make
from embodichain.envs.task_env import TaskEnv
from embodichain.errors import ConfigError, RenderingError

SIZE = 48
CAMERA = {"name": "front", "width": SIZE, "height": SIZE, "pos": [1.2, 0.0, 0.75], "lookat": [0.55, 0.0, 0.03]}
COLOR = {
    "func": "geom_color",
    "params": {"bodies": "cube", "color": {"r": [0.0, 0.3], "g": [0.2, 0.9], "b": [0.9, 1.0]}},
}
TEXTURE = {"func": "geom_texture", "params": {"geoms": "table", "textures": ["checker", "noise"], "keep": False}}
LIGHTS = {
    "func": "lights",
    "params": {
        "pos": {"x": [-0.5, 0.5], "z": [0.0, 1.0]},
        "tilt": [0.0, 0.4],
        "diffuse": [0.3, 1.2],
        "ambient": [0.0, 0.2],
        "off": 0.3,
    },
}
POSE = {
    "func": "camera_pose",
    "params": {"pos": {"y": [-0.05, 0.05], "z": [0.0, 0.1]}, "rot": {"roll": [-0.3, 0.3], "yaw": [-0.05, 0.05]}},
}
FOV = {"func": "camera_fov", "params": {"range": [-10.0, 10.0]}}
ALL = {"color": COLOR, "texture": TEXTURE, "lights": LIGHTS, "pose": POSE, "fov": FOV}


@pytest.fixture(scope="module", autouse=True)
def backend() -> None:
    try:
        choose_backend()
    except RenderingError as error:
        pytest.skip(f"needs OpenGL: {error}")


def push(num_envs: int = 4, cameras: list[dict[str, Any]] | None = None, **events: Any) -> TaskEnv:
    shown = [CAMERA | {"outputs": ["rgb", "segmentation"]}] if cameras is None else cameras
    env = make("PushCubeRL", num_envs=num_envs, seed=3, env={"observations": {"cameras": shown}, "events": events})
    assert isinstance(env, TaskEnv)
    return env


def of_body(env: TaskEnv, obs: Any, name: str) -> Tensor:
    """Return where a body is seen, ``[num_envs, H, W]``."""
    seen: Tensor = obs["segmentation", "front"][..., 0] == env.segmentation_names.index(name)
    return seen


def test_a_colour_is_seen_and_belongs_to_the_episode() -> None:
    with push(color=COLOR) as env:
        obs, info = env.reset(seed=5)
        image, seen = obs["image", "front"].float(), of_body(env, obs, "cube")
        cube = int(np.nonzero(env.physics.model.geom_bodyid == env.physics.model.body("cube").id)[0][0])
        drawn = env.physics.model_field("geom_rgba")[:, cube]
        for rgb, mask, color in zip(image, seen, drawn, strict=True):
            shown = rgb[mask].mean(0)
            assert shown[1] / shown[2] == pytest.approx(float(color[1] / color[2]), abs=0.1)  # light is grey
        assert drawn[:, :3].std(0).min() > 0.0
        assert bool((drawn[:, 0] <= 0.3).all() and (drawn[:, 2] >= 0.9).all() and (drawn[:, 3] == 1.0).all())
        again, _ = env.reset(seed=info["episode_seed"].flip(0))
        assert torch.equal(again["image", "front"], obs["image", "front"].flip(0))


def test_everything_together_is_part_of_the_state_and_of_the_seed() -> None:
    """Whatever the number of envs: episodes look the same, steps do, and a restored state does."""
    with push(4, **ALL) as env, push(2, **ALL) as fewer:
        obs, other = env.reset(seed=5)[0], fewer.reset(seed=5)[0]
        assert torch.equal(obs["image", "front"][:2], other["image", "front"])
        assert len({image.numpy().tobytes() for image in obs["image", "front"]}) == 4
        state = env.get_state()
        first = env.step(torch.zeros(4, 6))[0]["image", "front"].clone()
        env.reset(seed=9)
        assert torch.equal(env.set_state(state)["image", "front"], obs["image", "front"])
        assert torch.equal(env.step(torch.zeros(4, 6))[0]["image", "front"], first)
        assert env.render(size=(32, 32)).shape == (4, 32, 32, 3)  # a view that no event concerns


def test_the_cube_is_seen_where_the_drawn_camera_puts_it() -> None:
    """The pinhole equation with each env's own pose and field of view."""
    with push(pose=POSE, fov=FOV) as env:
        obs, _ = env.reset(seed=5)
        camera = env.physics.model.camera("observed/front").id
        pos, quat, fovy = (
            env.physics.model_field(f"cam_{name}")[:, camera].numpy() for name in ("pos", "quat", "fovy")
        )
        assert len(np.unique(fovy)) == 4
        for index, mask in enumerate(of_body(env, obs, "cube")):
            axes = np.empty(9)
            mujoco.mju_quat2Mat(axes, quat[index])
            local = axes.reshape(3, 3).T @ (obs["object", "pos"][index].double().numpy() - pos[index])
            focal = SIZE / 2 / math.tan(math.radians(fovy[index]) / 2)
            expected = np.array([SIZE / 2 + focal * local[1] / local[2], SIZE / 2 - focal * local[0] / local[2]])
            assert mask.nonzero().double().mean(0).numpy() + 0.5 == pytest.approx(expected, abs=1.2)


def test_lights_and_textures_change_the_table() -> None:
    off = {"func": "lights", "params": {"off": 1.0}}
    with push(off=off) as dark, push() as usual, push(texture=TEXTURE) as textured:
        images = [env.reset(seed=5)[0]["image", "front"].float() for env in (usual, dark, textured)]
        assert images[1].mean() < 0.8 * images[0].mean()
        assert images[1].mean() > 0.1 * images[0].mean()  # the camera's own light is on
        assert (images[2] - images[0]).abs().mean() > 5.0
        model, table = textured.physics.model, textured.physics.model.geom("table").id
        chosen = {model.material(int(i)).name for i in textured.physics.model_field("geom_matid")[:, table]}
        assert chosen <= {"observed/checker", "observed/noise"}


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (COLOR | {"params": {"color": {"r": [0.0, 1.5]}}}, r"event\.params\.color\.r: expected colours in \[0, 1\]"),
        (COLOR | {"params": {"color": {}}}, r"params\.color: expected a range"),
        (COLOR | {"params": {"color": {"r": [0, 1]}, "bodies": "cub"}}, "Did you mean 'cube'"),
        (TEXTURE | {"params": {"textures": ["chequer"]}}, "textures"),
        (
            LIGHTS | {"params": {"lights": "sun", "off": 0.5}},
            "'sun' matches nothing: the model's lights have no names; leave this out",
        ),
        (LIGHTS | {"params": {}}, "expected pos, tilt, diffuse, ambient or off"),
        (LIGHTS | {"params": {"ambient": [0.0, 2.0]}}, r"expected light in \[0, 1\]"),
        (POSE | {"params": {}}, "expected pos or rot"),
        (POSE | {"params": {"cameras": "fromt", "pos": {"x": [0, 1]}}}, "Did you mean 'front'"),
        (FOV | {"params": {"range": [-50.0, 0.0]}}, r"expected angles in \[1, 179\] degrees, and these give -5"),
        (FOV | {"func": "camera_fow"}, "camera_fov"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(event: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, LookupError), match=message):
        push(1, event=event)


def test_cameras_that_are_not_there_cannot_be_moved() -> None:
    with pytest.raises(ConfigError, match=r"no camera in env\.observations\.cameras"):
        push(1, cameras=[], event=POSE)
    with pytest.raises(ConfigError, match=r"add one to env\.observations\.cameras"):
        push(1, cameras=[], event=TEXTURE)
