"""Instructions as tokens: UTF-8 bytes, a few at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PAD = 0
"""The byte that ends an instruction; no text contains it."""
VOCABULARY = 256


class ByteTokenizer(nn.Module):
    """Embeds ``stride`` neighbouring bytes as one token, with its place: ``[batch, length]`` to ``[batch, n, width]``.

    Any text in any language has bytes, so there is no vocabulary to fit and none that could be missing.
    """

    def __init__(self, length: int, width: int, stride: int = 4) -> None:
        super().__init__()
        self.length, self.stride = length, stride
        self.num_tokens = -(-length // stride)
        self.embed = nn.Embedding(VOCABULARY, width, padding_idx=PAD)
        self.join = nn.Conv1d(width, width, kernel_size=stride, stride=stride)
        self.place = nn.Parameter(torch.randn(self.num_tokens, width) * 0.02)

    def forward(self, instruction: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens ``[batch, num_tokens, width]`` and which of them hold text, bool ``[batch, num_tokens]``."""
        padded = F.pad(instruction, (0, self.num_tokens * self.stride - self.length), value=PAD)
        tokens = self.join(self.embed(padded).transpose(1, 2)).transpose(1, 2) + self.place
        return tokens, (padded != PAD).unflatten(1, (self.num_tokens, self.stride)).any(-1)
