"""What ``gpu.py`` measures against: rsl_rl's PPO through its public interface, and MuJoCo Warp by itself."""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

import torch
from tensordict import TensorDict

from embodichain.agents.rl.utils.tensordicts import flatten_dict_observation
from embodichain.envs.physics.mujoco_warp import MujocoWarpPhysics
from embodichain.envs.task_env import TaskEnv

_GROUPS = {"actor": ["policy"], "critic": ["policy"]}
_GAUSSIAN = {"class_name": "rsl_rl.modules.distribution:GaussianDistribution"}


class RslRl:
    """rsl_rl's PPO with an MLP of 256, 256, collecting and learning as its own runner does."""

    def __init__(self, num_envs: int, num_steps: int, obs_dim: int, action_dim: int) -> None:
        for name in ("git", "tensorboard"):  # it imports both to log, which nothing here does
            if name not in sys.modules and importlib.util.find_spec(name) is None:
                sys.modules[name] = types.ModuleType(name)
        from rsl_rl.algorithms import PPO
        from rsl_rl.models import MLPModel
        from rsl_rl.storage import RolloutStorage

        self.num_envs, self.num_steps, self.action_dim = num_envs, num_steps, action_dim
        obs = self.wrap(torch.randn(num_envs, obs_dim, device="cuda"))
        sizes = {"hidden_dims": [256, 256]}
        actor = MLPModel(obs, _GROUPS, "actor", action_dim, **sizes, distribution_cfg=dict(_GAUSSIAN)).to("cuda")
        critic = MLPModel(obs, _GROUPS, "critic", 1, **sizes).to("cuda")
        storage = RolloutStorage("rl", num_envs, num_steps, obs, [action_dim], "cuda")
        self.ppo: Any = PPO(
            actor,
            critic,
            storage,
            num_learning_epochs=5,
            num_mini_batches=4,
            schedule="fixed",
            learning_rate=3e-4,
            use_clipped_value_loss=False,
            device="cuda",
        )
        self.obs = obs

    def wrap(self, flat: torch.Tensor) -> TensorDict:
        """Return a flat observation as rsl_rl takes it."""
        return TensorDict({"policy": flat}, batch_size=[flat.shape[0]], device="cuda")

    @torch.inference_mode()
    def fill(self) -> None:
        """Fill the storage without an environment."""
        no = torch.zeros(self.num_envs, dtype=torch.bool, device="cuda")
        for _ in range(self.num_steps):
            self.ppo.act(self.obs)
            self.ppo.process_env_step(self.obs, torch.randn(self.num_envs, device="cuda"), no, {})
        self.ppo.compute_returns(self.obs)

    @torch.inference_mode()
    def collect(self, env: TaskEnv) -> None:
        """Act in an environment for one rollout."""
        for _ in range(self.num_steps):
            action = self.ppo.act(self.obs)
            obs, reward, terminated, truncated, _ = env.step(action.clamp(-1.0, 1.0))
            self.obs = self.wrap(flatten_dict_observation(obs))
            self.ppo.process_env_step(self.obs, reward, terminated | truncated, {"time_outs": truncated})
        self.ppo.compute_returns(self.obs)

    def update(self) -> None:
        """Learn from what was collected."""
        self.ppo.update()


class BareWarp:
    """The same model and the same motor commands, and nothing but MuJoCo Warp's own step in a CUDA graph."""

    def __init__(self, env: TaskEnv, commands: list[torch.Tensor], state: torch.Tensor) -> None:
        import mujoco_warp
        import warp

        self._warp, self._commands = warp, commands
        self._physics = MujocoWarpPhysics(env.physics.model, env.num_envs, outputs=tuple(env.physics.outputs))
        self._physics.set_state(torch.arange(env.num_envs, device="cuda"), state)
        model, data = self._physics._model, self._physics._data
        self._state = state
        substeps = env.task.substeps
        mujoco_warp.step(model, data)
        self.rewind()
        torch.cuda.synchronize()
        with warp.ScopedDevice("cuda:0"), warp.ScopedCapture() as capture:
            for _ in range(substeps):
                mujoco_warp.step(model, data)
        self._graph = capture.graph
        self._stream = warp.stream_from_torch(torch.cuda.current_stream())

    def rewind(self) -> None:
        """Go back to where the commands were recorded."""
        self._physics.set_state(torch.arange(self._physics.num_envs, device="cuda"), self._state)

    def run(self) -> None:
        """Simulate all commands."""
        for command in self._commands:
            self._physics.ctrl.copy_(command)
            self._warp.capture_launch(self._graph, stream=self._stream)
