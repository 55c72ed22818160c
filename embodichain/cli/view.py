"""``embodichain view ENV_OR_RUN_OR_DATASET``: watch an environment, a trained policy or a recording in the browser."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console

from embodichain.cli.eval import opened_run
from embodichain.cli.options import Trust, loading, parse_options
from embodichain.errors import ConfigError, UnknownNameError
from embodichain.extras import require
from embodichain.utils.console import check_counts
from embodichain.viewer.launch import MARKER

if TYPE_CHECKING:
    from embodichain.viewer.playback import Source

_DEFAULT_NUM_ENVS = 4


@dataclass(frozen=True)
class ViewArgs:
    """Show an environment, the policy of a run, or a recording in the browser, in 3D."""

    what: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ENV|RUN|DATASET")]
    """Name or file (gym_config.json) of an environment, folder of a run, or folder of a LeRobot dataset."""
    policy: Literal["expert", "random", "zero", "person", "best", "latest"] | None = None
    """Source of actions at the start; it can be changed later. 'best' and 'latest' are a run's checkpoints."""
    num_envs: int = _DEFAULT_NUM_ENVS
    """Number of envs."""
    seed: int = 0
    """Seed of the first episodes, and of random actions."""
    episode: int = 0
    """For a dataset: the first episode to show."""
    out: Path | None = None
    """New folder for episodes recorded in the viewer (default: in outputs/recordings)."""
    task: str | None = None
    """Task description of recorded episodes; None uses the name of the environment."""
    max_episode_steps: int | None = None
    """For an environment: time limit in steps. A person needs more of them than an expert."""
    config: Path | None = None
    """File of environment settings (a gym_config.json); they override those of a run."""
    host: str = "127.0.0.1"
    """Address to listen on. With any but a loopback address, anyone who can reach it can use the viewer."""
    port: int = 8080
    """Port of the page; if it is in use, the next free one."""
    paused: bool = False
    """Start paused."""
    trust: Trust = ()


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    return view(parse_options(ViewArgs, argv, "embodichain view"))


def view(args: ViewArgs) -> int:
    """Serve the viewer until Ctrl-C, and return the exit code."""
    longest = {} if args.max_episode_steps is None else {"--max-episode-steps": args.max_episode_steps}
    check_counts({"--num-envs": args.num_envs, **longest})
    require("viser", extra="viewer")
    with loading():
        from embodichain.viewer.app import Viewer
        from embodichain.viewer.server import is_loopback
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(_opened(args))
        viewer = Viewer(source, args.host, args.port)
        stack.callback(viewer.close)
        viewer.playback.playing = not args.paused
        for name in (signal.SIGINT, signal.SIGTERM):
            before = signal.signal(name, lambda *_: viewer.stop())
            stack.callback(signal.signal, name, before)
        console = Console()
        console.print(f"{source.title}: open {viewer.url} in a browser (Ctrl-C ends)", highlight=False, soft_wrap=True)
        if not is_loopback(args.host):
            console.print("Everybody who can reach this machine can watch and act.", style="yellow")
        viewer.run()
    return 0


@contextlib.contextmanager
def _opened(args: ViewArgs) -> Iterator[Source]:
    """Open the source to show: a dataset, a running job, a run or an environment."""
    folder = Path(args.what)
    if args.max_episode_steps is not None and os.path.isdir(args.what):
        problem = "expected an environment, got a folder; for a run, --config FILE has settings of its environment"
        raise ConfigError(f"--max-episode-steps: {problem}")
    if (folder / "meta" / "info.json").is_file():
        from embodichain.viewer.replay import Recording

        recording = Recording(folder, args.episode, args.trust)
        if recording.problem is not None:
            Console().print(recording.problem, style="yellow", markup=False, highlight=False, soft_wrap=True)
        yield recording
        return
    if (folder / MARKER).is_file():
        from embodichain.viewer.live import LiveJob

        yield LiveJob(folder)
        return
    from embodichain.viewer.simulation import Simulation

    options: dict[str, Any] = {"seed": args.seed, "acts": args.policy, "trusted_modules": args.trust}
    options |= {"out": args.out, "words": args.task}
    if os.path.isdir(args.what):
        count = args.num_envs
        with opened_run(folder, "best", args.trust, count, count, args.seed, False, args.config) as run:
            yield Simulation(run.env, str(args.what), run=folder, **options)
        return
    from embodichain.envs.registration import make_to_watch

    source = args.what if args.config is None else args.config
    overrides: dict[str, Any] = {"num_envs": args.num_envs, "seed": args.seed}
    if args.max_episode_steps is not None:
        overrides["max_episode_steps"] = args.max_episode_steps
    if not args.what.endswith((".json", ".yaml", ".yml")):
        overrides["id"] = args.what
    elif args.config is not None:
        raise ConfigError(f"--config: expected the name of an environment before it, got the file {args.what}")
    with explaining_paths(args.what):
        env = make_to_watch(source, args.trust, video=True, **overrides)
    with env:
        yield Simulation(env, env.name, **options)


@contextlib.contextmanager
def explaining_paths(what: str) -> Iterator[None]:
    """Replace the error about an unknown environment if its name is a path: of a Python file, or of nothing."""
    try:
        yield
    except UnknownNameError as error:
        if what.endswith(".py") and os.path.isfile(what):
            words = f"ID --trust {shlex.quote(what)}"
            raise UnknownNameError(f"{what} is a module: name an environment that it registers, {words}") from error
        is_id = re.search(r"-v\d+$", what)  # Gymnasium's ids may contain a slash
        if what.endswith(".py") or (os.path.basename(what) != what and not is_id):
            raise UnknownNameError(f"{what}: there is no such folder or file") from error
        raise
