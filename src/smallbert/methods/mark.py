"""Remember an encoder under a name: as a teacher, or as a place to go back to."""

from typing import Any

from smallbert.errors import UserError
from smallbert.methods import Method


class Mark(Method):
    """Remember the encoder as it is now, under a name that distill and rewind can use.

    label: name of the mark, any text but '' and 'latest'; used again, it names the later encoder
    """

    label: str

    def check(self) -> None:
        """A name, and none that has a meaning of its own."""
        if self.label in ("", "latest"):
            raise UserError(
                f"mark: a name is any text but '' and 'latest', which is the last model trained without a teacher, not "
                f"{self.label!r}; write mark('teacher')"
            )

    def settle(self, phase: Any) -> None:
        """Keep a copy."""
        phase.marks[self.label] = phase.encoder.copy()

    take_over = settle
