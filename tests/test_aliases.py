"""Former module paths lead to the modules of today."""

from __future__ import annotations

import importlib

import pytest

from embodichain import ALIASES


@pytest.mark.parametrize(("former", "present"), [(a, b) for a, b in ALIASES.items() if b])
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


def test_other_missing_modules_stay_missing():
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        importlib.import_module("embodichain.agents.rl.training.no_such_module")
