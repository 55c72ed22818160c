"""A reader, who does in an empty folder what a page shows, block by block.

Commands and snippets are those of the page. What takes long is made small: trainings end after one iteration, with few
environments; evaluations, plays and recordings have few episodes, and those of trained policies are short; streams are
small and end after a second; videos are small; the viewer shows its first picture and ends.
"""

from __future__ import annotations

import builtins
import contextlib
import inspect
import itertools
import json
import os
import runpy
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from embodichain.agents.datasets import OnlineDataset
from embodichain.agents.engine.config import OnlineDataEngineCfg
from embodichain.agents.engine.data import OnlineDataEngine
from embodichain.agents.imitation import config as imitate_config
from embodichain.agents.imitation import imitate
from embodichain.agents.processes.ray_backend import PlacementCfg, RayCluster
from embodichain.agents.rl import config as train_config
from embodichain.agents.rl import train
from embodichain.cli.main import OTHER_NAMES, main
from embodichain.cli.stream import load_stream_config
from embodichain.config import load_config, merge
from embodichain.config.files import find_shipped
from embodichain.envs import recording, registration, rendering
from tests.docs.blocks import ROOT, Block
from tests.programs import run_torchrun

FILMED, FASTER, SHORT = (48, 64), 20.0, {"max_episode_steps": 20}
"""Size and speed of videos; length of the episodes in which a policy is evaluated."""
EVALUATION = {"--trainer.num_eval_episodes": "1", "--trainer.num_eval_envs": "1", "--trainer.eval_video": "false"}
TRAINING = EVALUATION | {"--trainer.iterations": "1", "--trainer.num_envs": "16", "--trainer.buffer_size": "4"}
IMITATION = EVALUATION | {"--trainer.total_steps": "2", "--algorithm.cfg.batch_size": "16"}
STREAM = {"buffer_size": "8", "gym_config.num_envs": "4"}
SMALLER: dict[str, dict[str, str]] = {
    "train": TRAINING,
    "imitate": IMITATION,
    "sweep": TRAINING | {"--trials": "2", "--seeds": "0", "--confirm": "0"},
    "play": {"--episodes": "1", "--video-episodes": "1"},
    "eval": {"--episodes": "1"},
    "record": {"--episodes": "4", "--gym_config.num_envs": "4"},
    "stream": {"--duration": "1", "--num_workers": "1", **{f"--{name}": value for name, value in STREAM.items()}},
    "view": {"--num-envs": "2"},
}
"""Flags that take the place of a command's own, or are added to it."""
TRUSTED = ("point", "press_task", "disc_task", "frame_stack", "custom_everything", "mixture")
"""Modules of a reader's own, which the next page imports again."""
SEVERAL = {"torchrun", "--workers", "--trainer.collector", "--seeds", "sweep"}
"""Commands with one of these start processes, which takes seconds; what another page has run is not run again."""
_done: set[tuple[str, ...]] = set()
FORKED = "from tests.programs import fork_ranks; fork_ranks(); from torch.distributed import run; run.main()"
MUG = "v 0 0 0\nv 80 0 0\nv 0 80 0\nv 0 0 90\nf 1 3 2\nf 1 2 4\nf 2 3 4\nf 3 1 4\n"
"""A mesh that a reader has."""


def shortened(words: Sequence[str]) -> list[str]:
    """Return the words of a command that does less of the same."""
    command = OTHER_NAMES.get(words[0], words[0])
    flags = dict(SMALLER.get(command, {}))
    if command == "imitate" and "--source.dataset" not in words and "--resume" not in words:
        flags |= {f"--source.stream.{name}": value for name, value in STREAM.items()}
    if command != "sweep" and "--seeds" in words:
        flags["--seeds"] = "0" if command == "imitate" else "0,1"  # each imitation starts a stream of its own
    if "--resume" in words:
        flags = EVALUATION | {"--trainer.total_steps" if command == "imitate" else "--trainer.iterations": "3"}
    kept = [word for before, word in itertools.pairwise(["", *words]) if not {before, word} & flags.keys()]
    return [*kept, *(word for flag in flags.items() for word in flag)]


