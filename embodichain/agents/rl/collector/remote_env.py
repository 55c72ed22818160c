"""An environment in a process of its own: whoever steps it here only waits, and leaves this process's time to others.

It is faster than threads where tasks have much Python in them, or images are rendered by software. One thread can keep
several busy by ``begin_step`` and ``finish_step``; between two steps their processes prepare reset states.
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
    """The environment that ``make`` returns in another process, where it gives the same numbers as it would here.

    ``make`` is called there: it has to be picklable, and what it makes to live on the CPU. Torch has one thread there.
    The global random generators are seeded from torch's seed here, differently in every process. An exception of the
    environment is raised here; if its process dies, that is a ``WorkerError``, and if it does not answer in time, an
    ``EnvironmentHungError``.
    """

    device = torch.device("cpu")

    def __init__(
        self, make: Callable[[], VecEnv], *, start_timeout: float = START_TIMEOUT, step_timeout: float = STEP_TIMEOUT
    ) -> None:
        """Start the process; a step may take ``step_timeout`` seconds, the start, first steps and the rest more."""
        self._chunk_size = 1
        self._start(make, start_timeout, step_timeout)
        self._meet()

    @classmethod
    def several(
        cls,
        makes: Iterable[Callable[[], VecEnv]],
        *,
        start_timeout: float = START_TIMEOUT,
        step_timeout: float = STEP_TIMEOUT,
    ) -> list[Self]:
        """Return several environments, whose processes start side by side."""
        envs: list[Self] = []
        try:
            for make in makes:
                env = cls.__new__(cls)
                env._chunk_size = 1
                env._start(make, start_timeout, step_timeout)
                envs.append(env)
            waiting: dict[Any, Self] = {env._process.channel.socket: env for env in envs}
            deadline = Deadline(start_timeout)
            while waiting:  # in the order in which they are there, so that a failure is told at once
                left = deadline.remaining()
                for connection in wait(list(waiting), left) if left else list(waiting):
                    waiting.pop(connection)._meet(waited=not left)
        except BaseException:
            for env in envs:
                env._process.kill()  # they have done nothing yet that would have to be ended in good order
            for env in envs:
                env.close()
            raise
        return envs

    def _start(self, make: Callable[[], VecEnv], start_timeout: float, step_timeout: float) -> None:
        self._make = make
        self._timeouts = {"start_timeout": start_timeout, "step_timeout": step_timeout}
        self._steps = 0
        self._failed = True
        """Whether it, or its process, did not do what it was asked last."""
        self._turn = threading.Lock()
        self._under_way = self._closed = False
        try:
            self._process = WorkerProcess(_serve, (make, (torch.initial_seed() + next(_made)) % 2**63))
        except ConfigError as error:
            raise EnvContractError(f"what makes the environment: {error}") from None
        self._channel = RequestChannel(self._process.channel, asks=True)

    def _meet(self, waited: bool = False) -> None:
        """Wait for the environment to be made, unless it was waited for long enough, and learn what it is like."""
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
        """Number of the process."""
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
        """Let a decision be so many actions from now on (see ``embodichain.envs.wrappers``), and return this."""
        self._describe(self._ask("in_chunks", chunk_size))
        self._chunk_size = chunk_size
        return self

    def restart(self) -> None:
        """Replace the process if it ended, hung, or did not do what it was asked last; ``reset`` has to follow."""
        if self._closed or not self._failed:
            return
        self._process.kill()
        self._channel.close()
        self._start(self._make, *self._timeouts.values())
        self._meet()
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
            self._process.channel.shut_down()  # whoever waits for an answer in another thread hears of that
            self._process.wait(_GRACE_SECONDS)
        finally:
            self._process.kill()
        if self._turn.acquire(timeout=_GRACE_SECONDS):  # not so in a signal handler that interrupted a step
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
        """Return what the process answers in time; end a process that does not."""
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
        """Talk to the process, one thread at a time; say what became of it if nobody is there any more."""
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
    """Make the environment and do what is asked of it until nobody is there to ask."""
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
                if answer[4].get("final_observation") is answer[0]:  # nobody ended; it is not sent twice
                    info = {name: part for name, part in answer[4].items() if name != "final_observation"}
                    answer = (*answer[:4], info)
            elif name == "in_chunks":
                env = chunked(env, *args)
                answer = _about(env)
            else:
                answer = getattr(env, name)(*args)
            channel.send("answer", answer)
        except Exception as error:  # noqa: BLE001 - it is raised where the request came from
            channel.send("failed", FailureReport.of_exception(os.getpid(), error).to_json())
        if name == "step" and not channel.channel.has_arrived():
            with contextlib.suppress(Exception):  # the step that needs it will fail in the same way, and say so
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
