"""Several processes that simulate: side by side, in groups that take turns, and in a training."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from embodichain.agents.rl import train as collection
from embodichain.agents.rl.algo import PPO
from embodichain.agents.rl.buffer import VLABuffer
from embodichain.agents.rl.collector import AsyncCfg, AsyncCollector, SyncCollector
from embodichain.agents.rl.collector.recovery import EnvRecovery
from embodichain.agents.rl.collector.remote_env import RemoteEnv
from embodichain.agents.rl.models import build_policy
from embodichain.agents.rl.runs import read_metrics
from embodichain.agents.rl.train import EnvMaker, in_chunks, resume_training, train_from_config
from embodichain.agents.rl.trainer import Trainer
from embodichain.agents.rl.utils.distributed import Ranks
from embodichain.envs import registration
from embodichain.envs.physics.mujoco_cpu import available_cores
from embodichain.envs.vec_env import StepResult, VecEnv
from embodichain.envs.wrappers import GroupedEnv, RemoteGroups, arrange, make_grouped
from embodichain.errors import CollectorError, ConfigError, EnvContractError, UnknownNameError, WorkerError
from tests.agents.rl.remote_cases import Patient, assert_same, make_task
from tests.agents.rl.training_cases import write_config
from tests.programs import is_alive, wait_until

TASK = """
from embodichain.envs.registration import register_task
from embodichain.envs.tasks.cart_pole import CartPole

