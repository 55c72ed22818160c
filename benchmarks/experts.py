"""How often the scripted expert of every task succeeds, a picture of each, and the pages of ``docs/tasks.md``.

    python benchmarks/experts.py                              # all tasks: 200 starts for each of three seeds
    python benchmarks/experts.py --tasks StackCubeRL PushAroundRL
    python benchmarks/experts.py --no-run                     # write docs/tasks.md again from what was measured
    python benchmarks/experts.py --robot panda --starts 24 --seeds 0   # another arm, out of robosuite: prints only

Results go to ``benchmarks/results/experts.json``, pictures to ``docs/images/tasks``. An episode counts as solved if its
last step is a success.
"""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
import tyro
from PIL import Image

from embodichain.config import load_config
from embodichain.envs import TASKS
from embodichain.envs.registration import EnvSpec, list_envs, load_gym_config, make
from embodichain.envs.task_env import TaskEnv

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/experts.json"
PICTURES = ROOT / "docs/images/tasks"
_HEAD = """# Tasks

The tasks of this package. Each has a dense and a sparse reward, a success metric and cameras; most have a scripted
expert, which demonstrates them in a stream (`embodichain stream ID`) and in a video (`embodichain play ID --video
out.mp4`). [Environments](environments.md#gymnasium) tells of Gymnasium's MuJoCo suite, and
[A task of your own](own_task.md) how to write one.

Success of the expert is over {starts} starts for each of {seeds} seeds: `python benchmarks/experts.py`, which draws the
pictures and writes this page, too.

| id | what | expert |
|---|---|---|"""
_SUCCESS = {
    "CartPoleRL": "the pole stands and the cart is on its rail, at the end",
    "CloseDrawerRL": "the drawer is shut to within {threshold}",
    "HandOverRL": "the taker alone holds the stick still, within {threshold} of the goal",
    "InsertPegRL": "the peg is in the hole to within {threshold} of its depth; a dropped peg ends the episode",
    "LiftBarRL": "both arms hold the bar level and still, within {threshold} of the goal",
    "OpenDoorRL": "the door is open to within {threshold} rad of where it should be",
    "OpenDrawerLanguageRL": "the drawer that is meant is open to within {threshold} of its travel",
    "OpenDrawerRL": "the drawer is open to within {threshold} of its travel",
    "PickCubeRL": "the cube is within {threshold} of the goal, held still",
    "PlaceInBinLanguageRL": "the cube that is meant lies in the bin that is meant, and the fingers are open",
    "PlaceInBinRL": "the cube lies in the bin, and the fingers are open",
    "PressButtonLanguageRL": "the button that is meant is pressed to within {threshold} of its travel",
    "PressButtonRL": "the button is pressed to within {threshold} of its travel",
    "PushAroundRL": "the cube is within {threshold} of the goal",
    "PushCubeLanguageRL": "the cube is within {threshold} of the goal that is meant",
    "PushCubeRL": "the cube is within {threshold} of the goal",
    "ReachRL": "the tool is within {threshold} of the goal",
    "StackCubeLanguageRL": "the cube that is meant lies on the other, and the fingers are open",
    "StackCubeRL": "the red cube lies on the green one, and the fingers are open",
}


_ASSETS = "package://robosuite/models/assets"
_FACING = {"left": {"pos": [0.5, 0.7, 0.0], "yaw": -1.5708}, "right": {"pos": [0.5, -0.7, 0.0], "yaw": 1.5708}}


@dataclass(frozen=True)
class Args:
    """What to measure."""

    tasks: tuple[str, ...] = ()
    """Ids of tasks; default: all of the package, and with ``--robot`` all that arms do."""
    starts: int = 200
    """Episodes per seed, each from a start of its own."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds."""
    robot: str | None = None
    """An arm of robosuite in the place of the tasks' own, such as panda; what is measured is printed, and not kept."""
    run: bool = True
    """Whether to measure and to draw; otherwise only the page is written."""


def other_arm(name: str, task: str) -> dict[str, Any]:
    """Return the config of an arm of robosuite with the Panda's gripper, or of two for a task of two arms."""
    arm = {"mjcf": f"{_ASSETS}/robots/{name}/robot.xml", "flange": "right_hand", "servos": True}
    arm |= {"tool": f"{_ASSETS}/grippers/panda_gripper.xml"}
    return arm | ({"arms": _FACING} if load_gym_config(task).robot.arms else {})


def has_arms(task: str) -> bool:
    """Return whether arms with tools do a task."""
    robot = load_gym_config(task).robot
    return bool(robot.arms) or robot.tool is not None


def measure(task: str, starts: int, seed: int, robot: str | None = None) -> dict[str, float]:
    """Return the success of the expert, the steps that it takes, and its return, over one episode in each env."""
    others = {} if robot is None else {"robot": other_arm(robot, task)}
    with make(task, num_envs=starts, seed=seed, **others) as env:
        env.reset()
        running = torch.ones(starts, dtype=torch.bool)
        solved, steps, total = torch.zeros(starts), torch.zeros(starts), torch.zeros(starts)
        while bool(running.any()):
            _, reward, terminated, truncated, info = env.step(env.expert_action())
            steps += running
            total += reward * running
            ended = running & (terminated | truncated)
            solved = torch.where(ended, info["metrics"]["success"], solved)
            running &= ~ended
        return {"success": float(solved.mean()), "steps": float(steps.mean()), "return": float(total.mean())}


