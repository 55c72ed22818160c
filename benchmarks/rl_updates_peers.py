"""One PPO update by other libraries, on the same numbers as ``rl_updates.py``.

Every function returns a call that does the work once. The libraries come with the ``peers`` extra.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from benchmarks.rl_updates import ACTION_SPACE, ACTIONS, ENVS, EPOCHS, MINIBATCHES, OBS, OBS_SPACE, ROWS, STEPS, WIDTH
from benchmarks.rl_work import Call, tanh_network


def stable_baselines3(rows: dict[str, Tensor]) -> Call:
    """Stable-Baselines3's ``PPO.train`` on a filled buffer."""
    from stable_baselines3 import PPO as SB3PPO
    from stable_baselines3.common.logger import configure
    from stable_baselines3.common.vec_env import VecEnv

    class Stub(VecEnv):
        def __init__(self) -> None:
            super().__init__(ENVS, OBS_SPACE, ACTION_SPACE)

        def reset(self) -> np.ndarray:
            return np.zeros((ENVS, OBS), np.float32)

        def step_async(self, actions: np.ndarray) -> None: ...
        def step_wait(self) -> Any: ...
        def close(self) -> None: ...
        def get_attr(self, attr_name: str, indices: Any = None) -> list[None]:
            return [None] * ENVS

        def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None: ...
        def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> Any: ...
        def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
            return [False] * ENVS

    threads = torch.get_num_threads()
    networks = {"net_arch": {"pi": [WIDTH, WIDTH], "vf": [WIDTH, WIDTH]}}
    model = SB3PPO(
        "MlpPolicy",
        Stub(),
        n_steps=STEPS,
        batch_size=ROWS // MINIBATCHES,
        n_epochs=EPOCHS,
        device="cpu",
        policy_kwargs=networks,
    )
    torch.set_num_threads(threads)
    model.set_logger(configure(None, []))
    model._current_progress_remaining = 1.0
    names = {"observations": "observation", "actions": "action", "values": "value", "log_probs": "sample_log_prob"}
    names |= {"advantages": "advantage", "returns": "return"}

    def call() -> None:
        buffer = model.rollout_buffer
        buffer.reset()
        for theirs, key in names.items():
            setattr(buffer, theirs, rows[key].numpy())
        buffer.pos, buffer.full = STEPS, True
        model.train()

    return call


def rsl_rl(rows: dict[str, Tensor]) -> Call:
    """rsl_rl's ``PPO.update`` on a filled storage, with a fixed step size."""
    from rsl_rl.algorithms import PPO as RslPPO  # noqa: N811 - not ours
    from rsl_rl.models import MLPModel
    from rsl_rl.storage import RolloutStorage

    example = TensorDict({"policy": rows["observation"][0]}, batch_size=[ENVS])
    groups = {"actor": ["policy"], "critic": ["policy"]}
    gaussian = {"class_name": "GaussianDistribution"}
    actor = MLPModel(example, groups, "actor", ACTIONS, [WIDTH, WIDTH], "tanh", distribution_cfg=gaussian)
    critic = MLPModel(example, groups, "critic", 1, [WIDTH, WIDTH], "tanh")
    storage = RolloutStorage("rl", ENVS, STEPS, example, [ACTIONS])
    algorithm = RslPPO(
        actor,
        critic,
        storage,
        EPOCHS,
        MINIBATCHES,
        entropy_coef=0.0,
        value_loss_coef=0.5,
        learning_rate=3e-4,
        max_grad_norm=0.5,
        use_clipped_value_loss=False,
        schedule="fixed",
    )
    storage.observations["policy"].copy_(rows["observation"])
    storage.actions.copy_(rows["action"])
    for theirs, key in (
        ("values", "value"),
        ("returns", "return"),
        ("advantages", "advantage"),
        ("actions_log_prob", "sample_log_prob"),
    ):
        getattr(storage, theirs).copy_(rows[key].unsqueeze(-1))
    storage.distribution_params = (torch.zeros(STEPS, ENVS, ACTIONS), torch.ones(STEPS, ENVS, ACTIONS))
    return algorithm.update


