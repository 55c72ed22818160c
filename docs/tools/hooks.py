"""What ``mkdocs`` asks for while it builds the site: pages that are made from the code, and links that lead to it.

* Pages that no file holds: one per task (``tasks.py``), the API reference (``reference.py``), the benchmarks, and the
  source files that other pages link to.
* ``<!-- settings: module.Class -->`` in a page becomes the table of a config's fields (``settings.py``), and
  ``<!-- gallery of tasks -->`` the pictures of all tasks.
* ``[PPO._loss](../../embodichain/agents/rl/algo/ppo.py#PPO._loss)`` leads to the line of that name. Such links
  work in the repository as well, and a name that is not there stops the build.
"""

import posixpath
import re
from importlib.metadata import files as files_of
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs.tools import reference, settings, source, tasks

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"(?<=\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_SETTINGS = re.compile(r"<!-- settings: ([\w.]+) -->")


def _place(path: str) -> str:
    """Return where the site has a file of the repository: a page of its own, a picture, or a page with its source."""
    if path == "benchmarks/README.md":
        return "benchmarks.md"
    return path.replace("benchmarks/", "", 1) if path.endswith(".png") else source.page_of(path)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the parts of the navigation that follow from the code."""
    parts: dict[str, Any] = {"Tasks": ["tasks.md", *tasks.page_names()], "API": reference.page_names()}
    for entry in config.nav or []:
        for title in entry.keys() & parts.keys() if isinstance(entry, dict) else ():
            entry[title] = parts[title]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and files that are not in the folder ``docs``."""
    texts = tasks.pages() | reference.pages()
    text = (ROOT / "benchmarks/README.md").read_text(encoding="utf-8")
    texts["benchmarks.md"] = _benchmarks(text)
    for name, text in texts.items():
        files.append(File.generated(config, name, content=text))
    for picture in sorted((ROOT / "benchmarks/results").glob("*.png")):
        files.append(File.generated(config, f"results/{picture.name}", abs_src_path=str(picture)))
    script = next(file for file in files_of("mmdc") or () if file.name == "mermaid.js")
    files.append(File.generated(config, "assets/mermaid.js", abs_src_path=str(script.locate())))

    linked: set[str] = set()
    for file in files.documentation_pages():
        linked |= _links_out(file.content_string, file.src_uri)
    for path in sorted(linked):
        if files.get_file_from_path(_place(path)) is None:
            files.append(File.generated(config, _place(path), content=source.page(ROOT, path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put tables of settings in their place, and let links to the repository lead to pages of the site."""
    markdown = markdown.replace("<!-- gallery of tasks -->", tasks.gallery())
    markdown = _SETTINGS.sub(lambda match: settings.table(match[1]), markdown)
    here = page.file.src_uri

    def lead(match: re.Match[str]) -> str:
        path = _repository_path(match[1], here)
        if path is None:
            return match[0]
        anchor = match[2] or ""
        if anchor and path.endswith(".py"):
            source.line_of(ROOT / path, anchor[1:])  # an error if there is no such name
        return posixpath.relpath(_place(path), posixpath.dirname(here)) + anchor

    return _outside_fences(markdown, lambda text: _LINK.sub(lead, text))


def _outside_fences(markdown: str, change: Any) -> str:
    """Return a page in which everything but its fenced blocks is changed."""
    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [change(markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(markdown[end:])])


def _links_out(markdown: str, page: str) -> set[str]:
    """Return the files of the repository outside of ``docs`` that a page links to."""
    found = (_repository_path(match[1], page) for match in _LINK.finditer(_FENCE.sub("", markdown)))
    return {path for path in found if path is not None}


def _repository_path(link: str, page: str) -> str | None:
    """Return what a link of a page leads to outside of ``docs``, as seen from the repository; otherwise ``None``."""
    if re.match(r"[a-z]+:|/", link):
        return None
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    return None if path.startswith(("docs/", "..")) else path


def _benchmarks(text: str) -> str:
    """Return the page of benchmarks: the README of their folder, and the curves that it speaks of."""
    text = _outside_fences(text, lambda part: _LINK.sub(lambda match: _from_docs(match[0]), part))
    curves = sorted((ROOT / "benchmarks/results").glob("*.png"))
    pictures = "\n\n".join(f"![{curve.stem.replace('_', ' ')}](results/{curve.name})" for curve in curves)
    return f"{text}\n## Curves\n\nMean and spread over seeds; the commands above draw them.\n\n{pictures}\n"


def _from_docs(link: str) -> str:
    """Return a link of the folder ``benchmarks`` as seen from ``docs``."""
    if re.match(r"[a-z]+:|#", link):
        return link
    return posixpath.relpath(posixpath.join("benchmarks", link), "docs")
