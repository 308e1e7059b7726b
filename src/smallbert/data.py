"""Texts as token numbers, and batches made of them: packed without padding, or padded to the longest of a bucket."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from smallbert.errors import UserError
from smallbert.model.anatomy import anatomy
from smallbert.model.batch import Batch
from smallbert.model.heads import IGNORE, UNKNOWN

if TYPE_CHECKING:
    from smallbert.model.encoder import Encoder
    from smallbert.tasks import Split, Task

STUDENT = "student"
BY_TOKEN = ("tag", "words")  # kinds with a label a token
GUESSES = 64  # words to guess in a batch are filled up to a multiple of this (many: of eight times it): few shapes


@dataclass(frozen=True)
class Tokens:
    """Sequences of token numbers, end to end: sequence i is ids[offsets[i]:offsets[i + 1]]."""

    ids: np.ndarray
    types: np.ndarray
    offsets: np.ndarray
    words: np.ndarray | None = None  # for tags: the number of the word that begins at each token, -1 where none does

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each sequence."""
        return np.diff(self.offsets)

    def places(self, index: np.ndarray) -> np.ndarray:
        """Where the tokens of these sequences stand, in the order of `index`."""
        lengths = self.lengths[index]
        before = np.cumsum(lengths) - lengths
        return np.repeat(self.offsets[index] - before, lengths) + np.arange(lengths.sum())


@dataclass(frozen=True)
class Stream:
    """Sequences and their labels, ready to be cut into batches; a view is the same text for another tokenizer."""

    views: dict[str, Tokens]
    labels: np.ndarray | None  # one a sequence; two (start, end) for answers; one a token, end to end, for tags, words
    kind: str
    windows: Any = None  # for answers: which window belongs to which question
    cut: int = 0  # how many texts were longer than allowed
    notes: list[str] = field(default_factory=list)
    draw: Callable[[np.ndarray, int], Stream] | None = None  # sequences as one step reads them, drawn anew by a seed

    def __len__(self) -> int:
        return len(self.views[STUDENT])

    def at(self, index: np.ndarray, seed: int) -> tuple[Stream, np.ndarray]:
        """Where to find these sequences as the step of this seed reads them."""
        return (self, index) if self.draw is None else (self.draw(index, seed), np.arange(len(index)))

    def units(self, index: np.ndarray) -> int:
        """How many losses these sequences give: one each, or one a token that counts."""
        if self.kind not in BY_TOKEN or self.labels is None:
            return len(index)
        return int((self._labels_of(index) != IGNORE).sum())

    def labelled(self, index: np.ndarray) -> int:
        """How many of those have a label."""
        known = self._labels_of(index)
        known = ~np.isnan(known) if self.kind == "regress" else known >= 0
        return int((known[:, 0] if self.kind == "answer" else known).sum())

    @cached_property
    def is_partly_labelled(self) -> bool:
        """Whether a label is missing somewhere."""
        if self.labels is None:
            return False
        return bool((np.isnan(self.labels) if self.kind == "regress" else self.labels == UNKNOWN).any())

    def _labels_of(self, index: np.ndarray) -> np.ndarray:
        assert self.labels is not None
        return self.labels[self.views[STUDENT].places(index) if self.kind in BY_TOKEN else index]


@dataclass(frozen=True)
class Layout:
    """How batches are laid out: packed to a multiple of `grain` tokens, or padded to a multiple of `multiple`."""

    packed: bool
    longest: int
    grain: int = 256
    multiple: int = 1


def longest_input(encoder: Encoder) -> int:
    """How many tokens the model has places for."""
    most = getattr(encoder.backbone.config, "max_position_embeddings", 0) or 10**9
    return most - (encoder.backbone.embeddings.padding_idx + 1 if anatomy(encoder.backbone).offset else 0)


def usable_length(encoder: Encoder, wanted: int | None, task: Task | None = None) -> int:
    """How many tokens a text may have: what was asked for, or the task's own limit, within what the model can take."""
    most = longest_input(encoder)
    if wanted is not None and wanted > most:
        raise UserError(f"a length of {wanted} tokens was asked for; this model can take at most {most}")
    return min(wanted or (task.length if task is not None else 128), most)


def tokenizer_key(tokenizer: Any) -> str:
    """All that decides into which numbers a tokenizer cuts a text; where to cut it off is said anew at every call."""
    if tokenizer is None:
        return ""
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    return json.dumps({name: part for name, part in parts.items() if name not in ("truncation", "padding")})


