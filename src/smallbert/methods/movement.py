"""Movement pruning (Sanh et al. 2020): keep the weights that training moves away from zero.

Each weight W has a score S whose straight-through gradient is W * dL/dW'; the highest scores stay. With
train_weights=False only masks are learned (SMP, Jiang et al. 2023): the whole backbone stays as it is, biases and norms
too; scores, the head and a mixture train.

The paper's scores start at zero and are learned from the first step on, when the model is still whole. Two ways to give
them a better start: init="magnitude" starts each at the rank of its weight's size, fresh=True forgets scores and
their moments when the ramp begins.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from smallbert.methods.magnitude import _Gradual
from smallbert.training.masks import Stacks, magnitudes, mask_by_scores, maskable, ranks, stack_up, train_scores


class Movement(_Gradual):
    """Prune the weights that training moves towards zero, by scores learned beside them."""

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
        start = self._start(phase, Stacks(phase.encoder, maskable(phase.encoder, self.what)))
        with torch.no_grad():
            for scores, value in zip(phase.modules[self.name], start, strict=True):
                scores.copy_(value)
                for moment in phase.optimiser.state[scores].values():
                    moment.zero_()

    def _start(self, phase: Any, stacks: Stacks) -> list[Tensor]:
        """Zeros; or the rank of each weight's size, from 0 to what scores can move in an epoch.

        Adam moves a score by about its rate a step whatever the gradient, so lr * (steps of an epoch) lies between the
        lowest and the highest rank: an epoch of steady gradients can turn the order round, one of noise cannot.
        """
        if self.init == "zeros":
            return stacks.filled(0.0, phase.device)
        stored = dict(phase.encoder.named_parameters())
        steps = min(1.0, phase.settings.epochs) * -(-len(phase.stream) // phase.settings.batch)
        sizes = ranks([magnitudes(group, stored) for group in stacks.groups], self.scope)
        return [size * (self.lr * steps) for size in sizes]


def freeze_backbone(phase: Any) -> None:
    """Leave every weight of the backbone as it is while the phase trains; dropout goes on."""
    phase.frozen += list(phase.encoder.backbone.parameters())
