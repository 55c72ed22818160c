"""Let tests interrupt the programs they start, also where the test run itself was started in the background.

A shell starts background jobs with SIGINT ignored, and every process below them inherits that.
"""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
