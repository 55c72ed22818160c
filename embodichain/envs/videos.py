"""Video files, written frame by frame, and the check that a file can be written at all."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import imageio.v2 as imageio
import numpy as np

from embodichain.errors import OutputError

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
