"""L0 regularisation by hard-concrete masks (Louizos et al. 2018), as in the movement-pruning paper.

While training, each weight is multiplied by a random mask M = clip(1.2 s - 0.1, 0, 1), where
s = sigmoid((log u - log(1 - u) + S) / beta), u uniform; the pull is on P(M > 0) = sigmoid(S - beta log(0.1 / 1.1)).
In use M = clip(1.2 sigmoid(S) - 0.1, 0, 1), without beta: zero where S < -2.398, and fractions are folded into weights.
"""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from smallbert.errors import UserError
from smallbert.methods import Method
from smallbert.methods.pruning import freeze_backbone
from smallbert.training.masks import (
    MASK_STAGE,
    What,
    maskable,
    mean_of_means,
    settle_masks,
    stack_up,
    train_scores,
)
from smallbert.training.phase import Weights

BETA, LOW, HIGH = 2 / 3, -0.1, 1.1
SHIFT = -BETA * math.log(-LOW / HIGH)  # 1.599
EDGE = 1e-4  # draws keep this far from 0 and 1


class L0(Method):
    """Prune by random masks whose probability to be open is learned, under a penalty on open masks.

    pull: weight of the penalty on open masks, from the first step on; a higher one prunes more
    lr: peak learning rate of the scores; warm-up and decay are the phase's
    start: initial score of every mask; in use, 2.197 (log 9) is a mask of 0.98, and 0 one of 0.5
    train_weights: whether the weights are trained too. False trains only the masks, the head and any mixture of layers;
        the backbone changes only by the masks that are folded into it
    what: 'layers' prunes all matrices of the layers; 'pooler' adds the pretrained dense layer above them, where there
        is one, and 'embeddings' the word embeddings. Biases, norms and the last layer of a head are never pruned
    """

    trains: ClassVar[bool] = True
    prunes: ClassVar[bool] = True
    stage: ClassVar[int] = 30

    pull: float = 50.0
    lr: float = 1e-1
    start: float = 2.197
    train_weights: bool = True
    what: What = "layers"

    def check(self) -> None:
        """A pull."""
        if self.pull < 0:
            raise UserError(f"l0: pull is 0 or more, not {self.pull}")

    def attach(self, phase: Any) -> None:
        """Masks are drawn while the encoder trains, and are what they will be in use whenever it does not."""
        names = maskable(phase.encoder, self.what)
        score = train_scores(phase, self.name, names, self.start, self.lr)
        stacks = stack_up(phase.encoder, names)

        def make(weights: Weights) -> Weights:
            masked: Weights = {}
            for group in stacks.groups:
                seen = _Gated.apply(score(group, weights), phase.encoder.training, *(weights[name] for name in group))
                masked.update(zip(group, seen, strict=True))
            return masked

        phase.transform(names, make, MASK_STAGE)
        if not self.train_weights:
            freeze_backbone(phase)

    def weights(self, phase: Any) -> dict[str, Any]:
        """The same pull from the first step on."""
        return {self.name: self.pull}

    def loss(self, step: Any) -> dict[str, Tensor]:
        """The expected share of open masks."""
        return {self.name: step.penalty(mean_of_means(step.phase, self.name, lambda s: torch.sigmoid(s + SHIFT)))}

    def settle(self, phase: Any) -> None:
        """The zeros stay zeros."""
        settle_masks(phase, self.what)


def stretch(share: Tensor) -> Tensor:
    """A number between 0 and 1 stretched beyond both, and cut off there: 0 up to 1/12, 1 from 11/12 on."""
    return (share * (HIGH - LOW) + LOW).clamp(0, 1)


class _Gated(torch.autograd.Function):
    """weight * mask for a stack of matrices; of all that makes the mask, only s is kept for the way back."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, training: bool, *weights: Tensor) -> tuple[Tensor, ...]:
        if training:
            noise = torch.empty_like(scores).uniform_(EDGE, 1 - EDGE)
            shares = noise.logit_().add_(scores).div_(BETA).sigmoid_()
        else:
            shares = scores.sigmoid()
        ctx.save_for_backward(shares, *weights)
        ctx.steepness = (HIGH - LOW) / (BETA if training else 1.0)
        return tuple(w * stretch(row).view_as(w) for w, row in zip(weights, shares, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        shares, *weights = ctx.saved_tensors
        to_scores, to_weights = torch.empty_like(shares), []
        for place, (gradient, weight) in enumerate(zip(gradients, weights, strict=True)):
            share = shares[place].view_as(weight)
            mask = stretch(share)
            slope = share * (1 - share) * ctx.steepness * ((mask > 0) & (mask < 1))
            torch.mul(gradient * weight, slope, out=to_scores[place].view_as(weight))
            to_weights.append(gradient * mask)
        wanted = zip(to_weights, ctx.needs_input_grad[2:], strict=True)
        return to_scores, None, *(gradient if needed else None for gradient, needed in wanted)
