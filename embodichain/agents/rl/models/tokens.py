"""Token heads: each number of an action chunk is discretised into bins and decoded autoregressively or in parallel.

``encoding: "fast"`` needs fewer tokens per chunk, as it encodes frequencies instead of numbers: ``fast_tokens.py``.

The tokens are the decision. Their log-probabilities are ``[batch, chunk_size, action_dim]``, so a ratio can be computed
per token, per action or per chunk. Imitation minimises the cross-entropy. Autoregressive tokens can represent
multimodal actions, which a Gaussian would average.
"""

from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from tensordict import TensorDict, TensorDictBase
from torch import Generator, Tensor, nn

from embodichain.agents.rl.models.fast_tokens import END, FastCfg, FastTokenizer
from embodichain.agents.rl.models.mlp import Linear
from embodichain.config.classes import Config, Number, Size, configclass
from embodichain.errors import ConfigError, RolloutError


@configclass
class TokenCfg(Config):
    """Encoding of action chunks as tokens, and the decoder."""

    encoding: Literal["bins", "fast"] = "bins"
    """What tokens encode: the numbers of a chunk (bins), or runs of its rounded frequencies (fast)."""
    num_bins: Annotated[int, Field(ge=2, le=4096)] = 64
    """For bins: number of equal bins of the range."""
    range: tuple[Number, Number] = (-1.0, 1.0)
    """Lower and upper bound of actions; values outside are clipped."""
    decoding: Literal["autoregressive", "parallel"] = "autoregressive"
    """Whether each token depends on the tokens before it, or all are decoded independently in one pass."""
    fast: FastCfg = FastCfg()
    """For fast: settings of the tokenizer."""
    width: Size = 128
    """Width of the decoder."""
    depth: Size = 2
    """Number of layers of the decoder."""
    num_heads: Size = 4
    """Number of attention heads of the decoder."""

    def __post_init__(self) -> None:
        problems = []
        if self.range[0] >= self.range[1]:
            problems.append(f"range: expected [low, high], got {list(self.range)}")
        if self.width % self.num_heads:
            problems.append(f"width: expected a multiple of num_heads, {self.num_heads}, got {self.width}")
        if self.encoding == "fast" and self.decoding == "parallel":
            problems.append("decoding: expected autoregressive for the encoding fast, whose sequences differ in length")
        if problems:
            raise ConfigError(problems, "tokens")


