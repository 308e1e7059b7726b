"""Filling a smaller backbone from a larger one: the weights that matter most, at the places where they fit.

What matters is told by weights alone. A dimension of a head counts |q row| * |k row| for looking and |v row| * |out
column| for what is passed on, a head the sum of both over its dimensions; an inner neuron |up row| * |down column|; a
feature of the hidden state the squares of all that reads and writes it, over the layers that stay. Where heads turn
with the position, the dimensions that look are chosen by how fast they turn.

With an importance of every weight, which a loss may tell, it is the sums of that instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from smallbert.errors import UserError
from smallbert.model.anatomy import ROLES, anatomy, layers, part
from smallbert.model.encoder import Encoder
from smallbert.model.replace import head_shape

Importance = dict[nn.Parameter, Tensor]  # how much each weight matters, from 0

PLAIN = "a student is cut out of plain weights; put quantize and sparse after student(…)"


@dataclass(frozen=True)
class Choice:
    """What of one layer stays: rows of q and k, rows of v, inner neurons; each sorted within its head."""

    heads: Tensor
    looks: Tensor
    passes: Tensor
    neurons: Tensor


def slice_backbone(
    new: Encoder, old: Encoder, kept: list[int], heads: int, size: int, importance: Importance | None = None
) -> None:
    """Copy into a smaller encoder (backbone, pooler, heads) what matters most of the layers run at the kept places."""
    row = anatomy(old.backbone)
    numbers = _numbers(old, kept)
    count, _ = head_shape(old)
    inner = getattr(new.backbone.config, row.inner)
    chosen = choose(old, numbers, count, heads, size, inner, importance)
    width = top(features(old, numbers, importance), new.width)
    theirs = dict(old.backbone.named_parameters())
    if lost := {n for n in theirs if not n.startswith(row.layers)} - {n for n, _ in new.backbone.named_parameters()}:
        raise UserError(
            f"student: a model {new.width} wide has no {sorted(lost)[0].split('.')[0]}; take another width, or "
            "start='random'"
        )
    with torch.no_grad():
        for name, tensor in new.backbone.named_parameters():
            source, number, rest = _source(name, row.layers, numbers)
            if source not in theirs:
                raise UserError(PLAIN)
            found: Tensor = theirs[source]
            axes = _axes(row, rest, chosen[number], found, width) if number is not None else {}
            axes = axes or {
                place: _axis(old, new, chosen, width, found, tensor, place) for place in range(tensor.dim())
            }
            for place, index in axes.items():
                if index is not None:
                    found = found.index_select(place, index.to(found.device))
            tensor.copy_(found)
        pairs = [(head, old.heads[name]) for name, head in new.heads.items()]
        pairs += [(new.pooler, old.pooler)] if new.pooler is not None and old.pooler is not None else []
        for mine, other in pairs:
            _slice_like(mine, other, width, old.width)


def check_plain(old: Encoder, kept: list[int]) -> None:
    """Refuse to cut out of layers whose matrices are stored in another form."""
    for number in _numbers(old, kept):
        for role in ROLES:
            _weight(old.backbone, layers(old.backbone)[number], role)


def _numbers(old: Encoder, kept: list[int]) -> list[int]:
    """The layers that are run at the kept places; where all share one, that."""
    shared = anatomy(old.backbone).shared
    return list(range(len(layers(old.backbone)))) if shared else [old.order[place] for place in kept]


def choose(
    old: Encoder,
    numbers: list[int],
    count: int,
    heads: int,
    size: int,
    inner: int,
    importance: Importance | None = None,
) -> list[Choice]:
    """For each layer that stays, its heads, their dimensions and its neurons by importance."""
    backbone = old.backbone
    measured = [_measure(backbone, layers(backbone)[number], count, importance) for number in numbers]
    whole = [(looks + passes).sum(1) for looks, passes, _ in measured]
    if anatomy(backbone).style == "mpnet":  # all layers share one bias a head, so they must keep the same heads
        whole = [torch.stack(whole).sum(0)] * len(whole)
    choices = []
    for each, (looks, passes, neurons) in zip(whole, measured, strict=True):
        which, old_size = top(each, heads), looks.shape[1]
        turning = _turning(old_size, size) if anatomy(backbone).style == "modernbert" else None
        looking, passing = (
            torch.cat(
                [head * old_size + (top(values[head], size) if same is None else same) for head in which.tolist()]
            )
            for values, same in ((looks, turning), (passes, None))
        )
        choices.append(Choice(which, looking, passing, top(neurons, inner)))
    return choices


def _turning(old: int, new: int) -> Tensor:
    """Of a head that turns with the position, the pairs of numbers that turn as fast as those of a head of `new`.

    8, 4  ->  0, 2 and what turns with them, 4, 6
    """
    pairs = torch.arange(new // 2) * old // new
    return torch.cat([pairs, pairs + old // 2])


def features(old: Encoder, numbers: list[int], importance: Importance | None = None) -> Tensor:
    """How much each feature of the hidden state is read and written by the layers that stay."""
    backbone = old.backbone
    total: Any = 0.0
    for layer in (layers(backbone)[number] for number in numbers):
        for role, axis in (("q", 0), ("k", 0), ("v", 0), ("up", 0), ("out", 1), ("down", 1)):
            values = _weight(backbone, layer, role, importance)
            total = total + (values.square() if importance is None else values).sum(axis)
    return total


def top(values: Tensor, count: int) -> Tensor:
    """The places of the largest values, in the order in which they stand; of equal ones the first."""
    return values.sort(descending=True, stable=True).indices[:count].sort().values.cpu()


def _measure(
    backbone: Any, layer: nn.Module, count: int, importance: Importance | None
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, out, up, down = (
        _weight(backbone, layer, role, importance) for role in ("q", "k", "v", "out", "up", "down")
    )
    rows = up.view(-1, down.shape[1], up.shape[1])  # a gated layer has two rows a neuron
    if importance is not None:
        looks, passes = q.sum(1) + k.sum(1), v.sum(1) + out.sum(0)
        return looks.view(count, -1), passes.view(count, -1), rows.sum((0, 2)) + down.sum(0)
    looks = (q.norm(dim=1) * k.norm(dim=1)).view(count, -1)
    passes = (v.norm(dim=1) * out.norm(dim=0)).view(count, -1)
    return looks, passes, rows.norm(dim=2).prod(0) * down.norm(dim=0)


def _weight(backbone: Any, layer: nn.Module, role: str, importance: Importance | None = None) -> Tensor:
    """A matrix, or what is known of how much each of its weights matters."""
    found = part(backbone, layer, role)
    weight: Any = getattr(found.module, "weight", None)
    if not isinstance(weight, nn.Parameter):
        raise UserError(PLAIN)
    values = weight.detach() if importance is None else importance[weight]
    return values.float().chunk(found.blocks)[found.block]


def _source(name: str, stem: str, numbers: list[int]) -> tuple[str, int | None, str]:
    """The name of a weight in the old backbone, the place of its layer, and what it is called in there."""
    if not name.startswith(f"{stem}."):
        return name, None, name
    number, _, rest = name[len(stem) + 1 :].partition(".")
    return f"{stem}.{numbers[int(number)]}.{rest}", int(number), rest


def _axes(row: Any, rest: str, choice: Choice, found: Tensor, width: Tensor) -> dict[int, Tensor | None]:
    """What stays of each axis of a matrix that has a role, or of its bias; nothing for another weight."""
    path, _, kind = rest.rpartition(".")
    looks, passes = choice.looks, choice.passes
    across = {1: width} if kind == "weight" else {}
    if path == row.q.split(" ")[0] == row.v.split(" ")[0]:  # fused: q, k and v below each other
        step = len(found) // 3
        return {0: torch.cat([looks, looks + step, passes + 2 * step]), **across}
    rows = {row.q: looks, row.k: looks, row.v: passes, **dict.fromkeys(row.like_q, looks)}
    if path in rows:
        return {0: rows[path], **across}
    if path == row.up:
        step = found.shape[0]
        many = 2 if row.style == "modernbert" else 1
        return {0: torch.cat([choice.neurons + part * step // many for part in range(many)]), **across}
    if path in (row.out, row.down):
        inside = passes if path == row.out else choice.neurons
        return {0: width, **({1: inside} if kind == "weight" else {})}
    return {}


def _axis(
    old: Encoder, new: Encoder, chosen: list[Choice], width: Tensor, found: Tensor, tensor: Tensor, place: int
) -> Tensor | None:
    """What stays of an axis of any other weight, told by its size: all of it, features, or heads."""
    before, after = found.shape[place], tensor.shape[place]
    if before == old.width and after == new.width:
        return width
    if before == after:
        return None
    return chosen[0].heads


def _slice_like(new: nn.Module, old: nn.Module, width: Tensor, size: int) -> None:
    theirs = dict(old.named_parameters())
    for name, tensor in new.named_parameters():
        if name not in theirs:
            raise UserError(PLAIN)
        found: Tensor = theirs[name]
        for place in range(found.dim()):
            if found.shape[place] == size and tensor.shape[place] == len(width):
                found = found.index_select(place, width.to(found.device))
        tensor.copy_(found)
