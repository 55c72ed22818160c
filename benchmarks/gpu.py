"""How fast simulation and learning are on one GPU, every number beside a peer of the same run.

    python -m benchmarks.gpu                                  # everything
    python -m benchmarks.gpu --only env update --out results.json
    python -m benchmarks.gpu --only env --ids Ant-v5 QuadrupedVelocityRL

``update``: one PPO update of 4096 envs x 24 steps, observation 48, action 12, two MLPs of 256, 256, 5 epochs of 4
minibatches, against rsl_rl and against our own steps without CUDA graphs. ``env``: a step of ``PushCubeRL`` with
rewards, observations and restarts, against MuJoCo Warp alone with the same motor commands. ``iteration``: simulate,
infer and learn, with rsl_rl on the same environment. ``learn``: from nothing to 90% success. ``cameras``: pictures per
second. ``stream``: chunks drawn from a stream that is mirrored on the GPU, against a copy on the device.
Contenders take turns; a figure is the median of the turns.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from tensordict import TensorDict

from benchmarks.gpu_envs import SUITE, WALKERS, cameras, env, iteration
from benchmarks.gpu_learning import learn
from benchmarks.gpu_peers import RslRl
from benchmarks.gpu_stream import stream
from benchmarks.gpu_turns import ENVS, LEARNING, POLICY, STEPS, Row, Turn, nothing, report, take_turns
from benchmarks.timing import machine
from embodichain.agents.rl.algo.ppo import PPO, PPOCfg
from embodichain.agents.rl.models import build_policy
from embodichain.agents.rl.models.policy import Policy
from embodichain.extras import available

Section = Literal["update", "env", "iteration", "learn", "cameras", "stream"]
OBS, ACT = 48, 12
PACKAGES = ["torch", "tensordict", "mujoco", "mujoco_warp", "warp-lang", "rsl-rl-lib"]


@dataclass(frozen=True)
class Args:
    """What to measure."""

    only: tuple[Section, ...] = ("update", "env", "iteration", "learn", "cameras", "stream")
    """Sections to run."""
    ids: tuple[str, ...] = ("PushCubeRL", *SUITE, *WALKERS)
    """Environments of the section ``env``."""
    rounds: int = 9
    """Turns of each contender."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the learning runs."""
    out: Path = Path("benchmarks/results/gpu.json")
    """File for the figures."""


def update(rounds: int) -> list[Row]:
    """Measure the update alone."""
    contenders: dict[str, Turn] = {}
    for name, settings in {
        "ours": {},
        "ours, tf32": {"mixed_precision": "tf32"},
        "ours, bf16": {"mixed_precision": "bf16"},
        "ours without graphs": {"cuda_graphs": False},
    }.items():
        algorithm = PPO(PPOCfg.from_dict(LEARNING | settings), build_policy(POLICY, OBS, ACT, "cuda"))
        rollout = make_rollout(algorithm.policy)
        contenders[name] = (nothing, lambda algorithm=algorithm, rollout=rollout: algorithm.update(rollout))
    if available("rsl_rl"):
        peer = RslRl(ENVS, STEPS, OBS, ACT)
        contenders["rsl_rl"] = (peer.fill, peer.update)
    times = take_turns(contenders, rounds)
    best = times.get("rsl_rl")
    bars = {n: f"{best / s:.1f}x rsl_rl (bar: 4x)" if best and n.startswith("ours") else "" for n, s in times.items()}
    return [report("update", name, seconds, ENVS * STEPS, bars[name]) for name, seconds in times.items()]


def make_rollout(policy: Policy) -> TensorDict:
    """Return a rollout of random numbers that fits a policy."""
    shape = (STEPS, ENVS)
    obs, action = torch.randn(*shape, OBS, device="cuda"), torch.randn(*shape, ACT, device="cuda")
    flag = torch.zeros(shape, dtype=torch.bool, device="cuda")
    parts = {name: torch.randn(shape, device="cuda") for name in ("reward", "value", "next_value")}
    parts |= {"terminated": flag, "truncated": flag.clone(), "done": flag.clone()}
    with torch.no_grad():
        flat = TensorDict({"observation": obs.flatten(0, 1), "action": action.flatten(0, 1)}, [STEPS * ENVS])
        parts["sample_log_prob"] = policy.evaluate(flat)[0].view(shape)
    parts |= {"observation": obs, "action": action, "policy_version": torch.zeros_like(flag, dtype=torch.int64)}
    return TensorDict(parts, batch_size=shape).transpose(0, 1)


def main(args: Args) -> None:
    """Run the sections and write the figures, after each of them."""
    sections: dict[str, Callable[[int], list[Row]]] = {
        "update": update,
        "env": lambda rounds: env(rounds, args.ids),
        "iteration": iteration,
        "learn": lambda _: learn(args.seeds),
        "cameras": cameras,
        "stream": stream,
    }
    described = {"gpu": torch.cuda.get_device_name(), **machine(PACKAGES)}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for name in args.only:
        rows += sections[name](args.rounds)
        args.out.write_text(json.dumps({"machine": described, "rounds": args.rounds, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
