"""Every command of the documentation is understood by the command's own parser, fields and configs included.

What it would do is cut off once its words and its config are read; the quickstarts are run in ``test_quickstarts.py``.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest

from docs.tools import tasks
from embodichain.cli.main import COMMANDS, OTHER_NAMES
from embodichain.errors import ConfigError
from tests.docs.blocks import PAGES, ROOT, Block, blocks_in, blocks_of

CART_POLE = "configs/agents/rl/basic/cart_pole/train_config.json"
STAND_INS = {
    "CONFIG": CART_POLE,
    "my_ppo_config.json": CART_POLE,
    "their/push_cube/train_config.json": "configs/agents/rl/push_cube/train_config.json",
    "MyTask": "PressTask",
    "my_task.py": "press_task.py",
    "my_task.json": "PressTask",
}
"""What stands for something of the reader's own."""
BY_OPTIONS = ("envs", "robots", "play", "view", "eval", "runs", "report", "export", "demo", "completion", "dataset")


pytestmark = pytest.mark.extra("sweep")  # a sweep looks for its package before it reads its config


class Understood(BaseException):
    """The words of a command were read; it is no error, so nothing on the way handles it."""


def _cut(*args, **kwargs):
    raise Understood


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the files that pages tell a reader to write, or that they show."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("press_task.py", "press_task.json"):
        (folder / name).symlink_to(ROOT / "examples/envs" / name)
    (folder / "panda_reach.json").write_text('{"id": "ReachRL", "num_envs": 64}')
    for block in (block for page in PAGES for block in blocks_of(page)):
        if block.saved_as is not None:
            (folder / block.saved_as).write_text(block.text)
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


@pytest.fixture
def understand(monkeypatch, folder):
    """Return a function that reads the words of a command as its main function does."""
    monkeypatch.chdir(folder)

    def then_cut(function):
        def parse(*args):
            function(*args)
            raise Understood

        return parse

    modules = {name: importlib.import_module(f"embodichain.cli.{name}") for name in COMMANDS}  # before one is changed
    for name in BY_OPTIONS:
        monkeypatch.setattr(modules[name], "parse_options", then_cut(modules[name].parse_options))
    for name in ("stream", "record"):
        monkeypatch.setattr(modules[name], "parse_command", then_cut(modules[name].parse_command))
    monkeypatch.setattr("embodichain.agents.rl.train.joined_ranks", _cut)
    monkeypatch.setattr("embodichain.agents.rl.train.train_from_config", _load_training)
    monkeypatch.setattr("embodichain.agents.imitation.imitate.opened_imitation", _cut)
    monkeypatch.setattr("embodichain.agents.imitation.imitate.resume_imitation", _cut)
    monkeypatch.setattr("embodichain.agents.rl.sweeps.group.GroupFolder", SimpleNamespace(opened=_cut))
    monkeypatch.setattr("embodichain.agents.rl.sweeps.study.GroupFolder", SimpleNamespace(opened=_cut), raising=False)

    def read(words):
        words = [STAND_INS.get(word, word) for word in words]
        command = OTHER_NAMES.get(words[0], words[0])
        assert command in COMMANDS
        module = importlib.import_module(f"embodichain.cli.{command}")
        with pytest.raises(Understood):
            module.main(words[1:])()

    return read


def _load_training(config, overrides=(), trusted_modules=(), console=None):
    """Read a training's config and flags, as ``train_from_config`` does before anything is built."""
    from embodichain.agents.rl.arguments import given_environment
    from embodichain.agents.rl.config import load_train_config, override

    cfg = load_train_config(config, trusted_modules, given_environment(overrides))
    override(cfg, list(overrides), trusted_modules=trusted_modules)
    raise Understood


def _pages_with_commands():
    pages = [blocks_of(page) for page in PAGES]
    pages.append([block for name, text in tasks.pages().items() for block in blocks_in(text, name)])
    found = [[block for block in blocks if block.commands] for blocks in pages]
    return [pytest.param(blocks, id=blocks[0].page) for blocks in found if blocks]


@pytest.mark.parametrize("blocks", _pages_with_commands())
def test_every_command_is_understood(blocks: list[Block], understand):
    problems = []
    for block in blocks:
        for words in block.commands:
            try:
                understand(words)
            except (Exception, SystemExit, pytest.fail.Exception) as error:  # noqa: BLE001 - all problems of a page
                problems.append(f"{block.page}:{block.line}: embodichain {' '.join(words)}: {error}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    "command",
    [
        "train CartPoleRL --algorithm.cfg.gama 0.9",
        "train CartPoleRL --policy.memory.type rnn",
        "train no_such.json",
        "play PickCubeRL --vido out.mp4",
        "stream PushCubeRL --num_wokers 2",
        "imitate PushCubeRL --trainer.no_such 1",
        "dataset inf data",
    ],
)
def test_a_command_with_a_mistake_is_not(command, understand):
    with pytest.raises((ConfigError, SystemExit)):
        understand(command.split())
