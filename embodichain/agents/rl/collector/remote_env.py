"""An environment in a process of its own: whoever steps it here only waits, and leaves this process's time to others.

Groups of envs that take turns are simulated in threads otherwise. That is all they need where MuJoCo computes, for it
lets Python go on meanwhile; but pictures that are drawn by software, and tasks with much Python in them, make threads
wait for each other. Data goes both ways in shared memory, nothing is pickled but the function that makes the
environment, and the process ends with this one, however that happens.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from embodichain.agents.processes.failure import FailureReport
from embodichain.agents.rl.collector.background.child_process import ChildProcess, begin_as_child
from embodichain.agents.rl.collector.background.parcel import Channel, pack, unpack
from embodichain.agents.rl.utils.spaces import space_from_data, space_to_data
from embodichain.envs.actions import ActionManager
from embodichain.envs.chunks import StepsChunks, step_one_by_one
from embodichain.envs.vec_env import Action, EnvIds, StepResult, VecEnv
from embodichain.errors import EnvContractError, WorkerError

_GRACE_SECONDS = 1.0


class RemoteEnv(VecEnv):
    """The environment that ``make`` returns in another process; it is as deterministic there as it is here.

    ``make`` is called there: it has to be picklable, and what it makes to live on the CPU. Torch has one thread there.
    An exception of the environment is raised here; if its process dies, that is a ``WorkerError``.
    """

    def __init__(self, make: Callable[[], VecEnv]) -> None:
        self._channel, other = Channel.pair()
        self._turn = threading.Lock()
        self._closed = False
        self._process = ChildProcess(_serve, (make, other.socket))
        other.close()
        about = self._answer()
        self.num_envs, self.max_episode_steps = about["num_envs"], about["max_episode_steps"]
        self.supports_state, self.device = about["supports_state"], torch.device("cpu")
        observed = space_from_data(about["observation_space"])
        self.observation_space = observed  # type: ignore[assignment]
        self.action_space = space_from_data(about["action_space"])
        chosen = space_from_data(about["choice"])
        self.action_manager = ActionManager(about["action_type"], chosen, self.num_envs, self.device)

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    def reset(self, seed: int | Tensor | None = None, env_ids: EnvIds = None) -> tuple[TensorDict, dict[str, Any]]:
        ids = self.resolve_ids(env_ids)
        obs, info = self._ask("reset", self.resolve_seed(seed, ids.numel()), ids)
        return obs, info

    def step(self, action: Action) -> StepResult:
        return _whole(self._ask("step", action))

    def step_chunk(self, actions: Tensor) -> StepResult:
        """Take actions ``[num_envs, chunk_size, action_dim]`` and observe once (see ``embodichain.envs.chunks``)."""
        return _whole(self._ask("step_chunk", actions))

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
        if self._channel.send({"call": "close"}):
            self._process.wait(_GRACE_SECONDS)
        self._process.kill()  # whoever waits for it in another thread hears of that
        with self._turn:
            self._channel.close()

    def _ask(self, name: str, *args: Any) -> Any:
        with self._turn:
            if self._closed:
                raise EnvContractError("this environment is closed: make a new one")
            words, memory = pack(list(args))
            self._channel.send({"call": name, **words}, memory, patient=True)
            return self._answer()

    def _answer(self) -> Any:
        """Wait for what the process says next."""
        try:
            received = self._channel.receive(None)
        except EOFError:
            raise WorkerError(f"the process of an environment {self._process.exit_words()}") from None
        words, memory = received or ({}, None)
        if memory is None:
            raise FailureReport.from_json(words["failed"]).as_user_error()
        return _placed(unpack(words, memory))


def _serve(make: Callable[[], VecEnv], connection: socket.socket) -> None:
    """Make the environment and do what is asked of it until nobody is there to ask."""
    begin_as_child()
    torch.set_num_threads(1)
    channel = Channel(connection)
    try:
        with make() as env:
            words, memory = pack(_about(env))
            channel.send(words, memory, patient=True)
            while True:
                message, given = channel.receive(None) or ({}, None)
                if given is None:
                    return
                _do(env, channel, message["call"], unpack(message, given))
    except EOFError:
        return
    except Exception as error:  # noqa: BLE001 - whatever it is, the other process must hear of it
        _fail(channel, error)


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


def _do(env: VecEnv, channel: Channel, name: str, args: list[Any]) -> None:
    """Answer one question; an environment that refuses it goes on with the next."""
    try:
        if name == "step":
            answer: Any = _parts(env.step(*args))
        elif name == "step_chunk":
            answer = _parts(env.step_chunk(*args) if isinstance(env, StepsChunks) else step_one_by_one(env, *args))
        else:
            answer = getattr(env, name)(*args)
        words, memory = pack(answer)
    except Exception as error:  # noqa: BLE001 - it is raised where the question came from
        _fail(channel, error)
    else:
        channel.send(words, memory, patient=True)


def _fail(channel: Channel, error: Exception) -> None:
    channel.send({"failed": FailureReport.of_exception(0, error).to_json()}, patient=True)


def _parts(result: StepResult) -> tuple[Any, ...]:
    """Return a step without what it says twice."""
    info = dict(result[4])
    if info.get("final_observation") is result[0]:  # nobody ended
        del info["final_observation"]
    return (*result[:4], info)


def _placed(value: Any) -> Any:
    """Return an answer in which TensorDicts know where they are, as those of an environment do."""
    if isinstance(value, TensorDictBase):
        return value.to("cpu")
    if isinstance(value, tuple):
        return tuple(map(_placed, value))
    return {key: _placed(entry) for key, entry in value.items()} if isinstance(value, dict) else value


def _whole(parts: tuple[Any, ...]) -> StepResult:
    obs, reward, terminated, truncated, info = parts
    info.setdefault("final_observation", obs)
    return obs, reward, terminated, truncated, info
