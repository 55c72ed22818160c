"""``embodichain stream CONFIG``: run simulation workers, sample from them, and show statistics."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import tyro
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from embodichain.cli.options import Trust, loading, parse_known_options, trusted_modules_in
from embodichain.config import load_config, parse_overrides
from embodichain.config.command_line import Schemas, positional_first
from embodichain.config.files import find_config, find_shipped
from embodichain.errors import writing
from embodichain.extras import check_trusted, config_folders, import_trusted, locate_trusted
from embodichain.utils.console import check_counts

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from embodichain.agents.engine import OnlineDataEngine, OnlineDataEngineCfg, StreamStats, WorkerStats

WINDOW_SECONDS = 30.0
"""Window of the rates: workers write in bursts, a whole buffer at a time."""
MAX_LINES = 40
"""Maximum number of lines of a table without a terminal."""
IDLE = "idle (buffer full)"
_SILENT_SECONDS = 2.0
"""Seconds without a heartbeat after which a worker is shown as silent."""
_NAME_LENGTH = 13
_LEFT = ("node", "worker", "state")
_COLUMNS = (*_LEFT, "episodes", "per s", "steps/s", "age", "restarts")
_ENVS, _ROWS_PER_ENV = 8, 4
Line = tuple[str, ...]
Args = TypeVar("Args", bound=Any)


@dataclass(frozen=True)
class StreamArgs:
    """Stream episodes and show statistics. Every setting of the engine is also a flag: --num_workers 2."""

    config: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG")]
    """File of engine settings, a gym_config.json, or the name of an environment."""
    duration: float | None = None
    """Seconds after which to stop; None runs until Ctrl-C."""
    batch_size: int = 32
    """Chunks per sampled batch."""
    chunk_size: int = 8
    """Steps per chunk."""
    rate: float = 50.0
    """Batches to sample per second; 0 samples none."""
    watch: bool = False
    """Show the state of every worker, by node."""
    tensorboard: Path | None = None
    """Folder for TensorBoard scalars of the stream and of every node."""
    viewer: bool = False
    """Show the environments of the workers in the browser."""
    trust: Trust = ()


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    args, cfg = parse_command(StreamArgs, "embodichain stream", argv)
    check_counts({"--batch-size": args.batch_size, "--chunk-size": args.chunk_size}, *_problems(args))

    from embodichain.agents.engine import OnlineDataEngine
    from embodichain.utils.console import shown_messages

    name = None if isinstance(cfg.gym_config, list) else cfg.gym_config.get("id")
    if name is not None and cfg.check().source == "random" and not _has_expert(name):
        policy = "--action_config.source policy --action_config.path RUN streams a policy"
        print(f"{name} has no scripted expert, so random actions are streamed; {policy}", file=sys.stderr, flush=True)
    if args.tensorboard is not None:
        with writing(args.tensorboard):
            args.tensorboard.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        stack.enter_context(shown_messages())
        if args.viewer:
            from embodichain.viewer.launch import viewer_beside

            print(f"viewer: {stack.enter_context(viewer_beside(args.config))}", file=sys.stderr, flush=True)
        watch(stack.enter_context(OnlineDataEngine(cfg)), args, Console())
    return 0


def _problems(args: StreamArgs) -> Iterator[str]:
    if args.duration is not None and not 0.0 < args.duration < math.inf:
        yield f"--duration: expected a number of seconds above 0, got {args.duration}; leave it out to run until Ctrl-C"
    if not 0.0 <= args.rate < math.inf:
        yield f"--rate: expected batches per second, at least 0, got {args.rate}"


def load_stream_config(source: str | os.PathLike[str]) -> OnlineDataEngineCfg:
    """Return the engine settings of a file (whose ``gym_config`` may be the path of another file), or defaults for the
    environment of a ``gym_config.json`` or of an id."""
    from embodichain.agents.engine.config import OnlineDataEngineCfg

    path = find_shipped(source)
    if path.suffix not in (".json", ".yaml", ".yml"):
        return _for_environment({"id": str(source), "num_envs": _ENVS})
    data = load_config(path)
    if "id" in data:
        return _for_environment(data, path)
    nested = data.get("gym_config")
    if isinstance(nested, str):
        data["gym_config"] = load_config(find_config(nested, path.parent))
    elif isinstance(nested, list):
        from embodichain.envs.multi_task import task_entries

        entries = task_entries(nested, path.parent)
        data["gym_config"] = [entry.gym_config | {"weight": entry.weight, "task": entry.words} for entry in entries]
    return OnlineDataEngineCfg.from_dict(data, source=str(source))


def _for_environment(gym_config: dict[str, Any], path: Path | None = None) -> OnlineDataEngineCfg:
    """Return settings for an environment (of a file): a few rows per env, and actions of its expert, if it has one."""
    from embodichain.agents.engine.config import OnlineDataEngineCfg
    from embodichain.envs.registration import load_gym_config

    cfg = load_gym_config(gym_config if path is None else path)
    settings: dict[str, Any] = {"gym_config": gym_config, "buffer_size": max(16, _ROWS_PER_ENV * cfg.num_envs)}
    if not _has_expert(cfg.id):
        settings["action_config"] = {"source": "random"}
    return OnlineDataEngineCfg.from_dict(settings, source=str(gym_config.get("id")))


def _has_expert(name: object) -> bool:
    """Return whether an id is that of a task with a scripted expert."""
    from embodichain.envs.registration import list_envs

    return any(spec.id == name and spec.task.has_expert() for spec in list_envs())


def parse_command(command: type[Args], prog: str, argv: Sequence[str]) -> tuple[Args, OnlineDataEngineCfg]:
    """Return the options of a command that runs simulation, and the engine settings, which are also flags.
    ``--help`` prints both, with the values of a config if one is given."""
    values = {field.name: 0 if field.type == "bool" else 1 for field in fields(command)}
    words = positional_first([word for word in argv if word not in ("-h", "--help")], values)
    wants_help = {"-h", "--help"} & set(argv)
    args, flags = (None, []) if wants_help else parse_known_options(command, words, prog)
    if wants_help:
        with suppress(SystemExit):
            tyro.cli(command, args=["--help"], prog=prog)
    with loading():
        from embodichain.agents.engine.config import ActionSourceCfg, OnlineDataEngineCfg
        from embodichain.envs.env_cfg import GymCfg
    schemas: Schemas = {("gym_config",): (GymCfg,), ("action_config",): (ActionSourceCfg,)}
    if args is not None:
        import_trusted(args.trust, config_folders(args.config))
        loaded = load_stream_config(args.config)
        if isinstance(loaded.gym_config, list):  # each task has its own settings
            schemas = {("action_config",): (ActionSourceCfg,)}
        cfg = parse_overrides(loaded.replace(trusted_modules=[]), flags, f"{prog} CONFIG", "", schemas)
        trusted = [*args.trust, *cfg.trusted_modules]  # from the command line: a file alone trusts nothing
        check_trusted(loaded.trusted_modules, trusted, str(args.config))
        return args, cfg.replace(trusted_modules=list(locate_trusted(trusted, config_folders(args.config))))
    given = [word for word in words[:1] if not word.startswith("-")]
    import_trusted(trusted_modules_in(words), config_folders(*given))
    cfg = load_stream_config(given[0]) if given else OnlineDataEngineCfg()
    where = f"as {given[0]} has them" if given else "and their defaults, which CONFIG changes"
    parse_overrides(cfg, ["--help"], f"{prog} CONFIG", f"The settings of the engine, {where}.", schemas)
    raise SystemExit(0)


def watch(engine: OnlineDataEngine, args: StreamArgs, console: Console) -> None:
    """Sample from a stream and show statistics until the duration is over; then show those of the whole run."""
    began = time.monotonic()

    def snapshot() -> Snapshot:
        workers = engine.worker_stats() if args.watch or args.tensorboard is not None else ()
        return Snapshot(time.monotonic() - began, engine.stats(), workers)

    history = History(snapshot())
    with ExitStack() as stack, suppress(KeyboardInterrupt):  # Ctrl-C is the normal way to end a stream
        screen = Live(view(history, args, console), console=console, transient=True)
        if console.is_terminal:
            stack.enter_context(screen)
        if args.tensorboard is not None:
            from torch.utils.tensorboard import SummaryWriter  # slow to import

            log = stack.enter_context(SummaryWriter(str(args.tensorboard)))
        while args.duration is None or time.monotonic() - began < args.duration:
            _draw(engine, args, seconds=1.0 if args.watch else 0.5)
            history.add(snapshot())
            screen.update(view(history, args, console))
            if args.tensorboard is not None:
                write_scalars(log, history.last)
    console.print(view(history, args, None))
    for name, task in engine.task_stats().items():
        success = "" if task.success_rate is None else f", {task.success_rate:.1%} succeeded"
        console.print(f"{name}: {task.episodes_written:,} episodes{success}", markup=False, highlight=False)


def _draw(engine: OnlineDataEngine, args: StreamArgs, seconds: float) -> None:
    """Sample batches for some time, at the configured rate."""
    begin, drawn = time.monotonic(), 0
    while (spent := time.monotonic() - begin) < seconds:
        if drawn < spent * args.rate:
            engine.sample_batch(args.batch_size, args.chunk_size, reuse_outputs=True)
            drawn += 1
        else:
            time.sleep(0.001)


def view(history: History, args: StreamArgs, screen: Console | None) -> Group:
    """Return statistics as tables that fit a screen; without one, tables of the whole run of any height."""
    now, rates = history.last, history.rates(whole=screen is None)
    when = "the whole run" if screen is None else f"the last {min(WINDOW_SECONDS, now.seconds):.0f} s"
    title = Text(f"stream, {now.seconds:.0f} s since the first fill (rates: mean of {when})", style="italic")
    above = summary(now.stats, rates)
    if not args.watch:
        return Group(title, above)
    used = 1 + above.row_count + 1 + 1 + 1 + 1  # title, summary with header, blank line, header, cursor
    max_lines = MAX_LINES if screen is None else max(screen.size.height - used, 1)
    return Group(title, above, Text(), worker_table(now.workers, rates, max_lines))


def summary(stats: StreamStats, rates: Rates) -> Table:
    """Return the statistics of a stream as a table."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("", "total", "per s"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    table.add_column("")
    success = "" if stats.success_rate is None else f", {stats.success_rate:.1%} succeeded"
    filled = f"{stats.refills:,.1f} refills of the buffer{success}"
    age = f"mean age {stats.mean_age_seconds:.1f} s, {stats.mean_age_refills:.2f} refills"
    again = f", {stats.rejected_reads:,} drawn again" if stats.rejected_reads else ""
    table.add_row("episodes", f"{stats.episodes_written:,}", f"{rates.episodes:,.1f}", filled)
    table.add_row("steps", f"{stats.frames:,}", f"{rates.frames:,.0f}", "")
    table.add_row("chunks", f"{stats.samples:,}", f"{rates.samples:,.0f}", age + again)
    if stats.restarts:
        table.add_row("workers", "", "", f"{stats.restarts:,} replaced")
    return table


