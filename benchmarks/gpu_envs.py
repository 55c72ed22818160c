"""The environment on a GPU alone, with its cameras, and together with learning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks.gpu_peers import BareWarp, RslRl
from benchmarks.gpu_turns import ENVS, LEARNING, POLICY, STEPS, Row, Turn, make_env, nothing, report, take_turns
from embodichain.agents.rl.algo.ppo import PPO, PPOCfg
from embodichain.agents.rl.collector.sync_collector import SyncCollector
from embodichain.agents.rl.models import build_policy
from embodichain.envs.task_env import TaskEnv
from embodichain.extras import available

SHORTER = {"timestep": 0.002, "substeps": 10}
"""The same 20 ms per action in twice as many physics steps."""
SUITE = ("Ant-v5", "HalfCheetah-v5")
"""Environments of Gymnasium that are measured beside the tasks."""
WALKERS = ("QuadrupedVelocityRL", "BipedVelocityRL")
"""Robots that walk."""


def env(rounds: int, ids: Sequence[str] = ("PushCubeRL", *SUITE, *WALKERS)) -> list[Row]:
    """Measure the environment alone."""
    rows, count = [], 24
    sizes = {"PushCubeRL": (1024, 4096, 16384)}
    for id, num_envs in [(name, size) for name in ids for size in sizes.get(name, (4096,))]:
        ours = make_env(num_envs, id=id)
        actions = torch.rand(count, num_envs, ours.action_manager.action_dim, device="cuda") * 2 - 1
        for action in actions:  # away from the first moment, in which all envs are alike
            ours.step(action)
        state, physics, commands = ours.get_state(), ours.physics.state(), []
        for action in actions:
            ours.step(action)
            commands.append(ours.physics.ctrl.clone())
        bare = BareWarp(ours, commands, physics)

        def steps(ours: TaskEnv = ours, actions: torch.Tensor = actions) -> None:
            for action in actions:
                ours.step(action)

        def rewind(ours: TaskEnv = ours, state: TensorDict = state) -> None:
            ours.set_state(state)

        times = take_turns({"bare": (bare.rewind, bare.run), "ours": (rewind, steps)}, rounds)
        share = times["bare"] / times["ours"]
        least = 80 if id == "PushCubeRL" else 85
        bar = f"{100 * share:.0f}% of it{f' (bar: {least}%)' if num_envs >= 4096 else ''}"
        rows.append(report("env", f"mujoco_warp alone, {id}, {num_envs} worlds", times["bare"] / count, num_envs))
        rows.append(report("env", f"{id}, {num_envs} envs", times["ours"] / count, num_envs, bar))
        ours.close()
    return rows


def cameras(rounds: int) -> list[Row]:
    """Measure observations with pictures."""
    rows = []
    for num_envs, size in ((256, 96), (1024, 96), (1024, 224)):
        camera = {"name": "side", "width": size, "height": size}
        ours = make_env(num_envs, env={"observations": {"cameras": [camera]}})
        renderer = ours._render_all
        action = torch.zeros(num_envs, ours.action_manager.action_dim, device="cuda")
        contenders: dict[str, Turn] = {"step": (nothing, lambda ours=ours, action=action: ours.step(action))}
        if renderer is not None:
            contenders["pictures"] = (
                nothing,
                lambda draw=renderer, ours=ours: draw(ours.task.markers(), None),
            )
        for name, seconds in take_turns(contenders, rounds).items():
            rows.append(report("cameras", f"{name}, {num_envs} envs x {size}x{size}", seconds, num_envs))
        ours.close()
    return rows


def iteration(rounds: int) -> list[Row]:
    """Measure collecting and learning together, with the physics as it is and with shorter steps."""
    return [*_iteration(rounds, "5 x 4 ms", {}), *_iteration(rounds, "10 x 2 ms", {"env": SHORTER})]


def _iteration(rounds: int, label: str, changes: dict[str, Any]) -> list[Row]:
    ours = make_env(ENVS, **changes)
    contenders: dict[str, Turn] = {}
    for name, settings in {"ours": {}, "ours, tf32": {"mixed_precision": "tf32"}}.items():
        policy = build_policy(POLICY, ours.observation_space, ours.action_space, "cuda")
        algorithm, collector = PPO(PPOCfg.from_dict(LEARNING | settings), policy), SyncCollector(ours, policy)
        contenders[name] = (nothing, lambda a=algorithm, c=collector: a.update(c.collect(STEPS)))
    contenders["ours, collecting alone"] = (nothing, lambda: collector.collect(STEPS))
    if available("rsl_rl"):
        obs_dim = sum(leaf.shape[1] for leaf in ours.reset()[0].values(True, True))
        peer = RslRl(ENVS, STEPS, obs_dim, ours.action_manager.action_dim)
        contenders["rsl_rl, collecting alone"] = (peer.ppo.storage.clear, lambda: peer.collect(ours))
        contenders["rsl_rl"] = (peer.ppo.storage.clear, lambda: (peer.collect(ours), peer.update()))
    times = take_turns(contenders, rounds)
    ours.close()
    best = times.get("rsl_rl")
    bars = {name: f"{best / times[name]:.2f}x rsl_rl (bar: 2x)" if best else "" for name in ("ours", "ours, tf32")}
    rows = times.items()
    return [report("iteration", f"{label}: {name}", s, ENVS * STEPS, bars.get(name, "")) for name, s in rows]
