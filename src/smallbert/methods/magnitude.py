"""Gradual magnitude pruning: while training goes on, ever more of the smallest weights are masked out."""

from typing import Any, ClassVar, Literal

from torch import Tensor

from smallbert.errors import UserError
from smallbert.methods import Method
from smallbert.training.masks import magnitudes, mask_by_scores, maskable, settle_masks
from smallbert.training.schedule import Schedule


class _Gradual(Method):
    """What every method has that masks ever more weights while training goes on, from `begin` to `finish` of it."""

    trains: ClassVar[bool] = True
    stage: ClassVar[int] = 30

    keep: float = 0.1
    scope: Literal["local", "global"] = "local"
    begin: float = 0.1
    finish: float = 0.7
    shape: Literal["cubic", "linear", "constant"] = "cubic"

    def check(self) -> None:
        """A share, and a ramp inside the phase."""
        if not 0 < self.keep < 1:
            raise UserError(f"{self.name}: keep is a share between 0 and 1, not {self.keep}")
        if not 0 <= self.begin <= self.finish <= 1:
            raise UserError(f"{self.name}: begin and finish are shares of the phase, 0 <= begin <= finish <= 1")

    def share(self, phase: Any) -> Tensor:
        """The dial that says which share of the weights is seen."""
        return phase.dial("keep", Schedule(1.0, self.keep, self.begin, self.finish, self.shape))

    def settle(self, phase: Any) -> None:
        """The zeros stay zeros."""
        settle_masks(phase, maskable(phase.encoder))


class Magnitude(_Gradual):
    """Prune the smallest weights of the layers, more and more as training goes on."""

    def attach(self, phase: Any) -> None:
        """The mask follows the weights as they are at each step, so that none is lost for good before the end."""
        mask_by_scores(phase, maskable(phase.encoder), self.share(phase), self.scope, magnitudes)
