"""What all tests share.

Tests may interrupt the programs they start, also where the test run itself was started in the background: a shell
starts background jobs with SIGINT ignored, and every process below them inherits that.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch

from embodichain.extras import available

EXTRAS = {
    "ray": ("ray",),
    "data": ("pyarrow", "av"),
    "export": ("onnx", "onnxscript", "onnxruntime"),
    "vla": ("transformers", "peft"),
    "peers": ("torchrl", "stable_baselines3"),
    "sweep": ("optuna",),
    "robots": ("robosuite", "gymnasium_robotics"),
    "viewer": ("viser", "trimesh", "selenium"),
    "docs": ("mkdocs", "material", "mkdocstrings", "latex2mathml", "mmdc"),
}
"""What a test marked ``extra(NAME)`` imports."""

LONGEST = (
    *(
        "stream_faults",
        "pool",
        "env_processes",
        "stream_examples",
        "async_faults",
        "remote_env",
        "launch",
        "async_collector",
        "resume",
    ),
    *("exit", "engine", "distributed", "train", "corruption", "foreign_envs", "runs", "snapshots", "examples"),
    *("async_training", "shared_buffer", "determinism", "demonstrations", "imitate"),
    *(
        "pages",
        "ray_faults",
        "ray_security",
        "real_lerobot",
        "sweeps",
        "ray_stream",
        "live",
        "ray_rl",
        "dagger",
        "export",
        "site",
        "clients",
    ),
)
"""Files that take longest begin first, so that at the end no process waits for another."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let torch compute in one thread, whose results do not depend on how work was split."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-extras", action="store_true", help="a test that is skipped for want of an extra has failed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests whose extra is not installed; those with ``ray`` in the name of their file need that one."""
    places = {f"test_{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
    for item in items:
        if "scale" in item.path.parts or item.path.name.startswith("test_ray"):
            item.add_marker(pytest.mark.extra("ray"))
        names = [name for mark in item.iter_markers("extra") for name in mark.args]
        missing = [name for name in names if not all(map(available, EXTRAS[name]))]
        if missing:
            item.add_marker(pytest.mark.skip(reason=f"needs the extra {missing[0]!r}"))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run with ``--all-extras`` that has skipped a test for want of one."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not session.config.getoption("--all-extras"):
        return
    skipped = [str(report.longrepr) for report in reporter.stats.get("skipped", ())]
    if any("needs the extra" in reason for reason in skipped) and not session.exitstatus:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
