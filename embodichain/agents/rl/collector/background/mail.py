"""Questions and answers between two processes that take turns, through memory that is used again and again.

The memory that carried the last message carries the next one, if it is large enough. That is safe because nobody sends
a second message before the first was answered, and whoever receives one copies it at once. After an interruption, a
Ctrl-C for instance, it is not known whether a message went out or an answer came in: the next question then waits
until the other side has no answer left to give.

Copies are numpy's: torch would let other threads take the interpreter with every tensor, however small.
"""

from __future__ import annotations

import contextlib
import math
import socket
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from embodichain.agents.processes.segment import Segment
from embodichain.agents.rl.collector.background.parcel import Channel, copy_into, lay_out
from embodichain.agents.rl.utils.tree import put_together, take_apart

_PING, _PONG = "ping", "pong"
_COMMON = {"float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"}
"""Types that numpy and torch both know. Whether numpy knows bfloat16 depends on what else a program imports."""


class Mail:
    """One end of a connection; nests of dicts, lists, numbers and tensors go through it, each with a title."""

    def __init__(self, connection: socket.socket) -> None:
        self._channel = Channel(connection)
        self._outgoing: Segment | None = None
        self._incoming: Segment | None = None
        self._certain = True
        """Whether every message that was sent has arrived, and every answer was received."""
        self._signs = 0

    @staticmethod
    def pair() -> tuple[Mail, Mail]:
        """Return the two ends of a new connection."""
        mine, other = Channel.pair()
        return Mail(mine.socket), Mail(other.socket)

    @property
    def socket(self) -> socket.socket:
        """What the connection consists of."""
        return self._channel.socket

    def send(self, title: str, content: Any = None) -> bool:
        """Send a message; tell whether somebody was there to take it."""
        if not self._certain:
            self._catch_up()
        data, tensors = take_apart(content)
        places, nbytes = lay_out(tensors)
        memory, new = self._outgoing, None
        if tensors:
            if memory is None or memory.nbytes < nbytes:
                new = memory = Segment.create(nbytes, "what an environment is told, or answers,")
            copy_into(memory, places, tensors)
        self._certain = False
        sent = self._channel.send({"title": title, "data": data, "places": places}, new, patient=True)
        self._outgoing, self._certain = memory, True
        return sent

    def has_arrived(self) -> bool:
        """Tell whether ``receive`` would not have to wait."""
        return self._channel.has_arrived()

    def receive(self) -> tuple[str, Any]:
        """Wait for the next message; ``EOFError`` says that nobody is at the other end any more."""
        while True:
            self._certain = False
            message, new = self._channel.receive(None) or ({}, None)
            self._incoming = new or self._incoming
            self._certain = True
            if message["title"] != _PING:
                return message["title"], self._opened(message)
            self._outgoing = None  # the other side may have lost it
            self._channel.send(message | {"title": _PONG}, patient=True)

    def hang_up(self) -> None:
        """Let nobody wait for a message any more, here or at the other end."""
        with contextlib.suppress(OSError):
            self._channel.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; calling it twice is fine."""
        self._channel.close()
        self._outgoing = self._incoming = None

    def _opened(self, message: dict[str, Any]) -> Any:
        places, memory = message["places"], self._incoming
        if not places or memory is None:
            return put_together(message["data"], {})
        there = memory.bytes.numpy()
        return _placed(put_together(message["data"], {name: _copied(there, *place) for name, *place in places}))

    def _catch_up(self) -> None:
        """Wait for the answer to a sign that is sent now: what comes before it, nobody waits for any more."""
        self._outgoing = None
        self._signs += 1
        sign = {"title": _PING, "number": self._signs}
        self._channel.send(sign, patient=True)
        while (self._channel.receive(None) or ({}, None))[0] != sign | {"title": _PONG}:
            pass
        self._certain = True


def _copied(memory: np.ndarray, dtype: str, shape: list[int], offset: int) -> Tensor:
    if dtype in _COMMON:
        return torch.from_numpy(np.frombuffer(memory, dtype, math.prod(shape), offset).reshape(shape).copy())
    size = math.prod(shape) * getattr(torch, dtype).itemsize
    if not size:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.from_numpy(memory[offset : offset + size].copy()).view(getattr(torch, dtype)).view(shape)


def _placed(value: Any) -> Any:
    """Return a message in which TensorDicts know where they are, as those of an environment do."""
    if isinstance(value, TensorDictBase):
        return value.to("cpu")
    if isinstance(value, (list, tuple)):
        return type(value)(map(_placed, value))
    return {key: _placed(entry) for key, entry in value.items()} if isinstance(value, dict) else value
