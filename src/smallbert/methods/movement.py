"""Movement pruning (Sanh et al. 2020): keep the weights that training moves away from zero.

Each weight W has a score S whose straight-through gradient is W * dL/dW'; the highest scores stay.
"""

from typing import Any

import torch
from torch import Tensor, nn

from smallbert.methods.magnitude import _Gradual
from smallbert.training.masks import Stacks, mask_by_scores, maskable
from smallbert.training.phase import Weights


class Movement(_Gradual):
    """Prune the weights that training moves towards zero, by scores learned beside them."""

    lr: float = 1e-2

    def attach(self, phase: Any) -> None:
        """One score a weight, all zero at first, stored as stacks of like-sized matrices."""
        names = maskable(phase.encoder)
        stacks = Stacks(phase.encoder, names)
        scores = nn.ParameterList(
            torch.zeros(len(group), stacks.shapes[group[0]].numel(), device=phase.device) for group in stacks.groups
        )
        phase.train_module("movement", scores, lr=self.lr)
        number = {group[0]: place for place, group in enumerate(stacks.groups)}

        def score(group: list[str], weights: Weights) -> Tensor:
            return scores[number[group[0]]]

        mask_by_scores(phase, names, self.share(phase), self.scope, score)
