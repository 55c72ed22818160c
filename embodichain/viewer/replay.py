"""Replays the episodes of a LeRobot folder: in 3D if simulation states were recorded, else their images."""

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
from embodichain.envs.actions import RobotActionManager
from embodichain.envs.env_cfg import GymCfg
from embodichain.envs.publishing import positions
from embodichain.envs.registration import make_to_watch, unknown_id
from embodichain.envs.task_env import TaskEnv
from embodichain.errors import ConfigError, DatasetError, EmbodiChainError, UnknownNameError
from embodichain.viewer.playback import Panel, ViewFrame, to_image
from embodichain.viewer.scene import Pose, SceneView

SCENE_FILE = Path("meta", "embodichain_scene.json")
"""File in a dataset with the settings of the environment to which its states belong."""
QPOS: Key = ("simulation", "qpos")
MOCAP: Key = ("simulation", "mocap")
"""Keys of all joint positions, and of the concatenated mocap poses."""
_NO_SIGNALS: tuple[Key, ...] = (QPOS, MOCAP, ("terminated",), ("truncated",))
_MAX_SIGNAL = 64


def states_of(env: TaskEnv) -> Frames:
    """Return the simulation states as arrays of a frame, ``[num_envs, n]``."""
    return state_frames(Pose(*positions(env, env.num_envs)))


def state_frames(pose: Pose) -> Frames:
    """Return a pose as arrays of a frame."""
    frames: Frames = {QPOS: torch.from_numpy(pose.qpos)}
    if pose.mocap.shape[1]:
        frames[MOCAP] = torch.from_numpy(pose.mocap.reshape(len(pose.mocap), -1))
    return frames


def write_scene(root: Path, cfg: GymCfg) -> None:
    """Write to a dataset which environment its states belong to."""
    file = root / SCENE_FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"gym_config": cfg.to_dict()}, indent=2) + "\n", encoding="utf-8")


def robot_name(env: TaskEnv) -> str | None:
    """Return the name of an environment's robot, or the names of its robots."""
    if env.robot is None:
        return bytes(env.physics.model.names).split(b"\0")[0].decode() or None  # the name of the model
    robot = env.cfg.robot
    files = [Path(arm.mjcf).stem if arm.mjcf else getattr(arm, "uid", None) for arm in (robot, *robot.arms.values())]
    named = [name for name in dict.fromkeys(files[1:]) if name]
    return "+".join(named) or files[0]


def number_names(env: TaskEnv) -> dict[Key, list[str]]:
    """Return the names of joints and action components, without the prefix of the scene, and of segmentation ids."""
    cameras = [camera.name for camera in env.cfg.env.observations.cameras if "segmentation" in camera.outputs]
    ids: dict[Key, list[str]] = {
        ("observation", "segmentation", name): list(env.segmentation_names) for name in cameras
    }
    if env.robot is None or not isinstance(manager := env.action_manager, RobotActionManager):
        motors = [env.physics.model.actuator(i).name for i in range(env.physics.model.nu)]
        return ids | ({("action",): motors} if all(motors) else {})
    joints: list[str] = []
    actions: list[str] = []
    for key, arm in env.robot.arms.items():
        prefix = f"{key}_" if len(env.robot.arms) > 1 else ""
        own, fingers = ([name.rpartition("/")[2] for name in names] for names in (arm.joints, arm.fingers))
        joints += [prefix + name for name in (*own, *fingers)]
        moves = own if manager.action_type != "ee_delta" else ["x", "y", "z", "rx", "ry", "rz"]
        moves = moves[: manager.arms[key].term.dim]
        actions += [prefix + name for name in (*moves, *(["gripper"] if fingers else []))]
    ids |= {("observation", "robot", name): joints for name in ("qpos", "qvel")}
    return ids | {("action",): actions}


class Recording:
    """The episodes of a folder, in order."""

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
        """Why there is no 3D scene although states were recorded."""
        if any(leaf.key == QPOS for leaf in self._reader.layout.leaves):
            self._open_scene(root, trusted_modules)
        self._panel: Panel | None = None
        self._first = episode
        self._frames = self._load(episode)
        self._next = 0

    def _open_scene(self, root: Path, trusted_modules: Sequence[str]) -> None:
        """Build the model of the recorded states."""
        if not (root / SCENE_FILE).is_file():
            self.problem = "No scene in 3D: the recording has none. 'embodichain record ... --states' records one."
            return
        config: Any = None
        try:
            config = json.loads((root / SCENE_FILE).read_text(encoding="utf-8"))["gym_config"]
            config = {**config, "num_envs": 1, "device": "cpu"}
            with make_to_watch(config, trusted_modules) as env:
                if not isinstance(env, TaskEnv):
                    raise DatasetError(f"{config.get('id')} is not simulated here")
                self.model, self.camera = env.physics.model, env.task.camera
        except (EmbodiChainError, OSError, ValueError, KeyError, TypeError) as error:
            self.problem = f"No scene in 3D: {error}"
            if isinstance(error, UnknownNameError | ConfigError) and isinstance(config, dict):
                name = config.get("id")
                if isinstance(name, str) and unknown_id(name):
                    module = f"--trust MODULE, with the module or file that registers {name!r}"
                    self.problem = f"No scene in 3D: add {module}, the environment of the recording."
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
        """Show another episode from its start."""
        self._frames, self._next = self._load(episode), 0
        if self._panel is not None:
            self._panel.playback.clear()
            self._fill(self._panel)
            self._panel.playback.playing = True

    def _fill(self, panel: Panel) -> None:
        """Add all frames at once, so that the user can go to any of them."""
        while panel.playback.step():
            pass
        panel.playback.cursor = 0

    def add_controls(self, panel: Panel) -> None:
        self._panel, last = panel, len(self._reader) - 1
        if last:
            number = panel.server.gui.add_slider("Episode", 0, last, 1, self._first)
            number.on_update(panel.later(lambda: self.show(int(number.value))))
        self._fill(panel)

    def refresh(self) -> None:
        return

    def close(self) -> None:
        return
