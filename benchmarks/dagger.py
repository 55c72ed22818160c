"""Labels that a policy needs: imitating demonstrations, or the expert's corrections of its own mistakes (DAgger).

::

    python -m benchmarks.dagger --jobs 10                  # five seeds of both, a few minutes on 16 cores
    python -m benchmarks.dagger --seeds 0 --jobs 1         # one seed, about 3 minutes on an idle core

Both ways stream ``PushCubeRL`` through an ``OnlineDataEngine`` with a worker process, round by round: 16 more episodes,
whose frames are added to the labels so far, then as many gradient steps as in every other round, then 200 episodes that
judge the policy. The expert's actions are the labels in both. With ``dagger`` the newest policy acts, and the expert's
share of the decisions falls from round to round: 1, 0.8, 0.64 and so on. Episodes that are labelled end with success or
after 50 steps, where the expert needs 31: later, a policy that is stuck only repeats what is labelled already.

Runs are added one by one to ``results/dagger.json``; what is in it already is not run again. The exit code is 1 if
``dagger`` needs no fewer labels to 90% success than ``cloning``, on average over the seeds, or if runs are missing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from benchmarks.charts import Series, draw_curves
from benchmarks.timing import machine
from embodichain.agents.engine import OnlineDataEngine, OnlineDataEngineCfg
from embodichain.agents.rl.evaluation import evaluate
from embodichain.agents.rl.models import build_policy
from embodichain.agents.rl.models.policy import Policy
from embodichain.envs.registration import make

ROOT = Path(__file__).parents[1]
TASK = "PushCubeRL"
GOAL = 0.9
WAYS: dict[str, dict[str, Any]] = {
    "cloning": {"source": "expert"},
    "dagger": {"source": "dagger", "deterministic": True},
}
ROUNDS, EPISODES, GRADIENT_STEPS, BATCH = 16, 16, 400, 256
LONGEST = 50
"""Steps of an episode that is labelled."""
JUDGED, JUDGE_SEED = 200, 10_000


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the results")
    parser.add_argument(
        "--decay",
        type=float,
        default=0.8,
        help="what is left, round by round, of the share of decisions that is the expert's",
    )
    parser.add_argument(
        "--hidden", type=int, default=256, help="width of the two layers; other settings, other --output"
    )
    parser.add_argument("--one", nargs=2, metavar=("WAY", "SEED"), help="do one run and print it (for --jobs)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    args = parse_args(argv)
    if args.one:
        print(json.dumps(run(args.one[0], int(args.one[1]), args.decay, args.hidden)))
        return 0
    file: Path = args.output / "dagger.json"
    content: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"runs": {way: {} for way in WAYS}}
    runs = content["runs"]
    todo = [(way, seed) for seed in args.seeds for way in WAYS if str(seed) not in runs[way]]
    with ThreadPoolExecutor(args.jobs) as pool:
        futures = {pool.submit(_run_apart, way, seed, args.decay, args.hidden): (way, seed) for way, seed in todo}
        for future in as_completed(futures):
            way, seed = futures[future]
            if future.exception() is not None:
                print(f"{way}, seed {seed} failed: {future.exception()}", file=sys.stderr, flush=True)
                continue
            runs[way][str(seed)] = result = future.result()
            print(f"{way}, seed {seed}: {result['success']}", file=sys.stderr, flush=True)
            content["machine"] = machine(("torch", "mujoco", "tensordict"))
            content["summary"] = summary(runs)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(content, indent=1) + "\n")
    content["summary"] = summary(runs)
    print(json.dumps(content["summary"], indent=1))
    series = [
        Series(way, [(np.array(run["labels"], float), 100 * np.array(run["success"])) for run in runs[way].values()])
        for way in WAYS
    ]
    axes = ("labels of the expert", "success (%)")
    draw_curves(args.output / "dagger.png", f"{TASK}: labels and success", axes, series, goal=100 * GOAL)
    complete = all(str(seed) in runs[way] for way in WAYS for seed in args.seeds)
    return 0 if complete and content["summary"]["dagger_needs_fewer"] else 1


def _run_apart(way: str, seed: int, decay: float, hidden: int) -> dict[str, Any]:
    """Do one run in a process of its own."""
    variables = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    words = [sys.executable, "-m", "benchmarks.dagger", "--one", way, str(seed)]
    words += ["--decay", str(decay), "--hidden", str(hidden)]
    done = subprocess.run(words, cwd=ROOT, env=variables, stdout=subprocess.PIPE, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def run(way: str, seed: int, decay: float, hidden: int) -> dict[str, Any]:
    """Learn from more and more labels; return how many there were, and the success, after every round."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    began, env = time.monotonic(), make({"id": TASK, "num_envs": 100, "num_threads": 1})
    network = {"type": "mlp", "network_cfg": {"hidden_sizes": [hidden, hidden], "activation": "relu"}}
    block = {"name": "actor_critic", "actor": network, "critic": network, "normalize_obs": True}
    policy = build_policy(block, env.observation_space, env.action_space, "cpu")
    falling = {"schedule": "exponential", "start": 1.0, "decay": decay, "over": 1, "unit": "updates"}
    cfg = OnlineDataEngineCfg(
        buffer_size=EPISODES,
        gym_config={"id": TASK, "num_envs": 8, "num_threads": 1, "max_episode_steps": LONGEST},
        action_config={
            **WAYS[way],
            **({"expert_share": falling} if way == "dagger" else {}),
            "terminate_on_success": True,
        },
        refill_threshold=1,
        seed=seed,
        start_timeout=600.0,  # many start at once
        worker_timeout=600.0,
        progress=False,
    )
    labels: list[TensorDictBase] = []
    counts, success = [], []
    with OnlineDataEngine(cfg) as engine:
        for number in range(ROUNDS):
            if number:
                if way == "dagger":
                    engine.publish(policy)
                engine.sample_batch(EPISODES, 1)  # which lets the worker write the buffer again
            labels.append(written(engine, EPISODES * (number + 1)))
            policy.update_normalizer(labels[-1]["observation"])
            learn(policy, torch.cat(labels))
            counts.append(sum(len(part) for part in labels))
            judged = evaluate(policy, env, JUDGED, JUDGE_SEED).summary
            success.append(judged.success_rate)
    env.close()
    return {"labels": counts, "success": success, "seconds": round(time.monotonic() - began, 1)}


