"""The browser viewer: scene, playback controls, plots, images, and the loop that updates them."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodichain.extras import require
from embodichain.viewer.playback import Playback, Source, ViewFrame
from embodichain.viewer.scene import SceneView
from embodichain.viewer.server import open_server, url_of

DEFAULT_PORT = 8080
_SLOW_SECONDS = 0.2  # between updates of text, plots and images
_AXIS_WIDTH = 64
"""Width of a plot's y-axis in pixels: enough for -0.0001."""
_PLOT_STEPS, _PLOT_UNIT = 300, 50
"""Maximum number of steps in a plot, and the step by which its x-axis grows."""
_COLORS = ("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#dc2626", "#0891b2", "#ca8a04", "#64748b")


class Viewer:
    """Serves one source of frames to all connected browsers."""

    def __init__(self, source: Source, host: str = "127.0.0.1", port: int = DEFAULT_PORT, rate: float = 30.0) -> None:
        """Serve a source; ``rate`` is the maximum number of scene updates per second."""
        self.source, self.playback = source, Playback(source)
        self.server = open_server(host, port)
        self.url = url_of(host, self.server.get_port())
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._seconds = 1.0 / rate
        self._dirty = True
        self._shown_frame: ViewFrame | None = None
        self._images: dict[str, Any] = {}
        self._screen: Any = None
        self.scene: SceneView | None = None
        self._decorate()
        if not source.ends:
            self.playback.step()  # the first frame determines the layout of the scene
        self._build()

    def _decorate(self) -> None:
        server = self.server
        server.gui.configure_theme(
            control_width="medium", show_logo=False, show_share_button=False, brand_color=(37, 99, 235)
        )
        server.gui.main_panel.dock_right()  # beside the scene instead of over it
        server.gui.set_panel_label(f"EmbodiChain: {self.source.title}")
        server.scene.set_up_direction("+z")
        server.scene.configure_environment_map("warehouse", environment_intensity=0.45)
        server.scene.world_axes.visible = False

    def _build(self) -> None:
        gui = self.server.gui
        tabs = gui.add_tab_group()
        with tabs.add_tab("Play", icon="player-play"):
            self._add_playback()
            self.source.add_controls(self)
        with tabs.add_tab("Signals", icon="chart-line"):
            self._signal = gui.add_dropdown("Signal", ("reward",), initial_value="reward")
            self._signal.on_update(self.later(self._redraw))
            self._plot_rewards = self._add_plot("Reward of the episode")
            self._plot: Any = self._add_plot("Signal")
            self._plotted: tuple[str, int] = ("", 0)
            self._plot_range = (0, _PLOT_UNIT)
        with tabs.add_tab("Cameras", icon="camera"):
            self._no_images = gui.add_markdown("No images: the observations have none, and no camera is rendered.")
            self._image_folder = gui.add_folder("What the watched env sees")
        self.rebuild_scene()
        self._show()

    def rebuild_scene(self) -> None:
        """Draw the model of the source, which may have changed."""
        if self.scene is not None:
            self.scene.remove()
            self.scene = None
        model = self.source.model
        frame = self.playback.frame
        if model is not None:
            pose = None if frame is None else frame.pose
            self.scene = SceneView(self.server, model, self.source.num_envs, self.source.camera, pose)
        self.source.scene = self.scene
        self._watched.max = max(self.source.num_envs - 1, 1)
        self._watched.visible = self.source.num_envs > 1
        self._dirty = True

    def _add_playback(self) -> None:
        gui = self.server.gui
        self._play = gui.add_button("Pause", icon="player-pause", color="blue")
        self._play.on_click(self.later(self._toggle))
        self._buttons = gui.add_button_group("Step", ("|<", "<", ">", ">|"))
        self._buttons.on_click(lambda event: self._work.put(lambda: self._jump(event.target.value)))
        self._slider = gui.add_slider("Frame", 0, 1, 1, 0)
        self._slider.on_update(lambda event: self._scrub(event))
        self._speed = gui.add_slider("Speed", 0.1, 4.0, 0.1, 1.0)
        self._speed.on_update(self.later(lambda: setattr(self.playback, "speed", float(self._speed.value))))
        self._watched = gui.add_slider("Watched env", 0, max(self.source.num_envs - 1, 1), 1, 0)
        self._watched.on_update(self.later(self._watch))
        self._text = gui.add_markdown("")
        gui.add_command("Play or pause", hotkey="space").on_trigger(self.later(self._toggle))
        gui.add_command("Next step", hotkey="enter").on_trigger(self.later(lambda: self._jump(">")))
        gui.add_command("Step back", hotkey="backspace").on_trigger(self.later(lambda: self._jump("<")))

    def _add_plot(self, title: str) -> Any:
        uplot: Any = require("viser.uplot", extra="viewer")
        return self.server.gui.add_uplot(
            (np.zeros(2), np.zeros(2)),
            _series(1),
            title=title,
            scales=_scales(0, _PLOT_UNIT),
            axes=(uplot.Axis(), uplot.Axis(size=_AXIS_WIDTH)),
            aspect=1.7,
        )

    # --- callbacks of the panel -------------------------------------------------------------------------------------

    def later(self, work: Callable[[], None]) -> Callable[[object], None]:
        return lambda event: self._work.put(work)

    def offset(self, env: int) -> NDArray[np.float64]:
        return np.zeros(3) if self.scene is None else self.scene.offsets[env]

    def say(self, text: str, bad: bool = False) -> None:
        for client in self.server.get_clients().values():
            client.add_notification("EmbodiChain", text, color="red" if bad else "blue", auto_close_seconds=8.0)

    def _toggle(self) -> None:
        playback = self.playback
        playback.playing = not playback.playing
        if playback.playing and self.source.ends and playback.cursor >= len(playback.frames) - 1:
            playback.cursor = 0  # replay from the start

    def _jump(self, where: str) -> None:
        playback = self.playback
        playback.playing = False
        if where == ">":
            playback.step()
        elif where == "<":
            playback.go_to(playback.cursor - 1)
        elif playback.frames:
            playback.go_to(playback.episode_begin() if where == "|<" else playback.episode_end())
        self._dirty = True

    def _scrub(self, event: Any) -> None:
        if event.client is not None:  # moved by a user, not by the playback
            self._work.put(lambda: self._go_to(int(self._slider.value)))

    def _go_to(self, index: int) -> None:
        self.playback.go_to(index)
        self._dirty = True

    def _watch(self) -> None:
        self.source.watched = min(int(self._watched.value), self.source.num_envs - 1)
        self._redraw()

    def _redraw(self) -> None:
        self._dirty, self._shown_frame = True, None  # plots and images, too

    # --- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Play until :meth:`stop` is called."""
        before, slow = time.monotonic(), 0.0
        while not self._stop.is_set():
            now = time.monotonic()
            self._do_work()
            is_watched = bool(self.server.get_clients())  # do not simulate without clients
            if (is_watched and self.playback.play(now - before)) or self._dirty:
                self._show()
            if now - slow > _SLOW_SECONDS:
                slow = now
                self._show_slow()
            before = now
            self._stop.wait(max(0.0, self._seconds - (time.monotonic() - now)))

    def stop(self) -> None:
        """End :meth:`run`, from any thread or a signal handler."""
        self._stop.set()

    def close(self) -> None:
        """Stop the server and close the source."""
        self._stop.set()
        self.source.close()
        self.server.stop()

    def _do_work(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._work.get_nowait()()

    def _show(self) -> None:
        frame, self._dirty = self.playback.frame, False
        if frame is not None and self.scene is not None and frame.pose is not None:
            self.scene.show(frame.pose)
        elif frame is not None and self.scene is None and frame.images:
            self._show_screen(next(iter(frame.images.values())))

    def _show_screen(self, image: NDArray[np.uint8]) -> None:
        """Show an image instead of a scene, for environments without a model."""
        if self._screen is None:
            height, width = image.shape[0] / image.shape[1], 1.0
            upright = (np.sqrt(0.5), -np.sqrt(0.5), 0.0, 0.0)
            start, place = self.server.initial_camera, (0.0, 0.0, 0.5 * height)
            self._screen = self.server.scene.add_image(
                "/screen", image, render_width=width, render_height=height, wxyz=upright, position=place
            )
            start.position, start.look_at, start.up = (0.0, -1.6, 0.5 * height), place, (0.0, 0.0, 1.0)
        self._screen.image = image

    def _show_slow(self) -> None:
        """Update the parts of the panel that need not change in every frame."""
        playback, frame = self.playback, self.playback.frame
        label = "Pause" if playback.playing else "Play"
        if self._play.label != label:
            self._play.label, self._play.icon = label, "player-pause" if playback.playing else "player-play"
        self.source.refresh()
        if frame is None:
            return
        last = max(len(playback.frames) - 1, 1)
        if self._slider.max != last:
            self._slider.max = last
        if self._slider.value != playback.cursor:
            self._slider.value = playback.cursor
        step = int(frame.step[min(self.source.watched, len(frame.step) - 1)])
        text = f"env {self.source.watched}, step **{step}** ({step * self.source.seconds:.2f} s)"
        text += f"\n\n{frame.note}" if frame.note else ""
        if self._text.content != text:
            self._text.content = text
        if frame is not self._shown_frame:
            self._shown_frame = frame
            self._show_signals(frame)
            self._show_images(frame)

    def _show_signals(self, frame: ViewFrame) -> None:
        names = tuple(frame.signals)
        if names and self._signal.options != names:
            chosen = self._signal.value
            self._signal.options = names
            if chosen in names:
                self._signal.value = chosen
        first = max(self.playback.episode_begin(), self.playback.cursor - _PLOT_STEPS)
        frames = self.playback.frames[first : self.playback.cursor + 1]
        if len(frames) < 2 or not names:
            return
        rewards = self._columns(frames, "reward") if "reward" in frame.signals else None
        chosen = self._signal.value if self._signal.value in frame.signals else names[0]
        columns = self._columns(frames, chosen)
        with self.server.atomic():  # keep steps, names and values consistent
            self._set_range(columns[0])
            if self._plotted != (chosen, len(columns)):
                self._plotted = chosen, len(columns)
                self._plot.title, self._plot.series = chosen, _series(len(columns) - 1)
            self._plot.data = columns
            if rewards is not None:
                self._plot_rewards.data = rewards

    def _set_range(self, steps: NDArray[np.float64]) -> None:
        """Set the x-range of both plots to the steps of the data.

        The range is explicit and changes rarely. An automatic one would follow the visible part of the data, and stay
        wrong if data arrive before the plot is first drawn.
        """
        first = int(steps.min()) // _PLOT_UNIT * _PLOT_UNIT
        last = max(-(-int(steps.max()) // _PLOT_UNIT) * _PLOT_UNIT, first + _PLOT_UNIT)
        if self._plot_range != (first, last):
            self._plot_range = first, last
            self._plot.scales = self._plot_rewards.scales = _scales(first, last)

    def _columns(self, frames: Sequence[ViewFrame], name: str) -> tuple[NDArray[np.float64], ...]:
        """Return the steps, and one array per component of a signal of the watched env, at most one per colour."""
        env = self.source.watched
        rows = [
            np.atleast_1d(np.asarray(frame.signals[name][env], np.float64)) for frame in frames if name in frame.signals
        ]
        steps = np.array([float(frame.step[env]) for frame in frames if name in frame.signals])
        values = np.stack(rows)[:, : len(_COLORS)]
        return (steps, *np.ascontiguousarray(values.T))

    def _show_images(self, frame: ViewFrame) -> None:
        self._no_images.visible = not frame.images
        for name, image in frame.images.items():
            shown = _enlarged(image)
            if name in self._images:
                self._images[name].image, self._images[name].visible = shown, True
            else:
                with self._image_folder:
                    self._images[name] = self.server.gui.add_image(shown, label=name)
        for name in self._images.keys() - frame.images.keys():
            self._images[name].visible = False


def _series(count: int) -> tuple[Any, ...]:
    """Return the line styles of a plot."""
    uplot: Any = require("viser.uplot", extra="viewer")
    lines = [uplot.Series(label=str(i), stroke=_COLORS[i % len(_COLORS)], width=2) for i in range(count)]
    return (uplot.Series(label="step"), *lines)


def _scales(first: int, last: int) -> dict[str, Any]:
    uplot: Any = require("viser.uplot", extra="viewer")
    return {"x": uplot.Scale(time=False, range=(first, last)), "y": uplot.Scale(auto=True)}


def _enlarged(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return small images with enlarged pixels, which a browser would blur otherwise."""
    factor = max(1, 256 // max(image.shape[:2]))
    return image if factor == 1 else image.repeat(factor, axis=0).repeat(factor, axis=1)
