"""Former module paths lead to the modules of today."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from embodichain import ALIASES
from embodichain.errors import ConfigError


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
    done = subprocess.run([sys.executable, "-c", SUBMODULES], timeout=240, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


ON_DEMAND = """
import sys
import embodichain.envs.task_env
builds = "construction", "fixtures", "grippers", "model_files", "postures", "rendering", "robot_files", "robot_model"
builds = *builds, "scenes"
loaded = [name for name in builds if f"embodichain.envs.{name}" in sys.modules]
assert not loaded, loaded
from embodichain.agents.rl.train import build_trainer
from embodichain.agents.rl import algo, models
from embodichain.envs.registration import make
make("CartPoleRL", num_envs=1).close()
assert algo.get_algo_class("ppo") is algo.PPO
assert models.get_policy_class("actor_critic") is models.ActorCritic
others = "models.vla", "models.flow", "models.tokens", "grpo", "distillation", "_events", "event_terms", "mujoco_suite"
loaded = [name for name in sys.modules if name.startswith("embodichain.") and any(other in name for other in others)]
assert not loaded, loaded
for package in (algo, models):
    assert [name for name in package.__all__ if not hasattr(package, name)] == []
assert models.get_policy_class("vla") is models.VLAPolicy
assert algo.get_algo_class("distill") is algo.Distillation
"""


def test_a_step_needs_nothing_that_builds_it_and_a_run_only_the_policy_and_algorithm_that_it_names():
    done = subprocess.run([sys.executable, "-c", ON_DEMAND], timeout=240, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_names_of_the_package_are_taken_before_their_classes_are_imported():
    from embodichain.agents.rl.models import ActorCritic, ActorOnly, get_policy_class, register_policy

    assert register_policy("actor_only", ActorOnly) is ActorOnly  # the same once more
    with pytest.raises(ConfigError, match="the policy name 'Actor_Only' is taken by ActorOnly"):
        register_policy("Actor_Only", ActorCritic)
    assert get_policy_class("actor_only") is ActorOnly


def test_other_missing_modules_stay_missing():
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        importlib.import_module("embodichain.agents.rl.training.no_such_module")
