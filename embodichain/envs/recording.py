"""Rolls out whole episodes, and records one env as a video, or as a trajectory plot without OpenGL."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import imageio.v2 as imageio
import mujoco
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from embodichain.envs.gl_backend import INSTALL_HINT
from embodichain.envs.task_env import TaskEnv
from embodichain.envs.vec_env import VecEnv
from embodichain.errors import EmbodiChainError, OutputError, writing

_SUFFIXES = (".mp4", ".mkv", ".mov")
_DPI = 100
_MAX_FPS = 30.0
_HOLD_SECONDS = 0.8  # duration of the last frame of an episode
BLUE, ORANGE, GREEN = "#2e6cbe", "#e67e22", "#279856"
_TRAJECTORIES = {("robot", "ee_pos"): "end effector", ("object", "pos"): "object"}
_GOAL = ("goal", "pos")


class VideoWriter:
    """Writes an H.264 file, which appears once it is complete; frames are padded to even sizes, as H.264 requires."""

    def __init__(self, path: str | os.PathLike[str], fps: float = 30.0) -> None:
        self.path = prepare_output(path, _SUFFIXES)
        self.fps = fps
        self.num_frames = 0
        self._partial = self.path.with_name(f".{self.path.stem}.partial{self.path.suffix}")
        self._shape: tuple[int, ...] | None = None
        self._writer: Any = None

    def append(self, frame: np.ndarray) -> None:
        """Add one uint8 frame ``[H, W, 3]``; all frames have the shape of the first."""
        if frame.ndim != 3 or frame.shape[2] != 3 or frame.dtype != np.uint8:
            raise ValueError(
                f"expected a uint8 frame of shape [H, W, 3], got {frame.dtype} of shape {list(frame.shape)}"
            )
        if self._shape is None:
            self._shape = frame.shape
            self._writer = imageio.get_writer(
                self._partial, format="FFMPEG", fps=self.fps, codec="libx264", quality=8, macro_block_size=1
            )
        if frame.shape != self._shape:
            raise ValueError(f"expected frames of shape {list(self._shape)} as the first, got {list(frame.shape)}")
        height, width = frame.shape[:2]
        if height % 2 or width % 2:
            frame = np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
        try:
            self._writer.append_data(np.ascontiguousarray(frame))
        except OSError as error:
            raise OutputError(f"cannot write the video {self.path}: {str(error).splitlines()[0]}") from error
        self.num_frames += 1

    def close(self, keep: bool = True) -> None:
        """Finish the file, or discard it; may be called more than once."""
        if self._writer is None:
            return
        writer, self._writer = self._writer, None
        try:
            writer.close()
            if keep:
                os.replace(self._partial, self.path)
        finally:
            self._partial.unlink(missing_ok=True)


def write_image(path: str | os.PathLike[str], image: np.ndarray) -> Path:
    """Write a uint8 image ``[H, W, 3]`` as PNG and return its path."""
    target = prepare_output(path, (".png",))
    Image.fromarray(image).save(target, format="PNG")
    return target


def prepare_output(path: str | os.PathLike[str], suffixes: Sequence[str]) -> Path:
    """Create the folder of an output file and return its path; ``OutputError`` if it cannot be written."""
    target = Path(path).expanduser()
    if target.suffix.lower() not in suffixes:
        raise OutputError(f"expected a file name that ends in {' or '.join(suffixes)}, got {str(path)!r}")
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        probe = target.with_name(f".{target.name}.{os.getpid()}.probe")
        probe.touch()
        probe.unlink()
    if target.is_dir():
        raise OutputError(f"cannot write the file {target}: a folder of that name is there")
    return target


def caption(frame: np.ndarray, text: str) -> np.ndarray:
    """Return a copy of a frame ``[H, W, 3]`` with a line of text in the lower left corner."""
    image, size = Image.fromarray(frame), max(11, frame.shape[0] // 18)
    at, font = (size * 0.7, frame.shape[0] - size * 0.6), ImageFont.load_default(size)
    ImageDraw.Draw(image).text(at, text, "white", font, anchor="ls", stroke_width=2, stroke_fill="#282c34")
    return np.asarray(image)


def plot_trajectories(
    trajectories: Mapping[str, np.ndarray],
    goal: tuple[float, float, float] | None = None,
    title: str = "",
    size: tuple[int, int] = (640, 900),
) -> np.ndarray:
    """Return a top-view plot of an episode, uint8 ``[*size, 3]``, with x to the right and y up, at equal scale.

    ``trajectories`` are ``[n, 2]`` in metres by name; ``goal`` is the x, y and radius of a region.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Circle

    figure = Figure((size[1] / _DPI, size[0] / _DPI), dpi=_DPI, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="x [m]", ylabel="y [m]")
    axes.set_title(title, loc="left", fontsize=14, pad=12)
    axes.set_aspect("equal", adjustable="datalim")
    axes.margins(0.08)
    axes.grid(color="#e8eaee")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if goal is not None:
        style = {"facecolor": (GREEN, 0.25), "edgecolor": GREEN, "linewidth": 1.5, "label": "goal"}
        axes.add_patch(Circle(goal[:2], goal[2], **style))
    for (name, points), color in zip(trajectories.items(), itertools.cycle((BLUE, ORANGE)), strict=False):
        points = np.asarray(points, dtype=np.float64).reshape(-1, 2)
        points = points[np.isfinite(points).all(axis=1)]
        segments = np.stack((points[:-1], points[1:]), axis=1)
        faded = [(color, strength) for strength in np.linspace(0.3, 1.0, len(segments))]
        axes.add_collection(LineCollection(list(segments), colors=faded, linewidth=2.5))
        dot: dict[str, Any] = {"color": color, "linestyle": "none", "marker": "o", "markersize": 9}
        axes.plot(*points[:1].T, markerfacecolor="white", markeredgewidth=2, **dot)
        axes.plot(*points[-1:].T, label=name, **dot)
    if trajectories or goal is not None:
        figure.legend(loc="outside right upper", frameon=False, title="ring: start, dot: end" if trajectories else None)
    canvas.draw()
    return np.array(canvas.buffer_rgba())[..., :3]