@dataclass(frozen=True)
class Snapshot:
    """The statistics of a stream at a time in seconds after its start."""

    seconds: float
    stats: StreamStats
    workers: Sequence[WorkerStats] = ()


@dataclass(frozen=True)
class Rates:
    """Mean rates per second over a number of seconds."""

    seconds: float
    episodes: float
    frames: float
    samples: float
    of_workers: Mapping[int, tuple[float, float]]
    """Episodes and simulated steps per second of each worker, by index."""


class History:
    """Snapshots of a stream: the first one, and those within the last ``WINDOW_SECONDS``."""

    def __init__(self, first: Snapshot) -> None:
        self._first = self.last = first
        self._recent = deque([first])

    def add(self, snapshot: Snapshot) -> None:
        """Add a snapshot, and drop those that are too old."""
        self.last = snapshot
        self._recent.append(snapshot)
        while snapshot.seconds - self._recent[1].seconds >= WINDOW_SECONDS:
            self._recent.popleft()

    def rates(self, whole: bool = False) -> Rates:
        """Return the rates of the window, or of the whole run."""
        first, last = self._first if whole else self._recent[0], self.last
        seconds = last.seconds - first.seconds
        scale = 1 / seconds if seconds > 0 else 0.0
        before, after = first.stats, last.stats
        former = {worker.worker: worker for worker in first.workers}
        pairs = [(former[worker.worker], worker) for worker in last.workers if worker.worker in former]
        return Rates(
            seconds,
            episodes=(after.episodes_written - before.episodes_written) * scale,
            frames=(after.frames - before.frames) * scale,
            samples=(after.samples - before.samples) * scale,
            of_workers={
                w.worker: ((w.episodes_written - f.episodes_written) * scale, (w.frames - f.frames) * scale)
                for f, w in pairs
            },
        )


