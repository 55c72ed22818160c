"""A rendezvous for torchrun that no other machine can reach: ``torchrun --rdzv-backend=loopback ...``.

torchrun's own backends listen on all network interfaces, even for ranks of one machine. This one listens on 127.0.0.1
only. torchrun finds it through the entry point ``torchrun.handlers`` of this package; ranks on several machines need
one of torchrun's own.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta

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
    """The rendezvous of one machine's ranks, with a new store for every attempt."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store: TCPStore | None = None  # the store lives as long as this reference

    def get_backend(self) -> str:
        """Return the name that torchrun knows this by."""
        return "loopback"

    @property
    def use_agent_store(self) -> bool:
        """Tell that ranks use torchrun's store and need not open another."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Open a store for the next attempt; this machine is the only one."""
        listener = socket.create_server((ADDRESS, 0))
        port: int = listener.getsockname()[1]
        self._store = TCPStore(
            ADDRESS,
            port,
            world_size=1,
            is_master=True,
            timeout=_TIMEOUT,
            multi_tenant=True,
            master_listen_fd=listener.detach(),  # the store owns it from here on
        )
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, RendezvousStoreInfo(ADDRESS, port))

    def is_closed(self) -> bool:
        """Tell that it is open as long as torchrun runs."""
        return False

    def set_closed(self) -> None:
        """Do nothing: there are no other machines to inform."""

    def num_nodes_waiting(self) -> int:
        """Return that no other machine waits to join."""
        return 0

    def get_run_id(self) -> str:
        """Return torchrun's name of the run."""
        return self._run_id

    def shutdown(self) -> bool:
        """Do nothing: the store ends with the process."""
        return True


def create(parameters: RendezvousParameters) -> RendezvousHandler:
    """Make the rendezvous; ``ConfigError`` if several machines are asked for."""
    if parameters.max_nodes != 1:
        raise ConfigError(f"--nnodes: expected 1, as only one machine reaches {ADDRESS}, got {parameters.max_nodes}")
    return LoopbackRendezvous(parameters.run_id)


def handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return what torchrun's entry point asks for."""
    return create