ActionSource = Callable[[TensorDict], Tensor]


@dataclass(frozen=True)
class EpisodeResult:
    """Return, length and success of one episode."""

    env: int
    """Index of its env."""
    total_reward: float
    """Sum of rewards."""
    length: int
    """Number of steps."""
    success: bool | None
    """Whether it ended in success; ``None`` if the environment does not report it."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Other metrics of the last step."""


@dataclass(frozen=True)
class Step:
    """The state between two steps of a rollout."""

    obs: TensorDict
    """Observation of all envs; for envs that just ended, the first of the next episode."""
    final_obs: TensorDict
    """The last observation of each env before a reset."""
    ended: list[EpisodeResult]
    """The counted episodes that ended with the last step."""
    left: list[int]
    """Number of episodes that each env has yet to end."""


@dataclass(frozen=True)
class Summary:
    """Averages over episodes."""

    episodes: int
    mean_return: float
    std_return: float
    mean_length: float
    success_rate: float | None
    metrics: dict[str, float] = field(default_factory=dict)
    """Means of the metrics of the last steps."""

    @staticmethod
    def of(episodes: Sequence[EpisodeResult]) -> Summary:
        """Summarise at least one episode."""
        if not episodes:
            raise ValueError("expected at least one episode, got none")
        returns = torch.tensor([e.total_reward for e in episodes], dtype=torch.float64)
        known = [e.success for e in episodes if e.success is not None]
        measured: dict[str, list[float]] = {}
        for episode in episodes:
            for name, value in episode.metrics.items():
                measured.setdefault(name, []).append(value)
        return Summary(
            episodes=len(episodes),
            mean_return=float(returns.mean()),
            std_return=float(returns.std(correction=0)),
            mean_length=sum(e.length for e in episodes) / len(episodes),
            success_rate=sum(known) / len(known) if known else None,
            metrics={name: sum(values) / len(values) for name, values in measured.items()},
        )


