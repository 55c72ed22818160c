"""Figures, verdicts and curves of the benchmark of heads."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.heads_runs import PARTS, Outcome
from embodichain.extras import available

AT_MOST, AT_LEAST = 0.60, 0.85
"""Success of the Gaussian, and of the other heads, where demonstrations go two ways."""
GAINS = {"ppo_flow": 0.30, "grpo_flow": 0.20}
"""What reinforcement has to add to the success of the clone."""
MINUTES = 15.0
"""In so much time, on two cores."""


def summarize(part: str, outcomes: Sequence[Outcome], seeds: int) -> dict[str, Any]:
    """Return the figures of a part, and whether they are what is claimed."""
    runs = {name: [run for run in outcomes if run.name == name] for name in PARTS[part]}
    figures: dict[str, Any] = {"holds": all(len(runs[name]) >= seeds for name in runs)}
    for name, own in runs.items():
        if not own:
            continue
        final = [run.success[-1] for run in own]
        entry: dict[str, Any] = {"final": final, "final_mean": round(float(np.mean(final)), 4)}
        entry |= {"seconds": [run.seconds[-1] for run in own], "cpu_seconds": [run.cpu_seconds for run in own]}
        if part == "two_way":
            entry |= {key: [run.measures[key][-1] for run in own] for key in ("sampled", "left")}
            mean = entry["final_mean"]
            entry["holds"] = mean <= AT_MOST if name == "gaussian" else mean >= AT_LEAST
            entry["holds_for_every_seed"] = max(final) <= AT_MOST if name == "gaussian" else min(final) >= AT_LEAST
        else:
            gain = [run.success[-1] - run.success[0] for run in own]
            entry |= {"cloned": [run.success[0] for run in own], "gain": [round(value, 4) for value in gain]}
            if name in GAINS:  # by every seed
                entry["holds"] = min(gain) >= GAINS[name] and max(run.seconds[-1] for run in own) <= 60 * MINUTES
        figures[name] = entry
        figures["holds"] = figures["holds"] and entry.get("holds", True)
    return figures


def write_report(folder: Path, figures: Mapping[str, Any], outcomes: Mapping[str, Sequence[Outcome]]) -> None:
    """Print the figures, and draw the curves where matplotlib is installed."""
    for part, entry in figures.items():
        for name in PARTS[part]:
            if name in entry:
                values = ", ".join(f"{100 * value:.0f}" for value in entry[name]["final"])
                cloned = "".join(
                    f" from {100 * np.mean(entry[name]['cloned']):.0f}%" for _ in entry[name].get("gain", [])[:1]
                )
                verdict = {True: ": holds", False: ": does not hold", None: ""}[entry[name].get("holds")]
                print(f"{part}: {name} {100 * entry[name]['final_mean']:.0f}%{cloned} ({values}){verdict}")
        print(f"{part}: {'holds' if entry['holds'] else 'does not hold, or runs are missing'}")
    if not available("matplotlib"):
        print("matplotlib is not installed, so no curves are drawn; --merge this heads.json elsewhere", file=sys.stderr)
        return
    from benchmarks.charts import Series, draw_curves  # matplotlib; runs on a bare machine do without

    for part, own in outcomes.items():
        groups = {"": PARTS[part]}
        if part == "reinforce":
            groups = {f"_{a}": tuple(n for n in PARTS[part] if n.startswith(f"{a}_")) for a in ("ppo", "grpo")}
        for suffix, names in groups.items():
            series = [
                Series(name, [(np.array(run.steps), np.array(run.success)) for run in own if run.name == name])
                for name in names
                if any(run.name == name for run in own)
            ]
            title, axis = {
                "two_way": ("PushAroundRL: imitation of an expert that goes either way", "gradient steps"),
                "reinforce": ("PushCubeRL: a clone of few demonstrations, reinforced", "environment steps"),
            }[part]
            draw_curves(folder / f"heads_{part}{suffix}.png", title, (axis, "success"), series)
