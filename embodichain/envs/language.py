"""Instructions as observations: UTF-8 bytes in a fixed number of places, so that they batch, store and stream."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from embodichain.errors import ConfigError


def encode_instructions(texts: Sequence[str], length: int) -> Tensor:
    """Return uint8 ``[len(texts), length]``: the bytes of each text, then zeros."""
    table = torch.zeros(len(texts), length, dtype=torch.uint8)
    for row, text in zip(table, texts, strict=True):
        data = text.encode()
        if not data or b"\0" in data or len(data) > length:
            raise ConfigError(f"an instruction has 1 to {length} bytes, none of them zero, got {len(data)}: {text!r}")
        row[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    return table


def decode_instructions(instructions: Tensor) -> list[str]:
    """Return the texts of uint8 ``[n, length]``."""
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in instructions.cpu().tolist()]
