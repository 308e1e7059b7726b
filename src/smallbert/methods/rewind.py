"""Go back to marked weights while keeping what was pruned: the lottery ticket's second step."""

from typing import Any

import torch

from smallbert.errors import UserError
from smallbert.methods import Method


class Rewind(Method):
    """Set the backbone's weights back to a mark; weights pruned since then stay zero.

    label: name given by mark() to an encoder of the same shape
    """

    label: str

    def fits(self, phase: Any, steps: int | None) -> None:
        """There is such a mark, of the same shape."""
        if self.label not in phase.marks:
            raise UserError(
                f"rewind: nothing was marked {self.label!r}; marks so far: {', '.join(phase.marks) or 'none'}"
            )
        marked = phase.marks[self.label]
        then, now = (dict(one.backbone.named_parameters()) for one in (marked or phase.encoder, phase.encoder))
        for name in {**then, **now}:
            if name not in then or name not in now or then[name].shape != now[name].shape:
                raise UserError(f"rewind: the encoder has changed shape since {self.label!r} was marked ({name})")

    def settle(self, phase: Any) -> None:
        """Copy every backbone weight."""
        self.fits(phase, None)  # what else the phase does may have changed its shape
        then = dict(phase.marks[self.label].backbone.named_parameters())
        now = dict(phase.encoder.backbone.named_parameters())
        phase.hold_zeros()  # those of the weights as they are now, applied to the old ones by the fold
        with torch.no_grad():
            for name, parameter in now.items():
                parameter.copy_(then[name])
        phase.fold()
