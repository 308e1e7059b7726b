"""Reweighted proximal pruning (Guo et al. 2019): shrink every weight a little after each step of Adam, outside Adam.

After a step on the loss alone, w = sign(w) * max(|w| - rate * pull * a, 0); Adam's moments never see the penalty. Every
`steps` steps a = 1 / (|w| + edge), so that small weights shrink fast and large ones hardly; a is 1 at first. How many
are kept is an outcome. The zeros are fixed when the phase ends: rpp + train(epochs=3) | finetune trains what is left.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from smallbert.errors import UserError
from smallbert.methods import Method
from smallbert.training.masks import (
    MASK_STAGE,
    Stacks,
    What,
    carried,
    carry_stacks,
    check_trained,
    magnitudes,
    maskable,
    settle_masks,
    stack_up,
)


class Rpp(Method):
    """Prune by shrinking weights after each step, small ones the fastest, until they are zero.

    pull: strength of the shrinking; a higher one prunes more. The paper's values are for pretraining, and the default
        is not one of them
    steps: number of steps between reweightings; until the first one, all weights are pulled equally
    edge: constant added to a weight's size before the pull is divided by it; weights close to zero are pulled 1 / edge
        times as hard as at first
    what: 'layers' prunes all matrices of the layers; 'pooler' adds the pretrained dense layer above them, where there
        is one, and 'embeddings' the word embeddings. Biases, norms and the last layer of a head are never pruned
    """

    trains: ClassVar[bool] = True
    prunes: ClassVar[bool] = True
    stage: ClassVar[int] = 30

    pull: float = 0.01
    steps: int = 100
    edge: float = 1e-3
    what: What = "layers"

    def check(self) -> None:
        """Positive numbers."""
        if self.pull <= 0 or self.steps < 1 or self.edge <= 0:
            raise UserError(
                f"rpp: pull and edge are above 0 and steps is 1 or more, not {self.pull}, {self.edge} and {self.steps}"
            )

    def fits(self, phase: Any, steps: int | None) -> None:
        """Weights that are trained, and more steps than the first ones, which pull at all alike."""
        check_trained(phase, self.name, self.what)
        if steps is not None and steps <= self.steps:
            raise UserError(
                f"rpp: the phase has {steps} steps, and weights are pulled by their size only after "
                f"steps={self.steps}, so it would prune nothing; give rpp fewer steps, or train longer"
            )

    def attach(self, phase: Any) -> None:
        """All weights are pulled alike at first."""
        names = maskable(phase.encoder, self.what)
        stacks = stack_up(phase.encoder, names)
        phase.transform(names, lambda weights: weights, MASK_STAGE)  # seen as stored, zeros and all; watch looks there
        carry_stacks(phase, self.name, {"pull": stacks.filled(1.0, phase.device)})

    @torch.no_grad()
    def after_step(self, phase: Any) -> None:
        """The proximal step, by the rate that the optimiser has just used."""
        stacks = Stacks(phase.encoder, maskable(phase.encoder, self.what))
        by = stacks.rows([pull * (phase.rate * self.pull) for pull in carried(phase, self.name, "pull")])
        shrink([phase.encoder.get_parameter(name) for name in by], list(by.values()))

    def every(self) -> int:
        """At each reweighting."""
        return self.steps

    @torch.no_grad()
    def look(self, phase: Any) -> None:
        """Pull at each weight by how small it has become."""
        stored: dict[str, Tensor] = dict(phase.encoder.named_parameters())
        stacks = Stacks(phase.encoder, maskable(phase.encoder, self.what))
        for group, pull in zip(stacks.groups, carried(phase, self.name, "pull"), strict=True):
            pull.copy_(1 / (magnitudes(group, stored) + self.edge))

    def settle(self, phase: Any) -> None:
        """The zeros stay zeros."""
        settle_masks(phase, self.what)


def shrink(weights: list[Tensor], by: list[Tensor]) -> None:
    """Bring each number nearer to zero by so much, and no further than zero; all weights in a few launches."""
    sizes = torch._foreach_abs(weights)
    torch._foreach_sub_(sizes, by)
    torch._foreach_clamp_min_(sizes, 0.0)
    signs = torch._foreach_sign(weights)
    torch._foreach_mul_(sizes, signs)
    torch._foreach_copy_(weights, sizes)
