"""EmbodiChain: embodied agents trained from live simulation."""

__version__ = "0.1.0"

from embodichain import aliases

aliases.install()
