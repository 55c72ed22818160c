"""Whole iterations of PPO by TorchRL; the other libraries are in ``rl_end_to_end_peers.py``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.rl_work import Call, Work, is_discrete, sizes, tanh_network, vector_env


def torchrl(work: Work) -> Call:
    """TorchRL's collector, advantage module, loss module and replay buffer, as its PPO examples put them together."""
    from tensordict.nn import TensorDictModule
    from torch.distributions import Categorical, Independent, Normal
    from torchrl.collectors import Collector
    from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
    from torchrl.envs import DoubleToFloat, TransformedEnv
    from torchrl.envs.libs.gym import GymWrapper
    from torchrl.modules import ProbabilisticActor, ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

    given = vector_env(work)
    inputs, outputs = sizes(given)
    discrete = is_discrete(given)
    env: Any = GymWrapper(given, device="cpu", **({"categorical_action_encoding": True} if discrete else {}))
    if not discrete:  # observations of MuJoCo are float64
        env = TransformedEnv(env, DoubleToFloat(in_keys=["observation"]))

    class Gaussian(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.log_std = tanh_network(inputs, outputs, work.width, 0.01), nn.Parameter(torch.zeros(outputs))

        def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
            mean = self.net(obs)
            return mean, self.log_std.exp().expand_as(mean)

    keys = ["logits"] if discrete else ["loc", "scale"]
    actor = ProbabilisticActor(
        TensorDictModule(
            tanh_network(inputs, outputs, work.width, 0.01) if discrete else Gaussian(), ["observation"], keys
        ),
        in_keys=keys,
        distribution_class=Categorical if discrete else lambda loc, scale: Independent(Normal(loc, scale), 1),
        return_log_prob=True,
    )
    critic = ValueOperator(tanh_network(inputs, 1, work.width, 1.0), in_keys=["observation"])
    rollouts = iter(Collector(env, actor, frames_per_batch=work.transitions, total_frames=-1))
    loss = ClipPPOLoss(
        actor,
        critic,
        clip_epsilon=work.clip,
        entropy_bonus=False,
        critic_coeff=work.value_weight,
        loss_critic_type="l2",
        normalize_advantage=True,
    )
    advantages = GAE(gamma=work.gamma, lmbda=work.gae_lambda, value_network=critic, average_gae=False)
    parameters = list(loss.parameters())
    adam = torch.optim.Adam(parameters, lr=work.learning_rate, eps=1e-5)
    storage, sampler = LazyTensorStorage(work.transitions), SamplerWithoutReplacement()
    buffer = ReplayBuffer(storage=storage, sampler=sampler, batch_size=work.batch_size)

    def call() -> None:
        rollout = next(rollouts)
        with torch.no_grad():
            advantages(rollout)
        buffer.empty()
        buffer.extend(rollout.reshape(-1))
        for _ in range(work.epochs):
            for batch in buffer:
                losses = loss(batch)
                adam.zero_grad()
                (losses["loss_objective"] + losses["loss_critic"]).backward()
                nn.utils.clip_grad_norm_(parameters, work.max_grad_norm)
                adam.step()

    return call
