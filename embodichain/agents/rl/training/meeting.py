"""How the ranks of one attempt find each other in a store that may still hold what those of an earlier one left there.

torchrun keeps its store when it starts ranks again, and the machines do not count restarts alike: one that joined later
has seen none. So no number that a rank knows by itself tells the attempts apart.
"""

from __future__ import annotations

import json
import time
import uuid
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from embodichain.errors import RankError

_LOOK_SECONDS = 0.02
_TABLE = "embodichain/table"


def meet(store: Store, rank: int, count: int, patience: timedelta) -> Store:
    """Return a part of the store that the ranks of this attempt have for themselves.

    Every rank leaves a word that nobody used before. The first one lists the words it finds, under a name of its own;
    a rank that finds its word in the list knows that the name is of this attempt, and says so. Words of an earlier
    attempt are overwritten sooner or later, and until then nobody answers to them.
    """
    own, deadline = uuid.uuid4().hex, time.monotonic() + patience.total_seconds()
    store.set(_word(rank), own)
    name = own
    if rank == 0:
        others = range(1, count)
        while not store.check([_answer(own, other) for other in others]):
            found = [_read(store, _word(other)) for other in others]
            store.set(_TABLE, json.dumps({"name": own, "words": [own, *found]}))
            missing = [other for other in others if not store.check([_answer(own, other)])]
            _wait(deadline, f"rank {', '.join(map(str, missing))} did not come")
    else:
        while (table := json.loads(_read(store, _TABLE) or "{}")).get("words", [])[rank : rank + 1] != [own]:
            _wait(deadline, "rank 0 did not come")
        name = table["name"]
        store.set(_answer(name, rank), "here")
    return PrefixStore(f"embodichain/{name}", store)


def _word(rank: int) -> str:
    return f"embodichain/word/{rank}"


def _answer(name: str, rank: int) -> str:
    return f"embodichain/{name}/answer/{rank}"


def _read(store: Store, key: str) -> Any:
    """Return what is written there, ``None`` if nothing is."""
    return store.get(key).decode() if store.check([key]) else None


def _wait(deadline: float, problem: str) -> None:
    if time.monotonic() > deadline:
        raise RankError(f"{problem} in time: look at its output, and whether its machine reaches the one of rank 0")
    time.sleep(_LOOK_SECONDS)
