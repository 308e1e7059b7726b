"""Streams cut into batches and laid out: packed without padding, or padded to the longest of a bucket."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from smallbert.model.batch import Batch
from smallbert.model.heads import IGNORE
from smallbert.texts.data import BY_TOKEN, STUDENT, Stream, Tokens

GUESSES = 64  # words to guess in a batch are filled up to a multiple of this (many: of eight times it): few shapes


@dataclass(frozen=True)
class Layout:
    """How batches are laid out: packed to a multiple of `grain` tokens, or padded to a multiple of `multiple`."""

    packed: bool
    longest: int
    grain: int = 256
    multiple: int = 1


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
    longest = min(longest, tokens.longest)  # beyond its longest text a model may have no places
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