register_task("BesideConfigRL", CartPole)
"""


CONFIG = Path(__file__).parents[3] / "configs/agents/rl/basic/cart_pole/train_config.json"


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
        RemoteEnv.several([partial(slow_task, 250.0, "CartPoleRL"), partial(slow_task, 0.0, "CartPolRL")])
    assert time.perf_counter() - began < 200.0  # the other one was not waited for


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
        def several(cls, makes: Any, **_: float) -> Any:
            asked.extend(makes)
            raise KeyboardInterrupt

    maker = EnvMaker({"id": "CartPoleRL", "num_envs": 8} | changes, processes=processes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collection, "RemoteEnv", Noted)
        with pytest.raises(KeyboardInterrupt):
            maker()
    return asked


def test_a_trusted_module_beside_the_config_is_found_by_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "_TASKS", dict(registration._TASKS))  # as it was, afterwards
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
        def _start(self, make: Callable[[], VecEnv], *timeouts: float) -> None:
            super()._start(make, *timeouts)
            made.append(self)

    with pytest.raises(UnknownNameError, match="CartPoleRL"):
        Noted.several([partial(make_task, name, 2) for name in ("CartPoleRL", "CartPolRL", "CartPoleRL")])
    assert len(made) == 3
    assert not any(is_alive(env.pid) for env in made)


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


class Unsteady(Patient):
    """Makes trouble in its third step, in the first process that gets that far."""

    def __init__(self, trouble: str, mark: str) -> None:
        super().__init__(2)
        self.trouble, self.mark = trouble, Path(mark)

    def step(self, action: Tensor) -> StepResult:
        if self.resets and self.count.max() >= 2 and self._is_first():
            if self.trouble == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if self.trouble == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the gripper fell off")
        return super().step(action)

    def _is_first(self) -> bool:
        try:
            self.mark.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("trouble", ["raise", "kill", "stop"])
def test_a_process_that_fails_is_replaced_and_the_others_stay(
    trouble: str, stages: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    maker = partial(Unsteady, trouble, str(tmp_path / "mark"))
    block = {"name": "actor_critic", "actor": {"type": "mlp", "hidden_sizes": [16]}, "critic": {"type": "mlp"}}
    with arrange(RemoteEnv.several([maker] * 2, step_timeout=4.0 if trouble == "stop" else 60.0), stages) as env:
        assert isinstance(env, RemoteGroups)
        policy = build_policy(block, env.observation_space, env.action_space, "cpu")
        collector = SyncCollector(env, policy, "cpu", pipeline_stages=stages)
        collector.recovery = EnvRecovery(max_restarts=1)
        collector.reset(seed=1)
        before = [group.pid for group in env.groups]
        rollout = collector.collect(4)
        after = [group.pid for group in env.groups]
        assert rollout["observation", "object", "step"][..., 0].tolist() == [[0.0, 1.0, 2.0, 3.0]] * 4
        assert sum(pid in before for pid in after) == 1
        assert [is_alive(pid) for pid in before] == [pid in after for pid in before]
        assert len(caplog.records) == 1
        told = {"raise": "the gripper fell off", "kill": "was killed by SIGKILL", "stop": r"not answered for 4 s"}
        assert told[trouble] in caplog.text
        assert caplog.text.count("Traceback") == (trouble == "raise")  # that of the process
        (tmp_path / "mark").unlink()
        with pytest.raises(CollectorError, match=rf"(?s)the environment raised .*{told[trouble]}.*after 1 repl"):
            collector.collect(4)
    assert not any(map(is_alive, after))


def test_a_run_goes_on_when_processes_of_its_environments_die_at_any_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One dies in a rollout, one while the policy learns, and one before a checkpoint is saved."""
    made: list[RemoteEnv] = []
    killed: list[str] = []

    def kill_before(owner: Any, name: str, number: int) -> None:
        method, calls = getattr(owner, name), itertools.count()

        def patched(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == number:
                killed.append(name)
                os.kill(made[0].pid, signal.SIGKILL)
            return method(*args, **kwargs)

        monkeypatch.setattr(owner, name, patched)

    class Noted(RemoteEnv):
        def _wait_until_built(self, waited: bool = False) -> None:
            super()._wait_until_built(waited)
            made.insert(0, self)

    monkeypatch.setattr(collection, "RemoteEnv", Noted)
    kill_before(PPO, "update", 1)
    kill_before(RemoteEnv, "finish_step", 70)
    kill_before(Trainer, "save_checkpoint", 1)
    settings = {"num_envs": 8, "buffer_size": 16, "total_steps": 640, "eval_freq": 0, "target_return": "null"}
    settings |= {"run_dir": str(tmp_path / "run"), "collector.env_processes": 2, "enable_eval": "false"}
    words = [word for name, value in settings.items() for word in (f"--trainer.{name}", str(value))]
    result = train_from_config(CONFIG, words, console=Console(quiet=True))
    assert result.global_step == 640
    assert sorted(killed) == ["finish_step", "save_checkpoint", "update"]
    assert caplog.text.count("was killed by SIGKILL; replacing it") == 3
    assert not any(is_alive(env.pid) for env in made)


class Meeting(Patient):
    """Ends a step only when so many processes are in theirs; ``folder`` is where they are noted."""

    def __init__(self, folder: str, count: int) -> None:
        super().__init__(2)
        self.folder, self.others, self.taken = Path(folder), count, 0

    def step(self, action: Tensor) -> StepResult:
        self.taken += 1
        (self.folder / f"{self.taken}_{os.getpid()}").touch()
        wait_until(lambda: len(list(self.folder.glob(f"{self.taken}_*"))) == self.others)
        return super().step(action)


def test_groups_in_processes_are_stepped_side_by_side(tmp_path: Path) -> None:
    """One after the other, the first one would wait in vain."""
    with RemoteGroups(RemoteEnv.several([partial(Meeting, str(tmp_path), 4)] * 4)) as env:
        env.reset(seed=0)
        action = torch.zeros(8, *(env.action_space.shape or ()))
        for _ in range(2):
            env.step(action)
    assert len(list(tmp_path.iterdir())) == 2 * 4


def test_a_run_with_processes_learns_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs, made = [], []

    class Counted(RemoteEnv):
        def _start(self, make: Callable[[], VecEnv], *timeouts: float) -> None:
            made.append(make)
            super()._start(make, *timeouts)

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


def test_contradictions_are_told_before_a_run_begins(tmp_path: Path) -> None:
    words = ["--trainer.collector.mode", "async", "--trainer.collector.worker", "process", "--trainer.num_envs", "7"]
    words += ["--trainer.collector.env_processes", "3", "--trainer.collector.pipeline_stages", "2"]
    with pytest.raises(ConfigError) as caught:
        train_from_config(CONFIG, [*words, "--trainer.run_dir", str(tmp_path / "run")], console=Console(quiet=True))
    assert "env_processes needs worker 'thread'" in str(caught.value)
    assert "trainer.num_envs: expected a multiple of the 2 pipeline_stages, got 7" in str(caught.value)
    assert "trainer.num_envs: expected a multiple of the 3 env_processes, got 7" in str(caught.value)
    assert "trainer.collector.env_processes: expected a multiple of the 2 pipeline_stages, got 3" in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "changes",
    [{"env_processes": 2}, {"mode": "async"}, {"mode": "async", "worker": "process"}],
)
def test_environments_replaced_after_a_resume_begin_other_episodes(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seed of the new episodes has the iteration and the rank in it."""
    trainer = {"iterations": 3, "seed": 7, "enable_eval": False, "collector": changes}
    config = write_config(tmp_path / "c.json", tmp_path / "run", trainer=trainer)
    train_from_config(config)
    seeds: list[int | None] = []
    start = Trainer.restore

    def watched(self: Trainer, state: Any) -> None:
        start(self, state)
        if isinstance(self.collector, SyncCollector):
            assert self.collector.recovery is not None
            seeds.append(self.collector.recovery.seed)
        else:
            seeds.append(self.collector._backend._seed)

    monkeypatch.setattr(Trainer, "restore", watched)
    resume_training(tmp_path / "run", ["--trainer.iterations", "4"])
    resume_training(tmp_path / "run", ["--trainer.iterations", "4"])
    assert seeds == [7 + 3, 7 + 4]
    monkeypatch.setattr(Ranks, "seed", lambda _, common: common + 1000)
    resume_training(tmp_path / "run")
    assert seeds[2:] == [7 + 4 + 1000]


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
