"""Who can reach the viewer: its own page, and neither other sites nor names that only lead to this machine."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator

import pytest

from embodichain.errors import ConfigError

pytestmark = pytest.mark.extra("viewer")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    from embodichain.viewer.server import open_server

    server = open_server("127.0.0.1", 8251)
    yield server.get_port()
    server.stop()


def websocket_status(port: int, host: str, origin: str | None) -> int:
    """Return the status with which a WebSocket is opened or refused."""
    import viser
    from websockets.exceptions import InvalidStatus
    from websockets.sync.client import connect
    from websockets.typing import Origin, Subprotocol

    connection = socket.create_connection(("127.0.0.1", port))
    try:
        with connect(
            f"ws://{host}/",
            sock=connection,
            origin=None if origin is None else Origin(origin),
            subprotocols=[Subprotocol(f"viser-v{viser.__version__}")],
            max_size=None,
        ) as client:
            client.recv(timeout=30)  # the scene and the panel
            return 101
    except InvalidStatus as error:
        return error.response.status_code


@pytest.mark.parametrize(
    ("host", "origin", "expected"),
    [
        ("localhost:{port}", "http://localhost:{port}", 101),
        ("127.0.0.1:{port}", "http://127.0.0.1:{port}", 101),
        ("localhost:9000", "http://localhost:9000", 101),  # a port that ssh forwards
        ("[::1]:{port}", "http://[::1]:{port}", 101),
        ("localhost:{port}", None, 101),  # no browser
        ("localhost:{port}", "https://evil.example", 403),
        ("localhost:{port}", "http://localhost:3000", 403),  # another page of this machine
        ("localhost:{port}", "http://localhost.evil.example:{port}", 403),
        ("127.0.0.1:{port}", "null", 403),  # a file, or a frame in a sandbox
        ("evil.example:{port}", "http://evil.example:{port}", 403),  # a name that leads here
        ("127.0.0.1.evil.example:{port}", "http://127.0.0.1.evil.example:{port}", 403),
    ],
)
def test_only_the_viewers_own_page_opens_a_websocket(port: int, host: str, origin: str | None, expected: int):
    host, origin = host.format(port=port), None if origin is None else origin.format(port=port)
    assert websocket_status(port, host, origin) == expected


def test_the_page_is_served_under_names_of_this_machine_alone(port: int):
    statuses = []
    for host in (f"localhost:{port}", f"127.0.0.1:{port}", f"evil.example:{port}", "[:"):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/", headers={"Host": host})
        response = connection.getresponse()
        statuses.append(response.status)
        if response.status == http.HTTPStatus.FORBIDDEN:
            assert b"open it as localhost" in response.read()
        connection.close()
    assert statuses == [200, 200, 403, 403]


def test_a_server_for_other_machines_answers_by_any_name():
    from embodichain.viewer.server import open_server, url_of

    server = open_server("0.0.0.0", 8253)
    try:
        port = server.get_port()
        assert websocket_status(port, f"robot.example:{port}", f"http://robot.example:{port}") == 101
    finally:
        server.stop()
    assert url_of("::1", 8080) == "http://[::1]:8080"
    assert url_of("127.0.0.1", 8080) == "http://localhost:8080"


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_refused_and_not_waited_for(host: str):
    from embodichain.viewer.server import open_server

    with pytest.raises(ConfigError, match=f"--host {host} --port 8254: cannot listen there"):
        open_server(host, 8254)
