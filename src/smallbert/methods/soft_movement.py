"""Soft movement pruning (Sanh et al. 2020): scores learned as in movement, but cut at a fixed height.

A weight is kept where sigmoid(S) > tau, tau going from 0 to `threshold` on a cubic curve. Scores start at 0, pulled
down by pull * mean over matrices of mean sigmoid(S), `pull` growing as tau does. How many are kept is an outcome.
"""

from collections import defaultdict
from typing import Any, ClassVar

import torch
from torch import Tensor

from smallbert.errors import UserError
from smallbert.methods import Method
from smallbert.methods.pruning import check_ramp, freeze_backbone
from smallbert.training.masks import (
    What,
    mask_by_scores,
    maskable,
    mean_of_means,
    settle_masks,
    train_scores,
)
from smallbert.training.ranking import Cuts
from smallbert.training.schedule import Schedule
from smallbert.training.thresholds import Hint, kth_largest

FLOOR = 0.005  # a matrix keeps at least this share of its weights, and one


class SoftMovement(Method):
    """Prune the weights whose learned scores fall below a threshold, under a penalty on all scores.

    pull: weight of the penalty on the scores from `finish` on; a higher one prunes more
    threshold: what sigmoid(score) must exceed for a weight to be kept, from `finish` on; all scores start at 0, i.e.
        0.5. At least 0.5 % of each matrix are always kept
    begin: share of the phase's steps before threshold and pull start to rise from 0, fast at first, then ever more
        slowly
    finish: share of the phase's steps after which both stay at their values
    lr: peak learning rate of the scores; warm-up and decay are the phase's
    train_weights: whether the weights are trained too. False trains only the masks, the head and any mixture of layers;
        kept weights do not change, nor do biases and norms
    what: 'layers' prunes all matrices of the layers; 'pooler' adds the pretrained dense layer above them, where there
        is one, and 'embeddings' the word embeddings. Biases, norms and the last layer of a head are never pruned
    """

    trains: ClassVar[bool] = True
    prunes: ClassVar[bool] = True
    stage: ClassVar[int] = 30

    pull: float = 200.0
    threshold: float = 0.1
    begin: float = 0.1
    finish: float = 0.7
    lr: float = 1e-2
    train_weights: bool = True
    what: What = "layers"

    def check(self) -> None:
        """A threshold that a sigmoid can pass, and a ramp inside the phase."""
        if not 0 < self.threshold < 1 or self.pull < 0:
            raise UserError(
                f"soft_movement: threshold is between 0 and 1 and pull 0 or more, not {self.threshold} and {self.pull}"
            )
        check_ramp(self)

    def attach(self, phase: Any) -> None:
        """One score a weight; the gradient reaches scores straight through the mask, not through the sigmoid."""
        names = maskable(phase.encoder, self.what)
        score = train_scores(phase, self.name, names, 0.0, self.lr)
        tau = phase.dial("threshold", self._ramp(self.threshold))
        mask_by_scores(phase, names, score, above(tau))
        if not self.train_weights:
            freeze_backbone(phase)

    def weights(self, phase: Any) -> dict[str, Any]:
        """The pull grows as the threshold does."""
        return {self.name: self._ramp(self.pull)}

    def loss(self, step: Any) -> dict[str, Tensor]:
        """What is pulled down; here the gradient does go through the sigmoid."""
        return {self.name: step.penalty(mean_of_means(step.phase, self.name, torch.sigmoid))}

    def settle(self, phase: Any) -> None:
        """The zeros stay zeros."""
        settle_masks(phase, self.what)

    def _ramp(self, end: float) -> Schedule:
        return Schedule(0.0, end, self.begin, self.finish, "cubic")


def above(tau: Tensor) -> Cuts:
    """Keep what has sigmoid(score) > tau, but never fewer than the floor allows."""
    hints = defaultdict[int, Hint](Hint)

    def cuts(scores: list[Tensor]) -> list[Tensor]:
        # A mask keeps what reaches its cut, so the cut for "more than" is the next number up.
        level = torch.logit(tau).float()
        level = torch.nextafter(level, torch.full_like(level, float("inf")))
        floors = [kth_largest(stack, _floor(stack), hints[place]) for place, stack in enumerate(scores)]
        return [torch.minimum(level, floor) for floor in floors]

    return cuts


def _floor(stack: Tensor) -> Tensor:
    return torch.full((len(stack),), int(FLOOR * stack.shape[1]) + 1, device=stack.device)
