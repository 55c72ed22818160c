"""``embodichain dataset``: look at folders, and make new ones of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from embodichain.agents.datasets.frames import Episode, FrameLayout, Leaf
from embodichain.cli.main import main
from embodichain.envs.gl_backend import choose_backend
from embodichain.errors import RenderingError

pytest.importorskip("pyarrow", reason="needs the extra 'data'")
pytest.importorskip("av", reason="needs the extra 'data'")

from embodichain.agents.datasets.lerobot import LeRobotReader, LeRobotWriter, psnr

pytestmark = pytest.mark.extra("data")

LAYOUT = FrameLayout(
    (
        Leaf(("observation", "robot", "qpos"), torch.float32, (2,)),
        Leaf(("observation", "image", "front"), torch.uint8, (32, 48, 3)),
        Leaf(("action",), torch.float32, (1,)),
        Leaf(("reward",), torch.float32, ()),
        Leaf(("terminated",), torch.bool, ()),
        Leaf(("truncated",), torch.bool, ()),
    )
)
CAMERA = ("observation", "image", "front")
TASKS = ["lift it", "lower it", "lift it", "turn it", "lift it", "lower it"]


def an_episode(number: int) -> Episode:
    length = 4 + number
    numbers = torch.arange(length, dtype=torch.float32)
    ends = torch.arange(length) == length - 1
    frames = {
        LAYOUT.leaves[0].key: torch.stack((numbers, torch.full_like(numbers, float(number))), dim=1),
        CAMERA: (40 * number + 2 * numbers).to(torch.uint8).view(-1, 1, 1, 1).expand(length, 32, 48, 3),
        ("action",): -numbers[:, None],
        ("reward",): torch.ones(length),
        ("terminated",): ends,
        ("truncated",): torch.zeros(length, dtype=torch.bool),
    }
    pieces = {key: (value,) for key, value in frames.items()}
    return Episode(pieces, length, seed=100 + number, success=number % 2 == 0, task=TASKS[number])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    names = {("observation", "robot", "qpos"): ["lift", "turn"]}
    with LeRobotWriter(tmp_path / "set", LAYOUT, 10, "none", "arm", names=names) as writer:
        for number in range(6):
            writer.add(an_episode(number))
    return tmp_path / "set"


def run(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> str:
    assert main(["dataset", *map(str, words)]) == code
    out, err = capsys.readouterr()
    return out if code == 0 else err


def numbers_of(folder: Path) -> list[int]:
    """Return which episodes a folder holds; every frame is compared with what was written."""
    reader, found = LeRobotReader(folder), []
    for index in range(len(reader)):
        episode = reader.read(index)
        own = ("observation", "robot", "qpos")
        state = own if own in episode.frames else ("observation", "state")
        number = int(torch.cat(episode.frames[state])[0, 1])
        whole = an_episode(number)
        assert torch.equal(torch.cat(episode.frames[state]), torch.cat(whole.frames[own]))
        for key in (("action",), ("reward",), ("terminated",)):
            assert torch.equal(torch.cat(episode.frames[key]), torch.cat(whole.frames[key])), key
        assert psnr(torch.cat(episode.frames[CAMERA]), torch.cat(whole.frames[CAMERA])) > 35
        assert episode.task == TASKS[number]
        found.append(number)
    return found


def test_info_and_view_say_what_is_there(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    said = run(capsys, "info", folder)
    for words in ("v3.0", "6 episodes (4 to 9 frames each), 39 frames", "robot: arm", "3 of 6 episodes", "lift, turn"):
        assert words in said
    assert [line.split()[-2:] for line in said.splitlines() if line.startswith("lift it")] == [["3", "18"]]
    said = run(capsys, "view", folder, 2, "--out", tmp_path / "sheet.png")
    assert "6 frames, 0.6 s, return 6.00, success, seed 102" in said
    sheet = np.asarray(Image.open(tmp_path / "sheet.png").convert("RGB"))
    assert (sheet == [80, 80, 80]).all(axis=2).sum() > 1000  # the first image of the episode
    run(capsys, "view", folder, 2, "--out", tmp_path / "film.mp4")
    assert (tmp_path / "film.mp4").stat().st_size > 500
    assert "episodes 0 to 5, got 6" in run(capsys, "view", folder, 6, code=2)


def test_merged_videos_are_copied_as_they_are(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder.with_name("twice")
    run(capsys, "merge", folder, folder, "--out", out)
    assert numbers_of(out) == [*range(6), *range(6)]
    video = "videos/observation.images.front/chunk-000/file-000.mp4"
    assert (out / video).read_bytes() == (folder / video).read_bytes()
    reader = LeRobotReader(out)
    assert [reader.read(i).seed for i in (0, 11)] == [100, 105]
    stats = [json.loads((root / "meta/stats.json").read_text())["observation.state"] for root in (folder, out)]
    assert stats[0]["mean"] == pytest.approx(stats[1]["mean"])
    assert stats[1]["count"] == [78]


def test_split_and_filter_choose_episodes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "split", folder, "--into", "train=0.5", "val=0.5", "--seed", 3)
    parts = [numbers_of(folder.with_name(f"set_{name}")) for name in ("train", "val")]
    assert sorted(parts[0] + parts[1]) == list(range(6))
    assert parts != [[0, 1, 2], [3, 4, 5]]
    assert LeRobotReader(folder.with_name("set_val")).names[("observation", "robot", "qpos")] == ["lift", "turn"]
    said = run(capsys, "split", folder, "--into", "first=0.5", "val=0.5", code=2)
    assert "set_val exists and is not an empty folder" in said
    assert not folder.with_name("set_first").exists()  # nothing is written by halves
    out = folder.with_name("some")
    said = run(
        capsys, "filter", folder, "--out", out, "--task", "LIFT", "--success", "--episodes", "1:6", "--max-length", 8
    )
    assert numbers_of(out) == [2, 4]
    assert "of 6 episodes, the length drops 1, " in said
    assert "--task drops 3" in said
    assert "--success drops 3" in said


def test_statistics_that_are_wrong_are_noticed_and_replaced(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert "differ" not in run(capsys, "stats", folder)
    file = folder / "meta/stats.json"
    stats = json.loads(file.read_text())
    stats["action"]["mean"] = [7.0]
    file.write_text(json.dumps(stats))
    assert "1 of 6 features differ" in run(capsys, "stats", folder)
    run(capsys, "stats", folder, "--write")
    assert json.loads(file.read_text())["action"]["mean"] == pytest.approx([-2.974], abs=1e-3)


def test_folders_of_others_keep_their_names_and_all_numbers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "meta/embodichain.json").unlink()
    out = folder.with_name("few")
    run(capsys, "filter", folder, "--out", out, "--min-length", 8)
    features = [json.loads((root / "meta/info.json").read_text())["features"] for root in (folder, out)]
    assert features[0].keys() == features[1].keys()
    assert features[0]["next.done"]["dtype"] == "bool"
    assert not (out / "meta/embodichain.json").exists()
    assert list(numbers_of(out)) == [4, 5]


def test_a_rate_that_is_no_whole_number_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with LeRobotWriter(tmp_path / "set", LAYOUT, 29.97, "none", "arm") as writer:
        for number in range(6):
            writer.add(an_episode(number))
    for name, words in {"copied": ("--min-length", 1), "encoded again": ("--task", "lift it")}.items():
        run(capsys, "filter", tmp_path / "set", "--out", tmp_path / name, *words)
        assert LeRobotReader(tmp_path / name).fps == 29.97
        assert numbers_of(tmp_path / name) == ([0, 1, 2, 3, 4, 5] if name == "copied" else [0, 2, 4])


def test_merged_folders_keep_their_scene_unless_it_would_be_drawn_differently(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(root: Path, **changes: Any) -> str:
        settings = {"id": "PickCubeRL", "num_envs": 4, "seed": 0, "env": {"terminate_on_success": True, "substeps": 5}}
        text = json.dumps({"gym_config": settings | changes})
        (root / "meta/embodichain_scene.json").write_text(text)
        return text

    other, same, mixed, none = (folder.with_name(name) for name in ("other", "same", "mixed", "none"))
    run(capsys, "filter", folder, "--out", other)
    first, task = write(folder), {"terminate_on_success": False, "substeps": 5}
    write(other, num_envs=1, seed=3, max_episode_steps=9, num_threads=1, device="cuda", env=task)
    assert "no scene" not in run(capsys, "merge", folder, other, "--out", same)
    assert (same / "meta/embodichain_scene.json").read_text() == first
    write(other, id="ReachRL")
    assert run(capsys, "merge", folder, other, "--out", mixed).count("no scene was kept") == 1
    assert not (mixed / "meta/embodichain_scene.json").exists()
    for root in (folder, other):
        (root / "meta/embodichain_scene.json").unlink()
    assert "no scene" not in run(capsys, "merge", folder, other, "--out", none)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["merge", "{set}", "{other}", "--out", "{new}"], r"other, unlike .*set: 20 frames per second, not 10"),
        (["merge", "--out", "{new}"], "folders to merge, got none"),
        (["filter", "{set}", "--out", "{new}", "--task", "fly"], "no episode of .* is left: --task drops 6"),
        (["filter", "{set}", "--out", "{new}", "--episodes", "a"], "--episodes: expected numbers and ranges"),
        (["split", "{set}", "--into", "half"], "--into: expected NAME=SHARE"),
        (["split", "{set}", "--into", "../a=0.5"], "--into: expected NAME=SHARE"),
        (["split", "{set}", "--into", "a=nan"], "--into: expected NAME=SHARE"),
        (["split", "{set}", "--into", "a=0.5", "a=0.5"], "two parts with the name 'a'"),
        (["split", "{set}", "--into", "a=0.9", "b=0.3"], "shares that add up to at most 1"),
        (["info", "{new}"], "new is no LeRobotDataset: there is no such folder"),
        (["merge", "{set}", "{new}", "--out", "{new}"], "new is no LeRobotDataset: there is no such folder"),
        (["filter", "{set}", "--out", "{set}"], "exists and is not an empty folder"),
    ],
)
def test_what_cannot_be_done_is_one_message(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    import re

    other = folder.with_name("other")
    with LeRobotWriter(other, LAYOUT, 20, "none", "arm") as writer:
        writer.add(an_episode(0))
    places: dict[str, Any] = {"set": folder, "other": other, "new": folder.with_name("new")}
    err = run(capsys, *[word.format(**places) for word in words], code=2)
    assert re.search(said, err), err
    assert not places["new"].exists()


SEEN = ("observation", "segmentation", "front")


def segmented(folder: Path, bodies: list[str] | None) -> Path:
    """A folder of one episode in which a camera sees ids."""
    layout = FrameLayout((*LAYOUT.leaves, Leaf(SEEN, torch.int32, (2, 3, 1))))
    names = {("observation", "robot", "qpos"): ["lift", "turn"]} | ({SEEN: bodies} if bodies else {})
    episode = an_episode(0)
    ids = (torch.arange(6, dtype=torch.int32) % 3).view(1, 2, 3, 1).expand(episode.length, 2, 3, 1)
    with LeRobotWriter(folder, layout, 10, "none", "arm", names=names) as writer:
        writer.add(Episode({**episode.frames, SEEN: (ids,)}, episode.length, 1, True, task="lift it"))
    return folder


def test_ids_of_segmentations_have_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bodies = ["background", "world", "cube"]
    folder = segmented(tmp_path / "set", bodies)
    entry = json.loads((folder / "meta" / "info.json").read_text())["features"]["observation.segmentation.front"]
    assert entry == {"dtype": "int32", "shape": [2, 3, 1], "names": None, "info": {"segmentation.names": bodies}}
    assert LeRobotReader(folder).names[SEEN] == bodies
    assert LeRobotReader(folder).names["observation", "robot", "qpos"] == ["lift", "turn"]
    assert "ids of observation.segmentation.front: 0 background, 1 world, 2 cube" in run(capsys, "info", folder)
    run(capsys, "merge", folder, folder, "--out", tmp_path / "twice")
    assert LeRobotReader(tmp_path / "twice").names[SEEN] == bodies
    other = segmented(tmp_path / "other", ["background", "world", "drawer"])
    told = run(capsys, "merge", folder, other, "--out", tmp_path / "both", code=2)
    assert "the ids of observation.segmentation.front are of other bodies" in told
    unnamed = segmented(tmp_path / "unnamed", None)
    told = run(capsys, "merge", folder, unnamed, "--out", tmp_path / "both", code=2)
    assert "it is not known of which bodies the ids of observation.segmentation.front are" in told


@pytest.fixture
def needs_gl() -> None:
    try:
        choose_backend()
    except RenderingError as error:
        pytest.skip(str(error))


def test_recordings_name_what_cameras_see(tmp_path: Path, needs_gl: None) -> None:
    camera = {"name": "top", "height": 8, "width": 12, "outputs": ["rgb", "segmentation"]}
    config = tmp_path / "reach.json"
    config.write_text(json.dumps({"id": "PushCubeRL", "env": {"observations": {"cameras": [camera]}}}))
    small = ["--gym_config.num_envs", "1", "--gym_config.max_episode_steps", "3"]
    words = [*small, "--episodes", "1", "--action_config.only_success", "false"]
    assert main(["record", str(config), "--out", str(tmp_path / "set"), *words]) == 0
    reader = LeRobotReader(tmp_path / "set")
    names = reader.names["observation", "segmentation", "top"]
    assert names[:2] == ["background", "world"]
    assert "cube" in names
    assert int(torch.cat(reader.read(0).frames["observation", "segmentation", "top"]).max()) < len(names)
