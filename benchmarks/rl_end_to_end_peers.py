"""Whole iterations of PPO by other libraries, each through its own training loop or the calls that it consists of.

Every function returns a call that does one iteration. The libraries come with the ``peers`` extra.
"""

from __future__ import annotations

import contextlib
import io
import logging
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from benchmarks.rl_end_to_end_torchrl import torchrl
from benchmarks.rl_work import Call, Work, is_discrete, sizes, tanh_network, vector_env

__all__ = ["rsl_rl", "skrl", "stable_baselines3", "torchrl"]


def stable_baselines3(work: Work) -> Call:
    """Stable-Baselines3's ``learn``, in its own vector environment."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import DummyVecEnv

    model = PPO(
        "MlpPolicy",
        DummyVecEnv([lambda: gym.make(work.env)] * work.num_envs),
        learning_rate=work.learning_rate,
        n_steps=work.num_steps,
        batch_size=work.batch_size,
        n_epochs=work.epochs,
        gamma=work.gamma,
        gae_lambda=work.gae_lambda,
        clip_range=work.clip,
        vf_coef=work.value_weight,
        max_grad_norm=work.max_grad_norm,
        seed=0,
        device="cpu",
        policy_kwargs={"net_arch": {"pi": [work.width] * 2, "vf": [work.width] * 2}},
    )
    return lambda: model.learn(work.transitions, reset_num_timesteps=False, log_interval=None)  # type: ignore[arg-type]


def skrl(work: Work) -> Call:
    """skrl's agent in the loop of its sequential trainer, which itself would reset the environments every time."""
    logging.getLogger("skrl").setLevel(logging.ERROR)
    from skrl.agents.torch.ppo import PPO, PPO_CFG
    from skrl.envs.wrappers.torch import wrap_env
    from skrl.memories.torch import RandomMemory
    from skrl.models.torch import CategoricalMixin, DeterministicMixin, GaussianMixin, Model
    from skrl.trainers.torch.sequential import SequentialTrainerCfg

    env = wrap_env(vector_env(work), wrapper="gymnasium")
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space, "state_space": None}
    discrete = isinstance(env.action_space, gym.spaces.Discrete)
    head: Any = CategoricalMixin if discrete else GaussianMixin

    class Actor(head, Model):
        def __init__(self) -> None:
            Model.__init__(self, **spaces, device="cpu")
            head.__init__(self)
            self.net = tanh_network(self.num_observations, self.num_actions, work.width, 0.01)
            self.log_std = None if discrete else nn.Parameter(torch.zeros(self.num_actions))

        def compute(self, inputs: Any, role: str = "") -> Any:
            return self.net(inputs["observations"]), {} if discrete else {"log_std": self.log_std}

    class Critic(DeterministicMixin, Model):
        def __init__(self) -> None:
            Model.__init__(self, **spaces, device="cpu")
            DeterministicMixin.__init__(self)
            self.net = tanh_network(self.num_observations, 1, work.width, 1.0)

        def compute(self, inputs: Any, role: str = "") -> Any:
            return self.net(inputs["observations"]), {}

    cfg = PPO_CFG(
        rollouts=work.num_steps,
        learning_epochs=work.epochs,
        mini_batches=work.minibatches,
        discount_factor=work.gamma,
        gae_lambda=work.gae_lambda,
        learning_rate=work.learning_rate,
        ratio_clip=work.clip,
        value_clip=0.0,
        value_loss_scale=work.value_weight,
        grad_norm_clip=work.max_grad_norm,
    )
    cfg.experiment.write_interval = cfg.experiment.checkpoint_interval = 0
    memory = RandomMemory(memory_size=work.num_steps, num_envs=work.num_envs, device="cpu")
    agent = PPO(models={"policy": Actor(), "value": Critic()}, memory=memory, cfg=cfg, device="cpu", **spaces)
    agent.init(trainer_cfg=SequentialTrainerCfg(timesteps=work.num_steps))
    agent.enable_training_mode(True)
    now = {"observations": env.reset()[0], "states": env.state()}

    def call() -> None:
        for t in range(work.num_steps):
            when = {"timestep": t, "timesteps": work.num_steps}
            agent.pre_interaction(**when)
            with torch.no_grad():
                actions, _ = agent.act(now["observations"], now["states"], **when)
                observations, rewards, terminated, truncated, infos = env.step(actions)
                states = env.state()
                agent.record_transition(
                    **now,
                    actions=actions,
                    rewards=rewards,
                    next_observations=observations,
                    next_states=states,
                    terminated=terminated,
                    truncated=truncated,
                    infos=infos,
                    **when,
                )
            agent.post_interaction(**when)
            now.update(observations=observations, states=states)

    return call


