"""Images rendered on a GPU: things appear where the laws of perspective put them."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from embodichain.envs.task_env import TaskEnv
from tests.envs.test_visual_events import ALL as LOOKS
from tests.envs.test_visual_events import CAMERA
from tests.gpu.gpu import make_task, needs_opengl, no_waiting, simulates

pytestmark = simulates
OVER = {"name": "over", "pos": [0.6, 0.3, 1.2], "lookat": [0.55, 0.0, 0.0], "fovy": 50.0, "width": 160, "height": 120}
ODD = OVER | {"name": "odd", "width": 61, "height": 51}  # its pixels cannot be unpacked in groups of four
SIDE = {"name": "side", "width": 120, "height": 96}


def with_cameras(*cameras: dict[str, Any], **changes: Any) -> TaskEnv:
    return make_task(num_envs=8, env={"observations": {"cameras": list(cameras)}}, **changes)


def project(points: Tensor, pos: np.ndarray, axes: np.ndarray, fovy: float, height: int, width: int) -> np.ndarray:
    """Return the pixels (row, column) ``[n, 2]`` of points ``[n, 3]``; ``axes`` are the camera's right, up and back."""
    local = (points.cpu().double().numpy() - pos) @ axes
    scale = 0.5 * height / math.tan(math.radians(fovy) / 2)
    column = 0.5 * width + scale * local[:, 0] / -local[:, 2]
    row = 0.5 * height - scale * local[:, 1] / -local[:, 2]
    return np.stack((row, column), axis=1).astype(int)


def colours(frames: Tensor, pixels: np.ndarray) -> np.ndarray:
    return np.stack([frames[env, row, column].cpu().numpy() for env, (row, column) in enumerate(pixels)]).astype(int)


def test_things_are_seen_where_they_are() -> None:
    with with_cameras(OVER, ODD, SIDE) as env:
        obs, _ = env.reset(seed=5)
        goal = torch.cat((obs["goal", "pos"], torch.zeros(8, 1, device="cuda")), dim=1)
        ahead = np.subtract(OVER["lookat"], OVER["pos"])
        ahead = ahead / np.linalg.norm(ahead)
        right = np.cross(ahead, [0.0, 0.0, 1.0])
        right /= np.linalg.norm(right)
        axes = np.stack((right, np.cross(right, ahead), -ahead), axis=1)
        camera = env.physics.model.camera("side")
        views = {
            "over": (np.array(OVER["pos"]), axes, 50.0),
            "odd": (np.array(ODD["pos"]), axes, 50.0),
            "side": (camera.pos, _matrix(camera.quat), float(camera.fovy[0])),
        }
        for name, (pos, orientation, fovy) in views.items():
            frames = obs["image", name]
            assert frames.dtype == torch.uint8
            assert frames.device.type == "cuda"
            size = frames.shape[1:3]
            red = colours(frames, project(obs["object", "pos"], pos, orientation, fovy, *size))
            assert (red[:, 0] > 2 * red[:, 1]).mean() > 0.7, name  # the arm may hide it from one of the cameras
            green = colours(frames, project(goal, pos, orientation, fovy, *size))
            assert (green[:, 1] > 1.3 * green[:, 0]).mean() > 0.7, name


def _matrix(quat: np.ndarray) -> np.ndarray:
    w, x, y, z = quat
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
        ]
    )


def test_the_last_picture_of_an_episode_is_not_the_first_of_the_next() -> None:
    with with_cameras(SIDE, max_episode_steps=4) as env:
        generator = torch.Generator("cuda").manual_seed(0)
        for step in range(1, 9):
            before = env._obs["image", "side"].clone()
            obs, _, _, truncated, info = env.step(torch.rand(8, 6, device="cuda", generator=generator) * 2 - 1)
            final = info["final_observation"]["image", "side"]
            assert not torch.equal(final, before)
            assert bool(truncated.all()) == (step % 4 == 0)
            assert torch.equal(final, obs["image", "side"]) == (step % 4 != 0)


OUTPUTS = {"outputs": ["rgb", "depth", "segmentation"]}