def tokenise(
    tokenizer: Any, split: Split, kind: str, length: int, say: Callable[[int, int], None] | None = None
) -> Stream:
    """Turn a split into token numbers; texts longer than `length` are cut, and counted."""
    if tokenizer is None:
        raise UserError("this model folder has no tokenizer; put tokenizer.json beside its weights")
    if kind == "answer":
        return _tokenise_answers(tokenizer, split, length)
    ids: list[np.ndarray] = []
    types: list[np.ndarray] = []
    tags: list[np.ndarray] = []
    words: list[np.ndarray] = []
    cut, step = 0, 4096
    for start in range(0, len(split), step):
        some = slice(start, start + step)
        pairs = None if split.pairs is None else split.pairs[some]
        encoded = tokenizer(
            split.texts[some],
            pairs,
            truncation=True,
            max_length=length,
            return_token_type_ids=True,
            return_attention_mask=False,
            is_split_into_words=kind == "tag",
        )
        ids.extend(np.asarray(row, dtype=np.int32) for row in encoded["input_ids"])
        types.extend(np.asarray(row, dtype=np.uint8) for row in encoded["token_type_ids"])
        cut += sum(bool(one.overflowing) for one in encoded.encodings)
        if kind == "tag":
            begun = [_begun_words(one.word_ids) for one in encoded.encodings]
            words.extend(begun)
            rows = zip(begun, split.labels[some], split.texts[some], strict=True)
            tags.extend(_token_tags(row, labels or [UNKNOWN] * len(text)) for row, labels, text in rows)
        if say is not None:
            say(min(start + step, len(split)), len(split))
    whole, none = (np.float32, np.nan) if kind == "regress" else (np.int64, UNKNOWN)
    known = [none if label is None else label for label in split.labels]
    made = np.concatenate(tags) if kind == "tag" else np.asarray(known, dtype=whole)
    notes = [f"{cut} of {len(split)} texts were cut at {length} tokens"] if cut else []
    tokens = replace(_end_to_end(ids, types), words=np.concatenate(words) if words else None)
    return Stream({STUDENT: tokens}, made, kind, cut=cut, notes=notes)


def _tokenise_answers(tokenizer: Any, split: Split, length: int) -> Stream:
    from smallbert.tasks.answers import windows

    missing = np.array([label is None for label in split.labels])
    if missing.any():
        known = [label or {"text": [], "answer_start": []} for label in split.labels]
        split = replace(split, labels=known)
    found = windows(tokenizer, split, length)
    tokens = _end_to_end(
        [np.asarray(x, np.int32) for x in found.input_ids], [np.asarray(x, np.uint8) for x in found.token_type_ids]
    )
    labels = np.stack([found.start, found.end], 1).astype(np.int64)
    labels[missing[np.asarray(found.example, dtype=np.int64)]] = UNKNOWN
    return Stream({STUDENT: tokens}, labels, "answer", windows=found)


def _end_to_end(ids: list[np.ndarray], types: list[np.ndarray]) -> Tokens:
    offsets = np.zeros(len(ids) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in ids], out=offsets[1:])
    return Tokens(np.concatenate(ids), np.concatenate(types), offsets)


def _begun_words(word_ids: list[int | None]) -> np.ndarray:
    """The number of the word of which each token is the first piece: [None, 0, 0, 1, None] -> [-1, 0, -1, 1, -1]."""
    words = np.array([-1 if word is None else word for word in word_ids], dtype=np.int64)
    return np.where(np.diff(words, prepend=-1) != 0, words, -1)


def _token_tags(words: np.ndarray, labels: list[int]) -> np.ndarray:
    """A word's label on its first piece, nothing on the others: [-1, 0, -1, 1, -1] -> [-, a, -, b, -]."""
    tags = np.full(len(words), IGNORE, dtype=np.int64)
    tags[words >= 0] = np.asarray(labels, dtype=np.int64)[words[words >= 0]]
    return tags


def cut_into_batches(lengths: np.ndarray, batch: int, seed: int, bucket: bool) -> list[np.ndarray]:
    """Shuffle sequences into batches; with `bucket`, sequences of like length come together, in shuffled batches."""
    random = np.random.default_rng(seed)
    order = random.permutation(len(lengths))
    if bucket:
        reach = batch * 50
        runs = [order[start : start + reach] for start in range(0, len(order), reach)]
        order = np.concatenate([run[np.argsort(lengths[run], kind="stable")] for run in runs])
    batches = [order[start : start + batch] for start in range(0, len(order), batch)]
    if bucket:
        batches = [batches[number] for number in random.permutation(len(batches))]
    return batches


def sort_into_batches(lengths: np.ndarray, tokens: int, most: int = 512) -> list[np.ndarray]:
    """Batches for reading only: shortest first, each of at most about `tokens` tokens once padded."""
    batches: list[np.ndarray] = []
    order = np.argsort(lengths, kind="stable")
    start = 0
    while start < len(order):
        stop = start + 1
        while stop < len(order) and stop - start < most and (stop + 1 - start) * lengths[order[stop]] <= tokens:
            stop += 1
        batches.append(order[start:stop])
        start = stop
    return batches


