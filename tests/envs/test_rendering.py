"""Cameras: what is drawn, by whom, from where, and what happens when nothing can be."""

import ast
import importlib
import math
import os
import re
import subprocess
import sys
import textwrap
import threading
import time

import mujoco
import numpy as np
import pytest

from embodichain.envs import gl_backend as gl
from embodichain.envs.rendering import CameraCfg, Cameras, Renderer, camera_names, segmentation_names
from embodichain.errors import ConfigError, RenderingError, UnknownNameError

SCENE = """
<mujoco>
  <visual><global offwidth="64" offheight="64"/><headlight ambient="1 1 1"/></visual>
  <worldbody>
    <light pos="0 0 3" dir="0 0 -1"/>
    <camera name="side" pos="2 0 0.5" xyaxes="0 1 0 0 0 1"/>
    <camera name="top" pos="0 0 3" xyaxes="1 0 0 0 1 0"/>
    <geom type="box" size="1 1 0.02" pos="0 0 -0.02" rgba="0.1 0.1 0.4 1"/>
    <body name="ball" pos="0 0 0.3"><freejoint/><geom type="sphere" size="0.1" rgba="1 0 0 1"/></body>
  </worldbody>
</mujoco>"""


@pytest.fixture(scope="module")
def model():
    return mujoco.MjModel.from_xml_string(SCENE)


@pytest.fixture(scope="module")
def backend():
    try:
        return gl.choose_backend()
    except RenderingError as error:
        pytest.skip(f"needs OpenGL: {error}")


@pytest.fixture
def renderer(model, backend):
    with Renderer(model, (48, 64)) as made:
        yield made


def load(data, env):
    """Env ``i`` has its ball at ``y = i / 10``."""
    data.qpos[:7] = [0, env / 10, 0.3, 1, 0, 0, 0]


def red_centre(frame):
    """Return row and column of the middle of what is red."""
    rows, columns = np.nonzero((frame[..., 0] > 100) & (frame[..., 2] < 60))
    assert len(rows) > 0
    return rows.mean(), columns.mean()


def test_frames_have_the_asked_shape_and_order(renderer):
    frames = renderer.render(load, [0, 3, 1], "side")
    assert frames.shape == (3, 48, 64, 3)
    assert frames.dtype == np.uint8
    assert len({frame.tobytes() for frame in frames}) == 3
    columns = [red_centre(frame)[1] for frame in frames]
    assert columns[0] < columns[2] < columns[1]  # y grows to the right in this view
    assert np.array_equal(renderer.render(load, [1, 0, 3], "side"), frames[[2, 0, 1]])


def test_same_state_gives_same_pixels_in_any_renderer(model, renderer):
    frames = renderer.render(load, [2, 5], "top")
    assert np.array_equal(renderer.render(load, np.array([2, 5]), "top"), frames)
    with Renderer(model, (48, 64)) as other:
        assert np.array_equal(other.render(load, [2, 5], "top"), frames)


def test_top_row_comes_first(renderer):
    row, _ = red_centre(renderer.render(load, [0], "side")[0])
    assert row > 24  # the ball lies below the height of the camera


def test_no_env_is_no_image(renderer):
    assert renderer.render(load, [], "side").shape == (0, 48, 64, 3)


@pytest.mark.parametrize("size", [(60, 80), (61, 33)])
@pytest.mark.parametrize("fovy", [30.0, 70.0])
def test_free_camera_is_a_pinhole(model, backend, size, fovy):
    """The ball appears where the pinhole equation puts it: pixel = f * (sideways / depth), f from the field of view."""
    eye, target, ball = np.array([1.5, -1.0, 1.2]), np.array([0.0, 0.2, 0.3]), np.array([0.1, 0.3, 0.3])
    ahead = (target - eye) / np.linalg.norm(target - eye)
    right = np.cross(ahead, [0, 0, 1])
    right /= np.linalg.norm(right)
    up = np.cross(right, ahead)
    focal = size[0] / 2 / math.tan(math.radians(fovy) / 2)
    depth = (ball - eye) @ ahead
    column = size[1] / 2 + focal * ((ball - eye) @ right) / depth
    row = size[0] / 2 - focal * ((ball - eye) @ up) / depth

    def place(data, env):
        data.qpos[:7] = [*ball, 1, 0, 0, 0]

    cfg = CameraCfg(name="free", pos=tuple(eye), lookat=tuple(target), fovy=fovy)
    with Renderer(model, size) as made:
        seen = red_centre(made.render(place, [0], cfg)[0])
    assert seen == pytest.approx((row - 0.5, column - 0.5), abs=0.7)


