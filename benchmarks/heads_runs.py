"""One run of the benchmark of heads: demonstrations, a clone of them and, in one part, reinforcement of that clone.

::

    python -m benchmarks.heads_runs two_way flow 0 FOLDER
    python -m benchmarks.heads_runs reinforce grpo_gaussian 0 FOLDER [--share 0.1]

writes ``FOLDER/outcome.json``. One thread; nothing outside the process is needed.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from embodichain.agents.engine.sources import ExpertActor, SimulatedEpisodes
from embodichain.agents.rl.checkpoint import save_checkpoint
from embodichain.agents.rl.evaluation import evaluate
from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.models.registry import build_policy
from embodichain.agents.rl.runs import read_metrics
from embodichain.envs.registration import make

CONFIGS = Path(__file__).parents[1] / "configs" / "agents" / "rl"
HEADS = ("gaussian", "flow", "tokens")
PARTS = {"two_way": HEADS, "reinforce": ("ppo_flow", "ppo_gaussian", "grpo_flow", "grpo_gaussian")}
"""What is run, part by part."""
GAUSSIAN_LOG_STD = -1.8
"""First log-std of the Gaussian that is reinforced: a standard deviation of 0.17, small enough for a clone."""
EVAL_SEED = 1_000_003
"""Seed of the evaluation episodes, which no demonstration shows."""


@dataclass(frozen=True)
class Cloning:
    """How a policy is cloned: the same for all heads."""

    task: str
    chunk_size: int
    episodes: int
    """Demonstrations; the expert's failures are left out."""
    noise: float
    """Standard deviation of the noise on the actions that the expert's envs take; what is stored has none."""
    steps: int
    """Gradient steps."""
    batch_size: int = 256
    learning_rate: float = 1e-3
    weight_decay: float = 1e-4
    evaluations: int = 1
    """How often the clone is evaluated while it learns, the last time at the end."""
    eval_episodes: int = 200


TWO_WAY = Cloning("PushAroundRL", 8, 4000, 0.05, 12_000, evaluations=4)
"""The chunks contain the choice: the mean of shorter ones is soon on one side, where the next chunk goes on."""
WEAK = Cloning("PushCubeRL", 2, 10, 0.1, 600, eval_episodes=256)
"""A few demonstrations: enough to begin with, not to succeed."""


