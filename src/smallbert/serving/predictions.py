"""What a model says of texts, in the words of the server, without one and without an export."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

from smallbert.errors import UserError
from smallbert.making.starting import SHORTEST
from smallbert.measuring.evaluate import read_scores
from smallbert.model.answering import learned_pairs
from smallbert.model.encoder import HEAD
from smallbert.serving.kinds import kind_of, set_up
from smallbert.serving.loading import NO_HEAD
from smallbert.serving.model import Model, Piece
from smallbert.texts.data import STUDENT, Stream, Tokens, longest_input, usable_length

if TYPE_CHECKING:
    from smallbert.model.encoder import Encoder


def predict(
    encoder: Encoder, texts: Iterable[Any], length: int | None = None, unanswerable: bool = False
) -> list[dict[str, Any]]:
    """What the encoder's head says of each text, or pair of texts, or question and context.

    Texts longer than the model can take, or than `length` tokens, are cut. A card's scores are of texts cut at the
    task's length: give the same to get the same. `unanswerable` questions may have no answer.

    >>> predict(load("small"), ["a warm, clever film"])
    [{'label': 'good', 'probabilities': {'bad': 0.483181, 'good': 0.516819}, 'cut': False}]
    """
    if HEAD not in encoder.heads:
        raise UserError(f"this model {NO_HEAD}")
    if isinstance(texts, str):
        raise UserError(f"texts are given as a list, such as [{texts[:20]!r}]")
    texts = [list(text) if isinstance(text, tuple) else text for text in texts]
    model = _as_served(encoder, length, unanswerable)
    kind = kind_of(model)
    rows = [kind.read(text) if _is_writable(text) else None for text in texts]
    if wrong := [number for number, row in enumerate(rows) if row is None]:
        raise UserError(f"text {wrong[0]} is {texts[wrong[0]]!r}; this model takes {kind.wants}")
    if not rows:
        return []
    encoded = kind.encode(model, rows)
    scores = iter(_score(encoder, [piece for one in encoded for piece in one.pieces]))
    return [{**kind.tell(model, one, [next(scores) for _ in one.pieces]), "cut": one.cut} for one in encoded]


def _as_served(encoder: Encoder, length: int | None, unanswerable: bool) -> Model:
    """What a server knows of the model; nothing but the tokenizer of it runs."""
    if encoder.tokenizer is None:
        raise UserError("this model has no tokenizer, so it cannot read texts")
    cutting, whole = (Tokenizer.from_str(encoder.tokenizer.backend_tokenizer.to_str()) for _ in range(2))
    if length is not None and length < SHORTEST:
        raise UserError(f"texts cannot be truncated to {length} tokens; give a length of {SHORTEST} or more")
    for tokenizer in (cutting, whole):
        tokenizer.encode_special_tokens = encoder.tokenizer.split_special_tokens
        tokenizer.no_truncation()
        tokenizer.no_padding()
    most = usable_length(encoder, length or min(longest_input(encoder), encoder.tokenizer.model_max_length))
    head, pairs = encoder.head, learned_pairs(encoder)
    model = Model("this model", head.kind, head.labels, most, [], 0, cutting, whole, None, unanswerable, pairs)
    set_up(model, encoder.tokenizer.truncation_side)
    return model


def _is_writable(text: Any) -> bool:
    """Whether a text holds no half of a character, which no tokenizer reads."""
    parts = text.values() if isinstance(text, dict) else text if isinstance(text, list) else [text]
    try:
        "".join(parts).encode()
    except (TypeError, UnicodeEncodeError):
        return False
    return True


def _score(encoder: Encoder, pieces: list[Piece]) -> list[np.ndarray]:
    """The head's scores of each sequence."""
    ids = np.concatenate([piece.ids for piece in pieces])
    types = np.concatenate([piece.types for piece in pieces])
    offsets = np.cumsum([0, *(len(piece.ids) for piece in pieces)])
    return read_scores(encoder, Stream({STUDENT: Tokens(ids, types, offsets)}, None, encoder.head.kind))
