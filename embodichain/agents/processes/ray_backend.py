"""Workers in a Ray cluster: connection, authentication token, placement of workers, and detection of lost nodes.

Without an address, a private cluster is started on the loopback interface, without a dashboard, and stopped with this
process. Any other cluster must use Ray's token authentication.
"""

import atexit
import gc
import itertools
import logging
import math
import os
import re
import secrets
import signal
import socket
import sys
import textwrap
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Generic, Literal, Protocol, TypeVar

from embodichain.agents.processes.failure import FailureReport
from embodichain.agents.processes.pool import HangDetector, Heartbeat, WorkerHandle
from embodichain.config import Config, Field, configclass
from embodichain.errors import ClusterError
from embodichain.extras import require

log = logging.getLogger("embodichain.ray")

Share = Annotated[float, Field(ge=0)]
Location = dict[str, Any]
"""Location of an actor: ``node_id``, ``node`` (host name), ``pid``, and the ``auth_mode`` of its node."""

_LOOPBACK = "127.0.0.1"
_AUTH_MODE, _AUTH_TOKEN, _AUTH_TOKEN_FILE = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_OWN_TOKEN = secrets.token_hex(32)
"""Token of a private cluster; no other process needs it, so it is not written to a file."""
_ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # a private cluster binds to loopback
    "RAY_NUM_REDIS_GET_RETRIES": "6",  # seconds until a rejected token is an error
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_PROBE_SECONDS = 5.0
_RETRY_SECONDS = 0.05
"""Pause before the next call of an actor that is still unreachable."""
_STORE_BYTES = 512 << 20
"""Object store of a private cluster; it only holds objects in transit."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_LINE_LENGTH = 120  # Ray describes the end of a process in one long line; the full text follows as the traceback


@configclass
class PlacementCfg(Config):
    """Resources that each worker requires of a Ray node. A worker waits for a suitable node; the others do not wait."""

    num_cpus: Share = 1.0
    """CPU cores reserved per worker; its simulator uses as many threads."""
    num_gpus: Share = 0.0
    """GPUs reserved per worker; may be a fraction."""
    resources: dict[str, Share] = {}
    """Custom resources, such as ``{"simulation": 1}`` for nodes started with ``--resources``."""
    strategy: Literal["spread", "pack"] = "spread"
    """Whether to spread workers over the nodes, or pack them onto as few as possible."""

    def actor_options(self) -> dict[str, Any]:
        """Return the options of a Ray actor."""
        return {
            "num_cpus": self.num_cpus,
            "num_gpus": self.num_gpus,
            "resources": dict(self.resources),
            "scheduling_strategy": {"spread": "SPREAD", "pack": "DEFAULT"}[self.strategy],
            "max_restarts": 0,  # the owner replaces failed actors, with new arguments
        }


class ClusterCfg(Protocol):
    """Settings that all kinds of cluster workers share."""

    address: str | None
    num_workers: int
    placement: PlacementCfg
    start_timeout: float


class RayCluster:
    """A connection to a cluster. All instances in a process share it; closing the last one disconnects."""

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _num_open: ClassVar[int] = 0
    _connected_here: ClassVar[bool] = False
    _started_here: ClassVar[bool] = False
    _exiting: ClassVar[bool] = False

    def __init__(self, address: str | None, num_workers: int, placement: PlacementCfg) -> None:
        """Connect to the cluster at ``address``, or start a private one with room for ``num_workers``."""
        self._closed = False
        cls = RayCluster
        with cls._lock, ray_environment():
            ray = load_ray()
            if not ray.is_initialized():
                on_termination = signal.getsignal(signal.SIGTERM)
                if address is None:
                    _start(ray, num_workers, placement)
                else:
                    _connect(ray, address)
                if threading.current_thread() is threading.main_thread():  # in other threads Ray sets no handler
                    signal.signal(signal.SIGTERM, on_termination)  # Ray's exits before training can save a checkpoint
                cls._connected_here, cls._started_here = True, address is None
                atexit.register(setattr, cls, "_exiting", True)  # registered after Ray's, so it runs before
            elif address is not None:
                log.info("this process is connected with Ray already; address %r is not used", address)
            cls._num_open += 1

    @classmethod
    def is_alive(cls) -> bool:
        """Return whether Ray is initialized and the interpreter is not exiting."""
        return not cls._exiting and bool(load_ray().is_initialized())

    @classmethod
    def check_token(cls, location: Location) -> None:
        """Raise ``ClusterError`` for a node without token authentication, unless this process started the cluster."""
        if not cls._started_here and str(location["auth_mode"]).lower() != "token":
            raise ClusterError(
                f"the Ray cluster does not use token authentication (node {location['node']}): anyone who can reach it "
                f"can run code there. Start all of its nodes with {_AUTH_MODE}=token"
            )

    def close(self) -> None:
        """Disconnect if no other instance is open; may be called repeatedly."""
        cls = RayCluster
        with cls._lock:
            if self._closed:
                return
            self._closed = True
            cls._num_open -= 1
            if cls._num_open == 0 and cls._connected_here:
                cls._connected_here = cls._started_here = False
                if cls.is_alive():
                    # If Ray's objects are collected later in a forked child (a DataLoader worker), they abort it.
                    gc.collect()
                    load_ray().shutdown()


def load_ray() -> Any:
    """Import ``ray``, or raise an error that names the extra to install."""
    return require("ray", extra="ray")


@contextmanager
def ray_environment() -> Iterator[None]:
    """Set the environment variables that Ray reads on import and passes to the processes that it starts."""
    values = dict(_ENVIRONMENT)
    if "ray" not in sys.modules:  # it is read on import only
        values[_AUTH_MODE] = "token"
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _start(ray: Any, num_workers: int, placement: PlacementCfg) -> None:
    if ray.util.get_node_ip_address() != _LOOPBACK:
        raise ClusterError(
            "Ray was imported before, and would listen on all network interfaces: set "
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 before 'import ray', or give an address"
        )
    own_token = not os.environ.get(_AUTH_TOKEN) and not os.environ.get(_AUTH_TOKEN_FILE)
    if own_token:
        os.environ[_AUTH_TOKEN] = _OWN_TOKEN
    try:
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, math.ceil(num_workers * placement.num_cpus)),
            resources={name: share * num_workers for name, share in placement.resources.items()},
            include_dashboard=False,
            object_store_memory=_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _node_ip_address=_LOOPBACK,
        )
    finally:
        if own_token:
            del os.environ[_AUTH_TOKEN]


def _connect(ray: Any, address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        if port.isdigit():  # Ray itself would retry for a long time
            socket.create_connection((host.strip("[]"), int(port)), _PROBE_SECONDS).close()
    except socket.gaierror as error:
        raise _nobody(address, f"there is no host {host!r}: {error.strerror}") from error
    except OSError as error:
        raise _nobody(address, "nobody listens there") from error
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        is_refused = port.isdigit() and isinstance(error, ConnectionError)  # the port is open
        if is_refused or isinstance(error, ray.exceptions.AuthenticationError):
            raise _refused(address) from error
        raise _nobody(address, error_text(error)) from error


def _nobody(address: str, why: str) -> ClusterError:
    return ClusterError(
        f"there is no Ray cluster at {address!r} ({why}); start one with 'ray start --head', or omit address"
    )


def _refused(address: str) -> ClusterError:
    """Return the error for a cluster that rejects this process's token, or the lack of one."""
    mode = os.environ.get(_AUTH_MODE, "")
    file = os.environ.get(_AUTH_TOKEN_FILE) or os.path.expanduser("~/.ray/auth_token")
    if mode.lower() != "token":
        given = f"{_AUTH_MODE} is {mode!r} here"
    elif os.environ.get(_AUTH_TOKEN) or os.path.exists(file):
        given = f"it was given the one in {_AUTH_TOKEN if os.environ.get(_AUTH_TOKEN) else file}"
    else:
        given = f"there is none in {file}"
    return ClusterError(
        f"the Ray cluster at {address!r} asks for its token, and {given}: set {_AUTH_MODE}=token and copy "
        "~/.ray/auth_token from the machine on which it was started"
    )


