"""Texts as token numbers with their labels: streams, which `batches.py` cuts and lays out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from smallbert.errors import UserError
from smallbert.model.anatomy import anatomy
from smallbert.model.heads import IGNORE, UNKNOWN

if TYPE_CHECKING:
    from smallbert.model.encoder import Encoder
    from smallbert.tasks import Split, Task

STUDENT = "student"
BY_TOKEN = ("tag", "words")  # kinds with a label a token


@dataclass(frozen=True)
class Tokens:
    """Sequences of token numbers, end to end: sequence i is ids[offsets[i]:offsets[i + 1]]."""

    ids: np.ndarray
    types: np.ndarray
    offsets: np.ndarray
    words: np.ndarray | None = None  # for tags: the number of the word that begins at each token, -1 where none does

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each sequence."""
        return np.diff(self.offsets)

    @cached_property
    def longest(self) -> int:
        """The number of tokens of the longest one."""
        return int(self.lengths.max(initial=0))

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
        return int(self._is_known(index).sum())

    def _is_known(self, index: np.ndarray) -> np.ndarray:
        """Of each loss that these sequences give, whether it has a label."""
        labels = self._labels_of(index)
        known = ~np.isnan(labels) if self.kind == "regress" else labels >= 0
        return known[:, 0] if self.kind == "answer" else known

    @cached_property
    def is_labelled(self) -> np.ndarray:
        """Of each sequence, whether it has a label, one token at least."""
        if not self.is_partly_labelled:
            return np.ones(len(self), bool)
        if self.kind in BY_TOKEN:
            return np.array([self.labelled(np.array([number])) > 0 for number in range(len(self))])
        return self._is_known(np.arange(len(self)))

    @cached_property
    def is_partly_labelled(self) -> bool:
        """Whether a label is missing somewhere."""
        if self.labels is None:
            return False
        return bool((np.isnan(self.labels) if self.kind == "regress" else self.labels == UNKNOWN).any())

    def _labels_of(self, index: np.ndarray) -> np.ndarray:
        assert self.labels is not None
        return self.labels[self.views[STUDENT].places(index) if self.kind in BY_TOKEN else index]


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


def stream_name(tokenizer: Any, length: int) -> str:
    """What tells streams of the same rows apart."""
    return f"{length} {tokenizer_key(tokenizer)}"


def tokenise(
    tokenizer: Any, split: Split, kind: str, length: int, say: Callable[[int, int], None] = lambda done, total: None
) -> Stream:
    """Turn a split into token numbers; texts longer than `length` are cut, and counted."""
    if tokenizer is None:
        raise UserError("this model folder has no tokenizer; put tokenizer.json beside its weights")
    if kind == "answer":
        return _tokenise_answers(tokenizer, split, length, say)
    ids: list[np.ndarray] = []
    types: list[np.ndarray] = []
    tags: list[np.ndarray] = []
    words: list[np.ndarray] = []
    cut, step = 0, 4096
    # Asked itself and not through transformers, which takes long to hand its answers on.
    backend = tokenizer.backend_tokenizer
    backend.enable_truncation(length, direction=tokenizer.truncation_side)
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    encode = backend.encode_batch if kind == "tag" else backend.encode_batch_fast  # the fast one forgets the words
    for start in range(0, len(split), step):
        some = slice(start, start + step)
        read = (
            split.texts[some] if split.pairs is None else list(zip(split.texts[some], split.pairs[some], strict=True))
        )
        encoded = encode(read, is_pretokenized=kind == "tag")
        ids.extend(np.asarray(one.ids, dtype=np.int32) for one in encoded)
        types.extend(np.asarray(one.type_ids, dtype=np.uint8) for one in encoded)
        cut += sum(bool(one.overflowing) for one in encoded)
        if kind == "tag":
            begun = [_begun_words(one.word_ids) for one in encoded]
            words.extend(begun)
            rows = zip(begun, split.labels[some], split.texts[some], strict=True)
            tags.extend(_token_tags(row, labels or [UNKNOWN] * len(text)) for row, labels, text in rows)
        say(min(start + step, len(split)), len(split))
    whole, none = (np.float32, np.nan) if kind == "regress" else (np.int64, UNKNOWN)
    known = [none if label is None else label for label in split.labels]
    made = np.concatenate(tags) if kind == "tag" else np.asarray(known, dtype=whole)
    notes = [f"{cut} of {len(split)} texts were cut at {length} tokens"] if cut else []
    tokens = replace(_end_to_end(ids, types), words=np.concatenate(words) if words else None)
    return Stream({STUDENT: tokens}, made, kind, cut=cut, notes=notes)


def _tokenise_answers(tokenizer: Any, split: Split, length: int, say: Callable[[int, int], None]) -> Stream:
    from smallbert.tasks.answers import windows

    missing = np.array([label is None for label in split.labels])
    if missing.any():
        known = [label or {"text": [], "answer_start": []} for label in split.labels]
        split = replace(split, labels=known)
    found = windows(tokenizer, split, length, say=say)
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