def written(engine: OnlineDataEngine, episodes: int) -> TensorDictBase:
    """Wait until the worker has written so many episodes; return the frames of those in the buffer, ``[frames]``."""
    while engine.stats().episodes_written < episodes:
        time.sleep(0.02)
    rows = [engine.shared_buffer[row, : engine.episode_info(row).length] for row in range(engine.buffer_size)]
    frames: Any = torch.cat(rows)
    labels: TensorDictBase = frames.select("observation", "action")
    return labels


def learn(policy: Policy, labels: TensorDictBase) -> None:
    """Fit the policy's most likely actions to the labels, by their absolute error."""
    optimizer = torch.optim.Adam(policy.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=GRADIENT_STEPS)
    for _ in range(GRADIENT_STEPS):
        batch = labels[torch.randint(len(labels), (BATCH,))]
        loss = policy.imitation_loss(batch["observation"], batch["action"].unsqueeze(1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    policy.version += 1


def labels_to_goal(run: dict[str, Any]) -> float | None:
    """Return with how many labels the goal is first reached, interpolated between rounds; ``None`` if never."""
    for index, success in enumerate(run["success"]):
        if success >= GOAL:
            if index == 0:
                return float(run["labels"][0])
            before = run["success"][index - 1]
            share = (GOAL - before) / (success - before)
            return run["labels"][index - 1] + share * (run["labels"][index] - run["labels"][index - 1])
    return None


def summary(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the labels to the goal of every run, their means, and whether ``dagger`` needs fewer.
    A run that does not get there counts with all its labels, which is less than it needs."""
    rows: dict[str, Any] = {}
    for way, seeds in runs.items():
        needed = {seed: labels_to_goal(run) for seed, run in sorted(seeds.items())}
        at_least = [float(needed[seed] or run["labels"][-1]) for seed, run in seeds.items()]
        rows[way] = {
            "labels_to_90": {seed: None if count is None else round(count) for seed, count in needed.items()},
            "mean_at_least": round(float(np.mean(at_least))) if at_least else None,
            "reached": sum(count is not None for count in needed.values()),
            "final_success": {seed: run["success"][-1] for seed, run in sorted(seeds.items())},
        }
    first, second = rows["dagger"], rows["cloning"]
    fewer = bool(runs["dagger"] and runs["cloning"]) and first["mean_at_least"] < second["mean_at_least"]
    return {**rows, "dagger_needs_fewer": fewer and first["reached"] == len(runs["dagger"])}


if __name__ == "__main__":
    sys.exit(main())
