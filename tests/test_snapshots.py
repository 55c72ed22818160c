"""Snapshots: the same seeds give the same parameters, batches and episodes as when they were recorded.

``snapshots.json`` holds a hash of every tensor of each case, and what it was recorded with. On a machine like that one
the hashes must be equal, bit for bit; on any other one the sums of the tensors must be nearly equal.

A change that is meant to change numbers records the snapshots again, all of them or a few cases::

    OMP_NUM_THREADS=1 python -m tests.test_snapshots --record [CASE ...]
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import pytest
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.utils.data import DataLoader

from embodichain.agents.datasets import OnlineDataset, UniformChunkSampler
from embodichain.agents.engine.data import OnlineDataEngine, OnlineDataEngineCfg
from embodichain.agents.rl.algo.imitation import Imitation, ImitationCfg
from embodichain.agents.rl.models import build_policy
from embodichain.agents.rl.train import resume_training, train_from_config
from embodichain.agents.rl.utils.checkpoint import load_policy
from embodichain.config import merge
from embodichain.envs.registration import make
from tests.agents.rl.rank_cases import rank_environment, rendezvous_store
from tests.programs import start_program, wait_until

FILE = Path(__file__).with_name("snapshots.json")
TOLERANCE = 1e-3
Tensors = dict[str, Tensor]

# --- training -----------------------------------------------------------------------------------------------------

MLP = {"type": "mlp", "hidden_sizes": [16], "activation": "tanh"}
UPDATE = {"batch_size": 12, "n_epochs": 3, "learning_rate": 1e-2, "clip_coef": 0.05}  # many ratios leave the clip range
ITERATIONS, HALF = 4, 2
BASE: dict[str, Any] = {
    "trainer": {
        "seed": 3,
        "gym_config": {"id": "CartPoleRL", "max_episode_steps": 10, "num_threads": 1},
        "num_envs": 4,
        "buffer_size": 8,
        "iterations": ITERATIONS,
        "enable_eval": False,
        "save_freq": 0,
        "collect_threads": 1,
        "update_threads": 1,
    },
    "policy": {"name": "actor_critic", "actor": MLP, "critic": MLP, "normalize_obs": True},
    "algorithm": {"name": "ppo", "cfg": {**UPDATE, "ent_coef": 0.01}},
}
CAMERA = {
    "name": "front",
    "width": 16,
    "height": 16,
    "pos": [1.15, 0.0, 0.75],
    "lookat": [0.56, 0.0, 0.0],
    "fovy": 32.0,
}
LANGUAGE = {"id": "PushCubeLanguageRL", "max_episode_steps": 10, "num_threads": 1, "seed": 5}
LANGUAGE_ENV = {"observations": {"cameras": [CAMERA]}, "actions": {"ee_delta": {"scale": 0.04}}}
TINY_VLA = {"chunk_size": 3, "width": 16, "depth": 1, "num_heads": 2, "patch_size": 8, "hidden_size": 16}
PUSH_CUBE = {
    "id": "PushCubeRL",
    "env": {
        "observations": {"noise": {"robot/qpos": 0.01}},
        "events": {"randomize_mass": {"scale": [0.5, 2.0]}, "randomize_friction": {"scale": [0.5, 1.5]}},
    },
}
GRPO = {"name": "grpo", "cfg": {**UPDATE, "group_size": 2}}
RECURRENT = {"memory": {"type": "gru", "hidden_size": 8}}


def vla_policy(**settings: Any) -> dict[str, Any]:
    """Return the policy block of a small vision-language-action model."""
    return {"name": "vla", "vla_config": {"model_class": "tiny_vla", "model_config": TINY_VLA | settings}}


def collected(**collector: Any) -> dict[str, Any]:
    """Return the trainer's settings for collection in the background."""
    return {"model_type": "vla", "collector": {"num_threads": 1, **collector}}


