"""``embodichain envs list`` and ``embodichain envs check ID``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import gymnasium as gym
import tyro
from rich.columns import Columns
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from embodichain.cli.options import Trust, loading, parse_options
from embodichain.extras import config_folders, import_trusted
from embodichain.utils.console import check_counts

if TYPE_CHECKING:
    from embodichain.envs.vec_env import VecEnv


@dataclass(frozen=True)
class ListArgs:
    """List the environments, one line each."""

    long: bool = False
    """Also show their observations and actions."""
    gymnasium: bool = False
    """Also list the ids registered with Gymnasium."""
    trust: Trust = ()


@dataclass(frozen=True)
class CheckArgs:
    """Check that an environment fulfils the VecEnv contract; the exit code is 1 if it does not."""

    id: Annotated[str, tyro.conf.Positional]
    """Name of the environment: a task of this package, any Gymnasium id, or module:Name-v0."""
    num_envs: int = 4
    """Number of envs stepped together."""
    max_episode_steps: int | None = None
    """Time limit (default: the environment's own)."""
    max_steps: int = 1000
    """Maximum length of a trajectory."""
    device: str | None = None
    """Device of the simulation, such as cuda (default: the environment's own)."""
    trust: Trust = ()


Args = (
    Annotated[ListArgs, tyro.conf.subcommand("list", prefix_name=False)]
    | Annotated[CheckArgs, tyro.conf.subcommand("check", prefix_name=False)]
)


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    args: ListArgs | CheckArgs = parse_options(Args, argv, "embodichain envs")  # type: ignore[arg-type] # a union

    console = Console()
    return _list(console, args) if isinstance(args, ListArgs) else _check(console, args)


def _list(console: Console, args: ListArgs) -> int:
    with loading():
        from embodichain.envs.registration import list_envs, make

    import_trusted(args.trust, config_folders())
    if args.long:
        table = Table("id", "what", "observation", "action", box=None, header_style="bold", pad_edge=False)
        for spec in list_envs():
            with make(spec.id, num_envs=1) as env:
                manager = env.action_manager
                size = str(manager.action_dim) if manager.choices is None else f"one of {manager.choices.tolist()}"
                action = f"{manager.action_type} {size}"
                table.add_row(spec.id, spec.description, _describe(env.observation_space), action)
        console.print(table)
    else:
        widest = max(len(spec.id) for spec in list_envs())
        for spec in list_envs():
            line = f"{spec.id:<{widest}}  {spec.description.partition(';')[0].rstrip('.')}"
            line = line if len(line) <= console.width else line[: console.width - 1].rstrip() + "…"
            console.print(line, markup=False, highlight=False)
        console.print(
            "\nembodichain envs list --long tells what they observe and what actions they take.", markup=False
        )
    if args.gymnasium:
        names = sorted(name for name in gym.registry if not name.startswith("embodichain/"))
        console.print("\nregistered with Gymnasium:", style="bold")
        console.print(Columns(names, column_first=True, padding=(0, 2)))
    return 0


def _describe(space: Any) -> str:
    """Return the keys of an observation with their shapes: ``robot(qpos 6, qvel 6)``."""
    parts = []
    for key, value in space.spaces.items():
        if isinstance(value, gym.spaces.Dict):
            parts.append(f"{key}({_describe(value)})")
        else:
            parts.append(f"{key} {'x'.join(str(n) for n in value.shape)}".strip())
    return ", ".join(parts)


def _check(console: Console, args: CheckArgs) -> int:
    with loading():
        from embodichain.envs.checker import run_checks
        from embodichain.envs.registration import make

    check_counts({"--num-envs": args.num_envs, "--max-steps": args.max_steps})
    import_trusted(args.trust, config_folders())
    given = {"max_episode_steps": args.max_episode_steps, "device": args.device}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}

    def factory(num_envs: int) -> VecEnv:
        return make(args.id, trusted_modules=args.trust, num_envs=num_envs, **options)

    with console.status(f"checking {args.id} ..."):
        results = run_checks(factory(args.num_envs), factory, args.max_steps)
    table = Table("check", "", box=None, header_style="bold", pad_edge=False)
    table.add_column("what", overflow="fold")  # with whole paths
    for result in results:
        meaning = escape(result.what.replace("``", ""))
        if result.problems:
            verdict, what = "[red]fail[/red]", [meaning]
            for problem in result.problems:
                parts = {"expected": problem.expected, "got": problem.got, "do": problem.advice}
                what += [f"[red]{part:<8}[/red] {escape(text)}" for part, text in parts.items()]
        elif result.warnings:
            verdict, what = "[yellow]warn[/yellow]", [meaning, *map(escape, result.warnings)]
        elif result.skipped is not None:
            verdict, what = "[dim]-[/dim]", [f"[dim]{escape(result.skipped)}[/dim]"]
        else:
            verdict, what = "[green]pass[/green]", [meaning]
        table.add_row(result.name, verdict, "\n".join(what))
    console.print(table)
    failed = sum(bool(result.problems) for result in results)
    warned = sum(bool(result.warnings) and not result.problems for result in results)
    passed = sum(not result.problems and result.skipped is None for result in results) - warned
    summary = f"{failed} check{'s' if failed > 1 else ''} failed" if failed else "the contract is kept"
    others = f"{passed} passed, {len(results) - failed - warned - passed} did not apply"
    others += f", {warned} warned" if warned else ""
    console.print(f"\n{args.id}: {summary} ({others})", markup=False)
    return 1 if failed else 0
