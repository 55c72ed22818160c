"""Everything that the next iteration of a run depends on, taken out of its parts and put back into them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from tensordict import TensorDict, TensorDictBase

from embodichain.agents.rl.algo.base import BaseAlgorithm
from embodichain.agents.rl.collector.config import AsyncCfg
from embodichain.agents.rl.training.config import TrainCfg
from embodichain.agents.rl.utils.checkpoint import load_weights
from embodichain.agents.rl.utils.random_state import get_random_state, seed_everything, set_random_state
from embodichain.agents.rl.utils.spaces import space_to_data
from embodichain.envs.vec_env import VecEnv
from embodichain.errors import CheckpointError

_RECENT = 100
"""Episodes that say how good a policy is at present."""


@dataclass
class Counters:
    """How far a run has come."""

    global_step: int = 0
    """Environment transitions of all envs."""
    iteration: int = 0
    """Rollouts learned from."""
    seconds: float = 0.0
    """Time spent training, evaluations and checkpoints included."""
    best_score: tuple[float, float] | None = None
    """Score of the best evaluation."""
    evaluated_at: int = -1
    """Step of the last evaluation."""
    recent: deque[tuple[int, float, float | None]] = field(default_factory=deque)
    """Of recent rollouts: number of episodes that ended, their mean return, and their success rate if it is known."""

    @property
    def mean_return(self) -> float | None:
        """Mean return of recent episodes."""
        return _weighted([(count, value) for count, value, _ in self.recent])

    @property
    def success_rate(self) -> float | None:
        """Share of recent episodes that ended in success, where the task tells."""
        return _weighted([(count, value) for count, _, value in self.recent if value is not None])

    def note(self, statistics: Mapping[str, float]) -> None:
        """Take in the episodes that ended in a rollout."""
        if "episode/return" not in statistics:
            return
        count = int(statistics["episode/count"])
        self.recent.append((count, statistics["episode/return"], statistics.get("episode/success")))
        while sum(number for number, *_ in self.recent) - self.recent[0][0] >= _RECENT:
            self.recent.popleft()

    def to_data(self) -> dict[str, Any]:
        """Return plain data."""
        return {**vars(self), "recent": list(self.recent)}

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> Counters:
        """Return the counters that ``to_data`` was called on."""
        return Counters(**{**data, "recent": deque(data["recent"])})


class Collector(Protocol):
    """What a run needs of a collector."""

    def collect(self, num_steps: int) -> TensorDictBase:
        """Return a rollout ``[num_envs, num_steps]``."""

    def statistics(self) -> dict[str, float]:
        """Return averages of the last rollout."""

    def reset(self, seed: int | None = None) -> None:
        """Begin with new episodes in all envs."""

    def state_dict(self) -> dict[str, Any]:
        """Return what the next rollout depends on."""

    def env_state(self) -> TensorDict | None:
        """Return the environment's state, ``None`` where it cannot be saved."""

    def load_state_dict(self, state: Mapping[str, Any], env_state: TensorDictBase | None = None) -> None:
        """Go on from what ``state_dict`` and ``env_state`` returned."""

    def publish(self) -> None:
        """Learn that the policy was updated."""

    def hold(self) -> AbstractContextManager[None]:
        """Keep still while the state is saved."""

    def stop(self) -> None:
        """Stop whatever goes on in the background."""


@dataclass(frozen=True)
class Run:
    """The parts of a run that have a state."""

    cfg: TrainCfg
    env: VecEnv
    algorithm: BaseAlgorithm
    collector: Collector

    def state(self, counters: Counters) -> dict[str, Any] | None:
        """Return the content of a checkpoint, on the first rank; see ``utils/checkpoint.py``."""
        env = self.env
        with self.collector.hold():
            own = {
                "collector": self.collector.state_dict(),
                "env": self.collector.env_state(),
                "random": get_random_state(),
            }
            everybody = self.algorithm.ranks.to_first(own)
            if not everybody:
                return None
            return {
                "config": self.cfg.to_dict(),
                "spaces": {
                    "observation": space_to_data(env.observation_space),
                    "action": space_to_data(env.action_space),
                },
                "policy": self.algorithm.policy.state_dict(),
                "algorithm": self.algorithm.state_dict(),
                **everybody[0],
                "other_ranks": everybody[1:],
                "trainer": counters.to_data(),
            }

    def restore(self, state: Mapping[str, Any]) -> Counters:
        """Put a checkpoint's content back and return its counters.

        An environment that cannot be saved begins new episodes, and so do all if the number of ranks is another one.
        The random generators come last, as everything else may draw from them.
        """
        ranks, counters = self.algorithm.ranks, Counters.from_data(state["trainer"])
        if saved_ranks(state) != ranks.count:
            return self._restore_learner(state, counters)
        own = state if ranks.is_first else state["other_ranks"][ranks.rank - 1]
        saved = own["env"]
        if saved is not None and saved.batch_size[0] != self.env.num_envs:
            raise CheckpointError(
                f"the checkpoint holds {saved.batch_size[0]} environments, this run has {self.env.num_envs}: resume it "
                "with as many"
            )
        load_weights(self.algorithm.policy, state["policy"], "the checkpoint")
        self.algorithm.load_state_dict(state["algorithm"])
        self.collector.load_state_dict(own["collector"], saved)
        if saved is None:
            self.collector.reset(seed=self._later_seed(counters))
        set_random_state(own["random"])
        return counters

    def _restore_learner(self, state: Mapping[str, Any], counters: Counters) -> Counters:
        """Put back what all ranks have in common; environments and random generators start anew."""
        load_weights(self.algorithm.policy, state["policy"], "the checkpoint")
        self.algorithm.load_state_dict(state["algorithm"])
        self.collector.reset(seed=self._later_seed(counters))
        seed_everything(self._later_seed(counters))
        return counters

    def _later_seed(self, counters: Counters) -> int:
        """Return a seed for new episodes, which are not those that the run began with."""
        return self.algorithm.ranks.seed(self.cfg.trainer.seed + counters.iteration)


def saved_ranks(state: Mapping[str, Any]) -> int:
    """Return how many ranks a checkpoint was saved by."""
    return 1 + len(state.get("other_ranks", ()))


def resume_note(state: Mapping[str, Any], collector: AsyncCfg, ranks: int) -> str | None:
    """Return what a person has to know about the episodes of a run that goes on; ``None`` if they all do."""
    if saved_ranks(state) != ranks:
        return f"saved by {saved_ranks(state)} rank(s), resumed by {ranks}: all environments begin new episodes"
    if state["env"] is not None:
        return None
    if collector.worker != "ray":
        return "this environment cannot be saved: the run goes on with new episodes"
    if collector.address is None:
        return "a Ray of its own ends with the program: the run goes on with new workers and new episodes"
    return (
        "environments are in the cluster: workers that are still there go on with their episodes, others begin new ones"
    )


def _weighted(counted: list[tuple[int, float]]) -> float | None:
    total = sum(count for count, _ in counted)
    return sum(count * value for count, value in counted) / total if total else None
