"""Environments in processes of their own: the same numbers, the same errors, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from rich.console import Console
from tensordict import TensorDict
from torch import Tensor

from embodichain.agents.rl.buffer import VLABuffer
from embodichain.agents.rl.collector import AsyncCfg, AsyncCollector, SyncCollector
from embodichain.agents.rl.collector.background.mail import Mail
from embodichain.agents.rl.collector.background.parcel import Channel
from embodichain.agents.rl.collector.remote_env import RemoteEnv
from embodichain.agents.rl.models import build_policy
from embodichain.agents.rl.train import train_from_config
from embodichain.agents.rl.training import collection
from embodichain.agents.rl.training.collection import EnvMaker, in_chunks
from embodichain.agents.rl.training.run_log import read_metrics
from embodichain.envs.actions import ActionManager
from embodichain.envs.chunks import chunked
from embodichain.envs.groups import GroupedEnv, RemoteGroups, arrange, make_grouped
from embodichain.envs.physics.mujoco_cpu import available_cores
from embodichain.envs.registration import make
from embodichain.envs.vec_env import EnvIds, StepResult, VecEnv
from embodichain.errors import ActionError, ConfigError, EnvContractError, UnknownNameError, WorkerError
from tests.agents.rl.helpers import ScriptedEnv

CONFIG = Path(__file__).parents[3] / "configs/agents/rl/basic/cart_pole/train_config.json"
PROGRAM = """
import functools, time
from embodichain.agents.rl.collector import RemoteEnv
from embodichain.envs.registration import make
if __name__ == "__main__":
    env = RemoteEnv(functools.partial(make, "CartPoleRL", num_envs=2))
    print(env.pid, flush=True)
    time.sleep(60)
"""
TASK = """
from embodichain.envs.registration import register_task
from embodichain.envs.tasks.cart_pole import CartPole

