"""What one model said to every example of a split, and how good each answer was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from smallbert.errors import UserError
from smallbert.measuring.evaluate import Say, decide, read_scores
from smallbert.measuring.metrics import Score, answer_values, score
from smallbert.texts.data import STUDENT, Stream, tokenise, usable_length

if TYPE_CHECKING:
    from smallbert.model.encoder import Encoder
    from smallbert.tasks import Split, Task


@dataclass(frozen=True)
class Answers:
    """What one model said to every example, how good that was, and whether it was right.

    classify  said: class ids     good: probability of the true class         right: said the true one
    tag       said: lists of ids  good: share of right words, 0 to 1          right: the whole sentence
    answer    said: texts         good: F1 with the nearest true answer       right: exactly a true answer
    regress   said: numbers       good: minus the distance to the true one    right: in the nearer half of its answers
    """

    said: list[Any]
    good: np.ndarray
    right: np.ndarray
    tokens: np.ndarray
    scores: dict[str, Score]
    probabilities: np.ndarray | None = None  # (examples, classes), only for classify
    notes: list[str] = field(default_factory=list)


def read_answers(encoder: Encoder, task: Task, split: str = "dev", say: Say | None = None) -> Answers:
    """Let a model answer all examples of a split; its head's classes must be in the task's order."""
    rows = task.split(split)
    stream = tokenise(encoder.tokenizer, rows, task.kind, usable_length(encoder, None, task))
    scores = read_scores(encoder, stream, say)
    if not all(np.isfinite(row).all() for row in scores):
        raise UserError("its outputs are not finite numbers, as those of a diverged model; train it again")
    said = decide(scores, stream, task, rows)
    probabilities = _softmax(np.stack(scores)) if task.kind == "classify" else None
    good, right = _JUDGES[task.kind](task, rows, said, probabilities)
    plain = said if isinstance(said, list) else said.tolist()
    tokens, scored = _count_tokens(stream, rows), score(task, said, rows)
    return Answers(plain, good, right, tokens, scored, probabilities, list(stream.notes))


def _judge_classes(task: Task, rows: Split, said: Any, probabilities: Any) -> tuple[np.ndarray, np.ndarray]:
    gold = np.asarray(rows.labels)
    return probabilities[np.arange(len(gold)), gold], said == gold


def _judge_numbers(task: Task, rows: Split, said: Any, probabilities: Any) -> tuple[np.ndarray, np.ndarray]:
    off = np.abs(said - np.asarray(rows.labels, dtype=np.float64))
    return -off, off <= np.median(off)


def _judge_tags(task: Task, rows: Split, said: Any, probabilities: Any) -> tuple[np.ndarray, np.ndarray]:
    pairs = zip(rows.labels, said, strict=True)
    shares = np.array([np.mean(np.asarray(gold) == np.asarray(guess)) if gold else 1.0 for gold, guess in pairs])
    return shares, shares == 1


def _judge_answers(task: Task, rows: Split, said: Any, probabilities: Any) -> tuple[np.ndarray, np.ndarray]:
    values = answer_values(task, said, rows)
    return values[:, 1], values[:, 0] == 1


_JUDGES: dict[str, Callable[..., tuple[np.ndarray, np.ndarray]]] = {
    "classify": _judge_classes,
    "regress": _judge_numbers,
    "tag": _judge_tags,
    "answer": _judge_answers,
}


def _count_tokens(stream: Stream, rows: Split) -> np.ndarray:
    """How many tokens of each example the model reads; those that windows share are counted once."""
    if stream.kind != "answer":
        return stream.views[STUDENT].lengths
    counts, reached = np.zeros(len(rows), dtype=np.int64), np.full(len(rows), -1)
    windows = stream.windows
    for row, offsets, context in zip(windows.example, windows.offsets, windows.context, strict=True):
        begins = offsets[context, 0]
        counts[row] += (begins > reached[row]).sum() + (reached[row] < 0) * (~context).sum()
        reached[row] = max(reached[row], begins.max(initial=0))
    return counts


def _softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores.astype(np.float64) - scores.max(1, keepdims=True))
    return np.asarray(powers / powers.sum(1, keepdims=True))
