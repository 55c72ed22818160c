"""A page per task, from ``docs/tasks.md``, which the registry and the experts' runs make, and ``experts.json``."""

import json
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@cache
def sections() -> dict[str, str]:
    """Return the sections of ``docs/tasks.md`` by the id of their task."""
    _, *parts = re.split(r"^## ", (ROOT / "docs/tasks.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {name: text.strip() for name, _, text in (part.partition("\n") for part in parts)}


def page_names() -> list[dict[str, str]]:
    """Return the entries of the navigation."""
    return [{name: f"tasks/{name}.md"} for name in sections()]


def pages() -> dict[str, str]:
    """Return all pages by name."""
    measured = json.loads((ROOT / "benchmarks/results/experts.json").read_text(encoding="utf-8"))
    return {f"tasks/{name}.md": _page(name, text, measured) for name, text in sections().items()}


def gallery() -> str:
    """Return the pictures of all tasks, each of which leads to its page."""
    cards = []
    for name, text in sections().items():
        sentence = text.split("\n\n")[1].replace("\n", " ")
        cards.append(f"[![{name}](images/tasks/{name}.jpg) **{name}**<br>{sentence}](tasks/{name}.md)")
    return '<div class="tasks" markdown>\n\n' + "\n\n".join(cards) + "\n\n</div>"


def _page(name: str, section: str, measured: dict) -> str:
    text = section.replace("](images/", "](../images/")
    expert = measured["tasks"].get(name)
    watch = f"embodichain play {name} --video {name}.mp4" + ("" if expert else " --policy random")
    commands = [
        (watch, "a video" + (" of the expert" if expert else "")),
        (f"embodichain view {name}", "in the browser"),
    ]
    if "embodichain train configs" in section:
        commands.append((f"embodichain train {name}", "the shipped config"))
    if expert:
        commands.append((f"embodichain record {name} --out data/{name} --episodes 100", "demonstrations for LeRobot"))
    lines = "\n".join(f"{command}  # {what}" for command, what in commands)
    parts = [f"# {name}", text, f"## Commands\n\n```\n{lines}\n```"]
    if expert:
        parts.append(f"## The expert\n\n{_expert(expert, measured)}")
    return "\n\n".join(parts) + "\n"


def _expert(expert: dict, measured: dict) -> str:
    rows = [
        f"| {seed} | {100 * run['success']:.1f}% | {run['steps']:.0f} | {run['return']:.1f} |"
        for seed, run in expert["runs"].items()
    ]
    head = f"Over {measured['starts']} starts for each seed (`python benchmarks/experts.py --tasks ...`):"
    return "\n".join([head, "", "| seed | success | steps | return |", "|---|---|---|---|", *rows])
