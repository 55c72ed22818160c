"""Following one env through its episodes: a video where OpenGL works, its ways seen from above in any case."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import imageio.v2 as imageio
import mujoco
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from tensordict import TensorDict
from torch import Tensor

from embodichain.envs.rendering import INSTALL_HINT
from embodichain.envs.task_env import TaskEnv
from embodichain.envs.vec_env import VecEnv
from embodichain.errors import EnvContractError, OutputError, RenderingError

# MERGED videos: Video files, written frame by frame, and the check that a file can be written at all.


_SUFFIXES = (".mp4", ".mkv", ".mov")


class VideoWriter:
    """Writes frames to an H.264 file as they come; the file appears when it is complete.

    Frames of odd width or height get one more column or row, because H.264 stores colour for 2x2 pixels.
    """

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
        """Finish the file, or throw away what was written; calling it twice is fine."""
        if self._writer is None:
            return
        self._writer.close()
        self._writer = None
        if keep:
            os.replace(self._partial, self.path)
        else:
            self._partial.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(keep=kind is None)


def write_video(path: str | os.PathLike[str], frames: Iterable[np.ndarray], fps: float = 30.0) -> Path:
    """Write frames ``[H, W, 3]`` to an H.264 file and return its path."""
    with VideoWriter(path, fps) as video:
        for frame in frames:
            video.append(frame)
    if not video.num_frames:
        raise ValueError(f"expected at least one frame for {video.path}, got none")
    return video.path


def prepare_output(path: str | os.PathLike[str], suffixes: Sequence[str]) -> Path:
    """Return the path of a file to be written, its folder made and tried; ``OutputError`` if that cannot be."""
    target = Path(path).expanduser()
    if target.suffix.lower() not in suffixes:
        raise OutputError(f"expected a file name that ends in {' or '.join(suffixes)}, got {str(path)!r}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        probe = target.with_name(f".{target.name}.{os.getpid()}.probe")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OutputError(
            f"cannot write to the folder {target.parent}: {error.strerror}. Choose another one."
        ) from error
    if target.is_dir():
        raise OutputError(f"cannot write the file {target}: a folder of that name is there")
    return target


# MERGED pictures: Pictures that need no OpenGL: an episode seen from above, and text on a frame.


Color = tuple[int, int, int]
BLUE, ORANGE, GREEN, RED = (46, 108, 190), (230, 126, 34), (39, 152, 86), (200, 60, 60)
_INK, _GREY, _GRID, _PAPER = (40, 44, 52), (130, 136, 146), (232, 234, 238), (255, 255, 255)
_SHARP = 3  # everything is drawn this much larger and scaled down, which smooths lines and circles


@dataclass(frozen=True)
class Trail:
    """The way of something over the table: ``points`` ``[n, 2]`` in metres, in time order."""

    name: str
    points: np.ndarray
    color: Color = BLUE


@dataclass(frozen=True)
class Marker:
    """A thing on the table that does not move: a disc or a square of the given radius (half side) in metres."""

    name: str
    position: tuple[float, float]
    radius: float
    color: Color = GREEN
    shape: Literal["disc", "square"] = "disc"


def draw_top_down(
    trails: Sequence[Trail], markers: Sequence[Marker] = (), title: str = "", size: tuple[int, int] = (640, 900)
) -> Image.Image:
    """Draw an episode as seen from above, x to the right and y up, to one scale; ``size`` is (height, width).

    A trail begins at a ring, ends at a dot and grows stronger with time.
    """
    chart = _Chart(_bounds(trails, markers), size)
    chart.axes()
    for marker in markers:
        chart.marker(marker)
    for trail in trails:
        chart.trail(trail)
    chart.scale_bar()
    chart.legend(trails, markers)
    if title:
        chart.text((chart.left, chart.top / 2), title, 20, _INK, "lm")
    return chart.finish()


def _bounds(trails: Sequence[Trail], markers: Sequence[Marker]) -> np.ndarray:
    """Return the corners ``[2, 2]`` (lowest, highest) of all that is to be seen, with some air around it."""
    points = [np.asarray(t.points, dtype=np.float64).reshape(-1, 2) for t in trails]
    for marker in markers:
        points.append(np.asarray(marker.position) + marker.radius * np.array([[-1.0, -1.0], [1.0, 1.0]]))
    every = np.concatenate(points) if points else np.empty((0, 2))
    every = every[np.isfinite(every).all(axis=1)]
    if not len(every):
        return np.array([[-0.5, -0.5], [0.5, 0.5]])
    low, high = every.min(axis=0), every.max(axis=0)
    air = max(0.08 * float((high - low).max()), 0.02)
    return np.stack((low - air, high + air))


@dataclass
class _Chart:
    """Paper with a coordinate system; lengths in its methods are pixels of the finished picture."""

    bounds: np.ndarray
    size: tuple[int, int]
    left: float = 64.0
    top: float = 52.0
    right: float = 190.0  # room for the legend
    bottom: float = 52.0
    image: Image.Image = field(init=False)

    def __post_init__(self) -> None:
        height, width = self.size
        self.image = Image.new("RGB", (width * _SHARP, height * _SHARP), _PAPER)
        self._pen = ImageDraw.Draw(self.image, "RGBA")
        self._box = (self.left, self.top, width - self.right, height - self.bottom)
        room = np.array([self._box[2] - self._box[0], self._box[3] - self._box[1]])
        extent = self.bounds[1] - self.bounds[0]
        self._scale = float((room / extent).min())  # pixels per metre, the same both ways
        middle = self.bounds.mean(axis=0)
        self.bounds = np.stack((middle - room / self._scale / 2, middle + room / self._scale / 2))

    def place(self, points: np.ndarray) -> np.ndarray:
        """Map metres ``[n, 2]`` to pixels ``[n, 2]``."""
        x = self._box[0] + (points[:, 0] - self.bounds[0, 0]) * self._scale
        y = self._box[3] - (points[:, 1] - self.bounds[0, 1]) * self._scale
        return np.stack((x, y), axis=1)

    def line(self, points: Sequence[tuple[float, float]], color: tuple[int, ...], width: float) -> None:
        scaled = [(x * _SHARP, y * _SHARP) for x, y in points]
        self._pen.line(scaled, fill=color, width=round(width * _SHARP), joint="curve")

    def disc(
        self, at: Sequence[float], radius: float, fill: tuple[int, ...], edge: tuple[int, ...], width: float
    ) -> None:
        box = [
            (at[0] - radius) * _SHARP,
            (at[1] - radius) * _SHARP,
            (at[0] + radius) * _SHARP,
            (at[1] + radius) * _SHARP,
        ]
        self._pen.ellipse(box, fill=fill, outline=edge, width=round(width * _SHARP))

    def square(self, at: Sequence[float], radius: float, fill: tuple[int, ...], edge: Color, width: float) -> None:
        box = [
            (at[0] - radius) * _SHARP,
            (at[1] - radius) * _SHARP,
            (at[0] + radius) * _SHARP,
            (at[1] + radius) * _SHARP,
        ]
        self._pen.rectangle(box, fill=fill, outline=edge, width=round(width * _SHARP))

    def text(self, at: Sequence[float], text: str, size: int, color: Color, anchor: str) -> None:
        self._pen.text((at[0] * _SHARP, at[1] * _SHARP), text, color, _font(size * _SHARP), anchor=anchor)

    def axes(self) -> None:
        """Draw the grid with its numbers."""
        x0, y0, x1, y1 = self._box
        step = _round_length(float((self.bounds[1] - self.bounds[0]).max()) / 7)
        digits = max(0, -math.floor(math.log10(step)))
        for axis, name in enumerate("xy"):
            first = math.ceil(self.bounds[0, axis] / step)
            for tick in range(first, math.floor(self.bounds[1, axis] / step) + 1):
                x, y = self.place(np.full((1, 2), tick * step))[0]
                label = f"{tick * step:.{digits}f}"
                if name == "x":
                    self.line([(x, y0), (x, y1)], _GRID, 1)
                    self.text((x, y1 + 8), label, 12, _GREY, "ma")
                else:
                    self.line([(x0, y), (x1, y)], _GRID, 1)
                    self.text((x0 - 8, y), label, 12, _GREY, "rm")
        self.line([(x0, y0), (x1, y0), (x1, y1), (x0, y1), (x0, y0)], _GREY, 1)
        self.text(((x0 + x1) / 2, y1 + 28), "x [m]", 13, _INK, "ma")
        self.text((14, y0 - 6), "y [m]", 13, _INK, "ls")

    def marker(self, marker: Marker) -> None:
        """Draw a resting thing, translucent, so that trails show through."""
        at, radius = self.place(np.asarray([marker.position], dtype=np.float64))[0], marker.radius * self._scale
        self._shape(at, radius, marker)

    def trail(self, trail: Trail) -> None:
        """Draw a way: faint where it begins, strong where it ends."""
        points = np.asarray(trail.points, dtype=np.float64).reshape(-1, 2)
        pixels = self.place(points[np.isfinite(points).all(axis=1)])
        if not len(pixels):
            return
        for i in range(len(pixels) - 1):
            strength = 0.35 + 0.65 * (i + 1) / (len(pixels) - 1)
            color = tuple(round(255 + (c - 255) * strength) for c in trail.color)
            self.line([tuple(pixels[i]), tuple(pixels[i + 1])], color, 2.5)
            self.disc(pixels[i + 1], 1.2, color, color, 0)
        self.disc(pixels[0], 5.5, _PAPER, trail.color, 2)
        self.disc(pixels[-1], 5.5, trail.color, _PAPER, 1.5)

    def scale_bar(self) -> None:
        """Draw a bar of a round length in the lower right corner."""
        metres = _round_length(0.2 * (self._box[2] - self._box[0]) / self._scale)
        x1, y = self._box[2] - 14, self._box[3] - 14
        x0 = x1 - metres * self._scale
        self.line([(x0, y), (x1, y)], _INK, 2)
        for x in (x0, x1):
            self.line([(x, y - 4), (x, y + 4)], _INK, 2)
        label = f"{metres:g} m" if metres >= 1 else f"{metres * 100:g} cm"
        self.text(((x0 + x1) / 2, y - 8), label, 13, _INK, "ms")

    def legend(self, trails: Sequence[Trail], markers: Sequence[Marker]) -> None:
        """Name what is drawn, on the right."""
        x, y = self._box[2] + 18, self._box[1] + 12
        for trail in trails:
            self.line([(x, y), (x + 26, y)], trail.color, 2.5)
            self.disc((x, y), 4.5, _PAPER, trail.color, 2)
            self.disc((x + 26, y), 4.5, trail.color, _PAPER, 1)
            self.text((x + 38, y), trail.name, 14, _INK, "lm")
            y += 26
        for marker in markers:
            self._shape((x + 13, y), 8, marker)
            self.text((x + 38, y), marker.name, 14, _INK, "lm")
            y += 26
        if trails:
            self.text((x - 5, y + 4), "ring: start, dot: end", 12, _GREY, "lm")

    def finish(self) -> Image.Image:
        """Return the picture at its real size."""
        return self.image.resize((self.size[1], self.size[0]), Image.Resampling.LANCZOS)

    def _shape(self, at: Sequence[float], radius: float, marker: Marker) -> None:
        draw = self.disc if marker.shape == "disc" else self.square
        draw(at, radius, (*marker.color, 60), marker.color, 1.5)


def _round_length(length: float) -> float:
    """Return the largest of 1, 2 and 5 times a power of ten that is not above a length."""
    power = 10.0 ** math.floor(math.log10(length))
    return max(factor * power for factor in (1, 2, 5) if factor * power <= length * (1 + 1e-9))


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def write_picture(path: str | os.PathLike[str], picture: Image.Image | np.ndarray) -> Path:
    """Write a picture (or a uint8 frame ``[H, W, 3]``) as PNG and return its path."""
    target = prepare_output(path, (".png",))
    (picture if isinstance(picture, Image.Image) else Image.fromarray(picture)).save(target, format="PNG")
    return target


def caption(frame: np.ndarray, text: str) -> np.ndarray:
    """Return a copy of a frame ``[H, W, 3]`` with a line of text in its lower left corner."""
    image = Image.fromarray(frame)
    size = max(11, frame.shape[0] // 18)
    ImageDraw.Draw(image).text(
        (size * 0.7, frame.shape[0] - size * 0.6),
        text,
        (255, 255, 255),
        _font(size),
        anchor="ls",
        stroke_width=2,
        stroke_fill=_INK,
    )
    return np.asarray(image)


# MERGED episodes: Rolling a policy for a number of episodes, one step at a time, so that a caller can watch.


ActionSource = Callable[[TensorDict], Tensor]


@dataclass(frozen=True)
class Episode:
    """What became of one episode."""

    env: int
    """Index of the env it ran in."""
    total_reward: float
    """Sum of its rewards."""
    length: int
    """Number of its steps."""
    success: bool | None
    """Whether it ended in success; ``None`` where the environment does not say."""


@dataclass(frozen=True)
class Step:
    """The moment between two steps: ``obs`` belongs to the state the envs are in now."""

    obs: TensorDict
    """Observation of all envs; of those that just ended, the first of the next episode."""
    final_obs: TensorDict
    """What each env last saw before it was reset, if it was."""
    ended: list[Episode]
    """The episodes that ended with the last step and count."""


@dataclass(frozen=True)
class Summary:
    """Averages over episodes."""

    episodes: int
    mean_return: float
    std_return: float
    mean_length: float
    success_rate: float | None

    @staticmethod
    def of(episodes: Sequence[Episode]) -> Summary:
        """Summarise at least one episode."""
        if not episodes:
            raise ValueError("expected at least one episode, got none")
        returns = torch.tensor([e.total_reward for e in episodes], dtype=torch.float64)
        known = [e.success for e in episodes if e.success is not None]
        return Summary(
            episodes=len(episodes),
            mean_return=float(returns.mean()),
            std_return=float(returns.std(correction=0)),
            mean_length=sum(e.length for e in episodes) / len(episodes),
            success_rate=sum(known) / len(known) if known else None,
        )


def roll(env: VecEnv, act: ActionSource, episodes: int, seed: int | None = None) -> Iterator[Step]:
    """Reset, then step until ``episodes`` episodes have ended; yield the start and every moment after a step.

    Each env runs its share of the episodes, so that short ones do not count more often than long ones.
    """
    if episodes < 1:
        raise ValueError(f"episodes must be at least 1, got {episodes}")
    share = torch.full((env.num_envs,), episodes // env.num_envs)
    share[: episodes % env.num_envs] += 1
    total = torch.zeros(env.num_envs, dtype=torch.float64)
    length = torch.zeros(env.num_envs, dtype=torch.int64)
    obs, _ = env.reset(seed=seed)
    yield Step(obs, obs, [])
    while bool((share > 0).any()):
        obs, reward, terminated, truncated, info = env.step(act(obs))
        total += reward.to("cpu", torch.float64)
        length += info["chunk"]["num_actions"].cpu() if "chunk" in info else 1
        done = (terminated | truncated).cpu()
        ended = _ended(done & (share > 0), total, length, info["metrics"].get("success")) if bool(done.any()) else []
        share -= done.to(share.dtype)
        total[done], length[done] = 0.0, 0
        yield Step(obs, info["final_observation"], ended)


def _ended(counted: Tensor, total: Tensor, length: Tensor, success: Tensor | None) -> list[Episode]:
    ids = torch.nonzero(counted).reshape(-1)
    flags = [None] * len(ids) if success is None else (success.cpu()[ids] > 0.5).tolist()
    rows = zip(ids.tolist(), total[ids].tolist(), length[ids].tolist(), flags, strict=True)
    return [Episode(*row) for row in rows]


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
