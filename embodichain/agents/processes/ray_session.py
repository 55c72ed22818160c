"""This process's connection with a Ray cluster, shared by whatever in it uses Ray.

Without an address, Ray is started on this machine, for this process alone: every port is bound to the loopback
interface, everybody is asked for a token, there is no dashboard, and all of it ends with the connection or with the
process.
"""

from __future__ import annotations

import atexit
import gc
import logging
import math
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from embodichain.agents.processes.ray_config import PlacementCfg
from embodichain.agents.processes.ray_token import ask_for_token, refusal, stop_asking
from embodichain.errors import ClusterError
from embodichain.extras import require

log = logging.getLogger("embodichain.ray")

NAMESPACE = "embodichain"
_LOOPBACK = "127.0.0.1"
_OWN_NAMES = (_LOOPBACK, "localhost", "::1", "[::1]")
_PROBE_SECONDS = 5.0
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
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
    _asks = False
    """Whether a token is asked for only because the Ray that is open was started here."""
    _exiting = False

    def __init__(self, address: str | None, num_workers: int, placement: PlacementCfg) -> None:
        """Connect with the cluster at ``address``, or start one with room for so many workers."""
        self._closed = False
        cls = RaySession
        with cls._lock:
            ray = require("ray", extra="ray")
            if not ray.is_initialized():
                with _own_signal_handlers():
                    if address is None:
                        cls._start(ray, num_workers, placement)
                    else:
                        _connect(ray, address)
                cls._made_here = True
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
                    # What is left of Ray's objects must not be collected after it is gone: in a forked child, such as
                    # a worker of a DataLoader, Ray aborts the process then.
                    gc.collect()
                    require("ray", extra="ray").shutdown()
                    if cls._asks:
                        stop_asking()
                        cls._asks = False

    @classmethod
    def _start(cls, ray: Any, num_workers: int, placement: PlacementCfg) -> None:
        cls._asks = ask_for_token()
        try:
            _start(ray, num_workers, placement)
        except BaseException:
            if cls._asks:
                stop_asking()
                cls._asks = False
            raise

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


def node_died(error: Exception, node_id: str | None) -> bool:
    """Tell whether an actor ended because its node did; ``node_id`` is where it ran, if it ever did.

    Nothing else is a lost node: a constructor that fails, a process that crashes or has no memory left, an answer that
    gets lost. Ray tells the cause in words only.
    """
    exceptions = require("ray", extra="ray").exceptions
    if isinstance(error, exceptions.ActorDiedError) and not error.actor_init_failed:
        return error.preempted or "its node has died" in str(error) or node_is_gone(node_id)
    return isinstance(error, exceptions.NodeDiedError) or node_is_gone(node_id)


def node_is_gone(node_id: str | None) -> bool:
    """Tell whether a node that was there is part of the cluster no more."""
    nodes = require("ray", extra="ray").nodes()
    return node_id is not None and node_id not in {node["NodeID"] for node in nodes if node["Alive"]}


def error_text(error: Exception) -> str:
    """Return what Ray says about an error, without colours; at least its name."""
    return _COLOURS.sub("", str(error)).strip() or type(error).__name__


def no_room(placement: PlacementCfg, seconds: float) -> ClusterError:
    """Return the error for a cluster that has had no room for any worker for so long."""
    needs = {name: value for name, value in placement.to_dict().items() if value}
    free = require("ray", extra="ray").available_resources()
    return ClusterError(
        f"no node of the cluster had room for a worker within start_timeout ({seconds:g} s): each needs {needs}; free "
        f"are {free}. Change placement, or add nodes"
    )


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Let signals do what they did before: Ray would end the program, where a training saves itself first."""
    is_main = threading.current_thread() is threading.main_thread()  # others cannot set handlers, nor can Ray there
    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)} if is_main else {}
    try:
        yield
    finally:
        for number, handler in former.items():
            if callable(handler):
                signal.signal(number, handler)


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
        _probe(host.strip("[]"), int(port), address)
        if host in _OWN_NAMES and not _answers(str(ray.util.get_node_ip_address()), int(port)):
            mode = loopback_only()  # the cluster is on loopback alone
    try:
        if port.isdigit():
            require("ray._raylet", extra="ray").GcsClient(address=address)  # if it is refused, it says so at once
        with mode:
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except ray.exceptions.AuthenticationError as error:
        raise refusal(address) from error
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise _nobody(address, error_text(error)) from error


def _probe(host: str, port: int, address: str) -> None:
    """Raise ``ClusterError`` if nobody can be there."""
    try:
        socket.getaddrinfo(host, port)
    except OSError as error:
        raise _nobody(address, f"there is no host {host!r}: {error.strerror}") from error
    if not _answers(host, port):
        raise _nobody(address, "nobody listens there")


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), _PROBE_SECONDS).close()
    except OSError:
        return False
    return True


def _nobody(address: str, why: str) -> ClusterError:
    return ClusterError(
        f"there is no Ray cluster at {address!r} ({why}); start one with 'ray start --head', or leave address away"
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