RUNS: dict[str, dict[str, Any]] = {
    "ppo": {},
    "ppo_push_cube": {
        "trainer": {"gym_config": PUSH_CUBE},
        "policy": {"normalize_value": True},
        "algorithm": {"cfg": {"lr_schedule": "adaptive", "clip_value_loss": True}},
    },
    "ppo_target_kl": {"algorithm": {"cfg": {"lr_schedule": "linear", "target_kl": 0.01, "n_epochs": 6}}},
    "ppo_gymnasium": {"trainer": {"gym_config": {"id": "CartPole-v1"}}},
    "ppo_gymnasium_mujoco": {"trainer": {"gym_config": {"id": "InvertedPendulum-v5", "native": False}}},
    "ppo_mujoco_suite": {"trainer": {"gym_config": {"id": "Ant-v5"}}},
    "ppo_recurrent": {"policy": RECURRENT, "algorithm": {"cfg": {"batch_size": 16, "sequence_length": 4}}},
    "ppo_pipeline": {"trainer": {"collector": {"pipeline_stages": 2}}},
    "ppo_env_processes": {"trainer": {"collector": {"env_processes": 2}}},
    "ppo_async_lag_0": {"trainer": collected(max_policy_lag=0)},
    "ppo_async_process": {"trainer": collected(max_policy_lag=0, worker="process")},
    "ppo_async_lag_1": {"trainer": collected(max_policy_lag=1, adopt="lockstep")},
    "ppo_decoupled": {
        "trainer": collected(max_policy_lag=2, adopt="lockstep"),
        "algorithm": {"cfg": {"correction": "decoupled", "max_importance_weight": 1.1}},
    },
    "ppo_vtrace": {
        "trainer": collected(max_policy_lag=2, adopt="lockstep", pipeline_stages=2),
        "algorithm": {"cfg": {"correction": "decoupled", "advantage_estimator": "vtrace"}},
    },
    "grpo": {
        "trainer": {"gym_config": PUSH_CUBE},
        "policy": {"name": "actor_only"},
        "algorithm": merge(GRPO, {"cfg": {"kl_coef": 0.05}}),
    },
    "grpo_recurrent": {
        "trainer": {"gym_config": PUSH_CUBE},
        "policy": {"name": "actor_only", **RECURRENT},
        "algorithm": GRPO,
    },
    "grpo_decoupled": {
        "trainer": {"gym_config": PUSH_CUBE, **collected(max_policy_lag=1, adopt="lockstep")},
        "policy": {"name": "actor_only"},
        "algorithm": merge(GRPO, {"cfg": {"correction": "decoupled", "max_importance_weight": 1.1}}),
    },
    "vla_chunks": {
        "trainer": {"gym_config": {**LANGUAGE, "env": LANGUAGE_ENV}, "buffer_size": 4},
        "policy": vla_policy(),
        "algorithm": {"cfg": {"log_prob_per": "action"}},
    },
}
RESUMED = ("ppo_push_cube", "ppo_recurrent", "grpo", "ppo_decoupled")


def write_config(folder: Path, name: str, **trainer: Any) -> Path:
    """Write the config of a run to a file; the run goes to ``folder / name``."""
    changes = RUNS[name]
    base = BASE | {"policy": {}} if "vla_config" in changes.get("policy", {}) else BASE
    if changes.get("policy", {}).get("name") == "actor_only":
        base = base | {"policy": {key: value for key, value in BASE["policy"].items() if key != "critic"}}
    if changes.get("algorithm", {}).get("name") == "grpo":
        base = base | {"algorithm": {}}
    if not changes.get("trainer", {}).get("gym_config", {}).get("id", "RL").endswith("RL"):  # Gymnasium's own limit
        base = base | {"trainer": base["trainer"] | {"gym_config": {}}}
    file = folder / f"{name}.json"
    file.write_text(json.dumps(merge(merge(base, changes), {"trainer": {"run_dir": str(folder / name), **trainer}})))
    return file


def weights(run: Path) -> Tensors:
    """Return all parameters and buffers of a run's latest policy."""
    return load_policy(run, which="latest").state_dict()


def trained(name: str, folder: Path) -> Tensors:
    """Train without a break."""
    train_from_config(write_config(folder, name))
    return weights(folder / name)


def resumed(name: str, folder: Path) -> Tensors:
    """Train half of the iterations, and the rest in a resumed run."""
    train_from_config(write_config(folder, name, iterations=HALF))
    resume_training(folder / name, ["--trainer.iterations", str(ITERATIONS)])
    return weights(folder / name)


def two_ranks(folder: Path) -> Tensors:
    """Train in two processes that average their gradients, started as torchrun starts them."""
    config, store = write_config(folder, "ppo"), rendezvous_store()
    processes = []
    for rank in range(2):
        environment = os.environ | rank_environment(rank, 2, store.port) | {"OMP_NUM_THREADS": "1"}
        processes.append(start_program("-m", "embodichain.agents.rl.train", "--config", config, env=environment))
    try:
        for process in processes:
            _, errors = process.communicate(timeout=200)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
    return weights(folder / "ppo")