def location_of_actor() -> Location:
    """Return the location of the calling actor, as a ``located`` reply."""
    node_id = load_ray().get_runtime_context().get_node_id()
    mode = os.environ.get(_AUTH_MODE, "")  # set by the node; drivers cannot change it
    location = {"node_id": node_id, "node": socket.gethostname(), "pid": os.getpid()}
    return {"event": "located", "auth_mode": mode, **location}


def cores_of_actor() -> int:
    """Return the number of cores reserved for the calling actor."""
    return max(1, int(load_ray().get_runtime_context().get_assigned_resources().get("CPU", 1)))


class ActorHandle(WorkerHandle):
    """The owner's handle of one Ray actor."""

    pid = 0

    def __init__(self, index: int, incarnation: int, actor: Any) -> None:
        super().__init__(index, incarnation, Heartbeat(), "", math.inf)
        self.actor, self.node_id, self.is_killed = actor, "", False
        self.calls: deque[Any] = deque()
        """Pending replies, in the order of their arrival."""

    def locate(self) -> None:
        """Request the actor's location."""
        self.calls.append(self.actor.locate.remote())

    def awaited(self) -> list[Any]:
        """Return the replies that may arrive next."""
        return list(self.calls)[:1]

    def answered(self, answer: Any) -> None:
        """Remove a reply that has arrived."""
        self.calls.popleft()

    def kill(self) -> None:
        self.is_killed = True
        self.calls.clear()
        if RayCluster.is_alive():
            load_ray().kill(self.actor, no_restart=True)

    def failure(self, error: Exception) -> FailureReport:
        """Return a report of how the actor ended, given the error of one of its replies."""
        if node_died(error, self.node_id):  # Ray's message has nothing but ids
            return FailureReport(self.index, f"is gone with its node {self.node}".rstrip(), lost=True)
        text = error_text(error)
        last = textwrap.shorten(text.splitlines()[-1], _LINE_LENGTH, placeholder=" ...")
        return FailureReport(self.index, f"ended: {last}", traceback=text)


