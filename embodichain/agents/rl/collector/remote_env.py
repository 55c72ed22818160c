"""An environment in a separate process, so that its simulation does not hold this process's interpreter lock.

It is faster than threads for tasks with much Python code and for software rendering. One thread can step several of
them at once with ``begin_step`` and ``finish_step``. Between two steps, their processes prepare reset states.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.connection import wait
from typing import Any, Self

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from embodichain.agents.processes.channel import Channel, Deadline, RequestChannel
from embodichain.agents.processes.failure import FailureReport
from embodichain.agents.processes.pool import FIRST_STEPS, Heartbeat, WorkerProcess
from embodichain.agents.rl.utils.tensordicts import space_from_data, space_to_data
from embodichain.envs.vec_env import Action, ActionManager, EnvIds, StepResult, StepsInHalves, VecEnv
from embodichain.envs.wrappers import chunked
from embodichain.errors import ActionError, ConfigError, EnvContractError, EnvironmentHungError, WorkerError
from embodichain.utils.torch_runtime import seed_everything

START_TIMEOUT, STEP_TIMEOUT = 300.0, 60.0
_GRACE_SECONDS = 1.0
_made = itertools.count()


class RemoteEnv(StepsInHalves):
    """Runs the environment that ``make`` returns in another process, with the same results as in this one.

    ``make`` must be picklable and return an environment on the CPU. The process uses one torch thread. Its global
    random generators are seeded from torch's seed here, differently in each process. Exceptions of the environment are
    raised here. ``WorkerError`` is raised if the process dies, ``EnvironmentHungError`` if it does not answer in time.
    """

    device = torch.device("cpu")

    def __init__(
        self, make: Callable[[], VecEnv], *, start_timeout: float = START_TIMEOUT, step_timeout: float = STEP_TIMEOUT
    ) -> None:
        """Start the process; ``step_timeout`` limits a step, ``start_timeout`` the start and all other calls."""
        self._chunk_size = 1
        self._start(make, start_timeout, step_timeout)
        self._wait_until_built()

    @classmethod
    def several(
        cls,
        makes: Iterable[Callable[[], VecEnv]],
        *,
        start_timeout: float = START_TIMEOUT,
        step_timeout: float = STEP_TIMEOUT,
    ) -> list[Self]:
        """Return several environments, whose processes start in parallel."""
        envs: list[Self] = []
        try:
            for make in makes:
                env = cls.__new__(cls)
                env._chunk_size = 1
                env._start(make, start_timeout, step_timeout)
                envs.append(env)
            waiting: dict[Any, Self] = {env._process.channel.socket: env for env in envs}
            deadline = Deadline(start_timeout)
            while waiting:  # in the order in which they answer, so that a failure is raised at once
                left = deadline.remaining()
                for connection in wait(list(waiting), left) if left else list(waiting):
                    waiting.pop(connection)._wait_until_built(waited=not left)
        except BaseException:
            for env in envs:
                env._process.kill()  # nothing to shut down cleanly yet
            for env in envs:
                env.close()
            raise
        return envs

    def _start(self, make: Callable[[], VecEnv], start_timeout: float, step_timeout: float) -> None:
        self._make = make
        self._timeouts = {"start_timeout": start_timeout, "step_timeout": step_timeout}
        self._steps = 0
        self._failed = True
        """Whether the last request failed or was not answered."""
        self._turn = threading.Lock()
        self._under_way = self._closed = False
        try:
            self._process = WorkerProcess(_serve, (make, (torch.initial_seed() + next(_made)) % 2**63))
        except ConfigError as error:
            raise EnvContractError(f"what makes the environment: {error}") from None
        self._channel = RequestChannel(self._process.channel, asks=True)

    def _wait_until_built(self, waited: bool = False) -> None:
        """Wait until the environment is built (not at all if ``waited``), and set its spaces and sizes."""
        with self._exchange():
            about = self._answer(waited=waited)
        self._describe(about)

    def _describe(self, about: dict[str, Any]) -> None:
        observed = space_from_data(about["observation_space"])
        if not isinstance(observed, gym.spaces.Dict):
            raise EnvContractError(f"an observation space is a Dict, got {observed}")
        self.observation_space, self.action_space = observed, space_from_data(about["action_space"])
        self.num_envs, self.max_episode_steps = about["num_envs"], about["max_episode_steps"]
        self.supports_state = about["supports_state"]
        choice = space_from_data(about["choice"])
        self.action_manager = ActionManager(about["action_type"], choice, self.num_envs, self.device)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def reset(self, seed: int | Tensor | None = None, env_ids: EnvIds = None) -> tuple[TensorDict, dict[str, Any]]:
        ids = self.resolve_ids(env_ids)
        obs, info = self._ask("reset", self.resolve_seed(seed, ids.numel()), ids)
        return obs, info

    def begin_step(self, action: Action) -> None:
        if not isinstance(action, (Tensor, np.ndarray, Mapping, TensorDictBase)):
            raise ActionError(f"an action is a tensor or a dict of one, got {type(action).__name__}")
        with self._exchange():
            self._send("step", action)
            self._under_way = True

    def finish_step(self) -> StepResult:
        with self._exchange():
            if not self._under_way:
                raise EnvContractError("no step of this environment is under way: begin_step() comes first")
            self._under_way = False
            self._steps += 1
            limit = "step_timeout" if self._steps > FIRST_STEPS else "start_timeout"
            obs, reward, terminated, truncated, info = self._answer(limit)
        info.setdefault("final_observation", obs)
        return obs, reward, terminated, truncated, info

    def in_chunks(self, chunk_size: int) -> RemoteEnv:
        """Make each step take a chunk of actions (see ``embodichain.envs.wrappers``); return ``self``."""
        self._describe(self._ask("in_chunks", chunk_size))
        self._chunk_size = chunk_size
        return self

    def restart(self) -> None:
        """Replace the process if it died, hung, or failed in the last request; call ``reset`` afterwards."""
        if self._closed or not self._failed:
            return
        self._process.kill()
        self._channel.close()
        self._start(self._make, *self._timeouts.values())
        self._wait_until_built()
        if self._chunk_size > 1:
            self.in_chunks(self._chunk_size)

    def get_state(self) -> TensorDict:
        state: TensorDict = self._ask("get_state")
        return state

    def set_state(self, state: TensorDictBase, env_ids: EnvIds = None) -> TensorDict:
        obs: TensorDict = self._ask("set_state", state, self.resolve_ids(env_ids))
        return obs

    def render(
        self, env_ids: EnvIds = None, camera: str | None = None, size: tuple[int, int] = (240, 320)
    ) -> np.ndarray:
        frames: np.ndarray = self._ask("render", self.resolve_ids(env_ids), camera, size)
        return frames

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._process.channel.shut_down()  # wakes a thread that waits for an answer
            self._process.wait(_GRACE_SECONDS)
        finally:
            self._process.kill()
        if self._turn.acquire(timeout=_GRACE_SECONDS):  # fails in a signal handler that interrupted a step
            self._channel.close()
            self._turn.release()

    def _ask(self, name: str, *args: Any) -> Any:
        with self._exchange():
            self._send(name, *args)
            return self._answer()

    def _send(self, name: str, *args: Any) -> None:
        if self._under_way:
            raise EnvContractError("a step of this environment is under way: finish_step() comes first")
        self._channel.send(name, list(args))

    def _answer(self, limit: str = "start_timeout", waited: bool = False) -> Any:
        """Return the answer of the process; kill the process if it does not answer in time."""
        seconds, self._failed = self._timeouts[limit], True
        try:
            kind, content = self._channel.receive(0.0 if waited else seconds)
        except TimeoutError:
            self._process.kill()
            raise EnvironmentHungError(
                f"the process of an environment hung, and was killed: it has not answered for {seconds:g} s ({limit})"
            ) from None
        if kind == "failed":
            raise FailureReport.from_json(content).as_user_error()
        self._failed = False
        return content

    @contextlib.contextmanager
    def _exchange(self) -> Iterator[None]:
        """Hold the lock of the connection; turn a closed connection into an error that says how the process ended."""
        with self._turn:
            try:
                if self._closed:
                    raise EnvContractError("this environment is closed: make a new one")
                yield
            except EOFError:
                if self._closed:
                    raise EnvContractError("this environment was closed meanwhile: make a new one") from None
                raise WorkerError(f"the process of an environment {self._process.describe_end()}") from None


def _serve(channel: Channel, _: Heartbeat, make: Callable[[], VecEnv], seed: int) -> None:
    """Build the environment and answer requests until the connection closes."""
    seed_everything(seed)
    with contextlib.closing(make()) as made:
        _answer_all(made, RequestChannel(channel, asks=False))


def _answer_all(env: VecEnv, channel: RequestChannel) -> None:
    name, args = "about", list[Any]()
    while True:
        try:
            if name == "about":
                answer: Any = _about(env)
            elif name == "step":
                answer = env.step(*args)
                if answer[4].get("final_observation") is answer[0]:  # no episode ended: do not send it twice
                    info = {name: part for name, part in answer[4].items() if name != "final_observation"}
                    answer = (*answer[:4], info)
            elif name == "in_chunks":
                env = chunked(env, *args)
                answer = _about(env)
            else:
                answer = getattr(env, name)(*args)
            channel.send("answer", answer)
        except Exception as error:  # noqa: BLE001 - raised in the requesting process
            channel.send("failed", FailureReport.of_exception(os.getpid(), error).to_json())
        if name == "step" and not channel.channel.has_arrived():
            with contextlib.suppress(Exception):  # the step that needs it will raise the same error
                env.prepare()
        name, args = channel.receive()


def _about(env: VecEnv) -> dict[str, Any]:
    if env.device.type != "cpu":
        raise EnvContractError(f"an environment on {env.device} cannot be simulated in a process of its own: use 'cpu'")
    return {
        "num_envs": env.num_envs,
        "max_episode_steps": env.max_episode_steps,
        "supports_state": env.supports_state,
        "observation_space": space_to_data(env.observation_space),
        "action_space": space_to_data(env.action_space),
        "choice": space_to_data(env.action_manager.space),
        "action_type": env.action_manager.action_type,
    }
