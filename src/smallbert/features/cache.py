"""A cache of what a model says of texts: stores in a folder, in which each text is found by a hash of its own tokens.

So neither another order nor added, augmented or left out texts can bring a text what was said of another. What some
store already holds is read from there, scores from one and layers from another; what none does becomes one store more.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from smallbert.errors import RunError, UserError
from smallbert.features.building import Say, Taken, build_store
from smallbert.features.parts import Name, in_order
from smallbert.features.plan import Plan, plan_store, text_keys
from smallbert.features.store import LENGTHS, MANIFEST, Store, is_sound, open_store, read_keys, read_manifest
from smallbert.model.encoder import HEAD, Encoder
from smallbert.texts.data import STUDENT, Stream, Tokens

DELETE = "delete it and run again, or write another cache='folder'"
STAGE = "keeping the teacher's outputs"
SHARD_TEXTS, SHARD_BYTES = 2**13, 2**26  # of a shard at most: what a kill loses, and what is held while it is made


@dataclass(frozen=True)
class What:
    """What is wanted of a teacher: a head's scores, vectors of all tokens, hidden states of first tokens."""

    teacher: str  # a hash of all of it
    scores: str  # what a head scores, "texts" or "tokens"; nothing where no scores are wanted
    hidden: tuple[Name, ...]  # hidden states, and what parts of layers make (see parts)
    first: tuple[int, ...]
    dtype: str  # of vectors; scores are float32

    def __bool__(self) -> bool:
        return bool(self.scores or self.hidden or self.first)

    @property
    def layers(self) -> list[Name]:
        """Every vector of which something is wanted."""
        return in_order([*self.hidden, *self.first])

    @property
    def tokens(self) -> str:
        """Which tokens a store must have."""
        return "all" if self.hidden or self.scores == "tokens" else "first"

    @property
    def options(self) -> dict[str, Any]:
        """What a store that holds just this is made of."""
        scores = HEAD if self.scores else ""
        return {"layers": self.layers, "tokens": self.tokens, "scores": scores, "dtype": self.dtype}

    def held_by(self, about: dict[str, Any]) -> What:
        """What of it a store holds."""
        layers, tokens = set(about["layers"] if about["dtype"] == self.dtype else ()), about["tokens"]
        hidden = tuple(name for name in self.hidden if name in layers and tokens == "all")
        first = tuple(name for name in self.first if name in layers and tokens in ("all", "first"))
        return replace(self, scores=self.scores if "scores" in about else "", hidden=hidden, first=first)

    def without(self, other: What) -> What:
        """What of it is not in another."""
        hidden = tuple(name for name in self.hidden if name not in other.hidden)
        first = tuple(name for name in self.first if name not in other.first)
        return replace(self, scores="" if other.scores else self.scores, hidden=hidden, first=first)


@dataclass(frozen=True)
class _Job:
    """A store that is to be written or finished."""

    path: Path
    stream: Stream
    settings: dict[str, Any]
    plan: Plan

    @property
    def left(self) -> list[int]:
        """The shards that are not there yet."""
        return [number for number in range(len(self.plan.ranges)) if not self.plan.is_whole(self.path, number)]


