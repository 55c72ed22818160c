"""Notes that a rank leaves for those that torchrun starts after it, in the store that torchrun keeps meanwhile."""

from __future__ import annotations

import uuid

from torch.distributed import Store  # type: ignore[attr-defined]

_PROCESS = uuid.uuid4().hex


class Notes:
    """What ranks of this torchrun have noted; nothing outlasts a process that no torchrun has started.

    torchrun counts restarts after a failure, but not those after a machine has joined or left (``--nnodes=1:4``).
    """

    def __init__(self, store: Store | None = None, rank: int = 0) -> None:
        self._store, self._rank = store, rank

    def leave(self, words: str) -> None:
        """Leave a note for the next process of this rank."""
        if self._store is not None:
            self._store.set(self._key(words), _PROCESS)

    def found(self, words: str) -> bool:
        """Tell whether a process before this one has left the note."""
        key = self._key(words)
        return self._store is not None and self._store.check([key]) and self._store.get(key).decode() != _PROCESS

    def _key(self, words: str) -> str:
        return f"embodichain/note/{self._rank}/{words}"
