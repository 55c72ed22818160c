"""CUDA graphs: GPU work that is captured after a warm-up and then replayed as one launch.

``record`` captures a function. ``Recorder`` decides when: after ``WARM_UP`` eager calls, the last of which must not
synchronize with the device. Work that cannot be captured stays eager, and a warning is logged once.
``kernels_work`` returns whether Triton kernels can be used.
"""

import gc
import importlib.util
import logging
import subprocess
import threading
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
"""Eager calls before the capture, in which libraries are loaded, kernels compiled and memory is pooled."""


@dataclass(frozen=True)
class Recorded(Generic[Result]):
    """A captured graph and the result of the captured function, whose memory every replay overwrites."""

    graph: torch.cuda.CUDAGraph
    result: Result

    def replay(self) -> Result:
        """Replay the graph and return its result."""
        self.graph.replay()
        return self.result


def record(
    work: Callable[[], Result],
    *,
    pool: Any = None,
    stream: torch.cuda.Stream | None = None,
    generator: torch.Generator | None = None,
) -> Recorded[Result]:
    """Capture a function as a CUDA graph; raises ``RuntimeError`` if it cannot be captured.

    Graphs captured on the same stream share the cuBLAS workspace. Graphs that may be replayed concurrently need a
    ``stream`` of their own; their kernels keep its priority on any stream. ``pool`` is the memory pool of another graph
    that is never replayed concurrently. A ``generator`` that the function draws from advances with every replay.
    """
    graph = torch.cuda.CUDAGraph()
    if generator is not None:
        graph.register_generator_state(generator)
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()  # freeing a GPU object would abort the capture
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            result = work()
    finally:
        if collecting:
            gc.enable()
    return Recorded(graph, result)


class Recorder:
    """Counts the eager calls of some work, and decides when to capture it, or to give up."""

    def __init__(self, subject: str) -> None:
        """``subject`` begins the warning that nothing is captured, such as "the update runs"."""
        self._subject = subject
        self.calls = 0
        """Eager calls since the last capture was discarded."""
        self.possible = True
        """Whether the work may still be captured."""

    @property
    def ready(self) -> bool:
        """Whether it is time to capture."""
        return self.possible and self.calls >= WARM_UP

    def warm_up(self, work: Callable[[], Result], clean_up: Callable[[], None] = lambda: None) -> Result:
        """Run the work eagerly. If the last call before the capture synchronizes with the device, give up on capturing,
        call ``clean_up`` and run the work again.

        Beside other threads (``concurrent_use``) this is not checked: the capture fails instead.
        """
        self.calls += 1
        if not self.possible or self.calls != WARM_UP or _users.count:
            return work()
        try:
            with refusing_to_wait():
                return work()
        except RuntimeError as error:
            self.give_up(error)
        clean_up()
        return work()

    def attempt(self, recording: Callable[[], Result]) -> Result | None:
        """Return the result of ``recording``; if it raises ``RuntimeError``, give up and return None."""
        try:
            return recording()
        except RuntimeError as error:
            self.give_up(error)
            return None

    def give_up(self, reason: Exception | str) -> None:
        """Stop capturing permanently, and log the reason."""
        self.possible = False
        first_line = (str(reason) or type(reason).__name__).splitlines()[0]
        _LOG.warning("%s without CUDA graphs, which costs speed: %s", self._subject, first_line)


@contextmanager
def refusing_to_wait() -> Iterator[None]:
    """Raise ``RuntimeError`` if the host synchronizes with the device, which cannot be captured.

    This holds for all threads: torch has one such mode per process.
    """
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that this is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


class _Users:
    """Counts the threads that use GPUs beside others."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()

    def add(self, number: int) -> None:
        with self._lock:
            self.count += number


_users = _Users()


@contextmanager
def concurrent_use() -> Iterator[None]:
    """Context of a thread that may use GPUs beside others: no thread is kept from synchronizing meanwhile."""
    users = _users
    users.add(1)
    try:
        yield
    finally:
        users.add(-1)


class _ConvolutionTiming:
    """cuDNN's ``benchmark`` mode, which all threads share: on while any thread wants it, then as it was before."""

    def __init__(self) -> None:
        self._wanted, self._before, self._lock = 0, False, threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            if not self._wanted:
                self._before = torch.backends.cudnn.benchmark
            self._wanted += 1
            torch.backends.cudnn.benchmark = True

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._wanted -= 1
            if not self._wanted:
                torch.backends.cudnn.benchmark = self._before


