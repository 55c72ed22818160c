"""Nested data with tensors in it on its way to another process: a piece of shared memory, and words that describe it.

The words are JSON and the memory is known by its descriptor alone; both travel in one message (``SOCK_SEQPACKET``), so
a message is there as a whole or not at all. Nothing is pickled, and nothing is left over if either side is killed.
"""

from __future__ import annotations

import array
import errno
import json
import os
import select
import socket
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from embodichain.agents.processes.segment import Segment
from embodichain.agents.rl.utils.tree import put_together, take_apart
from embodichain.errors import SharedMemoryError

_ALIGNMENT = 64
_LARGEST = 1 << 20


class Memory(Protocol):
    """Flat memory that tensors can lie in."""

    nbytes: int

    def view(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Return the bytes from ``offset`` on as a tensor."""


Kind = TypeVar("Kind", bound=Memory)


def pack(value: Any) -> tuple[dict[str, Any], Segment]:
    """Copy a nest of dicts, lists, numbers and tensors into shared memory; return its description and the memory."""
    return pack_into(value, lambda nbytes: Segment.create(nbytes, "what a collector sends"))


def pack_into(value: Any, create: Callable[[int], Kind]) -> tuple[dict[str, Any], Kind]:
    """Copy a nest of dicts, lists, numbers and tensors into new memory; return its description and the memory."""
    data, tensors = take_apart(value)
    places, nbytes = lay_out(tensors)
    memory = create(nbytes)
    copy_into(memory, places, tensors)
    return {"data": data, "places": places, "nbytes": memory.nbytes}, memory


def lay_out(tensors: Mapping[str, Tensor]) -> tuple[list[list[Any]], int]:
    """Return where tensors go in common memory, ``[name, dtype, shape, offset]``, and how many bytes that takes."""
    places, end = [], 0
    for name, tensor in tensors.items():
        places.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), end])
        end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
    return places, max(end, _ALIGNMENT)


def copy_into(memory: Memory, places: list[list[Any]], tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors to their places."""
    for name, view in _views(memory, places).items():
        view.copy_(tensors[name])


def unpack(words: dict[str, Any], memory: Memory, copy: bool = True) -> Any:
    """Return what was packed; without ``copy`` tensors lie in the shared memory, which lives as long as they do."""
    views = _views(memory, words["places"])
    return put_together(words["data"], {name: view.clone() for name, view in views.items()} if copy else views)


def _views(memory: Memory, places: list[list[Any]]) -> dict[str, Tensor]:
    return {name: memory.view(at, getattr(torch, dtype), tuple(shape)) for name, dtype, shape, at in places}


class Channel:
    """One end of a connection between two processes that send each other messages."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._arrivals = select.poll()  # select() cannot watch descriptors beyond 1024
        self._arrivals.register(connection, select.POLLIN)

    @staticmethod
    def pair() -> tuple[Channel, Channel]:
        """Return the two ends of a new connection."""
        mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return Channel(mine), Channel(other)

    def send(self, message: dict[str, Any], segment: Segment | None = None, patient: bool = False) -> bool:
        """Send a message; tell whether somebody was there to take it.

        Who does not read for so long that the queue is full is as good as dead, unless one is ``patient``.
        """
        rights = [] if segment is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [segment.fd]))]
        flags = 0 if patient else socket.MSG_DONTWAIT
        try:
            self.socket.sendmsg([json.dumps(message).encode()], rights, flags)  # send_fds ignores flags
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            return False
        return True

    def has_arrived(self) -> bool:
        """Tell whether there is something to receive, be it the news that the other end has hung up."""
        return bool(self._arrivals.poll(0))

    def receive(self, timeout: float | None) -> tuple[dict[str, Any], Segment | None] | None:
        """Return the next message and the memory that came with it, ``None`` if none came in time.

        ``EOFError`` says that nobody is at the other end any more.
        """
        if self.socket.fileno() < 0:  # its number may be another's by now
            raise EOFError("the connection is closed")
        if not self._arrivals.poll(None if timeout is None else 1000.0 * timeout):
            return None
        try:
            content, descriptors, flags, _ = socket.recv_fds(self.socket, _LARGEST, 1)
        except (ConnectionResetError, ValueError):  # hung up there, or closed here
            content, descriptors, flags = b"", [], 0
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            content, descriptors, flags = b"", [], 0
        if not content:
            raise EOFError("the other process has hung up")
        if flags & socket.MSG_CTRUNC:
            raise SharedMemoryError("another process sent memory, but this one has too many open files: see ulimit -n")
        message = json.loads(content)
        if not descriptors:
            return message, None
        return message, Segment(descriptors[0], os.fstat(descriptors[0]).st_size)

    def close(self) -> None:
        """Hang up; calling it twice is fine."""
        self.socket.close()
