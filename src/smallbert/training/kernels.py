"""GPU kernels for masks: counting digits for a threshold, and applying a mask in one pass each way.

Importing this file needs triton, which comes with torch on a GPU; nothing imports it elsewhere.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BINS = 2048


@triton.jit
def _count_digits(rows, prefix, histogram, numbers, programs, shift, width, BLOCK: tl.constexpr, BINS: tl.constexpr):
    row = tl.program_id(0)
    part = tl.program_id(1)
    want = tl.load(prefix + row) >> (shift + width)
    counts = tl.zeros([BINS], dtype=tl.int32)
    base = rows + row.to(tl.int64) * numbers
    for start in range(part * BLOCK, numbers, programs * BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < numbers
        bits = tl.load(base + place, mask=inside, other=0.0).to(tl.int32, bitcast=True)
        # Negative floats order backwards: flip all their bits; set the sign bit of the others.
        key = tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True).to(tl.int64)
        matches = inside & ((key >> (shift + width)) == want)
        if tl.sum(matches.to(tl.int32)) > 0:  # after the first reading most blocks hold no candidate any more
            digit = ((key >> shift) & ((1 << width) - 1)).to(tl.int32)
            counts += tl.histogram(digit, BINS, mask=matches)
    lane = tl.arange(0, BINS)
    tl.atomic_add(histogram + row * BINS + lane, counts, mask=counts > 0)


def count_digits(rows: Tensor, prefix: Tensor, shift: int, width: int) -> Tensor:
    """How many numbers of each row share the leading bits of `prefix`, by their next `width` bits: (rows, 2048)."""
    histogram = torch.zeros(len(rows), BINS, dtype=torch.int32, device=rows.device)
    block, numbers = 4096, rows.shape[1]
    programs = min(triton.cdiv(numbers, block), max(1, 2112 // len(rows)))
    grid, sizes = (len(rows), programs), {"BLOCK": block, "BINS": BINS, "num_warps": 8}
    _count_digits[grid](rows, prefix, histogram, numbers, programs, shift, width, **sizes)
    return histogram


@triton.jit
def _mask(weight, scores, threshold, out, numbers, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < numbers
    keep = tl.load(scores + place, mask=inside) >= tl.load(threshold)
    value = tl.load(weight + place, mask=inside)
    tl.store(out + place, tl.where(keep, value, 0.0), mask=inside)


@triton.jit
def _unmask(
    gradient, weight, scores, threshold, to_weight, to_scores, numbers, SCORED: tl.constexpr, BLOCK: tl.constexpr
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < numbers
    slope = tl.load(gradient + place, mask=inside).to(tl.float32)
    keep = tl.load(scores + place, mask=inside) >= tl.load(threshold)
    tl.store(to_weight + place, tl.where(keep, slope, 0.0), mask=inside)
    if SCORED:
        tl.store(to_scores + place, slope * tl.load(weight + place, mask=inside), mask=inside)


def apply_mask(weight: Tensor, scores: Tensor, threshold: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight where its score reaches the threshold, else 0, written in the precision it will be used in."""
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    _mask[_grid(weight)](weight, scores, threshold, out, weight.numel(), BLOCK=4096, num_warps=8)
    return out


def spread_gradient(
    gradient: Tensor, weight: Tensor, scores: Tensor, threshold: Tensor, to_weight: Tensor, to_scores: Any
) -> None:
    """Write gradient * mask for the weight and, straight through, gradient * weight for the scores."""
    scored = to_scores is not None
    arguments = (gradient, weight, scores, threshold, to_weight, to_scores if scored else to_weight, weight.numel())
    _unmask[_grid(weight)](*arguments, SCORED=scored, BLOCK=4096, num_warps=8)


def _grid(weight: Tensor) -> tuple[int]:
    return (triton.cdiv(weight.numel(), 4096),)
