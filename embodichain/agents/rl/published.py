"""Policies in the workers of a data stream, and the publication of new weights to them.

Weights are published as for collectors (``collector/weights.py``): a versioned snapshot in a slot of shared memory,
which workers lease between two environment steps. In a Ray cluster, it is sent through the object store.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from embodichain.agents.processes.channel import PublishedWeights
from embodichain.agents.rl.checkpoint import load_policy
from embodichain.agents.rl.collector.config import AsyncCfg
from embodichain.agents.rl.collector.weights import InferenceCopy, WeightSnapshot, WeightStore, move, without_weights
from embodichain.agents.rl.evaluation import PolicyActor
from embodichain.agents.rl.models.policy import Policy
from embodichain.envs.vec_env import ActionBounds, VecEnv
from embodichain.errors import ConfigError, WeightsError


class PolicyPublisher:
    """The learner's side: publishes versioned weights of a policy to workers."""

    def __init__(self, policy: Policy, on_ray: bool = False) -> None:
        if not isinstance(policy, Policy):
            raise WeightsError(f"expected a Policy to be published, got {type(policy).__name__}")
        self.policy = policy
        self._store = WeightStore(policy, AsyncCfg(worker="ray" if on_ray else "process"))
        self.description = _describe(policy)
        """The pickled policy without its weights, uint8 ``[nbytes]``."""

    def publish(self, after: int = -1) -> PublishedWeights:
        """Return a copy of the current weights; its version is ``policy.version``, but at least ``after + 1``."""
        snapshot = self._store.keep(max(int(self.policy.version), after + 1))
        return PublishedWeights(snapshot.version, self.description, snapshot.data, snapshot.segment)


def _describe(policy: Policy) -> Tensor:
    copy = without_weights(policy).eval().requires_grad_(False)
    copy.generator = None
    try:
        data = pickle.dumps(copy)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise WeightsError(f"{type(policy).__name__} cannot be sent to simulation workers: {error}") from error
    if b"__main__" in data:
        raise WeightsError(
            f"{type(policy).__name__} cannot be sent to simulation workers, as something of it is defined in the main "
            "module: move its class into a module that can be imported"
        )
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class StreamPolicy:
    """Runs a policy step by step, for any chunk size: the actor ``policy`` of the data engine.

    An env gets its next chunk after the last action of the previous one, or at the start of an episode.
    """

    def __init__(
        self, env: VecEnv, *, path: str | None, deterministic: bool, seed: int, trusted_modules: Sequence[str] = ()
    ) -> None:
        self._env, self._deterministic, self._seed = env, deterministic, seed
        self._bounds = ActionBounds(env.action_space)
        self._policy: Policy | None = None
        self._copy: InferenceCopy | None = None
        self._description = torch.empty(0, dtype=torch.uint8)
        self.version = -1
        """Version (number of updates) of the policy; -1 if there is none."""
        if path is not None:
            torch.manual_seed(seed)  # policies sample from torch's default generator
            policy = load_policy(path, env, device=env.device, trusted_modules=trusted_modules)
            self._use(policy, f"path: {path}")
            self.version = int(policy.version)

    def _use(self, policy: Policy, where: str) -> None:
        if policy.chunk_size > 1 and policy.is_recurrent:
            raise ConfigError(f"{where}: a recurrent policy that decides on chunks cannot act here", "action_config")
        self._policy, self.chunk_size = policy, policy.chunk_size
        self._steps = PolicyActor(policy, self._env, self._deterministic)
        self._chunks: Tensor | None = None
        self._taken = torch.full((self._env.num_envs,), self.chunk_size)
        """Number of actions that each env has taken of its chunk."""

    chunk_size: int = 1

    @property
    def is_ready(self) -> bool:
        """Whether there is a policy."""
        return self._policy is not None

    def __call__(self, observation: TensorDict) -> Tensor:
        return self.act(observation, torch.ones(self._env.num_envs, dtype=torch.bool))

    @torch.no_grad()
    def act(self, observation: TensorDict, rows: Tensor) -> Tensor:
        """Return actions ``[num_envs, ...]``; only those of the mask ``rows`` ``[num_envs]`` are valid."""
        policy = self._policy
        if policy is None:
            raise WeightsError("there is no policy yet: give its checkpoint, or call engine.publish(policy)")
        if self.chunk_size == 1:  # all rows, as the recurrent state depends on every observation
            return self._checked(self._steps(observation))
        due = torch.nonzero(rows & (self._taken == self.chunk_size)).reshape(-1)
        if due.numel():
            there = due.to(self._env.device)
            chunk = policy.act(observation[there].to(policy.device), None, self._deterministic)[0].to(self._env.device)
            if self._chunks is None:
                self._chunks = chunk.new_zeros(self._env.num_envs, *chunk.shape[1:])
            self._chunks[there] = chunk
            self._taken[due] = 0
        if self._chunks is None:
            raise WeightsError("no env has ever asked the policy to act")
        at = self._taken.clamp(max=self.chunk_size - 1).to(self._env.device)
        action = self._chunks[torch.arange(len(at), device=at.device), at]
        self._taken += rows & (self._taken < self.chunk_size)
        return self._checked(self._bounds.clip(action))

    def _checked(self, action: Tensor) -> Tensor:
        expected = [self._env.num_envs, *(self._env.action_space.shape or ())]
        if list(action.shape) != expected:
            name = type(self._policy).__name__
            raise WeightsError(f"{name} gives actions {list(action.shape)}, the environment takes {expected}")
        return action

    def reset(self, env_ids: list[int]) -> None:
        """Discard the chunks and recurrent states of envs whose episode ended."""
        if self._policy is not None:
            self._steps.reset(env_ids)
            self._taken[env_ids] = self.chunk_size

    def adopt(self, weights: PublishedWeights) -> None:
        """Load published weights if they are newer."""
        copy = self._copy
        if copy is None or not torch.equal(self._description, weights.description):
            policy = pickle.loads(weights.description.numpy().tobytes())  # noqa: S301 - sent by this program
            copy = InferenceCopy(move(policy, torch.device(self._env.device)))
        elif weights.version <= self.version:
            return
        self.version, _ = copy.adopt(WeightSnapshot(weights.version, None, weights.data, weights.segment))
        if copy is not self._copy:
            self._copy, self._description = copy, weights.description
            copy.policy.generator = torch.Generator(copy.policy.device).manual_seed(self._seed)
            self._use(copy.policy.eval(), "publish")
