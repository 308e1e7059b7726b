"""The k-th largest of very many numbers, exactly and without sorting them.

On a GPU the numbers are read three times: each reading counts, among the numbers that share the leading bits found so
far, how many have each value of the next eleven bits, and so finds eleven more bits of the answer.
"""

from __future__ import annotations

import torch
from torch import Tensor


def kth_largest(rows: Tensor, counts: Tensor) -> Tensor:
    """The counts[i]-th largest number of each row: (rows, numbers), (rows,) -> (rows,); a count of 0 gives +inf.

    kth_largest([[3., 1., 2.]], [2])  ->  [2.]
    """
    if rows.is_cuda:
        return _radix_select(rows, counts)
    found = []
    for row, count in zip(rows, counts.long().tolist(), strict=True):
        place = row.numel() - min(count, row.numel()) + 1
        found.append(row.new_tensor(float("inf")) if count < 1 else row.kthvalue(place).values)
    return torch.stack(found)


def _radix_select(rows: Tensor, counts: Tensor) -> Tensor:
    """Find the answer's 32 bits a few at a time, from the top."""
    from smallbert.training.kernels import BINS, count_digits

    rows = rows.contiguous().float()
    prefix = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    left = counts.long().clamp(min=1)
    for shift, width in ((21, 11), (10, 11), (0, 10)):
        own = count_digits(rows, prefix, shift, width).flip(1).long()
        above = own.cumsum(1)  # how many have this digit or a larger one, from the largest digit down
        place = (above < left[:, None]).sum(1, keepdim=True).clamp(max=BINS - 1)
        left = left - (above - own).gather(1, place)[:, 0]
        prefix = prefix | ((BINS - 1 - place[:, 0]) << shift)
    # Undo the mapping that made unsigned order the order of floats.
    bits = torch.where(prefix >= 2**31, prefix - 2**31, (2**32 - 1) - prefix)
    value = torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)
    return torch.where(counts < 1, float("inf"), value)
