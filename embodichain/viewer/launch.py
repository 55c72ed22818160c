"""Starts a viewer for a job in a separate process: ``embodichain train CONFIG --viewer``."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from embodichain.extras import require

MARKER = "job.json"
"""File in the folder where a job publishes; it holds the title of the job."""
_HOST, _FIRST_PORT, _PORTS = "127.0.0.1", 8080, 100
_SECONDS_TO_END = 5.0


@contextlib.contextmanager
def viewer_beside(title: str) -> Iterator[str]:
    """Serve a viewer of the environments that this process and its children make; yield its address."""
    from embodichain.envs.publishing import FOLDER_VARIABLE  # imports torch

    require("viser", extra="viewer")
    folder = Path(tempfile.mkdtemp(prefix="embodichain_viewer_"))  # private to this user
    (folder / MARKER).write_text(json.dumps({"title": title}), encoding="utf-8")
    port = _free_port()
    command = [sys.executable, "-m", "embodichain", "view", str(folder), "--host", _HOST, "--port", str(port)]
    before = os.environ.get(FOLDER_VARIABLE)
    quiet = {name: value for name, value in os.environ.items() if name != FOLDER_VARIABLE}
    # Its own process group, so that Ctrl-C reaches the job only; not a session, which Linux schedules separately.
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=quiet, process_group=0)
    os.environ[FOLDER_VARIABLE] = str(folder)
    try:
        yield f"http://localhost:{port}"
    finally:
        if before is None:
            os.environ.pop(FOLDER_VARIABLE, None)
        else:
            os.environ[FOLDER_VARIABLE] = before
        process.terminate()
        try:
            process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _free_port() -> int:
    """Return a free port."""
    for port in range(_FIRST_PORT, _FIRST_PORT + _PORTS):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((_HOST, port))
            return port
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])
