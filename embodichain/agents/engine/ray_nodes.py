"""What the nodes of a cluster are called where a person reads of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection


class NodeNames:
    """Names for nodes: their host, with a number where a host has several of them (``box``, ``box#2``).

    The name of a node that is gone is free for the next one: a host that comes back keeps its name.
    """

    def __init__(self, alive: Callable[[], Collection[str]]) -> None:
        """``alive`` returns the ids of the nodes that are there; it is asked only if a name may be taken."""
        self._alive = alive
        self._names: dict[str, str] = {}

    def name(self, node_id: str, host: str) -> str:
        """Return the name of a node."""
        if node_id in self._names:
            return self._names[node_id]
        if host in self._names.values():
            alive = self._alive()
            self._names = {known: name for known, name in self._names.items() if known in alive}
        choices = itertools.chain([host], (f"{host}#{number}" for number in itertools.count(2)))
        self._names[node_id] = next(name for name in choices if name not in self._names.values())
        return self._names[node_id]
