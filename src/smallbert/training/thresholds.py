"""The k-th largest of very many numbers, exactly and without sorting them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Hint:
    """Where rows of numbers were cut last. On a GPU the next cuts, as a rule not far off, are found sooner with it.

    It never changes what is found. It stays on the device, where a recorded step reads and renews it.
    """

    kept: Tensor | None = None


def kth_largest(rows: Tensor, counts: Tensor, hint: Hint | None = None) -> Tensor:
    """The counts[i]-th largest number of each row: (rows, numbers), (rows,) -> (rows,); a count of 0 gives +inf.

    kth_largest([[3., 1., 2.]], [2])  ->  [2.]
    """
    if rows.is_cuda:  # nothing waits for Python there, so that a step can be recorded
        from smallbert.training.threshold_kernels import find_kth, make_hint

        if hint is not None and hint.kept is None:
            hint.kept = make_hint(rows)
        return find_kth(rows.contiguous().float(), counts.clamp(max=rows.shape[1]), None if hint is None else hint.kept)
    found = []
    for row, count in zip(rows, counts.long().tolist(), strict=True):
        place = row.numel() - min(count, row.numel()) + 1
        found.append(row.new_tensor(float("inf")) if count < 1 else row.kthvalue(place).values)
    return torch.stack(found)