def worker_table(workers: Sequence[WorkerStats], rates: Rates, max_lines: int = MAX_LINES) -> Table:
    """Return a line for each worker, for each node with several workers, and for all.

    To fit ``max_lines``, workers are omitted first, then nodes, never the line for all. Workers that wait for a node
    share one line.
    """
    nodes = by_node(workers)
    waiting = nodes.pop("", [])
    last = [(_line("-", f"{len(waiting)} more", "waiting", waiting, rates), "dim")] if waiting else []
    last.append((_line("all", str(len(workers)), _common_state(workers), workers, rates), "bold"))

    def node_line(node: str, members: Sequence[WorkerStats]) -> Line:
        return _line(node, f"all {len(members)}", _common_state(members), members, rates)

    lines: list[tuple[Line, str | None]] = []
    for node, members in nodes.items():
        lines += [(_line(w.node, str(w.worker), _state(w), [w], rates), None) for w in members]
        if len(nodes) > 1 and len(members) > 1:
            lines.append((node_line(node, members), "bold"))
    room, groups = max(max_lines - len(last), 0), list(nodes.items())
    if len(lines) > room:
        if len(groups) > room > 0:
            others = [worker for _, members in groups[room - 1 :] for worker in members]
            groups[room - 1 :] = [(f"{len(groups) - room + 1} more", others)]
        lines = [(node_line(*group), None) for group in groups[:room]]
    table = Table(box=None, padding=(0, 1, 0, 0))  # to fit into 80 columns
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in _LEFT else "right", no_wrap=True)
    for line, style in [*lines, *last][-max_lines:]:
        table.add_row(*line, style=style)
    return table


