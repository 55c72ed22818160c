"""What all ranks have to agree on before a run begins: its config, whether it is a new one, and its folder.

Ranks may be on machines that do not see each other's files, and torchrun counts restarts on each machine by itself. So
every rank tells what it knows, and all decide by the same rules from the same facts.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from embodichain.agents.processes.boot import die_with_parent
from embodichain.agents.rl.checkpoint import CHECKPOINTS, checkpoint_step, list_checkpoints
from embodichain.agents.rl.config import TrainCfg, TrainerCfg
from embodichain.agents.rl.runs import CONFIG_FILE, RunFolder
from embodichain.agents.rl.utils.distributed import Notes, ProcessRanks, Ranks
from embodichain.envs.physics.mujoco_cpu import available_cores
from embodichain.errors import ConfigError, RankError

# MERGED meeting: How the ranks of one attempt find each other in a store that may still hold what those of an earlier
# one left there.
#
# torchrun keeps its store when it starts ranks again, and the machines do not count restarts alike: one that joined
# later
# has seen none. So no number that a rank knows by itself tells the attempts apart.


_LOOK_SECONDS = 0.02
_TABLE = "embodichain/table"


@dataclass(frozen=True)
class Meeting:
    """The ranks of one attempt, who have found each other."""

    store: Store
    """A part of the store that they have for themselves."""
    words: list[str]
    """The word of each, which nobody else has used."""
    whole: Store

    def check(self) -> None:
        """Raise ``RankError`` if another process has come in the place of one since then."""
        for rank, word in enumerate(self.words):
            if _read(self.whole, _word(rank)) != word:
                raise RankError(
                    f"another process has come as rank {rank}, after this one had met with one that an earlier attempt "
                    "has left: start again, once that has ended"
                )


def meet(store: Store, rank: int, count: int, patience: timedelta) -> Meeting:
    """Wait for the other ranks of this attempt.

    Every rank leaves a word that nobody used before. The first one lists the words it finds, under a name of its own.
    A rank that finds its word in the list knows that the name is of this attempt, and answers. Once all those that are
    listed have answered, and no other word was left meanwhile, the first one closes the list.
    """
    own, deadline = uuid.uuid4().hex, time.monotonic() + patience.total_seconds()
    store.set(_word(rank), own)
    name, words = (_gather if rank == 0 else _join)(store, rank, count, own, deadline)
    return Meeting(PrefixStore(f"embodichain/{name}", store), words, store)


def _gather(store: Store, rank: int, count: int, own: str, deadline: float) -> tuple[str, list[str]]:
    """List who is there, until all have answered."""
    others = range(1, count)
    while True:
        words = [own, *(_read(store, _word(other)) for other in others)]
        store.set(_TABLE, json.dumps({"name": own, "words": words}))
        missing = [other for other in others if not store.check([_answer(own, words[other])])]
        if not missing and words[1:] == [_read(store, _word(other)) for other in others]:
            store.set(_closed(own), json.dumps(words))
            return own, words
        _wait(deadline, f"rank {', '.join(map(str, missing))} did not come")


def _join(store: Store, rank: int, count: int, own: str, deadline: float) -> tuple[str, list[str]]:
    """Answer to the list that this rank is in, until it is closed."""
    while True:
        table = json.loads(_read(store, _TABLE) or "{}")
        if table.get("words", [])[rank : rank + 1] == [own]:
            name = table["name"]
            store.set(_answer(name, own), "here")
            words = json.loads(_read(store, _closed(name)) or "[]")
            if words[rank : rank + 1] == [own]:
                return name, words
        if _read(store, _word(rank)) != own:
            raise RankError(f"another process has come as rank {rank}: this one is left from an earlier attempt")
        _wait(deadline, "rank 0 did not come")


def _word(rank: int) -> str:
    return f"embodichain/word/{rank}"


def _answer(name: str, word: str) -> str:
    return f"embodichain/{name}/answer/{word}"


def _closed(name: str) -> str:
    return f"embodichain/{name}/closed"


def _read(store: Store, key: str) -> Any:
    """Return what is written there, ``None`` if nothing is."""
    return store.get(key).decode() if store.check([key]) else None


def _wait(deadline: float, problem: str) -> None:
    if time.monotonic() > deadline:
        raise RankError(f"{problem} in time: look at its output, and whether its machine reaches the one of rank 0")
    time.sleep(_LOOK_SECONDS)


# MERGED launch: What torchrun tells a process, and what follows from it: who takes part, with which GPU, threads and
# seeds.


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
    settled = trainer.replace(seed=seed, device=_own_device(trainer.device), gym_config=environment)
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


_LOG = logging.getLogger(__name__)
_OWN_MATTERS = ("trainer.run_dir", "trainer.output_dir")
"""Fields that may differ: of the folders, those of the first rank are used."""


def restarted_run(trainer: TrainerCfg, ranks: Ranks) -> tuple[Path, bool] | None:
    """Return the folder of the run that torchrun starts again, and whether to go on with a checkpoint.

    ``None`` the first time. A run that ended before its first checkpoint begins anew, in its folder. One whose folder
    is not where the first rank is now raises ``RankError``: nobody wants a week's work to begin anew for that.
    """
    with ranks.together("looking for the run to go on with"):
        here = _look(trainer, ranks)
    found = ranks.exchange(here)
    if not any(entry["restarts"] for entry in found):
        return None
    run, first = Path(trainer.run_dir or ""), found[0]
    if first["step"] is None:
        _check_nothing_is_lost(found, ranks)
        if ranks.is_first:
            _LOG.warning("%s has no checkpoint yet: the restarted run begins anew", first["folder"])
    return run, first["step"] is not None


def _look(trainer: TrainerCfg, ranks: Ranks) -> dict[str, Any]:
    """Return what this rank knows about the run."""
    restarts, allowed = num_restarts()
    begun = ranks.notes.found(_note(trainer))
    if (allowed or begun) and trainer.run_dir is None:
        problem = "expected a folder, as torchrun has to find the run again after a restart, got none"
        raise ConfigError(f"trainer.run_dir: {problem}")
    if trainer.run_dir is None:
        return {"restarts": 0, "folder": None, "exists": False, "step": None, "neighbours": local_count()}
    run = Path(trainer.run_dir).resolve()
    saved = list_checkpoints(run / CHECKPOINTS)
    return {
        "restarts": restarts + begun,
        "folder": str(run),
        "exists": (run / CONFIG_FILE).exists(),
        "step": checkpoint_step(saved[-1]) if saved else None,
        "neighbours": local_count(),
    }


def _note(trainer: TrainerCfg) -> str:
    """Return the words that tell the next process of this rank that the run was begun."""
    return f"begun {Path(trainer.run_dir).resolve() if trainer.run_dir else ''}"


def _check_nothing_is_lost(found: list[dict[str, Any]], ranks: Ranks) -> None:
    """Raise ``RankError`` if there are checkpoints elsewhere, or may be."""
    first = found[0]
    for rank, entry in enumerate(found):
        if entry["step"] is not None:
            raise RankError(
                f"rank 0 has no checkpoint in {first['folder']}, but rank {rank} has one of step {entry['step']} in "
                f"{entry['folder']}: copy that folder to the machine of rank 0, or use one that all machines see, and "
                "start again with --resume"
            )
    if not any(entry["exists"] for entry in found) and first["neighbours"] < ranks.count:
        raise RankError(
            f"torchrun restarts a run, but no machine has its folder {first['folder']}: it was on one that is gone, or "
            "the run ended before it was made. Bring that folder back, or use one that all machines see; if nothing "
            "was saved yet, start again without it"
        )


def open_folder(cfg: TrainCfg, run: Path | None, ranks: Ranks, is_new: bool) -> RunFolder:
    """Return the folder of a run, which the first rank makes; the others may be on machines that do not have it."""
    made = ""
    with ranks.together("making the folder of the run"):
        if ranks.is_first:
            make = RunFolder.begin_anew if is_new else RunFolder.open
            folder = RunFolder.create(cfg) if run is None else make(run, cfg)
            made = str(folder.path)
    path = ranks.from_first(made)
    ranks.notes.leave(_note(cfg.trainer))
    return RunFolder(Path(path), cfg.trainer.keep_checkpoints)


def check_same_config(cfg: TrainCfg, ranks: Ranks) -> None:
    """Raise ``ConfigError`` that names the first field in which a rank's config is not the first rank's."""
    own = {key: value for key, value in _flat(cfg.to_dict()).items() if key not in _OWN_MATTERS}
    digest = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()
    digests = ranks.exchange(digest)
    if len(set(digests)) == 1:
        return
    first, *others = ranks.exchange(own)
    for rank, theirs in enumerate(others, start=1):
        keys = [key for key in sorted({*first, *theirs}) if first.get(key, _ABSENT) != theirs.get(key, _ABSENT)]
        if keys:
            key, more = keys[0], "" if len(keys) == 1 else f" (and {len(keys) - 1} more)"
            raise ConfigError(
                f"{key}: rank 0 has {first.get(key, _ABSENT)!r}, rank {rank} {theirs.get(key, _ABSENT)!r}{more}. Start "
                "all ranks with the same config file and the same options",
                "ranks",
            )


_ABSENT = "nothing"


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of a nested config by their dotted names."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            leaves |= _flat(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves
