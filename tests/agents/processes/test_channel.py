"""Channels between processes: every message arrives, as it was sent, and nothing waits that must not."""

from __future__ import annotations

import gc
import importlib
import os
import threading
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from embodichain.agents.processes import shared_memory
from embodichain.agents.processes.channel import Channel, RequestChannel
from embodichain.agents.processes.shared_memory import Segment, tensor_of
from embodichain.errors import SharedMemoryError
from embodichain.utils.tensor_tree import decode, encode, from_bytes, to_bytes
from tests.programs import wait_until

NESTED = {
    "numbers": torch.arange(5),
    "strided": torch.arange(12.0).view(3, 4).t(),
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "list": [None, 1.5, float("nan"), ("a", {3: np.arange(4, dtype=np.float32)})],
    "nested": TensorDict({"a": torch.ones(2, 3), "b": {"c": torch.zeros(2, 0)}}, batch_size=[2]),
}


def assert_same(received: dict[str, Any]) -> None:
    assert all(torch.equal(received[name], NESTED[name]) for name in ("numbers", "strided", "half"))
    nothing, number, nan, (letter, inner) = received["list"]
    assert (nothing, number, letter) == (None, 1.5, "a")
    assert nan != nan
    assert inner[3].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert (received["nested"] == NESTED["nested"]).all()


def request_channels() -> tuple[RequestChannel, RequestChannel]:
    mine, other = Channel.pair()
    return RequestChannel(mine, asks=True), RequestChannel(other, asks=False)


def test_messages_of_all_sizes_go_through_the_same_memory() -> None:
    mine, other = request_channels()
    for count in (3, 100_000, 0, 7, 200_000, 5):
        sent = {"numbers": torch.arange(count), "flags": torch.rand(count) > 0.5, "words": ["a", None, 1.5]}
        mine.send("question", sent)
        title, received = other.receive()
        assert title == "question"
        assert received["words"] == sent["words"]
        assert torch.equal(received["numbers"], sent["numbers"])
        assert torch.equal(received["flags"], sent["flags"])
        other.send("answer", received["numbers"] * 2)
        kept = mine.receive()[1]
        other.send("more", kept + 1)
        assert torch.equal(kept, sent["numbers"] * 2)  # what was received is not written to again
        mine.receive()
    other.close()
    with pytest.raises(EOFError):
        mine.receive()
    mine.close()


def test_a_message_that_could_not_be_sent_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other = request_channels()
    mine.send("small", torch.arange(4))
    assert other.receive()[1].tolist() == [0, 1, 2, 3]
    heard: list[tuple[str, Tensor]] = []
    thread = threading.Thread(target=lambda: heard.append(other.receive()))
    thread.start()
    with monkeypatch.context() as patch:
        patch.setattr(shared_memory, "available_bytes", lambda: 1 << 20)  # enough for the tensor, not for the text
        with pytest.raises(SharedMemoryError):
            mine.send("large", [torch.arange(100_000), "x" * 10_000_000])
    mine.send("small", torch.arange(4) + 100)
    thread.join()
    assert heard[0][1].tolist() == [100, 101, 102, 103]
    received = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    other.send("half", received)
    assert torch.equal(mine.receive()[1], received)
    mine.close()
    other.close()


@pytest.mark.extra("export")
def test_a_type_that_numpy_learned_of_elsewhere_comes_through() -> None:
    importlib.import_module(
        "ml_dtypes"
    )  # it comes with onnx; numpy knows bfloat16 from then on, torch does not know numpy's
    mine, other = request_channels()
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.uint16):
        sent = torch.tensor([1, 2]).to(dtype)
        other.send("number", [sent, torch.empty(0, 3, dtype=dtype)])
        received, nothing = mine.receive()[1]
        assert torch.equal(received.view(torch.uint8), sent.view(torch.uint8))
        assert (nothing.shape, nothing.dtype) == ((0, 3), dtype)
    mine.close()
    other.close()


def test_codec_gives_back_what_it_was_given() -> None:
    description, block = encode(NESTED)
    assert_same(decode(description, block))
    views = decode(description, block, copy=False, device="cpu")
    assert_same(views)
    assert views["numbers"].untyped_storage().data_ptr() == block.untyped_storage().data_ptr()
    assert views["nested"].device == views["nested"]["b"].device == torch.device("cpu")
    assert_same(from_bytes(to_bytes(NESTED)))