class Cache:
    """The stores of one teacher, and what of some texts is in none of them yet."""

    def __init__(self, encoder: Encoder, tokens: Tokens, what: What, folder: Path):
        """Look what the stores in a folder hold of these texts, and plan what is missing."""
        self.encoder, self.tokens, self.what, self.folder = encoder, tokens, what, folder
        self.keys, self.where, self.inverse = np.unique(text_keys(tokens), return_index=True, return_inverse=True)
        self.stores: dict[Path, Store] = {}
        self.rows: dict[tuple[int, Path], np.ndarray] = {}  # of each store, by age: where our texts stand in it, or -1
        self.jobs: list[_Job] = []
        # Of many texts the same is missing: each has the number of what that is, among all there are.
        self.missing, self.missing_of = [what], np.zeros(len(self.keys), np.int32)
        found = _stores_in(folder)
        useful = [(path, about, part) for path, about in found if (part := what.held_by(about))]
        whole = {path: store for path, about, _ in useful if (store := _open_whole(path, about)) is not None}
        # What is whole comes first: it may hold so much that an unfinished store need not be finished.
        for path, about, part in sorted(useful, key=lambda one: (one[0] not in whole, one[1]["number"], one[0])):
            if path in whole:
                self._use(whole[path], part)
            elif is_sound(path / LENGTHS, about["store"]):  # else nobody knows which texts it has
                self._finish(path, about, part)
        left = [number for number in np.unique(self.missing_of) if self.missing[number]]
        for before, number in enumerate(left, len(found)):
            keys = np.flatnonzero(self.missing_of == number)
            self._add(self._job(keys, self.missing[number].options, before), keys, before)

    def _use(self, store: Store, part: What) -> None:
        """Take from a whole store what is missing yet."""
        places, here = self._places(read_keys(store.path))
        if self._take(places[here], part):
            self.stores[store.path] = store
            self._note(store.path, store.about["number"], places[here], np.flatnonzero(here))

    def _finish(self, path: Path, about: dict[str, Any], part: What) -> None:
        """Finish a store if all that will be in it is wanted, and no more texts are asked about than by another."""
        places, here = self._places(read_keys(path))
        held = {"layers": about["layers"], "tokens": about["tokens"], "scores": "scores" in about}
        if not here.all() or {**held, "dtype": about["dtype"]} != {**part.options, "scores": bool(part.scores)}:
            return
        job = self._job(places, part.options, about["number"], path)
        sizes = [stop - start for start, stop in job.plan.ranges]
        lacking = [not part.without(missing) for missing in self.missing]  # all of it, and not some of it
        if sum(sizes[number] for number in job.left) <= np.array(lacking)[self.missing_of[places]].sum():
            self._take(places, part)
            self._add(job, places, about["number"])

    def _take(self, places: np.ndarray, part: What) -> bool:
        """Have no more of it missing of these texts; whether any of it was."""
        before = self.missing_of[places]
        for number in np.unique(before):
            left = self.missing[number].without(part)
            if left not in self.missing:
                self.missing.append(left)
            self.missing_of[places[before == number]] = self.missing.index(left)
        return bool((self.missing_of[places] != before).any())

    def _places(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where keys stand among ours, and whether they do."""
        place = np.searchsorted(self.keys, keys).clip(max=len(self.keys) - 1)
        return place, self.keys[place] == keys

    def _note(self, path: Path, number: int, places: np.ndarray, rows: np.ndarray) -> None:
        """Remember in which rows of a store some texts stand."""
        self.rows[number, path] = np.full(len(self.keys), -1, np.int32)
        self.rows[number, path][places] = rows

    def _add(self, job: _Job, keys: np.ndarray, number: int) -> None:
        """Have a store written with the others, and remember in which of its rows texts will stand."""
        self.jobs.append(job)
        self._note(job.path, number, keys, np.arange(len(keys)))

    def _job(self, keys: np.ndarray, options: dict[str, Any], number: int, path: Path | None = None) -> _Job:
        """A store of some texts, in a folder that is there already or in one named by what it holds."""
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
        return _Job(path or self.folder / plan.about["store"], stream, settings, plan)

    @property
    def holds_some(self) -> bool:
        """Whether something of what is wanted need not be asked for."""
        return bool(self.stores) or any(len(job.left) < len(job.plan.ranges) for job in self.jobs)

    @property
    def bytes_left(self) -> int:
        """How much is yet to be written, at most."""
        return sum(job.plan.bytes(number) for job in self.jobs for number in job.left)

    def fill(self, say: Say) -> tuple[list[Store], np.ndarray]:
        """All stores, and of each the rows in which the texts stand, -1 where one does not.

        The oldest comes first, so that a run that goes on after a kill reads what it has read before, whatever was
        begun since.
        """
        for job in self.jobs:
            try:
                made = build_store(self.encoder, job.stream, job.path, **job.settings, say=say, stage=STAGE)
            except Taken:
                raise UserError(
                    f"{job.path} should hold a teacher's outputs, but there is no {MANIFEST} in it; {DELETE}"
                ) from None
            self.stores[job.path] = made
        ages = sorted(self.rows)
        return [self.stores[path] for _, path in ages], np.stack([self.rows[age][self.inverse] for age in ages])


def _open_whole(path: Path, about: dict[str, Any]) -> Store | None:
    """A store that is finished and not damaged, as far as can be seen without reading all of it."""
    with suppress(RunError):
        return open_store(path) if about["shards"] else None
    return None


def _stores_in(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The folder of each store of one teacher and what its store.json says, finished or not."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file where a teacher's outputs should be kept; {DELETE}")
    read = [(file.parent, read_manifest(file.parent)) for file in sorted(folder.glob(f"*/{MANIFEST}"))]
    found = [(path, about) for path, about in read if about is not None]
    for path, about in found:
        if not isinstance(about.get("number"), int):
            raise UserError(
                f"{path / MANIFEST} is damaged, or not of a cache: it has no 'number'; delete {path} and run again, "
                "or write another cache='folder'"
            )
    return found
