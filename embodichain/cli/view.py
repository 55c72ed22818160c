"""``embodichain view ENV_OR_RUN_OR_DATASET``: watch an environment, a trained policy or a recording in the browser."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console

from embodichain.cli.eval import opened_run
from embodichain.cli.options import Trust, loading, parse_options
from embodichain.errors import ConfigError
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
    """Who acts first; another one can be chosen while it runs. 'best' and 'latest' are a run's checkpoints."""
    num_envs: int = _DEFAULT_NUM_ENVS
    """Number of envs, side by side."""
    seed: int = 0
    """Seed of the first episodes, and of random actions."""
    episode: int = 0
    """Of a dataset: the first episode to show."""
    out: Path | None = None
    """New folder for episodes that are recorded in the viewer (default: one in outputs/recordings)."""
    config: Path | None = None
    """File with settings of the environment (a gym_config.json); those of a run go below it."""
    host: str = "127.0.0.1"
    """Address to listen on. Other machines reach the viewer only if this is another one, and then anybody can."""
    port: int = 8080
    """Port of the page; if it is taken, the next free one."""
    paused: bool = False
    """Begin with a pause."""
    trust: Trust = ()


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    return view(parse_options(ViewArgs, argv, "embodichain view"))


def view(args: ViewArgs) -> int:
    """Serve the viewer until Ctrl-C, and return the exit code."""
    check_counts({"--num-envs": args.num_envs})
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
    """Return what is shown."""
    folder = Path(args.what)
    if (folder / "meta" / "info.json").is_file():
        from embodichain.viewer.replay import Recording

        yield Recording(folder, args.episode, args.trust)
        return
    if (folder / MARKER).is_file():
        from embodichain.viewer.live import LiveJob

        yield LiveJob(folder)
        return
    from embodichain.viewer.simulation import Simulation

    options: dict[str, Any] = {"seed": args.seed, "acts": args.policy, "trusted_modules": args.trust, "out": args.out}
    if os.path.isdir(args.what):
        count = args.num_envs
        with opened_run(folder, "best", args.trust, count, count, args.seed, False, args.config) as run:
            yield Simulation(run.env, str(args.what), run=folder, **options)
        return
    from embodichain.envs.registration import make_to_watch

    source = args.what if args.config is None else args.config
    overrides: dict[str, Any] = {"num_envs": args.num_envs, "seed": args.seed}
    if not args.what.endswith((".json", ".yaml", ".yml")):
        overrides["id"] = args.what
    elif args.config is not None:
        raise ConfigError(f"--config: expected the name of an environment before it, got the file {args.what}")
    with make_to_watch(source, args.trust, video=True, **overrides) as env:
        yield Simulation(env, env.name, **options)
