"""Tasks and other parts of a user's own, in a folder with nothing else in it, through every command and from Python."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from embodichain.agents.engine import OnlineDataEngine, OnlineDataEngineCfg
from embodichain.agents.rl.train import parse_args, train_from_config
from embodichain.cli.main import main
from embodichain.cli.options import parse_options
from embodichain.cli.view import ViewArgs, _opened
from embodichain.envs import registration
from embodichain.envs.registration import make, make_to_watch
from embodichain.errors import TrustedModuleError, UnknownNameError
from embodichain.extras import check_trusted, import_trusted, locate_trusted

_NUMBERS = itertools.count()
TASK = """
import torch
from embodichain.envs.registration import register_task
from embodichain.envs.tasks.cart_pole import CartPole
from {name}_sibling import STEPS

class Own(CartPole):
    '''A pole that an expert of one line holds for a while.'''

    @staticmethod
    def default_cfg():
        return CartPole.default_cfg().replace(id="{id}", max_episode_steps=STEPS)

    def expert_action(self, scene, actions):
        from {name}_sibling import GAIN  # imported late
        return (GAIN * scene["qpos"][:, 1:] + scene["qvel"][:, 1:]).clamp(-1, 1)

register_task("{id}", Own)
"""


class Project:
    """A folder of somebody's, with a module that registers a task and another one that it imports."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name, self.id = folder, name, f"{name.title().replace('_', '')}RL"
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_text(TASK.format(name=name, id=self.id))
        (folder / f"{name}_sibling.py").write_text("STEPS, GAIN = 12, 3.0\n")

    def config(self, **trainer: object) -> Path:
        """Write a training config for the task."""
        settings = {"gym_config": self.id, "num_envs": 4, "buffer_size": 8, "iterations": 1, "num_eval_episodes": 2}
        file = self.folder / "train.json"
        block = settings | {"run_dir": str(self.folder / "run"), "eval_video": False} | trainer
        file.write_text(json.dumps({"trainer": block, "policy": {"name": "actor_critic"}}))
        return file


@pytest.fixture
def project(tmp_path, monkeypatch):
    """An empty working folder with the module of a task in it; everything is forgotten afterwards."""
    path, before = list(sys.path), set(sys.modules)
    monkeypatch.chdir(tmp_path)
    made = Project(tmp_path, f"own_{next(_NUMBERS)}")
    yield made
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if name.startswith("own_"):
            del sys.modules[name]
    registration._TASKS.pop(made.id, None)


def test_every_command_knows_the_task_of_a_trusted_module(project, capfd):
    def run(*words: str) -> str:
        code = main([*words])
        shown = capfd.readouterr()
        assert code == 0, shown.err
        return shown.out + shown.err

    assert main(["play", project.id]) == 2
    assert "--trust MODULE" in capfd.readouterr().err
    assert project.id in run("envs", "list", "--trust", project.name)
    run("robots", "list", "--trust", project.name)
    assert "the contract is kept" in run("envs", "check", "--trust", project.name, project.id, "--num_envs", "2")
    assert "mean length" in run("play", "--trust", project.name, project.id, "--episodes", "2")
    small = ["--gym_config.num_envs", "2", "--buffer_size", "2", "--duration", "0.1", "--chunk-size", "2"]
    assert "episodes" in run("stream", *small, "--trust", project.name, project.id)
    train = str(project.config())
    processes = ["--trainer.collector.env_processes", "2"]
    run("train", *processes, "--trust", project.name, train)
    shown = run("eval", "--trust", f"{project.name}.py", "run", "--episodes", "2")
    assert "12.0" in shown
    again = ["--trainer.iterations", "2", "--trainer.collector.env_processes", "0"]
    run("train", "--resume", "run", "--trust", project.name, *again)


@pytest.mark.extra("data")
def test_recorded_too(project, capfd):
    words = ["--episodes", "2", "--out", "out", "--gym_config.num_envs", "2", "--trust", project.name, project.id]
    assert main(["record", *words]) == 0, capfd.readouterr().err
    assert "2 episodes, 24 frames" in capfd.readouterr().out


def test_viewed_too(project):
    args = parse_options(ViewArgs, [project.id, "--num-envs", "2", "--trust", project.name], "embodichain view")
    with _opened(args) as source:
        assert source.title == project.id


def test_imitated_too(project, capfd):
    small = ["--trainer.total_steps", "2", "--trainer.num_eval_episodes", "2", "--trainer.eval_video", "false"]
    stream = ["--source.stream.buffer_size", "4", "--source.stream.gym_config.num_envs", "2"]
    words = ["imitate", project.id, *small, *stream, "--trainer.run_dir", "cloned", "--trust", project.name]
    assert main(words) == 0, capfd.readouterr().err
    assert main(["play", "cloned", "--episodes", "2", "--trust", project.name]) == 0, capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.extra("sweep")
def test_swept_too(project, capfd):
    words = ["--space", "lr=log(1e-4,1e-2)", "--trials", "1", "--seeds", "0", "--confirm", "0"]
    assert main(["sweep", str(project.config()), *words, "--trust", project.name]) == 0, capfd.readouterr().err
    assert "best: trial 0" in capfd.readouterr().err


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_collectors_in_other_processes_import_it(project, worker):
    config = project.config(collector={"mode": "async", "worker": worker}, enable_eval=False)
    assert train_from_config(config, trusted_modules=[project.name]).global_step == 32


