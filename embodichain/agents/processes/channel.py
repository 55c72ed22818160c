"""Messages with tensors between two processes on one machine.

A message is one packet: JSON that describes nested data, and the descriptor of a shared-memory segment with its tensors
(see ``embodichain.utils.tensor_tree``). Long JSON goes into a segment as well. A packet arrives whole or not at all.
Nothing is pickled, and no memory leaks if either process is killed.
"""

from __future__ import annotations

import array
import contextlib
import errno
import json
import math
import os
import select
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from embodichain.agents.processes.shared_memory import Segment
from embodichain.errors import SharedMemoryError
from embodichain.utils.tensor_tree import decode, encode

_LARGEST = 1 << 16
"""Largest packet in bytes. Longer JSON goes into a segment, as socket buffers are small."""
_IN_SEGMENT = b"in segment"
SUSPENDED_SECONDS = 2.0
"""A process that checks the clock this much later than planned was suspended (e.g. the machine slept)."""


@dataclass(frozen=True)
class Message:
    """A message from another process."""

    kind: str
    description: dict[str, Any]
    segment: Segment | None
    """The shared memory that was sent along."""

    def content(self, copy: bool = True, device: str | None = None) -> Any:
        """Return the nested data with TensorDicts on ``device``. Without ``copy``, tensors are views of the segment."""
        return decode(self.description, None if self.segment is None else self.segment.bytes, copy, device)


@dataclass(frozen=True)
class PublishedWeights:
    """Policy weights that a learner publishes to other processes."""

    version: int
    """Increases with every publication."""
    description: Tensor
    """The rest of what is needed to build the policy, as bytes."""
    data: Tensor
    """The weights as bytes; ignored if there is a segment."""
    segment: Segment | None = None
    """Shared memory that holds the weights, if any."""


class Deadline:
    """A timeout that restarts if this process was suspended."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._began = self._last_look = time.monotonic()

    def remaining(self) -> float:
        """Return the remaining seconds, at most 1.0, so that callers ask again and a suspension is noticed."""
        now = time.monotonic()
        if now - self._last_look > 1.0 + SUSPENDED_SECONDS:
            self._began = now
        self._last_look = now
        return min(max(self._began + self._seconds - now, 0.0), 1.0)


class Channel:
    """One end of a connection. Any thread may send; one thread at a time may receive or close.

    No message is lost while the other process is alive: ``send`` blocks while the socket is full, or queues the message
    for later calls. Once either end is closed, ``send`` does nothing and ``receive`` raises ``EOFError``.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._readable = select.poll()  # select() does not support descriptors above 1024
        self._readable.register(connection, select.POLLIN)
        self._writable = select.poll()
        self._writable.register(connection, select.POLLOUT)
        self._waiting: deque[tuple[bytes, list[Segment]]] = deque()
        self._sending = threading.Lock()

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Return the two ends of a new connection."""
        mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(mine), cls(other)

    def send(self, kind: str, content: Any = None, segment: Segment | None = None, wait: bool = True) -> None:
        """Send nested data with its tensors in a new segment, or data without tensors and an existing ``segment``.
        With ``wait=False``, a message that does not fit into the socket is queued and sent by later calls."""

        def allocate(nbytes: int) -> Tensor:
            nonlocal segment
            segment = Segment.create(nbytes, "a message to another process")
            return segment.bytes

        self._post({"kind": kind, **encode(content, allocate)[0]}, segment, wait)

    def has_arrived(self) -> bool:
        """Return whether ``receive`` would not block: a message has arrived, or the other end is closed."""
        return bool(self._readable.poll(0))

    def is_shut_down(self) -> bool:
        """Return whether the other end is closed; messages may still be left to receive."""
        return any(event & select.POLLHUP for _, event in self._readable.poll(0))

    def receive(self, timeout: float | None = None) -> Message | None:
        """Return the next message, or None if none arrives within ``timeout`` seconds (None: wait forever)."""
        if self.socket.fileno() < 0:  # the poll object holds its number, which may be reused by now
            raise EOFError("the connection is closed")
        if self._waiting and self._sending.acquire(blocking=False):  # else another thread is sending
            try:
                self._send_waiting(wait=False)
            finally:
                self._sending.release()
        if not self._readable.poll(None if timeout is None else 1000.0 * timeout):
            return None
        try:
            try:
                packet, descriptors, flags, _ = socket.recv_fds(self.socket, _LARGEST, 2)
            except ConnectionResetError:  # the other end closed with unread messages; its own are still readable
                packet, descriptors, flags, _ = socket.recv_fds(self.socket, _LARGEST, 2)
        except (OSError, ValueError) as error:  # either end is closed
            if getattr(error, "errno", errno.EBADF) not in (errno.EBADF, errno.ECONNRESET):
                raise
            packet, descriptors, flags = b"", [], 0
        if not packet:
            raise EOFError("the other process has closed the connection")
        if flags & socket.MSG_CTRUNC:
            raise SharedMemoryError("another process sent memory, but this one has too many open files: see ulimit -n")
        segments = [Segment(descriptor, os.fstat(descriptor).st_size) for descriptor in descriptors]
        if packet == _IN_SEGMENT:
            packet = segments.pop().bytes.numpy().tobytes()
        description = json.loads(packet)
        return Message(description["kind"], description, segments[0] if segments else None)

    def shut_down(self) -> None:
        """Shut down the connection, which wakes up receivers at both ends."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end; may be called repeatedly, and while another thread sends."""
        self.shut_down()  # a sender that waits for room gives up
        with self._sending:  # afterwards the number of the socket may be reused
            self._waiting.clear()
            self.socket.close()

    def _post(self, description: dict[str, Any], segment: Segment | None, wait: bool) -> None:
        packet, segments = json.dumps(description).encode(), [] if segment is None else [segment]
        if len(packet) > _LARGEST:
            segments.append(Segment.create(len(packet), "a message to another process"))
            segments[-1].bytes.numpy()[:] = np.frombuffer(packet, np.uint8)
            packet = _IN_SEGMENT
        with self._sending:
            if self.socket.fileno() >= 0:
                self._waiting.append((packet, segments))
                self._send_waiting(wait)

    def _send_waiting(self, wait: bool) -> None:
        while self._waiting:
            packet, segments = self._waiting.popleft()
            descriptors = array.array("i", [segment.fd for segment in segments])
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)] if segments else []
            try:
                self.socket.sendmsg([packet], rights, socket.MSG_DONTWAIT)  # send_fds ignores flags
            except BlockingIOError:
                self._waiting.appendleft((packet, segments))
                if not wait:
                    return
                self._writable.poll()
            except (BrokenPipeError, ConnectionResetError):
                self._waiting.clear()


