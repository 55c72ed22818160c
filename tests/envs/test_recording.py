"""Videos that can be read again, and trajectory plots that show what happened."""

import imageio.v3 as iio
import numpy as np
import pytest
from PIL import Image

from embodichain.envs.recording import (
    BLUE,
    GREEN,
    ORANGE,
    VideoWriter,
    caption,
    plot_trajectories,
    write_image,
)
from embodichain.errors import OutputError


def moving_square(count, height=48, width=64):
    frames = np.zeros((count, height, width, 3), dtype=np.uint8)
    for i, frame in enumerate(frames):
        frame[10:30, i : i + 20] = (250, 40, 40)
    return frames


def write_video(path, frames, fps=30.0):
    video, keep = VideoWriter(path, fps), False
    try:
        for frame in frames:
            video.append(frame)
        keep = True
    finally:
        video.close(keep)
    return video.path


def test_video_is_read_back_frame_by_frame(tmp_path):
    frames = moving_square(12)
    path = write_video(tmp_path / "new" / "folder" / "clip.mp4", frames, fps=25)
    read = iio.imread(path)
    assert read.shape == frames.shape
    assert iio.immeta(path)["fps"] == 25
    assert np.abs(read.astype(int) - frames).mean() < 6  # lossy, but the same images in the same order
    assert [p.name for p in path.parent.iterdir()] == ["clip.mp4"]


def test_odd_sizes_are_filled_up(tmp_path):
    path = write_video(tmp_path / "odd.mp4", moving_square(3, height=47, width=63))
    assert iio.imread(path).shape == (3, 48, 64, 3)


def test_unfinished_video_leaves_nothing_and_keeps_the_old_one(tmp_path):
    path = write_video(tmp_path / "clip.mp4", moving_square(3))
    before = path.read_bytes()

    def interrupted():
        yield moving_square(1)[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_video(path, interrupted())
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["clip.mp4"]


def test_wrong_frames_are_refused(tmp_path):
    write_video(tmp_path / "none.mp4", [])
    with pytest.raises(ValueError, match=r"\[H, W, 3\]"):
        write_video(tmp_path / "grey.mp4", [np.zeros((8, 8), dtype=np.uint8)])
    with pytest.raises(ValueError, match=r"\[48, 64, 3\] as the first"):
        write_video(tmp_path / "mixed.mp4", [moving_square(1)[0], moving_square(1, height=50)[0]])
    assert list(tmp_path.iterdir()) == []


def test_places_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder.mp4").mkdir()
    with pytest.raises(OutputError, match=r"cannot write to .*: .*Choose another place"):
        VideoWriter(tmp_path / "file" / "clip.mp4")
    with pytest.raises(OutputError, match="a folder of that name"):
        VideoWriter(tmp_path / "folder.mp4")
    with pytest.raises(OutputError, match=r"ends in \.mp4"):
        VideoWriter(tmp_path / "clip.avi")
    with pytest.raises(OutputError, match=r"ends in \.png"):
        write_image(tmp_path / "clip.jpg", moving_square(1)[0])


def pixels_of(image, color, tolerance=12):
    """Return the pixels ``[n, 2]`` (column, row) of a colour."""
    rgb = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    return np.argwhere((np.abs(image.astype(int) - rgb) <= tolerance).all(axis=2))[:, ::-1]


def test_trajectory_plot_is_to_scale(tmp_path):
    """Two dots lie apart as their ends do in metres: x to the right, y up, one scale."""
    ends = {"a": (BLUE, (0.30, 0.10)), "b": (ORANGE, (0.70, -0.10))}
    trajectories = {name: np.array([[0.5, 0.3], end]) for name, (_, end) in ends.items()}
    image = plot_trajectories(trajectories, (0.5, -0.2, 0.05), "title", size=(400, 600))
    assert image.shape == (400, 600, 3)
    assert image.dtype == np.uint8
    # The dot at the end of a trajectory is its lowest spot of full colour: they come from above, the legend is right.
    plotted = [pixels_of(image, color) for color, _ in ends.values()]
    plotted = [points[points[:, 0] < 410] for points in plotted]
    a, b = (points[points[:, 1] > points[:, 1].max() - 8].mean(axis=0) for points in plotted)
    assert b[0] > a[0]  # a larger x is further right
    assert b[1] > a[1]  # a larger y is further up
    assert (b - a)[0] / (b - a)[1] == pytest.approx(0.4 / 0.2, rel=0.05)
    assert len(pixels_of(image, "#ffffff")) > 0.5 * 400 * 600
    assert len(pixels_of(image, GREEN, tolerance=30)) > 0
    path = write_image(tmp_path / "plot.png", image)
    assert Image.open(path).size == (600, 400)


@pytest.mark.parametrize(
    "points",
    [np.empty((0, 2)), np.array([[0.2, 0.3]]), np.full((3, 2), 0.5), np.array([[0, 0], [np.nan, 1], [1, 1.0]])],
)
def test_trajectory_plot_of_few_points(points):
    assert plot_trajectories({"way": points}, size=(200, 300)).shape == (200, 300, 3)


def test_caption_marks_a_copy():
    frame = np.full((120, 160, 3), 90, dtype=np.uint8)
    marked = caption(frame, "episode 1")
    assert (frame == 90).all()
    assert (marked[-30:] != 90).any()
    assert (marked[:80] == 90).all()
