"""The server of the page: on the port that is free, and closed to pages of other sites.

A browser lets any page open a WebSocket to this machine. On a loopback address the server therefore answers only to
names of this machine (a name of somebody else's domain may lead here as well), and opens WebSockets only for its own
page.
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

_GUARDING = threading.Lock()


def open_server(host: str, port: int) -> Any:
    """Return a viser server on the port, or on one of the next if it is taken."""
    viser: Any = require("viser", extra="viewer")
    if not 0 < port < 65536:
        raise ConfigError(f"--port: expected a number between 1 and 65535, got {port}")
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        with socket.socket(found[0][0], socket.SOCK_STREAM) as probe:  # viser itself would wait for ever
            probe.bind(found[0][4])
        with contextlib.redirect_stdout(io.StringIO()), _guarded(is_loopback(host)):  # it prints its address, as we do
            server = viser.ViserServer(host=host, port=port, label="EmbodiChain", verbose=False)
    except OSError as error:
        raise ConfigError(f"--host {host} --port {port}: cannot listen there: {error}") from error
    server.request_share_url = lambda *_, **__: None  # a page must not open a tunnel to this machine
    return server


def url_of(host: str, port: int) -> str:
    """Return the address of the page."""
    name = "localhost" if host in ("127.0.0.1", "localhost") else f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}"


def is_loopback(host: str) -> bool:
    """Tell whether a name or address is one of this machine alone."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def refusal(host: str | None, origin: str | None) -> str | None:
    """Return why a request to a loopback address is refused, by its headers; ``None`` if it is not."""
    if host is None or not is_loopback(_hostname(f"//{host}")):
        return f"This viewer is for this machine alone: open it as localhost, not as {host}, or start it with --host.\n"
    if origin is not None and origin.partition("://")[2].lower() != host.lower():
        return f"This viewer is for its own page alone, and not for {origin}.\n"
    return None


def _hostname(address: str) -> str:
    try:
        return urlsplit(address).hostname or ""
    except ValueError:  # brackets that do not match
        return ""


@contextlib.contextmanager
def _guarded(is_local: bool) -> Iterator[None]:
    """Let a server that is made meanwhile refuse requests that are none of its page's; viser has no setting for it."""
    if not is_local:
        yield
        return
    websockets: Any = require("websockets.asyncio.server", extra="viewer")
    serve, is_guarded = websockets.serve, False

    def guarded_serve(*args: Any, process_request: Callable[[Any, Any], Any], **kwargs: Any) -> Any:
        nonlocal is_guarded
        is_guarded = True

        def check(connection: Any, request: Any) -> Any:
            why = refusal(request.headers.get("Host"), request.headers.get("Origin"))
            if why is not None:
                return connection.respond(http.HTTPStatus.FORBIDDEN, why)
            return process_request(connection, request)

        return serve(*args, process_request=check, **kwargs)

    with _GUARDING:
        websockets.serve = guarded_serve
        try:
            yield
        finally:
            websockets.serve = serve
    if not is_guarded:
        raise ConfigError("this version of viser cannot be kept from pages of other sites: install viser 1.1")