# --- the stream ---------------------------------------------------------------------------------------------------

ROWS, CHUNK, REFILL = 4, 3, 16


def streamed(folder: Path) -> Tensors:
    """Fill a buffer with episodes of one worker, draw in every way there is, and draw again after a refill."""
    cfg = OnlineDataEngineCfg(
        buffer_size=ROWS,
        max_episode_steps=LANGUAGE["max_episode_steps"],
        gym_config={**LANGUAGE, "num_envs": 2, "env": LANGUAGE_ENV},
        action_config={"source": "expert", "noise_std": 0.1},
        refill_threshold=REFILL,
        seed=11,
        progress=False,
    )
    torch.manual_seed(1)
    with OnlineDataEngine(cfg) as engine:
        assert engine.stats().episodes_written == ROWS
        parts = {"numpy": engine.sample_batch(4, CHUNK, generator=np.random.default_rng(2))}
        parts["torch"] = engine.sample_batch(4, CHUNK, generator=torch.Generator().manual_seed(2))
        parts["default"] = engine.sample_batch(4, CHUNK)
        for number, batch in enumerate(draw(OnlineDataset(engine, CHUNK, batch_size=4), 2)):
            parts[f"batch_mode/{number}"] = batch
        mixed = UniformChunkSampler(2, 5)
        for number, batch in enumerate(draw(OnlineDataset(engine, mixed, batch_size=4), 2)):
            parts[f"mixed_batch_mode/{number}"] = batch
        for number, batch in enumerate(draw(OnlineDataset(engine, mixed), 1, batch_size=4)):
            parts[f"item_mode/{number}"] = batch
        result = {f"{way}/{name}": value for way, part in parts.items() for name, value in flat(part).items()}
        result |= {f"imitation/{name}": value for name, value in imitated(parts["numpy"], parts["torch"]).items()}
        engine.sample_batch(ROWS * REFILL, CHUNK, generator=np.random.default_rng(3))
        wait_until(lambda: engine.stats().episodes_written >= 2 * ROWS)
        again = engine.sample_batch(4, CHUNK, generator=np.random.default_rng(2))
        return result | {f"refilled/{name}": value for name, value in flat(again).items()}


def draw(dataset: OnlineDataset, count: int, batch_size: int | None = None) -> Iterator[TensorDictBase]:
    """Draw a few batches through a DataLoader."""
    return itertools.islice(DataLoader(dataset, batch_size=batch_size), count)


def imitated(*batches: TensorDictBase) -> Tensors:
    """Imitate some batches of demonstrations; return the policy's weights."""
    torch.manual_seed(4)
    with make({**LANGUAGE, "num_envs": 1, "env": LANGUAGE_ENV}) as env:
        policy = build_policy(vla_policy(), env.observation_space, env.action_space, torch.device("cpu"))
    learner = Imitation(ImitationCfg(total_steps=4, warmup_steps=1), policy)
    for batch in batches:
        learner.update(batch)
    return policy.state_dict()


# --- environments -------------------------------------------------------------------------------------------------

EPISODES: dict[str, dict[str, Any]] = {
    "cart_pole": {"id": "CartPoleRL", "max_episode_steps": 60},
    "reach": {"id": "ReachRL"},
    "reach_qpos": {"id": "ReachRL", "env": {"actions": {"qpos": {}}}},
    "reach_ee_delta": {"id": "ReachRL", "env": {"actions": {"ee_delta": {"rotation_scale": 0.1}}}},
    "push_cube": PUSH_CUBE,
    "push_cube_language": {"id": "PushCubeLanguageRL"},
    "pick_cube": {"id": "PickCubeRL", "env": PUSH_CUBE["env"]},
    "camera": {**LANGUAGE, "env": LANGUAGE_ENV},
}


