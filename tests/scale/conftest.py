"""A Ray cluster of two nodes on this machine, on the loopback interface, which asks for a token."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from embodichain.extras import available
from tests.programs import fork_at

for folder in (Path(__file__).parents[1], Path(__file__).parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

_STORE_BYTES = 100 << 20
# Ray reads these when it is imported: it asks for a token, and stays on the loopback interface.
os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32), RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0")


class TwoNodes:
    """A head that stays, with room for one worker, and nodes that come and go, with room for one more each."""

    def __init__(self, folder: Path) -> None:
        from ray.cluster_utils import Cluster

        quick = {
            "health_check_initial_delay_ms": 200,
            "health_check_period_ms": 200,
            "health_check_timeout_ms": 10_000,
            "health_check_failure_threshold": 4,
        }
        fork_at(folder / "forks")
        os.environ["TESTS_FORKED_AT"] = str(folder / "forks")
        head = {"num_cpus": 1, "include_dashboard": False, "_system_config": quick}
        self._cluster = Cluster(initialize_head=True, head_node_args=head | self._node())
        self.address: str = self._cluster.address
        self.guest: Any = None
        self.add()

    def add(self) -> None:
        """Add a node."""
        self.guest = self._cluster.add_node(num_cpus=1, **self._node())

    def kill(self) -> None:
        """Kill the node that came last, as a power cut would."""
        self._cluster.remove_node(self.guest, allow_graceful=False)
        self.guest = None

    def close(self) -> None:
        """End everything."""
        self._cluster.shutdown()

    def _node(self) -> dict[str, Any]:
        # A worker of Ray's own imports torch anew, which takes ten times the CPU time of most of these tests.
        forked = {"setup_worker_path": str(Path(__file__).with_name("forked_worker.py"))}
        return {"node_ip_address": "127.0.0.1", "object_store_memory": _STORE_BYTES} | forked


@pytest.fixture(scope="session")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    if not available("ray"):
        pytest.skip("Ray is not installed (extra ray)")
    nodes = TwoNodes(tmp_path_factory.mktemp("cluster"))
    yield nodes
    nodes.close()


@pytest.fixture
def cluster(two_nodes: TwoNodes) -> TwoNodes:
    """The cluster with both nodes alive."""
    if two_nodes.guest is None:
        two_nodes.add()
    return two_nodes
