"""FAST-like tokens: frequencies against scipy, round trips, byte pairs against a plain oracle, sequences that end."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import pairwise

import pytest
import torch
from tensordict import TensorDict

from embodichain.agents.rl.algo import GRPO, PPO, GRPOCfg, PPOCfg
from embodichain.agents.rl.collector import SyncCollector
from embodichain.agents.rl.models import build_policy
from embodichain.agents.rl.models.fast_tokens import END, FastCfg, FastTokenizer, dct_matrix
from embodichain.agents.rl.models.tokens import FastTokenHead, TokenCfg, fit_tokenizer, make_token_head
from embodichain.agents.rl.models.vla import load_vla_model, save_vla_model
from embodichain.agents.rl.utils.ratios import count_ratios, decision_entropy, log_ratio, per_decision
from embodichain.envs.registration import make
from embodichain.envs.wrappers import chunked
from embodichain.errors import CheckpointError, ConfigError, RolloutError

pytestmark = pytest.mark.usefixtures("one_thread")

CHUNK, DIM, WIDTH = 6, 2, 3
SMALL = {"encoding": "fast", "width": 16, "depth": 2, "num_heads": 2, "fast": {"scale": 1.0, "vocab_size": 10}}


def smooth_chunks(count: int, chunk: int = CHUNK, dim: int = DIM, seed: int = 0) -> torch.Tensor:
    """Chunks like those of a robot: a slow wave of a few kinds, and a little noise."""
    generator = torch.Generator().manual_seed(seed)
    time = torch.linspace(0.0, 1.0, chunk).view(1, -1, 1)
    phase = torch.randint(0, 4, (count, 1, dim), generator=generator) * 0.7
    noise = 0.02 * torch.randn(count, chunk, dim, generator=generator)
    return (0.8 * torch.sin(3.0 * time + phase) + noise).clamp(-1.0, 1.0)


def make_tokenizer(chunk: int = CHUNK, dim: int = DIM, bounds=(-1.0, 1.0), **settings) -> FastTokenizer:
    return FastTokenizer(chunk, dim, FastCfg(**settings), bounds)


def make_head(**settings) -> FastTokenHead:
    torch.manual_seed(0)
    head = make_token_head(WIDTH, 3, 1, TokenCfg(**{**SMALL, **settings}))
    assert isinstance(head, FastTokenHead)
    for weight in (head.out.weight, head.embedding.weight):
        torch.nn.init.normal_(weight)
    return head


def bpe_oracle(rows: list[list[int]], alphabet: int, room: int, max_run: int):
    """Byte pairs as in a textbook: plain lists, one pair after the other; ties go to the least pair."""
    lengths, merges = dict.fromkeys(range(alphabet), 1), []
    while len(merges) < room:
        counts = Counter(pair for row in rows for pair in pairwise(row))
        counts = {p: n for p, n in counts.items() if lengths[p[0]] + lengths[p[1]] <= max_run and n >= 2}
        if not counts:
            break
        pair = min(counts, key=lambda p: (-counts[p], p))
        merges.append(pair)
        lengths[token := alphabet + len(merges) - 1] = lengths[pair[0]] + lengths[pair[1]]
        rows = [joined(row, pair, token) for row in rows]
    return merges, rows


def joined(row: list[int], pair: tuple[int, int], token: int) -> list[int]:
    out, i = [], 0
    while i < len(row):
        hit = tuple(row[i : i + 2]) == pair
        out.append(token if hit else row[i])
        i += 2 if hit else 1
    return out


def test_frequencies_are_those_of_the_cosine_transform():
    for size in (1, 2, 7, 50):
        signal, matrix = torch.randn(size, 3, dtype=torch.float64), dct_matrix(size).double()
        written_out = torch.zeros(size, 3, dtype=torch.float64)
        for k in range(size):
            for n in range(size):
                factor = math.sqrt((1.0 if k == 0 else 2.0) / size)
                written_out[k] += factor * math.cos(math.pi * (2 * n + 1) * k / (2 * size)) * signal[n]
        torch.testing.assert_close(matrix @ signal, written_out, rtol=0.0, atol=1e-5)
        torch.testing.assert_close(matrix.T @ matrix @ signal, signal, rtol=0.0, atol=1e-5)


@pytest.mark.extra("peers")
def test_frequencies_are_those_of_scipy():
    fft = pytest.importorskip("scipy.fft")
    for size in (1, 4, 50):
        signal = torch.randn(size, 3)
        expected = torch.from_numpy(fft.dct(signal.numpy(), axis=0, norm="ortho"))
        torch.testing.assert_close(dct_matrix(size) @ signal, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bounds", [(-1.0, 1.0), (0.0, 6.0)])
@pytest.mark.parametrize("scale", [4.0, 20.0])
def test_what_is_encoded_comes_back_within_half_a_step(bounds, scale):
    """Rounding moves no frequency by more than 1 / (2 scale); the transform keeps the norm of the error."""
    tokenizer = make_tokenizer(bounds=bounds, scale=scale)
    generator = torch.Generator().manual_seed(1)
    chunks = torch.cat([torch.rand(200, CHUNK, DIM, generator=generator) * 2 - 1, smooth_chunks(200)])
    chunks[0], chunks[1] = 1.0, -1.0
    chunks = bounds[0] + 0.5 * (chunks + 1.0) * (bounds[1] - bounds[0])
    for fitted in (False, True):
        if fitted:
            tokenizer.fit(chunks[200:])
        tokens, count = tokenizer.encode(chunks)
        assert tokens.shape == (400, tokenizer.max_tokens)
        assert torch.equal((tokens != END).sum(1) + 1, count.clamp(max=tokenizer.max_tokens))
        error = tokenizer.decode(tokens) - chunks
        half = 0.5 * (bounds[1] - bounds[0])
        assert float(error.square().mean(1).sqrt().max()) <= half * 0.5 / scale + 1e-5
        assert float(error.abs().max()) <= half * 0.5 / scale * math.sqrt(CHUNK) + 1e-5
    outside = chunks.new_full((1, CHUNK, DIM), 99.0)
    torch.testing.assert_close(tokenizer.decode(tokenizer.encode(outside)[0]), outside.clamp(*bounds), atol=0.4, rtol=0)


def test_byte_pairs_are_those_of_a_plain_oracle():
    chunks, held_out = smooth_chunks(60), smooth_chunks(40, seed=5)
    held_out[:5] = torch.rand(5, CHUNK, DIM) * 2 - 1
    tokenizer = make_tokenizer(scale=4.0, vocab_size=70, max_run=5).fit(chunks)
    plain = make_tokenizer(scale=4.0, vocab_size=70, max_run=5)
    rows = [[t for t in row if t != END] for row in plain.encode(chunks)[0].tolist()]
    merges, expected = bpe_oracle(rows, tokenizer.alphabet, 70 - tokenizer.alphabet, 5)
    assert len(merges) > 20
    assert tokenizer.merges[: len(merges)].tolist() == [list(pair) for pair in merges]
    encoded = [[t for t in row if t != END] for row in tokenizer.encode(chunks)[0].tolist()]
    assert encoded == expected
    assert sum(map(len, encoded)) < 0.6 * sum(map(len, rows))  # the purpose of it
    others = [[t for t in row if t != END] for row in plain.encode(held_out)[0].tolist()]
    for token, pair in enumerate(merges, tokenizer.alphabet):
        others = [joined(row, pair, token) for row in others]
    assert [[t for t in row if t != END] for row in tokenizer.encode(held_out)[0].tolist()] == others
    torch.testing.assert_close(tokenizer.decode(tokenizer.encode(held_out)[0]), plain.decode(plain.encode(held_out)[0]))


def test_every_sequence_has_a_meaning():
    tokenizer = make_tokenizer(scale=4.0, vocab_size=60).fit(smooth_chunks(50))
    plain = make_tokenizer(scale=4.0, vocab_size=60)
    one = plain.encode(smooth_chunks(1))[0]
    assert torch.equal(plain.decode(torch.full((1, 3), END)), torch.zeros(1, CHUNK, DIM))  # nothing: no frequency
    junk = one.clone()
    junk[:, 3], junk[:, 4:] = END, 7  # nothing counts after the end
    cut = one.clone()
    cut[:, 3:] = END
    torch.testing.assert_close(plain.decode(junk), plain.decode(cut))
    too_many = torch.cat([plain.encode(torch.rand(1, CHUNK, DIM))[0][:, :-1]] * 2, dim=1)
    torch.testing.assert_close(plain.decode(too_many), plain.decode(too_many[:, : CHUNK * DIM]))
    anything = torch.randint(0, 60, (500, 20), generator=torch.Generator().manual_seed(0))
    decoded = tokenizer.decode(anything)
    assert bool(decoded.isfinite().all())
    assert float(decoded.abs().max()) <= 1.0
    short = make_tokenizer(max_tokens=4)
    tokens, count = short.encode(torch.rand(9, CHUNK, DIM))
    assert tokens.shape == (9, 4)
    assert tokens[:, -1].eq(END).all()
    assert count.eq(4).all()


def all_sequences(head: FastTokenHead) -> torch.Tensor:
    """Every sequence that the head can choose, found by trying."""
    found, open_rows = [], [([], 0)]
    lengths, size = head.tokenizer.lengths.tolist(), head.tokenizer.size
    while open_rows:
        row, done = open_rows.pop()
        found.append(row + [END] * (head.length - len(row)))
        if len(row) < head.length - 1:
            fits = [t for t, n in enumerate(lengths) if 0 < n <= size - done]
            open_rows += [([*row, t], done + lengths[t]) for t in fits]
    return torch.tensor(found)


def test_probabilities_of_all_sequences_add_up_to_one():
    head = make_head(fast={"scale": 1.0, "vocab_size": 10, "max_run": 2})
    head.tokenizer.fit(torch.tensor([[0.9, 0.9, 0.9], [0.9, -0.9, 0.9]]).unsqueeze(-1).repeat(3, 1, 1))
    assert head.tokenizer.is_fitted
    sequences = all_sequences(head)
    features = torch.randn(1, WIDTH).expand(len(sequences), WIDTH)
    log_prob, entropy = head.evaluate(features, TensorDict({"tokens": sequences}, [len(sequences)]))
    assert log_prob.shape == entropy.shape == (len(sequences), 1, head.length)
    chance = log_prob.detach().double().sum((1, 2)).exp()
    assert float(chance.sum()) == pytest.approx(1.0, abs=1e-5)
    after = (sequences == END).long().cumsum(1) > 1
    assert log_prob[:, 0][after].eq(0.0).all()
    assert entropy[:, 0][after].eq(0.0).all()
    # Entropy of the whole: by definition, and by the sum of what each token adds on the way to it
    expected = -(chance * chance.log()).sum()
    assert float((chance * entropy.double().sum((1, 2))).sum()) == pytest.approx(float(expected), rel=1e-4)


def test_the_cache_gives_the_probabilities_of_the_whole_sequence():
    head, features = make_head(), torch.randn(256, WIDTH)
    chunk, log_prob, decision = head.sample(features, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(head.evaluate(features, decision)[0], log_prob, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(head.decode(decision["tokens"]), chunk)
    assert len(decision["num_factors"].unique()) > 1  # sequences differ in length
    assert bool(((head.tokenizer.lengths[decision["tokens"]]).sum(1) <= head.tokenizer.size).all())
    first = head.sample(features, deterministic=True)
    assert torch.equal(first[0], head.sample(features, deterministic=True)[0])
    likeliest = head.evaluate(features, first[2])[0][:, 0, 0]
    assert bool((likeliest >= log_prob[:, 0, 0] - 1e-5).all())


def test_tokens_after_the_end_are_no_part_of_a_mean():
    decision = TensorDict({"num_factors": torch.tensor([1, 3])}, [2])
    batch = TensorDict({"decision": decision, "num_actions": torch.tensor([1, 1])}, [2])
    new, old = torch.tensor([[[1.0, 0.0, 0.0]], [[1.0, 2.0, 3.0]]]), torch.zeros(2, 1, 3)
    ratio = log_ratio(new, old, batch, "token")
    assert per_decision(ratio, batch).tolist() == [1.0, 2.0]
    assert log_ratio(new, old, batch, "chunk").tolist() == [1.0, 6.0]
    assert log_ratio(new, old, batch, "action").tolist() == [[1.0], [6.0]]
    assert count_ratios(new, batch, "token").tolist() == [1, 3]
    assert decision_entropy(new, batch, "token").tolist() == [1.0, 2.0]


def test_imitation_is_cross_entropy_per_token_up_to_the_end():
    head, features = make_head(), torch.randn(5, WIDTH)
    actions = torch.rand(5, 3, 1) * 2 - 1
    tokens, count = head.tokenizer.encode(actions)
    log_prob = head.evaluate(features, TensorDict({"tokens": tokens}, [5]))[0].squeeze(1)
    by_hand = torch.stack([-log_prob[i, : count[i]].mean() for i in range(5)])
    torch.testing.assert_close(head.imitation_loss(features, actions), by_hand)
    held = actions.clone()
    held[:, 2] = held[:, 1]  # what does not count repeats the last that does
    valid = torch.tensor([[True, True, False]] * 5)
    expected = head.imitation_loss(features, held)
    torch.testing.assert_close(head.imitation_loss(features, actions, valid), expected)
    torch.testing.assert_close(head.imitation_loss(features, actions[:, :2]), expected)
    valid[0] = False
    assert float(head.imitation_loss(features, actions, valid)[0]) == 0.0


def test_two_ways_are_both_learned_and_never_mixed():
    torch.manual_seed(0)
    block = {"name": "tokens", "chunk_size": 4, "tokens": {**SMALL, "fast": {"scale": 5.0, "vocab_size": 64}}}
    space = make("CartPoleRL", num_envs=1).action_space
    policy = build_policy(block, 2, space, "cpu")
    ramp = torch.linspace(0.2, 0.9, 4).view(1, 4, 1)
    assert fit_tokenizer(policy, torch.cat([ramp, -ramp] * 4))
    adam = torch.optim.Adam(policy.head.parameters(), 1e-2)
    for _ in range(80):
        actions = ramp * (torch.randint(0, 2, (64, 1, 1)) * 2.0 - 1.0)
        loss = policy.imitation_loss(torch.randn(64, 2), actions).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
    with torch.no_grad():
        chosen = policy.get_action(torch.randn(500, 2))[0]
    error = torch.minimum((chosen - ramp).abs().amax((1, 2)), (chosen + ramp).abs().amax((1, 2)))
    assert float((error < 0.2).float().mean()) > 0.95
    assert 0.3 < float((chosen[:, 0, 0] > 0).float().mean()) < 0.7


@pytest.mark.parametrize(("name", "level"), [("ppo", "token"), ("ppo", "chunk"), ("grpo", "token")])
def test_it_is_learned_with(name, level):
    torch.manual_seed(0)
    env = make("CartPoleRL", num_envs=4, seed=0, num_threads=1, max_episode_steps=12)
    tokens = {**SMALL, "fast": {"scale": 3.0, "vocab_size": 32}}
    policy = build_policy(
        {"name": "tokens", "chunk_size": 3, "tokens": tokens}, env.observation_space, env.action_space, "cpu"
    )
    fit_tokenizer(policy, smooth_chunks(50, 3, 1))
    common = {"batch_size": 10**6, "n_epochs": 1, "learning_rate": 1e-3, "log_prob_per": level}
    algorithm = PPO(PPOCfg(**common, ent_coef=0.01), policy)
    if name == "grpo":
        algorithm = GRPO(GRPOCfg(**common, group_size=2, kl_coef=0.01), policy)
    collector = SyncCollector(chunked(env, 3), policy, start_rollout=algorithm.start_rollout)
    before = policy.head.out.weight.clone()
    first = algorithm.update(collector.collect(8))
    assert first["approx_kl"] == pytest.approx(0.0, abs=1e-9)
    assert first["clip_fraction"] == 0.0
    assert not torch.equal(policy.head.out.weight, before)
    assert math.isfinite(algorithm.update(collector.collect(8))["policy_loss"])


def test_what_was_fitted_is_kept_with_the_weights_and_in_a_file(tmp_path):
    tokenizer = make_tokenizer().fit(smooth_chunks(50))
    again = make_tokenizer()
    again.load_state_dict(tokenizer.state_dict())
    file = tokenizer.save(tmp_path / "fitted" / "tokens.json")
    from_file = make_tokenizer(tokenizer=str(file))
    chunks = smooth_chunks(20, seed=3)
    for other in (again, from_file):
        assert other.is_fitted
        assert torch.equal(other.encode(chunks)[0], tokenizer.encode(chunks)[0])
        torch.testing.assert_close(other.decode(other.encode(chunks)[0]), tokenizer.decode(tokenizer.encode(chunks)[0]))


def test_a_saved_model_needs_no_file_of_its_tokenizer(tmp_path):
    file = make_tokenizer().fit(smooth_chunks(50)).save(tmp_path / "tokens.json")
    fast = {"encoding": "fast", "fast": {"tokenizer": str(file)}, "width": 8, "depth": 1, "num_heads": 2}
    shapes = {"cameras": {"front": (16, 16, 3)}, "proprio": {}, "instruction_length": 8, "action_dim": 2}
    settings = {**shapes, "chunk_size": 6, "head": "tokens", "tokens": fast}
    model = load_vla_model(None, "tiny_vla", settings)
    save_vla_model(model, tmp_path / "model")
    file.unlink()
    again = load_vla_model(tmp_path / "model").state_dict()
    assert all(torch.equal(again[name], value) for name, value in model.state_dict().items())
    assert model.action_head.tokenizer.is_fitted


def test_what_does_not_fit_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"fast.vocab_size: chunks of 6 and a scale of 10 need 52 tokens, got 20"):
        make_tokenizer(vocab_size=20)
    with pytest.raises(ConfigError, match="decoding: expected autoregressive for the encoding fast"):
        TokenCfg(encoding="fast", decoding="parallel")
    with pytest.raises(ConfigError, match=r"encoding[\s\S]*fast"):
        TokenCfg.from_dict({"encoding": "fats"})
    with pytest.raises(RolloutError, match=r"expected chunks \[batch, 6, 2\], got \[3, 5, 2\]"):
        make_tokenizer().fit(torch.zeros(3, 5, 2))
    with pytest.raises(RolloutError, match=r"expected tokens \[batch, 4\].*got \[2, 9\].*another encoding"):
        make_head().evaluate(torch.zeros(2, WIDTH), TensorDict({"tokens": torch.zeros(2, 9).long()}, [2]))
    file = make_tokenizer(scale=5.0).save(tmp_path / "tokens.json")
    with pytest.raises(CheckpointError, match=r"other chunks \(scale: expected 10.0, got 5.0\); fit it again"):
        make_tokenizer(tokenizer=str(file))
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "merges": [[1, 10**6]]}))
    with pytest.raises(CheckpointError, match=r"merges\[0\]: expected two tokens before it"):
        make_tokenizer(scale=5.0, tokenizer=str(file))
    file.write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read as a fitted tokenizer"):
        make_tokenizer(tokenizer=str(file))
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no tokenizer written by FastTokenizer\.save"):
        make_tokenizer(tokenizer=str(tmp_path / "other.json"))
