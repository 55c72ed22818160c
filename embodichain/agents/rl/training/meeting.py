"""How the ranks of one attempt find each other in a store that may still hold what those of an earlier one left there.

torchrun keeps its store when it starts ranks again, and the machines do not count restarts alike: one that joined later
has seen none. So no number that a rank knows by itself tells the attempts apart.
"""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from embodichain.errors import RankError

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
