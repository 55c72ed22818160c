"""Shows the episodes of a LeRobot folder: in 3D where the simulation's positions were recorded, else their images."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import torch
from numpy.typing import NDArray

from embodichain.agents.datasets.frames import Frames, Key
from embodichain.agents.datasets.lerobot import LeRobotReader
from embodichain.envs.env_cfg import GymCfg
from embodichain.envs.publishing import positions
from embodichain.envs.registration import make
from embodichain.envs.task_env import TaskEnv
from embodichain.errors import DatasetError, EmbodiChainError
from embodichain.viewer.playback import Panel, ViewFrame, to_image
from embodichain.viewer.scene import Pose, SceneView

SCENE_FILE = Path("meta", "embodichain_scene.json")
"""File of a dataset with the settings of the environment that its positions belong to."""
QPOS: Key = ("simulation", "qpos")
MOCAP: Key = ("simulation", "mocap")
"""Where frames have the positions of all joints, and the poses of mocap bodies one after the other."""
_NO_SIGNALS: tuple[Key, ...] = (QPOS, MOCAP, ("terminated",), ("truncated",))
_MAX_SIGNAL = 64


def states_of(env: TaskEnv) -> Frames:
    """Return the positions of the simulation as arrays of a frame, ``[num_envs, n]``."""
    return state_frames(Pose(*positions(env, env.num_envs)))


def state_frames(pose: Pose) -> Frames:
    """Return positions as arrays of a frame."""
    frames: Frames = {QPOS: torch.from_numpy(pose.qpos)}
    if pose.mocap.shape[1]:
        frames[MOCAP] = torch.from_numpy(pose.mocap.reshape(len(pose.mocap), -1))
    return frames


def write_scene(root: Path, cfg: GymCfg) -> None:
    """Write to a dataset which environment the recorded positions belong to."""
    file = root / SCENE_FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"gym_config": cfg.to_dict()}, indent=2) + "\n", encoding="utf-8")


class Recording:
    """The episodes of a folder, one after the other."""

    num_envs, watched, ends = 1, 0, True

    def __init__(self, root: Path, episode: int = 0, trusted_modules: Sequence[str] = ()) -> None:
        self._reader = LeRobotReader(root)
        if not 0 <= episode < len(self._reader):
            raise DatasetError(f"--episode: {root} has the episodes 0 to {len(self._reader) - 1}, got {episode}")
        self.title, self.seconds = str(root), 1.0 / self._reader.fps
        self.model: mujoco.MjModel | None = None
        self.camera: str | None = None
        self.scene: SceneView | None = None
        self.problem: str | None = None
        """Why there is no scene in 3D although positions were recorded."""
        if any(leaf.key == QPOS for leaf in self._reader.layout.leaves):
            self._open_scene(root, trusted_modules)
        self._panel: Panel | None = None
        self._frames = self._load(episode)
        self._next = 0

    def _open_scene(self, root: Path, trusted_modules: Sequence[str]) -> None:
        """Build the model that the recorded positions belong to."""
        try:
            config = json.loads((root / SCENE_FILE).read_text(encoding="utf-8"))["gym_config"]
            config = {**config, "num_envs": 1, "device": "cpu"}
            with make(config, trusted_modules) as env:
                if not isinstance(env, TaskEnv):
                    raise DatasetError(f"{config.get('id')} is not simulated here")
                self.model, self.camera = env.physics.model, env.task.camera
        except (EmbodiChainError, OSError, ValueError, KeyError, TypeError) as error:
            self.problem = f"No scene in 3D: {error}"
            return
        shape = self._reader.layout.shape_of(*QPOS)
        mocap = self._reader.layout.shape_of(*MOCAP) or (0,)
        if shape != (self.model.nq,) or mocap != (7 * self.model.nmocap,):
            self.model, self.problem = None, "No scene in 3D: the environment is another one than it was"

    def _load(self, episode: int) -> list[ViewFrame]:
        """Return the frames of an episode."""
        recorded = self._reader.read(episode)
        arrays = {key: torch.cat(pieces).numpy() for key, pieces in recorded.frames.items()}
        cameras: dict[str, NDArray[Any]] = {}
        signals: dict[str, NDArray[Any]] = {}
        for key, values in arrays.items():
            name = "/".join(key[1:] if key[0] == "observation" else key)
            if values.ndim >= 3:
                cameras[name.removeprefix("image/")] = values
            elif key not in _NO_SIGNALS and (values.ndim == 1 or values.shape[1] <= _MAX_SIGNAL):
                signals[name] = values
        if "reward" in signals:
            signals["return"] = np.cumsum(signals["reward"], axis=0)
        judged = {True: "success", False: "no success", None: "success not known"}[recorded.success]
        note = f"episode {episode} of {len(self._reader)}: {recorded.length} steps, {judged}"
        note += f"\n\n{self.problem}" if self.problem else ""
        frames = []
        for step in range(recorded.length):
            images = {name: image for name, x in cameras.items() if (image := to_image(x[step])) is not None}
            numbers = {name: values[step : step + 1] for name, values in signals.items()}
            frames.append(ViewFrame(self._pose(arrays, step), np.array([step]), numbers, images, note))
        return frames

    def _pose(self, arrays: dict[Key, NDArray[Any]], step: int) -> Pose | None:
        if self.model is None:
            return None
        mocap = arrays[MOCAP][step].reshape(1, -1, 7) if MOCAP in arrays else np.zeros((1, 0, 7))
        return Pose(arrays[QPOS][step : step + 1].astype(np.float64), mocap.astype(np.float64))

    def advance(self) -> ViewFrame | None:
        if self._next >= len(self._frames):
            return None
        self._next += 1
        return self._frames[self._next - 1]

    def show(self, episode: int) -> None:
        """Show another episode from its beginning."""
        self._frames, self._next = self._load(episode), 0
        if self._panel is not None:
            self._panel.playback.clear()
            self._fill(self._panel)
            self._panel.playback.playing = True

    def _fill(self, panel: Panel) -> None:
        """Give all frames at once, so that one can go to any of them."""
        while panel.playback.step():
            pass
        panel.playback.cursor = 0

    def add_controls(self, panel: Panel) -> None:
        self._panel, last = panel, len(self._reader) - 1
        if last:
            number = panel.server.gui.add_slider("Episode", 0, last, 1, 0)
            number.on_update(panel.later(lambda: self.show(int(number.value))))
        self._fill(panel)

    def refresh(self) -> None:
        return

    def close(self) -> None:
        return
