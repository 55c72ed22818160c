"""The documentation's site: it builds strictly, fetches nothing, and every link in it leads somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[2]
LOADED = {"script": "src", "img": "src", "video": "src", "source": "src", "iframe": "src", "link": "href"}
"""What a browser fetches by itself; links of other tags wait for a click."""

pytestmark = pytest.mark.extra("docs")


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
    """Build the site once, where nothing outside of this machine can be reached."""
    folder = tmp_path_factory.mktemp("site")
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    env = {**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, PageParser]:
    return {path: PageParser(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}


def test_every_link_leads_to_a_page_and_a_place_on_it(site, pages):
    broken = []
    for page, parsed in pages.items():
        if page.name == "404.html":  # is served at any address, so its links are absolute
            continue
        for link in parsed.links + parsed.loaded:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            if target.is_dir():
                target /= "index.html"
            if not target.is_file():
                broken.append(f"{page.relative_to(site)}: {link}")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
                broken.append(f"{page.relative_to(site)}: {link} (no such place)")
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