def roll(env: VecEnv, act: ActionSource, episodes: int, seed: int | None = None) -> Iterator[Step]:
    """Reset, then step until ``episodes`` episodes have ended; yield after the reset and after every step.

    Each env runs its share of the episodes, so that short episodes are not over-represented.
    """
    if episodes < 1:
        raise ValueError(f"episodes must be at least 1, got {episodes}")
    share = torch.full((env.num_envs,), episodes // env.num_envs)
    share[: episodes % env.num_envs] += 1
    total = torch.zeros(env.num_envs, dtype=torch.float64)
    length = torch.zeros(env.num_envs, dtype=torch.int64)
    obs, _ = env.reset(seed=seed)
    yield Step(obs, obs, [], share.tolist())
    while bool((share > 0).any()):
        obs, reward, terminated, truncated, info = env.step(act(obs))
        total += reward.to("cpu", torch.float64)
        length += info["chunk"]["num_actions"].cpu() if "chunk" in info else 1
        done, ended = (terminated | truncated).cpu(), []
        if bool(done.any()):
            measures = {name: measure.tolist() for name, measure in info["metrics"].items() if measure.dim() == 1}
            success = measures.pop("success", None)
            for env_id in torch.nonzero(done & (share > 0)).reshape(-1).tolist():
                solved = None if success is None else bool(success[env_id] > 0.5)
                last = {name: float(values[env_id]) for name, values in measures.items()}
                last = {
                    name: value for name, value in last.items() if not (name.startswith("task/") and math.isnan(value))
                }
                ended.append(EpisodeResult(env_id, float(total[env_id]), int(length[env_id]), solved, last))
        share -= done.to(share.dtype)
        total[done], length[done] = 0.0, 0
        yield Step(obs, info["final_observation"], ended, share.clamp(min=0).tolist())


class EpisodeRecorder:
    """Records the first ``episodes`` episodes of one env; ``problem`` is the reason if there is no video.

    Each ends with the state in which it ended, where the env can show that before it begins the next one.
    A rendering error never stops the rollout: an env may have no camera, fail to render, or return no image.
    """

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
        """The last rendered frame."""
        self.plot: np.ndarray | None = None
        """The trajectory plot of the first episode, if the observations contain positions."""
        self.problem: str | None = None
        self._camera, self._size = camera, size
        step_seconds = 1.0 / _MAX_FPS  # for environments that do not define the simulated time of a step
        if isinstance(env, TaskEnv):
            step_seconds = env.physics.model.opt.timestep * env.cfg.env.substeps
        step_seconds /= speed
        self._stride = max(1, math.ceil(1.0 / step_seconds / _MAX_FPS - 1e-6))
        self._video = VideoWriter(video, fps=1.0 / (step_seconds * self._stride))
        self._finished = self._steps = 0
        self._end_drawn = False
        self._points: dict[tuple[str, str], list[np.ndarray]] = {}
        env.on_episode_end(self._keep_ends)

    def watch(self, step: Step) -> None:
        """Record one step of :func:`roll`."""
        if self._finished >= self.episodes:
            return
        for episode in step.ended:
            if episode.env == self.env_id:
                self._end(episode, step.final_obs)
        if not step.left[self.env_id]:  # what this env does from now on belongs to no episode that counts
            self.episodes = self._finished
        if self._finished >= self.episodes:
            self.env.on_episode_end(None)
            return
        self._add_points(step.obs)
        if self.problem is None and self._steps % self._stride == 0:
            with self._keeping_errors():
                self._video.append(caption(self._draw(), f"episode {self._finished + 1}"))
        self._steps += 1

    def finish(self) -> list[Path]:
        """Complete the files and return their paths: the video, or else the trajectory plot."""
        with self._keeping_errors():
            self._video.close()
        if self.problem is None:
            return [self._video.path] if self._video.num_frames else []
        with self._keeping_errors():
            return [] if self.plot is None else [write_image(self._video.path.with_suffix(".png"), self.plot)]
        return []

    def close(self) -> None:
        """Discard an unfinished video."""
        self.env.on_episode_end(None)
        self._video.close(keep=False)

    def _draw(self) -> np.ndarray:
        self.still = image = self.env.render([self.env_id], self._camera, self._size)[0]
        return image

    def _keep_ends(self, ended: Tensor) -> None:
        """Draw the state in which the episode ended; called before the next one begins."""
        if self.problem is None and not self._end_drawn and bool(ended[self.env_id]):
            with self._keeping_errors():
                self._draw()
                self._end_drawn = True  # the rest of a chunk of actions changes the state again

    @contextlib.contextmanager
    def _keeping_errors(self) -> Iterator[None]:
        """Discard the video and store the reason if an error occurs inside."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the env's own code renders and may raise anything
            known = isinstance(error, EmbodiChainError)
            self.problem = str(error) if known else " ".join(f"{type(error).__name__}: {error}".split())
            if isinstance(error, mujoco.FatalError):  # a Gymnasium environment that renders with MuJoCo
                self.problem = f"{error}. {INSTALL_HINT}"
            with contextlib.suppress(OSError):  # the encoder may have exited already
                self._video.close(keep=False)

    def _add_points(self, obs: TensorDict) -> None:
        for key in (*_TRAJECTORIES, _GOAL):
            value = _position(obs, *key)
            if value is not None:
                self._points.setdefault(key, []).append(value[self.env_id, :2].cpu().numpy())

    def _end(self, episode: EpisodeResult, final_obs: TensorDict) -> None:
        """End an episode: hold the image of its end, and plot the trajectories of the first episode."""
        self._end_drawn = False
        self._add_points(final_obs)
        outcome = {True: "success", False: "no success", None: f"return {episode.total_reward:.1f}"}[episode.success]
        if self.problem is None and self.still is not None:
            with self._keeping_errors():
                last = caption(self.still, f"episode {self._finished + 1}: {outcome} in {episode.length} steps")
                for _ in range(max(1, round(_HOLD_SECONDS * self._video.fps))):
                    self._video.append(last)
        if self.plot is None and any(key in self._points for key in _TRAJECTORIES):
            self.plot = self._plot(f"{self.env.name}: {outcome} in {episode.length} steps")
        self._points.clear()
        self._finished += 1
        self._steps = 0

    def _plot(self, title: str) -> np.ndarray:
        found = {name: np.stack(self._points[key]) for key, name in _TRAJECTORIES.items() if key in self._points}
        if _GOAL not in self._points:
            return plot_trajectories(found, None, title)
        x, y = self._points[_GOAL][-1].tolist()
        radius = self.env.cfg.env.success_threshold if isinstance(self.env, TaskEnv) else 0.02
        return plot_trajectories(found, (x, y, radius), title)


def _position(obs: TensorDictBase, group: str, name: str) -> Tensor | None:
    """Return an observed position ``[num_envs, 2 or more]``, or ``None`` if there is none of this name."""
    parts = obs.get(group, None)
    value = parts.get(name, None) if isinstance(parts, TensorDictBase) else None
    return value if isinstance(value, Tensor) and value.dim() == 2 and value.shape[1] >= 2 else None


Episode, Footage = EpisodeResult, EpisodeRecorder  # former names
