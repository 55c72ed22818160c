"""What is installed as a wheel: the package with its assets, and the configs, found from an empty folder."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from embodichain.agents.rl.default_config import shipped_config
from embodichain.config.files import find_config, find_shipped, save_config

ROOT = Path(__file__).parents[1]
SCRIPT = """
import embodichain
from embodichain.config.files import find_shipped, load_config, shipped_configs
gym_config = load_config(find_shipped("configs/agents/rl/reach/gym_config.json"))
print(embodichain.__file__, shipped_configs(), gym_config["id"])
"""


def test_a_wheel_has_all_that_commands_need_in_an_empty_folder(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
        wheel.extractall(tmp_path / "site")
    for folder, place in (("embodichain", "embodichain"), ("configs", "embodichain/configs")):
        files = [file.relative_to(ROOT / folder) for file in (ROOT / folder).rglob("*") if file.is_file()]
        wanted = {f"{place}/{file}" for file in files if "__pycache__" not in file.parts}
        assert wanted <= names, wanted - names
    (tmp_path / "empty").mkdir()
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n{SCRIPT}"]
    shown = subprocess.run(command, cwd=tmp_path / "empty", check=True, capture_output=True, text=True).stdout.split()
    assert shown == [
        str(tmp_path / "site/embodichain/__init__.py"),
        str(tmp_path / "site/embodichain/configs"),
        "ReachRL",
    ]


def test_a_training_is_found_by_its_environment():
    assert shipped_config("pushcuberl") == ROOT / "configs/agents/rl/push_cube/train_config.json"
    assert shipped_config("HalfCheetah-v5") == ROOT / "configs/agents/rl/gymnasium/half_cheetah/train_config.json"
    assert shipped_config("Pendulum-v1") is None
    assert find_shipped("configs/agents/nothing.json") == Path("configs/agents/nothing.json")


def test_a_config_elsewhere_can_name_one_of_the_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "configs/agents/rl/reach/gym_config.json"
    assert find_config(name, tmp_path / "mine") == ROOT / name
    (tmp_path / "mine").mkdir()
    save_config({"id": "ReachRL"}, tmp_path / "mine" / name)
    assert find_config(name, tmp_path / "mine") == tmp_path / "mine" / name  # its own comes first


def test_images_have_what_they_copy():
    """No image is built here, but what it copies has to exist, and to be sent to it."""
    allowed = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines()}
    for name in ("Dockerfile", "Dockerfile.cuda"):
        lines = (ROOT / name).read_text().splitlines()
        copied = {word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]}
        assert copied <= allowed
        assert all((ROOT / word).exists() for word in copied)
