"""Predictions of an encoder on a split, and their scores with error bars."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from smallbert.measuring.metrics import score
from smallbert.model.encoder import Encoder
from smallbert.model.heads import IGNORE
from smallbert.texts.batches import Layout, make_batch, sort_into_batches
from smallbert.texts.data import STUDENT, Stream, tokenise, usable_length

if TYPE_CHECKING:
    from smallbert.tasks import Split, Task

Say = Callable[[str, int, int, str], None]


@torch.inference_mode()
def read_scores(encoder: Encoder, stream: Stream, say: Say | None = None) -> list[np.ndarray]:
    """The head's scores for every sequence, in the order of the stream: (outputs,), or (tokens, outputs).

    Batches are padded and in full precision, so that scores do not depend on who shares a batch.
    """
    training = encoder.training
    encoder.eval()
    tokens = stream.views[STUDENT]
    found: list[Any] = [None] * len(stream)
    whole = encoder.head.kind in ("classify", "regress")
    budget = 2**17 if encoder.device.type == "cuda" else 2**11
    done = 0
    for index in sort_into_batches(tokens.lengths, budget):
        batch = make_batch(stream, index, Layout(False, 0)).to(encoder.device)
        scores = encoder(batch).float().cpu().numpy()
        for row, number in enumerate(index):
            found[number] = scores[row] if whole else scores[row, : tokens.lengths[number]]
        done += len(index)
        if say is not None:
            say("evaluating", done, len(stream), "")
    encoder.train(training)
    return found


def predict(encoder: Encoder, stream: Stream, task: Task, split: Split, say: Say | None = None) -> Any:
    """Predictions in the form that metrics take: class numbers, floats, tags a word, or answer texts."""
    return decide(read_scores(encoder, stream, say), stream, task, split)


def decide(scores: list[np.ndarray], stream: Stream, task: Task, split: Split) -> Any:
    """The predictions that these scores of a stream's sequences stand for."""
    if stream.kind == "classify":
        return np.array([row.argmax() for row in scores])
    if stream.kind == "regress":
        return np.array([float(row[0]) for row in scores])
    if stream.kind == "tag":
        return _tags_by_word(scores, stream, split)
    from smallbert.tasks.answers import best_answers

    start, end = ([row[:, side] for row in scores] for side in (0, 1))
    return best_answers(start, end, stream.windows, split, task.unanswerable)


def _tags_by_word(scores: list[np.ndarray], stream: Stream, split: Split) -> list[list[int]]:
    """The tag of each word's first piece; a word cut off by the length limit gets -1, which is never right."""
    assert stream.labels is not None
    tokens, found = stream.views[STUDENT], []
    for number, row in enumerate(scores):
        marks = stream.labels[tokens.offsets[number] : tokens.offsets[number + 1]] != IGNORE
        tags = row.argmax(-1)[marks].tolist()
        found.append(tags + [-1] * (len(split.labels[number]) - len(tags)))
    return found


def evaluate(
    encoder: Encoder, task: Task, split: str = "dev", length: int | None = None, say: Say | None = None
) -> dict[str, Any]:
    """Scores of an encoder on a split of a task: {"scores": …, "predictions": …, "notes": […]}."""
    rows = task.split(split)
    stream = tokenise(encoder.tokenizer, rows, task.kind, usable_length(encoder, length, task))
    predictions = predict(encoder, stream, task, rows, say)
    notes = [*stream.notes, *note_unread(encoder.head, stream.views[STUDENT].lengths)]
    return {"scores": score(task, predictions, rows), "predictions": predictions, "notes": notes}


def note_unread(head: Any, lengths: Sequence[int] | np.ndarray) -> list[str]:
    """Say so where a pooler reads fewer tokens than some texts have."""
    reads = getattr(head, "positions", 0)
    longer = sum(int(length) > reads for length in lengths) if reads else 0
    told = f"the pooler reads only the first {reads} tokens of a text"
    return [f"{told}, and {longer:,} of {len(lengths):,} are longer"] if longer else []
