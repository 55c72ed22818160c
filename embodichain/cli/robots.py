"""``embodichain robots list`` and ``embodichain robots check FILE``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from embodichain.cli.options import Trust, parse_options

if TYPE_CHECKING:
    from embodichain.envs.env_cfg import RobotCfg
    from embodichain.envs.robot_check import RobotReport


@dataclass(frozen=True)
class ListArgs:
    """List the robots and tools that configs can name."""

    trust: Trust = ()


@dataclass(frozen=True)
class CheckArgs:
    """Analyse a robot's MJCF or URDF file, move every joint, and print a config for it.

    The exit code is 1 if a joint does not follow, or the kinematics differ from MuJoCo's.
    """

    file: Annotated[str, tyro.conf.Positional]
    """MJCF or URDF file, package://NAME/path in an installed package, or the name of a registered robot."""
    joints: tuple[str, ...] | None = None
    """Joints of the arm, from the base to the tool."""
    tool: str | None = None
    """Tool to mount on the flange: a registered one, or an MJCF file."""
    flange: str | None = None
    """Site or body on which the tool is mounted."""
    tool_site: str | None = None
    """Site or body that defines the position of the tool."""
    tool_axis: Literal["x", "y", "z", "-x", "-y", "-z"] | None = None
    """Axis of the tool site along which the tool points."""
    gripper: tuple[str, ...] | None = None
    """Joints of the fingers."""
    servos: bool | None = None
    """Replace motors by position servos (default: if the joints have motors)."""
    fix_base: bool = False
    """Fix the base of a robot with a free base."""
    image: Path | None = None
    """Render the robot in its initial posture (.png)."""
    video: Path | None = None
    """Record a video of every joint's motion (.mp4)."""
    trust: Trust = ()


Args = (
    Annotated[ListArgs, tyro.conf.subcommand("list", prefix_name=False)]
    | Annotated[CheckArgs, tyro.conf.subcommand("check", prefix_name=False)]
)


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    args: Any = parse_options(Args, argv, "embodichain robots")  # type: ignore[arg-type]
    from embodichain.extras import config_folders, import_trusted

    import_trusted(args.trust, config_folders())
    console = Console()
    return _list(console) if isinstance(args, ListArgs) else _check(console, args)


def _list(console: Console) -> int:
    from embodichain.envs.robot_files import ROBOTS, TOOLS

    table = Table("robot", "file", "joints", box=None, header_style="bold", pad_edge=False)
    for name, cfg in sorted(ROBOTS.items()):
        table.add_row(name, Path(str(cfg.mjcf)).name, ", ".join(cfg.joints) or "(found in the model)")
    console.print(table)
    tools = Table("tool", "file", "fingers", box=None, header_style="bold", pad_edge=False)
    for name, tool in sorted(TOOLS.items()):
        tools.add_row(name, Path(tool.asset).name, ", ".join(tool.fingers) or "-")
    console.print()
    console.print(tools)
    console.print('\nA robot of your own: robot: {"mjcf": "FILE"}; see: embodichain robots check FILE', markup=False)
    return 0


def _check(console: Console, args: CheckArgs) -> int:
    from embodichain.envs.robot_check import check_robot

    if args.image is not None:
        from embodichain.envs.recording import prepare_output

        prepare_output(args.image, (".png",))
    cfg = _config(args)
    with console.status(f"moving the joints of {args.file} ..."), _camera(args) as frame:
        report = check_robot(cfg, frame)
    _print_joints(console, report)
    _print_parts(console, report)
    if args.image is not None and report.model is not None and report.home is not None:
        from embodichain.envs.recording import write_image
        from embodichain.envs.rendering import Renderer
        from embodichain.envs.robot_check import overview

        home = report.home

        def load(data: Any, _: int) -> None:
            data.qpos[:] = home

        with Renderer(report.model, (480, 640), "high") as renderer:
            image = renderer.render(load, [0], overview(report.model, home))[0]
        console.print(f"image: {write_image(args.image, image)}", markup=False)
    if args.video is not None:
        console.print(f"video: {args.video}", markup=False)
    stuck = [joint.name for joint in report.joints if joint.follows is False]
    if stuck:
        console.print(f"\n{args.file}: does not follow: {', '.join(stuck)}", markup=False, style="red")
        return 1
    return 0 if report.works else 1


def _config(args: CheckArgs) -> RobotCfg:
    """Return the config for the options."""
    from embodichain.envs.robot_check import as_written, robot_config

    cfg = robot_config(args.file)
    tool = as_written(args.tool) if args.tool is not None and args.tool.endswith(".xml") else args.tool
    given = {
        "joints": None if args.joints is None else list(args.joints),
        "tool": tool,
        "flange": args.flange,
        "tool_site": args.tool_site,
        "tool_axis": args.tool_axis,
        "gripper": None if args.gripper is None else list(args.gripper),
        "servos": args.servos,
        "fix_base": args.fix_base or None,
    }
    return cfg.replace(**{key: value for key, value in given.items() if value is not None})


def _print_joints(console: Console, report: RobotReport) -> None:
    table = Table("joint", "kind", "limits", "drive", "start", "follows", box=None, header_style="bold", pad_edge=False)
    for joint in report.joints:
        verdict = {True: "[green]yes[/green]", False: "[red]no[/red]", None: "[dim]-[/dim]"}[joint.follows]
        name = joint.name.removeprefix("robot/")
        limits = f"{joint.lower:.3g} to {joint.upper:.3g}"
        follows = f"{verdict} {escape(joint.note)}".strip()
        table.add_row(escape(name), joint.kind, limits, joint.drive, f"{joint.start:.3f}", follows)
    console.print(table)