timed_convolutions = _ConvolutionTiming()
"""Context in which cuDNN times its algorithms to choose one for each convolution: pays where shapes are fixed."""


@dataclass(frozen=True)
class StepParts:
    """The parts of an environment step; their state is in tensors that they update in place."""

    before: Callable[[Tensor], None]
    """Takes the action and writes the controls."""
    simulate: Callable[[], None]
    """Advances the physics, which has its own graph; called every time, not captured."""
    beside: Callable[[], Any]
    """Draws reset states in advance; depends on neither the action nor the physics."""
    after: Callable[[Tensor, Any], Any]
    """Takes the action and the result of ``beside``; measures, rewards and resets; returns the result of the step."""

    def __call__(self, action: Tensor) -> Any:
        """Run a step eagerly."""
        self.before(action)
        self.simulate()
        return self.after(action, self.beside())


class GraphedStep:
    """An environment step that is replayed after a warm-up, with ``beside`` concurrent to the physics.

    The result is copied before it is returned, because the next replay overwrites its memory. ``adopt`` is called after
    the capture and returns a function to call after every replay.
    """

    def __init__(self, parts: StepParts, adopt: Callable[[], Callable[[], None]]) -> None:
        self._parts, self._adopt = parts, adopt
        self._recorder = Recorder("the step runs")
        self._replay: Callable[[Tensor], Any] | None = None

    def __call__(self, action: Tensor) -> Any:
        """Run a step and return its result, which later steps do not overwrite."""
        if self._replay is None and self._recorder.ready:
            self._replay = self._recorder.attempt(lambda: self._record(action))
        if self._replay is None:
            self._recorder.calls += 1
            return self._parts(action)
        return self._replay(action)

    def _record(self, action: Tensor) -> Callable[[Tensor], Any]:
        """Capture the parts around the physics; return a function that replays a step."""
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
    pairs: dict[int, tuple[Tensor, Tensor]] = {}  # copy and original

    def visit(node: Any) -> Any:
        if isinstance(node, Tensor):
            return pairs.setdefault(id(node), (torch.empty_like(node), node))[0]
        if isinstance(node, TensorDictBase):
            source = {key: visit(value) for key, value in node.items()}
            return TensorDict._new_unsafe(source, batch_size=node.batch_size, device=node.device)
        if isinstance(node, dict):
            return {key: visit(value) for key, value in node.items()}
        if isinstance(node, tuple):
            return tuple(visit(value) for value in node)
        return node

    copied = visit(tree)
    copy_together(*([pair[i] for pair in pairs.values()] for i in (0, 1)))
    return copied


def copy_together(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to its target, with one kernel per pair of dtypes."""
    groups: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
    for target, source in zip(targets, sources, strict=True):
        group = groups[target.dtype, source.dtype]
        group[0].append(target)
        group[1].append(source)
    for group in groups.values():
        torch._foreach_copy_(*group)


def copy_where(mask: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy rows of ``source`` into ``target`` ``[n, ...]``, of the same dtype, where ``mask`` ``[n]`` is true."""
    mask = mask.view(-1, *[1] * (target.dim() - 1))
    torch.where(mask, source.expand_as(target), target, out=target)  # one kernel


@cache
def kernels_work(device: torch.device) -> bool:
    """Return whether Triton compiles and runs on a device; logs the reason once if not."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    import triton
    import triton.language as tl
    from triton.errors import TritonError

    @triton.jit
    def write_one(out):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        tl.store(out, 1.0)

    try:
        out = torch.zeros(1, device=device)
        with torch.cuda.device(device):
            write_one[(1,)](out)
        return bool(out == 1.0)
    except (RuntimeError, OSError, subprocess.SubprocessError, TritonError) as error:
        # no C compiler, no headers of Python, or a GPU that Triton does not support
        _LOG.warning("our own GPU kernels are not used, which costs speed: %s", error)
        return False
