"""Gradual magnitude pruning: while training goes on, ever more of the smallest weights are masked out.

The well-tuned form (GMP*, Kurtic and Alistarh 2022) is the same with other settings: a drop to half or a third at once,
then equal steps on a cubic way, with a teacher, as in magnitude(0.1, first=0.3, stairs=8) + distill + train(epochs=10).
"""

from typing import Any, ClassVar, Literal

from smallbert.errors import UserError
from smallbert.methods import Method
from smallbert.training.masks import Cuts, What, magnitudes, mask_by_scores, maskable, settle_masks, top
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
    first: float = 1.0  # what is kept at `begin`: below 1, the way starts with a drop
    stairs: int = 0  # go down in so many equal steps of time; 0: at every step
    what: What = "layers"

    def check(self) -> None:
        """A share, and a ramp inside the phase."""
        if not 0 < self.keep < 1:
            raise UserError(f"{self.name}: keep is a share between 0 and 1, not {self.keep}")
        if not 0 < self.first <= 1:
            raise UserError(f"{self.name}: first is a share above 0 and up to 1, not {self.first}")
        if self.stairs < 0:
            raise UserError(f"{self.name}: stairs is a number of steps, or 0 for a smooth way, not {self.stairs}")
        check_ramp(self)

    def schedule(self) -> Schedule:
        """Which share of the weights is seen, by how much of the phase is done."""
        before = None if self.first == 1 else 1.0
        return Schedule(max(self.first, self.keep), self.keep, self.begin, self.finish, self.shape, self.stairs, before)

    def cuts(self, phase: Any) -> Cuts:
        """Where scores are cut, which follows the dial "keep"."""
        return top(phase.dial("keep", self.schedule()), self.scope)

    def settle(self, phase: Any) -> None:
        """The zeros stay zeros."""
        settle_masks(phase, self.what)


class Magnitude(_Gradual):
    """Prune the smallest weights of the layers, more and more as training goes on."""

    def attach(self, phase: Any) -> None:
        """The mask follows the weights as they are at each step, so that none is lost for good before the end."""
        mask_by_scores(phase, maskable(phase.encoder, self.what), magnitudes, self.cuts(phase))


def check_ramp(method: Any) -> None:
    """A ramp from `begin` to `finish` lies inside the phase."""
    if not 0 <= method.begin <= method.finish <= 1:
        raise UserError(f"{method.name}: begin and finish are shares of the phase, 0 <= begin <= finish <= 1")
