"""One-shot pruning, without training: the smallest weights become zeros and stay so, as in the lottery's rounds."""

from typing import Any

from smallbert.methods.pruning import OneShot
from smallbert.training.masks import hold_zeros, maskable


class Prune(OneShot):
    """Set all but the largest weights of the layers to zero at once; they stay zero."""

    def fill(self, encoder: Any, before: Any, plan: dict[str, Any], task: Any, seed: int) -> None:
        """Write the zeros, and hold them through whatever is trained from now on."""
        super().fill(encoder, before, plan, task, seed)
        hold_zeros(encoder, maskable(encoder, self.what))
