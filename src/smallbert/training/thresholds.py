"""The k-th largest of very many numbers, exactly and without sorting them.

On a GPU a sample of the numbers says between which two values the answer must lie; one reading of all numbers counts
those above and collects the few between, and the answer is found among these. Should the sample have misled (or very
many numbers be equal), all are read again instead: the answer is exact either way, and nothing waits for Python.
"""

from __future__ import annotations

import torch
from torch import Tensor

STRIDE = 61  # of the sample; it shares no factor with the width of any matrix
LEAST = 2**16  # shorter rows are searched whole
LOWEST, HIGHEST = -(2**31), 2**31 - 1  # keys: the bits of a float as a whole number, in the order of floats


def kth_largest(rows: Tensor, counts: Tensor) -> Tensor:
    """The counts[i]-th largest number of each row: (rows, numbers), (rows,) -> (rows,); a count of 0 gives +inf.

    kth_largest([[3., 1., 2.]], [2])  ->  [2.]
    """
    if rows.is_cuda:
        keys = _find_keys(rows.contiguous().float(), counts.clamp(min=1).int().contiguous())
        return torch.where(counts < 1, float("inf"), _float_of(keys))
    found = []
    for row, count in zip(rows, counts.long().tolist(), strict=True):
        place = row.numel() - min(count, row.numel()) + 1
        found.append(row.new_tensor(float("inf")) if count < 1 else row.kthvalue(place).values)
    return torch.stack(found)


def _find_keys(rows: Tensor, wanted: Tensor) -> Tensor:
    from smallbert.training.kernels import collect_between, find_kth

    if rows.shape[1] < LEAST:
        return find_kth(rows, wanted)
    low, high, room = _bracket(rows, wanted)
    near, filled, above = collect_between(rows, low.int(), high.int(), room)
    held = (above < wanted) & (wanted <= above + filled)
    alike = held & (low == high)
    known = alike | (held & (filled <= room))
    inner = find_kth(near, (wanted - above).clamp(min=1))
    whole = find_kth(rows, wanted, known.int())
    return torch.where(alike, low, torch.where(known, inner, whole))


def _bracket(rows: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor, int]:
    """Two keys between which the answer lies, by six standard deviations of its rank, and room for what is between."""
    from smallbert.training.kernels import find_kth

    sample = rows[:, ::STRIDE].contiguous()
    height, size = sample.shape
    share = wanted.double() / rows.shape[1]
    spread = 6 * (size * share * (1 - share)).sqrt() + 8
    ranks = torch.stack([share * size - spread, share * size + spread]).round()
    keys = find_kth(sample.repeat(2, 1), ranks.clamp(1, size).int().flatten()).view(2, height)
    high = torch.where(ranks[0] < 1, HIGHEST, keys[0])
    low = torch.where(ranks[1] > size, LOWEST, keys[1])
    room = int(
        rows.shape[1] * (12 * (0.25 / size) ** 0.5 + 32 / size)
    )  # twice the widest bracket's expectation, at least
    return low, high, room


def _float_of(keys: Tensor) -> Tensor:
    """The number whose key this is."""
    return torch.where(keys < 0, keys ^ HIGHEST, keys).to(torch.int32).view(torch.float32)
