"""Two models laid side by side: what each made of the same tokens, layer by layer, and how far that is apart.

Everything is float32 and comes in one of two shapes:

    one vector a token     (rows, tokens, features)             in the batch's own layout, padded or packed
    one row a token        (sequences, heads, tokens, tokens)   how it stands to each token of its own sequence

A packed batch is spread out into sequences for the second, without a loop and in shapes known beforehand, so that a
recorded step can do it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from smallbert.model.attention import Attending
from smallbert.model.batch import Batch
from smallbert.model.surgery import counterpart

Pairs = list[tuple[int, int]]
TINY = 1e-24  # beside squares


# Which layer of the student learns from which of the teacher; layers are numbered from 1.


def _in_step(mine: int, theirs: int) -> Pairs:
    return [(layer, counterpart(layer, mine, theirs)) for layer in range(1, mine + 1)]


MAPS: dict[str, Callable[[int, int], Pairs]] = {
    "uniform": _in_step,
    "whole": lambda mine, theirs: [(0, 0), *_in_step(mine, theirs)],
    "skip": lambda mine, theirs: _in_step(mine, theirs)[:-1],  # the last layer is left to the logits
    "first": lambda mine, theirs: [(layer, layer) for layer in range(1, min(mine, theirs) + 1)],
    "last": lambda mine, theirs: [
        (layer, theirs - mine + layer) for layer in range(1, mine + 1) if theirs - mine + layer >= 1
    ],
}


# What is compared.


@dataclass(frozen=True)
class Side:
    """One model's layer: its values, and for rows over tokens which cells there are."""

    values: Tensor
    cells: Tensor | None = None  # (sequences, 1, tokens or 1, tokens); None where every feature counts
    centred: bool = False  # known but for a constant of each row


def products(vectors: Tensor, batch: Batch, heads: int, scale: float) -> Side:
    """The scaled products of all tokens of a sequence with each other, in each of several equal parts."""
    rows = batch.rows(vectors, 0.0)
    parts = rows.unflatten(-1, (heads, -1)).transpose(1, 2)
    return Side(parts @ parts.transpose(-1, -2) * scale, _cells(batch))


def attention_scores(found: Attending | Tensor, batch: Batch) -> Side:
    """What each token's attention is the softmax of.

    Where a family shows probabilities only, it is their logarithms: the scores but for a constant of each row, which no
    softmax sees, so that each row's mean is taken off, and is taken off the other side's too.
    """
    cells = _cells(batch)
    if isinstance(found, Tensor):
        logs = found.float().clamp(min=torch.finfo(torch.float32).tiny).log()
        return Side(logs - _mean(logs, cells)[..., None], cells, centred=True)
    query, key = (x.float().transpose(1, 2).flatten(2) for x in (found.query, found.key))  # (rows, tokens, features)
    heads = found.query.shape[1]
    query, key = (batch.rows(x, 0.0).unflatten(-1, (heads, -1)).transpose(1, 2) for x in (query, key))
    scale = found.query.shape[-1] ** -0.5 if found.scaling is None else found.scaling
    if found.window is not None:
        place = torch.arange(query.shape[2], device=query.device)
        cells = cells & ((place[:, None] - place).abs() < found.window)
    return Side(query @ key.transpose(-1, -2) * scale, cells)


def _cells(batch: Batch) -> Tensor:
    return batch.rows(batch.tokens(), False)[:, None, None, :]


def moments(vectors: Tensor) -> Tensor:
    """The mean and the variance of each vector's features."""
    return torch.stack([vectors.mean(-1), vectors.var(-1, correction=0)], -1)


def unit(vectors: Tensor) -> Tensor:
    """Vectors of length one, or next to zero if they were, each way in one kernel where there is one for it."""
    width = vectors.shape[-1]
    return functional.rms_norm(vectors, (width,), vectors.new_full((width,), width**-0.5), eps=TINY)


OF_BOTH: dict[str, Callable[[Tensor], Tensor]] = {
    "l2": unit,
    "norm": lambda vectors: functional.layer_norm(vectors, vectors.shape[-1:]),
}


# How far apart it is: one number a token (and head), zero where both are equal, but for "ce".


def _mean(values: Tensor, cells: Tensor | None) -> Tensor:
    if cells is None:
        return values.mean(-1)
    return (values * cells).sum(-1) / cells.sum(-1).clamp(min=1)


def _cosine(ours: Tensor, theirs: Tensor, cells: Tensor | None) -> Tensor:
    """1 - cos, as half the squared distance of unit vectors, which is exactly zero for equal ones."""
    if cells is not None:
        ours, theirs = ours * cells, theirs * cells
    return (unit(ours) - unit(theirs)).square().sum(-1) / 2


def _chances(side: Side) -> Tensor:
    """Logarithms of a softmax over the features, or over the cells that this model looks at."""
    values = side.values
    if side.cells is not None:
        values = values.masked_fill(~side.cells, torch.finfo(values.dtype).min)
    return values.log_softmax(-1)


def kl(ours: Side, theirs: Side) -> Tensor:
    """KL(teacher || student) of softmaxes."""
    mine, wanted = _chances(ours), _chances(theirs)
    return _sum(wanted.exp() * (wanted - mine), ours, theirs)


def ce(ours: Side, theirs: Side) -> Tensor:
    """The same with the teacher's own entropy left in."""
    return _sum(-_chances(theirs).exp() * _chances(ours), ours, theirs)


def _sum(each: Tensor, ours: Side, theirs: Side) -> Tensor:
    """Over the cells that both look at: elsewhere the teacher's chance is 0, or the row is none, all of it padding."""
    if ours.cells is None or theirs.cells is None:
        return each.sum(-1)
    return each.masked_fill(~(ours.cells & theirs.cells), 0.0).sum(-1)


ON_VALUES: dict[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {
    "mse": lambda ours, theirs, cells: _mean(functional.mse_loss(ours, theirs, reduction="none"), cells),
    "l1": lambda ours, theirs, cells: _mean((ours - theirs).abs(), cells),
    "cosine": _cosine,
}
ON_CHANCES: dict[str, Callable[[Side, Side], Tensor]] = {"kl": kl, "ce": ce}


def distance(ours: Side, theirs: Side, metric: str, soften: bool = False) -> Tensor:
    """How far apart two layers are at each token, a mean over heads; `soften` compares softmaxes by any metric.

    Two layers may look at different cells: chances are compared wherever one of them looks, and are 0 where it does
    not; scores only where both look.
    """
    if metric in ON_CHANCES:
        each = ON_CHANCES[metric](ours, theirs)
    elif ours.cells is None or theirs.cells is None:
        each = ON_VALUES[metric](ours.values, theirs.values, None)
    elif soften:
        each = ON_VALUES[metric](_chances(ours).exp(), _chances(theirs).exp(), ours.cells | theirs.cells)
    else:
        both = ours.cells & theirs.cells
        one, other = ours.values, theirs.values
        if ours.centred or theirs.centred:
            one, other = (values - _mean(values, both)[..., None] for values in (one, other))
        each = ON_VALUES[metric](one, other, both)
    return each if ours.cells is None else each.mean(1)