def test_who_does_not_read_is_not_waited_for_and_loses_nothing() -> None:
    mine, other = Channel.pair()
    count = 200
    for number in range(count):  # far more than a socket holds
        mine.send("work", {"number": number, "padding": "x" * 10_000, "tensor": torch.tensor([number])}, wait=False)
    received = []
    while len(received) < count:
        message = other.receive(0.0)
        if message is not None:
            content = message.content()
            assert content["tensor"].tolist() == [content["number"]]
            received.append(content["number"])
        mine.receive(0.0)  # as whoever waits for the results does
    assert received == list(range(count))
    mine.close()
    other.close()


def test_a_message_that_waits_is_sent_before_later_ones() -> None:
    mine, other = Channel.pair()
    for number in range(100):
        mine.send("work", [number, "x" * 10_000], wait=False)
    thread = threading.Thread(target=mine.send, args=("work", [100]))
    thread.start()
    assert [message.content()[0] for message in (other.receive() for _ in range(101)) if message] == [*range(101)]
    thread.join()
    mine.close()
    other.close()


def test_who_is_gone_is_told_by_receive() -> None:
    mine, other = Channel.pair()
    other.close()
    for wait in (True, False):
        mine.send("work", torch.ones(3), wait=wait)
    with pytest.raises(EOFError):
        mine.receive()
    mine.close()
    with pytest.raises(EOFError):
        mine.receive()


def test_nothing_is_sent_once_this_end_is_closed() -> None:
    """A learner may be about to send weights to a worker that has just died."""
    mine, other = Channel.pair()
    mine.close()
    for wait in (True, False):
        mine.send("weights", torch.ones(3), wait=wait)
    with pytest.raises(EOFError):
        other.receive(0.0)
    other.close()


def test_closing_ends_a_message_that_waits_for_room() -> None:
    mine, other = Channel.pair()
    while not mine._waiting:
        mine.send("work", "x" * 10_000, wait=False)
    thread = threading.Thread(target=mine.send, args=("work",), daemon=True)
    thread.start()
    wait_until(mine._sending.locked)
    mine.close()
    thread.join(60.0)
    assert not thread.is_alive()
    other.close()


def test_the_last_message_arrives_from_who_did_not_read_all() -> None:
    mine, other = Channel.pair()
    mine.send("never read", 1)
    other.send("failed", "why")
    other.close()
    message = mine.receive()
    assert message is not None
    assert (message.kind, message.content()) == ("failed", "why")
    with pytest.raises(EOFError):
        mine.receive()
    mine.close()


def test_memory_goes_along() -> None:
    mine, other = Channel.pair()
    segment = Segment.create(64, "a test")
    mine.send("memory", {"version": 3}, segment)
    message = other.receive()
    assert message is not None
    assert message.segment is not None
    segment.bytes[5] = 7
    assert (message.kind, message.content(), int(message.segment.bytes[5])) == ("memory", {"version": 3}, 7)
    mine.close()
    other.close()


def test_a_tensor_of_an_array_keeps_it_alive() -> None:
    array = np.full(1 << 20, 7, np.uint8)
    array.flags.writeable = False
    part = tensor_of(array)[1000:1003]
    del array
    gc.collect()
    assert [np.full(1 << 20, 1, np.uint8).sum() for _ in range(4)]
    assert part.tolist() == [7, 7, 7]


@pytest.mark.parametrize("tensors", [0, 1500])
def test_what_a_socket_has_no_room_for_comes_through(tensors: int) -> None:
    """The words of a message with many tensors, or of a long report, are more than a packet may have."""
    one, other = Channel.pair()
    content = {f"a_sensor_with_a_long_name_{i:05}/{'x' * 100}": torch.full((2,), float(i)) for i in range(tensors)}
    text = "" if tensors else "\N{SNOWMAN}" * 200_000
    one.send("much", {"tensors": content, "text": text})
    message = other.receive(10.0)
    assert message is not None
    arrived = message.content()
    assert (message.kind, arrived["text"]) == ("much", text)
    assert list(arrived["tensors"]) == list(content)
    assert all(torch.equal(arrived["tensors"][name], content[name]) for name in content)
    assert len(os.listdir("/proc/self/fd")) < 100
