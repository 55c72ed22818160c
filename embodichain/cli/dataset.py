"""``embodichain dataset info|view|merge|split|filter|stats``: inspect LeRobot folders, and make new ones from them."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

from embodichain.cli.options import loading, parse_options
from embodichain.errors import DatasetError, writing

if TYPE_CHECKING:
    from embodichain.agents.datasets.lerobot.editing import EpisodeFacts
    from embodichain.agents.datasets.lerobot.reader import LeRobotReader

Folder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
_SHOWN_STATISTICS = ("min", "max", "mean", "std")
_ROUNDED, _COMPRESSED = 1e-4, 0.05
"""Tolerances for statistics of numbers, and of images, whose videos are compressed."""
_NUMBER = re.compile(r"\d*\.?\d+([eE][+-]?\d+)?|\d+\.")
_MOST_NUMBERS = 16
"""Maximum number of components shown per vector."""


@dataclass(frozen=True)
class InfoArgs:
    """Show what is in a dataset: version, robot, episodes, tasks and features."""

    folder: Folder
    """A LeRobotDataset folder (v3.0, v2.1 or v2.0)."""


@dataclass(frozen=True)
class ViewArgs:
    """Describe an episode; draw it as a sheet of images and curves (.png), or export its cameras (.mp4)."""

    folder: Folder
    """A LeRobotDataset folder."""
    episode: Annotated[int, tyro.conf.Positional] = 0
    """Index of the episode."""
    out: Path | None = None
    """Output file: .png, .mp4, .mkv or .mov."""


@dataclass(frozen=True)
class MergeArgs:
    """Merge the episodes of several datasets with the same features into a new one."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """Folders to merge, in this order."""
    out: Path
    """New folder."""
    quality: int = 18
    """Quality of videos that must be re-encoded: 0 is lossless, 51 the worst."""


@dataclass(frozen=True)
class SplitArgs:
    """Split the episodes of a dataset into new ones, such as DIR_train and DIR_val."""

    folder: Folder
    """A LeRobotDataset folder."""
    into: tuple[str, ...] = ("train=0.8", "val=0.2")
    """Names and shares of the parts."""
    out: Path | None = None
    """Prefix of the new folders (default: the folder's own name)."""
    seed: int = 0
    """Seed of the random assignment of episodes."""
    in_order: bool = False
    """Keep the order of the episodes instead."""
    quality: int = 18
    """Quality of videos that must be re-encoded."""


@dataclass(frozen=True)
class FilterArgs:
    """Write the episodes of a dataset that meet all conditions to a new one."""

    folder: Folder
    """A LeRobotDataset folder."""
    out: Path
    """New folder."""
    success: bool = False
    """Keep only episodes that solved the task."""
    task: tuple[str, ...] = ()
    """Keep only episodes whose task contains one of these words, ignoring case."""
    min_length: int = 1
    """Minimum number of frames of an episode."""
    max_length: int | None = None
    """Maximum number of frames of an episode."""
    episodes: str | None = None
    """Keep only these episodes: indices and ranges, such as 0:10,15."""
    exclude: str | None = None
    """Drop these episodes."""
    quality: int = 18
    """Quality of videos that must be re-encoded."""


@dataclass(frozen=True)
class StatsArgs:
    """Compute the statistics of every feature from its frames, and compare them with those in the folder."""

    folder: Folder
    """A LeRobotDataset folder."""
    write: bool = False
    """Write them to meta/stats.json."""


Args = (
    Annotated[InfoArgs, tyro.conf.subcommand("info", prefix_name=False)]
    | Annotated[ViewArgs, tyro.conf.subcommand("view", prefix_name=False)]
    | Annotated[MergeArgs, tyro.conf.subcommand("merge", prefix_name=False)]
    | Annotated[SplitArgs, tyro.conf.subcommand("split", prefix_name=False)]
    | Annotated[FilterArgs, tyro.conf.subcommand("filter", prefix_name=False)]
    | Annotated[StatsArgs, tyro.conf.subcommand("stats", prefix_name=False)]
)


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    args: Any = parse_options(Args, argv, "embodichain dataset")  # type: ignore[arg-type] # a union
    with loading():
        from embodichain.agents.datasets.lerobot import LeRobotReader

    console = Console()
    for folder in args.folders if isinstance(args, MergeArgs) else (args.folder,):
        if not folder.exists():
            raise DatasetError(f"{folder} is no LeRobotDataset: there is no such folder")
    if isinstance(args, MergeArgs):
        return _merge(console, args)
    if isinstance(args, SplitArgs | FilterArgs):
        return (_split if isinstance(args, SplitArgs) else _filter)(console, args)  # type: ignore[arg-type]
    if isinstance(args, StatsArgs):
        return _stats(console, args)
    reader = LeRobotReader(args.folder)
    return _info(console, reader) if isinstance(args, InfoArgs) else _view(console, reader, args)


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _info(console: Console, reader: LeRobotReader) -> int:
    from embodichain.agents.datasets.lerobot.editing import episode_facts, left_out

    info, facts = reader.info, episode_facts(reader)
    frames, size = sum(reader.lengths), sum(f.stat().st_size for f in reader.root.rglob("*") if f.is_file())
    origin = "recorded by embodichain" if reader.is_own else "recorded elsewhere"
    _say(console, f"{reader.root}: LeRobotDataset {info.codebase_version}, {origin}, {size / 1e6:,.1f} MB")
    seconds = f"{frames / reader.fps:,.1f} s at {reader.fps:g} frames per second"
    lengths = f"{min(reader.lengths)} to {max(reader.lengths)} frames each"
    _say(console, f"{len(reader):,} episodes ({lengths}), {frames:,} frames, {seconds}")
    _say(console, f"robot: {info.robot_type or 'not named'}")
    known = [fact.success for fact in facts if fact.success is not None]
    if known:
        _say(console, f"success: {sum(known)} of {len(known)} episodes ({sum(known) / len(known):.1%})")
    table = Table("task", "episodes", "frames", box=None, header_style="bold", pad_edge=False)
    counts, length = Counter(fact.task for fact in facts), Counter[str | None]()
    for fact in facts:
        length[fact.task] += fact.length
    for task, count in counts.most_common():
        table.add_row(task or "(none)", f"{count:,}", f"{length[task]:,}")
    console.print(table)
    table = Table("feature", "type", "shape", "names", box=None, header_style="bold", pad_edge=False)
    for name, entry in info.features.items():
        names = entry.vector_names or []
        short = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        table.add_row(name, entry.dtype, "x".join(map(str, entry.shape)), short)
    console.print(table)
    for name, entry in info.features.items():
        if entry.id_names:
            _say(console, f"ids of {name}: {', '.join(f'{i} {body}' for i, body in enumerate(entry.id_names))}")
    if missing := left_out(reader):
        _say(console, f"not read here: {', '.join(missing)}")
    return 0


def _view(console: Console, reader: LeRobotReader, args: ViewArgs) -> int:
    from embodichain.agents.datasets.lerobot.visualization import contact_sheet, film

    if not 0 <= args.episode < len(reader):
        raise DatasetError(f"{args.folder} has the episodes 0 to {len(reader) - 1}, got {args.episode}")
    episode = reader.read(args.episode)
    reward = sum(float(piece.sum()) for piece in episode.frames.get(("reward",), ()))
    outcome = {True: ", success", False: ", no success", None: ""}[episode.success]
    seed = "" if episode.seed < 0 else f", seed {episode.seed}"
    _say(console, f"episode {args.episode} of {args.folder}: {episode.task or 'no task'}")
    _say(console, f"{episode.length} frames, {episode.length / reader.fps:.1f} s, return {reward:.2f}{outcome}{seed}")
    if args.out is None:
        _say(console, "--out FILE.png draws it, --out FILE.mp4 shows its cameras; embodichain view opens a browser")
        return 0
    draw = contact_sheet if args.out.suffix.lower() == ".png" else film
    title = f"episode {args.episode}" + (f": {episode.task}" if episode.task else "")
    _say(console, f"wrote {draw(reader, episode, args.out, title)}")
    return 0


def _write(console: Console, out: Path, parts: Sequence[tuple[LeRobotReader, Sequence[int]]], quality: int) -> None:
    from embodichain.agents.datasets.lerobot.editing import left_out, loses_scene, write_dataset

    total = sum(len(chosen) for _, chosen in parts)
    frames = 0
    for episode in track(write_dataset(out, parts, quality), "writing", total, console=console, transient=True):
        frames += episode.length
    _say(console, f"{out}: {total:,} episodes, {frames:,} frames")
    if missing := left_out(parts[0][0]):
        _say(console, f"left out, as they are neither numbers nor RGB images: {', '.join(missing)}")
    if loses_scene(out, parts):
        _say(console, "no scene was kept, as the folders do not all have the same one: the viewer shows no 3D")


def _merge(console: Console, args: MergeArgs) -> int:
    from embodichain.agents.datasets.lerobot.editing import open_folders

    if not args.folders:
        raise DatasetError("expected the folders to merge, got none")
    readers = open_folders(args.folders)
    _write(console, args.out, [(reader, range(len(reader))) for reader in readers], args.quality)
    return 0


def _split(console: Console, args: SplitArgs) -> int:
    from embodichain.agents.datasets.lerobot.editing import open_folders, split_episodes

    shares: dict[str, float] = {}
    for part in args.into:
        name, _, share = part.partition("=")
        if not re.fullmatch(r"[\w.+-]+", name) or not _NUMBER.fullmatch(share):
            raise DatasetError(f"--into: expected NAME=SHARE, such as train=0.8, got {part!r}")
        if name in shares:
            raise DatasetError(f"--into: there are two parts with the name {name!r}")
        shares[name] = float(share)
    (reader,) = open_folders([args.folder])
    parts = split_episodes(len(reader), shares, None if args.in_order else args.seed)
    if empty := [name for name, chosen in parts.items() if not chosen]:
        raise DatasetError(f"--into: no episode of {len(reader)} is left for {', '.join(empty)}")
    base = args.out or args.folder
    base = base.resolve() if base.name in ("", "..") else base
    folders = {name: base.with_name(f"{base.name}_{name}") for name in parts}
    for folder in folders.values():  # before writing any of them
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise DatasetError(f"{folder} exists and is not an empty folder: choose another --out or other names")
    for name, chosen in parts.items():
        _write(console, folders[name], [(reader, chosen)], args.quality)
    return 0


def _filter(console: Console, args: FilterArgs) -> int:
    from embodichain.agents.datasets.lerobot.editing import episode_facts, filter_episodes, open_folders

    (reader,) = open_folders([args.folder])
    facts = episode_facts(reader)
    if args.success and all(fact.success is None for fact in facts):
        raise DatasetError(f"--success: {args.folder} does not say which episodes succeeded")
    longest = max(reader.lengths) if args.max_length is None else args.max_length
    conditions: dict[str, Callable[[EpisodeFacts], bool]] = {
        "length": lambda fact: args.min_length <= fact.length <= longest
    }
    if args.success:
        conditions["success"] = lambda fact: bool(fact.success)
    if args.task:
        conditions["task"] = lambda fact: any(word.lower() in (fact.task or "").lower() for word in args.task)
    for name, text, wanted in (("episodes", args.episodes, True), ("exclude", args.exclude, False)):
        if text is not None:
            numbers = _numbers(text, len(reader), f"--{name}")
            conditions[name] = lambda fact, numbers=numbers, wanted=wanted: (fact.index in numbers) == wanted  # type: ignore[misc]
    shown = {name: f"--{name}" for name in conditions} | {"length": "the length"}
    chosen, dropped = filter_episodes(facts, conditions)
    reasons = ", ".join(f"{shown[name]} drops {count}" for name, count in dropped.items() if count)
    if not chosen:
        raise DatasetError(f"no episode of {args.folder} is left: {reasons}")
    _write(console, args.out, [(reader, chosen)], args.quality)
    if reasons:
        _say(console, f"of {len(reader):,} episodes, {reasons}")
    return 0


def _numbers(text: str, count: int, flag: str) -> set[int]:
    """Parse indices and ranges: ``0:10,15``."""
    found: set[int] = set()
    for part in text.split(","):
        first, colon, last = part.partition(":")
        try:
            begin = int(first) if first or not colon else 0
            found |= set(range(begin, (int(last) if last else count) if colon else begin + 1))
        except ValueError:
            raise DatasetError(f"{flag}: expected numbers and ranges, such as 0:10,15, got {text!r}") from None
    if outside := sorted(number for number in found if not 0 <= number < count):
        raise DatasetError(f"{flag}: there are the episodes 0 to {count - 1}, got {outside[0]}")
    return found


def _stats(console: Console, args: StatsArgs) -> int:
    import numpy as np

    from embodichain.agents.datasets.lerobot.editing import open_folders, statistics_of
    from embodichain.agents.datasets.lerobot.format import STATS_PATH

    (reader,) = open_folders([args.folder])
    found = statistics_of(reader)
    file = args.folder / STATS_PATH
    try:
        known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise DatasetError(f"{file} cannot be read: {error}; --write replaces it") from error
    feature = Column("feature", no_wrap=True, min_width=max(map(len, found)))
    table = Table(feature, "", *_SHOWN_STATISTICS, "stats.json", box=None, header_style="bold", pad_edge=False)
    wrong, cameras = [], {feature.name for feature in reader.features if feature.is_camera}
    for name, entry in found.items():
        verdict = _verdict(entry, known.get(name), _COMPRESSED if name in cameras else _ROUNDED)
        wrong += [name] if verdict != "equal" else []
        names, columns = reader.info.features[name].vector_names, [np.ravel(entry[k]) for k in _SHOWN_STATISTICS]
        for i, numbers in enumerate(list(zip(*columns, strict=True))[:_MOST_NUMBERS]):
            about = (name, names[i] if names else str(i), *(f"{number:.4g}" for number in numbers))
            table.add_row(*about if i == 0 else ("", *about[1:]), verdict if i == 0 else "")
        if len(columns[0]) > _MOST_NUMBERS:
            table.add_row("", f"... {len(columns[0])} in all")
    console.print(table)
    if args.write and (wrong or not known):
        with writing(file):
            file.write_text(json.dumps({**known, **found}, indent=2) + "\n", encoding="utf-8")
        _say(console, f"wrote {file}")
    elif wrong:
        _say(console, f"{len(wrong)} of {len(found)} features differ from {file}; --write replaces them")
    return 0


def _verdict(entry: dict[str, Any], known: Any, tolerance: float) -> str:
    """Return how statistics compare with those of the folder: missing, damaged, equal or differs."""
    import numpy as np

    if not isinstance(known, dict):
        return "missing"
    try:
        alike = all(
            np.allclose(np.ravel(entry[kind]), np.ravel(known[kind]), rtol=1e-3, atol=tolerance)
            for kind in _SHOWN_STATISTICS
        )
    except (KeyError, TypeError, ValueError):
        return "damaged"
    return "equal" if alike else "differs"
