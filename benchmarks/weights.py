"""What weights cost on their way from a learner to its collector: time and memory, beside one copy of the same bytes.

``python -m benchmarks.weights --parameters 1000000000`` publishes and adopts a policy of as many bfloat16 parameters,
in a thread of the learner's process and in a process of its own. Peak memory is counted in models: all that the
learner's process has beside its own model, shared memory included, and what the collector's process has to itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import socket
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.timing import machine
from embodichain.agents.processes.channel import Channel
from embodichain.agents.rl.collector.config import AsyncCfg
from embodichain.agents.rl.collector.weights import InferenceCopy, WeightSnapshot, WeightStore, without_weights
from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.utils.tensordicts import Observation

_LAYERS = 24
_RESULTS = Path(__file__).parent / "results" / "weights.json"


class Large(Policy):
    """Layers of bfloat16 weights, applied one after the other."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        width = round((parameters / _LAYERS) ** 0.5)
        layers = [nn.Linear(width, width, bias=False, dtype=torch.bfloat16, device="meta") for _ in range(_LAYERS)]
        self.layers = nn.ModuleList(layers).to_empty(device="cpu")
        for layer in layers:
            nn.init.constant_(layer.weight, 1.0 / width)

    @property
    def nbytes(self) -> int:
        """Size of all parameters."""
        return sum(parameter.nbytes for parameter in self.parameters())

    @torch.no_grad()
    def touch(self) -> float:
        """Read every weight."""
        return sum(float(parameter.sum()) for parameter in self.parameters())

    def get_action(self, obs: Observation, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError

    def get_value(self, obs: Observation) -> Tensor:
        raise NotImplementedError

    def evaluate_actions(self, obs: Observation, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError


def memory(pid: int | str = "self") -> dict[str, int]:
    """Return the bytes of a process: resident, the most that ever was, and those that it shares with nobody."""
    fields = dict(line.split(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    names = {"resident": "VmRSS", "peak": "VmHWM", "own": "RssAnon"}
    return {name: 1024 * int(fields[field].split()[0]) for name, field in names.items()}


def measure(worker: str, parameters: int, rounds: int, verify: bool) -> dict[str, Any]:
    """Publish and adopt ``rounds`` times; return seconds and models."""
    policy = Large(parameters)
    target = torch.zeros_like(next(policy.parameters()))
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
    before = memory()["resident"]
    cfg = AsyncCfg(worker=worker, verify_weights=verify)  # type: ignore[arg-type]
    store = WeightStore(policy, cfg)
    collector = _Process(policy) if worker == "process" else _Thread(policy)
    published, adopted, copied, others = [], [], [], 0
    for _ in range(rounds + 2):  # the first two times, slots are made
        policy.version += 1
        published.append(_timed(store.publish))
        assert store.latest is not None
        adopted.append(collector.adopt(store.latest))
        copied.append(_timed(lambda: [target.copy_(parameter) for parameter in policy.parameters()]))
        others = max(others, collector.own_bytes())
    collector.close()
    models = {"learner": memory()["peak"] - before, "collector": others}
    return {
        "one_copy_seconds": statistics.median(copied[2:]),
        "publish_seconds": statistics.median(published[2:]),
        "publish_in_copies": statistics.median(p / c for p, c in zip(published[2:], copied[2:], strict=True)),
        "adopt_seconds": statistics.median(adopted[2:]),
        "first_publish_seconds": published[0],
        "peak_models": {name: size / policy.nbytes for name, size in models.items()},
    }


class _Thread:
    """A collector in this process; a thread would see the same."""

    def __init__(self, policy: Large) -> None:
        self._copy = InferenceCopy(policy)

    def adopt(self, snapshot: WeightSnapshot) -> float:
        seconds = _timed(lambda: self._copy.adopt(snapshot))
        if isinstance(self._copy.policy, Large):
            self._copy.policy.touch()
        return seconds

    def own_bytes(self) -> int:
        return 0

    def close(self) -> None:
        pass


class _Process:
    """A collector in a process of its own."""

    def __init__(self, policy: Large) -> None:
        self._channel, other = Channel.pair()
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(target=_collect, args=(without_weights(policy), other.socket))
        self._process.start()
        other.close()
        self._idle = int(self._answer())

    def adopt(self, snapshot: WeightSnapshot) -> float:
        self._channel.send("weights", {"version": snapshot.version, "digest": snapshot.digest}, snapshot.segment)
        return float(self._answer())

    def own_bytes(self) -> int:
        return memory(self._process.pid or 0)["own"] - self._idle

    def close(self) -> None:
        self._channel.close()
        self._process.join()

    def _answer(self) -> Any:
        message = self._channel.receive()
        assert message is not None
        return message.content()


def _collect(policy: Large, connection: socket.socket) -> None:
    torch.set_num_threads(1)
    channel = Channel(connection)
    channel.send("memory", memory()["own"])
    collector = _Thread(policy)
    with contextlib.suppress(EOFError):
        while (message := channel.receive()) is not None and message.segment is not None:
            snapshot = WeightSnapshot(**message.content(), data=message.segment.bytes, segment=message.segment)
            channel.send("adopted", collector.adopt(snapshot))


def _timed(call: Any) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=1_000_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=_RESULTS)
    args = parser.parse_args()
    nbytes = Large(args.parameters).nbytes
    result: dict[str, Any] = {
        "machine": machine(("torch",)),
        "parameters": args.parameters,
        "model_bytes": nbytes,
        "threads": torch.get_num_threads(),
    }
    for worker in ("thread", "process"):
        for verify in (False, True):
            measured = measure(worker, args.parameters, args.rounds, verify)
            result[f"{worker}, verified" if verify else worker] = measured
            print(f"{worker}, verify_weights {verify}: {json.dumps(measured)}", flush=True)
    args.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
