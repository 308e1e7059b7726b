"""Two models laid side by side: what each made of the same tokens, layer by layer, and how far that is apart.

Everything is compared in float32 and comes in one of two shapes:

    one vector a token     (rows, tokens, features)             in the batch's own layout, padded or packed
    one row a token        (sequences, heads, tokens, tokens)   how it stands to each token of its own sequence

Rows are products of queries and keys, for which a packed batch is spread out into sequences, without a loop and in
shapes known beforehand, so that a recorded step can do it. Layers that are alike are compared at once, as heads of one,
while their rows are small: a step of small kernels costs by their number. With KERNELS, a GPU compares the rows of a
packed batch tile by tile instead and never writes them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from smallbert.model.attention import Attending
from smallbert.model.batch import Batch

TINY = 1e-24  # beside squares
AT_ONCE = 2**28  # bytes of rows that are compared together: of larger ones, each layer's memory is free for the next
WIDEST = 256  # bytes of a head's vector that kernels take: more would not fit into a program's memory on small GPUs
KERNELS = True  # False: as without a GPU, to compare (tests/test_gpu.py, benchmarks/row_kernels.py)


# What is compared.


@dataclass(frozen=True)
class Side:
    """One model's layer: its values, and for rows over tokens which cells there are."""

    values: Tensor
    cells: Tensor | None = None  # (sequences, 1, tokens or 1, tokens); None where every feature counts
    centred: bool = False  # known but for a constant of each row


def each_other(vectors: Tensor, heads: int, scale: float) -> Attending:
    """Tokens that stand to each other by their scaled products, in each of several equal parts."""
    parts = vectors.unflatten(-1, (heads, -1)).transpose(1, 2)
    return Attending(parts, parts, scale)


def relation(vectors: Tensor, heads: int) -> Attending:
    """MiniLM's relation, before its softmax: scaled products of all tokens in each of `heads` parts."""
    return each_other(vectors, heads, (vectors.shape[-1] / heads) ** -0.5)


def attention_scores(found: Attending | Tensor, batch: Batch, cells: Tensor | None = None) -> Side:
    """What each token's attention is the softmax of; `cells` are the batch's own, where they are known already.

    Where a family shows probabilities only, it is their logarithms: the scores but for a constant of each row, which no
    softmax sees, so that each row's mean is taken off, and is taken off the other side's too.
    """
    cells = _cells(batch) if cells is None else cells
    if isinstance(found, Tensor):
        logs = found.float().clamp(min=torch.finfo(torch.float32).tiny).log()
        return Side(logs - _mean(logs, cells)[..., None], cells, centred=True)
    alike = found.key is found.query
    laid = _in_rows(found.query if alike else torch.cat([found.query, found.key], 1), batch)
    query, key = (laid, laid) if alike else laid.chunk(2, 1)
    if found.window is not None:
        place = torch.arange(query.shape[2], device=query.device)
        cells = cells & ((place[:, None] - place).abs() < found.window)
    return Side(query * _scale(found) @ key.transpose(-1, -2), cells)


def _in_rows(vectors: Tensor, batch: Batch) -> Tensor:
    """Heads' vectors of tokens, spread out into sequences: (rows, heads, tokens, size) -> (sequences, heads, …)."""
    flat = batch.rows(vectors.float().transpose(1, 2).flatten(2), 0.0)
    return flat.unflatten(-1, (vectors.shape[1], -1)).transpose(1, 2)


def _scale(found: Attending) -> float:
    return found.query.shape[-1] ** -0.5 if found.scaling is None else found.scaling


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


def linear_map(mine: int, theirs: int, seed: int) -> nn.Linear:
    """A map to the teacher's width; one between equal widths starts by changing nothing."""
    made = nn.Linear(mine, theirs)
    with torch.no_grad():
        if mine == theirs:
            nn.init.eye_(made.weight)
        else:
            nn.init.xavier_uniform_(made.weight, generator=torch.Generator().manual_seed(seed))
        nn.init.zeros_(made.bias)
    return made


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
    each = functional.kl_div(_chances(ours), _chances(theirs), reduction="none", log_target=True)
    return _sum(each, ours, theirs)


def ce(ours: Side, theirs: Side) -> Tensor:
    """The same with the teacher's own entropy left in."""
    return _sum(-_chances(theirs).exp() * _chances(ours), ours, theirs)


def _sum(each: Tensor, ours: Side, theirs: Side) -> Tensor:
    """Over the cells that both look at: elsewhere the teacher's chance is 0, or the row is none, all of it padding."""
    if ours.cells is None or theirs.cells is None or ours.cells is theirs.cells:
        return each.sum(-1)
    return each.masked_fill(~(ours.cells & theirs.cells), 0.0).sum(-1)


