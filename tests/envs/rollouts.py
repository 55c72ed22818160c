"""Drive an environment for a while and write down all that it says."""

import hashlib

import torch
from tensordict import TensorDict
from torch import Tensor

from embodichain.envs.registration import make
from embodichain.envs.vec_env import VecEnv

TASKS = ("CartPoleRL", "ReachRL", "PushCubeRL", "PushCubeLanguageRL", "PickCubeRL")
RANDOMIZED = {
    "observations": {"noise": {"robot/qpos": 0.01, "robot/qvel": 0.05}},
    "events": {"randomize_mass": {"scale": [0.5, 2.0]}, "randomize_friction": {"scale": [0.5, 1.5]}},
}
"""Everything that draws random numbers: noise, mass and friction besides the start."""


def settings(task: str) -> dict:
    """Return ``env`` settings with as much randomness as the task knows."""
    has_object = "Cube" in task
    return dict(RANDOMIZED) if has_object else {"observations": RANDOMIZED["observations"]}


def small(task: str, num_envs: int = 4, **overrides) -> VecEnv:
    """Make an env with short episodes."""
    return make(task, **{"num_envs": num_envs, "seed": 7, "max_episode_steps": 12, "num_threads": 2} | overrides)


def random_actions(env: VecEnv, steps: int, seed: int = 0) -> Tensor:
    """Return actions ``[steps, num_envs, action_dim]``; those of env i do not depend on ``num_envs``."""
    rows = [
        torch.rand(steps, env.action_manager.action_dim, generator=torch.Generator().manual_seed(1000 * seed + env_id))
        for env_id in range(env.num_envs)
    ]
    return 2.0 * torch.stack(rows, dim=1) - 1.0


def flat(obs: TensorDict) -> dict[str, Tensor]:
    """Return the leaves of an observation by path, copied."""
    items = obs.items(include_nested=True, leaves_only=True)
    return {"/".join(key) if isinstance(key, tuple) else key: value.clone() for key, value in items}


def record(env: VecEnv, actions: Tensor) -> list[dict[str, Tensor]]:
    """Return everything that each step returned, by name."""
    trace = []
    for action in actions:
        obs, reward, terminated, truncated, info = env.step(action)
        said = {"reward": reward, "terminated": terminated, "truncated": truncated, "seed": info["episode_seed"]}
        said |= {f"obs/{k}": v for k, v in flat(obs).items()}
        said |= {f"final/{k}": v for k, v in flat(info["final_observation"]).items()}
        said |= {f"part/{k}": v for k, v in info["rewards"].items()}
        said |= {f"metric/{k}": v for k, v in info["metrics"].items()}
        trace.append({name: value.clone() for name, value in said.items()})
    return trace


def rows(trace: list[dict[str, Tensor]], ids) -> list[dict[str, Tensor]]:
    """Return the part of a trace that belongs to some envs."""
    return [{name: value[ids] for name, value in said.items()} for said in trace]


def assert_same(one: list[dict[str, Tensor]], other: list[dict[str, Tensor]]) -> None:
    """Demand bitwise equality of two traces."""
    assert len(one) == len(other)
    for step, (a, b) in enumerate(zip(one, other, strict=True)):
        assert a.keys() == b.keys()
        for name in a:
            assert torch.equal(a[name], b[name]), f"step {step}: {name} differs"


def digest(trace: list[dict[str, Tensor]]) -> str:
    """Return a hash of every bit of a trace."""
    whole = hashlib.sha256()
    for said in trace:
        for name in sorted(said):
            whole.update(name.encode())
            whole.update(said[name].contiguous().numpy().tobytes())
    return whole.hexdigest()


def assert_same_leaves(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare two flat observations to the bit."""
    assert found.keys() == expected.keys()
    for name, leaf in found.items():
        assert torch.equal(leaf, expected[name]), name
