"""Teleoperation: a gizmo and keys move the tool of an arm, sliders and keys set any other action; records episodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import mujoco
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from embodichain.agents.datasets.frames import Episode, FrameLayout, Key, Leaf, flatten
from embodichain.envs.actions import Effort, EndEffectorDelta, RobotActionManager
from embodichain.envs.kinematics import rotation_error
from embodichain.envs.publishing import step_seconds
from embodichain.envs.task_env import TaskEnv
from embodichain.envs.vec_env import VecEnv, random_actions
from embodichain.errors import EmbodiChainError
from embodichain.viewer.playback import Panel
from embodichain.viewer.replay import number_names, robot_name, state_frames, write_scene
from embodichain.viewer.scene import Pose

if TYPE_CHECKING:
    from embodichain.agents.datasets.lerobot import LeRobotWriter
    from embodichain.envs.robots import Arm

_STEP, _TURN = 0.01, 0.1  # metres and radians per key press
_MAX_SLIDERS = 16
_MOVES = {
    "I": (0, 1.0),
    "K": (0, -1.0),
    "J": (1, 1.0),
    "L": (1, -1.0),
    "U": (2, 1.0),
    "O": (2, -1.0),
    "Y": (5, 1.0),
    "H": (5, -1.0),
}
"""Keys and the coordinate of the tool that they change: x, y, z, and the rotation about the vertical."""


class Person:
    """A person acts in the watched env; actions of the others are neutral."""

    def __init__(self, env: VecEnv) -> None:
        self._env = env
        self._arms = _movable(env)
        self._arm = "" if self._arms is None else next(iter(self._arms.arms))
        self._targets: dict[str, tuple[Tensor, Tensor]] = {}
        """Target pose of each tool: position ``[3]`` and rotation ``[3, 3]``."""
        self._open: dict[str, bool] = {}
        self._discrete = not isinstance(env.action_space, gym.spaces.Box)
        self._neutral = random_actions(env.action_space, env.num_envs, torch.Generator().manual_seed(0)).zero_()
        self._given = self._neutral[0].clone().reshape(-1)
        self._active = False
        self._watched: Callable[[], int] = lambda: 0
        self._gizmo: Any = None
        self._folder: Any = None
        self._panel: Panel | None = None
        self._shown: tuple[float, ...] | None = None

    # --- acting ---------------------------------------------------------------------------------------------------

    def __call__(self, observation: TensorDict) -> Tensor:
        watched = self._watched()
        if self._arms is None:
            action = self._neutral.clone()
            action[watched] = self._given.reshape(action[watched].shape)
            return action.to(self._env.device)
        qpos = self._joints()
        parts = []
        for name, part in self._arms.arms.items():
            position, rotation = self._pose(part.arm, qpos)
            twist = torch.zeros(self._env.num_envs, 6)
            if name not in self._targets:
                self._targets[name] = position[watched].clone(), rotation[watched].clone()
            target, turned = self._targets[name]
            twist[watched, :3] = target - position[watched]
            twist[watched, 3:] = rotation_error(turned.unsqueeze(0), rotation[watched : watched + 1])[0]
            grip = torch.ones(self._env.num_envs, 1)
            grip[watched] = 1.0 if self._open.get(name, True) else -1.0
            arm = None if len(self._arms.arms) == 1 else name
            parts.append(self._arms.encode(qpos, twist, grip if part.arm.num_fingers else None, arm))
        self._show_gizmo()
        return torch.cat(parts, dim=1).to(self._env.device)

    def reset(self, env_ids: list[int]) -> None:
        """Handle the end of episodes in these envs."""
        if self._watched() in env_ids:
            self.begin()

    def begin(self) -> None:
        """Reset the targets for a new episode."""
        self._targets.clear()
        self._open.clear()
        self._shown = None

    def _joints(self) -> Tensor:
        if not isinstance(self._env, TaskEnv) or self._env.robot is None:
            raise EmbodiChainError(f"{self._env.name} has no robot")
        return self._env.physics.qpos[:, self._env.robot.qpos].detach().float().cpu()

    @staticmethod
    def _pose(arm: Arm, qpos: Tensor) -> tuple[Tensor, Tensor]:
        if arm.chain is None:
            raise EmbodiChainError("the arm has no tool")
        return arm.chain.pose(qpos[:, arm.columns][:, : arm.num_joints])

    # --- the panel ------------------------------------------------------------------------------------------------

    def add_controls(self, panel: Panel, watched: Callable[[], int]) -> None:
        """Add the gizmo, keys and sliders, hidden until a person acts."""
        self._panel, self._watched, gui = panel, watched, panel.server.gui
        self._folder = gui.add_folder("A person acts", visible=False)
        with self._folder:
            if self._arms is not None:
                self._add_tool_controls(panel)
            else:
                self._add_sliders(panel)

    def _add_tool_controls(self, panel: Panel) -> None:
        gui, arms = panel.server.gui, self._arms
        if arms is None:
            return
        gui.add_markdown(
            "Drag the gizmo, or use the keys: **I K** forward and back, **J L** left and right, **U O** up and down, "
            "**Y H** turn, **G** gripper. Click into the scene first: keys go where the last click went."
        )
        if len(arms.arms) > 1:
            chosen = gui.add_dropdown("Arm", tuple(arms.arms), initial_value=self._arm)
            chosen.on_update(panel.later(lambda: self._choose_arm(chosen.value)))
        if any(part.arm.num_fingers for part in arms.arms.values()):
            gui.add_button("Open or close the gripper").on_click(panel.later(self._toggle))
            gui.add_command("Gripper", hotkey="G").on_trigger(panel.later(self._toggle))
        for key, (axis, sign) in _MOVES.items():
            command = gui.add_command(f"Tool {key}", hotkey=key)
            command.on_trigger(panel.later(partial(self.move, axis, sign)))
        turns = not isinstance(arms.term, EndEffectorDelta) or arms.term.dim == 6
        self._gizmo = panel.server.scene.add_transform_controls(
            "/tool", scale=0.18, disable_rotations=not turns, depth_test=False, visible=False
        )
        self._gizmo.on_update(panel.later(self._dragged))

    def _add_sliders(self, panel: Panel) -> None:
        gui, space = panel.server.gui, self._env.action_space
        if isinstance(space, gym.spaces.Discrete):
            gui.add_markdown(f"The keys **0** to **{min(int(space.n), 10) - 1}** choose the action.")
            for choice in range(min(int(space.n), 10)):
                command = gui.add_command(f"Action {choice}", hotkey=str(choice))
                command.on_trigger(panel.later(partial(self._give, 0, choice)))
            return
        gui.add_markdown("The sliders are the action; **J L** change the first number, **I K** the second.")
        sliders = []
        for index in range(min(self._given.numel(), _MAX_SLIDERS)):
            low, high = (0.0, 1.0) if self._discrete else (-1.0, 1.0)
            if isinstance(space, gym.spaces.MultiDiscrete):
                high = float(space.nvec.reshape(-1)[index] - 1)
            slider = gui.add_slider(f"action {index}", low, high, 1.0 if self._discrete else 0.05, 0.0)
            slider.on_update(panel.later(partial(self._take, index, slider)))
            sliders.append(slider)
        for keys, index in (("JL", 0), ("IK", 1)):
            for key, sign in zip(keys, (-1.0, 1.0), strict=True):
                if index < len(sliders):
                    command = gui.add_command(f"Action {index} {'less' if sign < 0 else 'more'}", hotkey=key)
                    command.on_trigger(panel.later(partial(_nudge, sliders[index], sign)))

    def activate(self, active: bool) -> None:
        """Show or hide the controls."""
        self._active = active
        if active:
            self.begin()
        if self._folder is not None:
            self._folder.visible = active
        if self._gizmo is not None:
            self._gizmo.visible = active
            if active:
                self._show_gizmo()

    def move(self, axis: int, sign: float) -> None:
        """Move the target of the selected tool by one key press."""
        if not self._active or self._arms is None:
            return
        position, rotation = self.target()
        if axis < 3:
            position = position.clone()
            position[axis] += sign * _STEP
        else:
            cosine, sine = np.cos(sign * _TURN), np.sin(sign * _TURN)
            about = torch.tensor([[cosine, -sine, 0.0], [sine, cosine, 0.0], [0.0, 0.0, 1.0]], dtype=rotation.dtype)
            rotation = about @ rotation
        self._targets[self._arm] = position, rotation
        self._show_gizmo()

    def target(self) -> tuple[Tensor, Tensor]:
        """Return the target of the selected tool in the watched env: position ``[3]`` and rotation ``[3, 3]``."""
        if self._arm not in self._targets and self._arms is not None:
            position, rotation = self._pose(self._arms.arms[self._arm].arm, self._joints())
            self._targets[self._arm] = position[self._watched()].clone(), rotation[self._watched()].clone()
        return self._targets[self._arm]

    def _choose_arm(self, name: str) -> None:
        self._arm = name
        self._shown = None
        self._show_gizmo()

    def _toggle(self) -> None:
        if self._active:
            self._open[self._arm] = not self._open.get(self._arm, True)

    def _give(self, index: int, value: float) -> None:
        self._given[index] = value

    def _take(self, index: int, slider: Any) -> None:
        self._given[index] = slider.value

    def _dragged(self) -> None:
        """Set the target to the pose of the dragged gizmo."""
        if self._gizmo is None or self._panel is None or not self._active:
            return
        pose = (*self._gizmo.position, *self._gizmo.wxyz)
        if self._shown is not None and np.allclose(pose, self._shown, atol=1e-6):
            return
        rotation = np.empty(9)
        mujoco.mju_quat2Mat(rotation, np.asarray(self._gizmo.wxyz, np.float64))
        position = np.asarray(self._gizmo.position) - self._panel.offset(self._watched())
        self._targets[self._arm] = (
            torch.from_numpy(position).float(),
            torch.from_numpy(rotation.reshape(3, 3)).float(),
        )
        self._shown = pose

    def _show_gizmo(self) -> None:
        """Move the gizmo to the target, unless it is there already."""
        if self._gizmo is None or self._panel is None or not self._active:
            return
        position, rotation = self.target()
        quaternion = np.empty(4)
        mujoco.mju_mat2Quat(quaternion, rotation.numpy().astype(np.float64).reshape(9))
        shifted = position.numpy() + self._panel.offset(self._watched())
        pose = (*shifted.tolist(), *quaternion.tolist())
        if self._shown is None or not np.allclose(pose, self._shown, atol=1e-6):
            self._gizmo.position, self._gizmo.wxyz = tuple(shifted), tuple(quaternion)
            self._shown = pose


def _movable(env: VecEnv) -> RobotActionManager | None:
    """Return the action manager of a robot whose tools can be moved to target poses, or ``None``."""
    actions = env.action_manager
    if not isinstance(env, TaskEnv) or not isinstance(actions, RobotActionManager):
        return None
    parts = actions.arms.values()
    usable = all(not isinstance(part.term, Effort) and part.arm.chain is not None for part in parts)
    return actions if usable else None


def _nudge(slider: Any, sign: float) -> None:
    slider.value = min(max(slider.value + sign * 0.25, slider.min), slider.max)


class DatasetRecorder:
    """Writes episodes of the watched env, with simulation states, to a LeRobot folder, whichever actor is selected."""

    def __init__(self, env: VecEnv, out: Path | None = None, words: str | None = None) -> None:
        """``words`` is the task description; default: the name of the environment."""
        self._env, self._words = env, words or env.name
        self.out = out if out is not None else Path("outputs", "recordings", f"{_file_name(env.name)}_{_now()}")
        self.recording = False
        self.episodes = self.frames = 0
        """Number of written episodes and frames."""
        self._writer: LeRobotWriter | None = None
        self._rows: list[dict[Key, Tensor]] = []
        self._env_id, self._seed, self._whole = 0, -1, False
        self._panel: Panel | None = None
        self._button: Any = None
        self._text: Any = None

    def begin(self, env_id: int, info: Mapping[str, Any]) -> None:
        """Start an episode of the recorded env."""
        self._rows, self._env_id, self._whole = [], env_id, True
        seeds = info.get("episode_seed")
        self._seed = -1 if seeds is None else int(seeds[env_id])

    def watch(self, env_id: int) -> None:
        """Record another env, starting with its next episode."""
        if env_id != self._env_id:
            self._rows, self._env_id, self._whole = [], env_id, False

    def before(self, observation: TensorDict, action: Tensor, pose: Pose | None) -> None:
        """Store observation, action and pose before a step."""
        self._whole = self._whole and self.recording  # skip episodes whose first steps are missing
        if not self._whole:
            return
        row: dict[Key, Tensor] = {("observation", *key): value for key, value in flatten(observation).items()}
        row[("action",)] = action
        kept = {key: value[self._env_id].detach().cpu().clone() for key, value in row.items()}
        if pose is not None:
            kept |= {key: value[self._env_id].clone() for key, value in state_frames(pose).items()}
        self._rows.append(kept)

    def after(self, reward: Tensor, terminated: Tensor, truncated: Tensor, info: Mapping[str, Any]) -> None:
        """Store the result of a step, and write the episode if it has ended."""
        env = self._env_id
        if self.recording and self._whole:
            ends = {"reward": reward, "terminated": terminated, "truncated": truncated}
            self._rows[-1] |= {(name,): value[env].detach().cpu().clone() for name, value in ends.items()}
        if bool(terminated[env] | truncated[env]):
            success = info.get("metrics", {}).get("success")
            if self.recording and self._whole:
                self._write(None if success is None else bool(success[env] > 0.5))
            self.begin(env, info)

    def _write(self, success: bool | None) -> None:
        frames = {key: torch.stack([row[key] for row in self._rows]) for key in self._rows[0]}
        episode = Episode({key: (values,) for key, values in frames.items()}, len(self._rows), self._seed, success)
        try:
            if self._writer is None:
                self._writer = self._open(frames)
            self._writer.add(episode)
        except EmbodiChainError as error:
            self.recording = False
            self._say(str(error), bad=True)
            return
        self.episodes += 1
        self.frames += episode.length

    def _open(self, frames: Mapping[Key, Tensor]) -> LeRobotWriter:
        from embodichain.agents.datasets.lerobot import LeRobotWriter

        layout = FrameLayout(tuple(Leaf(key, value.dtype, tuple(value.shape[1:])) for key, value in frames.items()))
        env = self._env
        if not isinstance(env, TaskEnv):
            return LeRobotWriter(self.out, layout, 30, self._words)
        fps, names = max(1, round(1.0 / step_seconds(env))), number_names(env)
        writer = LeRobotWriter(self.out, layout, fps, self._words, robot_name(env), names=names)
        write_scene(self.out, env.cfg)
        return writer

    def add_controls(self, panel: Panel) -> None:
        """Add the controls of the recorder."""
        self._panel = panel
        with panel.server.gui.add_folder("Record episodes", expand_by_default=False):
            self._button = panel.server.gui.add_button("Record", icon="player-record", color="red")
            self._button.on_click(panel.later(self.toggle))
            panel.server.gui.add_button("Discard this episode").on_click(panel.later(self.discard))
            self._text = panel.server.gui.add_markdown(f"to `{self.out}`")

    def toggle(self) -> None:
        """Start recording with the next episode, or stop and finish the folder."""
        if self.recording:
            self.close()
        else:
            self.recording, self._whole = True, self._whole and not self._rows
            if self._writer is None and self.episodes:  # each recording has its own folder
                self.out = self.out.with_name(f"{_file_name(self._env.name)}_{_now()}")
                self.episodes = self.frames = 0

    def discard(self) -> None:
        """Discard the current episode."""
        self._rows, self._whole = [], False

    def refresh(self) -> None:
        """Update the text of the panel."""
        if self._button is None:
            return
        label = "Stop and finish the folder" if self.recording else "Record"
        if self._button.label != label:
            self._button.label = label
        under_way = (
            ""
            if not self.recording
            else (f", {len(self._rows)} steps of the next" if self._whole else ", waiting for the next episode")
        )
        text = f"`{self.out}`: {self.episodes} episodes, {self.frames} frames{under_way}"
        if self._text.content != text:
            self._text.content = text

    def close(self) -> None:
        """Finish the folder; the incomplete current episode is dropped."""
        self.recording = False
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
            self._say(f"wrote {self.out}: {self.episodes} episodes")

    def _say(self, text: str, bad: bool = False) -> None:
        if self._panel is not None:
            self._panel.say(text, bad)


def _now() -> str:
    return time.strftime("%Y%m%d_%H%M%S")


def _file_name(name: str) -> str:
    return "".join(sign if sign.isalnum() or sign in "-_" else "_" for sign in name)
