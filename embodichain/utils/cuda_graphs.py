"""CUDA graphs: work on a GPU that is recorded once it is warm and replayed as one launch from then on.

``record`` records a function. ``Recorder`` decides when, and whether: after ``WARM_UP`` ordinary calls, the last of
which must not wait for the device. What cannot be recorded keeps running as usual, and the log says so once.
The module also tells whether Triton kernels can be used (``kernels_work``).
"""

import gc
import importlib.util
import logging
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

Result = TypeVar("Result")
_LOG = logging.getLogger(__name__)
WARM_UP = 3
"""Ordinary calls before recording: libraries load, kernels are compiled and memory is pooled in them."""


@dataclass(frozen=True)
class Recorded(Generic[Result]):
    """A graph and what the recorded function returned: memory that every replay writes to."""

    graph: torch.cuda.CUDAGraph
    result: Result

    def replay(self) -> Result:
        """Do the work once more."""
        self.graph.replay()
        return self.result


def record(
    work: Callable[[], Result],
    *,
    pool: Any = None,
    stream: torch.cuda.Stream | None = None,
    generator: torch.Generator | None = None,
) -> Recorded[Result]:
    """Record a function as a graph; ``RuntimeError`` tells why it cannot be.

    Graphs that were recorded on the same stream share working memory of cuBLAS; those that may be replayed at the same
    time need a ``stream`` of their own, whose priority their kernels keep wherever they are replayed. ``pool`` is the
    memory pool of a graph that is never replayed at the same time. A ``generator`` that the function draws from
    advances with every replay.
    """
    graph = torch.cuda.CUDAGraph()
    if generator is not None:
        graph.register_generator_state(generator)
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()  # freeing a GPU object would break the recording off
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            result = work()
    finally:
        if collecting:
            gc.enable()
    return Recorded(graph, result)


class Recorder:
    """Counts the ordinary calls of some work, and records it once they are enough and nothing speaks against it."""

    def __init__(self, subject: str) -> None:
        """``subject`` begins the log line that says why nothing is recorded: "the update runs"."""
        self._subject = subject
        self.calls = 0
        """Ordinary calls since recording was last forgotten."""
        self.possible = True
        """Whether work may still be recorded."""

    @property
    def ready(self) -> bool:
        """Whether it is time to record."""
        return self.possible and self.calls >= WARM_UP

    def warm_up(self, work: Callable[[], Result], clean_up: Callable[[], None] = lambda: None) -> Result:
        """Do the work as usual. If the last call before recording waits for the device, give up, and repeat it."""
        self.calls += 1
        if not self.possible or self.calls != WARM_UP:
            return work()
        try:
            with refusing_to_wait():
                return work()
        except RuntimeError as error:
            self.give_up(error)
        clean_up()
        return work()

    def attempt(self, recording: Callable[[], Result]) -> Result | None:
        """Return what ``recording`` returns, or give up and return ``None`` if it raises ``RuntimeError``."""
        try:
            return recording()
        except RuntimeError as error:
            self.give_up(error)
            return None

    def give_up(self, reason: Exception | str) -> None:
        """Record nothing from now on, and log why."""
        self.possible = False
        first_line = (str(reason) or type(reason).__name__).splitlines()[0]
        _LOG.warning("%s without CUDA graphs, which costs speed: %s", self._subject, first_line)


@contextmanager
def refusing_to_wait() -> Iterator[None]:
    """Raise ``RuntimeError`` where the host waits for the device: such a thing cannot be recorded."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is called a prototype, once
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@dataclass(frozen=True)
class StepParts:
    """The parts of an environment step, which keep their state in tensors that they update in place."""

    before: Callable[[Tensor], None]
    """Takes the action and writes the controls."""
    simulate: Callable[[], None]
    """Advances the physics, which has a graph of its own; is called every time, not recorded."""
    beside: Callable[[], Any]
    """Draws the reset states that may be needed; needs neither the action nor the physics."""
    after: Callable[[Tensor, Any], Any]
    """Takes the action and what ``beside`` returned; measures, rewards and resets; returns the result of the step."""

    def __call__(self, action: Tensor) -> Any:
        """Do an ordinary step."""
        self.before(action)
        self.simulate()
        return self.after(action, self.beside())


class GraphedStep:
    """An environment step that is replayed once it is warm; ``beside`` then runs while the physics does.

    What the step returns is copied before it is handed out, because the next replay writes to the same memory.
    ``adopt`` is called after recording and returns what is to be done after every replay.
    """

    def __init__(self, parts: StepParts, adopt: Callable[[], Callable[[], None]]) -> None:
        self._parts, self._adopt = parts, adopt
        self._recorder = Recorder("the step runs")
        self._replay: Callable[[Tensor], Any] | None = None

    def __call__(self, action: Tensor) -> Any:
        """Return what the step returns, in memory of its own."""
        if self._replay is None and self._recorder.ready:
            self._replay = self._recorder.attempt(lambda: self._record(action))
        if self._replay is None:
            self._recorder.calls += 1
            return self._parts(action)
        return self._replay(action)

    def _record(self, action: Tensor) -> Callable[[Tensor], Any]:
        """Record the parts around the physics; return what does a step with them."""
        parts, own = self._parts, action.clone()
        side = torch.cuda.Stream(action.device)
        before, beside = record(lambda: parts.before(own)), record(parts.beside)
        after = record(lambda: parts.after(own, beside.result))
        restore = self._adopt()

        def replay(action: Tensor) -> Any:
            own.copy_(action)
            before.replay()
            current = torch.cuda.current_stream(action.device)
            side.wait_stream(current)
            with torch.cuda.stream(side):
                beside.replay()
            parts.simulate()
            current.wait_stream(side)
            after.replay()
            restore()
            return _copy(after.result)

        return replay


def _copy(tree: Any) -> Any:
    """Copy all tensors of a nested structure in a few kernels."""
    twins: dict[int, tuple[Tensor, Tensor]] = {}

    def visit(node: Any) -> Any:
        if isinstance(node, Tensor):
            return twins.setdefault(id(node), (torch.empty_like(node), node))[0]
        if isinstance(node, TensorDictBase):
            source = {key: visit(value) for key, value in node.items()}
            return TensorDict._new_unsafe(source, batch_size=node.batch_size, device=node.device)
        if isinstance(node, dict):
            return {key: visit(value) for key, value in node.items()}
        if isinstance(node, tuple):
            return tuple(visit(value) for value in node)
        return node

    copied = visit(tree)
    copy_together(*([pair[i] for pair in twins.values()] for i in (0, 1)))
    return copied


def copy_together(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors to others of the same shapes, all of a type in one kernel."""
    groups: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
    for target, source in zip(targets, sources, strict=True):
        group = groups[target.dtype, source.dtype]
        group[0].append(target)
        group[1].append(source)
    for group in groups.values():
        torch._foreach_copy_(*group)


@cache
def kernels_work(device: torch.device) -> bool:
    """Tell whether Triton compiles and runs on a device; the log says why not, once."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    import triton
    import triton.language as tl

    @triton.jit
    def write_one(out):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        tl.store(out, 1.0)

    try:
        out = torch.zeros(1, device=device)
        with torch.cuda.device(device):
            write_one[(1,)](out)
        return bool(out == 1.0)
    except (RuntimeError, OSError) as error:  # no compiler on this machine, or a GPU that Triton does not know
        _LOG.warning("our own GPU kernels are not used, which costs speed: %s", error)
        return False
