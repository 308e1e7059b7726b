"""A model ready to run: tokenizer, session, labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer


@dataclass(frozen=True)
class Piece:
    """One sequence that goes through the model: a text, a pair, or a window of a long context."""

    ids: list[int]
    types: list[int]


@dataclass(frozen=True)
class Model:
    """What a server needs to know of a model; `score` is the only thing that takes long."""

    name: str
    kind: str
    labels: list[str]
    length: int  # in tokens; longer texts are cut
    inputs: list[str]
    pad: int
    cutting: Tokenizer  # cuts texts at `length`, in the way of the kind
    whole: Tokenizer  # cuts nothing
    session: Any
    unanswerable: bool = False  # whether a question may have no answer in its context
    pairs: bool | None = None  # whether it learned from pairs of texts; None where nobody knows
    exact: bool = True  # whether this CPU multiplies its numbers without losing any

    def score(self, pieces: list[Piece]) -> list[np.ndarray]:
        """Run some pieces as one padded batch; each gets the scores of its own tokens, or of itself as a whole.

        classify, regress: (outputs,)    tag: (tokens, outputs)    answer: (tokens, 2)
        """
        shape = len(pieces), max(len(piece.ids) for piece in pieces)
        given = {name: np.zeros(shape, np.int64) for name in ("input_ids", "attention_mask", "token_type_ids")}
        given["input_ids"][:] = self.pad
        for row, piece in enumerate(pieces):
            count = len(piece.ids)
            given["input_ids"][row, :count] = piece.ids
            given["token_type_ids"][row, :count] = piece.types
            given["attention_mask"][row, :count] = 1
        scores = self.session.run(None, {name: given[name] for name in self.inputs})[0]
        if scores.ndim == 2:
            return list(scores)
        return [row[: len(piece.ids)] for row, piece in zip(scores, pieces, strict=True)]

    def facts(self) -> dict[str, Any]:
        """What a user of the model wants to know of it."""
        facts = {"model": self.name, "kind": self.kind, "labels": self.labels, "length": self.length}
        return {**facts, "exact": self.exact}
