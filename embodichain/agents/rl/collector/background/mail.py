"""Questions and answers between two processes that take turns, through memory that is used again and again.

The memory that carried the last message carries the next one, if it is large enough. That is safe because nobody sends
a second message before the first was answered, and whoever receives one copies it at once. The copy is a single one:
every small copy would give other threads the chance to take the interpreter away.
"""

from __future__ import annotations

import math
import socket
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from embodichain.agents.processes.segment import Segment
from embodichain.agents.rl.collector.background.parcel import Channel, copy_into, lay_out
from embodichain.agents.rl.utils.tree import put_together, take_apart


class Mail:
    """One end of a connection; nests of dicts, lists, numbers and tensors go through it, each with a title."""

    def __init__(self, connection: socket.socket) -> None:
        self._channel = Channel(connection)
        self._outgoing: Segment | None = None
        self._incoming: Segment | None = None

    @staticmethod
    def pair() -> tuple[Mail, Mail]:
        """Return the two ends of a new connection."""
        mine, other = Channel.pair()
        return Mail(mine.socket), Mail(other.socket)

    @property
    def socket(self) -> socket.socket:
        """What the connection consists of."""
        return self._channel.socket

    def send(self, title: str, content: Any) -> bool:
        """Send a message; tell whether somebody was there to take it."""
        data, tensors = take_apart(content)
        places, nbytes = lay_out(tensors)
        new, memory = None, self._outgoing
        if memory is None or memory.nbytes < nbytes:
            new = memory = self._outgoing = Segment.create(nbytes, "what an environment is told, or answers,")
        copy_into(memory, places, tensors)
        message = {"title": title, "data": data, "places": places, "nbytes": nbytes}
        return self._channel.send(message, new, patient=True)

    def receive(self) -> tuple[str, Any]:
        """Wait for the next message; ``EOFError`` says that nobody is at the other end any more."""
        message, new = self._channel.receive(None) or ({}, None)
        memory = self._incoming = new or self._incoming
        if memory is None:
            raise EOFError("the other process sent nothing to look at")
        copied = memory.bytes.numpy()[: message["nbytes"]].copy()
        parts = {name: torch.from_numpy(_part(copied, *place)) for name, *place in message["places"]}
        return message["title"], _placed(put_together(message["data"], parts))

    def close(self) -> None:
        """Hang up; calling it twice is fine."""
        self._channel.close()


def _part(memory: np.ndarray, dtype: str, shape: list[int], offset: int) -> np.ndarray:
    kind = np.dtype(dtype)
    return np.frombuffer(memory, kind, math.prod(shape), offset).reshape(shape)


def _placed(value: Any) -> Any:
    """Return a message in which TensorDicts know where they are, as those of an environment do."""
    if isinstance(value, TensorDictBase):
        return value.to("cpu")
    if isinstance(value, (list, tuple)):
        return type(value)(map(_placed, value))
    return {key: _placed(entry) for key, entry in value.items()} if isinstance(value, dict) else value
