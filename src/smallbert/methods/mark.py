"""Remember an encoder under a name: as a teacher, or as a place to go back to."""

from typing import Any

from smallbert.methods import Method


class Mark(Method):
    """Remember the encoder as it is now, under a name that distill and rewind can use."""

    label: str

    def settle(self, phase: Any) -> None:
        """Keep a copy."""
        phase.marks[self.label] = phase.encoder.copy()

    take_over = settle