@dataclass
class Outcome:
    """What one run gave."""

    part: str
    name: str
    seed: int
    steps: list[int] = field(default_factory=list)
    """Gradient steps of imitation, or environment steps of reinforcement; 0 is the clone."""
    success: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Since the run began, with demonstrations and evaluations."""
    measures: dict[str, list[float]] = field(default_factory=dict)
    """What else was measured at those steps."""
    cpu_seconds: float = 0.0

    def add(self, step: int, success: float, seconds: float, **measures: float) -> None:
        """Add an evaluation."""
        self.steps.append(step)
        self.success.append(round(success, 4))
        self.seconds.append(round(seconds, 1))
        for name, value in measures.items():
            self.measures.setdefault(name, []).append(round(value, 4))


def two_way_policy(head: str, chunk_size: int) -> dict[str, Any]:
    """Return the block of a policy; means and velocities have networks of one size, the decoder is of that order."""
    network = {"type": "mlp", "network_cfg": {"hidden_sizes": [512, 512, 512], "activation": "silu"}}
    block: dict[str, Any] = {"name": head, "chunk_size": chunk_size, "critic": network, "normalize_obs": True}
    if head == "tokens":
        return block | {"tokens": {"width": 64, "depth": 2}}
    flow = {"num_steps": 10, "start": "drawn", "imitation_samples": 4}
    return block | {"actor": network} | ({"flow": flow} if head == "flow" else {})


class Demonstrations:
    """Chunks of actions that a scripted expert takes, with the observations that they follow."""

    def __init__(self, cloning: Cloning, seed: int) -> None:
        observations: list[TensorDict] = []
        chunks, valid = list[Tensor](), list[Tensor]()
        with make(cloning.task, num_envs=min(64, cloning.episodes), seed=seed, num_threads=1) as env:
            source = SimulatedEpisodes(env, ExpertActor(env), seed, cloning.noise)
            while len(chunks) < cloning.episodes:
                for episode in source.advance():
                    if not episode.success or len(chunks) == cloning.episodes:
                        continue
                    frames = {key: torch.cat(parts) for key, parts in episode.frames.items()}  # copied: a ring
                    length = episode.length
                    seen = TensorDict({}, [length])
                    for key, value in frames.items():
                        if key[0] == "observation":
                            seen[key[1:]] = value.clone()
                    index = torch.arange(length).unsqueeze(1) + torch.arange(cloning.chunk_size)
                    observations.append(seen)
                    valid.append(index < length)
                    chunks.append(frames[("action",)][index.clamp(max=length - 1)])
        self.observation = torch.cat(observations)  # type: ignore[arg-type]
        self.chunk, self.valid = torch.cat(chunks), torch.cat(valid)

    def __len__(self) -> int:
        return len(self.chunk)


def clone(policy: Policy, shown: Demonstrations, cloning: Cloning, evaluated: Callable[[int], None]) -> None:
    """Let a policy imitate; ``evaluated`` is called with the number of gradient steps, ``evaluations`` times."""
    policy.update_normalizer(shown.observation)
    for module in policy.modules():
        if hasattr(module, "frozen"):
            module.frozen = True  # reinforcement sees through the same statistics
    optimizer = torch.optim.AdamW(policy.parameters(), lr=cloning.learning_rate, weight_decay=cloning.weight_decay)
    marks = {round(cloning.steps * (k + 1) / cloning.evaluations) for k in range(cloning.evaluations)}
    for step in range(1, cloning.steps + 1):
        cosine = 0.5 * (1.0 + math.cos(math.pi * step / cloning.steps))
        for group in optimizer.param_groups:
            group["lr"] = cloning.learning_rate * min(1.0, step / 50) * (0.1 + 0.9 * cosine)
        rows = torch.randint(len(shown), (cloning.batch_size,))
        loss = policy.imitation_loss(shown.observation[rows], shown.chunk[rows], shown.valid[rows]).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        if step in marks:
            evaluated(step)


def run_two_way(head: str, seed: int, share: float) -> Outcome:
    """Clone an expert that goes either way round an obstacle.

    Success is that of an evaluation: of the Gaussian's mean, of the flow without exploration, of the likeliest tokens.
    ``sampled`` is that of all of them as they explore.
    """
    cloning, outcome, began = _shortened(TWO_WAY, share), Outcome("two_way", head, seed), time.monotonic()
    torch.manual_seed(seed)
    shown = Demonstrations(cloning, 1000 + seed)
    with make(cloning.task, num_envs=100, seed=EVAL_SEED, num_threads=1) as env:
        policy = build_policy(two_way_policy(head, cloning.chunk_size), env.observation_space, env.action_space, "cpu")

        def evaluated(step: int) -> None:
            likely = evaluate(policy, env, cloning.eval_episodes, EVAL_SEED).scalars()
            drawn = evaluate(policy, env, cloning.eval_episodes, EVAL_SEED, deterministic=False).scalars()
            success, sampled, left = likely["eval/success"], drawn["eval/success"], likely["eval/left"]
            outcome.add(step, success, time.monotonic() - began, sampled=sampled, left=left)

        clone(policy, shown, cloning, evaluated)
    return outcome


def run_reinforce(name: str, seed: int, share: float, folder: Path) -> Outcome:
    """Clone a few demonstrations, and let PPO or GRPO go on from there, by the shipped config."""
    from rich.console import Console

    from embodichain.agents.rl.config import load_train_config
    from embodichain.agents.rl.train import train_from_config

    algorithm, _, head = name.partition("_")
    file = CONFIGS / "push_cube" / f"train_config_flow{'_grpo' if algorithm == 'grpo' else ''}.json"
    cfg = load_train_config(file)
    if head == "gaussian":  # a network of the same size for the mean; nothing else differs
        same = {key: value for key, value in cfg.policy.items() if key != "flow"}
        cfg = cfg.replace(policy=same | {"name": "gaussian", "init_log_std": GAUSSIAN_LOG_STD})
    cloning, outcome, began = _shortened(WEAK, share), Outcome("reinforce", name, seed), time.monotonic()
    torch.manual_seed(seed)
    shown = Demonstrations(cloning, 1000 + seed)
    with make(cloning.task, num_envs=128, seed=EVAL_SEED, num_threads=1) as env:
        policy = build_policy(cfg.policy, env.observation_space, env.action_space, "cpu")
        clone(policy, shown, cloning, lambda step: None)
        cloned = evaluate(policy, env, cloning.eval_episodes, EVAL_SEED).scalars()["eval/success"]
    outcome.add(0, cloned, time.monotonic() - began)
    save_checkpoint(folder / "clone", {"policy": policy.state_dict()})
    words = ["--trainer.seed", seed, "--trainer.run_dir", folder / "run", "--trainer.init_from", folder / "clone"]
    words += ["--trainer.eval_video", "false", "--trainer.num_eval_episodes", cloning.eval_episodes]
    if share < 1.0:
        words += ["--trainer.total_steps", max(1, round(share * cfg.trainer.total_steps))]
    before = time.monotonic() - began
    train_from_config(cfg, [str(word) for word in words], console=Console(stderr=True))
    for line in read_metrics(folder / "run" / "metrics.jsonl"):
        if "eval/success" in line:
            outcome.add(line["step"], line["eval/success"], before + line["time/total_seconds"])
    return outcome


def _shortened(cloning: Cloning, share: float) -> Cloning:
    return cloning if share >= 1.0 else Cloning(**asdict(cloning) | {"steps": max(1, round(share * cloning.steps))})


def main(argv: Sequence[str] | None = None) -> None:
    """Run once."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("name", choices=sorted({name for names in PARTS.values() for name in names}))
    parser.add_argument("seed", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--share", type=float, default=1.0, help="part of the training, for a trial")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.part == "two_way":
        outcome = run_two_way(args.name, args.seed, args.share)
    else:
        outcome = run_reinforce(args.name, args.seed, args.share, args.folder)
    outcome.cpu_seconds = round(time.process_time(), 1)
    (args.folder / "outcome.json").write_text(json.dumps(asdict(outcome)))


if __name__ == "__main__":
    main()
