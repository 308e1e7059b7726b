"""The k-th largest of very many numbers, exactly and without sorting them."""

from __future__ import annotations

import torch
from torch import Tensor


def kth_largest(rows: Tensor, counts: Tensor) -> Tensor:
    """The counts[i]-th largest number of each row: (rows, numbers), (rows,) -> (rows,); a count of 0 gives +inf.

    kth_largest([[3., 1., 2.]], [2])  ->  [2.]
    """
    if rows.is_cuda:  # nothing waits for Python there, so that a step can be recorded
        from smallbert.training.threshold_kernels import find_kth

        return find_kth(rows.contiguous().float(), counts.clamp(max=rows.shape[1]))
    found = []
    for row, count in zip(rows, counts.long().tolist(), strict=True):
        place = row.numel() - min(count, row.numel()) + 1
        found.append(row.new_tensor(float("inf")) if count < 1 else row.kthvalue(place).values)
    return torch.stack(found)
