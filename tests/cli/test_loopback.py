"""The rendezvous of torchrun that no other machine can reach."""

from __future__ import annotations

import tomllib
from datetime import timedelta
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters

from embodichain.cli.loopback import LoopbackRendezvous, create, handler
from embodichain.errors import ConfigError

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def parameters(nodes: int = 1) -> RendezvousParameters:
    return RendezvousParameters("loopback", "", "run", min_nodes=1, max_nodes=nodes)


def listening(port: int) -> list[str]:
    """Return the addresses at which anybody on this machine listens on a port, as the kernel writes them."""
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    ends = [line.split()[1].split(":") for table in tables for line in table if line.split()[3] == "0A"]
    return [address for address, number in ends if int(number, 16) == port]


def test_ranks_meet_on_this_machine_only():
    rendezvous = create(parameters())
    assert isinstance(rendezvous, LoopbackRendezvous)
    info = rendezvous.next_rendezvous()
    assert (info.rank, info.world_size) == (0, 1)
    where = info.bootstrap_store_info
    assert listening(where.master_port) == ["0100007F"]  # 127.0.0.1

    info.store.set("word", "hello")
    visitor = TCPStore(where.master_addr, where.master_port, is_master=False, timeout=timedelta(seconds=100))
    assert PrefixStore("run", visitor).get("word") == b"hello"
    again = rendezvous.next_rendezvous()  # after a restart
    assert listening(again.bootstrap_store_info.master_port) == ["0100007F"]
    assert not again.store.check(["word"])  # the store is new


def test_several_machines_are_refused():
    with pytest.raises(ConfigError, match="--nnodes: expected 1"):
        create(parameters(nodes=2))


def test_torchrun_is_told_where_to_find_it():
    entries = tomllib.loads(PROJECT.read_text())["project"]["entry-points"]["torchrun.handlers"]
    for name, value in entries.items():
        assert EntryPoint(name, value, "torchrun.handlers").load() is handler
    assert handler()(parameters()).get_backend() == "loopback"