def skrl(rows: dict[str, Tensor]) -> Call:
    """skrl's ``PPO.update`` on a filled memory, advantages included."""
    logging.getLogger("skrl").setLevel(logging.ERROR)
    from skrl.agents.torch.ppo import PPO as SkrlPPO  # noqa: N811 - not ours
    from skrl.agents.torch.ppo import PPO_CFG
    from skrl.memories.torch import RandomMemory
    from skrl.models.torch import DeterministicMixin, GaussianMixin, Model
    from skrl.trainers.torch.sequential import SequentialTrainerCfg

    spaces = {"observation_space": OBS_SPACE, "state_space": None, "action_space": ACTION_SPACE, "device": "cpu"}

    class Actor(GaussianMixin, Model):
        def __init__(self) -> None:
            Model.__init__(self, **spaces)
            GaussianMixin.__init__(self)
            self.net, self.log_std = tanh_network(OBS, ACTIONS, WIDTH, 0.01), nn.Parameter(torch.zeros(ACTIONS))

        def compute(self, inputs: Any, role: str = "") -> Any:
            return self.net(inputs["observations"]), {"log_std": self.log_std}

    class Critic(DeterministicMixin, Model):
        def __init__(self) -> None:
            Model.__init__(self, **spaces)
            DeterministicMixin.__init__(self)
            self.net = tanh_network(OBS, 1, WIDTH, 1.0)

        def compute(self, inputs: Any, role: str = "") -> Any:
            return self.net(inputs["observations"]), {}

    cfg = PPO_CFG(
        rollouts=STEPS, learning_epochs=EPOCHS, mini_batches=MINIBATCHES, value_clip=0.0, value_loss_scale=0.5
    )
    cfg.experiment.write_interval = cfg.experiment.checkpoint_interval = 0
    memory = RandomMemory(memory_size=STEPS, num_envs=ENVS, device="cpu")
    agent = SkrlPPO(models={"policy": Actor(), "value": Critic()}, memory=memory, cfg=cfg, **spaces)
    threads = torch.get_num_threads()
    agent.init(trainer_cfg=SequentialTrainerCfg(timesteps=STEPS))
    torch.set_num_threads(threads)
    never = torch.zeros(ENVS, 1, dtype=torch.bool)
    for t in range(STEPS):
        columns = {"rewards": "reward", "log_prob": "sample_log_prob", "values": "value"}
        agent.memory.add_samples(
            observations=rows["observation"][t],
            states=None,
            actions=rows["action"][t],
            terminated=never,
            truncated=never,
            **{theirs: rows[key][t, :, None] for theirs, key in columns.items()},
        )
    agent._current_next_observations, agent._current_next_states = rows["observation"][0], None
    agent.enable_training_mode(True)
    return lambda: agent.update(timestep=0, timesteps=1)


def torchrl(rows: dict[str, Tensor]) -> Call:
    """TorchRL's ``ClipPPOLoss`` on a replay buffer without replacement."""
    from tensordict.nn import TensorDictModule
    from torch.distributions import Independent, Normal
    from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
    from torchrl.modules import ProbabilisticActor, ValueOperator
    from torchrl.objectives import ClipPPOLoss

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.log_std = tanh_network(OBS, ACTIONS, WIDTH, 0.01), nn.Parameter(torch.zeros(ACTIONS))

        def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
            mean = self.net(obs)
            return mean, self.log_std.exp().expand_as(mean)

    actor = ProbabilisticActor(
        TensorDictModule(Head(), ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=lambda loc, scale: Independent(Normal(loc, scale), 1),
        return_log_prob=True,
    )
    critic = ValueOperator(tanh_network(OBS, 1, WIDTH, 1.0), in_keys=["observation"])
    loss_module = ClipPPOLoss(
        actor,
        critic,
        clip_epsilon=0.2,
        entropy_bonus=False,
        critic_coeff=0.5,
        loss_critic_type="l2",
        normalize_advantage=True,
    )
    parameters = list(loss_module.parameters())
    adam = torch.optim.Adam(parameters, lr=3e-4, eps=1e-5)
    names = {"observation": "observation", "action": "action", "action_log_prob": "sample_log_prob"}
    given = TensorDict({theirs: rows[key].flatten(0, 1) for theirs, key in names.items()}, batch_size=[ROWS])
    given["advantage"], given["value_target"] = (rows[key].reshape(-1, 1) for key in ("advantage", "return"))
    sampler = SamplerWithoutReplacement()
    buffer = ReplayBuffer(storage=LazyTensorStorage(ROWS), sampler=sampler, batch_size=ROWS // MINIBATCHES)

    def call() -> None:
        buffer.empty()
        buffer.extend(given)
        for _ in range(EPOCHS):
            for batch in buffer:
                losses = loss_module(batch)
                adam.zero_grad()
                (losses["loss_objective"] + losses["loss_critic"]).backward()
                nn.utils.clip_grad_norm_(parameters, 0.5)
                adam.step()

    return call