def make_batch(
    stream: Stream, index: np.ndarray, layout: Layout, pad: int = 0, slots: int = 0, view: str = STUDENT
) -> Batch:
    """Lay out some sequences; `slots` more than there are sequences are filled with empty ones.

    make_batch(stream, [4, 7], Layout(packed=True, longest=128), slots=32)  ->  input_ids (1, 256), present (32,)
    """
    stream, index = stream.at(np.asarray(index), 0)
    if view != STUDENT and stream.kind in BY_TOKEN:
        stream = replace(stream, labels=None)  # a label belongs to a token of the student's own view
    make = _pack if layout.packed else _pad
    tensors, size, longest = make(stream, stream.views[view], index, layout, pad, max(slots, len(index)))
    if stream.kind == "words" and "labels" in tensors:
        tensors |= _guesses(tensors["labels"].ravel())
    made: dict[str, Any] = {name: torch.from_numpy(array) for name, array in tensors.items()}
    return Batch(**made, size=size, longest=longest)


def _guesses(labels: np.ndarray) -> dict[str, np.ndarray]:
    """The tokens that count and their labels, filled up by some that do not: [-, 7, -, 9] -> places [1, 3, 0, …]."""
    places = np.flatnonzero(labels != IGNORE)
    step = GUESSES if len(places) < 16 * GUESSES else 8 * GUESSES
    room = -len(places) % step if len(places) else step
    none = np.full(room, IGNORE, np.int64)
    return {
        "places": np.concatenate([places, np.zeros(room, np.int64)]),
        "labels": np.concatenate([labels[places], none]),
    }


def _pack(
    stream: Stream, tokens: Tokens, index: np.ndarray, layout: Layout, pad: int, slots: int
) -> tuple[dict[str, np.ndarray], int, int]:
    places, lengths = tokens.places(index), tokens.lengths[index]
    total = len(places)
    room = -total % layout.grain
    # Filler is cut into segments no longer than any sequence, always the same number of them, some empty.
    pieces = -(-layout.grain // layout.longest)
    fill = np.clip(room - np.arange(pieces) * layout.longest, 0, layout.longest)
    every = np.concatenate([lengths, np.zeros(slots - len(index), np.int64), fill])
    ends = np.cumsum(every)
    position = np.arange(total + room) - np.repeat(ends - every, every)
    tensors = {
        "input_ids": np.concatenate([tokens.ids[places], np.full(room, pad)])[None].astype(np.int64),
        "token_type_ids": np.concatenate([tokens.types[places], np.zeros(room)])[None].astype(np.int64),
        "position_ids": position[None].astype(np.int64),
        "bounds": np.concatenate([[0], ends]).astype(np.int32),
        "sequence": np.repeat(np.minimum(np.arange(len(every)), slots), every).astype(np.int64),
        "present": (np.arange(slots) < len(index)).astype(np.float32),
    }
    if tokens.words is not None:
        tensors["words"] = np.concatenate([tokens.words[places], np.full(room, -1)])[None]
    if stream.labels is not None:
        if stream.kind in BY_TOKEN:
            labels = np.concatenate([stream.labels[places], np.full(room, IGNORE)])[None]
        else:
            labels = np.zeros((slots, *stream.labels.shape[1:]), stream.labels.dtype)
            labels[: len(index)] = stream.labels[index]
        tensors["labels"] = labels
    return tensors, slots, layout.longest


def _pad(
    stream: Stream, tokens: Tokens, index: np.ndarray, layout: Layout, pad: int, slots: int
) -> tuple[dict[str, np.ndarray], int, int]:
    lengths = tokens.lengths[index]
    longest = int(-(-lengths.max() // layout.multiple) * layout.multiple)
    size = slots if slots > len(index) else len(index)
    real = np.zeros((size, longest), dtype=bool)
    real[: len(index)] = np.arange(longest)[None] < lengths[:, None]
    places = tokens.places(index)

    def lay(values: np.ndarray, empty: int) -> np.ndarray:
        grid = np.full((size, longest), empty, dtype=np.int64)
        grid[real] = values[places]
        return grid

    tensors = {
        "input_ids": lay(tokens.ids, pad),
        "token_type_ids": lay(tokens.types, 0),
        "position_ids": np.arange(longest)[None].repeat(size, 0),
        "present": (np.arange(size) < len(index)).astype(np.float32),
    }
    if not real.all() or layout.multiple > 1:  # static shapes keep their mask even when it happens to be full
        mask = real.astype(np.int64)
        mask[len(index) :, 0] = 1  # an empty sequence must still attend to something
        tensors["attention_mask"] = mask
    if tokens.words is not None:
        tensors["words"] = lay(tokens.words, -1)
    if stream.labels is not None:
        if stream.kind in BY_TOKEN:
            tensors["labels"] = lay(stream.labels, IGNORE)
        else:
            labels = np.zeros((size, *stream.labels.shape[1:]), stream.labels.dtype)
            labels[: len(index)] = stream.labels[index]
            tensors["labels"] = labels
    return tensors, size, longest
