"""Evaluation of a policy on whole episodes with given seeds, with an optional video."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import Tensor

from embodichain.agents.rl.collector.base import collection_threads
from embodichain.agents.rl.models.policy import Policy
from embodichain.envs.recording import EpisodeRecorder, EpisodeResult, Summary, roll
from embodichain.envs.vec_env import ActionBounds, VecEnv
from embodichain.envs.wrappers import chunked
from embodichain.errors import OutputError
from embodichain.utils.torch_runtime import get_random_state, set_random_state, torch_threads

FILM_SIZE = (240, 320)


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation."""

    summary: Summary
    """Averages over the episodes."""
    episodes: list[EpisodeResult]
    """The episodes, in the order in which they ended."""
    files: list[Path]
    """The video, or a trajectory plot instead."""
    problem: str | None
    """Why there is no video although one was requested."""

    def scalars(self) -> dict[str, float]:
        """Return the numbers to log."""
        values = {"eval/return": self.summary.mean_return, "eval/length": self.summary.mean_length}
        success = {} if self.summary.success_rate is None else {"eval/success": self.summary.success_rate}
        measures = {f"eval/{name}": value for name, value in self.summary.metrics.items()}
        return measures | values | {"eval/return_std": self.summary.std_return} | success

    @property
    def score(self) -> tuple[float, float]:
        """Sort key to compare policies: first the success rate (0 if unknown), then the mean return."""
        return self.summary.success_rate or 0.0, self.summary.mean_return

    def __str__(self) -> str:
        success = "" if self.summary.success_rate is None else f", success {self.summary.success_rate:.0%}"
        return f"return {self.summary.mean_return:.2f}{success} over {self.summary.episodes} episodes"


class PolicyActor:
    """Runs a policy step by step and keeps its recurrent state.

    If it samples actions, exploration noise is kept for ``noise_steps`` steps as in a rollout, at most for an episode.
    """

    def __init__(self, policy: Policy, env: VecEnv, deterministic: bool = True) -> None:
        self.policy, self.env, self.deterministic = policy, env, deterministic
        self.state = policy.initial_state(env.num_envs)
        self._bounds = ActionBounds(env.action_space)
        self.version = int(policy.version)
        self._noise: Tensor | None = None
        self._steps = [0] * env.num_envs  # steps of each env in its current episode

    @torch.no_grad()
    def __call__(self, obs: TensorDict) -> Tensor:
        """Return actions ``[num_envs, ...]`` for the environment, clipped to its action space."""
        if not self.deterministic:
            self._renew_noise()
        self.policy.hold_noise(self._noise)
        try:
            action, _, _, self.state = self.policy.act(obs.to(self.policy.device), self.state, self.deterministic)
        finally:
            self.policy.hold_noise(None)
        return self._bounds.clip(action).to(self.env.device)

    def reset(self, env_ids: list[int]) -> None:
        """Reset the recurrent state and exploration noise of envs whose episode ended."""
        for env_id in env_ids:
            self._steps[env_id] = 0
        initial = self.policy.initial_state(len(env_ids))
        if self.state is not None and initial is not None and env_ids:
            self.state = self.state.index_copy(0, torch.tensor(env_ids, device=self.state.device), initial)

    def _renew_noise(self) -> None:
        """Draw new noise for envs that have used theirs for ``noise_steps`` steps."""
        interval = self.policy.noise_steps
        if interval is None:
            return
        due = torch.tensor([step % interval == 0 if interval else step == 0 for step in self._steps])
        self._steps = [step + 1 for step in self._steps]
        if not due.any() or (new := self.policy.draw_noise(len(due))) is None:
            return
        if self._noise is not None:
            new = torch.where(due.to(new.device).view(-1, *[1] * (new.dim() - 1)), new, self._noise)
        self._noise = new


@torch.no_grad()
def evaluate(
    policy: Policy, env: VecEnv, episodes: int, seed: int, video: Path | None = None, deterministic: bool = True
) -> Evaluation:
    """Run episodes with a policy in evaluation mode; random generators and the policy's mode are restored."""
    env = chunked(env, policy.chunk_size)
    was_training, random_state = policy.training, get_random_state()
    policy.eval()
    torch.manual_seed(seed)
    actor = PolicyActor(policy, env, deterministic)
    recorder, problem = None, None
    if video is not None:
        try:
            recorder = EpisodeRecorder(env, video, episodes=1, size=FILM_SIZE)
        except OutputError as error:  # evaluate anyway, for example if the disk is full
            problem = str(error)
    ended: list[EpisodeResult] = []
    try:
        with torch_threads(collection_threads(policy, env.num_envs)):
            for step in roll(env, actor, episodes, seed):
                ended += step.ended
                actor.reset([episode.env for episode in step.ended])
                if recorder is not None:
                    recorder.watch(step)
        files = recorder.finish() if recorder is not None else []
    finally:
        if recorder is not None:
            recorder.close()
        policy.train(was_training)
        set_random_state(random_state)
    return Evaluation(Summary.of(ended), ended, files, recorder.problem if recorder is not None else problem)
