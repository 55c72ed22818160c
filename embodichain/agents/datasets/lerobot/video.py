"""The mp4 files of a dataset: pictures of many episodes, one after the other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embodichain.agents.datasets.lerobot.features import Feature
from embodichain.errors import DatasetError
from embodichain.extras import require

CODEC = "h264"
Pictures = NDArray[np.uint8]


class VideoFile:
    """Writes pictures ``[n, height, width, 3]`` to an mp4 file."""

    def __init__(self, path: Path, feature: Feature, fps: int, quality: int) -> None:
        self._av = require("av", extra="data")
        path.parent.mkdir(parents=True, exist_ok=True)
        self.frames = 0
        self.nbytes = 0
        self._container = self._av.open(str(path), "w")
        # Two frames per group: any frame is found without decoding many others.
        self._stream = self._container.add_stream("libx264", rate=fps, options={"crf": str(quality), "g": "2"})
        self._stream.height, self._stream.width = feature.size
        self._stream.pix_fmt = feature.pixel_format

    def append(self, pictures: Pictures) -> None:
        """Add pictures at the end."""
        for picture in pictures:
            frame = self._av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
            packets = self._stream.encode(frame)
            self.nbytes += sum(packet.size for packet in packets)
            self._container.mux(packets)
        self.frames += len(pictures)

    def close(self) -> None:
        """Finish the file."""
        self._container.mux(self._stream.encode())
        self._container.close()


def read_pictures(path: Path, start_seconds: float, count: int, fps: int) -> Pictures:
    """Return ``count`` pictures ``[count, height, width, 3]`` from a moment of a video on."""
    av = require("av", extra="data")
    pictures = []
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        container.seek(int(start_seconds / stream.time_base), stream=stream)
        for frame in container.decode(stream):
            if frame.time is not None and frame.time < start_seconds - 0.5 / fps:
                continue  # between the key frame before and the moment itself
            pictures.append(frame.to_ndarray(format="rgb24"))
            if len(pictures) == count:
                return np.stack(pictures)
    raise DatasetError(
        f"{path} ends too early: expected {count} frames from {start_seconds:.3f} s on, got {len(pictures)}"
    )
