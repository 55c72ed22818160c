"""Instructions as inputs of networks: codes of their words, and gates that they control."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from embodichain.agents.rl.models.mlp import MLP, Linear
from embodichain.config.classes import Config, Size, configclass
from embodichain.errors import ConfigError

_SEED = 20_170_922  # of the codes, which are not trained
_SPACE = 32
_GATE_GAIN = 0.5


@configclass
class TextEncoderCfg(Config):
    """How a policy reads the key ``instruction``, the bytes of a text."""

    max_words: Annotated[Size, Field(le=256)] = 12
    """Words that are read; others are ignored."""
    word_dim: Annotated[Size, Field(le=256)] = 8
    """Numbers per word."""
    gates: bool = True
    """Whether the text scales the first hidden layer of each network, beside being an input of it (FiLM)."""


class TextEncoder(nn.Module):
    """Maps texts ``[..., length]``, bytes padded with zeros, to codes of their words ``[..., dim]``.

    The code of a word is a fixed random function of its pairs of neighbouring letters. Codes are in the order of the
    words, so that a word has the same code whichever byte it begins at.
    """

    letters: Tensor
    followers: Tensor

    def __init__(self, cfg: TextEncoderCfg) -> None:
        super().__init__()
        self.max_words, self.dim = cfg.max_words, cfg.max_words * cfg.word_dim
        generator = torch.Generator().manual_seed(_SEED)
        letters, followers = (torch.randn(256, cfg.word_dim, generator=generator) for _ in range(2))
        letters[: _SPACE + 1] = 0.0  # codes consist of letters alone
        followers[:_SPACE] = followers[_SPACE]  # a word at the end of the text is that word
        self.register_buffer("letters", letters)
        self.register_buffer("followers", followers)

    def forward(self, text: Tensor) -> Tensor:
        with torch.autocast(text.device.type, enabled=False):
            code = text.nan_to_num().clamp(0, 255).long()  # flat observations may hold any number
            is_letter = code > _SPACE
            begins = is_letter & ~functional.pad(is_letter[..., :-1], (1, 0))
            word = begins.long().cumsum(-1) - 1
            followers = functional.embedding(functional.pad(code[..., 1:], (0, 1)), self.followers)
            pairs = functional.embedding(code, self.letters) * followers  # [..., length, word_dim]
            index = torch.arange(self.max_words, device=text.device).unsqueeze(-1)
            belongs = (word.unsqueeze(-2) == index).to(pairs)  # [..., max_words, length]
            return (belongs @ pairs).flatten(-2)


class GatedLinear(Linear):
    """A linear layer whose outputs are scaled by a function of some of its inputs: ``(1 + G x[text]) (W x + b)``.

    What a network computes from all else then depends on the instruction from the first layer on (FiLM: Perez et al.
    2018, arXiv 1709.07871). A plain layer adds the two, so that later layers have to tell the cases apart.
    """

    def __init__(self, inputs: int, outputs: int, text: slice) -> None:
        super().__init__(inputs, outputs)
        self.text = text
        self.gates = nn.Linear(text.stop - text.start, outputs, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * (1.0 + self.gates(input[..., self.text]))


def add_gates(network: MLP, text: slice) -> None:
    """Give the first layer of a network gates that its inputs ``text`` control."""
    first, *others = (layer for layer in network if isinstance(layer, nn.Linear))
    if not others:
        problem = "gates: a network without hidden layers has none to scale"
        raise ConfigError(f"{problem}; set hidden_sizes, or gates to false", "policy.text_encoder")
    gated = GatedLinear(first.in_features, first.out_features, text)
    nn.init.orthogonal_(gated.gates.weight, _GATE_GAIN)
    gated.weight, gated.bias = first.weight, first.bias
    network[0] = gated
