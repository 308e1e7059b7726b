"""Movement pruning (Sanh et al. 2020): keep the weights that training moves away from zero.

Each weight W has a score S whose straight-through gradient is W * dL/dW'; the highest scores stay.
"""

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from smallbert.methods import Method
from smallbert.methods.magnitude import check_ramp
from smallbert.training.masks import Stacks, mask_by_scores, maskable, settle_masks
from smallbert.training.phase import Weights
from smallbert.training.schedule import Schedule


class Movement(Method):
    """Prune the weights that training moves towards zero, by scores learned beside them."""

    trains: ClassVar[bool] = True
    stage: ClassVar[int] = 30

    keep: float = 0.1
    scope: Literal["local", "global"] = "local"
    begin: float = 0.1
    finish: float = 0.7
    shape: Literal["cubic", "linear", "constant"] = "cubic"
    lr: float = 1e-2

    def check(self) -> None:
        """A share, and a ramp inside the phase."""
        check_ramp(self)

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

        keep = phase.dial("keep", Schedule(1.0, self.keep, self.begin, self.finish, self.shape))
        mask_by_scores(phase, names, keep, self.scope, score)

    def settle(self, phase: Any) -> None:
        """The zeros stay zeros."""
        settle_masks(phase, maskable(phase.encoder))