def test_attached_camera_is_the_models_own(renderer):
    frames = renderer.render(load, [0, 4], "top")
    assert np.array_equal(renderer.render(load, [0, 4], CameraCfg(name="wrist", attach="top")), frames)
    assert np.array_equal(renderer.render(load, [0, 4], CameraCfg(name="top")), frames)
    assert not np.array_equal(renderer.render(load, [0, 4], CameraCfg(name="top", fovy=20.0)), frames)


def test_first_camera_is_the_default(model, renderer):
    assert camera_names(model) == ["side", "top"]
    assert np.array_equal(renderer.render(load, [0]), renderer.render(load, [0], "side"))


SOLIDS = """
<mujoco>
  <visual><map znear="0.005" zfar="20"/></visual><statistic extent="2"/>
  <worldbody>
    <light pos="0 0 3" dir="0 0 -1"/>
    <camera name="down" pos="0 0 2" xyaxes="1 0 0 0 1 0" fovy="60"/>
    <camera name="level" pos="0 -3 1" xyaxes="1 0 0 0 0 1" fovy="60"/>
    <geom name="floor" type="plane" size="5 5 0.1"/>
    <body name="block" pos="0.3 0 0.2"><geom type="box" size="0.2 0.2 0.2" rgba="1 0 0 0.4"/></body>
    <body pos="-0.5 0.3 0.5"><geom type="sphere" size="0.25"/><site pos="0 -0.45 0" size="0.03"/></body>
  </worldbody>
</mujoco>"""


def rays(size, fovy):
    """Return where the middle of every pixel lies, one metre before the camera: right and up ``[H, W]``."""
    focal = size[0] / 2 / math.tan(math.radians(fovy) / 2)
    rows, columns = np.indices(size) + 0.5
    return (columns - size[1] / 2) / focal, (size[0] / 2 - rows) / focal


def test_depth_and_segmentation_are_those_of_the_geometry(backend):
    """Seen from above: a floor, a box of glass and a ball, whose depths along the view direction are known."""
    model, size = mujoco.MjModel.from_xml_string(SOLIDS), (90, 120)
    right, up = rays(size, 60.0)
    nothing = lambda data, env: None  # noqa: E731
    with Renderer(model, size) as made:
        out = made.render_outputs(nothing, [0, 0], "down", ("segmentation", "rgb", "depth"))
        assert np.array_equal(out["rgb"], made.render(nothing, [0, 0], "down"))
        level = made.render_outputs(nothing, [0], "level", ("depth", "segmentation"))
    depth, ids = out["depth"][1, ..., 0], out["segmentation"][1, ..., 0]
    assert {name: (value.shape[1:], value.dtype.name) for name, value in out.items()} == {
        "rgb": ((*size, 3), "uint8"),
        "depth": ((*size, 1), "float32"),
        "segmentation": ((*size, 1), "int32"),
    }
    assert segmentation_names(model) == ("background", "world", "block", "body 2")
    # The top of the box is 1.6 m away; a ray meets the ball where |t * ray - centre| is the radius.
    on_top = (np.abs(right * 1.6 - 0.3) < 0.19) & (np.abs(up * 1.6) < 0.19)
    centre, ray = np.array([-0.5, 0.3, -1.5]), np.stack((right, up, -np.ones(size)), axis=-1)
    along, square = ray @ centre, (ray**2).sum(-1)
    inside = along**2 - square * (centre @ centre - 0.25**2)
    ball = np.where(inside > 0.0, (along - np.sqrt(np.maximum(inside, 0.0))) / square, np.inf)
    assert np.all(ids[on_top] == 2)
    assert depth[on_top] == pytest.approx(1.6, abs=1e-4)
    assert np.all(ids[np.hypot(right * 1.5 + 0.5, up * 1.5 + 0.15) < 0.02] == 3)  # a site is part of its body
    well_inside = inside > 0.03
    assert np.all(ids[well_inside] == 3)
    # A ball is drawn of flat pieces, 30 degrees each: up to 1.7 cm below its surface, here seen at up to 46 degrees.
    assert np.all((depth - ball)[well_inside] > -1e-4)
    assert (depth - ball)[well_inside].max() < 0.017 / 0.68
    beside = (ids == 1) & (np.abs(right * 1.6 - 0.3) > 0.3) & (inside < -0.05)
    assert beside.sum() > 2000
    assert depth[beside] == pytest.approx(2.0, abs=1e-4)
    # A level view has the sky in its upper half; the floor's depth is that of the horizon's geometry.
    depth, ids = level["depth"][0, ..., 0], level["segmentation"][0, ..., 0]
    assert np.all(ids[up > 0.6] == 0)
    assert np.all(np.isinf(depth[ids == 0]))
    floor = (ids == 1) & (up < -0.25)
    assert depth[floor] == pytest.approx((1.0 / -up)[floor], rel=2e-3)
    with Renderer(model, size, "high") as made, pytest.raises(RenderingError, match="quality 'lean'"):
        made.render_outputs(nothing, [0], "down", ("segmentation",))  # averages over samples of a pixel are no ids


