"""Shows a running job: the environments that its processes publish while a browser is connected."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mujoco
import numpy as np

from embodichain.envs.publishing import PublishedStates
from embodichain.viewer.launch import MARKER
from embodichain.viewer.playback import Panel, ViewFrame
from embodichain.viewer.scene import Pose, SceneView

_WATCH_SECONDS = 2.0
_LOOK_SECONDS = 1.0
_NICE = 15
"""On a busy core this process gets about a thirtieth of the time: enough to watch without slowing down the job."""


@dataclass
class Published:
    """A published environment of the job."""

    label: str
    model: mujoco.MjModel
    states: PublishedStates
    camera: str | None
    num_envs: int


class LiveJob:
    """Reads the environments of another process without affecting it."""

    watched, ends, seconds = 0, False, 1.0 / 30.0

    def __init__(self, folder: Path) -> None:
        self._folder, self._parent = folder, os.getppid()
        self.title = str(json.loads((folder / MARKER).read_text(encoding="utf-8"))["title"])
        self.num_envs = 1
        self.model: mujoco.MjModel | None = None
        self.camera: str | None = None
        self.scene: SceneView | None = None
        self._published: dict[str, Published] = {}
        self._chosen: str | None = None
        self._sequence = 0
        self._looked = 0.0
        self._panel: Any = None
        self._choice: Any = None
        self._text: Any = None
        self._rate = (time.monotonic(), 0, 0.0)
        self._is_nice = False

    @property
    def orphaned(self) -> bool:
        """Whether the job has exited."""
        return os.getppid() != self._parent

    def _look(self) -> None:
        """Find new environments."""
        for file in sorted(self._folder.glob("*_*.json")):
            if file.stem not in self._published:
                self._published[file.stem] = self._open(file)
        if self._choice is not None:
            labels = tuple(found.label for found in self._published.values()) or ("none yet",)
            if self._choice.options != labels:
                self._choice.options = labels
        stepped = [name for name, found in self._published.items() if found.states.steps > 0]
        if self._chosen is None and stepped:
            self.choose(stepped[0])

    def _open(self, file: Path) -> Published:
        about = json.loads(file.read_text(encoding="utf-8"))
        states = PublishedStates(file.with_suffix(".states"), about["shown"], about["nq"], about["nmocap"])
        label = f"{about['id']}, {about['num_envs']} envs ({file.stem})"
        model = mujoco.MjModel.from_binary_path(str(file.with_suffix(".mjb")))
        return Published(label, model, states, about["camera"], about["shown"])

    def choose(self, name: str) -> None:
        """Watch another environment."""
        self._watch(False)
        self._chosen, found = name, self._published[name]
        self.model, self.camera, self.num_envs = found.model, found.camera, found.num_envs
        self._sequence, self.watched = 0, 0
        if self._panel is not None:
            self._panel.playback.clear()
            self._panel.rebuild_scene()

    def advance(self) -> ViewFrame | None:
        if self._chosen is None:
            return None
        found = self._published[self._chosen]
        if found.states.sequence == self._sequence:
            return None
        sequence, copies = found.states.sequence, found.states.read()
        if copies is None:
            return None
        self._sequence = sequence
        qpos, mocap, step, reward = copies
        return ViewFrame(Pose(qpos, mocap), step.astype(np.int64), {"reward": np.where(step == 0, 0.0, reward)})

    def add_controls(self, panel: Panel) -> None:
        self._panel = panel
        self._choice = panel.server.gui.add_dropdown("Environment", ("none yet",))
        self._choice.on_update(panel.later(self._chosen_in_panel))
        self._text = panel.server.gui.add_markdown("")
        panel.server.on_client_connect(lambda client: self._watch(True))
        panel.server.on_client_disconnect(lambda client: self._watch(bool(self._others(client))))

    def _others(self, client: Any) -> list[int]:
        return [number for number in self._panel.server.get_clients() if number != client.client_id]

    def _watch(self, watching: bool) -> None:
        """Request states, or stop requesting them."""
        if self._chosen is not None:
            self._published[self._chosen].states.watch(_WATCH_SECONDS if watching else 0.0)

    def _chosen_in_panel(self) -> None:
        for name, found in self._published.items():
            if found.label == self._choice.value and name != self._chosen:
                self.choose(name)

    def refresh(self) -> None:
        now = time.monotonic()
        if not self._is_nice:  # only now, so that starting is fast
            self._is_nice = True
            os.nice(_NICE - os.nice(0))
        if now - self._looked > _LOOK_SECONDS:
            self._looked = now
            self._look()
        watching = self._panel is not None and bool(self._panel.server.get_clients())
        found = None if self._chosen is None else self._published[self._chosen]
        if found is not None:
            self._watch(watching)
            self._show_rate(found, now)
        elif self._text is not None and not self._text.content:
            self._text.content = (
                "Waiting for the job to step an environment that is simulated here. Gymnasium's own environments and "
                "those of Ray's workers are not published."
            )
        if self.orphaned and self._panel is not None:
            self._panel.stop()

    def _show_rate(self, found: Published, now: float) -> None:
        since, steps, _ = self._rate
        if now - since > 1.0:
            rate = (found.states.steps - steps) / (now - since)
            self._rate = now, found.states.steps, rate
            self._text.content = f"{found.states.steps:,} steps of every env, {max(rate, 0.0):,.0f} in a second"

    def close(self) -> None:
        self._watch(False)
