"""What the GPU simulation is made of, as far as it can be tested without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mujoco
import numpy as np
import pytest
import torch

from embodichain.envs.physics.mujoco_warp import Workspace, capacity, find_device, out_of_memory
from embodichain.envs.registration import list_envs, load_gym_config
from embodichain.envs.rendering import CameraCfg, Renderer, mount_cameras, mounted_name
from embodichain.errors import ConfigError, SimulationError, UnknownNameError
from embodichain.utils.cuda_graphs import StepParts, _copy


@pytest.mark.parametrize("spec", list_envs(), ids=lambda spec: spec.id)
def test_there_is_room_for_all_contacts(spec: Any) -> None:
    """Throw the robot and the cube about; whatever touches whatever, it fits."""
    model = spec.task.build_model(load_gym_config(spec.id))
    room, data, rng = capacity(model, 1), mujoco.MjData(model), np.random.default_rng(0)
    most = [0, 0]
    for _ in range(300):
        data.qpos[:] = model.qpos0 + rng.normal(0.0, 0.6, model.nq)
        mujoco.mj_normalizeQuat(model, data.qpos)
        mujoco.mj_forward(model, data)
        most = [max(most[0], data.ncon), max(most[1], data.nefc)]
    assert most[0] <= room.contacts
    assert most[1] <= room.rows
    assert capacity(model, 1000).rows == room.rows
    assert room.contacts <= capacity(model, 1000).contacts <= 1000 * 32 + room.contacts


def test_all_touching_at_once_still_fits() -> None:
    """Boxes, capsules and a sphere in one heap: MuJoCo's own count is the bound."""
    shapes = ['type="box" size=".1 .1 .1"', 'type="capsule" size=".1 .1"', 'type="sphere" size=".1"']
    bodies = "".join(f'<body pos="0 0 {0.02 * i}"><freejoint/><geom {shape}/></body>' for i, shape in enumerate(shapes))
    xml = f'<mujoco><worldbody><geom type="plane" size="1 1 1"/>{bodies}</worldbody></mujoco>'
    model = mujoco.MjModel.from_xml_string(xml)
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    assert 0 < data.ncon <= capacity(model, 1).contacts
    assert 0 < data.nefc <= capacity(model, 1).rows


@pytest.mark.parametrize("name", ["gpu", "mps", "cuda:x", "cuda:0:1"])
def test_devices_that_do_not_exist_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="expected 'cpu', 'cuda' or 'cuda:N'"):
        find_device(name, SimpleNamespace())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_gpu_is_named() -> None:
    with pytest.raises(ConfigError, match="finds no CUDA device"):
        find_device("cuda", SimpleNamespace())


def fake_warp(driver: tuple[int, int] | None, cuda: bool = True) -> Any:
    return SimpleNamespace(
        config=SimpleNamespace(log_level=20),
        LOG_INFO=20,
        LOG_WARNING=30,
        init=lambda: None,
        is_cuda_available=lambda: cuda,
        is_conditional_graph_supported=lambda: driver is not None and driver >= (12, 4),
        get_cuda_driver_version=lambda: driver,
    )


def test_an_old_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert find_device("cuda", fake_warp((12, 8))) == torch.device("cuda", 0)
    with pytest.raises(SimulationError, match=r"supports CUDA 12\.2, and 12\.4 or newer is needed; update it"):
        find_device("cuda", fake_warp((12, 2)))
    with pytest.raises(SimulationError, match="check that libcuda"):
        find_device("cuda", fake_warp(None, cuda=False))
    with pytest.raises(ConfigError, match=r"'cuda:3' does not exist, this machine has 1 GPU"):
        find_device("cuda:3", fake_warp((13, 0)))


def test_too_many_worlds_are_told_apart_from_other_errors() -> None:
    device = torch.device("cpu")
    full = out_of_memory(RuntimeError("Failed to allocate 1000 bytes on device 'cuda:0'"), 512, device)
    assert isinstance(full, SimulationError)
    assert "512 worlds do not fit" in str(full)
    other = RuntimeError("kernel failed")
    assert out_of_memory(other, 512, device) is other


def test_scratch_memory_is_taken_once() -> None:
    workspace = Workspace(torch.device("cpu"))
    first = [workspace.allocate(size) for size in (1000, 1000, 5000, 0)]
    assert len(set(first[:3])) == 3
    taken = workspace.num_bytes
    for address, size in zip(first, (1000, 1000, 5000, 0), strict=True):
        workspace.deallocate(address, size)
    assert {workspace.allocate(900), workspace.allocate(1024)} == set(first[:2])
    assert workspace.num_bytes == taken
    workspace.allocate(1000)
    assert workspace.num_bytes == taken + 1024


