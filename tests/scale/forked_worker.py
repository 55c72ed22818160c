"""Start a worker of Ray by a fork of the process that has already imported torch, and exit as the worker does.

Nodes run this instead of Ray's ``setup_worker.py``, which reads two arguments and runs the others as a Python program.
"""

import json
import os
import socket
import struct
import sys

if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if not word.startswith(("--language=", "--serialized-runtime-env-context="))]
    status, write = os.pipe()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(os.environ["TESTS_FORKED_AT"])
        message = json.dumps([words, os.getcwd(), dict(os.environ), True]).encode()
        socket.send_fds(server, [message], [1, 2, write])
    os.close(write)
    with os.fdopen(status, "rb") as reports:
        *_, (_, code) = struct.iter_unpack("ii", reports.read())  # the last report has the exit code
    sys.exit(code)
