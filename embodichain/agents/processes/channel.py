"""Messages with tensors in them between two processes of one machine.

JSON that describes nested data, and a segment of shared memory with its tensors (``embodichain.utils.tensor_tree``),
travel in one packet, whole or not at all; long JSON lies in a segment as well. Nothing is pickled, and nothing is left
over if either side is killed.
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
"""Bytes of a packet; what is to be told in more than that goes into a segment, as a socket has little room."""
_IN_SEGMENT = b"in segment"
SUSPENDED_SECONDS = 2.0
"""One that looks at the clock this much later than it wanted to was suspended (e.g. by sleep), perhaps with others."""


@dataclass(frozen=True)
class Message:
    """What another process sent."""

    kind: str
    description: dict[str, Any]
    segment: Segment | None
    """The memory that came with it."""

    def content(self, copy: bool = True, device: str | None = None) -> Any:
        """Return the nested data; without ``copy`` tensors lie in the segment; ``device`` is that of TensorDicts."""
        return decode(self.description, None if self.segment is None else self.segment.bytes, copy, device)


@dataclass(frozen=True)
class PublishedWeights:
    """Weights that a learner lets other processes act by."""

    version: int
    """They are numbered in the order in which they were published."""
    description: Tensor
    """What a process needs beside them to make the policy, as bytes."""
    data: Tensor
    """The weights, as bytes; not needed if there is a segment."""
    segment: Segment | None = None
    """The shared memory that they lie in, where there is some."""


class Deadline:
    """A limit of the time in which this process is awake: when it was suspended, the time begins anew."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._began = self._last_look = time.monotonic()

    def remaining(self) -> float:
        """Return the seconds that are left, but one at the most: it has to be asked again and again."""
        now = time.monotonic()
        if now - self._last_look > 1.0 + SUSPENDED_SECONDS:
            self._began = now
        self._last_look = now
        return min(max(self._began + self._seconds - now, 0.0), 1.0)


class Channel:
    """One end of a connection; any thread may send, and one at a time receives.

    While the other process lives no message is lost: ``send`` waits for room, or queues it for later calls to send.
    Once it is gone ``send`` does nothing, and ``receive`` raises ``EOFError``.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._arrivals = select.poll()  # select() cannot watch descriptors beyond 1024
        self._arrivals.register(connection, select.POLLIN)
        self._room = select.poll()
        self._room.register(connection, select.POLLOUT)
        self._waiting: deque[tuple[bytes, list[Segment]]] = deque()
        self._sending = threading.Lock()

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Return the two ends of a new connection."""
        mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(mine), cls(other)

    def send(self, kind: str, content: Any = None, segment: Segment | None = None, wait: bool = True) -> None:
        """Send nested data with its tensors in a new segment, or without any and with an existing ``segment``.
        Without ``wait`` a message that finds no room in the socket is queued, and sent by later calls."""

        def allocate(nbytes: int) -> Tensor:
            nonlocal segment
            segment = Segment.create(nbytes, "a message to another process")
            return segment.bytes

        self._post({"kind": kind, **encode(content, allocate)[0]}, segment, wait)

    def has_arrived(self) -> bool:
        """Tell whether there is something to receive, be it the news that the other end is closed."""
        return bool(self._arrivals.poll(0))

    def is_shut_down(self) -> bool:
        """Tell whether the other end is closed, whatever there still is to receive."""
        return any(event & select.POLLHUP for _, event in self._arrivals.poll(0))

    def receive(self, timeout: float | None = None) -> Message | None:
        """Return the next message, ``None`` if none came within so many seconds."""
        if self.socket.fileno() < 0:  # its number may be another's by now
            raise EOFError("the connection is closed")
        if self._waiting and self._sending.acquire(blocking=False):  # else somebody is sending
            try:
                self._send_waiting(wait=False)
            finally:
                self._sending.release()
        if not self._arrivals.poll(None if timeout is None else 1000.0 * timeout):
            return None
        try:
            try:
                packet, descriptors, flags, _ = socket.recv_fds(self.socket, _LARGEST, 2)
            except ConnectionResetError:  # closed there, with something unread; what was sent before is still here
                packet, descriptors, flags, _ = socket.recv_fds(self.socket, _LARGEST, 2)
        except (OSError, ValueError) as error:  # closed there, or here
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
        """Let nobody wait for a message any more, here or at the other end."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end; calling it twice is fine."""
        self.socket.close()

    def _post(self, words: dict[str, Any], segment: Segment | None, wait: bool) -> None:
        packet, segments = json.dumps(words).encode(), [] if segment is None else [segment]
        if len(packet) > _LARGEST:
            segments.append(Segment.create(len(packet), "a message to another process"))
            segments[-1].bytes.numpy()[:] = np.frombuffer(packet, np.uint8)
            packet = _IN_SEGMENT
        with self._sending:
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
                self._room.poll()
            except (BrokenPipeError, ConnectionResetError):
                self._waiting.clear()


class RequestChannel:
    """One end of a connection on which one process asks and the other answers, through memory that is used again.

    That is safe because every message is answered before the next is sent, and copied on receipt. After an interruption
    (Ctrl-C) the next request and its answer use new memory, and answers to earlier requests are skipped.
    """

    def __init__(self, channel: Channel, asks: bool) -> None:
        self.channel, self._asks = channel, asks
        self._outgoing: Segment | None = None
        self._incoming: Segment | None = None
        self._number = 0
        """How many requests there were."""
        self._interrupted = False
        """Whether what was sent or received last may not have arrived."""

    def send(self, kind: str, content: Any = None) -> None:
        """Send nested data, waiting for room; if the other process is gone, ``receive`` tells."""
        memory, new = None if self._interrupted else self._outgoing, None

        def allocate(nbytes: int) -> Tensor:
            nonlocal memory, new
            if memory is None or memory.nbytes < nbytes:
                new = memory = Segment.create(nbytes, "a request to another process, or the answer,")
            return memory.bytes

        words = {"kind": kind, "renew": self._interrupted, **encode(content, allocate)[0]}
        self._interrupted = True
        self._number += self._asks
        self.channel._post({**words, "number": self._number}, new, wait=True)
        self._outgoing, self._interrupted = memory, False

    def receive(self, timeout: float = math.inf) -> tuple[str, Any]:
        """Return kind and content of the next message, TensorDicts on the CPU; ``EOFError`` if nobody is there,
        ``TimeoutError`` if none came in so many seconds."""
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
            words = message.description
            if not self._asks:
                self._number = words["number"]
                self._outgoing = None if words["renew"] else self._outgoing
            if words.get("number", self._number) == self._number:  # else nobody waits for it any more
                return message.kind, Message(message.kind, words, self._incoming).content(device="cpu")

    def close(self) -> None:
        """Close this end and let go of its memory."""
        self.channel.close()
        self._outgoing = self._incoming = None
