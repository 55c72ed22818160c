"""Simulates the watched environment, with selectable actors and a mouse that drags bodies."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import mujoco
import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from embodichain.agents.datasets.frames import flatten
from embodichain.agents.engine.sources import ExpertActor, RandomActor
from embodichain.agents.rl.checkpoint import STATE_FILE, find_checkpoint, load_checkpoint, load_policy
from embodichain.agents.rl.evaluation import PolicyActor
from embodichain.envs.publishing import positions, step_seconds
from embodichain.envs.task_env import TaskEnv
from embodichain.envs.vec_env import HasExpert, VecEnv
from embodichain.envs.wrappers import chunked
from embodichain.errors import CheckpointError, EmbodiChainError
from embodichain.viewer.playback import Panel, ViewFrame, to_image
from embodichain.viewer.scene import Pose, SceneView, pull_force
from embodichain.viewer.teleoperation import DatasetRecorder, Person

DEFAULT_SECONDS = 1.0 / 30.0
"""Seconds per step, if an environment does not define the simulated time."""
_POLL_SECONDS = 1.0
_MAX_SIGNAL = 64
_RENDER = "rendered"


class Acts(Protocol):
    """Selects the actions of all envs."""

    def __call__(self, observation: TensorDict) -> Tensor:
        """Return the actions ``[num_envs, ...]``."""

    def reset(self, env_ids: list[int]) -> None:
        """Start new episodes in these envs."""


class Idle:
    """Always returns zeros."""

    def __init__(self, env: VecEnv) -> None:
        self._zeros = torch.zeros_like(RandomActor(env, 0)(TensorDict({}, batch_size=[])))

    def __call__(self, observation: TensorDict) -> Tensor:
        return self._zeros

    def reset(self, env_ids: list[int]) -> None:
        return


class RunPolicy:
    """The policy of a run's checkpoint; newer checkpoints of a running training are loaded."""

    def __init__(
        self, run: Path, which: Literal["best", "latest"], env: VecEnv, trusted_modules: Sequence[str] = ()
    ) -> None:
        self._run, self._which, self._env, self._trusted = run, which, env, trusted_modules
        self.step = 0
        """Environment steps of the checkpoint."""
        self._key = self._find()
        self._looked = time.monotonic()
        self._load()

    def _find(self) -> tuple[Path, int]:
        folder = find_checkpoint(self._run, self._which)
        return folder, (folder / STATE_FILE).stat().st_mtime_ns

    def _load(self) -> None:
        folder = self._key[0]
        self.step = int(load_checkpoint(folder)["trainer"]["global_step"])
        policy = load_policy(folder, self._env, self._env.device, trusted_modules=self._trusted)
        self._size = policy.chunk_size
        self._actor = PolicyActor(policy, chunked(self._env, policy.chunk_size))
        self._chunk: Tensor | None = None
        self._used = torch.zeros(self._env.num_envs, dtype=torch.int64)

    def renew(self) -> bool:
        """Load a newer checkpoint if there is one; return whether there was."""
        if time.monotonic() - self._looked < _POLL_SECONDS:
            return False
        self._looked = time.monotonic()
        try:
            key = self._find()
            if key == self._key:
                return False
            self._key = key
            self._load()
        except (CheckpointError, OSError):  # it is being written or removed; try again later
            return False
        return True

    def __call__(self, observation: TensorDict) -> Tensor:
        if self._size == 1:
            return self._actor(observation)
        if self._chunk is None or bool((self._used >= self._size).any()):
            new = self._actor(observation)
            old = new if self._chunk is None else self._chunk
            over = (self._used >= self._size) | (self._chunk is None)
            self._chunk = torch.where(over.view(-1, 1, 1).to(new.device), new, old)
            self._used[over] = 0
        rows = torch.arange(len(self._used))
        action = self._chunk[rows, self._used]
        self._used += 1
        return action

    def reset(self, env_ids: list[int]) -> None:
        """Start new episodes in these envs."""
        self._actor.reset(env_ids)
        self._used[env_ids] = self._size


