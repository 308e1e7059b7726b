"""The k-th largest of very many numbers, exactly and without sorting them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
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
    found, whole = [], rows.detach().float() if rows.dtype.itemsize < 4 else rows.detach()
    for row, count in zip(whole.numpy(), counts.long().tolist(), strict=True):
        place = row.size - min(count, row.size)
        # NumPy splits by vector instructions, ten times as fast as kthvalue
        found.append(np.partition(row, place)[place] if count > 0 else np.inf)
    return torch.from_numpy(np.array(found)).to(rows.dtype)
