"""What torchrun tells a process, and what follows from it: who takes part, with which GPU, threads and seeds."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from embodichain.agents.processes.boot import die_with_parent
from embodichain.agents.rl.collector.ray_names import name_of_rank
from embodichain.agents.rl.training.config import TrainCfg
from embodichain.agents.rl.training.meeting import meet
from embodichain.agents.rl.utils.notes import Notes
from embodichain.agents.rl.utils.ranks import ProcessRanks, Ranks
from embodichain.envs.physics.mujoco_cpu import available_cores
from embodichain.errors import RankError

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PATIENCE = timedelta(hours=2)
"""How long ranks wait for each other: an evaluation, which the first one does alone, has to fit into it."""
_ARRIVAL = timedelta(minutes=15)
"""How long they wait for each other in the beginning; torchrun starts them at the same time."""
_LOOPBACK = "lo"
_RUN_ID, _TORCHRUN_HAS_STORE = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"


@contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """Join the processes that torchrun started, if it did, until the end of the block.

    A process group that is there already is used, and left as it is.
    """
    if dist.is_available() and dist.is_initialized():
        yield _present_ranks()
        return
    if _RUN_ID in os.environ:
        die_with_parent(os.getppid(), signal.SIGTERM)  # nobody would start it again, or tell it of others
    if not _is_launched():
        ranks = Ranks()
        if os.environ.get(_TORCHRUN_HAS_STORE) == "True":  # there may be several processes the next time
            ranks.notes = Notes(next(rendezvous("env://", timeout=_ARRIVAL))[0])
        yield ranks
        return
    _stay_on_this_machine()
    store, rank, count = next(rendezvous("env://", timeout=_PATIENCE))
    meeting = meet(store, rank, count, _ARRIVAL)
    dist.init_process_group(_backend(), store=meeting.store, rank=rank, world_size=count, timeout=_PATIENCE)
    meeting.check()
    ranks = ProcessRanks()
    ranks.notes = Notes(store, rank)
    yield ranks
    dist.destroy_process_group()  # not after an error: others may still be waiting for this one


def _present_ranks() -> Ranks:
    """Return the ranks of the process group that is there, once sure that it carries all that they say."""
    if dist.get_world_size() == 1:
        return Ranks()
    backends = dist.get_backend_config()
    if "cpu:" not in backends:
        raise RankError(
            f"expected a process group that carries tensors of the CPU, got one of {backends}: start it with "
            'init_process_group("cpu:gloo,cuda:nccl"), or leave that to torchrun and this package'
        )
    return ProcessRanks()


def global_rank() -> int:
    """Return the number of this process among all; 0 speaks for all of them."""
    return int(os.environ["RANK"]) if _is_launched() else 0


def command() -> str:
    """Return how a command begins that is started as this process was; several machines have more options."""
    if not _is_launched():
        return "embodichain"
    several = int(os.environ["WORLD_SIZE"]) > local_count()
    return f"torchrun {'...' if several else f'--nproc-per-node={local_count()}'} -m embodichain"


def local_rank() -> int:
    """Return the number of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_count() -> int:
    """Return how many ranks run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def for_rank(cfg: TrainCfg, ranks: Ranks) -> TrainCfg:
    """Return a completed config as one rank uses it: its own seeds, its own GPU, its share of the processor's cores."""
    if ranks.count == 1:
        return cfg
    trainer = cfg.trainer
    seed = ranks.seed(trainer.seed)
    environment: dict[str, Any] = {**_mapping(trainer.gym_config), "seed": seed}
    environment["device"] = _own_device(str(environment.get("device", "cpu")))
    if not environment.get("num_threads"):
        environment["num_threads"] = max(1, available_cores() // local_count())
    collector = trainer.collector.replace(name=name_of_rank(trainer.collector.name, ranks.rank, ranks.count))
    settled = trainer.replace(
        seed=seed, device=_own_device(trainer.device), gym_config=environment, collector=collector
    )
    settings = dict(cfg.algorithm.cfg)
    settings["device"] = _own_device(str(settings.get("device", trainer.device)))
    return cfg.replace(trainer=settled, algorithm=cfg.algorithm.replace(cfg=settings))


def num_restarts() -> tuple[int, int]:
    """Return how often torchrun has started the ranks of this machine again after a failure, and how often it may."""
    names = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"
    done, allowed = (int(os.environ.get(name, "0")) for name in names)
    return done, allowed


def _is_launched() -> bool:
    """Tell whether torchrun, or something like it, started several processes."""
    return all(name in os.environ for name in _NEEDED) and int(os.environ["WORLD_SIZE"]) > 1


def _stay_on_this_machine() -> None:
    """Let all sockets between ranks be on the loopback device, if nobody said otherwise and no other machine is in."""
    if int(os.environ["WORLD_SIZE"]) == local_count():
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, _LOOPBACK)


def _backend() -> str:
    """Return what carries tensors: gloo on the CPU; on GPUs NCCL, which needs one for each rank, or else gloo."""
    if not torch.cuda.is_available():
        return "gloo"
    torch.cuda.set_device(local_rank() % torch.cuda.device_count())
    enough = torch.cuda.device_count() >= local_count() and dist.is_nccl_available()
    return "cpu:gloo,cuda:nccl" if enough else "cpu:gloo,cuda:gloo"


def _own_device(name: str) -> str:
    """Return this rank's GPU in place of any."""
    if torch.device(name).type != "cuda" or not torch.cuda.is_available():
        return name
    return f"cuda:{local_rank() % torch.cuda.device_count()}"


def _mapping(environment: str | dict[str, Any]) -> dict[str, Any]:
    return {"id": environment} if isinstance(environment, str) else environment