class Block(nn.Module):
    """A transformer block: self-attention and an MLP; with a cache, it processes one position at a time."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.to_qkv, self.out = Linear(width, 3 * width), Linear(width, width)
        self.think = nn.Sequential(Linear(width, 4 * width), nn.GELU(), Linear(4 * width, width))

    def forward(self, x: Tensor, causal: bool, cache: list[Tensor] | None = None) -> Tensor:
        """Return ``[batch, positions, width]``; keys and values of ``x`` are appended to ``cache``."""
        heads = self.to_qkv(self.norms[0](x)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each [batch, heads, positions, width / heads]
        if cache is not None:
            if cache:
                key, value = torch.cat([cache[0], key], dim=2), torch.cat([cache[1], value], dim=2)
            cache[:] = [key, value]
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=causal and cache is None)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.think(self.norms[1](x))


class TokenHead(nn.Module):
    """Decodes the tokens of chunks ``[batch, chunk_size, action_dim]``, given features ``[batch, width]``."""

    centers: Tensor
    """The action at the centre of each bin, ``[num_bins]``."""

    def __init__(self, width: int, chunk_size: int, action_dim: int, cfg: TokenCfg) -> None:
        super().__init__()
        self.cfg, self.shape = cfg, (chunk_size, action_dim)
        self.length, vocabulary = self._make_vocabulary()
        self.given = nn.Linear(width, cfg.width)
        self.embedding = nn.Embedding(vocabulary, cfg.width)
        self.positions = nn.Parameter(torch.randn(self.length, cfg.width) * 0.02)
        self.blocks = nn.ModuleList(Block(cfg.width, cfg.num_heads) for _ in range(cfg.depth))
        self.norm, self.out = nn.LayerNorm(cfg.width), nn.Linear(cfg.width, vocabulary)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.out.weight, std=0.01)
        nn.init.zeros_(self.out.bias)

    def _make_vocabulary(self) -> tuple[int, int]:
        """Create the tokenizer; return the number of tokens per chunk and the size of the vocabulary."""
        low, high = self.cfg.range
        edges = torch.linspace(low, high, self.cfg.num_bins + 1)
        self.register_buffer("centers", 0.5 * (edges[1:] + edges[:-1]), persistent=False)
        return self.shape[0] * self.shape[1], self.cfg.num_bins

    @property
    def causal(self) -> bool:
        """Whether tokens depend on those before them."""
        return self.cfg.decoding == "autoregressive"

    def encode(self, actions: Tensor) -> Tensor:
        """Return the tokens, int64 ``[..., n]``, of actions ``[..., n]``."""
        low, high = self.cfg.range
        share = (actions.float() - low) / (high - low)
        return (share * self.cfg.num_bins).floor().long().clamp(0, self.cfg.num_bins - 1)

    def decode(self, tokens: Tensor) -> Tensor:
        """Return the actions of tokens."""
        return self.centers[tokens]

    def logits(self, features: Tensor, tokens: Tensor) -> Tensor:
        """Return the logits ``[batch, length, vocabulary]`` of each token, given the tokens before it."""
        x = self.given(features).unsqueeze(1) + self.positions.to(features.dtype)
        if self.causal:
            x = x + F.pad(self.embedding(tokens[:, :-1]), (0, 0, 1, 0))  # shifted: the first has no predecessor
        for block in self.blocks:
            x = block(x, self.causal)
        return self.out(self.norm(x)).float()

    def sample(
        self, features: Tensor, deterministic: bool = False, generator: Generator | None = None
    ) -> tuple[Tensor, Tensor, TensorDict]:
        """Return ``(chunk, log_prob [batch, chunk_size, action_dim], decision)``; greedy with ``deterministic``."""
        batch = features.shape[0]
        if not self.causal:
            zeros = torch.zeros(batch, self.length, dtype=torch.int64, device=features.device)
            tokens, log_prob = choose(self.logits(features, zeros), deterministic, generator)
        else:
            tokens, log_prob = self._sample_autoregressively(features, deterministic, generator)
        chunk = self.decode(tokens).view(batch, *self.shape)
        return chunk, log_prob.view(batch, *self.shape), TensorDict({"tokens": tokens}, [batch])

    def _sample_autoregressively(
        self, features: Tensor, deterministic: bool, generator: Generator | None
    ) -> tuple[Tensor, Tensor]:
        """Return tokens and log-probabilities ``[batch, length]``, decoded autoregressively with a key-value cache."""
        given, caches = self.given(features).unsqueeze(1), [list[Tensor]() for _ in self.blocks]
        tokens, log_probs = list[Tensor](), list[Tensor]()
        for position in self.positions:
            x = given + position.to(given.dtype)
            if tokens:
                x = x + self.embedding(tokens[-1]).unsqueeze(1)
            for block, cache in zip(self.blocks, caches, strict=True):
                x = block(x, True, cache)
            token, log_prob = choose(self.out(self.norm(x[:, 0])).float(), deterministic, generator)
            tokens.append(token)
            log_probs.append(log_prob)
        return torch.stack(tokens, dim=1), torch.stack(log_probs, dim=1)

    def evaluate(self, features: Tensor, decision: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Return ``(log_prob, entropy)`` of tokens, each ``[batch, chunk_size, action_dim]``."""
        tokens = self._checked(decision)
        log_probs = self.logits(features, tokens).log_softmax(-1)
        log_prob = log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return log_prob.unflatten(1, self.shape), entropy.unflatten(1, self.shape)

    def _checked(self, decision: TensorDictBase) -> Tensor:
        tokens = decision.get("tokens", None)
        if tokens is None or tokens.shape[1:] != (self.length,):
            got = "none" if tokens is None else list(tokens.shape)
            raise RolloutError(
                f"decision: expected tokens [batch, {self.length}] of this policy, got {got}: rollouts of another "
                "encoding or chunk_size cannot be learned from"
            )
        return tokens

    def imitation_loss(
        self, features: Tensor, actions: Tensor, valid: Tensor | None = None, generator: Generator | None = None
    ) -> Tensor:
        """Return the mean cross-entropy ``[batch]`` per number of ``actions`` ``[batch, n, action_dim]``.

        ``n`` may be less than ``chunk_size``. ``valid`` ``[batch, n]`` masks the actions that count.
        """
        batch, length = actions.shape[:2]
        tokens = torch.zeros(batch, *self.shape, dtype=torch.int64, device=actions.device)
        tokens[:, :length] = self.encode(actions)
        counts = torch.zeros(batch, self.shape[0], device=actions.device)
        counts[:, :length] = 1.0 if valid is None else valid.float()
        log_prob = self.evaluate(features, TensorDict({"tokens": tokens.flatten(1)}, [batch]))[0]
        return -(log_prob.mean(-1) * counts).sum(-1) / counts.sum(-1).clamp(min=1.0)