def test_from_python(project, tmp_path, monkeypatch):
    """A name is looked for beside the config, too; workers in other folders find what this process found."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "gym.json").write_text(json.dumps({"id": project.id, "num_envs": 2}))
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(UnknownNameError, match="trusted_modules"):
        make(project.id)
    with make(tmp_path / "gym.json", [project.name]) as env:
        assert (env.max_episode_steps, env.num_envs) == (12, 2)
    with make_to_watch(project.id, [str(tmp_path / f"{project.name}.py")]) as env:
        assert env.has_expert
    settings = {"gym_config": {"id": project.id, "num_envs": 2}, "buffer_size": 2, "progress": False}
    with OnlineDataEngine(OnlineDataEngineCfg(**settings, trusted_modules=[f"../{project.name}.py"])) as engine:
        assert engine.shared_buffer.batch_size == (2, 12)


def test_command_that_resumes_finds_what_lay_beside_the_config(project, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    file = str(tmp_path / f"{project.name}.py")
    assert locate_trusted([project.name, "json"], [tmp_path]) == (file, "json")
    import_trusted([project.name], [tmp_path])
    assert locate_trusted([project.name]) == (file,)
    assert sys.path[-1] == str(tmp_path)  # at the end, where it hides nothing


def test_module_of_a_package_keeps_its_name(project, tmp_path):
    package = tmp_path / f"{project.name}_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "robots.py").write_text("REACH = 0.8\n")
    (package / "tasks.py").write_text("from .robots import REACH\n")
    import_trusted([str(package / "tasks.py")])
    assert sys.modules[f"{package.name}.tasks"].REACH == 0.8
    assert locate_trusted([f"{package.name}.tasks"]) == (str(package / "tasks.py"),)


def test_module_of_a_folder_without_init_keeps_its_name(project, tmp_path, monkeypatch):
    """Another process, given what this one located, imports the same module, which finds its neighbours."""
    folder = tmp_path / f"{project.name}_space"
    (folder / "inner").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (folder / "helper.py").write_text("REACH = 0.8\n")
    (folder / "inner" / "tasks.py").write_text(f"from {folder.name} import helper\n")
    name = f"{folder.name}.inner.tasks"
    [entry] = located = locate_trusted([name], [tmp_path])
    assert Path(entry) == folder / "inner" / "tasks.py"
    assert locate_trusted(located) == located
    check_trusted([name], located, "a config")
    code = f"from embodichain.extras import import_trusted; import sys; import_trusted([{entry!r}]); "
    code += f"assert sys.modules[{name!r}].helper.REACH == 0.8"
    subprocess.run([sys.executable, "-c", code], check=True)
    import_trusted(located)
    assert sys.modules[name].helper.REACH == 0.8
    assert locate_trusted([name]) == located  # by its name, too, now that its folder joined Python's path


def test_package_that_is_nowhere_and_module_that_a_package_lacks(project, tmp_path):
    with pytest.raises(UnknownNameError, match=r"no_pkg\.py, or some/where/no_pkg/__init__\.py of a package"):
        locate_trusted(["no_pkg"], [tmp_path])
    with pytest.raises(UnknownNameError, match=r"--trust some/where/no_pkg/tasks\.py$"):
        locate_trusted(["no_pkg.tasks"], [tmp_path])
    with pytest.raises(TrustedModuleError, match=r"'json\.nope'$"):
        import_trusted(["json.nope"])


@pytest.mark.parametrize(
    ("entry", "text", "error", "words"),
    [
        ("{}.py", "import no_such_thing\n", TrustedModuleError, "ModuleNotFoundError.*no_such_thing.*line 1"),
        ("{}", "a = 1\nb = a.c\n", TrustedModuleError, "AttributeError.*line 2"),
        ("{}", "def f(:\n", TrustedModuleError, "SyntaxError: invalid syntax.*line 1"),
        ("nowhere/{}.py", "", UnknownNameError, "there is no file nowhere"),
        ("./{}", "", UnknownNameError, "expected the name of a module.*or its file"),
        ("json.py", "", UnknownNameError, "another module 'json' is imported already.*rename"),
        ("", "", UnknownNameError, "expected the name of a module"),
    ],
)
def test_what_is_wrong_with_a_module_is_one_message(project, capfd, entry, text, error, words):
    name = f"{project.name}_wrong"
    Path(f"{name}.py").write_text(text)
    Path("json.py").touch()
    with pytest.raises(error, match=words):
        import_trusted([entry.format(name)], [Path.cwd()])
    assert name not in sys.modules
    assert main(["play", "CartPoleRL", "--trust", entry.format(name)]) == 2
    assert "Traceback" not in capfd.readouterr().err


def test_a_positional_argument_may_come_last():
    words = ["--trainer.num_envs", "4", "--trust", "mine", "c.json"]
    args = parse_args(words)
    assert (args.config, args.trust, args.overrides) == (Path("c.json"), ["mine"], words[:2])
    args = parse_args(["--policy.actor.hidden_sizes", "64", "64", "c.json", "--trust", "mine"])
    assert (args.config, args.overrides) == (Path("c.json"), ["--policy.actor.hidden_sizes", "64", "64"])
    assert parse_args(["--resume", "run", "--policy.activation", "tanh"]).config is None