class Simulation:
    """An environment that is stepped while it is watched."""

    ends = False

    def __init__(
        self,
        env: VecEnv,
        title: str,
        seed: int = 0,
        run: Path | None = None,
        acts: str | None = None,
        trusted_modules: Sequence[str] = (),
        out: Path | None = None,
        words: str | None = None,
    ) -> None:
        self.env, self.title, self.num_envs, self.watched = env, title, env.num_envs, 0
        self._task = env if isinstance(env, TaskEnv) else None
        self.model: mujoco.MjModel | None = None if self._task is None else self._task.physics.model
        self.camera = None if self._task is None else self._task.task.camera
        self.seconds = DEFAULT_SECONDS if self._task is None else step_seconds(self._task)
        self.scene: SceneView | None = None
        """The scene in which the mouse drags bodies."""
        self.strength = 1.0
        """Strength of the mouse drag."""
        self.person = Person(env)
        self.recorder = DatasetRecorder(env, out, words)
        self._seed, self._run, self._trusted = seed, run, trusted_modules
        self._choices = self._make_choices()
        self.acts = acts if acts is not None else next(iter(self._choices))
        if self.acts not in self._choices:
            raise EmbodiChainError(f"--policy {self.acts}: {env.name} can be acted in by {', '.join(self._choices)}")
        self._actor = self._choices[self.acts]()
        self._data = None if self.model is None else mujoco.MjData(self.model)
        self._render: str | None = None
        self._obs: TensorDict | None = None
        self._steps = np.zeros(self.num_envs, np.int64)
        self._returns = np.zeros(self.num_envs)
        self._note = ""
        self._image_problem = ""  # why a Gymnasium env has no image
        self._panel: Panel | None = None
        self._status: Any = None

    def _make_choices(self) -> dict[str, Callable[[], Acts]]:
        """Return the available actors by name; the first one is the default."""
        env, choices = self.env, dict[str, Callable[[], Acts]]()
        run, trusted = self._run, self._trusted
        if run is not None:
            choices["best"] = lambda: RunPolicy(run, "best", env, trusted)
            choices["latest"] = lambda: RunPolicy(run, "latest", env, trusted)
        if isinstance(env, HasExpert) and env.has_expert:
            choices["expert"] = lambda: ExpertActor(env)
        choices["random"] = lambda: RandomActor(env, self._seed)
        choices["zero"] = lambda: Idle(env)
        choices["person"] = lambda: self.person
        return choices

    def choose(self, name: str) -> None:
        """Select another actor."""
        self._actor = self._choices[name]()
        self.acts = name
        self.person.activate(self._actor is self.person)

    def restart(self) -> None:
        """Start new episodes in all envs."""
        self._obs = None
        if self._panel is not None:
            self._panel.playback.clear()

    def advance(self) -> ViewFrame | None:
        if self._obs is None:
            self._obs, info = self.env.reset(seed=self._seed)
            self._seed += 1
            self._steps[:], self._returns[:], self._note = 0, 0.0, ""
            self._actor.reset(list(range(self.num_envs)))
            self.person.begin()
            self.recorder.begin(self.watched, info)
            return self._frame({"reward": np.zeros(self.num_envs), "return": np.zeros(self.num_envs)})
        if isinstance(self._actor, RunPolicy) and self._actor.renew():
            self._actor.reset([])
        with torch.no_grad():
            action = self._actor(self._obs)
        self.recorder.watch(self.watched)
        self.recorder.before(self._obs, action, self.pose)
        self._pull()
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._release()
        self.recorder.after(reward, terminated, truncated, info)
        self._obs = obs
        done = (terminated | truncated).cpu().numpy()
        rewards = reward.detach().cpu().numpy().astype(np.float64)
        self._steps += 1
        self._returns += rewards
        signals = {"reward": rewards, "return": self._returns.copy()}
        signals |= {f"reward: {name}": _numbers(part) for name, part in info.get("rewards", {}).items()}
        signals["action"] = _numbers(action).reshape(self.num_envs, -1)[:, :_MAX_SIGNAL]
        if done.any():
            for values in signals.values():  # the frame is the first one of the next episode
                values[done] = 0.0
            self._end(done, info)
        return self._frame(signals)

    def _end(self, done: NDArray[np.bool_], info: Mapping[str, Any]) -> None:
        """Start the next episodes of done envs."""
        if done[self.watched]:
            success = info.get("metrics", {}).get("success")
            solved = "" if success is None else ("success, " if float(success[self.watched]) > 0.5 else "no success, ")
            total, length = self._returns[self.watched], self._steps[self.watched]
            self._note = f"last episode: {solved}return {total:.2f} in {length} steps"
            self.person.begin()
        self._steps[done], self._returns[done] = 0, 0.0
        self._actor.reset(np.flatnonzero(done).tolist())

    @property
    def pose(self) -> Pose | None:
        """The current pose of all envs."""
        return None if self._task is None else Pose(*positions(self._task, self.num_envs))

    def _frame(self, signals: dict[str, NDArray[Any]]) -> ViewFrame:
        images: dict[str, NDArray[np.uint8]] = {}
        obs = TensorDict({}, batch_size=[]) if self._obs is None else self._obs
        for key, value in flatten(obs).items():
            name, row = "/".join(key), value[self.watched].detach().cpu().numpy()
            if row.ndim >= 2:
                image = to_image(row)
                if image is not None:
                    images[name.removeprefix("image/")] = image
            elif row.size <= _MAX_SIGNAL:
                signals[name] = _numbers(value).reshape(self.num_envs, -1)
        if (self._task is None and not self._image_problem) or self._render is not None:
            images |= self._rendered()
        note = "\n\n".join(filter(None, (self._note, self._image_problem)))
        return ViewFrame(self.pose, self._steps.copy(), signals, images, note)

    def _rendered(self) -> dict[str, NDArray[np.uint8]]:
        """Return an image of the watched env from a camera of the model; for a Gymnasium env, its own view."""
        camera = None if self._task is None else self._render
        try:
            return {camera or _RENDER: self.env.render([self.watched], camera)[0]}
        except EmbodiChainError as error:
            self._render = None
            if self._task is None:
                self._image_problem = f"no picture: {error}"
            elif self._panel is not None:
                self._panel.say(str(error), bad=True)
            return {}

    def _pull(self) -> None:
        """Apply the force of the mouse drag."""
        pull = None if self.scene is None else self.scene.pull
        self._pulled = pull
        if pull is None or self._task is None or self.model is None or self._data is None:
            return
        physics = self._task.physics
        physics.load(self._data, pull.env)
        mujoco.mj_kinematics(self.model, self._data)
        mujoco.mj_comPos(self.model, self._data)
        mujoco.mj_comVel(self.model, self._data)
        force = pull_force(self.model, self._data, pull, self.strength)
        physics.applied_forces()[pull.env, pull.body] = torch.from_numpy(force).to(physics.applied_forces().dtype)

    def _release(self) -> None:
        if self._pulled is not None and self._task is not None:
            self._task.physics.applied_forces()[self._pulled.env, self._pulled.body] = 0.0

    def add_controls(self, panel: Panel) -> None:
        self._panel, gui = panel, panel.server.gui
        acts = gui.add_dropdown("Who acts", tuple(self._choices), initial_value=self.acts)
        acts.on_update(panel.later(lambda: self.choose(acts.value)))
        gui.add_button("New episodes", icon="refresh").on_click(panel.later(self.restart))
        self._status = gui.add_markdown("")
        self.person.add_controls(panel, lambda: self.watched)
        self.person.activate(self._actor is self.person)
        self.recorder.add_controls(panel)
        if self._task is not None:
            with gui.add_folder("Push and pull", expand_by_default=False):
                gui.add_markdown("Hold **Ctrl** (or Cmd) and drag a body with the mouse.")
                strength = gui.add_slider("Strength", 0.1, 10.0, 0.1, 1.0)
                strength.on_update(panel.later(lambda: setattr(self, "strength", float(strength.value))))
        names = [] if self.model is None else [self.model.camera(i).name for i in range(self.model.ncam)]
        if names:
            cameras = gui.add_dropdown("Render camera", ("off", *names), initial_value="off")
            cameras.on_update(
                panel.later(lambda: setattr(self, "_render", None if cameras.value == "off" else cameras.value))
            )

    def refresh(self) -> None:
        if self._status is not None:
            policy = self._actor
            step = f"checkpoint of step **{policy.step:,}**" if isinstance(policy, RunPolicy) else ""
            if self._status.content != step:
                self._status.content = step
        self.recorder.refresh()

    def close(self) -> None:
        self.recorder.close()
        self.env.close()


def _numbers(values: Tensor) -> NDArray[np.float64]:
    return values.detach().cpu().numpy().astype(np.float64)
