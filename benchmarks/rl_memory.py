"""What an update allocates besides the rollout."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch

from benchmarks import rl_updates


def measure_memory() -> dict[str, float]:
    """Return, in MB, a rollout, one minibatch of it, and the most that an update has allocated besides the rollout."""
    rows = rl_updates.data()
    call = rl_updates.ours(rows)
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = [e for e in json.loads(file.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    rollout = sum(leaf.nbytes for leaf in rl_updates.rollout(rows).values())
    keys = ("observation", "action", "sample_log_prob", "value", "advantage", "return")
    per_row = sum(rows[key][0, 0].nbytes for key in keys)
    return {
        "rollout": rollout / 2**20,
        "minibatch": per_row * rl_updates.ROWS / rl_updates.MINIBATCHES / 2**20,
        "peak of an update besides the rollout": peak / 2**20,
    }