def test_unknown_camera_names_the_nearest(model, renderer):
    with pytest.raises(UnknownNameError, match="Did you mean 'side'"):
        renderer.render(load, [0], "sid")
    with pytest.raises(UnknownNameError, match="'top'"):
        Cameras(model, [CameraCfg(name="wrist", attach="tops")])
    with pytest.raises(ConfigError, match="two cameras"):
        Cameras(model, [CameraCfg(name="top"), CameraCfg(name="top")])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pos": (1, 0, 1)}, "belong together"),
        ({"pos": (1, 0, 1), "lookat": (1, 0, 1)}, "must differ"),
        ({"pos": (1, 0, 1), "lookat": (0, 0, 0), "attach": "top"}, "got both"),
        ({"width": 0}, "width"),
        ({"fovy": 180.0}, "fovy"),
        ({"outputs": ()}, "outputs"),
        ({"outputs": ("rgb", "rgb")}, "given once"),
        ({"outputs": ("colour",)}, "outputs"),
        ({"near": 2.0, "far": 2.0}, "far must be larger than near"),
    ],
)
def test_camera_config_says_what_is_wrong(fields, message):
    with pytest.raises(ConfigError, match=message):
        CameraCfg(name="c", **fields)


def test_high_quality_differs_and_costs_more(model, backend):
    seconds, frames = {}, {}
    for quality in ("lean", "high"):
        with Renderer(model, (96, 96), quality) as made:
            made.render(load, [0], "side")
            times = []
            for _ in range(3):
                start = time.process_time()  # not what others do meanwhile
                frames[quality] = made.render(load, range(20), "side")
                times.append(time.process_time() - start)
            seconds[quality] = min(times)
    assert not np.array_equal(frames["lean"], frames["high"])
    assert red_centre(frames["lean"][3]) == pytest.approx(red_centre(frames["high"][3]), abs=1.0)
    assert seconds["lean"] < seconds["high"]


def test_pictures_larger_than_the_model_allows_leave_it_as_it_was(model, backend):
    with Renderer(model, (130, 200)) as made:
        assert made.render(load, [0], "side").shape == (1, 130, 200, 3)
    assert (model.vis.global_.offwidth, model.vis.global_.offheight) == (64, 64)
    assert model.vis.quality.shadowsize > 0


@pytest.mark.parametrize("size", [(0, 5), (5, 9000)])
def test_impossible_sizes_are_refused(model, size):
    with pytest.raises(RenderingError, match="8192"):
        Renderer(model, size)


def test_close_twice_and_not_after(model, backend):
    made = Renderer(model, (8, 8))
    made.close()
    made.close()
    with pytest.raises(RenderingError, match="closed"):
        made.render(load, [0])


def test_cameras_share_a_renderer_of_their_size(model, backend, monkeypatch):
    made = []
    original = Renderer.__init__
    monkeypatch.setattr(Renderer, "__init__", lambda self, *args: (made.append(args[1:]), original(self, *args))[1])
    cameras = Cameras(model, [CameraCfg(name="front", pos=(2, 0, 1), lookat=(0, 0, 0), width=40, height=30)])
    assert cameras.names == ["front", "side", "top"]
    assert cameras.render(load, [0, 1]).shape == (2, 30, 40, 3)  # configured cameras first
    assert cameras.render(load, [0], "top", (30, 40)).shape == (1, 30, 40, 3)
    assert cameras.render(load, [0], "top").shape == (1, 96, 96, 3)
    assert made == [((30, 40), "lean"), ((96, 96), "lean")]
    with pytest.raises(UnknownNameError, match="'front'"):
        cameras.render(load, [0], "frond")
    cameras.close()
    cameras.close()


