"""What is shown: frames one after the other, kept so that a person can go back, from a source that has more of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import mujoco
import numpy as np
from numpy.typing import NDArray

from embodichain.viewer.scene import Pose, SceneView

MAX_FRAMES = 2000
"""Frames that are kept; the oldest go first."""
_MAX_IMAGE_FRAMES = 400
"""Of the last so many frames images are kept, too."""


@dataclass(frozen=True)
class ViewFrame:
    """One moment of all envs."""

    pose: Pose | None
    """Where everything is; ``None`` where that is not known."""
    step: NDArray[np.int64]
    """How many steps the episode of each env has had, ``[num_envs]``."""
    signals: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Numbers ``[num_envs]`` or ``[num_envs, n]``: rewards, observations, actions."""
    images: Mapping[str, NDArray[np.uint8]] = field(default_factory=dict)
    """What the cameras of the watched env see, ``[H, W, 3]``."""
    note: str = ""
    """What is worth saying about the watched env."""


class Source(Protocol):
    """Where frames come from."""

    title: str
    num_envs: int
    model: mujoco.MjModel | None
    """What is drawn in 3D, if it is known."""
    camera: str | None
    """The camera of the model from whose side it is looked at."""
    seconds: float
    """Simulated time of a step."""
    watched: int
    """The env whose signals and images are shown."""
    scene: SceneView | None
    """The scene in which it is shown."""
    ends: bool
    """Whether there is a last frame, after which playing stops."""

    def advance(self) -> ViewFrame | None:
        """Return the next frame; ``None`` if there is none, or none yet."""

    def add_controls(self, panel: Panel) -> None:
        """Add what is particular to this source to the panel."""

    def refresh(self) -> None:
        """Bring texts of the panel up to date; called a few times in a second."""

    def close(self) -> None:
        """Release what it holds."""


class Panel(Protocol):
    """What a source can do with the viewer."""

    server: Any
    """The viser server."""
    playback: Playback

    def later(self, work: Callable[[], None]) -> Callable[[object], None]:
        """Return a callback for the GUI that lets the viewer's own thread do some work."""

    def offset(self, env: int) -> NDArray[np.float64]:
        """Return where an env stands in the scene."""

    def say(self, text: str, bad: bool = False) -> None:
        """Show a message to everybody who watches."""


class Playback:
    """The frames so far and which of them is shown; playing goes on where one is, and then with new frames."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.frames: list[ViewFrame] = []
        self.cursor = -1
        """Index of the frame that is shown."""
        self.playing = True
        self.speed = 1.0
        self._due = 0.0

    @property
    def frame(self) -> ViewFrame | None:
        """The frame that is shown."""
        return self.frames[self.cursor] if 0 <= self.cursor < len(self.frames) else None

    def clear(self) -> None:
        """Forget all frames."""
        self.frames.clear()
        self.cursor, self._due = -1, 0.0

    def add(self, frame: ViewFrame) -> None:
        """Append a frame, and show it if the last one is shown."""
        follows = self.cursor == len(self.frames) - 1
        self.frames.append(frame)
        old = len(self.frames) - 1 - _MAX_IMAGE_FRAMES
        if old >= 0 and self.frames[old].images and not self.source.ends:
            kept = self.frames[old]
            self.frames[old] = ViewFrame(kept.pose, kept.step, kept.signals, {}, kept.note)
        if len(self.frames) > MAX_FRAMES and not self.source.ends:
            del self.frames[0]
            self.cursor = max(self.cursor - 1, -1)
        if follows:
            self.cursor = len(self.frames) - 1

    def step(self) -> bool:
        """Go on by one frame; tell whether there was one."""
        if self.cursor < len(self.frames) - 1:
            self.cursor += 1
            return True
        frame = self.source.advance()
        if frame is None:
            return False
        self.add(frame)
        return True

    def play(self, elapsed: float, most: int = 8) -> bool:
        """Go on by the frames that are due after some seconds, ``most`` at once; tell whether another one is shown."""
        if not self.playing:
            self._due = 0.0
            return False
        self._due = min(self._due + elapsed * self.speed / self.source.seconds, float(most))
        moved = False
        while self._due >= 1.0:
            self._due -= 1.0
            if not self.step():
                if self.source.ends:
                    self.playing = False
                self._due = 0.0
                break
            moved = True
        return moved

    def go_to(self, index: int) -> None:
        """Show another one of the frames, and pause."""
        self.playing = False
        self.cursor = min(max(index, 0), len(self.frames) - 1)

    def episode_begin(self) -> int:
        """Return the index of the first frame of the episode that is shown, of the watched env."""
        env, index = self.source.watched, self.cursor
        while index > 0 and self.frames[index].step[env] == self.frames[index - 1].step[env] + 1:
            index -= 1
        return max(index, 0)

    def episode_end(self) -> int:
        """Return the index of the last frame of that episode, as far as it is known."""
        env, index = self.source.watched, self.cursor
        while index + 1 < len(self.frames) and self.frames[index + 1].step[env] == self.frames[index].step[env] + 1:
            index += 1
        return max(index, 0)


def to_image(values: NDArray[Any]) -> NDArray[np.uint8] | None:
    """Return what a camera sees as RGB: colours as they are, distances and ids in shades of grey."""
    if values.ndim == 3 and values.shape[0] in (1, 3) and values.shape[2] not in (1, 3):
        values = np.moveaxis(values, 0, -1)
    if values.ndim == 2:
        values = values[..., None]
    if values.ndim != 3 or values.shape[2] not in (1, 3) or min(values.shape[:2]) < 4:
        return None
    if values.dtype != np.uint8:
        finite = values[np.isfinite(values)].astype(np.float64)
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
        shades = np.clip((np.nan_to_num(values.astype(np.float64), posinf=high) - low) / max(high - low, 1e-9), 0, 1)
        values = (255 * shades).astype(np.uint8)
    return np.ascontiguousarray(np.broadcast_to(values, (*values.shape[:2], 3)))
