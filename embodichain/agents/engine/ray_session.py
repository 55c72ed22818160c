"""This process's connection with a Ray cluster, shared by whatever in it uses Ray.

Without an address, Ray is started on this machine, for this process alone: every port is bound to the loopback
interface, there is no dashboard, and all of it ends with the connection or with the process.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from embodichain.agents.engine.ray_config import PlacementCfg
from embodichain.errors import ClusterError
from embodichain.extras import require

log = logging.getLogger("embodichain.ray")

NAMESPACE = "embodichain"
_LOOPBACK = "127.0.0.1"
_OWN_NAMES = (_LOOPBACK, "localhost", "::1", "[::1]")
_PROBE_SECONDS = 5.0
_STORE_BYTES = 512 << 20
"""Object store of a Ray that is started here: what is in flight, for episodes lie in the shared buffer."""
_ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray's switch for "this is no cluster: bind to loopback"
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


class RaySession:
    """A connection with a cluster; the last one that is closed ends it, if it was made here."""

    _lock = threading.Lock()
    _open = 0
    _made_here = False
    _exiting = False

    def __init__(self, address: str | None, num_workers: int, placement: PlacementCfg) -> None:
        """Connect with the cluster at ``address``, or start one with room for so many workers."""
        self._closed = False
        cls = RaySession
        with cls._lock:
            ray = require("ray", extra="ray")
            if not ray.is_initialized():
                cls._made_here = True
                if address is None:
                    _start(ray, num_workers, placement)
                else:
                    _connect(ray, address)
                atexit.register(cls._at_exit)  # after Ray's own, so it runs before that
            elif address is not None:
                log.info("this process is connected with Ray already; address %r is not asked", address)
            cls._open += 1

    @classmethod
    def alive(cls) -> bool:
        """Tell whether Ray can be used: not before it was started, nor after it was shut down."""
        return not cls._exiting and bool(require("ray", extra="ray").is_initialized())

    def close(self) -> None:
        """Disconnect, if nobody else uses the connection; calling it twice is fine."""
        cls = RaySession
        with cls._lock:
            if self._closed:
                return
            self._closed = True
            cls._open -= 1
            if cls._open == 0 and cls._made_here:
                cls._made_here = False
                if cls.alive():
                    require("ray", extra="ray").shutdown()

    @classmethod
    def _at_exit(cls) -> None:
        cls._exiting = True


def actor_options(placement: PlacementCfg) -> dict[str, Any]:
    """Return how Ray is told what a worker needs."""
    return {
        "num_cpus": placement.num_cpus,
        "num_gpus": placement.num_gpus,
        "resources": dict(placement.resources),
        "scheduling_strategy": {"spread": "SPREAD", "pack": "DEFAULT"}[placement.strategy],
        "max_restarts": 0,  # whoever asked for the worker replaces it: it knows what the next one has to do
    }


def lost_node(error: Exception, node_id: str | None) -> bool:
    """Tell whether an actor ended because its node did: it never ran, cannot be reached, or its node is gone."""
    ray = require("ray", extra="ray")
    if node_id is None or not isinstance(error, ray.exceptions.ActorDiedError) or "node has died" in str(error):
        return True
    return node_id not in {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def _start(ray: Any, num_workers: int, placement: PlacementCfg) -> None:
    cores = max(os.cpu_count() or 1, math.ceil(num_workers * placement.num_cpus))
    named = {name: share * num_workers for name, share in placement.resources.items()}
    with loopback_only():
        ray.init(
            address="local",
            num_cpus=cores,
            resources=named,
            include_dashboard=False,
            object_store_memory=_STORE_BYTES,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _node_ip_address=_LOOPBACK,
        )


def _connect(ray: Any, address: str) -> None:
    mode: AbstractContextManager[None] = nullcontext()
    host, _, port = address.rpartition(":")
    if port.isdigit():  # Ray itself would try for minutes
        if not _answers(host, int(port)):
            raise _nobody(address, "nobody listens there")
        if host in _OWN_NAMES and not _answers(str(ray.util.get_node_ip_address()), int(port)):
            mode = loopback_only()  # the cluster is on loopback alone
    try:
        with mode:
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise _nobody(address, str(error)) from error


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), _PROBE_SECONDS).close()
    except OSError:
        return False
    return True


def _nobody(address: str, why: str) -> ClusterError:
    return ClusterError(
        f"there is no Ray cluster at {address!r} ({why}); start one with 'ray start --head', or leave address away. "
        "If it asks for a token, have that in ~/.ray/auth_token and set RAY_AUTH_MODE=token"
    )


@contextmanager
def loopback_only() -> Iterator[None]:
    """Let Ray, while it starts, take this machine for one that is part of no cluster.

    Ray turns 127.0.0.1 into an address that can be reached from outside, unless it is told so. It reads the variable
    when it is imported, which may have happened long ago.
    """
    constants: Any = require("ray._private.ray_constants", extra="ray")
    before, cluster = {name: os.environ.get(name) for name in _ENVIRONMENT}, constants.ENABLE_RAY_CLUSTER
    os.environ.update(_ENVIRONMENT)
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = cluster
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
