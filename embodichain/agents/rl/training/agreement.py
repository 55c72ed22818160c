"""What all ranks have to agree on before a run begins: its config, whether it is a new one, and its folder.

Ranks may be on machines that do not see each other's files, and torchrun counts restarts on each machine by itself. So
every rank tells what it knows, and all decide by the same rules from the same facts.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embodichain.agents.rl.training.config import TrainCfg, TrainerCfg
from embodichain.agents.rl.training.launch import local_count, num_restarts
from embodichain.agents.rl.training.run_folder import CONFIG_FILE, RunFolder
from embodichain.agents.rl.utils.checkpoint import CHECKPOINTS, list_checkpoints
from embodichain.agents.rl.utils.ranks import Ranks
from embodichain.errors import ConfigError, RankError

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
        "step": int(saved[-1].name.removeprefix("step_")) if saved else None,
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
    made = ("", "")
    with ranks.together("making the folder of the run"):
        if ranks.is_first:
            make = RunFolder.begin_anew if is_new else RunFolder.open
            folder = RunFolder.create(cfg) if run is None else make(run, cfg)
            made = (str(folder.path), folder.run_id)
    path, run_id = ranks.from_first(made)
    ranks.notes.leave(_note(cfg.trainer))
    return RunFolder(Path(path), cfg.trainer.keep_checkpoints, run_id)


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