Handle = TypeVar("Handle", bound=ActorHandle)


class ActorPool(Generic[Handle]):
    """Actors of one class, whose replies are ``{"event": ...}``: starts them and receives their replies."""

    def __init__(
        self,
        actor: type,
        handle: type[Handle],
        cfg: ClusterCfg,
        step_timeout: float,
        absence_timeout: float,
        concurrency_groups: dict[str, int] | None = None,
    ) -> None:
        """Connect to the cluster. ``absence_timeout`` is how long no worker may have a node while there is work."""
        self._cluster = RayCluster(cfg.address, cfg.num_workers, cfg.placement)
        remote = load_ray().remote(concurrency_groups=concurrency_groups or {})(actor)
        self._actor = remote.options(**cfg.placement.actor_options())
        self._handle, self._cfg = handle, cfg
        self._hangs = HangDetector(cfg.start_timeout, step_timeout)
        self._names = NodeNames()
        self._room = RoomWatch(cfg.start_timeout, absence_timeout)
        self.is_needed = True
        """Whether there is work; if not, ``absence_timeout`` does not apply."""
        self.workers: list[Handle] = []

    @property
    def awake_since(self) -> float:
        """Monotonic time at which this process last resumed from a suspension."""
        return self._hangs.awake_since

    def launch(self, index: int, incarnation: int, *arguments: Any) -> Handle:
        """Create an actor; it waits in the cluster until a node has room for it."""
        worker = self._handle(index, incarnation, self._actor.remote(*arguments))
        worker.locate()
        self.workers.append(worker)
        return worker

    def answers(self, seconds: float) -> Iterator[tuple[Handle, str, Any]]:
        """Wait up to ``seconds`` for replies; yield each as ``(worker, kind, content)``.

        ``located`` is sent when an actor has started, and again after it was ``unreachable``. The content of ``failed``
        is a ``FailureReport``: the actor has exited, hung, or been unreachable for too long.
        """
        if not RayCluster.is_alive():
            raise ClusterError("Ray was shut down while workers were running")
        self.workers = [worker for worker in self.workers if not worker.is_killed]
        if seconds_without := self._room.check(self.workers, self.is_needed, self._hangs.awake_since):
            needs = {name: value for name, value in self._cfg.placement.to_dict().items() if value}
            raise ClusterError(
                f"no node of the cluster had room for a worker for {seconds_without}: each worker needs {needs}; free "
                f"resources are {load_ray().available_resources()}. Change placement, or add nodes"
            )
        try:
            awaited = {answer: worker for worker in self.workers for answer in worker.awaited()}
            for answer, worker in _wait(awaited, seconds):
                if answer in worker.awaited():  # else an earlier reply ended this worker
                    yield from self._read(worker, answer)
        except (OSError, load_ray().exceptions.RayError) as error:  # errors of single replies are handled in _read
            raise ClusterError(
                f"the connection with the Ray cluster is lost ({error_text(error)}): the node of this machine or the "
                "head is gone. See 'ray status'"
            ) from error
        self._hangs.look()
        for worker in self.workers:
            if not worker.is_killed and (report := self._hangs.check(worker)):
                yield worker, "failed", replace(report, lost=node_is_gone(worker.node_id))

    def stop(self, seconds: float = 0.0) -> None:
        """Kill the actors and disconnect; a private cluster is stopped."""
        for worker in self.workers:
            worker.kill()
        self.workers.clear()
        del self._actor
        self._cluster.close()

    def _read(self, worker: Handle, answer: Any) -> Iterator[tuple[Handle, str, Any]]:
        ray = load_ray()
        try:
            content = ray.get(answer)
        except ray.exceptions.ActorUnavailableError:  # Ray answers the next call once it knows the actor's state
            yield worker, "unreachable", None
            if worker.unreachable:
                time.sleep(_RETRY_SECONDS)
            else:
                worker.heartbeat.beat()  # a reply is due from now on
            worker.unreachable = True
            worker.calls.clear()  # its pending requests are abandoned
            worker.locate()
            return
        except ray.exceptions.RayError as error:
            yield worker, "failed", worker.failure(error)
            return
        worker.answered(answer)
        kind = content["event"]
        if kind == "located":
            RayCluster.check_token(content)
            worker.node_id, worker.pid, worker.unreachable = content["node_id"], content["pid"], False
            worker.node = self._names.name(content["node_id"], content["node"])
            worker.started = time.monotonic()
        elif kind == "failed":
            content = replace(FailureReport.from_json(content["report"]), worker=worker.index)
        yield worker, kind, content