class RequestChannel:
    """One end of a request-reply connection that reuses its shared memory.

    Reuse is safe because every request is answered before the next one is sent, and contents are copied on receipt.
    After an interruption (Ctrl-C) the next request and its reply use new memory, and stale replies are skipped.
    """

    def __init__(self, channel: Channel, asks: bool) -> None:
        self.channel, self._asks = channel, asks
        self._outgoing: Segment | None = None
        self._incoming: Segment | None = None
        self._number = 0
        """Number of requests so far."""
        self._interrupted = False
        """Whether the last send or receive may be incomplete."""

    def send(self, kind: str, content: Any = None) -> None:
        """Send nested data; blocks while the socket is full. If the other process is gone, ``receive`` raises."""
        memory, new = None if self._interrupted else self._outgoing, None

        def allocate(nbytes: int) -> Tensor:
            nonlocal memory, new
            if memory is None or memory.nbytes < nbytes:
                new = memory = Segment.create(nbytes, "a request to another process, or the answer,")
            return memory.bytes

        description = {"kind": kind, "renew": self._interrupted, **encode(content, allocate)[0]}
        self._interrupted = True
        self._number += self._asks
        self.channel._post({**description, "number": self._number}, new, wait=True)
        self._outgoing, self._interrupted = memory, False

    def receive(self, timeout: float = math.inf) -> tuple[str, Any]:
        """Return kind and content of the next message, with TensorDicts on the CPU.
        Raises ``EOFError`` if the other process is gone, and ``TimeoutError`` after ``timeout`` seconds."""
        deadline = Deadline(timeout)
        while True:
            self._interrupted = True
            message = None
            while message is None:
                left = deadline.remaining()
                message = self.channel.receive(left)
                if message is None and not left:
                    raise TimeoutError(f"no answer came in {timeout:g} s")
            self._incoming = message.segment or self._incoming
            self._interrupted = False
            description = message.description
            if not self._asks:
                self._number = description["number"]
                self._outgoing = None if description["renew"] else self._outgoing
            if description.get("number", self._number) == self._number:  # else it is a stale reply
                return message.kind, Message(message.kind, description, self._incoming).content(device="cpu")

    def close(self) -> None:
        """Close this end and release its memory."""
        self.channel.close()
        self._outgoing = self._incoming = None
