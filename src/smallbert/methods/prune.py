"""One-shot pruning, without training: the smallest weights become zeros and stay so. The parts of the lottery's rounds.

With by="random" those that stay are drawn at random: the floor that any criterion has to beat.
"""

from typing import Any, ClassVar, Literal

from smallbert.errors import UserError
from smallbert.methods import Method
from smallbert.training.masks import What, hold_zeros, maskable, note_density, prune_once


class _OneShot(Method):
    """What methods have that write zeros once."""

    stage: ClassVar[int] = 30

    keep: float = 0.5
    scope: Literal["local", "global"] = "global"
    by: Literal["magnitude", "random"] = "magnitude"
    what: What = "layers"

    def check(self) -> None:
        """A share."""
        if not 0 < self.keep < 1:
            raise UserError(f"{self.name}: keep is a share between 0 and 1, not {self.keep}")

    def fill(self, encoder: Any, before: Any, plan: dict[str, Any], task: Any, seed: int) -> None:
        """Write the zeros; what was zero before counts among them."""
        prune_once(encoder, maskable(encoder, self.what), self.keep, self.scope, self.by, seed)

    def settle(self, phase: Any) -> None:
        """Say how many weights are left."""
        note_density(phase, maskable(phase.encoder, self.what), self.what)


class Prune(_OneShot):
    """Set all but the largest weights of the layers to zero at once, for good."""

    def fill(self, encoder: Any, before: Any, plan: dict[str, Any], task: Any, seed: int) -> None:
        """Write the zeros, and hold them through whatever is trained from now on."""
        super().fill(encoder, before, plan, task, seed)
        hold_zeros(encoder, maskable(encoder, self.what))
