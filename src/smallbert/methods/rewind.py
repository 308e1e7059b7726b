"""Go back to marked weights while keeping what was pruned: the lottery ticket's second step."""

from typing import Any

import torch

from smallbert.errors import UserError
from smallbert.methods import Method


class Rewind(Method):
    """Set the backbone's weights back to a mark; zeros that were settled since stay zeros."""

    label: str

    def settle(self, phase: Any) -> None:
        """Copy every backbone weight of the same name and shape."""
        if self.label not in phase.marks:
            raise UserError(
                f"rewind: nothing was marked {self.label!r}; marks so far: {', '.join(phase.marks) or 'none'}"
            )
        then = dict(phase.marks[self.label].backbone.named_parameters())
        with torch.no_grad():
            for name, parameter in phase.encoder.backbone.named_parameters():
                if name not in then or then[name].shape != parameter.shape:
                    raise UserError(f"rewind: the encoder has changed shape since {self.label!r} was marked ({name})")
                parameter.copy_(then[name])
        phase.fold()

    def attach(self, phase: Any) -> None:
        """The zeros that are held now are applied to the old weights too."""
        phase.hold_zeros()