@pytest.mark.parametrize("version", [3, 4])
def test_any_thread_may_draw(renderer, backend, version, monkeypatch):
    """Also with the contexts of MuJoCo 3.17, which cannot be made current for a while."""
    if version == 3:
        context = importlib.import_module(f"mujoco.{backend}").GLContext
        monkeypatch.delattr(context, "as_current", raising=False)
    expected = renderer.render(load, [2], "side")
    results, errors = [], []

    def draw():
        try:
            results.extend(np.array_equal(renderer.render(load, [2], "side"), expected) for _ in range(20))
        except RenderingError as error:
            errors.append(error)

    threads = [threading.Thread(target=draw) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert results == [True] * 60


PROCESSES = textwrap.dedent(
    """
    import multiprocessing, os, sys
    import mujoco
    from embodichain.envs.rendering import Renderer
    from embodichain.errors import RenderingError

    XML = '<mujoco><worldbody><light pos="0 0 3"/><geom size="1"/></worldbody></mujoco>'

    def load(data, env):
        pass

    def draw(queue):
        try:
            queue.put(int(Renderer(mujoco.MjModel.from_xml_string(XML), (16, 16)).render(load, [0]).sum()))
        except RenderingError as error:
            queue.put(str(error))

    def in_child(method):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=draw, args=(queue,))
        process.start()
        answer = queue.get(timeout=200)
        process.join(200)
        return answer, process.exitcode

    if __name__ == "__main__":
        before = in_child("fork")
        renderer = Renderer(mujoco.MjModel.from_xml_string(XML), (16, 16))
        here = int(renderer.render(load, [0]).sum())
        pid = os.fork()
        if pid == 0:
            renderer.close()
            sys.exit(7)
        left = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(repr((here, before, in_child("fork"), in_child("spawn"), left)))
    """
)


def test_worker_processes_draw_and_exit_in_silence(backend, tmp_path):
    script = tmp_path / "processes.py"
    script.write_text(PROCESSES)
    path = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    here, before, after, spawned, left = ast.literal_eval(done.stdout)
    assert here > 0
    assert before == (here, 0)
    assert spawned == (here, 0)
    assert "spawn" in after[0]
    assert after[1] == 0
    assert left == 7


@pytest.fixture
def fresh_choice(monkeypatch):
    """Forget what was found, and restore the environment afterwards."""
    monkeypatch.setattr(gl, "_found", None)
    monkeypatch.setattr(gl, "_failure", None)
    names = ("MUJOCO_GL", gl.FOUND_VARIABLE, "PYOPENGL_PLATFORM", "LP_NUM_THREADS", "EGL_LOG_LEVEL")
    for name in (*names, "MESA_SHADER_CACHE_DISABLE", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.setenv(name, "")  # so that monkeypatch restores what the choice sets
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "platform", "linux")
    return monkeypatch


def test_no_backend_names_the_packages(fresh_choice):
    fresh_choice.setattr(gl, "probe", lambda backend: "its library is not installed")
    for _ in range(2):
        with pytest.raises(RenderingError, match=r"(?s)egl: its.*osmesa: its.*libosmesa6.*libegl1"):
            gl.choose_backend()
    assert "MUJOCO_GL" not in os.environ


def test_rendering_switched_off(fresh_choice, model):
    fresh_choice.setenv("MUJOCO_GL", "disabled")
    with pytest.raises(RenderingError, match="MUJOCO_GL=disabled"):
        Renderer(model)


def test_first_backend_that_works_is_kept_for_children(fresh_choice):
    tried = []
    fresh_choice.setattr(gl, "probe", lambda backend: tried.append(backend) or (None if backend == "osmesa" else "no"))
    assert gl.choose_backend() == gl.choose_backend() == "osmesa"
    assert tried == ["egl", "osmesa"]
    assert os.environ["MUJOCO_GL"] == os.environ[gl.FOUND_VARIABLE] == "osmesa"
    fresh_choice.setattr(gl, "_found", None)  # as in a child
    assert gl.choose_backend() == "osmesa"
    assert tried == ["egl", "osmesa"]


def test_the_users_backend_is_the_only_one_tried(fresh_choice):
    tried = []
    fresh_choice.setenv("MUJOCO_GL", "osmesa")
    fresh_choice.setenv("LP_NUM_THREADS", "3")
    fresh_choice.setattr(gl, "probe", lambda backend: tried.append(backend))
    assert gl.choose_backend() == "osmesa"
    assert tried == ["osmesa"]
    assert os.environ["LP_NUM_THREADS"] == "3"
    fresh_choice.setattr(gl, "_found", None)
    fresh_choice.delenv(gl.FOUND_VARIABLE)
    fresh_choice.setattr(gl, "probe", lambda backend: "no")
    with pytest.raises(RenderingError, match="only backend allowed"):
        gl.choose_backend()


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("import os; os.abort()", "crashed .SIGABRT."),
        ("import time; time.sleep(60)", "no picture within"),
        ("raise OSError('libEGL.so.1 not found')", "libEGL.so.1"),
        ("None.eglQueryString", "not installed"),
        ("", None),
    ],
)
def test_probe_survives_what_a_driver_does(monkeypatch, script, problem):
    monkeypatch.setattr(gl, "_PROBE", script)
    monkeypatch.setattr(gl, "_PROBE_SECONDS", 1.0 if problem and "within" in problem else 30.0)
    answer = gl.probe("egl")
    if problem is None:
        assert answer is None
    else:
        assert re.search(problem, answer)


def test_gpu_tests_of_images_are_skipped_where_nothing_can_draw(fresh_choice, monkeypatch):
    from tests.gpu.test_recorded_policies import images

    monkeypatch.setattr(gl, "_failure", "no OpenGL here")
    with pytest.raises(pytest.skip.Exception, match="needs OpenGL: no OpenGL here"):
        images(1)
