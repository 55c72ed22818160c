"""The web server of the viewer: it finds a free port, and rejects requests of other sites.

A browser lets any page open a WebSocket to this machine. On a loopback address the server therefore accepts only host
names of this machine (a foreign domain may resolve to it as well), and WebSockets only from its own page.
"""

from __future__ import annotations

import contextlib
import http
import io
import ipaddress
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from embodichain.errors import ConfigError
from embodichain.extras import require

_PATCHING = threading.Lock()


def open_server(host: str, port: int) -> Any:
    """Return a viser server on the port, or on the next free one."""
    viser: Any = require("viser", extra="viewer")
    if not 0 < port < 65536:
        raise ConfigError(f"--port: expected a number between 1 and 65535, got {port}")
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        with socket.socket(found[0][0], socket.SOCK_STREAM) as probe:  # viser itself would block
            probe.bind(found[0][4])
        with contextlib.redirect_stdout(io.StringIO()), _rejecting_other_sites(is_loopback(host)):
            server = viser.ViserServer(host=host, port=port, label="EmbodiChain", verbose=False)
    except OSError as error:
        raise ConfigError(f"--host {host} --port {port}: cannot listen there: {error}") from error
    server.request_share_url = lambda *_, **__: None  # a page must not open a tunnel to this machine
    return server


def url_of(host: str, port: int) -> str:
    """Return the URL of the page."""
    name = "localhost" if host in ("127.0.0.1", "localhost") else f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is a loopback address."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def refusal(host: str | None, origin: str | None) -> str | None:
    """Return why a request to a loopback address is rejected by its headers, or ``None`` if it is accepted."""
    if host is None or not is_loopback(_hostname(f"//{host}")):
        return f"This viewer is for this machine alone: open it as localhost, not as {host}, or start it with --host.\n"
    if origin is not None and origin.partition("://")[2].lower() != host.lower():
        return f"This viewer is for its own page alone, and not for {origin}.\n"
    return None


def _hostname(address: str) -> str:
    try:
        return urlsplit(address).hostname or ""
    except ValueError:  # unbalanced brackets
        return ""


@contextlib.contextmanager
def _rejecting_other_sites(is_local: bool) -> Iterator[None]:
    """Make a server created inside reject requests of other pages; viser has no setting for this."""
    if not is_local:
        yield
        return
    websockets: Any = require("websockets.asyncio.server", extra="viewer")
    serve, is_patched = websockets.serve, False

    def checked_serve(*args: Any, process_request: Callable[[Any, Any], Any], **kwargs: Any) -> Any:
        nonlocal is_patched
        is_patched = True

        def check(connection: Any, request: Any) -> Any:
            why = refusal(request.headers.get("Host"), request.headers.get("Origin"))
            if why is not None:
                return connection.respond(http.HTTPStatus.FORBIDDEN, why)
            return process_request(connection, request)

        return serve(*args, process_request=check, **kwargs)

    with _PATCHING:
        websockets.serve = checked_serve
        try:
            yield
        finally:
            websockets.serve = serve
    if not is_patched:
        raise ConfigError("this version of viser cannot be kept from pages of other sites: install viser 1.1")