def rsl_rl(work: Work) -> Call:
    """rsl_rl's runner, with a fixed step size and, for choices, a categorical head, which it does not have."""
    from rsl_rl.env import VecEnv
    from rsl_rl.modules.distribution import Distribution
    from rsl_rl.runners import OnPolicyRunner

    env = vector_env(work)
    discrete = is_discrete(env)

    class Categorical(Distribution):
        def __init__(self, output_dim: int, choices: int) -> None:
            super().__init__(output_dim)
            self.input_dim_, self.log_probs = choices, torch.zeros(0)

        def update(self, out: Tensor) -> None:
            self.log_probs = out.log_softmax(-1)

        def sample(self) -> Tensor:
            return torch.multinomial(self.log_probs.exp(), 1).float()

        def log_prob(self, action: Tensor) -> Tensor:
            return self.log_probs.gather(-1, action.long()).squeeze(-1)

        def init_mlp_weights(self, network: Any) -> None:
            nn.init.orthogonal_(network[-1].weight, 0.01)

        input_dim = property(lambda self: self.input_dim_)
        mean = property(lambda self: self.log_probs.argmax(-1, keepdim=True).float())
        entropy = property(lambda self: -(self.log_probs.exp() * self.log_probs).sum(-1))
        std = property(lambda self: self.entropy.unsqueeze(-1))
        params = property(lambda self: (self.log_probs,))

    class Env(VecEnv):
        def __init__(self) -> None:
            self.num_envs, self.device, self.cfg, self.max_episode_length = work.num_envs, "cpu", {}, 1000
            self.num_actions = 1 if discrete else sizes(env)[1]
            self.episode_length_buf = torch.zeros(work.num_envs, dtype=torch.long)
            self.obs = self.pack(env.reset(seed=0)[0])

        def pack(self, obs: np.ndarray) -> TensorDict:
            return TensorDict({"policy": torch.from_numpy(np.array(obs, np.float32))}, batch_size=[work.num_envs])

        def get_observations(self) -> TensorDict:
            return self.obs

        def step(self, actions: Tensor) -> Any:
            chosen = actions.squeeze(-1).long() if discrete else actions
            obs, reward, terminated, truncated, _ = env.step(chosen.numpy())
            self.obs = self.pack(obs)
            extras = {"time_outs": torch.from_numpy(truncated).float()}
            return self.obs, torch.from_numpy(reward).float(), torch.from_numpy(terminated | truncated), extras

    gaussian = {"class_name": "GaussianDistribution", "init_std": 1.0, "std_type": "log"}
    chosen = {"class_name": Categorical, "choices": sizes(env)[1]} if discrete else gaussian
    network = {"class_name": "MLPModel", "hidden_dims": [work.width] * 2, "activation": "tanh"}
    algorithm = {
        "class_name": "PPO",
        "num_learning_epochs": work.epochs,
        "num_mini_batches": work.minibatches,
        "clip_param": work.clip,
        "gamma": work.gamma,
        "lam": work.gae_lambda,
        "value_loss_coef": work.value_weight,
        "entropy_coef": 0.0,
        "learning_rate": work.learning_rate,
        "max_grad_norm": work.max_grad_norm,
        "use_clipped_value_loss": False,
        "schedule": "fixed",
        "desired_kl": None,
        "rnd_cfg": None,
        "symmetry_cfg": None,
    }
    cfg = {"num_steps_per_env": work.num_steps, "save_interval": 10**9, "algorithm": algorithm}
    cfg |= {"obs_groups": {"actor": ["policy"], "critic": ["policy"]}, "critic": network}
    cfg |= {"actor": network | {"distribution_cfg": chosen}}
    with contextlib.redirect_stdout(io.StringIO()):
        runner = OnPolicyRunner(Env(), cfg, log_dir=None, device="cpu")

    def call() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            runner.learn(1)

    return call
