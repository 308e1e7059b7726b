"""A linear layer as the sum of two: how a ternary matrix becomes two binary ones (BinaryBERT, Bai et al. 2021).

Of a row w with ternary values a * t, t of -1, 0, 1, the halves are

    t != 0:          c w            and  (1 - c) w
    t == 0, w > 0:   d + w          and  -d
    t == 0, w <= 0:  d              and  -d + w

so that they add up to w, and c and d are such that the mean size of either half is a / 2: then signs by mean sizes add
up to a * t, and nothing changes where ternary weights are replaced by two binary ones.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from smallbert.model.rounding import LEAST


class Twins(nn.Module):
    """Two linear layers that read the same and add what they find; the first has the bias."""

    def __init__(self, inputs: int, outputs: int, bias: bool, device: torch.device):
        """Both empty."""
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.first = nn.Linear(inputs, outputs, bias, device=device)
        self.second = nn.Linear(inputs, outputs, False, device=device)

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply twice."""
        return self.first(inputs) + self.second(inputs)


def split(weight: Tensor, ternary: Tensor) -> tuple[Tensor, Tensor]:
    """The halves of a matrix, given what its ternary values are; what shares a scale is a row of both.

    >>> split(torch.tensor([[0.5, -0.5, 0.0, 0.0]]), torch.tensor([[0.5, -0.5, 0.0, 0.0]]))
    (tensor([[ 0.2500, -0.2500,  0.2500,  0.2500]]), tensor([[ 0.2500, -0.2500, -0.2500, -0.2500]]))
    """
    sizes, kept, above = weight.abs(), ternary != 0, (ternary == 0) & (weight > 0)
    below = ~kept & ~above
    large, count = (sizes * kept).sum(1, True), kept.sum(1, True)
    tilt = (sizes * below).sum(1, True) - (sizes * above).sum(1, True)
    share = 0.5 * (1 + tilt / large.clamp(min=LEAST))
    mean = large / count.clamp(min=1)
    depth = (weight.shape[1] * mean - sizes.sum(1, True)) / (2 * (~kept).sum(1, True)).clamp(min=1)
    depth = depth.clamp(min=LEAST)
    zero = torch.zeros_like(weight)
    first = torch.where(kept, share * weight, depth + torch.where(above, weight, zero))
    second = torch.where(kept, (1 - share) * weight, torch.where(below, weight, zero) - depth)
    return first, second
