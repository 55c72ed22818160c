"""A rendezvous for torchrun that is reachable only from this machine: ``torchrun --rdzv-backend=loopback ...``.

torchrun's own backends listen on all network interfaces, even for ranks of one machine; this one on 127.0.0.1 only.
It is registered through the entry point ``torchrun.handlers``. Ranks on several machines need torchrun's own backends.
"""

import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from embodichain.errors import ConfigError

ADDRESS = "127.0.0.1"
_TIMEOUT = timedelta(minutes=10)


class LoopbackRendezvous(RendezvousHandler):
    """A rendezvous for the ranks of one machine, with a new store for every attempt."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store: TCPStore | None = None  # keeps the store alive

    def get_backend(self) -> str:
        return "loopback"

    @property
    def use_agent_store(self) -> bool:
        return True  # ranks use torchrun's store instead of opening another

    def next_rendezvous(self) -> RendezvousInfo:
        listener = socket.create_server((ADDRESS, 0))
        port: int = listener.getsockname()[1]
        descriptor = listener.detach()  # now owned by the store
        options: dict[str, Any] = {"is_master": True, "multi_tenant": True, "master_listen_fd": descriptor}
        self._store = TCPStore(ADDRESS, port, world_size=1, timeout=_TIMEOUT, **options)
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, RendezvousStoreInfo(ADDRESS, port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass  # no other machines to inform

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True  # the store ends with the process


def create(parameters: RendezvousParameters) -> RendezvousHandler:
    """Create the rendezvous; ``ConfigError`` for several machines."""
    if parameters.max_nodes != 1:
        raise ConfigError(f"--nnodes: expected 1, as only one machine reaches {ADDRESS}, got {parameters.max_nodes}")
    return LoopbackRendezvous(parameters.run_id)


def handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return the factory for torchrun's entry point."""
    return create
