"""Collects rollouts synchronously, in the calling thread."""

from collections.abc import Callable, Mapping

import gymnasium as gym
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from embodichain.agents.rl.buffer.rollout_buffer import RolloutBuffer
from embodichain.agents.rl.collector.acting import Decider, DeferredValues
from embodichain.agents.rl.collector.base import (
    BaseCollector,
    DiscountedReturns,
    EnvErrors,
    EpisodeTracker,
    InfoAverages,
    PolicyStep,
    Recovery,
    StepCallback,
    collection_threads,
    result_to,
    summarize,
)
from embodichain.agents.rl.collector.pipeline import Pipeline
from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.utils.tensordicts import Observation, sorted_leaves, zeros_in
from embodichain.envs.vec_env import ActionBounds, StepResult, VecEnv
from embodichain.errors import ActionError, CheckpointError, NotFiniteError, RolloutError
from embodichain.utils.torch_runtime import torch_threads

RolloutStart = Callable[[VecEnv], Observation | None]
"""Called before each rollout; returns the first observation if it reset the environment, else ``None``."""


class SyncCollector(BaseCollector):
    """Collects complete rollouts: ``SyncCollector(env, policy, device, callback).collect(num_steps=2048)``.

    A rollout is valid until the next ``collect``. The environment is reset once, before the first rollout.
    ``DeferredValues`` decides when values are computed. With envs on a GPU, ``collect`` never synchronises with it.
    """

    def __init__(
        self,
        env: VecEnv,
        policy: Policy,
        device: torch.device | str | None = None,
        callback: StepCallback | None = None,
        *,
        buffer: RolloutBuffer | None = None,
        start_rollout: RolloutStart | None = None,
        num_threads: int | None = None,
        pipeline_stages: int = 1,
        return_discount: float | None = None,
    ) -> None:
        """Create a collector.

        ``device`` is where rollouts are stored (default: the policy's). ``start_rollout`` may reset the environment
        before each rollout. ``num_threads`` is torch's thread count while collecting (default: one for small policies).
        ``pipeline_stages=2`` needs a ``GroupedEnv`` of two groups (``pipeline.py``). ``return_discount`` adds
        ``discounted_return`` to rollouts, which reward normalisation needs.
        """
        self.env = env
        self._bounds = ActionBounds(env.action_space)
        self.device = torch.device(device) if device is not None else policy.device
        self.callback = callback
        self.buffer = buffer
        self.start_rollout = start_rollout
        self.num_threads = num_threads if num_threads is not None else collection_threads(policy, env.num_envs)
        self.obs: Observation | None = None
        """The current observation, ``None`` before the first reset."""
        self.state: Tensor | None = None
        """The recurrent state before that observation."""
        self.tracker = EpisodeTracker(env.num_envs, self.device)
        self.recovery: Recovery | None = None
        """Replaces an environment that raises; if ``None``, the error propagates."""
        self.env_errors = EnvErrors()
        self._discount = return_discount
        self._returns: DiscountedReturns | None = None
        self.before_step: Callable[[], None] | None = None
        """Called before each step; it may change the policy's weights, or raise to stop the collection."""
        self._pipeline = None if pipeline_stages == 1 else Pipeline(env, self.device, pipeline_stages)
        self._averages = InfoAverages()
        self._starts_episodes = False
        self.policy = policy

    @property
    def policy(self) -> Policy:
        """The policy that acts; it may be replaced between two rollouts."""
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._policy = policy
        self._decider = Decider(policy, self.device)
        self._values = DeferredValues(
            policy, self.device, self._decider.value, can_read_flags=self.env.device.type != "cuda"
        )

    def reset(self, seed: int | None = None) -> None:
        """Reset all envs."""
        if seed is not None:
            self.seed_recovery(seed)
        with self.env_errors:
            obs = self.env.reset(seed=seed)[0]
        self.begin(obs)

    def seed_recovery(self, seed: int) -> None:
        """Set the seed for environments that replace failed ones; ``reset`` with a seed does so, too."""
        if self.recovery is not None:
            self.recovery.seed = seed

    def begin(self, obs: Observation) -> None:
        """Start new episodes in all envs from ``obs``, their first observation."""
        self.obs = obs.to(self.device)
        self.state = self.policy.initial_state(self.env.num_envs)
        self.tracker.reset()
        self._returns = self._new_returns()

    def collect(self, num_steps: int) -> TensorDictBase:
        """Return a rollout ``[num_envs, num_steps]``, valid until the next call.

        After an error, the next call resets all envs. With ``recovery``, a failed environment is replaced and the
        rollout restarts with new episodes.
        """
        if num_steps < 1:
            raise RolloutError(f"num_steps must be at least 1, got {num_steps}")
        while True:
            try:
                return self._collect(num_steps)
            except Exception as error:
                if not self._recover(error):
                    raise

    def _recover(self, error: Exception) -> bool:
        """Replace the environment if it raised this error; return whether it did."""
        if self.recovery is None or not self.env_errors.include(error):
            return False
        self.env, obs = self.recovery.replace(self.env, error)
        if self._pipeline is not None:
            self._pipeline = Pipeline(self.env, self.device, len(self._pipeline.env.groups))
        self.begin(obs)
        return True

    @torch.no_grad()
    def _collect(self, num_steps: int) -> TensorDictBase:
        with torch_threads(self.num_threads), self.policy.without_dropout(), self._decider.exploring():
            obs, self.obs = self._begin_rollout(), None
            if self.buffer is None or self.buffer.num_steps != num_steps:
                self.buffer = RolloutBuffer(num_steps, self.env.num_envs, device=self.device)
            buffer = self.buffer
            if self._pipeline is not None:
                obs = self._pipeline.run(self, obs, buffer)
            else:
                for _ in range(num_steps):
                    version = self.next_version()
                    decision = self.decide(obs, self.state)
                    try:
                        result = self._env_step(decision.action)
                    except ActionError as error:
                        _blame_observation(obs, error)
                        raise
                    obs = self.record(decision, result, version, buffer)
            self.obs = obs
            self._values.finish(buffer, obs, self.state)
            storage = buffer.full_storage("collect()")
            parts = storage["reward"], storage["done"], storage.get("num_actions", None)
            self.tracker.update(*parts, self._starts_episodes)
            if self._returns is not None:
                returns = self._returns.update(*parts, storage.get("chunk_reward", None))
                buffer.set_extras({"discounted_return": returns})
            return buffer.get()

    @property
    def episodes(self) -> TensorDict:
        """``return`` and ``length`` of the episodes that ended in the last rollout, in order; see ``statistics``."""
        return self.tracker.ended

    def statistics(self) -> dict[str, float]:
        """Return averages over the last rollout: reward terms, metrics, and returns and lengths of episodes.

        ``rewards/x`` and ``metrics/x`` are means over all steps. ``episode/x`` is the mean over finished episodes of a
        metric at their last step. If no episode finished, ``episode/count`` is the only ``episode/...``. If
        ``start_rollout`` resets the environment, only the first episode of each env counts, up to its end or the end of
        the rollout.
        """
        return summarize(self._averages, self.episodes)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the collector's state, without policy, environment and random state."""
        if self.obs is None:
            return {}
        state = {"episode_return": self.tracker.episode_return, "episode_length": self.tracker.episode_length}
        if self._returns is not None:
            state["discounted_return"] = self._returns.value
        if self.state is not None:
            state["hidden"] = self.state
        return state | dict(TensorDict({"observation": self.obs}, [self.env.num_envs]).flatten_keys("/").items())

    def env_state(self) -> TensorDict | None:
        """Return the environment's state, ``None`` if it cannot be saved."""
        if not self.env.supports_state:
            return None
        try:
            with self.env_errors:
                return self.env.get_state()
        except Exception as error:
            if not self._recover(error):
                raise
            return self.env.get_state()

    def load_state_dict(self, state: Mapping[str, Tensor], env_state: TensorDictBase | None = None) -> None:
        """Restore ``state_dict`` (and ``env_state``); the environment is not reset."""
        if env_state is not None:
            self.env.set_state(env_state.to(self.env.device))
        if not state:
            self.obs = None
            return
        per_env = [name for name in ("episode_return", "episode_length", "discounted_return") if name in state]
        wrong = [name for name in per_env if state[name].shape != (self.env.num_envs,)]
        if wrong:
            raise CheckpointError(f"{wrong[0]}: expected [{self.env.num_envs}], got {list(state[wrong[0]].shape)}")
        self.tracker.episode_return = state["episode_return"].to(self.device, copy=True)
        self.tracker.episode_length = state["episode_length"].to(self.device, copy=True)
        self._returns = self._new_returns()
        if self._returns is not None and "discounted_return" in state:
            self._returns.value = state["discounted_return"].to(self.device, copy=True)
        self.state = state["hidden"].to(self.device, copy=True) if "hidden" in state else None
        obs = {name: leaf.to(self.device, copy=True) for name, leaf in state.items() if name.startswith("observation")}
        self.obs = TensorDict(obs, [self.env.num_envs], device=self.device).unflatten_keys("/")["observation"]

    def _new_returns(self) -> DiscountedReturns | None:
        return None if self._discount is None else DiscountedReturns(self._discount, self.env.num_envs, self.device)

    def next_version(self) -> Tensor:
        """Call ``before_step``; return the policy's version ``[]`` for the next step of all envs."""
        self._decider.renew_noise(self.env.num_envs)
        if self.before_step is None:
            version = self.policy.version
            return version if version.device == self.device else version.to(self.device)
        self.before_step()
        return self.policy.version.to(self.device, copy=True)  # the original may change before the step is recorded

    def _begin_rollout(self) -> Observation:
        with self.env_errors:
            fresh = None if self.start_rollout is None else self.start_rollout(self.env)
        if fresh is not None:
            self.begin(fresh)
        elif self.obs is None:
            self.reset()
        self._starts_episodes = fresh is not None
        self._averages = InfoAverages(self._starts_episodes)
        self._values.begin()
        self._decider.refresh()
        if self.buffer is not None and len(self.buffer):  # the last rollout, or one that an error interrupted
            self.buffer.clear()
        if self.obs is None:
            raise RolloutError("the environment gave no observation")
        return self.obs

    def decide(self, obs: Observation, state: Tensor | None, rows: slice = slice(None)) -> PolicyStep:
        """Return the policy's actions for the envs ``rows``."""
        kept = self.callback is not None or self._pipeline is not None
        self.policy.hold_rows(rows.start or 0, self.env.num_envs)
        return self._decider.decide(obs, state, self._values.deferred, kept, rows)

    def record_policy(self) -> None:
        """On a GPU, capture the policy's CUDA graphs now, before another thread uses the device, too."""
        if not self._decider.records:
            return
        rows = self.env.num_envs // (1 if self._pipeline is None else len(self._pipeline.env.groups))
        obs = None if self.obs is None else self.obs[:rows]
        if obs is None and isinstance(self.env.observation_space, gym.spaces.Dict):
            obs = zeros_in(self.env.observation_space, rows, self.device)
        self.policy.hold_rows(0, self.env.num_envs)
        with torch.no_grad(), torch_threads(self.num_threads), self.policy.without_dropout():
            self._decider.record(obs)

    def record(self, decision: PolicyStep, result: StepResult, version: Tensor, buffer: RolloutBuffer) -> Observation:
        """Write a step of all envs to the buffer; return the next observation."""
        next_obs, reward, terminated, truncated, info = result
        done = terminated | truncated
        if info["final_observation"] is not next_obs or not self._values.can_read_flags:  # otherwise no episode ended
            self._values.keep(truncated & ~terminated, info["final_observation"], decision.new_state)
        parts = {"terminated": terminated, "truncated": truncated, "policy_version": version}
        parts |= {name: part.to(self.device) for name, part in info.get("chunk", {}).items()}
        if decision.state is not None:
            parts["hidden"] = decision.state
        if decision.decision is not None:
            parts["decision"] = decision.decision
        obs, action = decision.obs, decision.action
        buffer.add(obs, action, reward, done, decision.value, decision.log_prob, **parts)
        self._averages.add(info, done if self.env.device == self.device else done.to(self.env.device))
        if self.callback is not None:
            self.callback(obs, action, reward, done, info, next_obs)
        self.state = self.clear_ended(decision.new_state, done)
        return next_obs

    def _env_step(self, action: Tensor) -> StepResult:
        """Step the environment with clipped actions; the result is on the collector's device, except ``info``."""
        bounded = self._bounds.clip(action)  # rollouts store the unclipped action, to which log_prob belongs
        with self.env_errors:
            result = self.env.step(bounded.to(self.env.device))
        return result if self.env.device == self.device else result_to(result, self.device)

    def clear_ended(self, state: Tensor | None, done: Tensor) -> Tensor | None:
        """Return a recurrent state with the rows of ended episodes reset."""
        initial = self.policy.initial_state(1)
        if state is None or initial is None:
            return state
        return torch.where(done.view(-1, *[1] * (state.ndim - 1)), initial, state)


def _blame_observation(obs: Observation, error: ActionError) -> None:
    """Raise ``NotFiniteError`` if the observation behind an invalid action is not finite."""
    for path, leaf in [((), obs)] if isinstance(obs, Tensor) else sorted_leaves(obs):
        if leaf.is_floating_point() and not bool(leaf.isfinite().all()):
            env = int((~leaf.isfinite()).flatten(1).any(1).nonzero()[0])
            raise NotFiniteError(
                f"the environment returned an observation {'/'.join(path)!r} of env {env} that is not finite, so the "
                f"action is not either: {leaf[env].flatten()[:8].tolist()}"
            ) from error