ON_VALUES: dict[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {
    "mse": lambda ours, theirs, cells: _mean(functional.mse_loss(ours, theirs, reduction="none"), cells),
    "l1": lambda ours, theirs, cells: _mean((ours - theirs).abs(), cells),
    "cosine": _cosine,
}
ON_CHANCES: dict[str, Callable[[Side, Side], Tensor]] = {"kl": kl, "ce": ce}


Looking = Attending | Tensor  # what a layer attends with, or the probabilities themselves


def rows_apart(
    ours: Sequence[Looking], theirs: Sequence[Looking], batch: Batch, metric: str, soften: bool = False
) -> Tensor:
    """How far apart the rows of each token are, layer by layer, in the batch's own layout: (layers, rows, tokens)."""
    alike: dict[Hashable, list[int]] = defaultdict(list)
    for place, two in enumerate(zip(ours, theirs, strict=True)):
        alike[tuple(map(_form, two))].append(place)
    found: dict[int, Tensor] = {}
    for places in alike.values():
        most = max(1, AT_ONCE // _row_bytes(ours[places[0]], batch))
        for some in (places[start : start + most] for start in range(0, len(places), most)):
            mine, its = (_beside([side[place] for place in some]) for side in (ours, theirs))
            each = _rows_apart(mine, its, batch, metric, soften).unflatten(0, (len(some), -1)).mean(1)
            found |= zip(some, each.unbind(), strict=True)
    return torch.stack([found[place] for place in range(len(ours))])


def _form(found: Looking) -> Hashable:
    """Layers for which this is equal can be taken for heads of one."""
    if isinstance(found, Tensor):
        return found.shape
    return found.query.shape, found.scaling, found.window, found.key is found.query


def _row_bytes(found: Looking, batch: Batch) -> int:
    """How large the rows of a layer are in float32."""
    heads = (found if isinstance(found, Tensor) else found.query).shape[1]
    return 4 * heads * batch.size * batch.longest**2


def _beside(layers: Sequence[Looking]) -> Looking:
    """The heads of some layers as those of one."""
    one = layers[0]
    if len(layers) == 1:
        return one
    if isinstance(one, Tensor):
        return torch.cat(list(layers), 1)  # type: ignore[arg-type]
    query = torch.cat([layer.query for layer in layers], 1)  # type: ignore[union-attr]
    key = query if one.key is one.query else torch.cat([layer.key for layer in layers], 1)  # type: ignore[union-attr]
    return replace(one, query=query, key=key)


def _rows_apart(ours: Looking, theirs: Looking, batch: Batch, metric: str, soften: bool) -> Tensor:
    """Of one layer, head by head: (heads, rows, tokens)."""
    kind = {("kl", soften): "kl", ("mse", True): "chances", ("mse", False): "scores"}.get((metric, soften))
    if isinstance(ours, Attending) and isinstance(theirs, Attending) and kind and _by_kernels(ours, theirs, batch):
        from smallbert.training.row_kernels import Rows, compare_rows

        assert batch.bounds is not None
        mine, its = (
            Rows(one.query[0].transpose(0, 1), one.key[0].transpose(0, 1), _scale(one)) for one in (ours, theirs)
        )
        return compare_rows(mine, its, batch.bounds, batch.longest, kind).unsqueeze(1)
    cells = _cells(batch)
    one, other = (attention_scores(side, batch, cells) for side in (ours, theirs))
    return batch.from_rows(distance(one, other, metric, soften).transpose(1, 2)).movedim(-1, 0)


def _by_kernels(ours: Attending, theirs: Attending, batch: Batch) -> bool:
    """Whether kernels can do it: on a GPU, packed, with all tokens in sight and heads that are not too wide."""
    return (
        KERNELS
        and ours.query.is_cuda
        and batch.bounds is not None
        and ours.window is None
        and theirs.window is None
        and all(one.query.shape[-1] * one.query.element_size() <= WIDEST for one in (ours, theirs))
    )


def distance(ours: Side, theirs: Side, metric: str, soften: bool = False) -> Tensor:
    """How far apart two layers are at each token (and head); `soften` compares softmaxes by any metric.

    Two layers may look at different cells: chances are compared wherever one of them looks, and are 0 where it does
    not; scores only where both look.
    """
    if metric in ON_CHANCES:
        return ON_CHANCES[metric](ours, theirs)
    if ours.cells is None or theirs.cells is None:
        return ON_VALUES[metric](ours.values, theirs.values, None)
    if soften:
        return ON_VALUES[metric](_chances(ours).exp(), _chances(theirs).exp(), ours.cells | theirs.cells)
    both = ours.cells & theirs.cells
    one, other = ours.values, theirs.values
    if ours.centred or theirs.centred:
        one, other = (values - _mean(values, both)[..., None] for values in (one, other))
    return ON_VALUES[metric](one, other, both)
