"""Gradual magnitude pruning: while training goes on, ever more of the smallest weights are masked out."""

from typing import Any, ClassVar, Literal

from smallbert.errors import UserError
from smallbert.methods import Method
from smallbert.training.masks import magnitudes, mask_by_scores, maskable, settle_masks
from smallbert.training.schedule import Schedule


class Magnitude(Method):
    """Prune the smallest weights of the layers, more and more as training goes on."""

    trains: ClassVar[bool] = True
    stage: ClassVar[int] = 30

    keep: float = 0.1
    scope: Literal["local", "global"] = "local"
    begin: float = 0.1
    finish: float = 0.7
    shape: Literal["cubic", "linear", "constant"] = "cubic"

    def check(self) -> None:
        """A share, and a ramp inside the phase."""
        check_ramp(self)

    def attach(self, phase: Any) -> None:
        """The mask follows the weights as they are at each step, so that none is lost for good before the end."""
        keep = phase.dial("keep", Schedule(1.0, self.keep, self.begin, self.finish, self.shape))
        mask_by_scores(phase, maskable(phase.encoder), keep, self.scope, magnitudes)

    def settle(self, phase: Any) -> None:
        """The zeros stay zeros."""
        settle_masks(phase, maskable(phase.encoder))


def check_ramp(method: Any) -> None:
    """Refuse a share or a ramp that makes no sense."""
    if not 0 < method.keep < 1:
        raise UserError(f"{method.name}: keep is a share between 0 and 1, not {method.keep}")
    if not 0 <= method.begin <= method.finish <= 1:
        raise UserError(f"{method.name}: begin and finish are shares of the phase, 0 <= begin <= finish <= 1")