def by_node(workers: Iterable[WorkerStats]) -> dict[str, list[WorkerStats]]:
    """Return the workers by node name, running ones first; waiting workers are under ``""``."""
    nodes: dict[str, list[WorkerStats]] = defaultdict(list)
    for worker in sorted(workers, key=lambda worker: (worker.state != "running", worker.worker)):
        nodes[worker.node if worker.state != "waiting" else ""].append(worker)
    return dict(sorted(nodes.items()))


def mean_age(workers: Sequence[WorkerStats]) -> float:
    """Return the mean age of the workers' episodes in seconds; 0 if there are none in the buffer."""
    ages = [worker.mean_age_seconds for worker in workers if worker.mean_age_seconds > 0]
    return sum(ages) / len(ages) if ages else 0.0


def _line(node: str, label: str, state: str, workers: Sequence[WorkerStats], rates: Rates) -> Line:
    """Return a line about some workers; without rates and age if all of them are waiting."""
    episodes, frames = (sum(rates.of_workers.get(w.worker, (0.0, 0.0))[i] for w in workers) for i in (0, 1))
    at_work = any(worker.state != "waiting" for worker in workers)
    return (
        node if len(node) <= _NAME_LENGTH else f"…{node[1 - _NAME_LENGTH :]}",  # names differ at their ends
        label,
        state,
        f"{sum(worker.episodes_written for worker in workers):,}",
        f"{episodes:,.1f}" if at_work else "",
        f"{frames:,.0f}" if at_work else "",
        f"{age:.1f} s" if at_work and (age := mean_age(workers)) > 0 else "",
        str(sum(worker.restarts for worker in workers)),
    )


def _state(worker: WorkerStats) -> str:
    if worker.silent_seconds > _SILENT_SECONDS:
        return f"silent {worker.silent_seconds:.0f} s"
    return IDLE if worker.idle else worker.state


def _common_state(workers: Sequence[WorkerStats]) -> str:
    """Return a short description of the state of several workers."""
    running = [worker for worker in workers if worker.state == "running"]
    silent = [worker.silent_seconds for worker in running if worker.silent_seconds > _SILENT_SECONDS]
    if silent:
        return f"{len(silent)} silent {max(silent):.0f} s"
    if running and all(worker.idle for worker in running):
        return IDLE
    return f"{len(running)} of {len(workers)} running"


def write_scalars(log: SummaryWriter, snapshot: Snapshot) -> None:
    """Write TensorBoard scalars ``stream/...`` and ``nodes/NAME/...`` over seconds, with rates since the last call."""
    scalars = {f"stream/{name}": value for name, value in asdict(snapshot.stats).items() if value is not None}
    for node, members in by_node(snapshot.workers).items():
        figures = {
            "episodes_per_second": sum(w.episodes_per_second for w in members),
            "frames_per_second": sum(w.frames_per_second for w in members),
            "silent_seconds": max(w.silent_seconds for w in members),
            "mean_age_seconds": mean_age(members),
            "restarts": sum(w.restarts for w in members),
            "workers": sum(w.state == "running" for w in members),
        }
        scalars |= {f"nodes/{node or '(waiting)'}/{name}": value for name, value in figures.items()}
    for name, value in scalars.items():
        log.add_scalar(name, value, int(snapshot.seconds))
