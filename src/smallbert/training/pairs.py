"""Which layer of a student learns from which of its teacher; layers are numbered from 1, 0 is what goes into them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from smallbert.errors import UserError
from smallbert.model.surgery import counterpart

Pairs = list[tuple[int, int]]
MANY = 10**6  # layers, where it is not known yet how many there are


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


def pair_layers(layers: Any, mine: int, theirs: int, lowest: int, what: str) -> Pairs:
    """Pairs by the name of a map, or as they are given, of layers that have `what`, from the lowest on.

    pair_layers("uniform", 3, 6, 1, "hidden")         ->  [(1, 2), (2, 4), (3, 6)]
    pair_layers({1: 2, -1: -1}, 3, 6, 1, "attention") ->  [(1, 2), (3, 6)]
    """
    if isinstance(layers, str):
        if not (found := MAPS[layers](mine, theirs)):
            raise UserError(f"align: layers={layers!r} leaves a student of one layer nothing to compare")
        return [pair for pair in found if pair[0] >= lowest]
    try:
        pairs = [(int(one), int(other)) for one, other in (layers.items() if isinstance(layers, dict) else layers)]
    except ValueError:
        raise UserError(f"align: layers is pairs of numbers such as {{3: 6, -1: -1}}, not {layers}") from None
    layers = dict(pairs) if isinstance(layers, dict) else layers  # whose numbers may have come as words
    counted = [(one + mine + 1 if one < 0 else one, o + theirs + 1 if o < 0 else o) for one, o in pairs]
    if not counted or len(set(counted)) < len(counted):
        raise UserError(f"align: layers={layers} must name at least one pair of layers, and each pair once")
    if not all(lowest <= one <= mine and lowest <= o <= theirs for one, o in counted):
        fit = f"does not fit a student of {mine} layers and a teacher of {theirs}" if mine < MANY else "cannot be"
        raise UserError(f"align: layers={layers} {fit}; for {what!r} layers count from {lowest}, and -1 is the last")
    return counted
