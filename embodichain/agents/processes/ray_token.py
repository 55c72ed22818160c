"""The token that a Ray asks everybody for: where it lies, who can read it, and what to say when it is refused."""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path
from typing import Any

from embodichain.errors import ClusterError
from embodichain.extras import require

_MODE, _TOKEN, _TOKEN_FILE = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"


def ask_for_token() -> bool:
    """Let the Ray that is started next refuse whoever does not know this user's token, unless the user decided.

    Return whether that is to be taken back when it has ended.
    """
    if _MODE in os.environ:
        return False
    if not os.environ.get(_TOKEN) and not os.environ.get(_TOKEN_FILE):
        keep_token_private(Path.home() / ".ray" / "auth_token")
    os.environ[_MODE] = "token"
    _read_environment()
    return True


def stop_asking() -> None:
    """Let this process be as it was before: other clusters may ask for no token."""
    os.environ.pop(_MODE, None)
    _read_environment()


def keep_token_private(file: Path) -> None:
    """Make sure that there is a token in a file that nobody else can read: Ray would write it for everybody."""
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not file.exists() or not file.read_text().strip():
            _write_token(file)
        if file.stat().st_uid == os.getuid():
            file.chmod(0o600)
    except OSError as error:
        raise ClusterError(
            f"a Ray that is started here asks for a token, which cannot be kept in {file} ({error.strerror}): name "
            f"another file in {_TOKEN_FILE}, put a token into {_TOKEN}, or set {_MODE}=disabled to ask nobody"
        ) from error


def refusal(address: str) -> ClusterError:
    """Return the error for a cluster that does not take what it was shown, or was shown nothing."""
    mode = os.environ.get(_MODE)
    if mode != "token":
        shown = f"{_MODE} is {'not set' if mode is None else repr(mode)} here"
    elif os.environ.get(_TOKEN):
        shown = f"it was shown the one in {_TOKEN}"
    else:
        file = Path(os.environ.get(_TOKEN_FILE) or Path.home() / ".ray" / "auth_token")
        shown = f"it was shown the one in {file}" if file.exists() else f"there is none in {file}"
    return ClusterError(
        f"the Ray cluster at {address!r} asks for its token, and {shown}: set {_MODE}=token and copy ~/.ray/auth_token "
        "from the machine on which it was started"
    )


def _write_token(file: Path) -> None:
    """Write a new token; at no moment is there half a one."""
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")  # for this user only
    try:
        with os.fdopen(descriptor, "w") as written:
            written.write(secrets.token_hex(32))
        if file.exists():
            os.replace(name, file)  # it is empty
        else:
            _place(name, file)
    finally:
        Path(name).unlink(missing_ok=True)


def _place(name: str, file: Path) -> None:
    """Give a file its name, unless somebody was quicker."""
    try:
        os.link(name, file)
    except FileExistsError:
        return
    except OSError:  # this file system has no hard links
        os.replace(name, file)


def _read_environment() -> None:
    """Let Ray read the variable again, which it does when it is imported; that may have happened long ago."""
    raylet: Any = require("ray._raylet", extra="ray")
    raylet.Config.initialize("")
