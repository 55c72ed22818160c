"""Things that happen every so many steps."""

from __future__ import annotations


class Every:
    """Fires when a multiple of ``frequency`` steps was crossed, however large the jumps are; 0 never fires."""

    def __init__(self, frequency: int) -> None:
        self.frequency = frequency
        self.next = frequency
        """The step at which it fires next."""

    def due(self, step: int) -> bool:
        """Tell whether a multiple was crossed since the last time this was true; several at once count as one."""
        if not self.frequency or step < self.next:
            return False
        self.next = (step // self.frequency + 1) * self.frequency
        return True

    def continue_from(self, step: int) -> None:
        """Go on as if every multiple up to this step had fired."""
        self.next = (step // self.frequency + 1) * self.frequency if self.frequency else 0
