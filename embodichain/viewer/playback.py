"""Playback: frames of a source, kept so that a user can go back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import mujoco
import numpy as np
from numpy.typing import NDArray

from embodichain.viewer.scene import Pose, SceneView

MAX_FRAMES = 2000
"""Maximum number of frames kept; the oldest are dropped."""
_MAX_IMAGE_FRAMES = 400
"""Number of recent frames that keep their images."""


@dataclass(frozen=True)
class ViewFrame:
    """The state of all envs at one step."""

    pose: Pose | None
    """Poses of all bodies; ``None`` if unknown."""
    step: NDArray[np.int64]
    """Step of each env's episode, ``[num_envs]``."""
    signals: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Arrays ``[num_envs]`` or ``[num_envs, n]``: rewards, observations, actions."""
    images: Mapping[str, NDArray[np.uint8]] = field(default_factory=dict)
    """Camera images of the watched env, ``[H, W, 3]``."""
    note: str = ""
    """A message about the watched env."""


class Source(Protocol):
    """A source of frames."""

    title: str
    num_envs: int
    model: mujoco.MjModel | None
    """The model to draw in 3D, if known."""
    camera: str | None
    """Camera of the model that defines the initial view."""
    seconds: float
    """Simulated seconds per step."""
    watched: int
    """Index of the env whose signals and images are shown."""
    scene: SceneView | None
    """The scene that shows it."""
    ends: bool
    """Whether there is a last frame, at which playback stops."""

    def advance(self) -> ViewFrame | None:
        """Return the next frame, or ``None`` if there is none (yet)."""

    def add_controls(self, panel: Panel) -> None:
        """Add the controls of this source to the panel."""

    def refresh(self) -> None:
        """Update texts of the panel; called a few times per second."""

    def close(self) -> None:
        """Release resources."""


class Panel(Protocol):
    """The interface of the viewer for a source."""

    server: Any
    """The viser server."""
    playback: Playback

    def later(self, work: Callable[[], None]) -> Callable[[object], None]:
        """Return a GUI callback that runs ``work`` in the viewer's thread."""

    def offset(self, env: int) -> NDArray[np.float64]:
        """Return the position of an env in the scene, ``[3]``."""

    def say(self, text: str, bad: bool = False) -> None:
        """Show a notification to all clients."""


class Playback:
    """The frames so far and the one that is shown; playing continues from there, then with new frames."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.frames: list[ViewFrame] = []
        self.cursor = -1
        """Index of the shown frame."""
        self.playing = True
        self.speed = 1.0
        self._due = 0.0

    @property
    def frame(self) -> ViewFrame | None:
        """The shown frame."""
        return self.frames[self.cursor] if 0 <= self.cursor < len(self.frames) else None

    def clear(self) -> None:
        """Drop all frames."""
        self.frames.clear()
        self.cursor, self._due = -1, 0.0

    def add(self, frame: ViewFrame) -> None:
        """Append a frame, and show it if the last one was shown."""
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
        """Advance by one frame; return whether there was one."""
        if self.cursor < len(self.frames) - 1:
            self.cursor += 1
            return True
        frame = self.source.advance()
        if frame is None:
            return False
        self.add(frame)
        return True

    def play(self, elapsed: float, most: int = 8) -> bool:
        """Advance by the frames due after some seconds, at most ``most``; return whether the shown frame changed."""
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
        """Show the frame at an index, and pause."""
        self.playing = False
        self.cursor = min(max(index, 0), len(self.frames) - 1)

    def episode_begin(self) -> int:
        """Return the index of the first frame of the shown episode of the watched env."""
        env, index = self.source.watched, self.cursor
        while index > 0 and self.frames[index].step[env] == self.frames[index - 1].step[env] + 1:
            index -= 1
        return max(index, 0)

    def episode_end(self) -> int:
        """Return the index of the last known frame of that episode."""
        env, index = self.source.watched, self.cursor
        while index + 1 < len(self.frames) and self.frames[index + 1].step[env] == self.frames[index].step[env] + 1:
            index += 1
        return max(index, 0)


def to_image(values: NDArray[Any]) -> NDArray[np.uint8] | None:
    """Convert a camera observation to RGB; depth and segmentation become grey. ``None`` if it is not an image."""
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