def draw(task: str) -> None:
    """Save a picture of the expert at work, past the middle of an episode."""
    with make(task, num_envs=1, seed=1) as env:
        env.reset()
        actions = env.create_demo_action_list() if env.has_expert else [torch.zeros(env.action_manager.shape)] * 20
        for action in actions[: max(1, int(0.62 * len(actions)))]:
            env.step(action)
        assert isinstance(env, TaskEnv)
        picture = Image.fromarray(env.render([0], size=(480, 640))[0]).resize((320, 240), Image.Resampling.LANCZOS)
    PICTURES.mkdir(parents=True, exist_ok=True)
    picture.save(PICTURES / f"{task}.jpg", quality=82, optimize=True)


def write_page(results: dict[str, Any]) -> None:
    """Write ``docs/tasks.md``: a table of all tasks, then an entry for each."""
    specs = {spec.id: spec for spec in list_envs() if spec.id in TASKS}
    rows, entries = [], []
    for task, spec in specs.items():
        measured = results["tasks"].get(task)
        share = "none" if measured is None else f"{100 * measured['success']:.1f}%"
        rows.append(f"| [`{task}`](#{task.lower()}) | {_sentence(spec)} | {share} |")
        entries.append(_entry(spec, measured))
    head = _HEAD.format(starts=results["starts"], seeds=len(results["seeds"]))
    (ROOT / "docs/tasks.md").write_text("\n".join([head, *rows, "", "\n\n".join(entries), ""]))


def _sentence(spec: EnvSpec) -> str:
    return " ".join((spec.task.__doc__ or "").split("\n\n")[0].split())


def _entry(spec: EnvSpec, measured: dict[str, Any] | None) -> str:
    """Return the section about one task."""
    cfg = load_gym_config(spec.id)
    with make(spec.id, num_envs=1, seed=0) as env:
        manager, observed = env.action_manager, _describe(env.observation_space)
        action = f"`{manager.action_type}`, {manager.action_dim} number{'s' if manager.action_dim > 1 else ''}"
        if isinstance(env, TaskEnv) and env.robot is not None and env.robot.num_fingers:
            action += ", the last of an arm opens (1) or closes (-1) its gripper"
    weights = {**spec.task.reward_weights, **{n: t.weight for n, t in cfg.env.rewards.terms.items() if t is not None}}
    reward = ", ".join(f"`{name}` {weight:g}" for name, weight in weights.items())
    threshold = cfg.env.success_threshold
    told = _SUCCESS.get(spec.id) or " ".join((spec.task.success.__doc__ or "").split()).rstrip(".")
    success = told.format(threshold=f"{100 * threshold:g} cm" if " rad" not in told else f"{threshold:g}")
    lines = [f"## {spec.id}", "", f"![{spec.id}](images/tasks/{spec.id}.jpg)", "", _sentence(spec), ""]
    paragraphs = [" ".join(part.split()) for part in (spec.task.__doc__ or "").split("\n\n")[1:] if part.strip()]
    lines += [line for paragraph in paragraphs for line in (paragraph, "")]
    lines += ["| | |", "|---|---|", f"| observation | {observed} |", f"| action | {action} |", f"| reward | {reward} |"]
    lines += [f"| success | {success or 'none'} |", f"| time limit | {cfg.max_episode_steps} steps |"]
    if measured is not None:
        by_seed = ", ".join(f"{100 * run['success']:.1f}%" for run in measured["runs"].values())
        lines.append(f"| expert | {100 * measured['success']:.1f}% ({by_seed}), {measured['steps']:.0f} steps |")
    lines += [
        f"| train | {' <br> '.join(f'`embodichain train {path}`' for path in _configs(spec.id)) or 'no config'} |"
    ]
    return "\n".join(lines).replace("``", "`")


def _configs(task: str) -> list[str]:
    """Return the training configs of a task."""
    found = []
    for path in sorted((ROOT / "configs/agents/rl").rglob("train_config*.json")):
        given = load_config(path)["trainer"]["gym_config"]
        gym_config = load_config(path.parent / given) if isinstance(given, str) and given.endswith(".json") else given
        name = gym_config if isinstance(gym_config, str) else gym_config["id"]
        if name == task:
            found.append(str(path.relative_to(ROOT)))
    return found


def _describe(space: gym.Space[Any], prefix: str = "") -> str:
    """Return the leaves of an observation with their sizes."""
    if isinstance(space, gym.spaces.Dict):
        return ", ".join(_describe(inner, f"{prefix}{key}/") for key, inner in space.spaces.items())
    return f"`{prefix[:-1]}` {'x'.join(map(str, space.shape or ()))}"


def main(args: Args) -> None:
    """Measure, draw, and write the page."""
    results: dict[str, Any] = {"starts": args.starts, "seeds": list(args.seeds), "tasks": {}}
    if RESULTS.exists():
        results["tasks"] = json.loads(RESULTS.read_text())["tasks"]
    results["machine"] = platform.machine()
    known = {spec.id: spec for spec in list_envs() if spec.id in TASKS}
    if args.robot is not None:
        known = {task: spec for task, spec in known.items() if has_arms(task)}
    for task in (args.tasks or known) if args.run else ():
        if known[task].task.has_expert():
            runs = {str(seed): measure(task, args.starts, seed, args.robot) for seed in args.seeds}
            mean = {key: sum(run[key] for run in runs.values()) / len(runs) for key in ("success", "steps", "return")}
            results["tasks"][task] = {**mean, "runs": runs}
            print(
                f"{task:24} {100 * mean['success']:6.1f}%  {mean['steps']:6.1f} steps  return {mean['return']:8.2f}",
                flush=True,
            )
        if args.robot is None:
            draw(task)
    if args.robot is not None:
        return
    results["tasks"] = {task: results["tasks"][task] for task in sorted(results["tasks"]) if task in known}
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    write_page(results)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
