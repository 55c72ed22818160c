"""Who can reach a Ray that is started here, and which clusters are refused: those with another token, or with none."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from stream_envs import stream_settings

from embodichain.agents.engine import OnlineDataEngine, OnlineDataEngineCfg
from embodichain.agents.processes.ray_backend import PlacementCfg, RayCluster
from embodichain.errors import ClusterError
from embodichain.extras import available
from tests.programs import Program, descendants, ends_soon, start_program

needs_ray = pytest.mark.skipif(not available("ray"), reason="Ray is not installed (extra ray)")


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
from stream_envs import stream_settings
from embodichain.agents.engine import OnlineDataEngine, OnlineDataEngineCfg
engine = OnlineDataEngine(OnlineDataEngineCfg(**stream_settings(workers="ray")))
engine.start()
import ray
print(engine.worker_pids[0], ray.get_runtime_context().gcs_address, flush=True)
time.sleep(600)
"""
_VISITOR = """
import sys, time
from embodichain.agents.processes.ray_backend import PlacementCfg, RayCluster
sleep, pauses = time.sleep, []
time.sleep = lambda seconds: (pauses.append(seconds), sleep(seconds))
try:
    RayCluster(sys.argv[1], 1, PlacementCfg())
finally:
    print(sum(pauses))  # not how long it took: that is left to how busy the machine is
"""


def without_token(home: Path) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return environment | {"HOME": str(home), "PYTHONPATH": str(Path(__file__).parents[2])}


def program(code: str, home: Path, *arguments: str, **variables: str) -> Program:
    """Start a program that has no token, but for what ``variables`` say."""
    code = code.format(path=[str(Path(__file__).parents[1])])
    return start_program("-c", code, *arguments, env=without_token(home) | variables)


@needs_ray
def test_a_ray_of_its_own_keeps_to_itself_and_dies_with_the_program(tmp_path: Path) -> None:
    with program(_OWN, tmp_path) as owner:
        try:
            pid, address = owner.stdout.readline().split()
            worker = int(pid)
            family = descendants(owner.pid)
            listening = [address for pid in [owner.pid, *family] for address in listening_at(pid)]
            assert worker in family
            assert len(listening) >= 4  # GCS, raylet, worker, driver
            assert {ipaddress.ip_address(address).is_loopback for address in listening} == {True}, listening
            servers = [pid for pid in family if "gcs_server" in command_of(pid)]
            assert len(servers) == 1
            assert "RAY_AUTH_MODE=token" in Path(f"/proc/{servers[0]}/environ").read_text().split("\0")
            assert not (tmp_path / ".ray" / "auth_token").exists()
            refused = {
                "there is none in": program(_VISITOR, tmp_path, address),
                "given the one in RAY_AUTH_TOKEN": program(_VISITOR, tmp_path, address, RAY_AUTH_TOKEN="another"),
                "RAY_AUTH_MODE is 'disabled' here": program(_VISITOR, tmp_path, address, RAY_AUTH_MODE="disabled"),
            }
            for words, visitor in refused.items():
                out, err = visitor.communicate(timeout=120)
                assert re.search(f"ClusterError: .* asks for its token, and .*{words}", err), err
                assert float(out) < 10, "Ray tried again and again"
        finally:
            owner.kill()
    assert ends_soon(worker), "a worker outlived its program"


_FORGETS = """
from tests.agents.rl.async_cases import make_collector, make_learner
make_collector(make_learner(), worker="ray", max_policy_lag=1).collect()
"""


@needs_ray
def test_a_program_that_forgets_its_collector_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _FORGETS]
    done = subprocess.run(command, env=without_token(tmp_path), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr


_OPEN = """
import sys
sys.path[:0] = {path!r}
import ray
from stream_envs import stream_settings
from embodichain.agents.engine import OnlineDataEngine, OnlineDataEngineCfg
ray.init("local", num_cpus=1, include_dashboard=False, _node_ip_address="127.0.0.1")
OnlineDataEngine(OnlineDataEngineCfg(**stream_settings(workers="ray"))).start()
"""


@needs_ray
def test_a_cluster_that_asks_for_no_token_is_refused(tmp_path: Path) -> None:
    variables = {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    _, err = program(_OPEN, tmp_path, **variables).communicate(timeout=240)
    assert "ClusterError: the Ray cluster does not use token authentication" in err, err


@needs_ray
def test_a_ray_that_would_listen_on_all_interfaces_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "192.0.2.7")
    with pytest.raises(ClusterError, match="would listen on all network interfaces"):
        RayCluster(None, 1, PlacementCfg())


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:  # it has just ended
        return ""


def listening_at(pid: int) -> list[str]:
    """Return the addresses of the TCP sockets on which a process listens."""
    inodes, lines = set(), []
    with contextlib.suppress(OSError):  # it has just ended
        for table in ("tcp", "tcp6"):
            lines.append(Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:])
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # or closed this one
                inodes.add(os.readlink(entry).removeprefix("socket:[").rstrip("]"))
    found = []
    for table_lines in lines:
        for line in table_lines:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:  # LISTEN
                raw = bytes.fromhex(fields[1].partition(":")[0])  # words of 4 bytes in the order of this machine
                words = [raw[at : at + 4][::-1] for at in range(0, len(raw), 4)]
                address = ipaddress.ip_address(b"".join(words))
                found.append(str(getattr(address, "ipv4_mapped", None) or address))
    return found
