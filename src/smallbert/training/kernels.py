"""GPU kernels for masks: many matrices at a launch, one pass over memory each way.

Importing this file needs triton, which comes with torch on a GPU; nothing imports it elsewhere.
"""

# mypy: disable-error-code=no-untyped-def

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

TOGETHER = 8  # matrices a launch; each makes the compiled kernel longer
BLOCK = 4096


@triton.jit
def _mask_one(weight, scores, cut, out, numbers, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < numbers
    keep = tl.load(scores + place, mask=inside) >= cut
    value = tl.load(weight + place, mask=inside)
    tl.store(out + place, tl.where(keep, value, 0.0), mask=inside)


@triton.jit
def _mask(weights, scores, cuts, out, numbers, BLOCK: tl.constexpr):
    mine = tl.program_id(1)
    start = mine.to(tl.int64) * numbers
    cut = tl.load(cuts + mine)
    for place in tl.static_range(len(weights)):
        if mine == place:
            _mask_one(weights[place], scores + start, cut, out + start, numbers, BLOCK)


@triton.jit
def _spread_one(slopes, weight, scores, cut, to_weight, to_scores, numbers, SCORED: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < numbers
    slope = tl.load(slopes + place, mask=inside).to(tl.float32)
    keep = tl.load(scores + place, mask=inside) >= cut
    tl.store(to_weight + place, tl.where(keep, slope, 0.0), mask=inside)
    if SCORED:
        tl.store(to_scores + place, slope * tl.load(weight + place, mask=inside), mask=inside)


@triton.jit
def _spread(slopes, weights, scores, cuts, to_weights, to_scores, numbers, SCORED: tl.constexpr, BLOCK: tl.constexpr):
    mine = tl.program_id(1)
    start = mine.to(tl.int64) * numbers
    cut = tl.load(cuts + mine)
    for place in tl.static_range(len(weights)):
        if mine == place:
            from_here, to_here = scores + start, to_weights + start
            _spread_one(
                slopes[place], weights[place], from_here, cut, to_here, to_scores + start, numbers, SCORED, BLOCK
            )


def mask_stack(weights: Sequence[Tensor], scores: Tensor, cuts: Tensor, dtype: torch.dtype) -> Tensor:
    """Like-sized weights where their scores reach the cut, else 0, one a row, in the precision they will be used in."""
    assert all(weight.is_contiguous() for weight in weights)
    out = torch.empty(scores.shape, dtype=dtype, device=scores.device)
    for some, grid in _launches(scores):
        chosen = tuple(weights[some])
        _mask[grid](chosen, scores[some], cuts[some], out[some], scores.shape[1], BLOCK=BLOCK, num_warps=8)
    return out


def spread_stack(
    slopes: Sequence[Tensor], weights: Sequence[Tensor], scores: Tensor, cuts: Tensor, scored: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of masked weights passed on: times the mask to the weights and, straight through, times the weights
    to the scores; one matrix a row in both."""
    to_weights = torch.empty_like(scores)
    to_scores = torch.empty_like(scores) if scored else to_weights
    for some, grid in _launches(scores):
        chosen = (tuple(slopes[some]), tuple(weights[some]), scores[some], cuts[some], to_weights[some])
        _spread[grid](*chosen, to_scores[some], scores.shape[1], SCORED=scored, BLOCK=BLOCK, num_warps=8)
    return to_weights, to_scores if scored else None


def _launches(scores: Tensor) -> Iterator[tuple[slice, tuple[int, int]]]:
    height, numbers = scores.shape
    for start in range(0, height, TOGETHER):
        some = slice(start, min(start + TOGETHER, height))
        yield some, (triton.cdiv(numbers, BLOCK), some.stop - some.start)
