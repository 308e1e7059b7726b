"""Smoothed importance (PLATON, Zhang et al. 2022): how much weights matter to the loss, apart from mini-batch noise.

Importance |w * dL/dw| is averaged over windows of steps; I is a running mean of those, U of how far a window lies from
it; the score is I * U. On the ramp the lowest are set to zero at the end of each window and trained in between, so
that they may grow back; after it they are zeroed at every step.
"""

from typing import Any, Literal

import torch

from smallbert.errors import UserError
from smallbert.methods.pruning import Gradual
from smallbert.training.masks import (
    MASK_STAGE,
    Stacks,
    carried,
    carry_stacks,
    check_trained,
    magnitudes,
    maskable,
    settle_masks,
    stack_up,
)
from smallbert.training.ranking import behind, keep_top
from smallbert.training.schedule import Schedule


class SmoothMovement(Gradual):
    """Prune the weights that matter least to the loss, by importance and its uncertainty, both smoothed.

    scope: 'global' compares the scores of all matrices, as the paper does; 'local' keeps the same share of every matrix
    window: number of steps over which importance is averaged; at the end of each window scores are updated, and weights
        pruned by them
    smooth: share of the old running mean of importance that is kept at each update; 0 keeps the last window only
    smooth_uncertainty: the same for the running mean of the uncertainty
    """

    scope: Literal["local", "global"] = "global"
    window: int = 10
    smooth: float = 0.85
    smooth_uncertainty: float = 0.95

    def check(self) -> None:
        """Shares, a ramp inside the phase, a window of at least one step."""
        super().check()
        if self.window < 1 or not 0 <= self.smooth < 1 or not 0 <= self.smooth_uncertainty < 1:
            raise UserError(
                "smooth_movement: window is 1 or more, smooth and smooth_uncertainty are from 0 to below 1, not "
                f"{self.window}, {self.smooth} and {self.smooth_uncertainty}"
            )

    def fits(self, phase: Any, steps: int | None) -> None:
        """Weights that are trained, for one window at least."""
        check_trained(phase, self.name, self.what)
        if steps is not None and steps < self.window:
            raise UserError(
                f"smooth_movement: the phase has {steps} steps, fewer than one window of {self.window}; give it a "
                "smaller window, or train longer"
            )

    def attach(self, phase: Any) -> None:
        """Nothing is learned beside the weights; what is averaged goes through checkpoints."""
        names = maskable(phase.encoder, self.what)
        stacks = stack_up(phase.encoder, names)
        starts = {"window": 0.0, "importance": 0.0, "uncertainty": 0.0, "mask": 1.0}
        carry_stacks(phase, self.name, {key: stacks.filled(start, phase.device) for key, start in starts.items()})
        phase.transform(names, lambda weights: weights, MASK_STAGE)  # seen as stored, zeros and all; watch looks there
        phase.dial("keep", self.schedule())
        phase.dial("zeroed at every step", Schedule(0.0, 1.0, self.finish, self.finish))

    @torch.no_grad()
    def after_step(self, phase: Any) -> None:
        """Add to the window; behind the ramp, set to zero again what the optimiser has moved."""
        stacks = Stacks(phase.encoder, maskable(phase.encoder, self.what))
        windows = stacks.rows(carried(phase, self.name, "window"))
        freely = phase.dials["zeroed at every step"] < 0.5
        masks = stacks.rows([torch.where(freely, 1.0, mask) for mask in carried(phase, self.name, "mask")])
        weights = {name: phase.encoder.get_parameter(name) for name in masks}
        moved = [name for name, weight in weights.items() if weight.grad is not None]  # a layer nothing reads has none
        felt = torch._foreach_mul([weights[name].grad for name in moved], [weights[name] for name in moved])
        torch._foreach_abs_(felt)
        torch._foreach_add_([windows[name] for name in moved], felt, alpha=1 / self.window)
        torch._foreach_mul_(list(weights.values()), list(masks.values()))

    def every(self) -> int:
        """At the end of each window."""
        return self.window

    @torch.no_grad()
    def look(self, phase: Any) -> None:
        """Take the window into the running means, and set to zero what now has the lowest scores."""
        parts = [carried(phase, self.name, key) for key in ("window", "importance", "uncertainty")]
        for window, importance, uncertainty in zip(*parts, strict=True):
            window.nan_to_num_(0.0, 0.0, 0.0)  # of a step whose gradients were not finite, which the optimiser left out
            importance.lerp_(window, 1 - self.smooth)
            uncertainty.lerp_((window - importance).abs(), 1 - self.smooth_uncertainty)
            window.zero_()
        self._zero(phase)

    def settle(self, phase: Any) -> None:
        """Once more with the share to be kept in the end; the zeros stay zeros."""
        self._zero(phase)
        settle_masks(phase, self.what)

    @torch.no_grad()
    def _zero(self, phase: Any) -> None:
        """Write the zeros; weights of which nothing is known, since no gradient reaches them, go first, by size."""
        stacks = Stacks(phase.encoder, maskable(phase.encoder, self.what))
        stored = dict(phase.encoder.named_parameters())
        parts = [carried(phase, self.name, key) for key in ("importance", "uncertainty", "mask")]
        scores = [
            behind(importance * uncertainty, magnitudes(group, stored))
            for group, importance, uncertainty in zip(stacks.groups, *parts[:2], strict=True)
        ]
        for mask, stays in zip(parts[2], keep_top(scores, phase.dials["keep"], self.scope), strict=True):
            mask.copy_(stays)
        for name, mask in stacks.rows(parts[2]).items():
            stored[name].mul_(mask)
