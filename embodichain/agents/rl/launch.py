"""The ranks of a data-parallel run: how the processes that torchrun starts find each other, and what they agree on.

torchrun's store is their rendezvous. Before anything is built they compare their configs, and the first rank decides
whether the run is new. A run that torchrun restarts continues from the newest checkpoint of ``trainer.run_dir``.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from embodichain.agents.processes.fork_server import die_with_parent
from embodichain.agents.rl.checkpoint import CHECKPOINTS, checkpoint_step, list_checkpoints
from embodichain.agents.rl.config import TrainCfg, TrainerCfg
from embodichain.agents.rl.runs import RunFolder
from embodichain.agents.rl.utils.distributed import ProcessRanks, Ranks
from embodichain.envs.physics.mujoco_cpu import available_cores
from embodichain.errors import ConfigError, RankError

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TIMEOUT = timedelta(hours=2)
"""How long ranks wait for each other: an evaluation, which the first one does alone, has to fit into it."""
_OWN_FIELDS = ("trainer.run_dir", "trainer.output_dir")
"""Fields in which ranks may differ: of the folders, those of the first rank are used."""


@contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """Join the processes that torchrun started, if it did, until the end of the block.

    A process group that exists already is used, and left as it is.
    """
    if dist.is_available() and dist.is_initialized():
        yield _present_ranks()
        return
    if _is_torchrun():
        die_with_parent(os.getppid(), signal.SIGTERM)  # torchrun that is killed leaves its ranks running
    if not _is_launched():
        yield Ranks()
        return
    if int(os.environ["WORLD_SIZE"]) == local_count():  # no other machine takes part: use the loopback device
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")
    store, rank, count = next(rendezvous("env://", timeout=_TIMEOUT))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun keeps its store when it restarts ranks
    store = PrefixStore(f"embodichain/attempt_{attempt}", store)
    dist.init_process_group(_backend(), store=store, rank=rank, world_size=count, timeout=_TIMEOUT)
    yield ProcessRanks()
    dist.destroy_process_group()  # not after an error: others may still be waiting for this one


def global_rank() -> int:
    """Return the number of this process among all; 0 speaks for all of them."""
    return int(os.environ["RANK"]) if _is_launched() else 0


def local_rank() -> int:
    """Return the number of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_count() -> int:
    """Return how many ranks run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def resume_command(run: Path) -> str:
    """Return the command that continues a run as it was started; several machines have more options."""
    launcher = ""
    if _is_launched():
        several = int(os.environ["WORLD_SIZE"]) > local_count()
        launcher = f"torchrun {'...' if several else f'--nproc-per-node={local_count()}'} -m "
    return f"{launcher}embodichain train --resume {run}"


# --- what ranks agree on ------------------------------------------------------------------------------------------


def run_to_continue(trainer: TrainerCfg, ranks: Ranks) -> Path | None:
    """Return the folder of the run if torchrun starts the ranks and it has a checkpoint there; ``None`` for a new run.

    The first rank decides. If another one has a checkpoint and it has none, a machine was lost: ``RankError``.
    """
    with ranks.together("looking for a checkpoint"):
        found = _newest_step(trainer)
    steps = ranks.exchange(found)
    if steps[0] is not None:
        return Path(trainer.run_dir or "")
    for rank, step in enumerate(steps):
        if step is not None:
            raise RankError(
                f"rank 0 has no checkpoint in trainer.run_dir, but rank {rank} has one of step {step}: copy that "
                "folder to the machine of rank 0, or use one that all machines see"
            )
    return None


def _newest_step(trainer: TrainerCfg) -> int | None:
    """Return the step of the newest checkpoint that torchrun continues from, ``None`` if there is none."""
    if not _is_torchrun():
        return None
    if trainer.run_dir is None:
        if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")):
            problem = "expected a folder, as torchrun has to find the run again after a restart, got none"
            raise ConfigError(f"trainer.run_dir: {problem}")
        return None
    saved = list_checkpoints(Path(trainer.run_dir) / CHECKPOINTS)
    return checkpoint_step(saved[-1]) if saved else None


def check_same_config(cfg: TrainCfg, ranks: Ranks) -> None:
    """Raise ``ConfigError`` that names the first field in which a rank's config is not the first rank's."""
    own = {key: value for key, value in _flat(cfg.to_dict()).items() if key not in _OWN_FIELDS}
    first, *others = ranks.exchange(own)
    for rank, theirs in enumerate(others, start=1):
        keys = [key for key in sorted({*first, *theirs}) if first.get(key, "nothing") != theirs.get(key, "nothing")]
        if keys:
            key, more = keys[0], "" if len(keys) == 1 else f" (and {len(keys) - 1} more)"
            raise ConfigError(
                f"{key}: rank 0 has {first.get(key, 'nothing')!r}, rank {rank} {theirs.get(key, 'nothing')!r}{more}. "
                "Start all ranks with the same config file and the same options",
                "ranks",
            )


def open_folder(cfg: TrainCfg, run: Path | None, ranks: Ranks) -> RunFolder:
    """Return the folder of a run, which the first rank makes; the others may be on machines that do not have it."""
    made = ""
    with ranks.together("making the folder of the run"):
        if ranks.is_first:
            folder = RunFolder.create(cfg) if run is None else RunFolder.open(run, cfg)
            made = str(folder.path)
    return RunFolder(Path(ranks.from_first(made)), cfg.trainer.keep_checkpoints)


def for_rank(cfg: TrainCfg, ranks: Ranks) -> TrainCfg:
    """Return a completed config as one rank uses it: its own seeds, its own GPU, its share of the processor's cores."""
    if ranks.count == 1:
        return cfg
    trainer, seed = cfg.trainer, ranks.seed(cfg.trainer.seed)
    given = trainer.gym_config
    environment: dict[str, Any] = {**({"id": given} if isinstance(given, str) else given), "seed": seed}
    environment["device"] = _own_device(str(environment.get("device", "cpu")))
    if not environment.get("num_threads"):
        environment["num_threads"] = max(1, available_cores() // local_count())
    changed = trainer.replace(seed=seed, device=_own_device(trainer.device), gym_config=environment)
    settings = dict(cfg.algorithm.cfg)
    settings["device"] = _own_device(str(settings.get("device", trainer.device)))
    return cfg.replace(trainer=changed, algorithm=cfg.algorithm.replace(cfg=settings))


# --- this process -------------------------------------------------------------------------------------------------


def _is_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def _is_launched() -> bool:
    """Tell whether torchrun, or something like it, started several processes."""
    return all(name in os.environ for name in _NEEDED) and int(os.environ["WORLD_SIZE"]) > 1


def _present_ranks() -> Ranks:
    """Return the ranks of the process group that exists, once sure that it can send tensors of the CPU."""
    if dist.get_world_size() == 1:
        return Ranks()
    backends = dist.get_backend_config()
    if "cpu:" not in backends:
        raise RankError(
            f"expected a process group that carries tensors of the CPU, got one of {backends}: start it with "
            'init_process_group("cpu:gloo,cuda:nccl"), or leave that to torchrun and this package'
        )
    return ProcessRanks()


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


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of a nested config by their dotted names."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return leaves