class RoomWatch:
    """Detects that no node has room for any worker, at the start or because all nodes are gone."""

    def __init__(self, start_timeout: float, absence_timeout: float) -> None:
        self._start, self._absence = start_timeout, absence_timeout
        self._had_room = self._warned = False
        self._since = time.monotonic()

    def check(self, workers: Collection[WorkerHandle], is_needed: bool, awake_since: float) -> str:
        """Return the time without room, as text, if it exceeds the timeout, else ""; warn at half the timeout."""
        now = time.monotonic()
        if any(math.isfinite(worker.started) for worker in workers):
            self._had_room, self._warned, self._since = True, False, now
        elif self._had_room and not (is_needed and workers):  # no worker is waiting for a node
            self._since = now
        passed = now - max(self._since, awake_since)
        if not self._had_room:
            return f"start_timeout ({self._start:g} s)" if passed > self._start else ""
        if passed > self._absence / 2 and not self._warned:
            self._warned = True
            log.warning(
                "no node of the Ray cluster has had a worker for %.0f s: all nodes with workers are gone", passed
            )
        return f"{self._absence:g} s, since all nodes with workers are gone" if passed > self._absence else ""


def _wait(awaited: Mapping[Any, Handle], seconds: float) -> Iterator[tuple[Any, Handle]]:
    """Wait until a reply arrives; yield all that have arrived."""
    if not awaited:
        time.sleep(seconds)
        return
    ray = load_ray()
    ready, _ = ray.wait(list(awaited), num_returns=1, timeout=seconds)
    if len(awaited) > len(ready) > 0:
        ready, _ = ray.wait(list(awaited), num_returns=len(awaited), timeout=0)
    for answer in ready:
        yield answer, awaited[answer]


class NodeNames:
    """Names of nodes: their host name, with a number if a host has several nodes (``box``, ``box#2``).
    Names of removed nodes are reused. ``alive`` returns the ids of the current nodes."""

    def __init__(self, alive: Callable[[], Collection[str]] | None = None) -> None:
        self._alive, self._names = alive or nodes_alive, dict[str, str]()

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


def nodes_alive() -> set[str]:
    """Return the ids of the cluster's current nodes."""
    return {node["NodeID"] for node in load_ray().nodes() if node["Alive"]}


def node_is_gone(node_id: str) -> bool:
    """Return whether a node has left the cluster."""
    return bool(node_id) and node_id not in nodes_alive()


def node_died(error: Exception, node_id: str) -> bool:
    """Return whether an actor ended because its node died; ``node_id`` is "" if it was never placed on one.
    Ray gives the cause in the text of the error only."""
    exceptions = load_ray().exceptions
    if isinstance(error, exceptions.ActorDiedError) and not error.actor_init_failed:
        return error.preempted or "its node has died" in str(error) or node_is_gone(node_id)
    return isinstance(error, exceptions.NodeDiedError) or node_is_gone(node_id)


def error_text(error: Exception) -> str:
    """Return the message of an error without ANSI colours, or its class name if it is empty."""
    return _COLOURS.sub("", str(error)).strip() or type(error).__name__