SCENE = """<mujoco><worldbody>
  <light pos="0 0 2"/><geom type="plane" size="2 2 .1" rgba=".5 .5 .5 1"/>
  <camera name="eye" pos="1 -1 1" xyaxes="1 1 0 -.5 .5 1" fovy="40"/>
  <body name="arm" pos="0 0 .3" euler="0 0 30"><geom type="box" size=".2 .1 .05" rgba="1 0 0 1"/>
    <camera name="hand" pos="0 0 .8" fovy="70"/></body>
</worldbody></mujoco>"""


@pytest.mark.parametrize(
    "cfg",
    [
        CameraCfg(name="eye"),
        CameraCfg(name="a", attach="hand", fovy=35.0),
        CameraCfg(name="b", pos=(0.7, -0.4, 0.9), lookat=(0.1, 0.0, 0.2)),
        CameraCfg(name="c", pos=(0.0, 0.0, 1.5), lookat=(0.0, 0.0, 0.0), fovy=60.0),
    ],
    ids=lambda cfg: cfg.name,
)
def test_a_mounted_camera_sees_what_the_configured_one_sees(cfg: CameraCfg) -> None:
    model = mount_cameras(mujoco.MjSpec.from_string(SCENE), [cfg])

    def load(data: mujoco.MjData, env: int) -> None:
        data.qpos[:] = model.qpos0

    with Renderer(model, (48, 64)) as renderer:
        configured, mounted = (renderer.render(load, [0], camera) for camera in (cfg, mounted_name(cfg)))
    assert np.abs(configured.astype(int) - mounted.astype(int)).mean() < 0.5


FOLLOWING = """<mujoco><worldbody><light pos="0 0 3"/><geom type="plane" size="5 5 .1" rgba=".5 .6 .5 1"/>
  <body pos="0 0 .5"><freejoint/><geom type="box" size=".3 .2 .1" rgba="1 0 0 1"/>
    <camera name="track" mode="trackcom" pos="0 -3 .3" xyaxes="1 0 0 0 0 1"/>
    <camera name="parallel" projection="orthographic" fovy="1.5" pos="0 0 2"/>
    <camera name="lens" focalpixel="60 60" sensorsize=".01 .01" resolution="64 64" pos="0 0 2"/></body>
  <body name="ball" pos="0.5 0 .2"><geom size=".1" rgba="0 0 1 1"/></body>
  <camera name="aim" mode="targetbody" target="ball" pos="2 -1 1"/>
</worldbody></mujoco>"""


def test_a_mounted_camera_follows_and_projects_as_its_model() -> None:
    """Also on a body without a name, which has moved and turned."""
    cfgs = [CameraCfg(name=f"{name} too", attach=name) for name in ("track", "parallel", "lens", "aim")]
    model = mount_cameras(mujoco.MjSpec.from_string(FOLLOWING), cfgs)

    def load(data: mujoco.MjData, env: int) -> None:
        data.qpos[:] = [0.3, 0.2, 0.8, 0.92, 0.2, 0.3, 0.1]
        mujoco.mj_normalizeQuat(model, data.qpos)

    with Renderer(model, (48, 64)) as renderer:
        for cfg in cfgs:
            own, mounted = (renderer.render(load, [0], camera)[0] for camera in (cfg.attach, cfg))
            assert own.std() > 10.0, cfg.attach
            assert np.array_equal(own, mounted), cfg.attach


def test_a_camera_to_mount_must_exist() -> None:
    with pytest.raises(UnknownNameError, match="no camera 'yee'"):
        mount_cameras(mujoco.MjSpec.from_string(SCENE), [CameraCfg(name="yee")])


def test_the_parts_of_a_step_come_in_order() -> None:
    log: list[Any] = []
    parts = StepParts(
        before=lambda action: log.append(("before", action)),
        simulate=lambda: log.append("simulate"),
        beside=lambda: "drawn",
        after=lambda action, drawn: (action, drawn),
    )
    assert parts(torch.tensor(1.0)) == (torch.tensor(1.0), "drawn")
    assert log == [("before", torch.tensor(1.0)), "simulate"]


def test_copies_keep_the_shape_of_things_and_what_is_the_same_stays_the_same() -> None:
    from tensordict import TensorDict

    shared, flags = torch.arange(6.0), torch.tensor([True, False])
    tree = (TensorDict({"a": shared, "b": {"c": shared}}, [6]), flags, {"n": 3, "t": shared})
    copied = _copy(tree)
    shared.zero_()
    flags.zero_()
    assert copied[0]["a"].tolist() == [0, 1, 2, 3, 4, 5]
    assert copied[0]["b", "c"] is copied[0]["a"]
    assert copied[2]["t"] is copied[0]["a"]
    assert copied[1].tolist() == [True, False]
    assert copied[2]["n"] == 3
