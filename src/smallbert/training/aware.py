"""Rounding while training: the model sees rounded weights and inputs, gradients pass straight through to real ones.

What it saw at the end is what is stored, to the bit: the scales of the last rounding are kept for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from smallbert.model.products import round_range, round_tokens
from smallbert.model.rounding import LEAST, Grid, Scales, fit, in_groups, rounded, spread, straight
from smallbert.training.calibrate import is_by_token
from smallbert.training.phase import Weights

if TYPE_CHECKING:
    from smallbert.training.phase import Phase

ROUND_STAGE = 50
Rule = Callable[[Tensor, Grid], tuple[Tensor, Scales]]  # a matrix -> the matrix as seen, and the scales it is made of


def to_nearest(weight: Tensor, grid: Grid, search: bool = False) -> tuple[Tensor, Scales]:
    """Round each number to the nearest one of the grid."""
    scales = fit(weight, grid, search)
    return rounded(weight, grid, scales), scales


def to_best(weight: Tensor, grid: Grid) -> tuple[Tensor, Scales]:
    """The same on the grid on which rounding is nearest, which takes a search: where nothing is trained."""
    return to_nearest(weight, grid, search=True)


def to_ternary(weight: Tensor, grid: Grid) -> tuple[Tensor, Scales]:
    """-a, 0 or a: zero up to 0.7 of the mean size, and a the mean size of the others (ternary weight networks).

    [[0.1, -0.5, 0.9, 0.1]]: the mean size is 0.4, the threshold 0.28  ->  [[0.0, -0.7, 0.7, 0.0]]
    """
    sizes = in_groups(weight.detach().abs(), grid)
    kept = sizes > 0.7 * sizes.nanmean(1, keepdim=True)
    scale = (sizes.nan_to_num(0.0) * kept).sum(1) / kept.sum(1).clamp(min=1)
    scale = scale.clamp(min=LEAST)
    threshold = spread(0.7 * sizes.nanmean(1), weight.shape, grid)
    signs = weight.detach().sign() * (weight.detach().abs() > threshold)
    return signs * spread(scale, weight.shape, grid), (scale, None)


class Ranges(nn.Module):
    """Running ranges of the inputs of layers, that serve short runs too, and the scales of the last rounding.

    At first a range is the mean over the steps so far; once there are more than 1 / (1 - decay) of them, a moving one.
    """

    bounds: Tensor
    steps: Tensor

    def __init__(self, layers: int, decay: float):
        """No step has been seen."""
        super().__init__()
        self.decay = decay
        self.register_buffer("bounds", torch.zeros(layers, 2))
        self.register_buffer("steps", torch.zeros(layers))
        self.scales: dict[str, Scales] = {}
        self.factors: dict[str, Tensor] = {}

    def scale_inputs(self, factors: dict[str, Tensor]) -> None:
        """Let layers, by name, multiply their inputs by these before they round them; kept where ranges are."""
        for number, (name, factor) in enumerate(factors.items()):
            self.register_buffer(f"factor_{number}", factor)
            self.factors[name] = self.get_buffer(f"factor_{number}")

    @torch.no_grad()
    def add(self, layer: int, inputs: Tensor, real: Tensor, world: int = 1) -> None:
        """Take in the inputs of one step, (rows, tokens, features), of all processes; only real tokens count."""
        apart = inputs.detach().float()
        if is_by_token(apart, real):
            apart = apart * real[..., None]  # zero is in every range
        now = torch.stack([-apart.amin().clamp(max=0), apart.amax().clamp(min=0)])
        if world > 1:
            torch.distributed.all_reduce(now, torch.distributed.ReduceOp.MAX)
        now[0].neg_()
        self.steps[layer] += 1
        share = (1 / self.steps[layer]).clamp(min=1 - self.decay)
        self.bounds[layer].lerp_(now, share)


def round_weights_seen(phase: Phase, ranges: Ranges, grids: dict[str, Grid], rules: dict[str, Rule]) -> None:
    """Let the model see these modules' matrices rounded, columns divided by what their inputs are multiplied by."""
    names = {f"{name}.weight": name for name in grids}

    def make(weights: Weights) -> Weights:
        made = {}
        for name, weight in weights.items():
            module, factor = names[name], ranges.factors.get(names[name])
            with torch.no_grad():
                divided = weight if factor is None else weight / factor
                seen, ranges.scales[module] = rules[module](divided, grids[module])
                seen = seen if factor is None else seen * factor
            made[name] = straight(weight, seen)
        return made

    phase.transform(list(names), make, ROUND_STAGE)


def round_inputs_seen(phase: Phase, ranges: Ranges, layers: list[str], static: bool) -> list[Any]:
    """Let these layers see their inputs rounded, by running ranges or token by token; gives what takes that back."""

    def hook(number: int) -> Callable[..., Any]:
        factor = ranges.factors.get(layers[number])

        @torch.compiler.disable
        def watch(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            given = inputs[0] if factor is None else inputs[0] * factor
            if static and module.training and phase.batch is not None:
                ranges.add(number, given, phase.batch.tokens(), phase.world)
            seen = round_range(given, *ranges.bounds[number]) if static else round_tokens(given)
            return (seen if factor is None else (seen / factor).to(inputs[0].dtype), *inputs[1:])

        return watch

    parts = [phase.encoder.get_submodule(name) for name in layers]
    return [part.register_forward_pre_hook(hook(number)) for number, part in enumerate(parts)]
