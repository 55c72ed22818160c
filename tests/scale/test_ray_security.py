"""Who can reach a Ray that is started here, the token that it asks for, and what others are told that have none."""

from __future__ import annotations

import ipaddress
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from stream_envs import stream_settings

from embodichain.agents.engine import OnlineDataEngine, OnlineDataEngineCfg
from embodichain.agents.processes.ray_token import keep_token_private
from embodichain.errors import ClusterError
from embodichain.extras import available

needs_ray = pytest.mark.skipif(not available("ray"), reason="Ray is not installed (extra ray)")


def test_a_token_is_kept_from_others(tmp_path: Path) -> None:
    file = tmp_path / "home" / "auth_token"
    keep_token_private(file)
    token = file.read_text()
    assert len(bytes.fromhex(token)) == 32
    file.chmod(0o644)  # as Ray writes it
    keep_token_private(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.read_text() == token
    assert os.listdir(file.parent) == ["auth_token"]


def test_an_empty_token_is_none_and_file_systems_may_lack_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "auth_token"
    file.write_text("\n")
    keep_token_private(file)
    assert len(bytes.fromhex(file.read_text())) == 32
    file.unlink()

    def no_links(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    keep_token_private(file)
    assert len(bytes.fromhex(file.read_text())) == 32
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["auth_token"]


def test_a_home_without_room_for_a_token_is_an_error_with_advice() -> None:
    with pytest.raises(ClusterError, match=r"/proc/nohome/\.ray/auth_token .*RAY_AUTH_TOKEN_PATH"):
        keep_token_private(Path("/proc/nohome/.ray/auth_token"))


@needs_ray
def test_nobody_at_the_address_is_an_error() -> None:
    nobody = OnlineDataEngine(OnlineDataEngineCfg(**stream_settings(workers="ray", address="127.0.0.1:9")))
    with pytest.raises(ClusterError, match=r"no Ray cluster at '127.0.0.1:9' \(nobody listens there\)"):
        nobody.start()
    nowhere = OnlineDataEngine(OnlineDataEngineCfg(**stream_settings(workers="ray", address="nowhere.invalid:9")))
    with pytest.raises(ClusterError, match=r"there is no host 'nowhere.invalid'"):
        nowhere.start()


_OWN = """
import sys, time
sys.path[:0] = {path!r}
import ray
from stream_envs import stream_settings
from embodichain.agents.engine import OnlineDataEngine, OnlineDataEngineCfg
engine = OnlineDataEngine(OnlineDataEngineCfg(**stream_settings(workers="ray")))
engine.start()
print(engine.worker_pids[0], ray.get_runtime_context().gcs_address, flush=True)
time.sleep(600)
"""


@needs_ray
def test_a_ray_of_its_own_keeps_to_itself_and_dies_with_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-c", _OWN.format(path=[str(Path(__file__).parents[1])])]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    environment["HOME"] = str(tmp_path)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as program:
        assert program.stdout is not None
        pid, address = program.stdout.readline().split()
        worker = int(pid)
        family = descendants(program.pid)
        listening = [address for pid in [program.pid, *family] for address in listening_at(pid)]
        assert worker in family
        assert len(listening) >= 4  # GCS, raylet, worker, driver
        assert {ipaddress.ip_address(address).is_loopback for address in listening} == {True}, listening
        servers = [pid for pid in family if "gcs_server" in Path(f"/proc/{pid}/cmdline").read_text()]
        assert len(servers) == 1
        assert "RAY_AUTH_MODE=token" in Path(f"/proc/{servers[0]}/environ").read_text().split("\0")
        assert stat.S_IMODE((tmp_path / ".ray" / "auth_token").stat().st_mode) == 0o600
        visitor = OnlineDataEngine(OnlineDataEngineCfg(**stream_settings(workers="ray", address=address)))
        for variable, words in {
            "": "RAY_AUTH_MODE is not set here",
            "RAY_AUTH_TOKEN": "the one in RAY_AUTH_TOKEN",
        }.items():
            if variable:
                monkeypatch.setenv("RAY_AUTH_MODE", "token")
                monkeypatch.setenv(variable, "of another cluster")
            began = time.monotonic()
            with pytest.raises(ClusterError, match=f"asks for its token, and .*{words}"):
                visitor.start()
            assert time.monotonic() - began < 10, "Ray tried again and again"
        program.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 15
    while state_of(worker) not in ("", "Z"):
        assert time.monotonic() < deadline, "a worker outlived its program"
        time.sleep(0.1)


_TWICE = """
import os, sys
from embodichain.agents.processes.ray_config import PlacementCfg
from embodichain.agents.processes.ray_session import RaySession
RaySession(None, 1, PlacementCfg()).close()
print("RAY_AUTH_MODE" in os.environ)
RaySession(sys.argv[1], 1, PlacementCfg()).close()
"""


def test_after_a_ray_of_its_own_a_program_can_connect_with_one_that_asks_for_no_token(
    cluster: Any, tmp_path: Path
) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    command = [sys.executable, "-c", _TWICE, cluster.address]
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=90)
    assert ended.stdout.split() == ["False"], ended.stderr
    assert ended.returncode == 0, ended.stderr


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def descendants(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:  # it has just ended
        return []
    return children + [below for child in children for below in descendants(child)]


def listening_at(pid: int) -> list[str]:
    """Return the addresses of the TCP sockets on which a process listens."""
    try:
        inodes = {
            os.readlink(entry).removeprefix("socket:[").rstrip("]") for entry in Path(f"/proc/{pid}/fd").iterdir()
        }
    except OSError:  # it has just ended
        return []
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:  # LISTEN
                raw = bytes.fromhex(fields[1].partition(":")[0])  # words of 4 bytes in the order of this machine
                words = [raw[at : at + 4][::-1] for at in range(0, len(raw), 4)]
                address = ipaddress.ip_address(b"".join(words))
                found.append(str(getattr(address, "ipv4_mapped", None) or address))
    return found
