"""GRU and LSTM at episode boundaries: collecting step by step and training on sequences give the same numbers."""

from __future__ import annotations

import pytest
import torch

from embodichain.agents.rl.algo import PPO, PPOCfg
from embodichain.agents.rl.buffer import Minibatches
from embodichain.agents.rl.collector import SyncCollector
from embodichain.agents.rl.models.mlp import RecurrentCfg, RecurrentLayer
from embodichain.errors import RolloutError
from tests.agents.rl.helpers import ScriptedEnv, make_policy

RECURRENT = {"hidden_size": 6, "num_layers": 2}
each_kind = pytest.mark.parametrize("kind", ["gru", "lstm"])


@each_kind
def test_sequence_equals_steps_with_the_state_cleared_at_starts(kind: str) -> None:
    torch.manual_seed(0)
    layer = RecurrentLayer(3, RecurrentCfg(type=kind, hidden_size=5, num_layers=2))
    x, state = torch.randn(7, 4, 3), torch.randn_like(layer.initial_state(4))
    start = torch.zeros(7, 4, dtype=torch.bool)
    start[0, 3] = start[2, 0] = start[2, 1] = start[3, 0] = start[6, 2] = True
    outputs, h = [], state
    for t in range(7):
        h = torch.where(start[t].view(4, 1, 1), layer.initial_state(4), h)
        out, h = layer.step(x[t], h)
        outputs.append(out)
    assert torch.allclose(layer.sequence(x, state, start), torch.stack(outputs), atol=1e-6)


def test_the_state_of_an_lstm_is_output_and_cell_side_by_side() -> None:
    torch.manual_seed(0)
    layer = RecurrentLayer(3, RecurrentCfg(type="lstm", hidden_size=5))
    cell = torch.nn.LSTMCell(3, 5)
    cell.load_state_dict({name.removesuffix("_l0"): weight for name, weight in layer.lstm.state_dict().items()})
    x, h, c = torch.randn(4, 3), torch.randn(4, 5), torch.randn(4, 5)
    output, state = layer.step(x, torch.cat([h, c], dim=-1).unsqueeze(1))
    wanted = cell(x, (h, c))
    assert torch.allclose(output, wanted[0], atol=1e-6)
    assert torch.allclose(state[:, 0], torch.cat(wanted, dim=-1), atol=1e-6)


@each_kind
def test_nothing_leaks_from_an_earlier_episode(kind: str) -> None:
    torch.manual_seed(0)
    layer = RecurrentLayer(3, RecurrentCfg(type=kind, hidden_size=5))
    x = torch.randn(6, 1, 3, requires_grad=True)
    start = torch.zeros(6, 1, dtype=torch.bool)
    start[4] = True
    layer.sequence(x, torch.randn_like(layer.initial_state(1)), start)[4:].sum().backward()
    assert x.grad[:4].abs().max() == 0.0
    assert x.grad[4:].abs().min() > 0.0


def collect(kind: str = "gru", num_steps: int = 12, **settings):
    torch.manual_seed(0)
    env = ScriptedEnv(4, ends=[3, 5, 100, 4], limit=7)
    policy = make_policy(env, memory={"type": kind, **RECURRENT}, **settings)
    collector = SyncCollector(env, policy)
    return policy, collector, collector.collect(num_steps)


@each_kind
@pytest.mark.parametrize("sequence_length", [12, 4, 1])
def test_training_sees_the_probabilities_and_values_of_collecting(sequence_length: int, kind: str) -> None:
    policy, collector, _ = collect(kind)
    rollout = collector.collect(12)  # the second rollout begins amid episodes
    keys = rollout.select("observation", "action", "hidden", "done", "sample_log_prob", "value")
    minibatches = Minibatches(keys, 12 * 2, sequence_length=sequence_length)
    rows = 0
    for batch in minibatches:
        log_prob, _, value = policy.evaluate(batch)
        assert torch.allclose(log_prob, batch["sample_log_prob"], atol=1e-5)
        assert torch.allclose(value, batch["value"], atol=1e-5)
        rows += batch.numel()
    assert rows == 48


@each_kind
def test_collector_clears_the_state_when_an_episode_ends(kind: str) -> None:
    _, collector, rollout = collect(kind)
    done, hidden = rollout["done"], rollout["hidden"]
    assert hidden.shape == (4, 12, 2, 6 if kind == "gru" else 12)
    assert hidden[:, 0].abs().max() == 0.0
    cleared = hidden[:, 1:].abs().amax((2, 3)) == 0.0
    assert torch.equal(cleared, done[:, :-1])
    assert torch.equal(collector.state.abs().amax((1, 2)) == 0.0, done[:, -1])


@each_kind
def test_time_limits_are_valued_with_the_memory_of_the_episode_that_ended(kind: str) -> None:
    torch.manual_seed(0)
    env = ScriptedEnv(2, limit=3)
    policy = make_policy(env, memory={"type": kind, **RECURRENT})
    finals = []
    collector = SyncCollector(
        env, policy, callback=lambda o, a, r, d, info, n: finals.append(info["final_observation"])
    )
    rollout = collector.collect(3)
    state = policy.initial_state(2)
    with torch.no_grad():
        for t in range(3):
            state = policy.act(rollout["observation"][:, t], state)[3]
        expected = policy.state_value(finals[-1], state)
    assert torch.allclose(rollout["next_value"][:, 2], expected, atol=1e-6)


@each_kind
def test_ppo_trains_on_sequences_and_changes_the_memory(kind: str) -> None:
    policy, _, rollout = collect(kind, critic_obs=["object"], normalize_obs=True)
    weight = getattr(policy.memory, kind).weight_hh_l0
    before = weight.clone()
    metrics = PPO(PPOCfg(batch_size=16, n_epochs=2, sequence_length=4), policy).update(rollout)
    assert not torch.equal(before, weight)
    assert metrics["approx_kl"] < 0.1


def test_a_sequence_length_that_does_not_divide_is_an_error() -> None:
    policy, _, rollout = collect()
    with pytest.raises(RolloutError, match="sequence_length 5 does not divide the 12 steps"):
        PPO(PPOCfg(sequence_length=5), policy).update(rollout)


def test_forward_carries_the_state() -> None:
    policy, _, rollout = collect()
    first = policy(rollout[:, 0].select("observation"), deterministic=True)
    assert first["hidden"].shape == (4, 2, 6)
    second = policy(rollout[:, 1].select("observation").set("hidden", first["hidden"]), deterministic=True)
    fresh = policy(rollout[:, 1].select("observation"), deterministic=True)
    assert not torch.allclose(second["value"], fresh["value"])
