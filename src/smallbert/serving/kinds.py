"""What each kind of head is asked and what it answers: JSON -> row -> tokens, scores -> JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from smallbert.errors import UserError
from smallbert.serving.model import Model, Piece
from smallbert.tasks.answers import LONGEST_QUESTION, SHORTEST_WINDOW, Windows, best_answers
from smallbert.tasks.task import Split

DIGITS = 6
QUESTION = ("question", "context")
OVERLAP = 128  # tokens that two windows of one context share


@dataclass(frozen=True)
class Encoded:
    """One row as the sequences it becomes; `places` is what its kind needs to read the scores back."""

    row: Any
    pieces: list[Piece]
    cut: bool
    places: Any = None


@dataclass(frozen=True)
class Kind:
    """How rows of a kind are read, encoded and answered."""

    wants: str
    read: Callable[[Any], Any]  # a row, or None where the value is none
    encode: Callable[[Model, list[Any]], list[Encoded]]
    tell: Callable[[Model, Encoded, list[np.ndarray]], dict[str, Any]]
    named: frozenset[str] = frozenset()  # names by which the parts of a single row may be given
    as_learned: bool = False  # reads single texts and pairs, but of one model only what its head has learned from


def set_up(model: Model, direction: str = "right") -> None:
    """Let the tokenizer cut as this kind needs it; a kind that cannot be served is refused."""
    if model.kind not in KINDS:
        raise UserError(f"{model.name} has a head of kind {model.kind!r}; only {', '.join(KINDS)} can be served")
    if model.kind != "answer":
        return model.cutting.enable_truncation(model.length, direction=direction)
    if model.length < SHORTEST_WINDOW:
        raise UserError(f"{model.length} tokens are too short to answer questions; give --length {SHORTEST_WINDOW}")
    room = _room(model)
    overlap = min(OVERLAP, (room - min(LONGEST_QUESTION, room // 2)) // 2)
    model.cutting.enable_truncation(model.length, stride=overlap, strategy="only_second")


def kind_of(model: Model) -> Kind:
    """The kind of a model; one whose head has learned from pairs of texts reads nothing else, or from texts alone."""
    kind = KINDS[model.kind]
    if not kind.as_learned or model.pairs is None:
        return kind
    wants, read = ("a pair of strings", _read_pair) if model.pairs else ("a single string", _read_single)
    return replace(kind, wants=f"{wants}, as this model was trained on", read=read)


def _read_single(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _read_text(value: Any) -> Any:
    return value if isinstance(value, str) else _read_pair(value)


def _read_pair(value: Any) -> tuple[str, str] | None:
    if isinstance(value, dict) and value.keys() == {*QUESTION}:
        value = [value[name] for name in QUESTION]
    whole = isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value)
    return (value[0], value[1]) if whole else None


def _read_words(value: Any) -> list[str] | None:
    if isinstance(value, str):
        return value.split()
    return value if isinstance(value, list) and all(isinstance(word, str) for word in value) else None


def _encode_texts(model: Model, rows: list[Any]) -> list[Encoded]:
    found = model.cutting.encode_batch_fast(rows)  # without places in the text, which nobody asks for
    return [Encoded(row, [_piece(one)], bool(one.overflowing)) for row, one in zip(rows, found, strict=True)]


def _encode_words(model: Model, rows: list[Any]) -> list[Encoded]:
    found = model.cutting.encode_batch(rows, is_pretokenized=True)
    return [
        Encoded(row, [_piece(one)], bool(one.overflowing), one.word_ids) for row, one in zip(rows, found, strict=True)
    ]


def _encode_questions(model: Model, rows: list[Any]) -> list[Encoded]:
    """Cut contexts into windows, as `tasks.answers.windows` does for training, here with tokenizers alone."""
    longest = min(LONGEST_QUESTION, _room(model) // 2)
    questions = [question.lstrip() for question, _ in rows]
    offsets = [one.offsets for one in model.whole.encode_batch(questions, add_special_tokens=False)]
    short = [
        question if len(ends) <= longest else question[: ends[longest - 1][1]]
        for question, ends in zip(questions, offsets, strict=True)
    ]
    found = model.cutting.encode_batch([(question, row[1]) for question, row in zip(short, rows, strict=True)])
    return [
        Encoded(row, [_piece(part) for part in (one, *one.overflowing)], question != whole, _windows(one))
        for row, one, question, whole in zip(rows, found, short, questions, strict=True)
    ]


def _windows(encoding: Any) -> Windows:
    parts = [encoding, *encoding.overflowing]
    offsets = [np.array(part.offsets, np.int32) for part in parts]
    context = [np.array([number == 1 for number in part.sequence_ids]) for part in parts]
    none = np.zeros(len(parts), np.int64)  # all windows belong to the one row; where the answer is, nobody knows yet
    return Windows([], [], none, none, none, offsets, context)


def _room(model: Model) -> int:
    return model.length - model.whole.num_special_tokens_to_add(True)


def _piece(encoding: Any) -> Piece:
    return Piece(encoding.ids, encoding.type_ids)


def _tell_class(model: Model, encoded: Encoded, scores: list[np.ndarray]) -> dict[str, Any]:
    shares = _softmax(scores[0])
    numbers = [round(share, DIGITS) for share in shares.tolist()]
    return {"label": model.labels[shares.argmax()], "probabilities": dict(zip(model.labels, numbers, strict=True))}


def _tell_number(model: Model, encoded: Encoded, scores: list[np.ndarray]) -> dict[str, Any]:
    return {"value": round(float(scores[0][0]), DIGITS)}


def _tell_tags(model: Model, encoded: Encoded, scores: list[np.ndarray]) -> dict[str, Any]:
    """A word's label is that of its first token; words behind the cut have none."""
    shares = _softmax(scores[0])
    labels: list[str | None] = [None] * len(encoded.row)
    sure: list[float | None] = [None] * len(encoded.row)
    for place, word in reversed(list(enumerate(encoded.places))):
        if word is not None:
            labels[word] = model.labels[shares[place].argmax()]
            sure[word] = round(float(shares[place].max()), DIGITS)
    return {"words": encoded.row, "labels": labels, "probabilities": sure}


def _tell_answer(model: Model, encoded: Encoded, scores: list[np.ndarray]) -> dict[str, Any]:
    question, context = encoded.row
    starts, ends = ([one[:, side] for one in scores] for side in (0, 1))
    asked = Split([question], [context], [None], ["0"])
    return {"answer": best_answers(starts, ends, encoded.places, asked, model.unanswerable)[0]}


def _softmax(scores: np.ndarray) -> np.ndarray:
    high = np.exp(scores.astype(np.float64) - scores.max(-1, keepdims=True))
    return high / high.sum(-1, keepdims=True)


_TEXT = "a string, or a pair of strings"
KINDS: dict[str, Kind] = {
    "classify": Kind(_TEXT, _read_text, _encode_texts, _tell_class, as_learned=True),
    "regress": Kind(_TEXT, _read_text, _encode_texts, _tell_number, as_learned=True),
    "tag": Kind("a string, or a list of words", _read_words, _encode_words, _tell_tags),
    "answer": Kind(
        "a pair of strings, question and context", _read_pair, _encode_questions, _tell_answer, frozenset(QUESTION)
    ),
}
