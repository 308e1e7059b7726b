"""What teachers say of each text, asked once and kept on disk: batches bring it along, as they bring labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from smallbert.features.building import Say
from smallbert.features.cache import SHARD_BYTES, What
from smallbert.features.parts import Name, put_back
from smallbert.features.store import Store, row_places
from smallbert.model.batch import TAUGHT, Batch
from smallbert.model.walk import Taps

BRINGING = "bringing the teacher's outputs"


class Part(NamedTuple):
    """Layers that the same stores hold, and which stores these are, the oldest first."""

    layers: tuple[Name, ...]
    stores: tuple[int, ...]


class Kind(NamedTuple):
    """One of the things that a teacher says: vectors of layers, or scores, which are of none; of tokens or of texts."""

    parts: list[Part]
    by_token: bool

    @property
    def layers(self) -> list[Name]:
        """All of its layers, in the order in which they are read."""
        return [layer for part in self.parts for layer in part.layers]


@dataclass
class Taught:
    """What one teacher said of every text of a phase."""

    name: str
    what: What
    stores: list[Store]
    rows: np.ndarray  # of each store, where each text stands in it; -1 where it does not
    lengths: np.ndarray
    view: str  # in which batch it comes
    like: Taps  # what a look at one text shows, hidden states aside
    resident: dict[str, Tensor] = field(default_factory=dict, repr=False)  # all of it on a GPU that has room, by kind

    def __post_init__(self) -> None:
        """Name the kinds of things it has, and find where the tokens of each text begin among those of all."""
        held = [self.what.held_by(store.about) for store in self.stores]
        scored = Part((), tuple(number for number, one in enumerate(held) if one.scores))
        kinds = {
            "scores": Kind([scored] if self.what.scores else [], self.what.scores == "tokens"),
            "hidden": Kind(_parts(self.what.hidden, [one.hidden for one in held]), True),
            "first": Kind(_parts(self.what.first, [one.first for one in held]), False),
        }
        self.kinds = {name: kind for name, kind in kinds.items() if kind.parts}
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.texts, self.tokens = len(self.lengths), int(self.lengths.sum())

    @cached_property
    def table(self) -> Tensor:
        """The scores of whole texts: in memory, since they are hardly more than labels."""
        kind = self.kinds["scores"]
        return self._read(kind, np.arange(self.texts), self._blank(kind, self.texts))

    @property
    def tokens_of_first(self) -> str:
        """Which tokens are kept where first ones are wanted: "first", or "all" where something else wants these."""
        stores = {number for part in self.kinds["first"].parts for number in part.stores}
        return "first" if {self.stores[number].about["tokens"] for number in stores} == {"first"} else "all"

    @property
    def reads(self) -> bool:
        """Whether every batch is read from disk."""
        return not self.resident and any(kind.layers or kind.by_token for kind in self.kinds.values())

    @property
    def bytes(self) -> int:
        """How much memory all of it takes."""
        return sum(self._blank(kind, self._lines(kind) + 1, "meta").nbytes for kind in self.kinds.values())

    def bring_to(self, device: torch.device, say: Say) -> None:
        """Bring all of it onto a device, so that batches need bring no more than the numbers of texts and tokens."""
        for name, kind in self.kinds.items():
            whole = self._blank(kind, self._lines(kind) + 1, device)  # the last line is for where no text is
            done = 0
            for some in self._pieces(kind):
                count = int(self.lengths[some].sum()) if kind.by_token else len(some)
                places = torch.arange(count) if kind.by_token else None
                whole[..., done : done + count, :] = self._read(kind, some, self._blank(kind, count), places)
                done += count
                say(BRINGING, int(some[-1]) + 1, self.texts, "")
            self.resident[name] = whole

    def add_to(self, batch: Batch, index: np.ndarray) -> Batch:
        """The batch of some texts with what the teacher said of them, or where that is; zeros where no text is."""
        by_token = any(kind.by_token for kind in self.kinds.values())
        places = torch.from_numpy(np.flatnonzero(batch.tokens().numpy())) if by_token else None
        made = (self._find if self.resident else self._fetch)(batch, index, places)
        return batch.with_tensors({f"{TAUGHT}{self.name} {what}": values for what, values in made.items()})

    def _find(self, batch: Batch, index: np.ndarray, places: Tensor | None) -> dict[str, Tensor]:
        """The lines of some texts, and of their tokens, among those of all."""
        texts = torch.full((batch.size,), self.texts)
        texts[: len(index)] = torch.from_numpy(index)
        if places is None:
            return {"texts": texts}
        tokens = torch.full((batch.input_ids.numel(),), self.tokens)
        rows = row_places(self.starts[index], self.lengths[index], np.zeros(1, np.int64))[0]
        tokens[places] = torch.from_numpy(rows)
        return {"texts": texts, "tokens": tokens}

    def _fetch(self, batch: Batch, index: np.ndarray, places: Tensor | None) -> dict[str, Tensor]:
        """Everything that was said of some texts, each kind in the shape of the batch."""
        made = {}
        for name, kind in self.kinds.items():
            found = self._blank(kind, batch.input_ids.numel() if kind.by_token else batch.size)
            if kind.layers or kind.by_token:
                self._read(kind, index, found, places if kind.by_token else None)
            else:
                found[: len(index)] = self.table[torch.from_numpy(index)]
            made[name] = found.unflatten(-2, batch.input_ids.shape) if kind.by_token else found
        return made

    def came_with(self, batch: Batch) -> bool:
        """Whether it was added to a batch: methods may make some of their own."""
        return f"{self.name} {'texts' if self.resident else next(iter(self.kinds))}" in batch.taught

    def said_of(self, batch: Batch) -> dict[str, Tensor]:
        """What the teacher said of a batch to which it was added: "scores", "hidden" and "first", those there are."""
        if not self.resident:
            return {name: batch.taught[f"{self.name} {name}"] for name in self.kinds}
        made = {}
        for name, kind in self.kinds.items():
            rows = batch.taught[f"{self.name} {'tokens' if kind.by_token else 'texts'}"]
            found = self.resident[name].index_select(-2, rows)
            made[name] = found.unflatten(-2, batch.input_ids.shape) if kind.by_token else found
        return made

    def taps(self, said: dict[str, Tensor]) -> Taps:
        """The same as a look shows it, by role and place."""
        found: dict[str, dict[Any, Tensor]] = {
            name: dict(zip(kind.layers, said[name], strict=True)) for name, kind in self.kinds.items() if kind.layers
        }
        return {**put_back(found.pop("hidden", {}), self.like), **found}

    def _lines(self, kind: Kind) -> int:
        """How many things of a kind there are: as many as tokens, or as texts."""
        return self.tokens if kind.by_token else self.texts

    def _pieces(self, kind: Kind) -> list[np.ndarray]:
        """All texts, in pieces of about as many bytes as a shard has, or of one text."""
        sizes = self._blank(kind, 1, "meta").nbytes * (self.lengths if kind.by_token else np.ones(self.texts, np.int64))
        return np.split(np.arange(self.texts), np.flatnonzero(np.diff(np.cumsum(sizes) // SHARD_BYTES)) + 1)

    def _blank(self, kind: Kind, count: int, device: torch.device | str = "cpu") -> Tensor:
        """Zeros for so many tokens or texts: (layers, count, width) of states, (count, classes) of scores."""
        about, layers = self.stores[kind.parts[0].stores[0]].about, len(kind.layers)
        if not layers:
            return torch.zeros(count, about["scores"]["classes"], device=device)
        return torch.zeros(layers, count, about["width"], dtype=getattr(torch, self.what.dtype), device=device)

    def _read(self, kind: Kind, index: np.ndarray, out: Tensor, places: Tensor | None = None) -> Tensor:
        """Put what is of a kind, of some texts, into `out`: at the places of all tokens, or one a text."""
        begin = 0
        for layers, stores in kind.parts:
            lines, begin, left = out[begin : begin + len(layers)], begin + len(layers), np.ones(len(index), bool)
            for number in stores:
                rows = self.rows[number, index]
                here = left & (rows >= 0)
                if not here.any():
                    continue
                left &= ~here
                owned = here if places is None else np.repeat(here, self.lengths[index])
                columns = torch.from_numpy(np.flatnonzero(owned))
                columns = columns if places is None else places[columns]
                if layers:
                    self.stores[number].read(rows[here], layers, places is None, lines, columns)
                else:
                    self.stores[number].read_scores(rows[here], out, columns)
        return out


def _parts(wanted: Sequence[Name], held: list[tuple[Name, ...]]) -> list[Part]:
    """Which layers are held by which stores, those of the same stores together."""
    parts: dict[tuple[int, ...], tuple[Name, ...]] = {}
    for layer in wanted:
        stores = tuple(number for number, layers in enumerate(held) if layer in layers)
        parts[stores] = (*parts.get(stores, ()), layer)
    return [Part(layers, stores) for stores, layers in parts.items()]
