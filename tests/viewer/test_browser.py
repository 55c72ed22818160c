"""The viewer in a real browser: it draws, its controls do what they say, and a person can act and pull.

``EMBODICHAIN_SCREENSHOTS=docs/images python -m pytest tests/viewer`` makes the pictures of docs/viewer.md again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import pytest
import torch

from embodichain.envs.registration import make_to_watch
from tests.viewer.browser import DRIVER, MISSING, PROGRAM, SCREENSHOTS, Page, colours, opened_browser

pytestmark = [
    pytest.mark.extra("viewer", "data"),
    pytest.mark.skipif(PROGRAM is None or DRIVER is None, reason=MISSING),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with opened_browser(tmp_path_factory.mktemp("browser")) as page:
        yield page


@contextmanager
def served(source: Any, port: int) -> Iterator[Any]:
    """Serve a source from a thread, paused."""
    from embodichain.viewer.app import Viewer

    viewer = Viewer(source, port=port, rate=4.0)  # as fast as a processor draws without a graphics card
    viewer.playback.playing = False
    thread = threading.Thread(target=viewer.run, daemon=True)
    thread.start()
    try:
        yield viewer
    finally:
        viewer.stop()
        thread.join(30.0)
        viewer.close()


def on_page(page: Page, viewer: Any, point: np.ndarray) -> tuple[int, int]:
    """Return where a point of the scene is seen, in pixels of the page. A slow browser draws the scene with fewer."""
    (client,) = viewer.server.get_clients().values()
    camera, rotation = client.camera, np.empty(9)
    mujoco.mju_quat2Mat(rotation, np.asarray(camera.wxyz, np.float64))
    x, y, z = rotation.reshape(3, 3).T @ (point - camera.position)
    width, height = page.scene_size()
    focal = 0.5 * height / np.tan(0.5 * camera.fov)
    return int(0.5 * width + focal * x / z), int(0.5 * height + focal * y / z)


def look(page: Page, viewer: Any, position: np.ndarray, target: np.ndarray) -> None:
    """Move the camera, wait until the page is drawn from there.

    Until it is drawn, a mouse clicks on what was to be seen before.
    """
    (client,) = viewer.server.get_clients().values()
    before = last = page.pixels()
    with client.atomic():
        client.camera.position, client.camera.look_at = position, target

    def drawn() -> bool:
        nonlocal last
        earlier, last = last, page.pixels()
        moved, still_moving = (np.abs(last - other)[:, :600].mean() for other in (before, earlier))
        return bool(moved > 1.0 and still_moving < 0.1)

    page.wait(drawn, "the other place to look from")


def test_a_simulation_is_drawn_played_acted_in_and_pulled_at(page: Page, tmp_path: Path):
    from embodichain.viewer.simulation import Simulation

    env = make_to_watch("PickCubeRL", num_envs=2, seed=1, max_episode_steps=1000)
    source = Simulation(env, "PickCubeRL", seed=1, out=tmp_path / "recorded")
    with served(source, 8231) as viewer:
        playback = viewer.playback
        page.open(viewer.url, viewer)
        page.click(">")
        page.wait(lambda: playback.cursor == 1, "a step")
        page.click("Play")
        page.wait(lambda: playback.cursor > 20, "the simulation")
        page.click("Pause")
        page.wait(lambda: not playback.playing, "the pause")
        page.wait(lambda: colours(page.screenshot("expert")) > 300, "the scene")
        last = len(playback.frames) - 1
        page.click("<")
        page.wait(lambda: playback.cursor == last - 1, "a step back")
        assert len(playback.frames) == last + 1
        page.box(str(last - 1)).send_keys("\ue009a\ue000", "5", "\ue007")  # all of it is replaced
        page.wait(lambda: playback.cursor == 5, "the frame that was typed in")

        page.choose("expert", "person")
        page.wait(lambda: source.acts == "person", "the person")
        page.wait(lambda: page.all("//*[contains(text(), 'Drag the gizmo')]"), "what a person is told")
        before = source.person.target()[0].numpy().copy()
        page.keys("iiiu")
        wanted = before + np.array([0.03, 0.0, 0.01])
        page.wait(lambda: np.allclose(source.person.target()[0].numpy(), wanted, atol=1e-6), "the keys")
        page.click("Play")
        page.wait(lambda: np.abs(signal(viewer, "robot/ee_pos") - wanted).max() < 0.01, "the arm to follow")
        page.screenshot("person")
        page.click("Pause")
        page.wait(lambda: not playback.playing, "the pause")

        page.choose("person", "zero")
        former = signal(viewer, "object/pos")
        page.click("New episodes")
        page.click("Play")
        page.wait(lambda: source.acts == "zero" and playback.frame is not None, "new episodes")
        page.wait(lambda: np.abs(signal(viewer, "object/pos") - former).max() > 1e-3, "the cube to be elsewhere")
        place, offset = signal(viewer, "object/pos"), viewer.offset(0)
        look(page, viewer, place + offset + np.array([0.5, -0.5, 0.45]), place + offset)
        middle = on_page(page, viewer, place + offset)  # the cube is in the middle of the page
        assert np.abs(np.array(middle) - 0.5 * np.array(page.scene_size())).max() <= 2

        def lift() -> None:
            page.wait(lambda: viewer.scene.pull is not None, "the pull")
            assert viewer.scene.pull.env == 0
            assert viewer.scene.pull.body == env.physics.model.body(env.task.object_body).id
            page.wait(lambda: signal(viewer, "object/pos")[2] > place[2] + 0.02, "the cube to be lifted")
            page.screenshot("pull")

        page.drag(middle, (15, -90), lift)
        page.wait(lambda: viewer.scene.pull is None, "the mouse to let go")
        page.tab("Signals")  # numbers arrive while the plots are made
        page.wait(lambda: page.all("//*[contains(@class, 'uplot')]//canvas"), "a plot")
        begun = playback.cursor
        page.wait(lambda: playback.cursor > begun + 10, "some steps")
        page.click("Pause")
        page.wait(lambda: not playback.playing, "the pause")
        page.choose("reward", "object/pos")
        page.wait(lambda: len(viewer._plot.data) == 4, "the signal that was chosen")
        steps = viewer._plot.data[0]
        assert (np.diff(steps) == 1.0).all()
        np.testing.assert_array_equal([column[-1] for column in viewer._plot.data[1:]], signal(viewer, "object/pos"))
        page.wait(lambda: [plot["steps"] for plot in page.plots()] == 2 * [[steps[0], steps[-1]]], "the last steps")
        for plot in page.plots():
            low, high = plot["shown"]
            assert low <= steps[0] < steps[-1] <= high < steps[-1] + 50, "another range"
            assert plot["drawn"] is not None, "no line"
            wanted = (steps[[0, -1]] - low) / (high - low)
            np.testing.assert_allclose(plot["drawn"], wanted, atol=0.03)
        page.screenshot("signals")


def signal(viewer: Any, name: str) -> np.ndarray:
    """Return a signal of the first env in the last frame."""
    return np.asarray(viewer.playback.frames[-1].signals[name][0])


def test_a_person_drags_the_gizmo_and_records_episodes_to_their_end(page: Page, tmp_path: Path):
    from embodichain.agents.datasets.lerobot import LeRobotReader
    from embodichain.viewer.simulation import Simulation

    env = make_to_watch("PickCubeRL", num_envs=1, seed=1, max_episode_steps=8)
    source = Simulation(env, "PickCubeRL", seed=1, acts="person", out=tmp_path / "mine")
    with served(source, 8235) as viewer:
        page.open(viewer.url, viewer)
        page.wait(lambda: page.all("//*[contains(text(), 'Drag the gizmo')]"), "what a person is told")
        before, rotation = (part.numpy().astype(np.float64) for part in source.person.target())
        look(page, viewer, before + np.array([0.1, -0.6, 0.3]), before)  # from a side of the tool's x-axis
        begin, end = (np.array(on_page(page, viewer, before + along * rotation[:, 0])) for along in (0.12, 0.2))

        def dragged() -> None:
            page.wait(lambda: source.person.target()[0].sub(torch.from_numpy(before)).norm() > 0.02, "the gizmo")

        page.drag(tuple(begin), tuple(end - begin), dragged, control=False)
        target = source.person.target()[0].numpy() - before
        moved = rotation.T @ target
        assert moved[0] > 0.02, f"it was dragged along x, and moved by {moved}"
        assert np.abs(moved[1:]).max() < 1e-3

        path = "//*[normalize-space(text())='Record episodes']"
        page.wait(lambda: page.all(path), "what records")
        page.all(path)[-1].click()
        page.click("Record")
        page.wait(lambda: source.recorder.recording, "the recording")
        page.click("Play")
        page.wait(lambda: source.recorder.episodes > 1, "two episodes")
        page.click("Pause")
        page.screenshot("record")
        page.click("Stop and finish the folder")
        page.wait(lambda: not source.recorder.recording, "the folder")
    reader = LeRobotReader(tmp_path / "mine")
    assert len(reader) >= 2
    assert set(reader.lengths) == {8}


def test_a_recording_is_played_from_its_beginning_to_its_end(page: Page, tmp_path: Path):
    from embodichain.viewer.replay import Recording
    from embodichain.viewer.simulation import Simulation

    env = make_to_watch("PickCubeRL", num_envs=1, seed=3, max_episode_steps=30)
    source = Simulation(env, "PickCubeRL", seed=3, out=tmp_path / "recorded")
    source.recorder.toggle()
    for _ in range(62):
        source.advance()
    source.close()
    with served(Recording(tmp_path / "recorded"), 8232) as viewer:
        page.open(viewer.url, viewer)
        page.wait(lambda: page.all("//*[contains(text(), 'episode 0 of 2')]"), "the first episode")
        viewer.playback.go_to(18)
        viewer._dirty = True
        page.box("18")
        page.wait(lambda: colours(page.screenshot("recording")) > 300, "the scene")
        page.click("Play")
        last = len(viewer.playback.frames) - 1
        page.wait(lambda: viewer.playback.cursor == last and not viewer.playback.playing, "the end")


@pytest.mark.skipif(SCREENSHOTS is None, reason="makes pictures for the docs: set EMBODICHAIN_SCREENSHOTS")
def test_pictures_of_cameras_and_of_a_training(page: Page, tmp_path: Path):
    import subprocess
    import sys

    from embodichain.viewer.simulation import Simulation

    camera = {"name": "side", "height": 96, "width": 128}
    env = make_to_watch({"id": "PushCubeRL", "num_envs": 1, "env": {"observations": {"cameras": [camera]}}}, seed=2)
    with served(Simulation(env, "PushCubeRL", seed=2), 8233) as viewer:
        for _ in range(12):
            viewer.playback.step()
        page.open(viewer.url, viewer)
        page.tab("Cameras")
        page.wait(lambda: page.image() is not None, "the image")
        seen, frame = page.image(), viewer.playback.frame
        assert seen is not None
        assert frame is not None
        wanted = frame.images["side"].repeat(2, axis=0).repeat(2, axis=1)
        assert wanted.std() > 10, "a camera that sees nothing"
        assert seen.shape == wanted.shape
        assert np.abs(seen.astype(float) - wanted).mean() < 5.0, "another image"
        page.screenshot("cameras")
    env = make_to_watch("QuadrupedVelocityRL", num_envs=9, seed=2)
    with served(Simulation(env, "QuadrupedVelocityRL", seed=2, acts="random"), 8234) as viewer:
        for _ in range(12):
            viewer.playback.step()
        page.open(viewer.url, viewer)
        page.wait(lambda: colours(page.screenshot("envs")) > 3000, "the scene")
        before = np.asarray(page.screenshot("envs"), float)
        begun = viewer.playback.cursor
        page.click(">")
        page.wait(lambda: viewer.playback.cursor == begun + 1, "a step")
        page.wait(lambda: np.abs(np.asarray(page.screenshot("envs")) - before)[:, :600].max() > 50, "robots that move")
    words = ["train", "PushCubeRL", "--viewer", "--trainer.run_dir", str(tmp_path / "run"), "--trainer.num_envs", "32"]
    job = subprocess.Popen([sys.executable, "-m", "embodichain", *words], stderr=subprocess.PIPE, text=True)
    try:
        address = next(line.split()[1] for line in job.stderr or () if line.startswith("viewer: "))
        threading.Thread(target=lambda: list(job.stderr or ()), daemon=True).start()
        page.wait(lambda: reachable(address), "the viewer")
        page.open(address)
        page.wait(lambda: page.all("//*[contains(text(), 'steps of every env')]"), "states of the training", 200.0)
        page.wait(lambda: colours(page.screenshot("train")) > 3000, "the scene")
        before = trained_steps(page)
        page.wait(lambda: trained_steps(page) > before, "more steps")
        page.screenshot("train")
        assert job.poll() is None, "the training ended"
    finally:
        job.kill()


def trained_steps(page: Page) -> int:
    """Return how many steps of a job the panel tells of."""
    (text,) = [found.text for found in page.all("//p[contains(text(), 'steps of every env')]")]
    return int(text.split()[0].replace(",", ""))


def reachable(address: str) -> bool:
    import socket

    host, port = address.removeprefix("http://").split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0