def test_depth_and_segmentation_are_those_of_the_cpu() -> None:
    """Edges of things may lie a pixel apart; elsewhere ids are equal, and depths to a millimetre."""
    needs_opengl()
    cameras = {"observations": {"cameras": [OVER | OUTPUTS, SIDE | OUTPUTS]}}
    with make_task(num_envs=8, env=cameras) as gpu, make_task(num_envs=8, device="cpu", env=cameras) as cpu:
        ours, theirs = gpu.reset(seed=5)[0], cpu.reset(seed=5)[0]
        assert gpu.observation_space == cpu.observation_space
        assert gpu.segmentation_names == cpu.segmentation_names
        for name in ("over", "side"):
            ids, depth = ours["segmentation", name].cpu(), ours["depth", name].cpu()
            same = ids == theirs["segmentation", name]
            assert (ids.dtype, depth.dtype) == (torch.int32, torch.float32)
            assert same.float().mean() > 0.98, name
            assert ((depth - theirs["depth", name]).abs()[same] < 1e-3).float().mean() > 0.99, name
            assert set(ids.unique().tolist()) >= {gpu.segmentation_names.index(body) for body in ("cube", "goal")}


@pytest.mark.parametrize("outputs", [["rgb"], OUTPUTS["outputs"]], ids=lambda outputs: "+".join(outputs))
def test_a_recorded_step_shows_what_an_ordinary_one_shows(outputs: list[str]) -> None:
    """Also where envs are reset one by one; and once it is recorded nothing waits for the device."""
    camera = SIDE | {"outputs": outputs}
    with with_cameras(camera, max_episode_steps=5) as recorded, with_cameras(camera, max_episode_steps=5) as plain:
        plain._graphed = None
        for env in (recorded, plain):
            state = env.get_state()
            state["step"] = torch.arange(8, device="cuda") % 5
            env.set_state(state)
        generator = torch.Generator("cuda").manual_seed(0)
        for step in range(12):
            action = torch.rand(8, 6, device="cuda", generator=generator) * 2 - 1
            with no_waiting() if step > 6 else nullcontext():
                ours = recorded.step(action)
            theirs = plain.step(action)
            done = theirs[2] | theirs[3]
            assert torch.equal(ours[2] | ours[3], done)
            final, expected_final = ours[4]["final_observation"], theirs[4]["final_observation"]
            for observed, expected in ((ours[0], theirs[0]), (final, expected_final)):
                assert (observed["image", "side"] != expected["image", "side"]).float().mean() < 0.02
                if "depth" in outputs:
                    assert ((observed["depth", "side"] - expected["depth", "side"]).abs() > 1e-2).float().mean() < 0.02
            same = (ours[0]["image", "side"] == final["image", "side"]).flatten(1).all(1)
            assert torch.equal(same, ~done)
        assert recorded._graphed is not None
        assert recorded._graphed._replay is not None


def test_looks_that_differ_from_env_to_env_are_those_of_the_cpu() -> None:
    """Colours, textures, lights and cameras follow from the seed; a recorded reset draws and shows new ones."""
    needs_opengl()
    settings: Any = {"observations": {"cameras": [CAMERA | {"outputs": ["rgb", "segmentation"]}]}, "events": LOOKS}
    with make_task(num_envs=8, env=settings, max_episode_steps=3) as gpu:
        with make_task(num_envs=8, device="cpu", env=settings) as cpu:
            ours, theirs = gpu.reset(seed=5)[0], cpu.reset(seed=5)[0]
        same = ours["segmentation", "front"].cpu() == theirs["segmentation", "front"]
        assert same.float().mean() > 0.98
        difference = ours["image", "front"].cpu().float() - theirs["image", "front"].float()
        assert difference.abs().mean() < 20.0  # of 255: light is computed per pixel, and per corner on the CPU
        for _ in range(9):
            obs, _, _, truncated, info = gpu.step(torch.zeros(8, 6, device="cuda"))
        assert gpu._graphed is not None
        assert gpu._graphed._replay is not None
        assert bool(truncated.all())
        seeds = info["episode_seed"].cpu()
        with make_task(num_envs=8, device="cpu", env=settings) as cpu:
            expected = cpu.reset(seed=seeds)[0]["image", "front"].float()
        assert (obs["image", "front"].cpu().float() - expected).abs().mean() < 20.0
        assert (obs["image", "front"].cpu().float() - expected.roll(1, 0)).abs().mean() > 25.0


def test_a_camera_that_is_not_there_is_named() -> None:
    with pytest.raises(LookupError, match="no camera 'nowhere'"):
        with_cameras({"name": "nowhere"})
