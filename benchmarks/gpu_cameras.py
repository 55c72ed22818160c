"""Where the time goes when a policy learns from images on one GPU, and how long it takes from nothing to 90% success.

    python -m benchmarks.gpu_cameras                          # everything
    python -m benchmarks.gpu_cameras --only env train --no-profile
    python -m benchmarks.gpu_cameras --only learn --seeds 0 1 2 --set algorithm.cfg.n_epochs=2
    python -m benchmarks.gpu_cameras --only learn --seeds 7 --limit 70 --out tried.json \\
        --variants "" "policy.auxiliary_coef=4" "trainer.buffer_size=12 algorithm.cfg.batch_size=2048"

``env``: a step of the environment of ``train_config_camera_gpu.json`` with CUDA graphs and without, without its
cameras, and what rendering alone takes: images of all envs, and of the few that were reset. ``outputs``: the same step
with depth and segmentation. ``train``: acting alone, collecting, one update and a whole iteration. ``learn``: training
until an evaluation shows 90% success, with each of the ``--variants`` of the config, which a table compares at the end.
With ``--profile``, a table of kernels follows the figures of ``env`` and ``train``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

from benchmarks.gpu_learning import success_rate
from benchmarks.gpu_turns import Row, Turn, nothing, report, synchronize, take_turns
from benchmarks.timing import machine
from embodichain.agents.rl.algo.ppo import PPO, PPOCfg
from embodichain.agents.rl.collector.sync_collector import SyncCollector
from embodichain.agents.rl.models import build_policy
from embodichain.config import load_config
from embodichain.envs.registration import make, make_to_watch
from embodichain.envs.task_env import TaskEnv
from embodichain.utils.torch_runtime import seed_everything

Section = Literal["env", "outputs", "train", "learn"]
CONFIG = Path(__file__).parent.parent / "configs/agents/rl/push_cube/train_config_camera_gpu.json"
PACKAGES = ["torch", "tensordict", "mujoco"] + (["mujoco_warp", "warp-lang"] if torch.cuda.is_available() else [])
STEPS = 24
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where this runs through, and measures nothing of interest
EVAL_STEPS, EVAL_ENVS = 245_760, 512
LEARNED = ("auxiliary_loss", "approx_kl", "learning_rate", "entropy", "explained_variance")
"""Metrics of an update that are kept beside the success rate."""
BAR_RATE, BAR_SECONDS, BAR_SUCCESS = 130_000, 60, 0.9


@dataclass(frozen=True)
class Args:
    """What to measure."""

    only: tuple[Section, ...] = ("env", "outputs", "train", "learn")
    """Sections to run."""
    config: Path = CONFIG
    """The training that is taken apart."""
    set: tuple[str, ...] = ()
    """Changes to it, such as ``algorithm.cfg.n_epochs=2``; values are JSON."""
    rounds: int = 9
    """Turns of each contender."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the learning runs."""
    variants: tuple[str, ...] = ("",)
    """Variants of the config to learn with, one after the other: further changes, separated by spaces."""
    limit: float = 150.0
    """Seconds after which a learning run ends without 90% success."""
    profile: bool = True
    """Whether tables of kernels are printed."""
    out: Path = Path("benchmarks/results/gpu_cameras.json")
    """File for the figures."""


def load(args: Args) -> dict[str, Any]:
    """Return the training config with its changes."""
    config = load_config(args.config)
    config["trainer"]["gym_config"]["device"] = DEVICE
    apply(config, args.set)
    return config


def apply(config: dict[str, Any], changes: Iterable[str]) -> None:
    """Make changes such as ``algorithm.cfg.n_epochs=2`` to a training config."""
    for change in changes:
        path, value = change.split("=", 1)
        *parents, last = path.split(".")
        node = config
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = json.loads(value)


def build_env(config: dict[str, Any], seed: int = 0, **changes: Any) -> TaskEnv:
    """Return the environment of a training config; its episodes end one after the other, as they do in training."""
    made = make(config["trainer"]["gym_config"], **{"num_envs": config["trainer"]["num_envs"], "seed": seed, **changes})
    if not isinstance(made, TaskEnv):
        raise TypeError(f"expected one of our own tasks, got {type(made).__name__}")
    generator = torch.Generator(made.device).manual_seed(0)
    state = made.get_state()
    state["step"] = torch.randint(
        made.max_episode_steps or 100, state["step"].shape, generator=generator, device=made.device
    )
    made.set_state(state)
    return made


