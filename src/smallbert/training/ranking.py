"""Which of very many scores are the highest: cuts and masks by share, ranks, and scores that no two weights have alike.

A mask inside a step is `score >= cut`, which keeps more than its share where scores are equal. So scores that are
trained start apart from each other, those without a value of their own come behind all others in the order of sizes,
and what is decided once, outside a step, is counted out exactly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from smallbert.training.thresholds import Hint, kth_largest

Cuts = Callable[[list[Tensor]], list[Tensor]]  # for each group's scores, where to cut each of its matrices
LOWEST = torch.finfo(torch.float32).min  # the score of what is pruned already; finite, so that no sum makes it NaN


def top(keep: Tensor, scope: str) -> Cuts:
    """Cut so that the share `keep` with the highest scores stays, in every matrix ("local") or over all ("global")."""

    hints = defaultdict[int, Hint](Hint)  # from step to step the scores of a group are cut at about the same height

    def cuts(scores: list[Tensor]) -> list[Tensor]:
        if scope == "global":
            flat = torch.cat([stack.flatten() for stack in scores])[None]
            cut = kth_largest(flat, _count(flat, keep), hints[0])
            return [cut.expand(len(stack)) for stack in scores]
        return [kth_largest(stack, _count(stack, keep), hints[place]) for place, stack in enumerate(scores)]

    return cuts


def keep_top(scores: list[Tensor], keep: Tensor | float, scope: str) -> list[Tensor]:
    """Masks over exactly the share `keep` with the highest scores; of those equal to the lowest kept, the first stay.

    keep_top([[[3., 1., 1., 1.]]], 0.5, "local")  ->  [[[True, True, False, False]]]
    """
    share = torch.as_tensor(keep, dtype=torch.float64, device=scores[0].device)

    def mask(rows: Tensor) -> Tensor:
        count = _count(rows, share)[:, None]
        cut = kth_largest(rows, count[:, 0])[:, None]
        above, equal = rows > cut, rows == cut
        return above | (equal & (equal.cumsum(1, dtype=torch.int32) <= count - above.sum(1, keepdim=True)))

    return _by_scope(scores, scope, mask)


def ranks(scores: list[Tensor], scope: str) -> list[Tensor]:
    """The share of numbers that lie below each, from 0 to nearly 1, in its matrix or over all of them.

    [[0.1, 0.4, 0.2, 0.9]]  ->  [[0.0, 0.5, 0.25, 0.75]]
    """
    return _by_scope(scores, scope, lambda rows: _places(rows).float() / rows.shape[1])


def spread_out(scores: list[Tensor], scope: str, most: float) -> list[Tensor]:
    """Numbers in the same order of which no two are alike: one float after the other, the last of them `most`."""
    bits = int(torch.tensor(most, dtype=torch.float32).view(torch.int32))  # floats above 0 lie in the order of bits
    return _by_scope(scores, scope, lambda rows: (_places(rows) + (bits + 1 - rows.shape[1])).view(torch.float32))


def behind(scores: Tensor, sizes: Tensor) -> Tensor:
    """Scores above 0 as they are; where there is none, the size of the weight counts, behind all others: 0 is LOWEST.

    behind([0.1, 0.0, 0.0, 0.0], [0.5, 0.0, 2.0, 1.0])  ->  [0.1, -3.4e+38, -1.0, -2.0], but for the last bit
    """
    highest = torch.finfo(torch.float32).max
    bits = int(torch.tensor(highest).view(torch.int32))
    return torch.where(scores > 0, scores, -(bits - sizes.float().view(torch.int32)).view(torch.float32))


def _count(stack: Tensor, keep: Tensor) -> Tensor:
    """How many of each row stay: the share, rounded to a whole number, in double precision; one at least."""
    return (keep.double() * stack.shape[1]).round().clamp(min=1).long().expand(len(stack))


def _places(rows: Tensor) -> Tensor:
    """How many numbers of its row come before each; of equal ones, those that stand before it."""
    places = torch.arange(rows.shape[1], device=rows.device, dtype=torch.int32).expand_as(rows)
    return torch.empty_like(places).scatter_(1, rows.argsort(dim=1, stable=True), places)


def _by_scope(stacks: list[Tensor], scope: str, change: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Rows changed each on its own, or all as one long row."""
    if scope == "local":
        return [change(stack) for stack in stacks]
    flat = change(torch.cat([stack.flatten() for stack in stacks])[None])[0]
    parts = flat.split([stack.numel() for stack in stacks])
    return [part.view_as(stack) for part, stack in zip(parts, stacks, strict=True)]