class FastTokenHead(TokenHead):
    """Decodes sequences of FAST-like tokens, which end with an end token.

    Log-probabilities are ``[batch, 1, length]``, 0 after the end. ``num_factors`` of the decision counts the others.
    """

    tokenizer: FastTokenizer

    def _make_vocabulary(self) -> tuple[int, int]:
        self.tokenizer = FastTokenizer(*self.shape, self.cfg.fast, self.cfg.range)
        return self.tokenizer.max_tokens, self.cfg.fast.vocab_size

    def encode(self, actions: Tensor) -> Tensor:
        """Return the tokens, int64 ``[batch, length]``, of chunks."""
        return self.tokenizer.encode(actions)[0]

    def decode(self, tokens: Tensor) -> Tensor:
        """Return the chunks ``[batch, chunk_size, action_dim]`` of tokens ``[batch, length]``."""
        return self.tokenizer.decode(tokens)

    def sample(
        self, features: Tensor, deterministic: bool = False, generator: Generator | None = None
    ) -> tuple[Tensor, Tensor, TensorDict]:
        """Return ``(chunk, log_prob [batch, 1, length], decision)``; greedy with ``deterministic``."""
        batch, device = features.shape[0], features.device
        given, caches = self.given(features).unsqueeze(1), [list[Tensor]() for _ in self.blocks]
        tokens = torch.full((batch, self.length), END, device=device)
        log_probs = torch.zeros(batch, self.length, device=device)
        done, alive = (
            torch.zeros(batch, dtype=torch.int64, device=device),
            torch.ones_like(features[:, 0], dtype=torch.bool),
        )
        # On a GPU the check would synchronise, and an exported graph cannot stop early.
        may_end = device.type == "cpu" and not torch.compiler.is_exporting()
        for i, position in enumerate(self.positions):
            x = given + position.to(given.dtype)
            if i:
                x = x + self.embedding(tokens[:, i - 1]).unsqueeze(1)
            for block, cache in zip(self.blocks, caches, strict=True):
                x = block(x, True, cache)
            allowed = self.tokenizer.allowed(done, ~alive | (i == self.length - 1))
            logits = self.out(self.norm(x[:, 0])).float().masked_fill(~allowed, -torch.inf)
            tokens[:, i], log_probs[:, i] = choose(logits, deterministic, generator)
            done, alive = done + self.tokenizer.lengths[tokens[:, i]], alive & (tokens[:, i] != END)
            if may_end and not bool(alive.any()):
                break
        return self.decode(tokens), log_probs.unsqueeze(1), self._decision(tokens)

    @staticmethod
    def _decision(tokens: Tensor) -> TensorDict:
        count = (((tokens == END).long().cumsum(1) == 0).sum(1) + 1).clamp(max=tokens.shape[1])
        return TensorDict({"tokens": tokens, "num_factors": count}, [tokens.shape[0]])

    def evaluate(self, features: Tensor, decision: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Return ``(log_prob, entropy)`` of tokens, each ``[batch, 1, length]``, 0 after the end."""
        tokens = self._checked(decision)
        before = F.pad((tokens != END).long().cumprod(1), (1, 0), value=1)[:, :-1]
        done = F.pad((self.tokenizer.lengths[tokens] * before).cumsum(1), (1, 0))[:, :-1]
        last = torch.arange(self.length, device=tokens.device) == self.length - 1
        allowed = self.tokenizer.allowed(done, (before == 0) | last)
        log_probs = self.logits(features, tokens).masked_fill(~allowed, -torch.inf).log_softmax(-1)
        log_prob = log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        certain = log_probs.masked_fill(~allowed, 0.0)
        return log_prob.unsqueeze(1), -(certain.exp() * certain).sum(-1).unsqueeze(1)

    def imitation_loss(
        self, features: Tensor, actions: Tensor, valid: Tensor | None = None, generator: Generator | None = None
    ) -> Tensor:
        """Return the mean cross-entropy ``[batch]`` per token of ``actions`` ``[batch, n, action_dim]``.

        Frequencies need whole chunks: missing or invalid actions repeat the last valid one. The loss of a row without
        valid actions is 0.
        """
        batch, length = actions.shape[:2]
        counts = torch.ones(batch, length, dtype=torch.bool, device=actions.device) if valid is None else valid.bool()
        position = torch.arange(length, device=actions.device).expand(batch, length)
        source = F.pad(torch.where(counts, position, 0).cummax(1).values, (0, self.shape[0] - length))
        source[:, length:] = source[:, length - 1 : length]
        chunks = actions.gather(1, source.unsqueeze(-1).expand(batch, self.shape[0], self.shape[1]))
        tokens, number = self.tokenizer.encode(chunks)
        log_prob = self.evaluate(features, TensorDict({"tokens": tokens}, [batch]))[0].squeeze(1)
        return -(log_prob.sum(1) / number) * counts.any(1)


def make_token_head(width: int, chunk_size: int, action_dim: int, cfg: TokenCfg) -> TokenHead:
    """Return the head for an encoding of actions."""
    return {"bins": TokenHead, "fast": FastTokenHead}[cfg.encoding](width, chunk_size, action_dim, cfg)


def fit_tokenizer(policy: nn.Module, actions: Tensor) -> bool:
    """Fit the FAST-like tokenizers in a policy or model on chunks ``[n, chunk_size, action_dim]`` of demonstrations.

    Call it before the first gradient step, as it changes the meaning of tokens. Returns whether there is a tokenizer.
    """
    heads = [module for module in policy.modules() if isinstance(module, FastTokenHead)]
    for head in heads:
        head.tokenizer.fit(actions)
    return bool(heads)


def choose(logits: Tensor, deterministic: bool, generator: Generator | None) -> tuple[Tensor, Tensor]:
    """Sample a token (greedy with ``deterministic``); return it and its log-probability, each ``[...]``."""
    log_probs = logits.log_softmax(-1)
    scores = log_probs
    if not deterministic:  # Gumbel-max: argmax of log p - log(-log u) is a sample of p
        drawn = torch.rand(logits.shape, device=logits.device, generator=generator)
        scores = log_probs - (-drawn.clamp(1e-38, 1.0 - 1e-7).log()).log()
    token = scores.argmax(-1)
    return token, log_probs.gather(-1, token.unsqueeze(-1)).squeeze(-1)