register_task("BesideConfigRL", CartPole)
"""
CAMERA = {"observations": {"cameras": [{"name": "side", "width": 24, "height": 16}]}}


def make_task(task: str, num_envs: int, chunk_size: int = 1, cameras: bool = False) -> VecEnv:
    return chunked(make(task, num_envs=num_envs, num_threads=1, **({"env": CAMERA} if cameras else {})), chunk_size)


def assert_same(here: TensorDict, there: TensorDict) -> None:
    assert here.device == there.device
    names = sorted(map(str, here.keys(include_nested=True, leaves_only=True)))
    assert names == sorted(map(str, there.keys(include_nested=True, leaves_only=True)))
    for name, value in here.items(include_nested=True, leaves_only=True):
        assert torch.equal(value, there[name]), name


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1][:3]
    except FileNotFoundError:
        return False


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


def test_groups_in_processes_collect_what_groups_in_threads_do() -> None:
    rollouts = []
    for remote in (False, True):
        local = partial(make_task, "CartPoleRL")
        groups = (lambda n, local=local: RemoteEnv(partial(local, n))) if remote else local
        torch.manual_seed(0)
        with make_grouped(groups, 8, 2) as env:
            block = {"name": "actor_critic", "actor": {"type": "mlp", "hidden_sizes": [16]}, "critic": {"type": "mlp"}}
            policy = build_policy(block, env.observation_space, env.action_space, "cpu")
            collector = SyncCollector(env, policy, "cpu", pipeline_stages=2)
            collector.reset(seed=1)
            rollouts.append(collector.collect(40).clone())
    assert_same(*rollouts)


def test_a_group_may_consist_of_several_processes() -> None:
    """Two groups of two processes each see what groups of groups in this process do, in turn and side by side."""
    one = partial(make_task, "CartPoleRL", 2)
    rollouts, results = [], []
    for remote in (False, True):
        local = [GroupedEnv([one(), one()]), GroupedEnv([one(), one()])] if not remote else []
        with arrange(RemoteEnv.several([one] * 4), 2) if remote else GroupedEnv(local) as env:
            assert env.num_envs == 8
            assert len(set(env.reset(seed=1)[1]["episode_seed"].tolist())) == 8  # no two see the same
            torch.manual_seed(0)
            block = {"name": "actor_critic", "actor": {"type": "mlp", "hidden_sizes": [16]}, "critic": {"type": "mlp"}}
            policy = build_policy(block, env.observation_space, env.action_space, "cpu")
            collector = SyncCollector(env, policy, "cpu", pipeline_stages=2)
            collector.reset(seed=1)
            rollouts.append(collector.collect(30).clone())
            results.append(env.step(torch.linspace(-1, 1, 8).unsqueeze(1)))
    assert_same(*rollouts)
    assert_same(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_a_group_of_processes_is_not_left_in_the_middle_of_a_step() -> None:
    envs = RemoteEnv.several([partial(make_task, "CartPoleRL", 2)] * 2)
    with RemoteGroups(envs) as env:
        env.reset(seed=0)
        with pytest.raises(EnvContractError, match="begin_step"):
            env.finish_step()
        env.begin_step(torch.zeros(4, 1))
        with pytest.raises(EnvContractError, match="under way"):
            env.begin_step(torch.zeros(4, 1))
        assert env.finish_step()[1].shape == (4,)  # the first one
        envs[1].begin_step(torch.zeros(2, 1))
        with pytest.raises(EnvContractError, match="under way"):
            env.begin_step(torch.zeros(4, 1))  # the first has begun by then
        envs[1].finish_step()
        assert env.step(torch.zeros(4, 1))[1].shape == (4,)
        os.kill(envs[0].pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match="SIGKILL"):
            env.step(torch.zeros(4, 1))
        assert envs[1].get_state().batch_size == (2,)  # no step of it is under way


def test_an_interruption_leaves_no_process_in_the_middle_of_a_step() -> None:
    class Interrupted(RemoteEnv):
        def begin_step(self, action: Any) -> None:
            super().begin_step(action)
            if self is envs[1] and not interrupted:
                interrupted.append(True)
                raise KeyboardInterrupt

    interrupted: list[bool] = []
    envs = Interrupted.several([partial(make_task, "CartPoleRL", 2)] * 3)
    with RemoteGroups(envs) as env:
        env.reset(seed=0)
        with pytest.raises(KeyboardInterrupt):
            env.step(torch.zeros(6, 1))
        assert env.step(torch.zeros(6, 1))[1].shape == (6,)


def slow_task(seconds: float, task: str) -> VecEnv:
    time.sleep(seconds)
    return make_task(task, 2)


def test_who_fails_first_is_told_of_first() -> None:
    began = time.perf_counter()
    with pytest.raises(UnknownNameError, match="CartPoleRL"):
        RemoteEnv.several([partial(slow_task, 60.0, "CartPoleRL"), partial(slow_task, 0.0, "CartPolRL")])
    assert time.perf_counter() - began < 30.0  # not a minute


def test_groups_of_processes_are_recognised() -> None:
    with GroupedEnv(RemoteEnv.several([partial(make_task, "CartPoleRL", 2)] * 2)) as env:
        assert isinstance(env, RemoteGroups)


def test_cores_are_shared_between_processes() -> None:
    assert [share.gym_config["num_threads"] for share in shares({"num_threads": 8}, 4)] == [2] * 4
    assert [share.gym_config["num_threads"] for share in shares({"num_threads": 2}, 4)] == [1] * 4
    alone = max(1, available_cores() // 2)
    assert [share.gym_config["num_threads"] for share in shares({}, 2)] == [alone] * 2


def shares(changes: dict[str, Any], processes: int) -> list[Any]:
    """Return what the processes of an EnvMaker are asked to make."""
    asked: list[Any] = []

    class Noted(RemoteEnv):
        @classmethod
        def several(cls, makes: Any) -> Any:
            asked.extend(makes)
            raise KeyboardInterrupt

    maker = EnvMaker({"id": "CartPoleRL", "num_envs": 8} | changes, processes=processes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collection, "RemoteEnv", Noted)
        with pytest.raises(KeyboardInterrupt):
            maker()
    return asked


def test_a_trusted_module_beside_the_config_is_found_by_other_processes(tmp_path: Path) -> None:
    (tmp_path / "beside_config.py").write_text(TASK)
    config = {
        "trainer": {"gym_config": {"id": "BesideConfigRL"}, "num_envs": 4, "buffer_size": 8, "iterations": 1},
        "policy": {"name": "actor_critic"},
        "algorithm": {"name": "ppo", "cfg": {}},
    }
    (tmp_path / "train.json").write_text(json.dumps(config))
    words = ["--trainer.collector.env_processes", "2", "--trainer.run_dir", str(tmp_path / "run")]
    words += ["--trainer.enable_eval", "false"]
    quiet = Console(quiet=True)
    result = train_from_config(tmp_path / "train.json", words, trusted_modules=["beside_config"], console=quiet)
    assert result.global_step == 32


def test_if_one_of_several_cannot_be_made_none_is_left() -> None:
    made: list[RemoteEnv] = []

    class Noted(RemoteEnv):
        def _start(self, make: Callable[[], VecEnv]) -> None:
            super()._start(make)
            made.append(self)

    with pytest.raises(UnknownNameError, match="CartPoleRL"):
        Noted.several([partial(make_task, name, 2) for name in ("CartPoleRL", "CartPolRL", "CartPoleRL")])
    assert len(made) == 3
    assert not any(alive(env.pid) for env in made)


class Prepared(ScriptedEnv):
    """Tells how often it was prepared; the second time fails."""

    prepared = 0
    action_manager = ActionManager("move", gym.spaces.Box(-1.0, 1.0, (1,)), 2, "cpu")

    def prepare(self) -> None:
        self.prepared += 1
        if self.prepared == 2:
            raise RuntimeError("not now")

    def reset(self, seed: int | Tensor | None = None, env_ids: EnvIds = None) -> tuple[TensorDict, dict[str, Any]]:
        return super().reset(seed, env_ids)[0], {"prepared": torch.tensor([self.prepared] * self.num_envs)}


def test_environments_are_prepared_after_a_step() -> None:
    with RemoteEnv(partial(Prepared, 2)) as env:
        for asked in range(4):
            assert env.reset()[1]["prepared"].tolist() == [asked, asked]
            env.get_state()
            env.step(torch.zeros(2, 1))
            time.sleep(0.1)  # nobody asks: it has time


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
    assert not alive(env.pid)


def test_a_group_that_is_killed_ends_the_rollout_and_leaves_the_others_in_step() -> None:
    remote = RemoteEnv(partial(make_task, "CartPoleRL", 2))
    other = RemoteEnv(partial(make_task, "CartPoleRL", 2))
    block = {"name": "actor_critic", "actor": {"type": "mlp", "hidden_sizes": [16]}, "critic": {"type": "mlp"}}
    with RemoteGroups([remote, other]) as env:
        policy = build_policy(block, env.observation_space, env.action_space, "cpu")
        collector = SyncCollector(env, policy, "cpu", pipeline_stages=2)
        collector.reset(seed=1)
        collector.collect(4)
        os.kill(remote.pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match="killed by SIGKILL"):
            collector.collect(4)
        assert_same(other.set_state(other.get_state()), other.reset(env_ids=[])[0])  # answers to these questions


class Patient(ScriptedEnv):
    """Takes a while for a step, without any work."""

    action_manager = ActionManager("move", gym.spaces.Box(-1.0, 1.0, (1,)), 2, "cpu")

    def step(self, action: Tensor) -> StepResult:
        time.sleep(0.2)
        return super().step(action)


class Drawing(Patient):
    """Draws from the global generators, which no environment should."""

    def reset(self, seed: int | Tensor | None = None, env_ids: EnvIds = None) -> tuple[TensorDict, dict[str, Any]]:
        return super().reset(seed, env_ids)[0], {"drawn": torch.rand(2)}


def test_groups_in_processes_are_stepped_side_by_side() -> None:
    with RemoteGroups(RemoteEnv.several([partial(Patient, 2)] * 4)) as env:
        env.reset(seed=0)
        action = torch.zeros(8, *(env.action_space.shape or ()))
        env.step(action)
        began = time.perf_counter()
        env.groups[0].step(action[:2])
        alone = time.perf_counter() - began
        env.step(action)
        assert time.perf_counter() - began - alone < 2.5 * alone  # not four times


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


def test_messages_of_all_sizes_go_through_the_same_memory() -> None:
    mine, other = Mail.pair()
    for count in (3, 100_000, 0, 7, 200_000, 5):
        sent = {"numbers": torch.arange(count), "flags": torch.rand(count) > 0.5, "words": ["a", None, 1.5]}
        assert mine.send("question", sent)
        title, received = other.receive()
        assert title == "question"
        assert received["words"] == sent["words"]
        assert torch.equal(received["numbers"], sent["numbers"])
        assert torch.equal(received["flags"], sent["flags"])
        assert other.send("answer", received["numbers"] * 2)
        kept = mine.receive()[1]
        other.send("more", kept + 1)
        assert torch.equal(kept, sent["numbers"] * 2)  # what was received is not written to again
        mine.receive()
    other.close()
    with pytest.raises(EOFError):
        mine.receive()
    mine.close()


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
    time.sleep(0.2)
    env.close()
    thread.join(10)
    assert not thread.is_alive()
    assert "closed meanwhile" in str(failures[0])
    assert not alive(env.pid)


def test_a_run_with_processes_learns_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs, made = [], []

    class Counted(RemoteEnv):
        def _start(self, make: Callable[[], VecEnv]) -> None:
            made.append(make)
            super()._start(make)

    monkeypatch.setattr(collection, "RemoteEnv", Counted)
    for processes in ("0", "2"):
        settings = {"num_envs": 8, "buffer_size": 16, "total_steps": 384, "eval_freq": 0, "target_return": "null"}
        settings |= {"run_dir": str(tmp_path / processes), "collector.pipeline_stages": 2}
        settings["collector.env_processes"] = processes
        words = [word for name, value in settings.items() for word in (f"--trainer.{name}", str(value))]
        train_from_config(CONFIG, words, console=Console(quiet=True))
        lines = read_metrics(tmp_path / processes / "metrics.jsonl")
        logs.append([{name: line[name] for name in line if "time/" not in name} for line in lines if "step" in line])
    assert len(made) == 2  # of the second run
    assert logs[0] == logs[1]
    assert [line["step"] for line in logs[0][:3]] == [128, 256, 384]


def interrupted(env: VecEnv, after: float) -> None:
    """Step, and press Ctrl-C meanwhile."""
    timer = threading.Timer(after, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        env.step(torch.zeros(2, 1))
    timer.join()


def count(env: VecEnv) -> list[float]:
    steps: list[float] = env.step(torch.zeros(2, 1))[0]["object", "step"].flatten().tolist()
    return steps


def test_an_answer_that_was_interrupted_is_not_taken_for_the_next() -> None:
    with RemoteEnv(partial(Patient, 2)) as env:
        env.reset(seed=0)
        interrupted(env, 0.1)
        assert count(env) == [2, 2]
        for after in (0.1, 0.02, 0.05, 0.15, 0.1):  # also while it waits for the answer to the one before
            interrupted(env, after)
        first = count(env)
        assert count(env) == [first[0] + 1] * 2
        assert env.reset(env_ids=[1])[0]["object", "step"].flatten().tolist() == [first[0] + 1, 0]


def test_closing_in_a_signal_handler_ends_the_step() -> None:
    env = RemoteEnv(partial(Patient, 2))
    env.reset(seed=0)
    before = signal.signal(signal.SIGUSR1, lambda *_: env.close())
    try:
        timer = threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGUSR1])
        timer.start()
        with pytest.raises(EnvContractError, match="closed meanwhile"):
            env.step(torch.zeros(2, 1))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not alive(env.pid)


def test_it_ends_with_its_program(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        pid = int(program.stdout.readline())
        assert alive(pid)
        program.kill()
    ends = time.monotonic() + 20
    while alive(pid) and time.monotonic() < ends:
        time.sleep(0.05)
    assert not alive(pid)


def test_what_a_step_returns_is_kept_piece_by_piece() -> None:
    with RemoteEnv(partial(make_task, "PushCubeRL", 2, cameras=True)) as env:
        env.reset(seed=0)
        obs, reward, *_ = env.step(torch.zeros(2, *(env.action_space.shape or ())))
        assert reward.untyped_storage().nbytes() == 8
        assert obs["image", "side"].untyped_storage().nbytes() == 2 * 16 * 24 * 3


def test_a_message_that_could_not_be_sent_changes_nothing() -> None:
    mine, other = Mail.pair()
    mine.send("small", torch.arange(4))
    assert other.receive()[1].tolist() == [0, 1, 2, 3]
    heard: list[tuple[str, Tensor]] = []
    thread = threading.Thread(target=lambda: heard.append(other.receive()))  # it also answers that all is well
    thread.start()
    with pytest.raises(OSError, match="too long"):
        mine.send("large", [torch.arange(100_000), "x" * 10_000_000])
    mine.send("small", torch.arange(4) + 100)
    thread.join()
    assert heard[0][1].tolist() == [100, 101, 102, 103]
    received = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    other.send("half", received)
    assert torch.equal(mine.receive()[1], received)
    mine.close()
    other.close()


def test_a_type_that_numpy_learned_of_elsewhere_comes_through() -> None:
    pytest.importorskip("ml_dtypes")  # numpy knows bfloat16 from then on, torch does not know numpy's
    mine, other = Mail.pair()
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.uint16):
        sent = torch.tensor([1, 2]).to(dtype)
        other.send("number", [sent, torch.empty(0, 3, dtype=dtype)])
        received, nothing = mine.receive()[1]
        assert torch.equal(received.view(torch.uint8), sent.view(torch.uint8))
        assert (nothing.shape, nothing.dtype) == ((0, 3), dtype)
    mine.close()
    other.close()


def test_who_does_not_read_is_not_waited_for() -> None:
    mine, other = Channel.pair()
    sent = 0
    while mine.send({"words": "x" * 10_000}):
        sent += 1
        assert sent < 10_000
    assert sent > 0
    mine.close()
    other.close()


def test_global_random_numbers_differ_between_processes() -> None:
    with RemoteEnv(partial(Drawing, 2)) as one, RemoteEnv(partial(Drawing, 2)) as two:
        first, second = (env.reset()[1]["drawn"] for env in (one, two))
    assert not torch.equal(first, second)


def test_contradictions_are_told_before_a_run_begins(tmp_path: Path) -> None:
    words = ["--trainer.model_type", "vla", "--trainer.collector.worker", "process", "--trainer.num_envs", "7"]
    words += ["--trainer.collector.env_processes", "3", "--trainer.collector.pipeline_stages", "2"]
    with pytest.raises(ConfigError) as caught:
        train_from_config(CONFIG, [*words, "--trainer.run_dir", str(tmp_path / "run")], console=Console(quiet=True))
    assert "env_processes needs worker 'thread'" in str(caught.value)
    assert "trainer.num_envs: expected a multiple of the 2 pipeline_stages, got 7" in str(caught.value)
    assert "trainer.num_envs: expected a multiple of the 3 env_processes, got 7" in str(caught.value)
    assert "trainer.collector.env_processes: expected a multiple of the 2 pipeline_stages, got 3" in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_processes_need_a_thread_to_ask_them() -> None:
    with pytest.raises(ConfigError, match="env_processes needs worker 'thread'"):
        AsyncCfg(worker="process", env_processes=1).check()
    with make_task("CartPoleRL", 2) as plain:
        policy = build_policy({"name": "actor_critic"}, plain.observation_space, plain.action_space, "cpu")
        with pytest.raises(ConfigError, match="RemoteGroups of RemoteEnvs"):
            AsyncCollector(plain, policy, VLABuffer(64, "cpu"), "cpu", cfg=AsyncCfg(env_processes=2))
    maker = EnvMaker({"id": "CartPoleRL", "num_envs": 4}, num_groups=2, processes=2)
    with maker() as env:
        assert {type(group).__name__ for group in env.groups} == {"RemoteEnv"}
        assert in_chunks(env, 4).action_space.shape == (4, 1)
