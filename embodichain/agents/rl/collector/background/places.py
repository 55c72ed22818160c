"""Where an asynchronous collector collects: in this process or in another. It is prepared here and started there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from embodichain.agents.rl.collector.background.child import Job
from embodichain.agents.rl.collector.background.process_worker import ProcessWorker
from embodichain.agents.rl.collector.background.station import Setup, Station
from embodichain.agents.rl.collector.background.thread_worker import ThreadWorker
from embodichain.agents.rl.collector.background.worker import Learner, Worker
from embodichain.envs.vec_env import StepsInHalves, VecEnv
from embodichain.errors import ConfigError

if TYPE_CHECKING:
    from embodichain.agents.rl.collector.backends.ray import RayBackend

EnvSource = VecEnv | Callable[[], VecEnv]
"""An environment, or a function that makes one."""


class Place(Protocol):
    """A place to collect at."""

    num_envs: int | None
    """Number of environments; ``None`` as long as it is not known."""

    def start(self, num_steps: int, learner: Learner) -> Worker:
        """Begin to collect by the learner's orders."""

    def reset(self, seed: int | None) -> None:
        """Begin with new episodes."""

    def state(self) -> dict[str, Any]:
        """Return what the next rollout depends on, while nothing is being collected."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""


class ThreadPlace:
    """This process: the environment lives here, and goes on from where it is when collection is started again."""

    def __init__(self, env: VecEnv, setup: Setup) -> None:
        self._station = Station(env, setup)
        self.num_envs: int | None = env.num_envs

    def start(self, num_steps: int, learner: Learner) -> Worker:
        """Begin to collect in a thread."""
        return ThreadWorker(self._station, num_steps, learner)

    def reset(self, seed: int | None) -> None:
        """Begin with new episodes."""
        self._station.reset(seed)

    def state(self) -> dict[str, Any]:
        """Return what the next rollout depends on."""
        return self._station.state()

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self._station.load(state)


class RemotePlace(ABC):
    """Other processes: environments are made there, every time that collection is started."""

    def __init__(self, make_env: Callable[[], VecEnv], setup: Setup) -> None:
        self._make_env, self._setup = make_env, setup
        self.num_envs: int | None = None
        self._seed: int | None = None
        self._state: Mapping[str, Any] | None = None

    @abstractmethod
    def _begin(self, job: Job, learner: Learner) -> ProcessWorker | RayBackend:
        """Start a worker."""

    def start(self, num_steps: int, learner: Learner) -> Worker:
        """Start a worker, and wait until an environment is there."""
        worker = self._begin(Job(self._make_env, self._setup, num_steps), learner)
        try:
            worker.wait_until_ready()
        except BaseException:  # Ctrl-C included: nothing may be left running
            worker.stop()
            raise
        self.num_envs, self._state = worker.num_envs, None
        return worker

    def reset(self, seed: int | None) -> None:
        """Begin with new episodes, once started."""
        self._seed = seed

    def state(self) -> dict[str, Any]:
        """Return what the first rollout depends on: nothing has happened yet, or is gone with its process."""
        return {"collector": {}, "env": None, "generator": None, "tickets": [], "seed": self._seed}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, once started."""
        self._state = state
        self._seed = state.get("seed", self._seed)


class ProcessPlace(RemotePlace):
    """One other process of this machine."""

    def _begin(self, job: Job, learner: Learner) -> ProcessWorker:
        return ProcessWorker(job, learner, self._state, self._seed)


class RayPlace(RemotePlace):
    """Processes anywhere in a Ray cluster. The state of their environments is not saved."""

    def _begin(self, job: Job, learner: Learner) -> RayBackend:
        from embodichain.agents.rl.collector.backends.ray import RayBackend  # it needs an extra

        return RayBackend(job, learner, self._seed)


def make_place(env: EnvSource, setup: Setup) -> Place:
    """Return the place that the settings ask for."""
    setup.cfg.check()
    where = setup.cfg.worker
    if where != "thread":
        if isinstance(env, VecEnv):
            raise ConfigError(
                f"worker {where!r} needs a function that makes the environment, to be called there; got an environment",
                "collector",
            )
        return ProcessPlace(env, setup) if where == "process" else RayPlace(env, setup)
    made = env if isinstance(env, VecEnv) else env()
    if setup.cfg.env_processes and not isinstance(made, StepsInHalves):
        raise ConfigError(
            "env_processes is for a trainer, which makes environments; here, give RemoteGroups of RemoteEnvs",
            "collector",
        )
    return ThreadPlace(made, setup)
