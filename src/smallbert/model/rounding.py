"""Rounding a matrix to few bits: which numbers share a scale, how the scale is found, and what a code stands for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

Scope = Literal["row", "group", "tensor"]
SHARES = tuple(share / 20 for share in range(19, 3, -1))  # of the full range, that a search tries
Scales = tuple[Tensor, Tensor | None]  # the scale of each group, and its zero where the grid is not symmetric
LEAST = 1e-12  # a scale is never zero, so that a matrix of zeros can be divided by it


@dataclass(frozen=True)
class Grid:
    """How a matrix is rounded: to how many bits, and what of it shares a scale (and a zero, if not symmetric).

    symmetric: (code - top) * scale, 2**bits - 1 steps around zero (one bit: the sign);  else (code - zero) * scale
    """

    bits: int = 8
    scope: Scope = "row"
    group: int = 64  # numbers along a row that share a scale, where the scope is a group
    symmetric: bool = True

    @property
    def top(self) -> int:
        """The largest number of steps away from zero, of a symmetric grid."""
        return max(1, 2 ** (self.bits - 1) - 1)

    def scales(self, shape: torch.Size | tuple[int, ...]) -> int:
        """How many scales a matrix of this shape has."""
        rows, columns = shape
        return {"tensor": 1, "row": rows, "group": rows * -(-columns // self.group)}[self.scope]


def in_groups(weight: Tensor, grid: Grid) -> Tensor:
    """The numbers that share a scale side by side, (scales, numbers); a last group is filled up with no numbers."""
    if grid.scope == "tensor":
        return weight.reshape(1, -1)
    if grid.scope == "row":
        return weight
    filled = functional.pad(weight, (0, -weight.shape[1] % grid.group), value=float("nan"))
    return filled.reshape(-1, grid.group)


def fit(weight: Tensor, grid: Grid, search: bool = False) -> Scales:
    """The scales of each group, so that its largest number is held.

    With `search` the range shrinks as long as that makes the squared error of the group less. Zero is always on the
    grid, so that pruned weights stay zeros. Of one bit the scale is the mean size, which is the nearest (XNOR-Net).
    """
    groups = in_groups(weight.detach(), grid)
    if grid.bits == 1:
        return groups.abs().nanmean(1).clamp(min=LEAST), None
    groups = groups.nan_to_num(0.0)
    scale, zero = _full(groups, grid)
    if search:
        least = _error(groups, (scale, zero), grid)
        for share in SHARES:
            tried = _full(groups * share, grid)
            error = _error(groups, tried, grid)
            better, least = error < least, torch.minimum(error, least)
            scale = torch.where(better, tried[0], scale)
            zero = None if zero is None or tried[1] is None else torch.where(better, tried[1], zero)
    return scale, zero


def _full(groups: Tensor, grid: Grid) -> Scales:
    if grid.symmetric:
        return groups.abs().amax(1).clamp(min=LEAST) / grid.top, None
    low, high = groups.amin(1).clamp(max=0), groups.amax(1).clamp(min=0)
    scale = (high - low).clamp(min=LEAST) / (2**grid.bits - 1)
    return scale, (-low / scale).round()


def _error(groups: Tensor, scales: Scales, grid: Grid) -> Tensor:
    scale, zero = scales[0][:, None], None if scales[1] is None else scales[1][:, None]
    made = to_steps(to_codes(groups, scale, zero, grid), zero, grid, groups.dtype) * scale
    return (made - groups).square().sum(1)


def spread(values: Tensor, shape: torch.Size | tuple[int, ...], grid: Grid, rows: Tensor | None = None) -> Tensor:
    """What each group has, at each of its numbers (or where it broadcasts to them), of all rows or of those asked."""
    if grid.scope == "tensor":
        return values.view(1, 1)
    each = values.view(shape[0], -1)
    each = each if rows is None else each[rows]
    return each if grid.scope == "row" else each.repeat_interleave(grid.group, -1)[..., : shape[1]]


def to_codes(weight: Tensor, scale: Tensor, zero: Tensor | None, grid: Grid) -> Tensor:
    """The nearest code of each number; scale and zero are spread over the matrix, as in `spread`.

    >>> to_codes(torch.tensor([[-0.9, 0.1, 0.6]]), torch.tensor([[0.3]]), None, Grid(bits=3))
    tensor([[0, 3, 5]], dtype=torch.uint8)
    """
    if grid.bits == 1:
        return (weight >= 0).to(torch.uint8)
    steps = (weight / scale).round()
    if zero is None:
        return (steps.clamp(-grid.top, grid.top) + grid.top).to(torch.uint8)
    return (steps + zero).clamp(0, 2**grid.bits - 1).to(torch.uint8)


def to_steps(codes: Tensor, zero: Tensor | None, grid: Grid, dtype: torch.dtype = torch.float32) -> Tensor:
    """How many scales each code stands for."""
    steps = codes.to(dtype)
    if grid.bits == 1:
        return 2 * steps - 1
    return steps - (grid.top if zero is None else zero)


def encode(weight: Tensor, scales: Scales, grid: Grid) -> Tensor:
    """The codes of a matrix, given the scales of its groups."""
    return to_codes(weight, *spread_both(scales, weight.shape, grid), grid)


def spread_both(scales: Scales, shape: torch.Size | tuple[int, ...], grid: Grid) -> Scales:
    """Scale and zero at each number of a matrix."""
    scale, zero = scales
    return spread(scale, shape, grid), None if zero is None else spread(zero, shape, grid)


def rounded(weight: Tensor, grid: Grid, scales: Scales | None = None) -> Tensor:
    """A matrix as it is once it was stored on a grid.

    >>> rounded(torch.tensor([[-0.9, 0.1, 0.5]]), Grid(bits=3))
    tensor([[-0.9000,  0.0000,  0.6000]])
    """
    scale, zero = spread_both(scales or fit(weight, grid), weight.shape, grid)
    return to_steps(to_codes(weight, scale, zero, grid), zero, grid, weight.dtype) * scale


def input_steps(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """The size of a step between two bounds, and which of the 256 is zero: (code - zero) * step."""
    step = (high.clamp(min=0) - low.clamp(max=0)).clamp(min=LEAST) / 255
    return step, (-low.clamp(max=0) / step).round()


def straight(real: Tensor, made: Tensor) -> Tensor:
    """`made` to the bit, with the gradient of `real` passed straight through."""
    return made.detach() + (real - real.detach()) if real.requires_grad else made