def env(config: dict[str, Any], args: Args) -> list[Row]:
    """Measure the environment alone."""
    num_envs = config["trainer"]["num_envs"]
    cameras = config["trainer"]["gym_config"]["env"]["observations"]["cameras"]
    recorded, plain = build_env(config), build_env(config)
    plain._graphed = None
    blind = build_env(config, env={"observations": {"cameras": []}})
    actions = torch.rand(STEPS, num_envs, recorded.action_manager.action_dim, device=DEVICE) * 2 - 1
    few = torch.zeros(num_envs, dtype=torch.bool, device=DEVICE)
    few[: max(1, num_envs // 100)] = True
    render, physics = recorded._render_all, recorded.physics
    contenders: dict[str, Turn] = {
        "step": (nothing, stepping(recorded, actions)),
        "step without graphs": (nothing, stepping(plain, actions)),
        "step without cameras": (nothing, stepping(blind, actions)),
        "physics alone": (nothing, lambda: [physics.step(recorded.task.substeps) for _ in actions]),
    }
    if render is not None and DEVICE == "cuda":
        markers = recorded.task.markers()
        for name, chosen in {"images of all": None, "images of 1% of them": few}.items():
            graph = record_render(lambda chosen=chosen: render(markers, chosen))
            contenders[f"{name}, graph"] = (nothing, lambda graph=graph: [graph.replay() for _ in actions])
    times = take_turns(contenders, args.rounds)
    size = f"{num_envs} envs x {cameras[0]['height']}x{cameras[0]['width']}"
    rows = [report("env", f"{name}, {size}", seconds / STEPS, num_envs) for name, seconds in times.items()]
    print(f"env        recorded as a graph: {recorded._graphed is not None and recorded._graphed._replay is not None}")
    if args.profile:
        show_kernels("env: 24 steps", stepping(recorded, actions))
    for made in (recorded, plain, blind):
        made.close()
    return rows


def record_render(work: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """Return a graph of a function that was warm."""
    from embodichain.utils.cuda_graphs import record

    work()
    synchronize()
    return record(work).graph


def stepping(ours: TaskEnv, actions: torch.Tensor) -> Callable[[], None]:
    """Return what does some steps."""

    def steps() -> None:
        for action in actions:
            ours.step(action)

    return steps


def outputs(config: dict[str, Any], args: Args) -> list[Row]:
    """Measure steps with other outputs of the same camera."""
    rows = []
    camera = config["trainer"]["gym_config"]["env"]["observations"]["cameras"][0]
    for chosen in (["depth"], ["segmentation"], ["rgb", "depth", "segmentation"]):
        made = build_env(config, env={"observations": {"cameras": [camera | {"outputs": chosen}]}})
        actions = torch.rand(STEPS, made.num_envs, made.action_manager.action_dim, device=DEVICE) * 2 - 1
        seconds = take_turns({"step": (nothing, stepping(made, actions))}, args.rounds)["step"]
        rows.append(report("outputs", "step, " + " + ".join(chosen), seconds / STEPS, made.num_envs))
        made.close()
    return rows


def train(config: dict[str, Any], args: Args) -> list[Row]:
    """Measure collecting, learning, and both."""
    seed_everything(0)
    made = build_env(config)
    policy = build_policy(config["policy"], made.observation_space, made.action_space, DEVICE)
    settings = PPOCfg.from_dict(config["algorithm"]["cfg"] | {"device": DEVICE})
    algorithm, collector, num_steps = (
        PPO(settings, policy),
        SyncCollector(made, policy),
        config["trainer"]["buffer_size"],
    )
    for _ in range(4):  # compiles and records
        rollout = collector.collect(num_steps)
        algorithm.update(rollout)

    def act() -> None:
        if collector.obs is not None:
            with torch.no_grad(), policy.without_dropout():
                for _ in range(num_steps):
                    collector.decide(collector.obs, None)

    contenders: dict[str, Turn] = {
        "act": (nothing, act),
        "collect": (nothing, lambda: collector.collect(num_steps)),
        "update": (nothing, lambda: algorithm.update(rollout)),
        "iteration": (nothing, lambda: algorithm.update(collector.collect(num_steps))),
    }
    times, total = take_turns(contenders, args.rounds), made.num_envs * num_steps
    bars = {"iteration": f"bar: {BAR_RATE:,}/s"}
    rows = [report("train", name, seconds, total, bars.get(name, "")) for name, seconds in times.items()]
    if args.profile:
        show_kernels("train: collect", lambda: collector.collect(num_steps))
        show_kernels("train: update", lambda: algorithm.update(rollout))
    made.close()
    return rows


def learn(config: dict[str, Any], args: Args) -> Iterator[Row]:
    """Train once per variant and seed, and tell when an evaluation first showed 90% success."""
    rows = []
    for variant in args.variants:
        changed = deepcopy(config)
        apply(changed, variant.split())
        for seed in args.seeds:
            rows.append(learn_once(changed, seed, args.limit, variant))
            yield rows[-1]
    if len(args.variants) > 1:
        compare(rows)


def learn_once(config: dict[str, Any], seed: int, limit: float, variant: str = "") -> Row:
    """Train until an evaluation shows 90% success, for a while at most; compilation is not counted."""
    seed_everything(seed)
    began, trainer = time.perf_counter(), config["trainer"]
    made = make(trainer["gym_config"], num_envs=trainer["num_envs"], seed=seed)
    judge = make_to_watch(trainer["gym_config"], num_envs=EVAL_ENVS, seed=1_000_003)
    policy = build_policy(config["policy"], made.observation_space, made.action_space, DEVICE)
    weights = {name: value.clone() for name, value in policy.state_dict().items()}
    settings = PPOCfg.from_dict(config["algorithm"]["cfg"] | {"device": DEVICE})
    algorithm, collector, num_steps = PPO(settings, policy), SyncCollector(made, policy), trainer["buffer_size"]
    for _ in range(2):
        algorithm.update(collector.collect(num_steps))
    success_rate(policy, judge)
    policy.load_state_dict(weights)
    algorithm = PPO(settings, policy)
    synchronize()
    compiled, seconds, iterations = time.perf_counter() - began, 0.0, 0
    per_evaluation = max(1, round(EVAL_STEPS / (num_steps * trainer["num_envs"])))
    curve: list[dict[str, float]] = []
    metrics: dict[str, float] = {}
    while seconds < limit:
        synchronize()
        began = time.perf_counter()
        for _ in range(per_evaluation):
            metrics = algorithm.update(collector.collect(num_steps))
        synchronize()
        seconds += time.perf_counter() - began
        iterations += per_evaluation
        learned = {name: metrics[name] for name in LEARNED if name in metrics}
        success = success_rate(policy, judge)
        curve.append({"seconds": seconds, "iterations": iterations, "success": success, **learned})
        if len(curve) % 5 == 0:
            told = ", ".join(f"{name} {value:.3g}" for name, value in learned.items())
            print(f"learn      ... {seconds:6.1f} s, {100 * success:.0f}%, {told}", flush=True)
        if success >= BAR_SUCCESS:
            break
    made.close()
    judge.close()
    steps, success = iterations * num_steps * trainer["num_envs"], curve[-1]["success"]
    bar = f"{100 * success:.0f}% success, {steps:,} steps (bar: 90% in {BAR_SECONDS} s); {compiled:.0f} s to compile"
    name = f"from images, seed {seed}" + (f", {variant}" if variant else "")
    print(f"learn      {name:<42s} {seconds:10.1f} s  {steps / seconds:14,.0f}/s  {bar}", flush=True)
    figures = {"seconds": seconds, "compile_seconds": compiled, "steps": steps, "success": success}
    return {"section": "learn", "name": name, **figures, "bar": bar, "curve": curve}


def compare(rows: list[Row]) -> None:
    """Print when each run first reached some rates of success."""
    print("learn      seconds to 25%, 50%, 75%, 80%, 85% and 90%; best; million steps")
    for row in rows:
        first = [
            next((f"{point['seconds']:6.1f}" for point in row["curve"] if point["success"] >= bar), "     -")
            for bar in (0.25, 0.5, 0.75, 0.8, 0.85, 0.9)
        ]
        best = max(point["success"] for point in row["curve"])
        print(f"   {' '.join(first)}  {100 * best:4.0f}%  {row['steps'] / 1e6:5.1f}  {row['name']}", flush=True)


def show_kernels(title: str, work: Callable[[], Any], count: int = 30) -> None:
    """Print the kernels that take longest, with their calls and their share."""
    from torch.profiler import ProfilerActivity, profile

    synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        began = time.perf_counter()
        work()
        synchronize()
        wall = time.perf_counter() - began
    kernels = [e for e in profiler.key_averages() if e.self_device_time_total > 0 and e.device_type.name == "CUDA"]
    if not kernels:
        return
    kernels.sort(key=lambda event: -event.self_device_time_total)
    busy = sum(event.self_device_time_total for event in kernels) / 1e3
    launches = sum(event.count for event in kernels)
    print(f"-- {title}: {1e3 * wall:.1f} ms, kernels {busy:.1f} ms in {launches} launches")
    for event in kernels[:count]:
        spent = event.self_device_time_total / 1e3
        print(f"   {spent:9.3f} ms {100 * spent / busy:5.1f}%  {event.count:6d} x  {event.key[:100]}")


def main(args: Args) -> None:
    """Run the sections and write the figures, after each of them; others of the same settings stay in the file."""
    config = load(args)
    sections: dict[Section, Callable[[dict[str, Any], Args], Iterable[Row]]]
    sections = {"env": env, "outputs": outputs, "train": train, "learn": learn}
    described = {"gpu": torch.cuda.get_device_name() if DEVICE == "cuda" else "none", **machine(PACKAGES)}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    found = json.loads(args.out.read_text()) if args.out.exists() else {}
    rows = {(row["section"], row["name"]): row for row in found.get("rows", ()) if found["set"] == list(args.set)}
    for name in args.only:
        for row in sections[name](config, args):
            rows[row["section"], row["name"]] = row
            content = {"machine": described, "set": list(args.set), "rounds": args.rounds, "rows": [*rows.values()]}
            args.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
