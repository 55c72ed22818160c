"""What all tests share.

Tests may interrupt the programs they start, also where the test run itself was started in the background: a shell
starts background jobs with SIGINT ignored, and every process below them inherits that.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let torch compute in one thread, whose results do not depend on how work was split."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
