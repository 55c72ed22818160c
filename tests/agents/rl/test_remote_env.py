"""An environment in a process of its own: the same numbers, the same errors, and nothing left behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from embodichain.agents.processes.channel import Deadline
from embodichain.agents.rl.collector.remote_env import RemoteEnv
from embodichain.envs.actions import ActionManager
from embodichain.envs.vec_env import EnvIds, StepResult, VecEnv
from embodichain.errors import ActionError, EnvContractError, EnvironmentHungError, UnknownNameError, WorkerError
from tests.agents.rl.helpers import ScriptedEnv
from tests.agents.rl.remote_cases import Patient, assert_same, make_task
from tests.programs import ends_soon, is_alive, start_program, wait_until

PROGRAM = """
import functools, time
from embodichain.agents.rl.collector import RemoteEnv
from embodichain.envs.registration import make
if __name__ == "__main__":
    env = RemoteEnv(functools.partial(make, "CartPoleRL", num_envs=2))
    print(env.pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("chunk_size", [1, 4])
def test_it_is_the_same_environment(chunk_size: int) -> None:
    maker = partial(make_task, "PushCubeRL", 3, chunk_size, cameras=True)
    with maker() as here, RemoteEnv(maker) as there:
        assert there.num_envs == 3
        assert there.max_episode_steps == here.max_episode_steps
        assert (there.observation_space, there.action_space) == (here.observation_space, here.action_space)
        assert there.action_manager.action_type == here.action_manager.action_type
        assert_same(here.reset(seed=5)[0], there.reset(seed=5)[0])
        generator = torch.Generator().manual_seed(0)
        ended = 0
        for _ in range(here.max_episode_steps + 2):
            action = torch.rand(3, *(here.action_space.shape or ()), generator=generator) * 2 - 1
            mine, other = here.step(action), there.step(action)
            assert_same(mine[0], other[0])
            assert_same(mine[4]["final_observation"], other[4]["final_observation"])
            for left, right in zip(mine[1:4], other[1:4], strict=True):
                assert torch.equal(left, right)
            for part in ("metrics", "rewards", "chunk"):
                assert_same(TensorDict(mine[4].get(part, {}), [3]), TensorDict(other[4].get(part, {}), [3]))
            assert torch.equal(mine[4]["episode_seed"], other[4]["episode_seed"])
            done = mine[2] | mine[3]
            assert (other[4]["final_observation"] is other[0]) == (not bool(done.any()))
            ended += int(done.sum())
        assert ended >= 3
        state = there.get_state()
        assert_same(here.get_state(), state)
        assert_same(here.set_state(state[:1], [2]), there.set_state(state[:1], [2]))
        assert (here.render([1], size=(20, 30)) == there.render([1], size=(20, 30))).all()


class Prepared(ScriptedEnv):
    """Tells how often it was prepared, also by files in ``folder``; the second time fails."""

    prepared = 0
    action_manager = ActionManager("move", gym.spaces.Box(-1.0, 1.0, (1,)), 2, "cpu")

    def __init__(self, folder: str) -> None:
        super().__init__(2)
        self.folder = Path(folder)

    def prepare(self) -> None:
        self.prepared += 1
        (self.folder / str(self.prepared)).touch()
        if self.prepared == 2:
            raise RuntimeError("not now")

    def reset(self, seed: int | Tensor | None = None, env_ids: EnvIds = None) -> tuple[TensorDict, dict[str, Any]]:
        return super().reset(seed, env_ids)[0], {"prepared": torch.tensor([self.prepared] * self.num_envs)}


def test_environments_are_prepared_after_a_step(tmp_path: Path) -> None:
    with RemoteEnv(partial(Prepared, str(tmp_path))) as env:
        for asked in range(4):
            assert env.reset()[1]["prepared"].tolist() == [asked, asked]
            env.get_state()
            env.step(torch.zeros(2, 1))
            wait_until((tmp_path / str(asked + 1)).exists)  # nobody asks: it has time


def test_errors_come_back_and_the_environment_goes_on() -> None:
    with RemoteEnv(partial(make_task, "CartPoleRL", 2)) as env:
        env.reset(seed=0)
        with pytest.raises(ActionError, match="shape"):
            env.step(torch.zeros(3, 1))
        with pytest.raises(EnvContractError, match="env_ids"):
            env.reset(env_ids=[7])
        obs, *_ = env.step(torch.zeros(2, 1))
        assert obs.batch_size == (2,)
    for call in (partial(env.step, torch.zeros(2, 1)), env.finish_step, env.get_state):
        with pytest.raises(EnvContractError, match="closed"):
            call()
    env.close()


def test_a_maker_that_fails_says_why() -> None:
    with pytest.raises(UnknownNameError, match="CartPoleRL"):
        RemoteEnv(partial(make_task, "CartPolRL", 2))


def test_a_process_that_is_killed_is_an_error_at_once() -> None:
    env = RemoteEnv(partial(make_task, "CartPoleRL", 2))
    env.reset(seed=0)
    os.kill(env.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="killed by SIGKILL"):
        env.step(torch.zeros(2, 1))
    env.close()
    assert not is_alive(env.pid)


def make_unless_marked(mark: str) -> VecEnv:
    if os.path.exists(mark):
        os.unlink(mark)
        raise OSError("the licence server is busy")
    return make_task("CartPoleRL", 2)


def test_a_restart_that_fails_does_not_forget_the_chunk_size(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with RemoteEnv(partial(make_unless_marked, str(mark))) as env:
        env.in_chunks(4).reset(seed=0)
        for failing in (False, True, True):
            os.kill(env.pid, signal.SIGKILL)
            with pytest.raises(WorkerError, match="killed by SIGKILL"):
                env.step(torch.zeros(2, 4, 1))
            if failing:
                mark.touch()
                with pytest.raises(WorkerError, match="licence server"):
                    env.restart()
            env.restart()
            assert env.action_space.shape == (4, 1)
            env.reset(seed=0)
            assert env.step(torch.zeros(2, 4, 1))[4]["chunk"]["num_actions"].tolist() == [4, 4]


class Drawing(Patient):
    """Draws from the global generators, which no environment should."""

    def reset(self, seed: int | Tensor | None = None, env_ids: EnvIds = None) -> tuple[TensorDict, dict[str, Any]]:
        return super().reset(seed, env_ids)[0], {"drawn": torch.rand(2)}


def test_a_process_that_is_stopped_counts_as_hung() -> None:
    env = RemoteEnv(partial(make_task, "CartPoleRL", 2), step_timeout=2.5)
    env.reset(seed=0)
    for _ in range(3):
        env.step(torch.zeros(2, 1))
    pid = env.pid
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(EnvironmentHungError, match=r"not answered for 2\.5 s \(step_timeout\)"):
        env.step(torch.zeros(2, 1))
    assert not is_alive(pid)
    with pytest.raises(WorkerError, match="was killed"):
        env.reset()
    env.close()


def never_made() -> VecEnv:
    time.sleep(1000.0)
    raise AssertionError


@pytest.mark.parametrize("count", [1, 2])
def test_an_environment_that_is_never_made_counts_as_hung(count: int) -> None:
    with pytest.raises(EnvironmentHungError, match=r"not answered for 2 s \(start_timeout\)"):
        RemoteEnv.several([never_made] * count, start_timeout=2.0)
    with pytest.raises(EnvironmentHungError, match=r"not answered for 1 s \(start_timeout\)"):
        RemoteEnv(never_made, start_timeout=1.0)


def test_an_answer_is_waited_for_again_after_a_suspension(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    deadline = Deadline(5.0)
    left = []
    for passed in (0.0, 1.0, 1.0, 60.0, 1.0, 2.5, 1.0, 0.6):
        now += passed
        left.append(deadline.remaining())
    assert left[:-1] == [1.0] * 6 + [0.5]  # after the suspension there are five seconds again
    assert left[-1] == 0.0


def test_halves_of_a_step_belong_together() -> None:
    with RemoteEnv(partial(make_task, "CartPoleRL", 2)) as env:
        env.reset(seed=0)
        env.begin_step(torch.zeros(2, 1))
        with pytest.raises(EnvContractError, match="finish_step"):
            env.get_state()
        assert env.finish_step()[1].shape == (2,)
        assert env.get_state().batch_size == (2,)
        with pytest.raises(EnvContractError, match="begin_step"):
            env.finish_step()


def test_closing_ends_a_process_that_hangs() -> None:
    env = RemoteEnv(partial(make_task, "CartPoleRL", 2))
    env.reset(seed=0)
    os.kill(env.pid, signal.SIGSTOP)
    failures: list[BaseException] = []

    def step() -> None:
        try:
            env.step(torch.zeros(2, 1))
        except EnvContractError as error:
            failures.append(error)

    thread = threading.Thread(target=step)
    thread.start()
    wait_until(lambda: env._steps == 1)  # it waits for the answer
    env.close()
    thread.join(100)
    assert not thread.is_alive()
    assert "closed meanwhile" in str(failures[0])
    assert not is_alive(env.pid)


class Held(Patient):
    """Does not come back from a step for as long as a file is there."""

    def __init__(self, file: str) -> None:
        super().__init__(2)
        self.file = Path(file)

    def step(self, action: Tensor) -> StepResult:
        result = super().step(action)
        wait_until(lambda: not self.file.exists())
        return result


def signal_while_it_waits(env: RemoteEnv, after: float, number: signal.Signals) -> None:
    """Let this process get a signal, so many seconds after it begins to wait for an answer of the environment."""
    channel: Any = env._channel.channel
    receive = channel.receive

    def receive_with_signal(timeout: float) -> Any:
        channel.receive = receive
        threading.Timer(after, os.kill, [os.getpid(), number]).start()
        return receive(timeout)

    channel.receive = receive_with_signal


def interrupted(env: RemoteEnv, file: Path, after: float) -> None:
    """Step, and press Ctrl-C meanwhile."""
    file.touch()  # so that it does not answer before
    signal_while_it_waits(env, after, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        env.step(torch.zeros(2, 1))
    file.unlink()


def count(env: VecEnv) -> list[float]:
    steps: list[float] = env.step(torch.zeros(2, 1))[0]["object", "step"].flatten().tolist()
    return steps


def test_an_answer_that_was_interrupted_is_not_taken_for_the_next(tmp_path: Path) -> None:
    file = tmp_path / "held"
    with RemoteEnv(partial(Held, str(file))) as env:
        env.reset(seed=0)
        interrupted(env, file, 0.1)
        assert count(env) == [2, 2]
        for after in (0.1, 0.02, 0.05, 0.15, 0.4):  # also while it waits for the answer to the one before
            interrupted(env, file, after)
        first = count(env)
        assert count(env) == [first[0] + 1] * 2
        assert env.reset(env_ids=[1])[0]["object", "step"].flatten().tolist() == [first[0] + 1, 0]


def test_closing_in_a_signal_handler_ends_the_step(tmp_path: Path) -> None:
    (tmp_path / "held").touch()
    env = RemoteEnv(partial(Held, str(tmp_path / "held")))
    env.reset(seed=0)
    before = signal.signal(signal.SIGUSR1, lambda *_: env.close())
    try:
        signal_while_it_waits(env, 0.1, signal.SIGUSR1)
        with pytest.raises(EnvContractError, match="closed meanwhile"):
            env.step(torch.zeros(2, 1))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not is_alive(env.pid)


def test_it_ends_with_its_program(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    with start_program(script) as program:
        pid = int(program.stdout.readline())
        assert is_alive(pid)
        program.kill()
    assert ends_soon(pid)


def test_what_a_step_returns_is_kept_piece_by_piece() -> None:
    with RemoteEnv(partial(make_task, "PushCubeRL", 2, cameras=True)) as env:
        env.reset(seed=0)
        obs, reward, *_ = env.step(torch.zeros(2, *(env.action_space.shape or ())))
        assert reward.untyped_storage().nbytes() == 8
        assert obs["image", "side"].untyped_storage().nbytes() == 2 * 16 * 24 * 3


def test_global_random_numbers_differ_between_processes() -> None:
    with RemoteEnv(partial(Drawing, 2)) as one, RemoteEnv(partial(Drawing, 2)) as two:
        first, second = (env.reset()[1]["drawn"] for env in (one, two))
    assert not torch.equal(first, second)


class ManySensors(ScriptedEnv):
    """Has more observations than fit into one packet of a socket."""

    num_sensors = 1500
    action_manager = ActionManager("move", gym.spaces.Box(-1.0, 1.0, (1,)), 2, "cpu")

    def __init__(self) -> None:
        super().__init__(2)
        names = self.observe()["sensors"].keys()
        sensors = gym.spaces.Dict({name: gym.spaces.Box(-10.0, 1e4, (3,)) for name in names})
        self.observation_space = gym.spaces.Dict({**self.observation_space.spaces, "sensors": sensors})

    def observe(self) -> TensorDict:
        obs = super().observe()
        sensors = {f"sensor_with_a_long_name_{i:05}": torch.full((2, 3), float(i)) for i in range(self.num_sensors)}
        obs["sensors"] = TensorDict(sensors, [2])
        return obs


def test_an_environment_with_very_many_observations_works() -> None:
    env = RemoteEnv(ManySensors)
    with env:
        obs, _ = env.reset(seed=1)
        names = sorted(obs["sensors"].keys())
        assert len(names) == len(env.observation_space["sensors"].spaces) == 1500
        assert obs["sensors", names[1234]].tolist() == [[1234.0] * 3] * 2
        obs = env.step(torch.zeros(2, 1))[0]
        assert obs["sensors", names[1499]].tolist() == [[1499.0] * 3] * 2
