"""Movement pruning (Sanh et al. 2020): keep the weights that training moves away from zero.

Each weight W has a score S whose straight-through gradient is W * dL/dW'; the highest are kept. They are learned
from the first step on, when the model is still whole.

The paper's scores start at zero; here they start close to it, apart from each other in the order of sizes, so that what
no gradient reaches (words that are in no text, layers that nothing reads) is ranked by size.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from smallbert.methods.pruning import Gradual, freeze_backbone
from smallbert.training.masks import (
    Stacks,
    magnitudes,
    mask_by_scores,
    maskable,
    sink_held_zeros,
    stack_up,
    train_scores,
)
from smallbert.training.ranking import ranks, spread_out

APART = 1e-4  # of one step of the scores: how far from zero they start at most


class Movement(Gradual):
    """Prune the weights that training moves towards zero, by scores learned along with them.

    lr: peak learning rate of the scores; warm-up and decay are the phase's
    init: initial scores: 'zeros' close to zero, in the order of the weights' sizes; 'magnitude' the rank of each
        weight's size, spread so far that one epoch of steady gradients can reverse the order
    fresh: whether scores are reset at `begin`, from the weights at that step, with Adam's moments at zero
    train_weights: whether the weights are trained too. False trains only the masks, the head and any mixture of layers;
        kept weights do not change, nor do biases and norms (SMP, Jiang et al. 2023)
    """

    lr: float = 1e-2
    init: Literal["zeros", "magnitude"] = "zeros"
    fresh: bool = False
    train_weights: bool = True

    def attach(self, phase: Any) -> None:
        """One score a weight, stored as stacks of like-sized matrices."""
        names = maskable(phase.encoder, self.what)
        start = self._start(phase, stack_up(phase.encoder, names))
        mask_by_scores(phase, names, train_scores(phase, self.name, names, start, self.lr), self.cuts(phase))
        if not self.train_weights:
            freeze_backbone(phase)

    def every(self) -> int:
        """Each step, to notice when the ramp begins."""
        return 1 if self.fresh else 0

    def look(self, phase: Any) -> None:
        """At the ramp's first step begin anew: scores from the weights as they are now, Adam's moments from nothing."""
        if phase.step != round(self.begin * phase.total):
            return
        stacks = Stacks(phase.encoder, maskable(phase.encoder, self.what))
        start = self._start(phase, stacks)
        sink_held_zeros(phase, stacks, start)
        with torch.no_grad():
            for scores, value in zip(phase.modules[self.name], start, strict=True):
                scores.copy_(value)
                for moment in phase.optimiser.state[scores].values():
                    moment.zero_()

    def _start(self, phase: Any, stacks: Stacks) -> list[Tensor]:
        """Next to zero; or the rank of each weight's size, from 0 to what scores can move in an epoch.

        Adam moves a score by about its rate a step whatever the gradient, so lr * (steps of an epoch) lies between the
        lowest and the highest rank: an epoch of steady gradients can turn the order round, one of noise cannot.
        """
        stored = dict(phase.encoder.named_parameters())
        sizes = [magnitudes(group, stored) for group in stacks.groups]
        if self.init == "zeros":
            return spread_out(sizes, self.scope, APART * self.lr)
        steps = min(1.0, phase.settings.epochs) * phase.steps_an_epoch
        return [rank * (self.lr * steps) for rank in ranks(sizes, self.scope)]