def episode(settings: dict[str, Any], folder: Path) -> Tensors:
    """Let the expert act until both envs have ended an episode; return all that was seen, done and rewarded."""
    steps: dict[str, list[Tensor]] = {}
    with make({"num_threads": 1, "seed": 7, **settings, "num_envs": 2}) as env:
        obs, _ = env.reset(seed=7)
        running = torch.ones(env.num_envs, dtype=torch.bool)
        while running.any():
            action = env.expert_action()
            seen = {f"observation/{name}": value for name, value in flat(obs).items()} | {"action": action}
            obs, reward, terminated, truncated, info = env.step(action)
            seen |= {"reward": reward, "terminated": terminated, "truncated": truncated}
            seen |= {f"rewards/{name}": value for name, value in flat(info["rewards"]).items()}
            seen |= {f"final/{name}": value for name, value in flat(info["final_observation"]).items()}
            for name, value in seen.items():
                steps.setdefault(name, []).append(value.clone())
            running &= ~(terminated | truncated)
    return {name: torch.stack(values) for name, values in steps.items()}


def flat(data: Any) -> Tensors:
    """Return copies of all tensors of nested data, by their path."""
    if isinstance(data, Tensor):
        return {"": data.clone()}
    parts = ((str(key), flat(value)) for key, value in data.items())
    return {f"{key}/{name}".rstrip("/"): value for key, part in parts for name, value in part.items()}


# --- comparison ---------------------------------------------------------------------------------------------------

CASES: dict[str, Callable[[Path], Tensors]] = {
    **{name: partial(trained, name) for name in RUNS},
    **{f"{name}_resumed": partial(resumed, name) for name in RESUMED},
    "ppo_two_ranks": two_ranks,
    "stream": streamed,
    **{f"episode_{name}": partial(episode, settings) for name, settings in EPISODES.items()},
}
EQUAL = {"ppo_async_lag_0": "ppo", "ppo_async_process": "ppo", **{f"{name}_resumed": name for name in RESUMED}}
"""Cases that give the same numbers as others."""


def digest(tensors: Tensors) -> str:
    """Return the SHA-256 of names, types, shapes and bytes, in the order of the names."""
    whole = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        whole.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
        whole.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def sums(tensors: Tensors) -> dict[str, list[float]]:
    """Return, by name, the sum of each tensor and of its absolute values."""
    doubles = ((name, value.detach().double()) for name, value in sorted(tensors.items()))
    return {name: [float(value.sum()), float(value.abs().sum())] for name, value in doubles}


def machine() -> dict[str, str]:
    """Return what the last bits of a result depend on."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().split("\n\n")[0] if cpuinfo.exists() else ""
    fields = [re.search(rf"^{name}\s*: (.*)$", lines, re.M) for name in ("model name", "cpu family", "model")]
    return {
        "torch": torch.__version__,
        "mujoco": mujoco.__version__,
        "numpy": np.__version__,
        "libc": " ".join(platform.libc_ver()),
        "cpu": " ".join(field[1] for field in fields if field) or platform.processor(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def load() -> dict[str, Any]:
    """Return the stored snapshots."""
    return json.loads(FILE.read_text())


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_recorded(case, tmp_path):
    stored, tensors = load(), CASES[case](tmp_path)
    expected, actual = stored["cases"][case]["sums"], sums(tensors)
    assert actual.keys() == expected.keys()
    if machine() == stored["machine"]:
        different = [name for name in expected if actual[name] != expected[name]]
        assert digest(tensors) == stored["cases"][case]["sha256"], f"sums differ in {different}"
    for name, (total, size) in expected.items():
        assert actual[name] == pytest.approx([total, size], abs=TOLERANCE * size), name


def test_snapshots_are_of_all_cases_and_agree_where_runs_are_equal():
    cases = load()["cases"]
    assert cases.keys() == CASES.keys()
    assert {case: cases[case]["sha256"] for case in EQUAL} == {c: cases[o]["sha256"] for c, o in EQUAL.items()}


def record(names: list[str]) -> None:
    """Write the snapshots of some cases, or of all."""
    torch.set_num_threads(1)
    stored = load() if names else {"machine": machine(), "cases": {}}
    if stored["machine"] != machine():
        raise SystemExit(f"the other cases were recorded with {stored['machine']}, this is {machine()}: record all")
    for name in names or CASES:
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            tensors = CASES[name](Path(folder))
        stored["cases"][name] = {"sha256": digest(tensors), "sums": sums(tensors)}
        print(f"{time.monotonic() - start:5.1f} s  {name}")
    text = json.dumps(stored, indent=1)
    FILE.write_text(re.sub(r"\[\s+(\S+),\s+(\S+)\s+\]", r"[\1, \2]", text) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Record the snapshots of training and streaming again.")
    parser.add_argument("--record", nargs="*", metavar="CASE", choices=CASES, required=True, help="cases; default: all")
    record(parser.parse_args().record)
