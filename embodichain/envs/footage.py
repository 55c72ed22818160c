"""Following one env through its episodes: a video where OpenGL works, its ways seen from above in any case."""

from __future__ import annotations

import math
from pathlib import Path

import mujoco
import numpy as np
from PIL import Image
from tensordict import TensorDict

from embodichain.envs.episodes import Episode, Step
from embodichain.envs.gl import INSTALL_HINT
from embodichain.envs.pictures import BLUE, GREEN, ORANGE, Marker, Trail, caption, draw_top_down, write_picture
from embodichain.envs.task_env import TaskEnv
from embodichain.envs.vec_env import VecEnv
from embodichain.envs.videos import VideoWriter
from embodichain.errors import EnvContractError, RenderingError

_WAYS = {("robot", "ee_pos"): ("end effector", BLUE), ("object", "pos"): ("object", ORANGE)}
_GOAL = ("goal", "pos")
_MAX_FPS = 30.0
_HOLD_SECONDS = 0.8  # the last picture of an episode stays this long


class Footage:
    """Watches the first ``episodes`` episodes of one env; ``problem`` says why there is no video, if there is none."""

    def __init__(
        self,
        env: VecEnv,
        video: Path,
        episodes: int = 3,
        camera: str | None = None,
        size: tuple[int, int] = (480, 640),
        speed: float = 1.0,
        env_id: int = 0,
    ) -> None:
        self.env, self.env_id, self.episodes = env, env_id, episodes
        self.still: np.ndarray | None = None
        self.picture: Image.Image | None = None
        self.problem: str | None = None
        self._camera, self._size = camera, size
        step_seconds = _step_seconds(env) / speed  # as seen in the video
        self._stride = max(1, math.ceil(1.0 / step_seconds / _MAX_FPS - 1e-6))
        self._video = VideoWriter(video, fps=1.0 / (step_seconds * self._stride))
        self._seen = self._steps = 0
        self._points: dict[tuple[str, str], list[np.ndarray]] = {}
        try:
            self._render()
        except (RenderingError, EnvContractError) as error:
            self.problem = str(error)
        except mujoco.FatalError as error:  # an environment that is not ours draws with MuJoCo itself
            self.problem = f"{error}. {INSTALL_HINT}"

    def watch(self, step: Step) -> None:
        """Take in one moment of the roll."""
        if self._seen >= self.episodes:
            return
        for episode in step.ended:
            if episode.env == self.env_id:
                self._end(episode, step.final_obs)
        if self._seen >= self.episodes:
            return
        self._note(step.obs)
        if self.problem is None and self._steps % self._stride == 0:
            frame = self._render()
            self._video.append(caption(frame, f"episode {self._seen + 1}"))
            self.still = frame
        self._steps += 1

    def finish(self) -> list[Path]:
        """Complete the files and return their paths: the video, or the picture from above in its place."""
        self._video.close()
        if self.problem is None:
            return [self._video.path] if self._video.num_frames else []
        return [] if self.picture is None else [write_picture(self._video.path.with_suffix(".png"), self.picture)]

    def close(self) -> None:
        """Throw away a video that was not finished."""
        self._video.close(keep=False)

    def _render(self) -> np.ndarray:
        return self.env.render([self.env_id], self._camera, self._size)[0]

    def _note(self, obs: TensorDict) -> None:
        for key in (*_WAYS, _GOAL):
            value = obs.get(key, None)
            if value is not None:
                self._points.setdefault(key, []).append(value[self.env_id, :2].cpu().numpy())

    def _end(self, episode: Episode, final_obs: TensorDict) -> None:
        """Close an episode: hold its last picture, and draw the first episode from above."""
        self._note(final_obs)
        outcome = {True: "success", False: "no success", None: f"return {episode.total_reward:.1f}"}[episode.success]
        if self.problem is None and self.still is not None:
            last = caption(self.still, f"episode {self._seen + 1}: {outcome} in {episode.length} steps")
            for _ in range(max(1, round(_HOLD_SECONDS * self._video.fps))):
                self._video.append(last)
        if self.picture is None and any(key in self._points for key in _WAYS):
            self.picture = self._draw(f"{_name(self.env)}: {outcome} in {episode.length} steps")
        self._points.clear()
        self._seen += 1
        self._steps = 0

    def _draw(self, title: str) -> Image.Image:
        trails = [
            Trail(name, np.stack(self._points[key]), color)
            for key, (name, color) in _WAYS.items()
            if key in self._points
        ]
        markers = []
        if _GOAL in self._points:
            radius = self.env.cfg.env.success_threshold if isinstance(self.env, TaskEnv) else 0.02
            x, y = self._points[_GOAL][-1].tolist()
            markers.append(Marker("goal", (x, y), radius, GREEN))
        return draw_top_down(trails, markers, title)


def _step_seconds(env: VecEnv) -> float:
    """Return the simulated time of one step; environments that do not say are shown at 30 steps a second."""
    return env.physics.model.opt.timestep * env.cfg.env.substeps if isinstance(env, TaskEnv) else 1.0 / _MAX_FPS


def _name(env: VecEnv) -> str:
    return env.cfg.id if isinstance(env, TaskEnv) else type(env).__name__
