"""An environment in a process of its own: whoever steps it here only waits, and leaves this process's time to others.

Groups of envs that take turns are simulated in threads otherwise. That is all they need where MuJoCo computes, for it
lets Python go on meanwhile; but tasks with much Python in them, and pictures that are drawn by software, make threads
wait for each other. ``begin_step`` and ``finish_step`` are the halves of a step, so that one thread can keep several
such environments busy. Nothing is pickled but the function that makes the environment, and its process ends with this
one, however that happens.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from embodichain.agents.processes.failure import FailureReport
from embodichain.agents.rl.collector.background.child_process import ChildProcess, begin_as_child
from embodichain.agents.rl.collector.background.mail import Mail
from embodichain.agents.rl.utils.spaces import space_from_data, space_to_data
from embodichain.envs.actions import ActionManager
from embodichain.envs.chunks import chunked
from embodichain.envs.vec_env import Action, EnvIds, StepResult, VecEnv
from embodichain.errors import EnvContractError, WorkerError

_GRACE_SECONDS = 1.0


class RemoteEnv(VecEnv):
    """The environment that ``make`` returns in another process; it is as deterministic there as it is here.

    ``make`` is called there: it has to be picklable, and what it makes to live on the CPU. Torch has one thread there.
    An exception of the environment is raised here; if its process dies, that is a ``WorkerError``.
    """

    device = torch.device("cpu")

    def __init__(self, make: Callable[[], VecEnv]) -> None:
        self._turn = threading.Lock()
        self._under_way = self._closed = False
        self._mail, other = Mail.pair()
        self._process = ChildProcess(_serve, (make, other.socket))
        other.close()
        self._describe(self._answer())

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

    def step(self, action: Action) -> StepResult:
        self.begin_step(action)
        return self.finish_step()

    def begin_step(self, action: Action) -> None:
        """Let the process begin with a step; the next call has to be ``finish_step``."""
        with self._turn:
            self._send("step", action)
            self._under_way = True

    def finish_step(self) -> StepResult:
        """Wait for the step that was begun and return what came of it."""
        with self._turn:
            self._under_way = False
            obs, reward, terminated, truncated, info = self._answer()
        info.setdefault("final_observation", obs)
        return obs, reward, terminated, truncated, info

    def in_chunks(self, chunk_size: int) -> RemoteEnv:
        """Let a decision be so many actions from now on (see ``embodichain.envs.chunks``), and return this."""
        self._describe(self._ask("in_chunks", chunk_size))
        return self

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
        if self._mail.send("close", []):
            self._process.wait(_GRACE_SECONDS)
        self._process.kill()  # whoever waits for it in another thread hears of that
        with self._turn:
            self._mail.close()

    def _ask(self, name: str, *args: Any) -> Any:
        with self._turn:
            self._send(name, *args)
            return self._answer()

    def _send(self, name: str, *args: Any) -> None:
        if self._closed:
            raise EnvContractError("this environment is closed: make a new one")
        if self._under_way:
            raise EnvContractError("a step of this environment is under way: finish_step() comes first")
        self._mail.send(name, list(args))

    def _answer(self) -> Any:
        try:
            title, content = self._mail.receive()
        except EOFError:
            raise WorkerError(f"the process of an environment {self._process.exit_words()}") from None
        if title == "failed":
            raise FailureReport.from_json(content).as_user_error()
        return content


def _serve(make: Callable[[], VecEnv], connection: socket.socket) -> None:
    """Make the environment and do what is asked of it until nobody is there to ask."""
    begin_as_child()
    torch.set_num_threads(1)
    mail = Mail(connection)
    env: VecEnv | None = None
    try:
        env = make()
        mail.send("about", _about(env))
        while (order := mail.receive())[0] != "close":
            env = _do(env, mail, *order)
    except EOFError:
        return
    except Exception as error:  # noqa: BLE001 - whatever it is, the other process must hear of it
        _fail(mail, error)
    finally:
        if env is not None:
            env.close()


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


def _do(env: VecEnv, mail: Mail, name: str, args: list[Any]) -> VecEnv:
    """Answer one question; an environment that refuses it goes on with the next."""
    try:
        if name == "step":
            answer: Any = _parts(env.step(*args))
        elif name == "in_chunks":
            env = chunked(env, *args)
            answer = _about(env)
        else:
            answer = getattr(env, name)(*args)
        mail.send("answer", answer)
    except Exception as error:  # noqa: BLE001 - it is raised where the question came from
        _fail(mail, error)
    return env


def _fail(mail: Mail, error: Exception) -> None:
    mail.send("failed", FailureReport.of_exception(0, error).to_json())


def _parts(result: StepResult) -> tuple[Any, ...]:
    """Return a step without what it says twice."""
    info = dict(result[4])
    if info.get("final_observation") is result[0]:  # nobody ended
        del info["final_observation"]
    return (*result[:4], info)