def _print_parts(console: Console, report: RobotReport) -> None:
    from embodichain.envs.robot_adaptation import describe

    console.print()
    if report.floating is not None:
        console.print(f"base      free (joint {report.floating!r})", markup=False)
        if report.unfit:
            console.print(
                f"walks     not as it is: {report.unfit}\nAn arm needs --fix-base.", markup=False, soft_wrap=True
            )
            return
        for need in report.needs:
            console.print(f"[yellow]added[/yellow]     {escape(need)}", soft_wrap=True)
        _print_config(console, report)
        return
    table = Table.grid(padding=(0, 2))
    for _, spec in describe(report.cfg):
        for arm in spec.arms:
            parts, grip = arm.parts, arm.grip
            sign = "-" if min(parts.axis) < 0 else ""
            axis = sign + "xyz"[int(abs(parts.axis).argmax())]
            at = f"site {parts.site}" if parts.site_body is None else f"body {parts.site_body}"
            at += ", between the tips of the fingers" if any(parts.site_pos) else ""
            table.add_row(
                arm.name or "arm", f"{len(parts.joints)} joints" + (f" to {parts.body}" if parts.body else "")
            )
            table.add_row("  tool", f"{at}, pointing along its {axis} axis" if parts.site else "none")
            fingers = ", ".join(parts.fingers)
            wide = f"{1000 * max(0.0, grip.gap_closed):.0f} to {1000 * grip.gap_open:.0f} mm" if grip else ""
            driven = f"{fingers}, driven by {', '.join(grip.actuators)}, {wide}" if grip else "none"
            table.add_row("  gripper", escape(driven))
            table.add_row("  start", parts.init_from)
            if arm.name in report.places:
                base, tool = (", ".join(f"{value + 0.0:.3f}" for value in at) for at in report.places[arm.name])
                table.add_row("", f"with the base at ({base}) and the tool at ({tool})")
        if spec.locked:
            table.add_row("held", escape(", ".join(spec.locked)))
        if spec.dropped:
            table.add_row("left out", escape(", ".join(spec.dropped)))
    error = report.kinematics_error
    agree = "agree with" if report.kinematics_error < 1e-4 else "[red]differ from[/red]"
    table.add_row("kinematics", f"{agree} MuJoCo's ({error:.0e})")
    for need in report.needs:
        table.add_row("[yellow]added[/yellow]", escape(need))
    console.print(table)
    _print_config(console, report)


def _print_config(console: Console, report: RobotReport) -> None:
    """Print a config to start from, and the call that registers it."""
    console.print("\nconfig:", style="bold")
    settings = snippet(report)
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in settings.items())
    console.print(f'"robot": {{\n{lines}\n}}', markup=False, soft_wrap=True)
    if report.needs:
        console.print("\nThe file alone is not enough: keep what was added in the config.", style="yellow")
    if report.cfg.mjcf is not None:
        console.print("\nwith a name of its own, in Python:", style="bold")
        given = [repr(report.cfg.uid), repr(settings.pop("mjcf")), *(f"{k}={v!r}" for k, v in settings.items())]
        arguments = "".join(f"    {argument},\n" for argument in given)
        console.print(f"register_robot(\n{arguments})", markup=False, highlight=False, soft_wrap=True)


def snippet(report: RobotReport) -> dict[str, Any]:
    """Return a config that spells out all inferred settings."""
    from embodichain.envs.env_cfg import RobotCfg
    from embodichain.envs.robot_adaptation import describe

    plain = RobotCfg().to_dict()
    out = {key: value for key, value in report.cfg.to_dict().items() if value != plain[key] and key != "arms"}
    if report.cfg.mjcf is not None:
        out.pop("uid", None)
    arms = [arm for _, spec in describe(report.cfg) for arm in spec.arms]
    found = {}
    for arm in arms:
        fingers = arm.grip.fingers_open if arm.grip else []
        start = [*arm.parts.init, *(arm.parts.init_fingers or fingers)]
        settings: dict[str, Any] = {"joints": arm.parts.joints, "init_qpos": [round(q, 4) + 0.0 for q in start]}
        if arm.parts.site is not None and not any(arm.parts.site_pos):  # else it is found again
            settings["tool_site"] = arm.parts.site_body or arm.parts.site
        if arm.parts.fingers:
            settings["gripper"] = arm.parts.fingers
        found[arm.name] = settings
    return {**out, **found[""]} if "" in found else {**out, "arms": found}


@contextmanager
def _camera(args: CheckArgs) -> Iterator[Any]:
    """Yield a function that records a video frame, or ``None``."""
    if args.video is None:
        yield None
        return
    from embodichain.envs.recording import VideoWriter
    from embodichain.envs.rendering import Renderer
    from embodichain.envs.robot_check import overview

    writer = VideoWriter(args.video, fps=25.0)
    opened: list[Any] = []

    def frame(model: Any, data: Any) -> None:
        if not opened:
            opened.extend((Renderer(model, (360, 480), "high"), overview(model, data.qpos.copy())))

        def load(other: Any, _: int) -> None:
            other.qpos[:] = data.qpos

        writer.append(opened[0].render(load, [0], opened[1])[0])

    try:
        yield frame
        writer.close()
    finally:
        writer.close(keep=False)
        if opened:
            opened[0].close()
