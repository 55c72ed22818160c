"""Shipped configs and command lines, mutated at random: every command ends well or says in a message what is wrong.

Commands run in this process up to the point where all is built: nothing is trained, streamed, recorded or filmed. More
cases than the suite has time for::

    python -m tests.faults.test_fuzz --cases 2000 --seed 1 [COMMAND ...]
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from embodichain.cli import main as cli
from embodichain.config import load_config

ROOT = Path(__file__).parents[2]
RL, STREAM = ROOT / "configs" / "agents" / "rl", ROOT / "configs" / "agents" / "stream"
TRAINED = [RL / "basic/cart_pole", RL / "push_cube", RL / "reach", RL / "gymnasium/hopper"]
SECONDS = 60
"""After which a case counts as hung."""
MEMORY = 8 << 30
"""Address space that a case may take beyond what the process has: a config asks for no more, or is refused."""
NUMBERS = (-1, 0, 1, 2, 7, 0.5, -0.5, 1e-300, 1e308, 10**5, 10**9, 2**31, 2**40, 2**63, 10**30, 10**400)
VALUES: tuple[Any, ...] = (
    *NUMBERS, None, True, False, float("nan"), float("inf"), "", "x", "cpu", "cuda", "cuda:7", "mps", "meta", "null",
    "1", "a/b", "../x", "a\0b", "x" * 300, "é", "{}", [], {}, [[]], [1, 2], ["x"], {"a": 1}, {"name": []}, [{}],
    [None], [10**9],
)  # fmt: skip
WORDS = (
    *(str(value) for value in NUMBERS), "", "x", "null", "true", "nan", "inf", "-", "--", "--x", "--x=1", "-1e9", "[",
    "]", "{", "{a: 1}", "[1, 2]", "[{}]", "&a [*a]", "!!python/none", "\t", "\0", "x" * 300, "é", "mps", "meta", "cuda",
    "/proc", "..", "/dev/null", "/proc/self/mem", "no_such_file.json", "CartPoleRL", "CartPole-v1", "a:b", "=", "--=",
    "--trainer=3", "--policy=[1]", "--policy=[[a, 1]]", "--policy.actor=3", "--policy.actor.network_cfg=[64]",
    "--trainer.device=mps", "--trainer.collect_threads=1000000000", "--trainer.update_threads=9999999999999999999",
    "--trainer.buffer_size=10000000000", "--trainer.num_envs=1000000000000", "--algorithm.cfg.batch_size=1e9",
    "--algorithm=x", "--algorithm.cfg=[]", "--trainer.gym_config={}", "--trainer.collector=x",
    "--trainer.collector={}", "--trainer.import_modules=[os]", "--trust", "--help", "--resume", "--config",
    "--num_workers=100000", "--buffer_size=1000000000000", "--gym_config=3", "--seed=-1", "--out=/proc/x",
    "--action_config={source: policy, path: /}", "--episodes=0",
)  # fmt: skip
SIMILAR: dict[type, Callable[[random.Random, Any], Any]] = {
    bool: lambda chance, value: not value,
    int: lambda chance, value: chance.choice((value + 1, value * 2, value // 2, value * 10, -value, 3, 5)),
    float: lambda chance, value: chance.choice((value * 10, value / 10, -value, value * 1e6, 0.0, 1, 7)),
    str: lambda chance, value: chance.choice((value.upper(), value[:-1], value + value[-1:], value.replace("_", "-"))),
}
"""Values like those that were there, most of which are valid."""


class Case:
    """One run of a command on mutated input."""

    def __init__(self, seed: int, command: str, folder: Path) -> None:
        self.random, self.command, self.folder = random.Random(f"{command} {seed}"), command, folder
        (folder / "cwd").mkdir(parents=True, exist_ok=True)
        self.words = COMMANDS[command](self)
        if self.random.random() < 0.4:
            self._mutate_words()

    def config(self, file: Path) -> str:
        """Return the path of a copy of a config, mutated more often than not; what is beside it is copied, too."""
        for other in sorted(file.parent.glob("*.json")):
            data = load_config(other)
            if other == file or self.random.random() < 0.3:
                for _ in range(self.random.choice((0, 1, 1, 2))):
                    self._mutate(data)
            (self.folder / other.name).write_text(json.dumps(data))
        return str(self.folder / file.name)

    def _mutate(self, data: Any) -> None:
        places = list(_places(data))
        if not places:
            return
        holder, key = self.random.choice(places)
        way = self.random.random()
        if way < 0.35 and type(holder[key]) in SIMILAR:
            holder[key] = SIMILAR[type(holder[key])](self.random, holder[key])
        elif way < 0.65:
            holder[key] = copy.deepcopy(self.random.choice(VALUES))
        elif way < 0.75:
            del holder[key]
        elif way < 0.85:
            other, name = self.random.choice(places)
            holder[key] = copy.deepcopy(other[name])
        elif way < 0.95 and isinstance(holder, dict):
            holder[self.random.choice((f"{key}s", "", "id", "name", "cfg", "é", "a.b"))] = holder.pop(key)
        else:
            holder[key] = {key: copy.deepcopy(holder[key])} if isinstance(holder, dict) else [holder[key]]

    def _mutate_words(self) -> None:
        for _ in range(self.random.choice((1, 1, 2))):
            at, way = self.random.randrange(len(self.words) + 1), self.random.random()
            if way < 0.5 or at == len(self.words):
                self.words.insert(at, self.random.choice(WORDS))
            elif way < 0.85:
                self.words[at] = self.random.choice(WORDS)
            else:
                del self.words[at]

    def run(self) -> str | None:
        """Return what went wrong: a traceback, or that it hung; ``None`` if all is well."""
        output = io.StringIO()
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(contextlib.chdir(self.folder / "cwd"))  # a word may become the name of a folder
                stack.enter_context(contextlib.redirect_stdout(output))
                stack.enter_context(contextlib.redirect_stderr(output))
                stack.enter_context(bounded())
                code = cli.main([self.command, *self.words])
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 2
        except BaseException:  # noqa: BLE001 - that is what is looked for
            return traceback.format_exc(limit=-6)
        said = output.getvalue()
        if code not in (0, 1, 2):
            return f"ended with {code}: {said[-500:]}"
        if code and ("Traceback" in said or not said.strip()):
            return f"ended with {code} and said {said[-1500:]!r}"
        return None


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    for key, value in list(
        data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    ):
        yield data, key
        yield from _places(value)


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Bound time and memory inside the block."""

    def hangs(*_: object) -> None:
        raise TimeoutError(f"it has not ended after {SECONDS} seconds")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, hangs)
    threads = torch.get_num_threads()
    signal.alarm(SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        torch.set_num_threads(threads)


# --- commands -----------------------------------------------------------------------------------------------------


def _train(case: Case) -> list[str]:
    folder = case.random.choice(TRAINED)
    needed = ("gpu", "distill")  # a GPU, and the run of a teacher
    files = [file for file in sorted(folder.glob("train_config*.json")) if not any(n in file.name for n in needed)]
    file = case.random.choice(files)
    words = [case.config(file), "--trainer.output_dir", str(case.folder / "runs")]
    small = ["--trainer.num_envs", "8", "--trainer.buffer_size", "4", "--trainer.num_eval_envs", "2"]
    return words if case.random.random() < 0.3 else words + small


def _stream(case: Case) -> list[str]:
    if case.random.random() < 0.3:
        return [
            case.random.choice(("CartPoleRL", "PushCubeRL", "CartPole-v1")),
            "--duration",
            "1",
            "--buffer_size",
            "16",
        ]
    if case.random.random() < 0.5:
        return [case.config(RL / "push_cube" / "gym_config.json"), "--num_workers", "2"]
    settings = load_config(STREAM / "push_cube.json") | {"gym_config": "gym_config.json"}
    case.config(RL / "push_cube" / "gym_config.json")
    for _ in range(case.random.choice((0, 1, 2))):
        case._mutate(settings)
    (case.folder / "stream.json").write_text(json.dumps(settings))
    return [str(case.folder / "stream.json"), "--duration", "1"]


def _record(case: Case) -> list[str]:
    return [_stream(case)[0], "--out", str(case.folder / "out"), "--episodes", "2"]


def _play(case: Case) -> list[str]:
    name = case.random.choice(("CartPoleRL", "ReachRL", "CartPole-v1"))
    words = [name, "--episodes", "3", "--num-envs", "2", "--policy", "random"]
    if name == "CartPoleRL" and case.random.random() < 0.8:
        words += ["--config", case.config(RL / "basic/cart_pole" / "gym_config.json")]
    return words


def _envs(case: Case) -> list[str]:
    words = ["check", case.random.choice(("CartPoleRL", "CartPole-v1")), "--num-envs", "2", "--max-steps", "3"]
    return words if case.random.random() < 0.8 else ["list", "--gymnasium"]


def _on_run(*options: str) -> Callable[[Case], list[str]]:
    def words(case: Case) -> list[str]:
        run = case.folder.parent / "run"
        return [str(run), *(option.format(folder=case.folder) for option in options)]

    return words


def _demo(case: Case) -> list[str]:
    return ["--output", str(case.folder / "demo"), "--episodes", "2", "--num-envs", "2"]


COMMANDS: dict[str, Callable[[Case], list[str]]] = {
    "train": _train,
    "stream": _stream,
    "record": _record,
    "play": _play,
    "envs": _envs,
    "eval": _on_run("--episodes", "2", "--num-envs", "1", "--output", "{folder}/figures.json"),
    "export": _on_run("--onnx", "{folder}/policy.onnx"),
    "demo": _demo,
}


@contextlib.contextmanager
def built_only() -> Iterator[None]:
    """Let commands build everything and run nothing."""
    from embodichain.agents.datasets import lerobot
    from embodichain.agents.engine import OnlineDataEngine, sources
    from embodichain.agents.engine.shared_buffer import SharedBuffer
    from embodichain.agents.rl import export
    from embodichain.agents.rl.trainer import Trainer, TrainingResult
    from embodichain.cli import demo, play, stream
    from embodichain.envs import checker
    from embodichain.utils.torch_runtime import torch_threads

    def start(engine: OnlineDataEngine) -> None:
        with contextlib.closing(sources.open_source(engine.cfg)) as source:
            length = engine.cfg.max_episode_steps or source.max_steps
            SharedBuffer(source.layout, engine.cfg.buffer_size, length, engine.cfg.num_workers)

    def train(trainer: Trainer) -> TrainingResult:
        settings = trainer.cfg.trainer
        try:
            trainer.collector.reset(seed=settings.seed)
            if trainer.env.num_envs * settings.buffer_size <= 64 and settings.collector.mode == "sync":
                rollout = trainer.collector.collect(settings.buffer_size)
                with torch_threads(settings.update_threads):
                    trainer.algorithm.update(rollout)
        finally:
            trainer.collector.stop()
        return TrainingResult(trainer.folder.path, 0, 0, 1.0, "iterations", None)

    class Writer:
        fps = 30

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pass

        __enter__ = __exit__ = lambda self, *_: self

    replaced: list[tuple[Any, str, Any]] = [
        (OnlineDataEngine, "start", start),
        (Trainer, "train", train),
        (stream, "watch", lambda *_: None),
        (lerobot, "LeRobotWriter", Writer),
        (lerobot, "record", lambda *_: []),
        (export, "export_onnx", lambda *_: "written"),
        (checker, "run_checks", lambda env, *_: env.close() or []),
    ]
    for module in (play, demo):
        replaced += [(module, "watch_episodes", lambda *_: ([], 1.0)), (module, "print_summary", lambda *_: None)]
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, stand_in in replaced:
            patch.setattr(owner, name, stand_in)
        yield


def make_run(folder: Path) -> None:
    """Train for one iteration, so that there is a run."""
    from embodichain.agents.rl.train import train_from_config

    small = ["--trainer.num_envs", "2", "--trainer.buffer_size", "2", "--trainer.iterations", "1"]
    quiet = ["--trainer.enable_eval", "false", "--trainer.target_return", "null", "--trainer.run_dir", str(folder)]
    train_from_config(RL / "basic/cart_pole/train_config.json", small + quiet)


def failures(commands: Sequence[str], cases: int, seed: int, folder: Path) -> Iterator[str]:
    """Run cases of each command; yield a report of each that fails."""
    with contextlib.redirect_stderr(io.StringIO()):
        make_run(folder / "run")
    with built_only():
        for command in commands:
            for number in range(seed * cases, (seed + 1) * cases):
                case = Case(number, command, folder / f"{command}_{number}")
                began = time.perf_counter()
                problem = case.run()
                took = time.perf_counter() - began
                if problem is not None:
                    yield f"{command} case {number} ({took:.1f} s): {case.words}\n{problem}"


@pytest.mark.parametrize("command", COMMANDS)
def test_input_as_it_is_ends_well(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this, a mutated input might fail for another reason than its mutation."""
    monkeypatch.setattr(Case, "_mutate", lambda *_: None)
    monkeypatch.setattr(Case, "_mutate_words", lambda *_: None)
    with contextlib.redirect_stderr(io.StringIO()):
        make_run(tmp_path / "run")
    with built_only():
        for number in range(4):
            case, output = Case(number, command, tmp_path / str(number)), io.StringIO()
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), bounded():
                assert cli.main([command, *case.words]) == 0, output.getvalue()


@pytest.mark.parametrize("command", COMMANDS)
def test_mutated_input_never_ends_in_a_traceback_or_a_hang(command: str, tmp_path: Path) -> None:
    count = {"train": 120, "stream": 60, "record": 40}.get(command, 30)
    assert list(failures([command], count, 0, tmp_path)) == []


CART_POLE, VLA = RL / "basic/cart_pole/train_config.json", RL / "push_cube/train_config_vla.json"
HUGE = "1" + "0" * 30


@pytest.mark.parametrize(
    ("file", "flag", "said"),
    [
        (CART_POLE, "--policy=[1]", "policy: expected a mapping"),
        (CART_POLE, "--policy={name: actor_critic, cfg: 3}", "cfg: expected a mapping, got 3"),
        (CART_POLE, "--policy.actor=3", "policy.actor: expected a mapping|actor: expected a mapping"),
        (CART_POLE, "--policy.actor.network_cfg=[64]", r"network_cfg: expected a mapping .*got \[64\] \(list\)"),
        (CART_POLE, "--policy.actor.network_cfg=x", "network_cfg: expected a mapping .*got 'x'"),
        (CART_POLE, "--policy.actor.network_cfg.hidden_sizes=[1000000000]", "hidden_sizes.0: expected less .* 16384"),
        (CART_POLE, f"--policy.actor.network_cfg.hidden_sizes=[{HUGE}]", "hidden_sizes.0: expected less .* 16384"),
        (CART_POLE, f"--policy.actor.network_cfg.hidden_sizes={[16384] * 64}", "hidden_sizes: .* bytes, and "),
        (CART_POLE, f"--policy.actor.network_cfg.hidden_sizes={[1] * 300}", "hidden_sizes: expected .* 256 entries"),
        (CART_POLE, "--trainer.buffer_size=1000000000000", "trainer.buffer_size: expected less .* 16777216"),
        (CART_POLE, "--trainer.buffer_size=16777216", "trainer.buffer_size: 1 rollout.*need .*iB, but .* are free"),
        (CART_POLE, "--trainer.num_envs=1000000000", "trainer.num_envs: expected less .* 1048576"),
        (CART_POLE, f"--trainer.num_envs={HUGE}", "trainer.num_envs: expected less .* 1048576"),
        (CART_POLE, "--trainer.num_eval_envs=1000000000", "trainer.num_eval_envs: expected less .* 1048576"),
        (CART_POLE, "--trainer.collect_threads=1000000000", "trainer.collect_threads: expected less .* 1024"),
        (CART_POLE, f"--trainer.update_threads={HUGE}", "trainer.update_threads: expected less .* 1024"),
        (CART_POLE, f"--trainer.gym_config.num_threads={HUGE}", "num_threads: expected less .* 1024"),
        (CART_POLE, f"--trainer.gym_config.max_episode_steps={HUGE}", "max_episode_steps: expected less .* 9007199254"),
        (CART_POLE, f"--trainer.total_steps={HUGE}", "trainer.total_steps: expected less .* 9007199254"),
        (CART_POLE, "--trainer.device=mps", "trainer.device: expected 'cpu', or another device .*got 'mps'"),
        (CART_POLE, "--trainer.device=meta", "trainer.device: expected 'cpu', or another device .*got 'meta'"),
        (CART_POLE, "--algorithm.cfg.device=mps", "algorithm.cfg.device: expected 'cpu', or another device"),
        (CART_POLE, "--trainer.gym_config.device=mps", "device: .*cpu|cuda"),
        (VLA, "--policy.vla_config.model_config.cameras=3", "cameras: expected a list of names, got 3"),
        (VLA, "--policy.vla_config.model_config.proprio=3", "proprio: expected a list of names, got 3"),
        (VLA, "--policy.vla_config.model_config.chunk_size=1000000000", "chunk_size: expected less .* 16384"),
        (VLA, "--policy.vla_config.model_config={cameras: [front], depth: 1000000}", "depth: expected less .* 256"),
        (VLA, "--policy.vla_config.model_config={cameras: [front], width: 1000000}", "width: expected less .* 16384"),
    ],
)  # fmt: skip
def test_what_no_machine_has_is_refused_by_its_key(file: Path, flag: str, said: str, tmp_path: Path) -> None:
    small = ["--trainer.output_dir", str(tmp_path), "--trainer.enable_eval=false", "--trainer.target_return=null"]
    if ".num_envs" not in flag and "num_envs:" not in flag:
        small += ["--trainer.num_envs", "4" if "buffer_size" not in flag else "1024"]
    output = io.StringIO()
    with built_only(), contextlib.redirect_stderr(output), bounded():
        assert cli.main(["train", str(file), *small, flag]) == cli.EXIT_USAGE
    assert re.search(said, output.getvalue())
    assert len(output.getvalue().splitlines()) <= 4


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("commands", nargs="*", default=list(COMMANDS))
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        count, began = 0, time.monotonic()
        for report in failures(args.commands, args.cases, args.seed, Path(name)):
            print(f"--- {report}", flush=True)
            count += 1
        print(f"{count} of {args.cases * len(args.commands)} failed in {time.monotonic() - began:.0f} s")
        sys.exit(bool(count))
