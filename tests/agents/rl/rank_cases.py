"""Ranks that really are processes: how tests start them, and what they do."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict

from embodichain.agents.rl.algo import GRPO, PPO, Distillation, DistillationCfg, GRPOCfg, PPOCfg
from embodichain.agents.rl.algo.distillation import Teacher
from embodichain.agents.rl.checkpoint import save_checkpoint
from embodichain.agents.rl.collector import SyncCollector
from embodichain.agents.rl.config import TrainerCfg
from embodichain.agents.rl.runs import run_to_resume
from embodichain.agents.rl.train import resume_training, train_from_config
from embodichain.agents.rl.utils import distributed as ranks_module
from embodichain.agents.rl.utils.distributed import Ranks, joined_ranks
from embodichain.errors import ConfigError, EmbodiChainError
from tests.agents.rl.helpers import ScriptedEnv, make_policy

ENVS, STEPS, UPDATES = 4, 8, 3
PATIENCE = 200.0
Algorithm = PPO | GRPO | Distillation


# --- starting processes -------------------------------------------------------------------------------------------


def run_ranks(count: int, function: Callable[..., None], *arguments: Any) -> list[int]:
    """Call a function of this module in so many processes, as torchrun would start them; return their exit codes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch.utils.tensorboard"])  # imported once, for all processes
    store = rendezvous_store()
    processes = [context.Process(target=_rank, args=(r, count, store.port, function, arguments)) for r in range(count)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + PATIENCE
    for process in processes:
        process.join(max(0.1, deadline - time.monotonic()))
    hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for rank in hanging:
        processes[rank].kill()
        processes[rank].join()
    assert not hanging, f"ranks {hanging} did not end"
    return [process.exitcode or 0 for process in processes]


def rendezvous_store() -> dist.TCPStore:
    """Return a store for the rendezvous, as torchrun makes one: its port is bound before the ranks start."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def rank_environment(rank: int, count: int, port: int) -> dict[str, str]:
    """Return the environment variables that torchrun sets for a rank."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    store = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return {name: str(value) for name, value in numbers.items()} | store


def _rank(rank: int, count: int, port: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ |= rank_environment(rank, count, port)
    function(*arguments)


# --- updates ------------------------------------------------------------------------------------------------------

RECURRENT = {"memory": {"type": "gru", "hidden_size": 6}}
CASES: dict[str, dict[str, Any]] = {
    "ppo": {"normalize_obs": True, "cfg": {"batch_size": 64, "learning_rate": 1e-2}},
    "ppo in minibatches, values normalised": {"normalize_value": True, "cfg": {"batch_size": 10, "ent_coef": 0.01}},
    "ppo, rewards normalised": {"cfg": {"batch_size": 64, "normalize_reward": True}},
    "ppo with an adaptive rate": {"cfg": {"batch_size": 8, "lr_schedule": "adaptive", "desired_kl": 0.02}},
    "ppo that stops early": {"cfg": {"batch_size": 8, "learning_rate": 2e-2, "target_kl": 0.02, "n_epochs": 8}},
    "ppo with memory": {**RECURRENT, "cfg": {"batch_size": 16, "sequence_length": 4}},
    "ppo on old rollouts": {"cfg": {"batch_size": 64, "correction": "decoupled", "advantage_estimator": "vtrace"}},
    "ppo in minibatches of old rollouts": {
        "cfg": {"batch_size": 10, "correction": "decoupled", "advantage_scope": "minibatch"}
    },
    "ppo, the critic first": {"cfg": {"batch_size": 10, "value_warmup": 2, "weight_decay": 0.1}},
    "ppo with a flow": {
        "name": "flow",
        "flow": {"num_steps": 2},
        "cfg": {"batch_size": 64, "log_prob_per": "denoising_step"},
    },
    "ppo, fine-tuned": {
        "normalize_value": True,
        "cfg": {
            "batch_size": 10,
            "value_learning_rate": 1e-2,
            "advantage_scope": "minibatch",
            "weight_decay": 0.1,
            "lr_warmup": 2,
            "lr_schedule": "adaptive",
            "kl_coef": 0.2,
            "clip_coef_high": 0.3,
            "clip_coef_final": 0.1,
        },
    },
    "grpo": {"name": "actor_only", "normalize_obs": True, "cfg": {"batch_size": 7, "kl_coef": 0.1}},
    "grpo with memory": {"name": "actor_only", **RECURRENT, "cfg": {"batch_size": 12, "sequence_length": 4}},
    "grpo, others as the baseline": {
        "name": "actor_only",
        "cfg": {"batch_size": 7, "baseline": "leave_one_out", "lr_schedule": "adaptive", "target_kl": 0.05},
    },
    "grpo without anything to learn on rank 1": {"name": "actor_only", "cfg": {"batch_size": 7}},
    "distill": {"actor_obs": ["robot"], "normalize_obs": True, "cfg": {"batch_size": 7, "teacher": "there"}},
}


def make_algorithm(case: str, batch_size: int | None = None, seed: int = 0) -> Algorithm:
    """Return the algorithm of a case, with a policy that the seed decides on."""
    settings = copy.deepcopy(CASES[case])
    cfg = {"n_epochs": 3, **settings.pop("cfg")}
    cfg["batch_size"] = batch_size or cfg["batch_size"]
    torch.manual_seed(seed)
    policy = make_policy(ScriptedEnv(ENVS), **settings)
    if case.startswith("ppo"):
        return PPO(PPOCfg(**cfg), policy)
    if case.startswith("distill"):
        torch.manual_seed(99)
        env, algorithm = ScriptedEnv(ENVS), Distillation(DistillationCfg(**cfg), policy)
        algorithm.teach(Teacher(make_policy(env), env.observation_space, env.action_space, "there"))
        return algorithm
    return GRPO(GRPOCfg(group_size=2, **cfg), policy)


def joint_rollout(case: str, algorithm: Algorithm, update: int, num_ranks: int) -> TensorDict:
    """Return what all ranks collect together, ``[num_ranks * ENVS, STEPS]``: the same in every process."""
    num_envs = num_ranks * ENVS
    before = torch.get_rng_state()
    torch.manual_seed(1000 + update)
    ends = [3, 100, 7, 5, 100, 4, 100, 8][:num_envs]
    env = ScriptedEnv(num_envs, ends=ends, limit=6, seed=update)
    rollout = SyncCollector(env, algorithm.policy, return_discount=algorithm.return_discount).collect(STEPS).clone()
    if case.endswith("on rank 1"):
        rollout["reward"][ENVS:] = 1.0  # equal returns: nothing to compare
        rollout["done"][ENVS:] = False
    if case.endswith("old rollouts"):
        rollout["sample_log_prob"] = rollout["sample_log_prob"] + 0.1 * torch.randn(num_envs, STEPS)
    torch.set_rng_state(before)
    return rollout


def update_together(folder: Path) -> None:
    """Do the updates of all cases on this rank's envs; write down its parameters after every one."""
    with joined_ranks() as ranks:
        for number, case in enumerate(CASES):
            ranks_module._SMALL = 0 if number % 2 else 1 << 20  # both ways to add up gradients
            algorithm = make_algorithm(case, seed=ranks.rank)  # other weights on every rank, before it joins
            algorithm.join(ranks)
            torch.manual_seed(100 + ranks.rank)
            log = []
            for update in range(UPDATES):
                rollout = joint_rollout(case, algorithm, update, ranks.count)
                own = rollout[ranks.rank * ENVS : (ranks.rank + 1) * ENVS].clone()
                measures = algorithm.update(own)
                weights = {name: value.clone() for name, value in algorithm.policy.state_dict().items()}
                log.append({"measures": measures, "weights": weights, "advantage": own.get("advantage", own["reward"])})
            save_checkpoint(folder / f"case_{number}_rank_{ranks.rank}", {"updates": log})


# --- runs ---------------------------------------------------------------------------------------------------------


def train(config: Path, overrides: list[str]) -> None:
    """Start a run."""
    train_from_config(config, overrides)


def resume(run: Path, overrides: list[str]) -> None:
    """Go on with a run."""
    resume_training(run, overrides)


def resume_or_tell(run: Path) -> None:
    """Go on with a run; leave the error beside it if that fails."""
    try:
        resume_training(run)
    except EmbodiChainError as error:
        (run.parent / f"told_{os.environ['RANK']}.txt").write_text(f"{type(error).__name__}: {error}")


def train_with(fault: str, config: Path) -> None:
    """Start a run in which something happens to rank 1 in its third rollout; leave the error in a file."""
    collect, count = SyncCollector.collect, 0
    rank = int(os.environ["RANK"])

    def collect_faulty(self: SyncCollector, num_steps: int) -> Any:
        nonlocal count
        count += 1
        rollout = collect(self, num_steps)
        if count == 3 and rank == 1:
            FAULTS[fault](self, rollout)
        return rollout

    SyncCollector.collect = collect_faulty  # type: ignore[method-assign]
    note = config.with_name(f"{fault}_{rank}.txt")
    try:
        note.write_text(train_from_config(config).reason)
    except EmbodiChainError as error:
        note.write_text(f"{type(error).__name__}: {error}")


def _nan(collector: SyncCollector, rollout: TensorDict) -> None:
    rollout["reward"][2, 5] = torch.nan


def _signal(collector: SyncCollector, rollout: TensorDict) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _drift(collector: SyncCollector, rollout: TensorDict) -> None:
    with torch.no_grad():
        next(collector.policy.parameters()).add_(1e-7)


def _death(collector: SyncCollector, rollout: TensorDict) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


FAULTS = {"nan": _nan, "signal": _signal, "drift": _drift, "death": _death}


def talk(folder: Path) -> None:
    """Say things to each other, and write down what was heard and which sockets are open."""
    with joined_ranks() as ranks:
        assert isinstance(ranks, Ranks)
        data = {"tensor": torch.arange(3) + ranks.rank, "words": [ranks.rank, None, "ä", float("inf")]}
        heard = {
            "exchange": ranks.exchange({"rank": ranks.rank, "padding": "x" * 10 ** (4 * ranks.rank)}),
            "from_first": ranks.from_first(data if ranks.is_first else None),
            "to_first": ranks.to_first(data),
            "sum": ranks.sum(torch.tensor([0.1, 1.0]) * (ranks.rank + 1)),
            "spread": ranks.mean_and_std(torch.arange(10.0) + 5 * ranks.rank)[0],
            "seed": ranks.seed(7),
            "listening": _listening(),
        }
        save_checkpoint(folder / f"talk_{ranks.rank}", heard)
        dist.barrier()


def _listening() -> list[str]:
    """Return the addresses at which this process waits for connections, as the kernel writes them."""
    own = {os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink() and entry.exists()}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                found.append(fields[1].split(":")[0])
    return found


def talk_over_nccl(folder: Path) -> None:
    """Send tensors of a GPU by NCCL, to oneself if there is one GPU only; write down what comes back."""
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    ranks = ranks_module.ProcessRanks()
    layer = torch.nn.Linear(3, 2, device="cuda")
    torch.nn.init.constant_(layer.weight, float(rank + 1))
    ranks.copy_first(layer)
    layer(torch.full((4, 3), rank + 1.0, device="cuda")).sum().backward()
    measures = ranks.sum_gradients(list(layer.parameters()), {"loss": torch.tensor(rank + 1.0, device="cuda")})
    [spread] = ranks.mean_and_std(torch.arange(10.0, device="cuda") + 10 * rank)
    ranks_module.check_equal(ranks, layer, "at the end")
    heard = {"weight": layer.weight, "grad": layer.weight.grad, "loss": measures["loss"], "spread": spread}
    save_checkpoint(folder / f"nccl_{rank}", heard | {"words": ranks.exchange(["word", rank]), "count": count})
    dist.destroy_process_group()


# --- before a run -------------------------------------------------------------------------------------------------


def train_apart(folder: Path, overrides: list[str]) -> None:
    """Train as torchrun's rank with a run folder that only this rank sees; write down how far it came."""
    rank = os.environ["RANK"]
    os.environ["TORCHELASTIC_RUN_ID"] = "none"
    result = train_from_config(folder / f"machine_{rank}" / "config.json", overrides)
    (folder / f"said_{rank}.json").write_text(json.dumps([result.iteration, result.global_step]))


def agree_on_runs(folder: Path, situations: dict[str, list[int | str | None]]) -> None:
    """Decide on two machines whether runs are new or continued, by what is on the disk of each."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["TORCHELASTIC_RUN_ID"] = "none"
    agreed: dict[str, Any] = {}
    with joined_ranks() as ranks:
        for number, (name, facts) in enumerate(situations.items()):
            found = facts[ranks.rank]
            run = folder / f"machine_{ranks.rank}" / f"run_{number}"
            if found is not None:
                run.mkdir(parents=True)
                (run / "train_config.json").write_text("{}")
            if isinstance(found, int):
                save_checkpoint(run / "checkpoints" / f"step_{found:012d}", {})
            try:
                agreed[name] = run_to_resume(TrainerCfg(gym_config="x", run_dir=str(run)), ranks) is not None
            except EmbodiChainError as error:
                agreed[name] = str(error)
        (folder / f"agreed_{ranks.rank}.json").write_text(json.dumps(agreed))


def train_with_other_settings(folder: Path) -> None:
    """Begin a run with a config that is not quite the same on rank 1."""
    rank = os.environ["RANK"]
    other = ["--algorithm.cfg.learning_rate", "0.01", "--trainer.buffer_size", "32"] if rank == "1" else []
    try:
        train_from_config(folder / f"machine_{rank}" / "config.json", other)
    except ConfigError as error:
        (folder / f"told_{rank}.txt").write_text(str(error))


def leave(folder: Path) -> None:
    """Let rank 1 end without a word while rank 0 waits for it."""
    with joined_ranks() as ranks:
        ranks.exchange("here")
        if ranks.rank == 1:
            os._exit(0)
        try:
            ranks.exchange("still here")
        except EmbodiChainError as error:
            (folder / "left_0.txt").write_text(f"{type(error).__name__}: {error}")