class Reader:
    """A folder that was empty at first, and the names that a page's snippets have defined."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._names = folder, {"__name__": "__main__", "range": _short_range}
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "path", [*sys.path])
        monkeypatch.setattr(registration, "_TASKS", dict(registration._TASKS))
        for name in TRUSTED:
            monkeypatch.delitem(sys.modules, name, raising=False)
        make_small(monkeypatch)
        (folder / "examples").symlink_to(ROOT / "examples")
        (folder / "mug.obj").write_text(MUG)

    def do(self, block: Block) -> None:
        """Do what a block shows."""
        match block.use:
            case "saved":
                (self.folder / str(block.saved_as)).write_text(block.text, encoding="utf-8")
            case "python":
                exec(compile(block.text, block.place, "exec"), self._names)
            case "json":
                validate(block)
            case "shell":
                commands = [words for words in block.commands if tuple(words) not in _done]
                with _ray_for(commands):
                    for words in commands:
                        run_command(words, block.place)
            case "unknown":
                raise AssertionError(
                    f"{block.place}: no test runs this block, and no reason of blocks.REASONS says why"
                )


def _ray_for(commands: Sequence[Sequence[str]]) -> contextlib.AbstractContextManager[object]:
    """Return the Ray that commands which would start one each share, if there are any."""
    uses_ray = any("ray" in words for words in commands)
    return contextlib.closing(RayCluster(None, 1, PlacementCfg())) if uses_ray else contextlib.nullcontext()


def is_run(words: Sequence[str]) -> bool:
    """Tell whether ``run_command`` runs a command."""
    launched = words[0] == "torchrun" and ["-m", "embodichain"] in [[*pair] for pair in itertools.pairwise(words)]
    script = words[0] == "python" and " ".join(words[1:]).startswith(("examples/", "-m benchmarks."))
    return words[0] == "embodichain" or launched or script


def run_command(words: Sequence[str], place: str) -> None:
    """Run a command that a page shows; what it writes is there afterwards."""
    assert is_run(words), f"{place}: no test runs {words}"
    given = [str(path) for word in words for path in (sorted(Path().glob(word)) if "*" in word else [word])]
    if SEVERAL & {*words} and "--trainer.run_dir" not in words:
        _done.add(tuple(words))
    if given[0] == "embodichain":
        code = main(shortened(given[1:]))
    elif given[0] == "torchrun":
        code = _launch(given[1:])
    elif given[1] == "-m":
        code = _run_benchmark(given[2], given[3:])
    else:
        code = _run_script(given[1], given[2:])
    assert code == 0, f"{place}: {words}: exit code {code}"
    for word in given:
        if word.endswith((".mp4", ".png", ".html", ".onnx")):
            assert any(Path(word).with_suffix(suffix).is_file() for suffix in (Path(word).suffix, ".png")), word


def _launch(words: Sequence[str]) -> int:
    """Run torchrun on this machine alone."""
    at = words.index("-m") + 2
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PET_RDZV_BACKEND": "loopback"}
    done = run_torchrun("-c", FORKED, *words[:at], *shortened(words[at:]), env=environment)
    print(done.stdout, done.stderr)
    return done.returncode


def _run_script(file: str, arguments: Sequence[str]) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [file, *arguments, "--episodes", "2"])
        runpy.run_path(file, run_name="__main__")
    return 0


def _run_benchmark(module: str, arguments: Sequence[str]) -> int:
    """Run a benchmark on a copy of its results: what is in them is not measured again."""
    shutil.copytree(ROOT / "benchmarks/results", "results", dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [module, *arguments, "--output", "results"])
        patch.syspath_prepend(ROOT)
        with pytest.raises(SystemExit) as end:
            runpy.run_module(module, run_name="__main__")
    return int(end.value.code or 0)


def validate(block: Block) -> None:
    """Put a part of a config into the whole, check it as the command does that reads it, and make its environment."""
    text = block.text if block.text.startswith("{") else f"{{{block.text}}}"
    config, folder = json.loads(text), Path()
    if block.part_of is not None and block.part_of.endswith(".json"):
        base = find_shipped(block.part_of)
        config, folder = merge(load_config(base), config), base.parent
    elif block.part_of is not None:
        config = {"id": block.part_of, **config}
    if "id" in config:
        with registration.make(config, num_envs=2) as env:
            env.reset(seed=0)
    elif "source" in config:
        imitate_config.complete(imitate_config.ImitateCfg.from_dict(config), folder=folder)
    elif "trainer" in config:
        train_config.complete(train_config.TrainCfg.from_dict(config), folder=folder)
    else:
        Path("stream.json").write_text(json.dumps(config), encoding="utf-8")
        load_stream_config("stream.json").check()


# --- what makes things small ----------------------------------------------------------------------------------------


def make_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let trainings, streams and videos of Python snippets be as small as those of commands."""
    import stable_baselines3  # an extra

    for module, command in ((train, "train"), (imitate, "imitate")):
        monkeypatch.setattr(module, "override", _with_flags(module.override, command))
    watched = train.make_to_watch
    monkeypatch.setattr(train, "make_to_watch", lambda given, *args, **kwargs: watched(given | SHORT, *args, **kwargs))
    monkeypatch.setattr("embodichain.viewer.app.Viewer.run", lambda viewer: None)
    recorder, renderer = recording.EpisodeRecorder.__init__, rendering.Renderer.__init__
    engine, batches, learn = OnlineDataEngine.__init__, OnlineDataset.__iter__, stable_baselines3.PPO.learn

    def render_small(self: rendering.Renderer, model: Any, size: Any = FILMED, quality: Any = "lean") -> None:
        renderer(self, model, FILMED if quality == "high" else size)  # those that are observed keep their size

    def record_small(*args: Any, **kwargs: Any) -> None:
        given = inspect.signature(recorder).bind(*args, **kwargs).arguments
        recorder(**given | {"size": FILMED, "speed": FASTER})

    def learn_little(self: stable_baselines3.PPO, total_timesteps: int) -> None:
        self.n_steps = self.rollout_buffer.buffer_size = 64
        self.rollout_buffer.reset()
        learn(self, 64)

    def small_engine(self: OnlineDataEngine, cfg: OnlineDataEngineCfg, *args: Any, **kwargs: Any) -> None:
        environment = cfg.gym_config if isinstance(cfg.gym_config, list) else cfg.gym_config | {"num_envs": 4}
        engine(self, cfg.replace(buffer_size=8, gym_config=environment), *args, **kwargs)

    monkeypatch.setattr(rendering.Renderer, "__init__", render_small)
    monkeypatch.setattr(recording.EpisodeRecorder, "__init__", record_small)
    monkeypatch.setattr(stable_baselines3.PPO, "learn", learn_little)
    monkeypatch.setattr(OnlineDataEngine, "__init__", small_engine)
    monkeypatch.setattr(OnlineDataset, "__iter__", lambda self: itertools.islice(batches(self), 16))


def _with_flags(override: Callable[..., Any], command: str) -> Callable[..., Any]:
    def small(cfg: Any, words: list[str], *args: Any, **kwargs: Any) -> Any:
        resumed = ["--resume"] if cfg.trainer.num_eval_episodes == 1 else []
        given = words if EVALUATION.keys() <= {*words} else shortened([command, *resumed, *words])[1 + len(resumed) :]
        return override(cfg, given, *args, **kwargs)

    return small


def _short_range(*bounds: int) -> range:
    """Return the first steps of a long loop."""
    steps = builtins.range(*bounds)
    return steps if len(steps) <= 16 else steps[:3]
