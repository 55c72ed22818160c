"""Every block of every page runs as it stands, from an empty folder: files, commands, snippets and configs.

``blocks.py`` says what becomes of a block; ``reader.py`` runs it, and says what is made small.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import torch

from embodichain.agents.rl.arguments import given_origins, parse_args
from embodichain.agents.rl.config import load_train_config, override
from embodichain.cli.stream import StreamArgs, parse_command
from embodichain.errors import ConfigError
from tests.docs.blocks import NOT_CODE, PAGES, REASONS, ROOT, RUN, Block, page_texts
from tests.docs.reader import Reader, is_run, run_command

BLOCKS = [block for blocks in PAGES.values() for block in blocks]
LEROBOT = os.environ.get("LEROBOT_PYTHON", "")

pytestmark = [
    pytest.mark.extra("docs", "data", "viewer", "sweep", "export", "vla", "robots", "peers", "ray"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]


@pytest.fixture
def reader(tmp_path, monkeypatch):
    return Reader(tmp_path, monkeypatch)


@pytest.mark.parametrize("page", [page for page, blocks in PAGES.items() if any(block.use in RUN for block in blocks)])
def test_a_page_runs_as_it_stands(page, reader):
    for block in PAGES[page]:
        reader.do(block)
    check_that_logs_are_explained(reader.folder)


@pytest.mark.skipif(not LEROBOT, reason="LEROBOT_PYTHON names no Python with lerobot: make test-lerobot")
def test_what_is_for_lerobot_runs_there(reader):
    (snippet,) = [block for block in BLOCKS if block.use == "lerobot"]
    reader.do(PAGES[snippet.page][0])  # records the folder
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests/agents/rl"), "HF_HUB_OFFLINE": "1"}
    program = f"import torchvision_names\n{snippet.text}"
    done = subprocess.run([LEROBOT, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("block", [block for block in BLOCKS if block.not_run == "needs CUDA"], ids=str)
def test_what_needs_a_gpu_runs_on_one(block, reader):
    for words in block.commands:
        if words[0] == "embodichain":  # others install packages, or measure for an hour
            run_command(words, block.place)


def test_every_block_is_run_or_is_no_code_or_says_why_not():
    found = Counter({page: text.count("```") // 2 for page, text in page_texts().items() if "```" in text})
    assert Counter(block.page for block in BLOCKS) == found  # none is overlooked, be it indented or not closed
    run = {block for block in BLOCKS if block.use in RUN}
    excused = {block for block in BLOCKS if block.not_run in REASONS}
    shown = {block for block in BLOCKS if block.language in NOT_CODE}
    assert run | excused | shown == set(BLOCKS), [block.place for block in set(BLOCKS) - run - excused - shown]
    assert len(run) + len(excused) + len(shown) == len(BLOCKS)
    commands = {block.place: words for block in run if block.use == "shell" for words in block.commands}
    assert not {place: words for place, words in commands.items() if not is_run(words)}
    assert {block.not_run for block in excused} == set(REASONS)


def test_commands_that_are_not_run_are_understood():
    commands = [words for block in BLOCKS if block.use == "excused" for words in block.commands if is_run(words)]
    trainings = [words[words.index("train") + 1 :] for words in commands if "train" in words]
    streams = [words[2:] for words in commands if words[1] == "stream"]
    assert len(trainings) > 5
    assert len(streams) > 1
    for words in trainings:
        args = parse_args(words)
        override(load_train_config(args.config, (), *given_origins(args.overrides)), args.overrides)
    for words in streams:
        parse_command(StreamArgs, "embodichain stream", words)


@pytest.mark.parametrize(
    "block",
    [
        Block("new.md", 1, "toml", "a = 1"),
        Block("new.md", 1, "python", "1 / 0", not_run="takes long"),
    ],
)
def test_a_block_that_nobody_runs_is_noticed(block, reader):
    assert block.use == "unknown"
    with pytest.raises(AssertionError, match=r"new\.md:1"):
        reader.do(block)


@pytest.mark.parametrize(
    ("block", "error"),
    [
        (Block("new.md", 1, "", "frobnicate --all"), AssertionError),
        (Block("new.md", 1, "", "embodichain train CartPoleRL --algorithm.cfg.gama 0.9"), AssertionError),
        (Block("new.md", 1, "", "embodichain dataset inf data"), (AssertionError, SystemExit)),
        (Block("new.md", 1, "python", "make('CartPoleRL')"), NameError),
        (Block("new.md", 1, "json", '"env": {"no_such": 1}', part_of="CartPoleRL"), ConfigError),
        (Block("new.md", 1, "json", '{"trainer": {"num_envs": "many"}}'), ConfigError),
    ],
)
def test_a_mistake_on_a_page_is_noticed(block, error, reader):
    with pytest.raises(error):
        reader.do(block)


def check_that_logs_are_explained(folder: Path) -> None:
    """Every number in the logs of a page's runs, besides those of the environment, is on a page about algorithms."""
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs/algorithms").glob("*.md"))
    for log in folder.rglob("metrics.jsonl"):
        lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        names = {name for line in lines for name in line if name.startswith(("update/", "stream/", "time/", "async/"))}
        assert names, log
        assert not {name for name in names if f"`{name}`" not in pages}
