"""GPU kernels for masks: finding a threshold by counting, and applying a mask in one pass each way.

Importing this file needs triton, which comes with torch on a GPU; nothing imports it elsewhere.
"""

# mypy: disable-error-code=no-untyped-def

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _key(number):
    """A float as a whole number, in the order of floats."""
    bits = number.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _count_pivots(rows, wanted, known, prefixes, counts, numbers, programs, turn, height, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    part = tl.program_id(1)
    if tl.load(known + row) == 0:
        want = tl.load(wanted + row)
        shift = 28 - 4 * turn
        lane = tl.arange(0, 16)
        prefix = tl.zeros([], dtype=tl.int64)
        if turn > 0:  # four more bits are known from the turn before: the largest pivot that enough numbers reach
            before = (turn - 1) * height + row
            reached = tl.load(counts + before * 16 + lane) >= want
            digit = tl.sum(reached.to(tl.int64)) - 1
            prefix = tl.load(prefixes + before) + (digit << (shift + 4))
        if part == 0:
            tl.store(prefixes + turn * height + row, prefix)
        pivots = (prefix + (lane.to(tl.int64) << shift) - 2147483648).to(tl.int32)
        base = rows + row.to(tl.int64) * numbers
        found = tl.zeros([16, BLOCK], dtype=tl.int32)
        for start in range(part * BLOCK, numbers, programs * BLOCK):
            place = start + tl.arange(0, BLOCK)
            key = _key(tl.load(base + place, mask=place < numbers, other=float("-inf")))
            found += (key[None, :] >= pivots[:, None]).to(tl.int32)
        tl.atomic_add(counts + (turn * height + row) * 16 + lane, tl.sum(found, 1))


def find_kth(rows: Tensor, wanted: Tensor, known: Tensor | None = None) -> Tensor:
    """The wanted[i]-th largest number of each row as a key, by eight readings of the rows; `known` rows are skipped."""
    height, numbers = rows.shape
    counts = torch.zeros(8, height, 16, dtype=torch.int32, device=rows.device)
    prefixes = torch.zeros(8, height, dtype=torch.int64, device=rows.device)
    if known is None:
        known = torch.zeros(height, dtype=torch.int32, device=rows.device)
    block = 1024
    programs = min(triton.cdiv(numbers, block), max(1, 132 * 16 // height))
    for turn in range(8):
        arguments = (rows, wanted, known, prefixes, counts, numbers, programs, turn, height)
        _count_pivots[(height, programs)](*arguments, BLOCK=block, num_warps=4)
    return prefixes[7] + (counts[7] >= wanted[:, None]).sum(1) - 1 - 2**31


@triton.jit
def _collect(rows, low, high, near, filled, above, numbers, programs, room, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    part = tl.program_id(1)
    bottom = tl.load(low + row)
    top = tl.load(high + row)
    base = rows + row.to(tl.int64) * numbers
    over = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(part * BLOCK, numbers, programs * BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < numbers
        number = tl.load(base + place, mask=inside, other=0.0)
        key = _key(number)
        over += (inside & (key > top)).to(tl.int32)
        between = inside & (key >= bottom) & (key <= top)
        count = tl.sum(between.to(tl.int32))
        if count > 0:
            spot = tl.atomic_add(filled + row, count) + tl.cumsum(between.to(tl.int32)) - 1
            tl.store(near + row.to(tl.int64) * room + spot, number, mask=between & (spot < room))
    tl.atomic_add(above + row, tl.sum(over))


def collect_between(rows: Tensor, low: Tensor, high: Tensor, room: int) -> tuple[Tensor, Tensor, Tensor]:
    """The numbers of each row whose keys are in low … high, how many they are, and how many lie above."""
    height, numbers = rows.shape
    near = torch.full((height, room), float("-inf"), device=rows.device)
    filled, above = torch.zeros(2, height, dtype=torch.int32, device=rows.device)
    block = 4096
    programs = min(triton.cdiv(numbers, block), max(1, 132 * 16 // height))
    arguments = (rows, low, high, near, filled, above, numbers, programs, room)
    _collect[(height, programs)](*arguments, BLOCK=block, num_warps=8)
    return near, filled, above


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
