"""What teachers say of each text, asked once and kept on disk: batches bring it along, as they bring labels."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from smallbert.features.building import Say
from smallbert.features.cache import SHARD_BYTES, What
from smallbert.features.store import Store, row_places
from smallbert.model.batch import TAUGHT, Batch

BRINGING = "bringing what the teacher said"


class Kind(NamedTuple):
    """One of the things that a teacher says: hidden states of these layers, or scores; of tokens or of texts."""

    layers: tuple[int, ...]
    by_token: bool


@dataclass
class Taught:
    """What one teacher said of every text of a phase."""

    name: str
    what: What
    stores: list[Store]
    store_of: np.ndarray  # of each text, which store holds it
    row_of: np.ndarray  # and where in it
    lengths: np.ndarray
    view: str  # in which batch it comes
    resident: dict[str, Tensor] = field(default_factory=dict, repr=False)  # all of it on a GPU that has room, by kind

    def __post_init__(self) -> None:
        """Name the kinds of things it has, and find where the tokens of each text begin among those of all."""
        scores, hidden, first = self.what.scores, self.what.hidden, self.what.first
        kinds = {"scores": Kind((), scores == "tokens"), "hidden": Kind(hidden, True), "first": Kind(first, False)}
        self.kinds = {name: kind for name, kind in kinds.items() if kind.layers or (name == "scores" and scores)}
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.texts, self.tokens = len(self.lengths), int(self.lengths.sum())

    @cached_property
    def table(self) -> Tensor:
        """The scores of whole texts: in memory, since they are hardly more than labels."""
        return self._read(np.arange(self.texts), self._blank(self.kinds["scores"], self.texts))

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
                whole[..., done : done + count, :] = self._read(some, self._blank(kind, count), places, kind.layers)
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
                self._read(index, found, places if kind.by_token else None, kind.layers)
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

    def _lines(self, kind: Kind) -> int:
        """How many things of a kind there are: as many as tokens, or as texts."""
        return self.tokens if kind.by_token else self.texts

    def _pieces(self, kind: Kind) -> list[np.ndarray]:
        """All texts, in pieces of about as many bytes as a shard has, or of one text."""
        sizes = self._blank(kind, 1, "meta").nbytes * (self.lengths if kind.by_token else np.ones(self.texts, np.int64))
        return np.split(np.arange(self.texts), np.flatnonzero(np.diff(np.cumsum(sizes) // SHARD_BYTES)) + 1)

    def _blank(self, kind: Kind, count: int, device: torch.device | str = "cpu") -> Tensor:
        """Zeros for so many tokens or texts: (layers, count, width) of states, (count, classes) of scores."""
        about = self.stores[0].about
        if not kind.layers:
            return torch.zeros(count, about["scores"]["classes"], device=device)
        dtype = getattr(torch, self.what.dtype)
        return torch.zeros(len(kind.layers), count, about["width"], dtype=dtype, device=device)

    def _read(
        self, index: np.ndarray, out: Tensor, places: Tensor | None = None, layers: tuple[int, ...] = ()
    ) -> Tensor:
        """Put scores of some texts, or states of layers, into `out`: at the places of all tokens, or one a text."""
        store_of, rows = self.store_of[index], self.row_of[index]
        owner = store_of if places is None else np.repeat(store_of, self.lengths[index])
        for number in np.unique(store_of):
            some, columns = rows[store_of == number], torch.from_numpy(np.flatnonzero(owner == number))
            columns = columns if places is None else places[columns]
            if layers:
                self.stores[number].read(some, list(layers), places is None, out, columns)
            else:
                self.stores[number].read_scores(some, out, columns)
        return out
