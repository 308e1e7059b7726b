"""What is kept of a layer, one vector a token: its name in a store, how it is taken out of a look and put back.

A hidden state is named by its number; what a part of a layer makes by the part and the layer, counted from 1: "q 12".
Of attention, which is square in tokens, the queries and keys are kept that it is made of: "q 12" and "k 12", or
"query 12" and "key 12" where the model turns them before it attends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smallbert.model.anatomy import ROLES, anatomy
from smallbert.model.attention import Attending
from smallbert.model.encoder import Encoder
from smallbert.model.walk import Taps, Wanted
from smallbert.texts.batches import Layout, make_batch
from smallbert.texts.data import STUDENT, Stream, Tokens

Name = int | str
MAKES = {**{role: (role,) for role in ROLES}, "attention": ("query", "key")}  # what is kept of a role (see walk.tap)
PLAIN = {**MAKES, "attention": ("q", "k")}  # the same where queries and keys attend as they are
TURNING = ("modernbert",)  # styles of models that turn queries and keys before they attend
ROLE = {made: role for role, kept in MAKES.items() for made in kept}
SAID = {  # in the words of a note
    "hidden": "hidden states",
    "q": "queries",
    "k": "keys",
    "v": "values",
    "attention": "queries and keys of attention",
}


def turns(encoder: Encoder) -> bool:
    """Whether a model turns queries and keys before it attends."""
    return anatomy(encoder.backbone).style in TURNING


def names_of(wanted: Wanted, turned: bool) -> tuple[Name, ...]:
    """The names of all that is wanted, in their order.

    names_of({"hidden": {0, 6}, "v": {5}}, False)  ->  (0, 6, "v 6")
    """
    parts = [(role, place) for role, places in wanted.items() if role != "hidden" for place in places]
    names: list[Name] = [f"{made} {place + 1}" for role, place in parts for made in (MAKES if turned else PLAIN)[role]]
    return tuple(in_order([*wanted.get("hidden", ()), *names]))


def say_names(wanted: Wanted) -> str:
    """The same for a reader: "hidden states 0, 6 and queries, keys and values of layer 6"."""
    alike: dict[str, list[str]] = {}  # what is wanted of the same layers
    for role, places in wanted.items():
        of = " of layer" + "s" * (len(places) > 1) if role != "hidden" else ""
        numbers = ", ".join(str(place + (role != "hidden")) for place in sorted(places))
        alike.setdefault(f"{of} {numbers}", []).append(SAID.get(role, role))
    return " and ".join(f"{' and '.join(filter(None, [', '.join(a[:-1]), a[-1]]))}{of}" for of, a in alike.items())


def in_order(names: Iterable[Name]) -> list[Name]:
    """Each name once: hidden states by number, then parts by their own names and by layers."""
    return sorted(set(names), key=_split)


def taps_for(names: Iterable[Name]) -> dict[str, set[int]]:
    """What must be looked at for these names to be known."""
    wanted: dict[str, set[int]] = {}
    for made, number in map(_split, names):
        wanted.setdefault(ROLE.get(made, "hidden"), set()).add(number - bool(made))
    return wanted


def vector(taps: Taps, name: Name) -> Tensor:
    """What a look shows under a name: (rows, tokens, features)."""
    made, number = _split(name)
    found = taps[ROLE.get(made, "hidden")][number - bool(made)]
    return getattr(found, made).transpose(1, 2).flatten(2) if isinstance(found, Attending) else found


def put_back(vectors: Mapping[Name, Tensor], like: Taps) -> Taps:
    """What a look would show, given one that is like it in all but the numbers."""

    def put(role: str, place: int, one: Any) -> Any:
        if role == "hidden":
            return vectors[place]
        if not isinstance(one, Attending):
            return vectors[f"{role} {place + 1}"]
        kept = MAKES if f"query {place + 1}" in vectors else PLAIN
        found = [vectors[f"{made} {place + 1}"] for made in kept[role]]
        query, key = (x.unflatten(-1, (one.query.shape[1], -1)).transpose(1, 2) for x in found)
        return replace(one, query=query, key=key)

    return {role: {place: put(role, place, one) for place, one in shown.items()} for role, shown in like.items()}


def look_at_one(encoder: Encoder, tokens: Tokens, wanted: Wanted) -> Taps:
    """What a look at the shortest text shows; of hidden states, which are all alike, only which they are."""
    if not wanted.keys() - {"hidden"}:
        return {role: dict.fromkeys(places) for role, places in wanted.items()}
    lengths = np.where(tokens.lengths > 0, tokens.lengths, tokens.lengths.max())
    stream, shortest = Stream({STUDENT: tokens}, None, "classify"), np.array([lengths.argmin()])
    with torch.no_grad():
        return encoder.look(make_batch(stream, shortest, Layout(False, 0)).to(encoder.device), wanted, False).taps


def why_not_kept(encoder: Encoder, like: Taps) -> str:
    """Why what a look shows cannot be kept; nothing where it can."""
    if any(isinstance(one, Tensor) for one in like.get("attention", {}).values()):
        return f"{encoder.family} gives attention only as a matrix, quadratic in tokens, which is not kept"
    for name in names_of({role: shown.keys() for role, shown in like.items() if role != "hidden"}, True):
        if (width := vector(like, name).shape[-1]) != encoder.width:
            said = say_names(taps_for([name]))
            return (
                f"its {said} are {width} wide, and only vectors as wide as its hidden states ({encoder.width}) are kept"
            )
    return ""


def _split(name: Name) -> tuple[str, int]:
    made, _, number = str(name).rpartition(" ")
    return made, int(number)
