"""The documentation's site: it builds strictly, fetches nothing, and every link in it leads somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import unquote, urlsplit

import pytest

from docs.tools import settings, source
from docs.tools.settings import fields
from embodichain.agents.engine.config import ExpertShareCfg
from embodichain.agents.rl.algo.base import ALGORITHMS
from embodichain.agents.rl.algo.distillation import DistillationCfg
from embodichain.agents.rl.algo.grpo import GRPOCfg
from embodichain.agents.rl.algo.imitation import ImitationCfg
from embodichain.agents.rl.algo.ppo import PPOCfg
from embodichain.agents.rl.models.actor_critic import ActorCriticCfg
from embodichain.agents.rl.models.distributions import DistributionCfg
from embodichain.agents.rl.models.mlp import ImageEncoderCfg, NetworkCfg, RecurrentCfg
from embodichain.config import Config, Field, configclass
from embodichain.envs import TASKS
from embodichain.envs.registration import list_envs

ROOT = Path(__file__).parents[2]
LOADED = {"script": "src", "img": "src", "video": "src", "source": "src", "iframe": "src", "link": "href"}
"""What a browser fetches by itself; links of other tags wait for a click."""

SETTINGS = {
    "algorithms/ppo": (PPOCfg,),
    "algorithms/grpo": (GRPOCfg,),
    "algorithms/distillation": (DistillationCfg,),
    "algorithms/imitation": (ImitationCfg, ExpertShareCfg),
    "policies": (ActorCriticCfg, NetworkCfg, ImageEncoderCfg, RecurrentCfg, DistributionCfg),
}
"""Pages and the configs whose fields they list."""

pytestmark = pytest.mark.extra("docs")


@configclass
class SmallCfg(Config):
    """Two settings."""

    steps: Annotated[int, Field(ge=1)] = 3
    """How many."""
    kind: Literal["a", "b"] = "a"
    """Which | one."""


class PageParser(HTMLParser):
    """Collects the ids of a page, where it leads and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and given.get("href") is not None:
            self.links.append(given["href"])
        if LOADED.get(tag) in given and given.get("rel") not in ("canonical", "next", "prev"):
            self.loaded.append(given[LOADED[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Build the site once, where nothing outside of this machine can be reached; or take the one of ``make docs``."""
    if "DOCS_SITE" in os.environ:
        return Path(os.environ["DOCS_SITE"])
    folder = tmp_path_factory.mktemp("site")
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    env = {**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site) -> dict[str, PageParser]:
    return {os.path.relpath(path, site): PageParser(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}


def test_every_link_leads_to_a_page_and_a_place_on_it(site, pages):
    files = {os.path.relpath(path, site) for path in site.rglob("*") if path.is_file()}
    broken = []
    for page, parsed in pages.items():
        if page == "404.html":  # is served at any address, so its links are absolute
            continue
        for link in {*parsed.links, *parsed.loaded}:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            folder = os.path.dirname(page)
            target = os.path.normpath(os.path.join(folder, unquote(parts.path))) if parts.path else page
            target = "index.html" if target == "." else target
            if target not in files:
                broken.append(f"{page}: {link}")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
                broken.append(f"{page}: {link} (no such place)")
    assert len(pages) > 80
    assert not broken


def test_nothing_is_fetched_from_elsewhere(site, pages):
    outside = {link for parsed in pages.values() for link in parsed.loaded if urlsplit(link).netloc}
    styles = {
        url for css in site.rglob("*.css") for url in re.findall(r"url\(([^)]+)\)", css.read_text()) if "//" in url[:8]
    }
    assert not outside | styles
    assert all(
        "assets/mermaid.js" in page.read_text() for page in [site / "internals.html"]
    )  # else it comes from a CDN


def test_every_task_algorithm_and_setting_has_its_place(site):
    for spec in list_envs():
        if spec.id in TASKS:
            page = (site / f"tasks/{spec.id}.html").read_text()
            assert f"images/tasks/{spec.id}.jpg" in page
            assert not spec.task.has_expert() or "The expert" in page
    listed = {cls for config in SETTINGS.values() for cls in config}
    algorithms = [cls for cls in map(ALGORITHMS.get, ALGORITHMS.names()) if cls.__module__.startswith("embodichain.")]
    assert {cls.cfg_type for cls in algorithms} <= listed
    for name, config in SETTINGS.items():
        text = " ".join((site / f"{name}.html").read_text().split())
        for cls in config:
            missing = [field.name for field in fields(cls) if f"<td><code>{field.name}</code></td>" not in text]
            assert not missing, f"{name}: {cls.__name__}"


def test_names_that_are_set_are_explained_and_changes_of_a_default_are_seen():
    assert settings.rows(SmallCfg)[2:] == [
        "| `steps` | `3` | How many. *(at least 1)* |",
        '| `kind` | `"a"` | Which \\| one. *(one of a, b)* |',
    ]


def test_a_link_to_a_name_that_is_not_in_the_code_is_an_error():
    assert source.line_of(ROOT / "embodichain/agents/rl/algo/ppo.py", "PPO._loss") > 1
    with pytest.raises(LookupError, match=r"has no PPO\.los;"):
        source.line_of(ROOT / "embodichain/agents/rl/algo/ppo.py", "PPO.los")
