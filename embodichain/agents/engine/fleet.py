"""What the supervisor knows of workers, wherever they run: processes of this machine here, or of a Ray cluster."""

from __future__ import annotations

import selectors
from collections.abc import Iterator
from typing import Any, Protocol

from embodichain.agents.engine.config import OnlineDataEngineCfg
from embodichain.agents.engine.process import WorkerProcess
from embodichain.agents.engine.shared_buffer import SharedBuffer
from embodichain.agents.processes.failure import FailureReport

Message = dict[str, Any]


class WorkerHandle(Protocol):
    """One worker, seen from the engine."""

    index: int
    incarnation: int
    """How many workers were in its place before."""
    node: str
    """Name of the machine it is on; empty as long as it is on none."""
    started: float
    """When it began to build its environment (monotonic); infinite while it still waits for a place."""
    joined: float
    """When it was given the buffer; 0 while it is still building its environment."""
    lost: bool
    """Whether it ended with its machine, which is no fault of its own."""
    unreachable: bool
    """Whether nobody knows at present what has become of it."""

    @property
    def pid(self) -> int:
        """The process id, on its machine; 0 while there is none."""

    def share(self, buffer: SharedBuffer) -> None:
        """Let it begin to fill the buffer."""

    def last_words(self) -> FailureReport:
        """Say how a worker ended that has hung up."""

    def wait(self, seconds: float) -> bool:
        """Give it time to end by itself; tell whether it did."""

    def kill(self) -> None:
        """End it, now."""


class Fleet(Protocol):
    """Starts workers and hears what they say."""

    def start(self, index: int, incarnation: int) -> WorkerHandle:
        """Start a worker."""

    def hear(self, seconds: float) -> Iterator[tuple[WorkerHandle, Message | None]]:
        """Wait a moment and return what workers said: ``layout``, ``failed``, or None from one that has ended."""

    def forget(self, worker: WorkerHandle) -> None:
        """Listen to a worker no more."""

    def close(self) -> None:
        """Release what the fleet holds."""


class LocalFleet:
    """Processes of this machine, which write into the buffer themselves."""

    def __init__(self, cfg: OnlineDataEngineCfg) -> None:
        self._cfg = cfg
        self._selector = selectors.DefaultSelector()

    def start(self, index: int, incarnation: int) -> WorkerHandle:
        """Start a process."""
        worker = WorkerProcess(self._cfg, index, incarnation)
        self._selector.register(worker.socket, selectors.EVENT_READ, worker)
        return worker

    def hear(self, seconds: float) -> Iterator[tuple[WorkerHandle, Message | None]]:
        """Wait a moment and return what workers said."""
        for key, _ in self._selector.select(seconds):
            worker: WorkerProcess = key.data
            yield worker, worker.receive()

    def forget(self, worker: WorkerHandle) -> None:
        """Listen to a worker no more."""
        if isinstance(worker, WorkerProcess):
            self._selector.unregister(worker.socket)

    def close(self) -> None:
        """Close the selector."""
        self._selector.close()


def make_fleet(cfg: OnlineDataEngineCfg) -> Fleet:
    """Return the fleet that the config asks for."""
    if cfg.workers == "ray":
        from embodichain.agents.engine.ray_workers import RayFleet  # it needs an extra

        return RayFleet(cfg)
    return LocalFleet(cfg)
