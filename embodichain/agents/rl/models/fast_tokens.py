"""FAST-like action tokens: the frequencies of a chunk, rounded and compressed by byte-pair encoding.

Consecutive actions are similar, so with the bins of ``tokens.py`` a head mostly learns to copy the previous token. Here
a chunk ``[chunk_size, action_dim]`` in the range of ``TokenCfg`` is encoded in three steps:

1. scale it to [-1, 1] and compute the orthonormal discrete cosine transform ``c = D a`` of each action dimension;
2. round to integers ``round(scale c)``, lowest frequencies of all dimensions first, and drop the zeros at the end;
3. merge them to tokens: each represents a run of integers that is frequent in the chunks of ``fit``.

Sequences vary in length and end with an end token. Every sequence can be decoded: missing integers are zeros, and a
head never chooses a token with more integers than are left.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from embodichain.config.classes import Config, Count, Positive, configclass
from embodichain.errors import CheckpointError, ConfigError, RolloutError, writing

END = 0
"""The token that ends a sequence; the next ones are single integers, then runs of integers."""
FORMAT = "embodichain-fast-tokenizer"
_PAD = -1


@configclass
class FastCfg(Config):
    """Settings of FAST-like tokens."""

    scale: Positive = 10.0
    """Factor on frequencies before rounding: larger values are more precise and need more tokens."""
    vocab_size: Annotated[int, Field(ge=4, le=2048)] = 512
    """Size of the vocabulary: the end token, one token per integer, and fitted tokens for runs of integers."""
    max_run: Annotated[int, Field(ge=2, le=256)] = 32
    """Maximum number of integers per token."""
    max_tokens: Count | None = None
    """Maximum number of tokens per chunk, with the end token; others lose high frequencies. Default: no limit."""
    tokenizer: str | None = None
    """File of a fitted tokenizer, written by ``FastTokenizer.save``; default: fit it later, or use single integers."""


class FastTokenizer(nn.Module):
    """Converts chunks ``[batch, chunk_size, action_dim]`` in ``bounds`` to tokens ``[batch, max_tokens]`` and back.

    The fitted vocabulary is stored in buffers, so it is saved and sent to workers with the weights of a policy.
    """

    transform: Tensor
    """Orthonormal DCT-II, ``[chunk_size, chunk_size]``."""
    merges: Tensor
    """The two tokens that each fitted token merges, in the order of merging, int64 ``[n, 2]``."""
    runs: Tensor
    """The integers of each token, int64 ``[vocab_size, max_run]``."""
    lengths: Tensor
    """Number of integers of each token, int64 ``[vocab_size]``: 0 for the end token and unused tokens."""

    def __init__(self, chunk_size: int, action_dim: int, cfg: FastCfg, bounds: tuple[float, float]) -> None:
        super().__init__()
        self.shape, self.cfg, self.bounds = (chunk_size, action_dim), cfg, bounds
        self.size = chunk_size * action_dim
        # For numbers in [-1, 1], a frequency is at most sqrt(chunk_size).
        self.limit = math.ceil(cfg.scale * math.sqrt(chunk_size))
        self.alphabet = 2 * self.limit + 2
        if cfg.vocab_size < self.alphabet:
            problem = f"chunks of {chunk_size} and a scale of {cfg.scale:g} need {self.alphabet} tokens"
            raise ConfigError(
                f"fast.vocab_size: {problem}, got {cfg.vocab_size}; raise it or lower fast.scale", "tokens"
            )
        self.max_tokens = min(cfg.max_tokens or self.size + 1, self.size + 1)
        self.register_buffer("transform", dct_matrix(chunk_size), persistent=False)
        self.register_buffer("merges", torch.full((cfg.vocab_size - self.alphabet, 2), _PAD, dtype=torch.int64))
        self.register_buffer("runs", torch.zeros(cfg.vocab_size, cfg.max_run, dtype=torch.int64))
        self.register_buffer("lengths", torch.zeros(cfg.vocab_size, dtype=torch.int64))
        self._set_merges([])
        if cfg.tokenizer is not None:
            self.load(cfg.tokenizer)

    @property
    def is_fitted(self) -> bool:
        """Whether the vocabulary has tokens for runs of integers."""
        return bool((self.merges >= 0).any())

    def fit(self, chunks: Tensor) -> Self:
        """Fit the vocabulary to chunks ``[n, chunk_size, action_dim]`` by byte-pair encoding; return ``self``.

        The most frequent pair of adjacent tokens becomes a new token, until the vocabulary is full or no pair occurs
        twice.
        """
        codes = self._integers(self._checked(chunks)).cpu()
        sequence = F.pad(codes, (0, 1), value=_PAD).flatten()  # padding separates the chunks
        size, lengths, merges = self.cfg.vocab_size, [1] * self.alphabet, list[tuple[int, int]]()
        while len(merges) < self.merges.shape[0]:
            left, right = sequence[:-1], sequence[1:]
            inside = (left >= 0) & (right >= 0)
            counts = torch.bincount((left * size + right)[inside], minlength=size * size)
            known = torch.tensor(lengths)
            rows = torch.arange(len(lengths))
            allowed = known[:, None] + known[None, :] <= self.cfg.max_run
            table = counts.view(size, size)[: len(rows), : len(rows)] * allowed
            best = int(table.argmax())
            if int(table.flatten()[best]) < 2:
                break
            pair = (best // len(rows), best % len(rows))
            match = _leftmost(((left == pair[0]) & (right == pair[1])).unsqueeze(0)).squeeze(0)
            merges.append(pair)
            lengths.append(lengths[pair[0]] + lengths[pair[1]])
            sequence[:-1][match] = len(lengths) - 1
            sequence = sequence[~F.pad(match, (1, 0))]
        self._set_merges(merges)
        return self

    def encode(self, chunks: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens, int64 ``[batch, max_tokens]``, padded with ``END``, and their number ``[batch]``."""
        tokens = self._integers(self._checked(chunks))
        size, none = self.cfg.vocab_size, self.merges.shape[0]
        order = torch.full((size * size,), none, dtype=torch.int64, device=tokens.device)
        pairs = self.merges[self.merges[:, 0] >= 0]
        order[pairs[:, 0] * size + pairs[:, 1]] = torch.arange(len(pairs), device=tokens.device)
        while tokens.shape[1] > 1:  # in each row, apply the earliest merge
            left, right = tokens[:, :-1], tokens[:, 1:]
            rank = torch.where(right >= 0, order[(left * size + right).clamp(min=0)], none)
            first = rank.amin(1, keepdim=True)
            if bool((first == none).all()):
                break
            match = _leftmost((rank == first) & (first < none))
            tokens = torch.cat([torch.where(match, self.alphabet + first, left), tokens[:, -1:]], dim=1)
            tokens = _compact(tokens.masked_fill(F.pad(match, (1, 0)), _PAD))
            tokens = tokens[:, : max(1, int((tokens >= 0).sum(1).max()))]
        tokens = F.pad(tokens, (0, max(0, self.max_tokens - tokens.shape[1])), value=_PAD)[:, : self.max_tokens - 1]
        count = (tokens >= 0).sum(1) + 1
        return F.pad(tokens, (0, 1), value=_PAD).clamp(min=END), count

    def decode(self, tokens: Tensor) -> Tensor:
        """Return the chunks ``[batch, chunk_size, action_dim]`` of any tokens ``[batch, n]``.

        Missing integers are zeros; surplus ones and everything after ``END`` are ignored.
        """
        alive = (tokens == END).long().cumsum(1) == 0
        count = self.lengths[tokens] * alive
        filled = torch.arange(self.cfg.max_run, device=tokens.device) < count.unsqueeze(-1)
        codes = self.runs[tokens].masked_fill(~filled, _PAD).flatten(1)
        codes = F.pad(_compact(codes), (0, max(0, self.size - codes.shape[1])), value=_PAD)[:, : self.size]
        integers = torch.where(codes >= 0, codes - 1 - self.limit, 0)
        frequencies = integers.view(-1, *self.shape).float() / self.cfg.scale
        low, high = self.bounds
        scaled = torch.einsum("kn,bkd->bnd", self.transform, frequencies).clamp(-1.0, 1.0)
        return low + 0.5 * (scaled + 1.0) * (high - low)

    def allowed(self, done: Tensor, last: Tensor) -> Tensor:
        """Return which tokens may follow ``done`` integers, bool ``[..., vocab_size]``; only ``END`` if ``last``."""
        fits = (self.lengths > 0) & (self.lengths <= (self.size - done).unsqueeze(-1)) & ~last.unsqueeze(-1)
        fits[..., END] = True
        return fits

    def save(self, file: str | Path) -> Path:
        """Write the fitted vocabulary as JSON, for the setting ``fast.tokenizer``."""
        about = {**self._identity(), "merges": self.merges[self.merges[:, 0] >= 0].tolist()}
        with writing(file):
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            Path(file).write_text(json.dumps({"format": FORMAT, "version": 1, **about}), encoding="utf-8")
        return Path(file)

    def load(self, file: str | Path) -> Self:
        """Load the vocabulary that a tokenizer of the same shape and settings has saved."""
        try:
            content = json.loads(Path(file).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{file} cannot be read as a fitted tokenizer: {error}") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise CheckpointError(f"{file} is no tokenizer written by FastTokenizer.save")
        own = self._identity()
        if wrong := [
            f"{key}: expected {own[key]}, got {content.get(key)}" for key in own if content.get(key) != own[key]
        ]:
            raise CheckpointError(f"{file} was fitted for other chunks ({'; '.join(wrong)}); fit it again for these")
        merges = content.get("merges")
        if not isinstance(merges, list) or len(merges) > self.merges.shape[0]:
            raise CheckpointError(f"{file}: merges: expected at most {self.merges.shape[0]} pairs of tokens")
        lengths = [0] + [1] * (self.alphabet - 1)
        for i, pair in enumerate(merges):
            if (
                not isinstance(pair, list)
                or len(pair) != 2
                or not all(type(token) is int and 0 < token < len(lengths) for token in pair)
                or lengths[pair[0]] + lengths[pair[1]] > self.cfg.max_run
            ):
                raise CheckpointError(f"{file}: merges[{i}]: expected two tokens before it, got {pair!r:.60}")
            lengths.append(lengths[pair[0]] + lengths[pair[1]])
        self._set_merges(merges)
        return self

    def _identity(self) -> dict[str, Any]:
        cfg = self.cfg
        settings = {"scale": cfg.scale, "vocab_size": cfg.vocab_size, "max_run": cfg.max_run}
        return {"chunk_size": self.shape[0], "action_dim": self.shape[1], **settings, "range": list(self.bounds)}

    def _set_merges(self, merges: Sequence[Sequence[int]]) -> None:
        runs = [[], *([code] for code in range(1, self.alphabet))]
        for left, right in merges:
            runs.append([*runs[left], *runs[right]])
        for buffer, empty in ((self.merges, _PAD), (self.runs, 0), (self.lengths, 0)):
            buffer.fill_(empty)
        for i, pair in enumerate(merges):
            self.merges[i] = torch.tensor(list(pair))
        for token, run in enumerate(runs):
            self.lengths[token] = len(run)
            self.runs[token, : len(run)] = torch.tensor(run, dtype=torch.int64)

    def _integers(self, chunks: Tensor) -> Tensor:
        """Return tokens of single integers ``[batch, size]``, with padding instead of trailing zeros."""
        low, high = self.bounds
        scaled = ((chunks.float() - low) / (high - low) * 2.0 - 1.0).clamp(-1.0, 1.0)
        frequencies = torch.einsum("kn,bnd->bkd", self.transform, scaled) * self.cfg.scale
        integers = frequencies.round().long().clamp(-self.limit, self.limit).flatten(1)
        follows = (integers != 0).long().flip(1).cumsum(1).flip(1) > 0
        return torch.where(follows, integers + 1 + self.limit, _PAD)

    def _checked(self, chunks: Tensor) -> Tensor:
        if tuple(chunks.shape[1:]) != self.shape or chunks.shape[0] == 0:
            raise RolloutError(f"expected chunks [batch, {self.shape[0]}, {self.shape[1]}], got {list(chunks.shape)}")
        return chunks


def dct_matrix(size: int) -> Tensor:
    """Return the orthonormal DCT-II, ``D[k, n] = sqrt(2 / size) cos(pi (2n + 1) k / (2 size))``, row 0 over sqrt(2)."""
    n = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi / (2 * size) * n[:, None] * (2.0 * n[None, :] + 1.0)) * math.sqrt(2.0 / size)
    matrix[0] /= math.sqrt(2.0)
    return matrix.float()


def _leftmost(match: Tensor) -> Tensor:
    """Return the matches ``[batch, n]`` of pairs without overlaps: in a run of matches, every other one."""
    position = torch.arange(match.shape[1], device=match.device).expand_as(match)
    before = torch.where(match, -1, position).cummax(1).values
    return match & ((position - before) % 2 == 1)


def _compact(tokens: Tensor) -> Tensor:
    """Return ``[batch, n]`` with the padding moved to the end."""
    keep = tokens >= 0
    target = torch.where(keep, keep.long().cumsum(1) - 1, tokens.shape[1])
    return F.pad(torch.full_like(tokens, _PAD), (0, 1), value=_PAD).scatter(1, target, tokens)[:, :-1]
