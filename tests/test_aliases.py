"""Former module paths lead to the modules of today."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from embodichain import ALIASES


@pytest.mark.parametrize(("former", "present"), [(a, b[0]) for a, b in ALIASES.items() if len(b) == 1])
def test_a_former_path_is_the_module_of_today(former: str, present: str):
    module = importlib.import_module(former)
    assert module is importlib.import_module(present)
    assert module.__name__ == present
    assert module.__spec__ is not None
    assert module.__spec__.name == present


def test_documented_names_are_found_by_their_former_paths():
    from embodichain.agents.rl.training.config import TrainCfg
    from embodichain.agents.rl.utils.checkpoint import load_checkpoint
    from embodichain.envs.groups import GroupedEnv

    assert (TrainCfg.__name__, load_checkpoint.__name__, GroupedEnv.__name__) == (
        "TrainCfg",
        "load_checkpoint",
        "GroupedEnv",
    )


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("embodichain.agents.rl.utils.helper", ["dict_to_tensordict", "flatten_dict_observation", "compute_gae"]),
        ("embodichain.agents.rl.utils.trainer", ["Trainer"]),
        ("embodichain.agents.rl.utils.async_collector", ["AsyncCollector"]),
        ("embodichain.agents.rl.buffer.standard_buffer", ["RolloutBuffer"]),
    ],
)
def test_modules_that_the_documents_name_have_what_they_name(module: str, names: list[str]):
    found = importlib.import_module(module)
    for name in names:
        assert getattr(found, name).__name__ == name
    with pytest.raises(AttributeError, match="no_such_name"):
        found.no_such_name  # noqa: B018 - the access itself is the test
    with pytest.raises(ImportError, match="no_such_name"):
        exec(f"from {module} import no_such_name")


SUBMODULES = """
import sys
import embodichain.agents
assert "torch" not in sys.modules, "nothing heavy before it is needed"
assert embodichain.agents.engine.data.OnlineDataEngine.__name__ == "OnlineDataEngine"
assert embodichain.agents.datasets.sampler.UniformChunkSampler(1, 2).high == 2
assert embodichain.agents.rl.algo.PPO.__name__ == "PPO"
assert embodichain.agents.rl.train.main.__name__ == "main"
assert embodichain.agents.utils.data.DictDataset.__name__ == "DictDataset"
assert embodichain.envs.registration.make.__name__ == "make"
assert not hasattr(embodichain.agents, "no_such_module")
assert not hasattr(embodichain, "no_such_module")
"""


def test_packages_reach_their_modules_without_importing_each():
    done = subprocess.run([sys.executable, "-c", SUBMODULES], timeout=100, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_other_missing_modules_stay_missing():
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        importlib.import_module("embodichain.agents.rl.training.no_such_module")
