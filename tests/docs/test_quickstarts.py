"""The quickstarts, and the pages about policies, run from an empty folder as they stand: files, commands and snippets.

Training ends after one iteration and evaluations after two episodes, streams and videos are small; what a page shows
stays as it is.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import sys
import textwrap
from pathlib import Path

import pytest

from embodichain.agents.engine.data import OnlineDataEngine
from embodichain.agents.imitation import sources
from embodichain.agents.imitation import trainer as imitation_trainer
from embodichain.agents.rl import run_loop, trainer
from embodichain.cli.main import main
from embodichain.envs import recording
from tests.docs.blocks import PAGES, ROOT, Block, blocks_of

FILMED = (48, 64)
RAN = (
    "docs/start/gymnasium.md",
    "docs/start/robot.md",
    "docs/start/demonstrations.md",
    "docs/start/vla.md",
    "docs/policies.md",
    "docs/algorithms/ppo.md",
    "docs/algorithms/distillation.md",
)
"""Pages of which everything runs."""
SNIPPETS_RUN = ("README.md", "docs/environments.md")
"""Pages of which the Python runs, in order."""

pytestmark = [pytest.mark.extra("docs", "data"), pytest.mark.slow]


@pytest.fixture
def reader(monkeypatch, tmp_path):
    """A reader's empty folder, in which nothing takes long."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "point", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    evaluate, recorder = run_loop.evaluate, recording.EpisodeRecorder.__init__

    def evaluate_briefly(policy, env, episodes, seed, video, **kwargs):
        return evaluate(policy, env, min(episodes, 2), seed, None, **kwargs)

    def record_small(*args, **kwargs):
        given = inspect.signature(recorder).bind(*args, **kwargs).arguments
        recorder(**given | {"size": FILMED})

    def small_stream(cfg):
        return OnlineDataEngine(cfg.replace(buffer_size=8, gym_config=cfg.gym_config | {"num_envs": 4}))

    monkeypatch.setattr(sources, "OnlineDataEngine", small_stream)
    monkeypatch.setattr(run_loop, "evaluate", evaluate_briefly)
    monkeypatch.setattr(recording.EpisodeRecorder, "__init__", record_small)
    monkeypatch.setattr(
        trainer.Trainer, "_criterion_met", lambda self: "iterations" if self.counters.iteration else None
    )
    monkeypatch.setattr(
        imitation_trainer.ImitationTrainer,
        "_stop_reason",
        lambda self, signals: "total_steps" if self.global_step >= 2 else None,
    )
    return tmp_path


@pytest.mark.parametrize("page", RAN)
def test_a_page_runs_as_it_stands(page: str, reader: Path, capsys):
    for block in blocks_of(ROOT / page):
        if block.saved_as is not None:
            (reader / block.saved_as).write_text(block.text, encoding="utf-8")
        elif block.language == "json":
            json.loads(block.text)
        elif block.not_run is not None:
            continue
        elif block.language == "python":
            exec(compile(block.text, f"{page}:{block.line}", "exec"), {"__name__": "__main__"})
        else:
            _run(block, reader, capsys)
    _check_that_logs_are_explained(reader)


@pytest.mark.parametrize("page", SNIPPETS_RUN)
def test_the_snippets_of_a_page_run_in_order(page: str, reader: Path):
    names: dict = {"__name__": "__main__"}
    for block in blocks_of(ROOT / page):
        if block.language == "python" and "stable_baselines3" not in block.text:  # trains for a minute
            exec(compile(block.text, f"{page}:{block.line}", "exec"), names)


def test_every_snippet_names_what_is_there():
    """Those that do not run here, or in the tests of what they show, at least import and compile."""
    problems = []
    for block in (block for page in PAGES for block in blocks_of(page) if block.language == "python"):
        for node in ast.walk(ast.parse(textwrap.dedent(block.text))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("embodichain"):
                module = importlib.import_module(node.module)
                names = [alias.name for alias in node.names]
                problems += [f"{block.page}:{block.line}: {name}" for name in names if not hasattr(module, name)]
    assert not problems


def _run(block: Block, folder: Path, capsys) -> None:
    for words in block.commands:
        expanded = [str(path) for word in words for path in (sorted(Path().glob(word)) if "*" in word else [word])]
        code = main(expanded)
        shown = capsys.readouterr()
        assert code == 0, f"{block.page}:{block.line}: embodichain {' '.join(words)}\n{shown.out}{shown.err}"
        for word in words:
            if word.endswith((".mp4", ".png", ".html")):
                assert any((folder / word).with_suffix(suffix).is_file() for suffix in (Path(word).suffix, ".png")), (
                    word
                )


def _check_that_logs_are_explained(folder: Path) -> None:
    """Every number in the logs of the page's runs, besides those of the environment, is on a page about algorithms."""
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs/algorithms").glob("*.md"))
    for log in folder.rglob("metrics.jsonl"):
        lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        names = {name for line in lines for name in line if name.startswith(("update/", "stream/", "time/", "async/"))}
        assert names, log
        assert not {name for name in names if f"`{name}`" not in pages}
