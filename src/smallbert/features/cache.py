"""A cache of what a model says of texts: stores in a folder, in which each text is found by a hash of its own tokens.

So neither another order nor added, augmented or left out texts can bring a text what was said of another. What some
store already holds is read from there; what none does becomes one store more.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from smallbert.data import STUDENT, Stream, Tokens
from smallbert.errors import RunError, UserError
from smallbert.features.building import Say, Taken, build_store
from smallbert.features.plan import Plan, plan_store, text_keys
from smallbert.features.store import LENGTHS, MANIFEST, Store, is_sound, open_store, read_keys, read_manifest
from smallbert.model.encoder import HEAD, Encoder

DELETE = "delete it and run again, or write another cache='folder'"
STAGE = "keeping what the teacher says"
SHARD_TEXTS, SHARD_BYTES = 2**13, 2**26  # of a shard at most: what a kill loses, and what is held while it is made


@dataclass(frozen=True)
class What:
    """What is wanted of a teacher: a head's scores, hidden states of all tokens, hidden states of first tokens."""

    teacher: str  # a hash of all of it
    scores: str  # what a head scores, "texts" or "tokens"; nothing where no scores are wanted
    hidden: tuple[int, ...]
    first: tuple[int, ...]
    dtype: str  # of hidden states; scores are float32

    @property
    def layers(self) -> list[int]:
        """Every hidden state of which something is wanted."""
        return sorted({*self.hidden, *self.first})

    @property
    def tokens(self) -> str:
        """Which tokens a store must have."""
        return "all" if self.hidden or self.scores == "tokens" else "first"

    @property
    def options(self) -> dict[str, Any]:
        """What a store that holds just this is made of."""
        scores = HEAD if self.scores else ""
        return {"layers": self.layers, "tokens": self.tokens, "scores": scores, "dtype": self.dtype}

    def is_in(self, about: dict[str, Any]) -> bool:
        """Whether a store holds it, this and perhaps more."""
        states = about["tokens"] in ("all", self.tokens) and about["dtype"] == self.dtype
        states = not self.layers or (states and set(self.layers) <= set(about["layers"]))
        return states and (not self.scores or "scores" in about)


@dataclass(frozen=True)
class _Job:
    """A store that is to be written or finished."""

    path: Path
    stream: Stream
    settings: dict[str, Any]
    plan: Plan


class Cache:
    """The stores of one teacher, and what of some texts is in none of them yet."""

    def __init__(self, encoder: Encoder, tokens: Tokens, what: What, folder: Path):
        """Look what the stores in a folder hold of these texts, and plan what is missing."""
        self.encoder, self.tokens, self.what, self.folder = encoder, tokens, what, folder
        self.keys, self.where, self.inverse = np.unique(text_keys(tokens), return_index=True, return_inverse=True)
        self.stores: list[Store] = []
        self.jobs: list[_Job] = []
        self.store_of = np.full(len(self.keys), -1, np.int32)
        self.row_of = np.zeros(len(self.keys), np.int64)
        awaited = np.zeros(len(self.keys), bool)
        found = _stores_in(folder)
        held = [(path, about) for path, about in found if what.is_in(about)]
        # The oldest first: a run that goes on after a kill reads what it has read before, whatever came since.
        for path, about in sorted(held, key=lambda one: (one[1]["number"], one[0])):
            if (store := self._whole(path, about)) is not None:
                self._use(store)
            elif (places := self._places_of(path, about)) is not None:
                awaited[places] = True
                head = about.get("scores", {}).get("head", "")
                options = {name: about[name] for name in ("layers", "tokens", "dtype")}
                self._plan(places, {**options, "scores": head}, about["number"], path)
        if len(left := np.flatnonzero((self.store_of < 0) & ~awaited)):
            self._plan(left, what.options, len(found))

    def _whole(self, path: Path, about: dict[str, Any]) -> Store | None:
        """A store that can be read; None where what is missing can be written here."""
        try:
            return open_store(path) if about["shards"] else None
        except RunError:
            if is_sound(path / LENGTHS, about["store"]) and self._places_of(path, about) is None:
                raise
            return None

    def _places_of(self, path: Path, about: dict[str, Any]) -> np.ndarray | None:
        """Where the texts of an unfinished store stand among ours; None where one is not here, or nobody knows them."""
        if not is_sound(path / LENGTHS, about["store"]):
            return None
        places, here = self._places(read_keys(path))
        return places if here.all() else None

    def _places(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where keys stand among ours, and whether they do."""
        place = np.searchsorted(self.keys, keys).clip(max=len(self.keys) - 1)
        return place, self.keys[place] == keys

    def _use(self, store: Store) -> None:
        place, here = self._places(read_keys(store.path))
        new = here & (self.store_of[place] < 0)
        self.store_of[place[new]], self.row_of[place[new]] = len(self.stores), np.flatnonzero(new)
        self.stores.append(store)

    def _plan(self, keys: np.ndarray, options: dict[str, Any], number: int, path: Path | None = None) -> None:
        index = self.where[keys]
        places, offsets = self.tokens.places(index), np.zeros(len(index) + 1, np.int64)
        np.cumsum(self.tokens.lengths[index], out=offsets[1:])
        stream = Stream(
            {STUDENT: Tokens(self.tokens.ids[places], self.tokens.types[places], offsets)}, None, "classify"
        )
        about = {"number": number}  # how many stores there were before it
        settings = {**options, "model": self.what.teacher, "about": about}
        settings |= {"shard_texts": SHARD_TEXTS, "shard_bytes": SHARD_BYTES}
        plan = plan_store(self.encoder, stream, **settings)
        self.jobs.append(_Job(path or self.folder / plan.about["store"], stream, settings, plan))

    @property
    def bytes_left(self) -> int:
        """How much is yet to be written, at most."""
        return sum(job.plan.total for job in self.jobs)

    def fill(self, say: Say) -> tuple[list[Store], np.ndarray, np.ndarray]:
        """All stores, which of them holds each text, and where."""
        for job in self.jobs:
            try:
                self._use(build_store(self.encoder, job.stream, job.path, **job.settings, say=say, stage=STAGE))
            except Taken:
                raise UserError(
                    f"{job.path} should hold what a teacher says, but there is no {MANIFEST} in it; {DELETE}"
                ) from None
        return self.stores, self.store_of[self.inverse], self.row_of[self.inverse]


def _stores_in(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The folder of each store of one teacher and what its store.json says, finished or not."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file where what a teacher says should be kept; {DELETE}")
    read = [(file.parent, read_manifest(file.parent)) for file in sorted(folder.glob(f"*/{MANIFEST}"))]
    found = [(path, about) for path, about in read if about is not None]
    for path, about in found:
        if not isinstance(about.get("number"), int):
            raise UserError(
                f"{path / MANIFEST} is damaged, or of no cache: it does not say 'number'; delete {path} and run again, "
                "or write another cache='folder'"
            )
    return found
