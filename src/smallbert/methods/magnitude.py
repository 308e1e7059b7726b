"""Gradual magnitude pruning: during training, more and more of the smallest weights are masked out.

The well-tuned form (GMP*, Kurtic and Alistarh 2022) is the same with other settings: a drop to half or a third at once,
then equal steps on a cubic, with a teacher, as in magnitude(0.1, first=0.3, stairs=8) + distill + train(epochs=10).
"""

from typing import Any

from smallbert.methods.pruning import Gradual
from smallbert.training.masks import magnitudes, mask_by_scores, maskable, prune_once


class Magnitude(Gradual):
    """Prune the smallest weights of the layers, gradually during training."""

    def attach(self, phase: Any) -> None:
        """The mask follows the weights as they are at each step, so that none is lost for good before the end."""
        mask_by_scores(phase, maskable(phase.encoder, self.what), magnitudes, self.cuts(phase))

    def settle(self, phase: Any) -> None:
        """Of frozen weights in half precision many are as large as the smallest kept: only so many as asked stay."""
        if not phase.diverged:
            prune_once(phase.encoder, maskable(phase.encoder, self.what), self.keep, self.scope)
        super().settle(phase)
