"""A missing optional package answers with the exact command that installs it."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from embodichain import extras
from embodichain.errors import MissingExtraError
from embodichain.extras import DISTRIBUTION, available, require


def test_an_installed_module_is_returned():
    assert require("json", extra="data") is json
    assert require("json.decoder", extra="data").__name__ == "json.decoder"
    assert available("json")


@pytest.mark.parametrize("module", ["no_such_package", "no_such_package.part"])
def test_a_missing_one_names_the_extra(module):
    with pytest.raises(MissingExtraError) as caught:
        require(module, extra="data")
    root = Path(__file__).parents[1]
    assert str(caught.value) == f'no_such_package is not installed. Install it with: pip install -e "{root}[data]"'
    assert isinstance(caught.value, ImportError)
    assert not available(module)


def test_the_advice_for_a_wheel_names_what_the_wheel_needs(monkeypatch, tmp_path):
    """Wherever the wheel came from: its packages are those of the public index."""
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "embodichain" / "extras.py"))
    needed = ["torch>=2", "pyarrow>=20; extra == 'data'", 'av>=15; extra == "data"', "ray>=2; extra == 'ray'"]
    monkeypatch.setattr(extras.metadata, "requires", lambda name: needed)
    assert extras.advice("data") == 'pip install "pyarrow>=20" "av>=15"'
    monkeypatch.setattr(extras.metadata, "requires", lambda name: None)
    assert extras.advice("data") == 'pip install "embodichain-agents[data]"'


def test_the_distribution_is_the_one_we_build():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION
    assert set(project["optional-dependencies"]) == {
        "dev",
        "vla",
        "data",
        "ray",
        "track",
        "export",
        "gpu",
        "peers",
        "robots",
        "sweep",
        "viewer",
        "docs",
    }


def test_mujoco_is_as_old_as_it_may_be():
    """3.17 is the first with ``mujoco.batch``; dm_control 1.0.50 needs at least that, and does not work with 4."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    allowed = {Requirement(text).name: Requirement(text).specifier for text in project["dependencies"]}["mujoco"]
    assert [v for v in ("3.16.0", "3.17.0", "4.0.0", "4.9", "5.0") if v in allowed] == ["3.17.0", "4.0.0", "4.9"]


def test_every_extra_that_is_asked_for_exists():
    root = Path(__file__).parents[1]
    known = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    sources = [path for path in (root / "embodichain").rglob("*.py") if path.name != "extras.py"]
    asked = {name for path in sources for name in re.findall(r"require\([^)]*extra=\"(\w+)\"", path.read_text())}
    assert asked <= set(known)
