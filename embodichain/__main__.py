"""``python -m embodichain`` is the ``embodichain`` command."""

import sys

from embodichain.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
