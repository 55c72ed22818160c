"""Ending a run when somebody asks for it, between two iterations instead of somewhere inside one."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

_STDERR = 2


class StopSignals:
    """While active, the first Ctrl-C (or SIGTERM) asks the loop to stop; the second one interrupts it at once."""

    def __init__(self, aloud: bool = True) -> None:
        """``aloud`` says at once that a signal was heard."""
        self._aloud = aloud
        self.received: int | None = None
        """Number of the signal that asked to stop."""
        self._former: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python handles signals nowhere else
            for number in (signal.SIGINT, signal.SIGTERM):
                self._former[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former.clear()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = number
        if self._aloud:  # past all streams and locks: the program may be in the middle of writing to one
            with contextlib.suppress(OSError):
                clear = "\r\x1b[2K" if os.isatty(_STDERR) else ""
                os.write(_STDERR, f"{clear}stopping after this iteration; a second signal stops at once\n".encode())
