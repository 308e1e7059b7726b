"""Task heads: one small module for every kind of task, reading hidden states in either layout."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from smallbert.model.anatomy import FAMILIES
from smallbert.model.batch import Batch

KINDS = ("classify", "regress", "tag", "answer")
POOLS = {"first": Batch.first, "mean": Batch.mean}
NUMBER = re.compile(r"-?\d+(?:\.\d*)?")
IGNORE = -100  # no unit of its own: nothing is learned here
UNKNOWN = -1  # a unit whose label nobody knows: a teacher may teach it, the labels' own loss skips it (NaN: a number)


class Head(nn.Module):
    """Scores from hidden states: pooled for whole texts, one by one for tokens.

    classify, regress: (sequences, outputs)    tag: (…, tokens, outputs)    answer: (…, tokens, 2)
    """

    def __init__(self, kind: str, outputs: int, config: Any, labels: list[str], pool: str = "first"):
        """Make an empty head for a backbone of this config; its dense layer is the family's own."""
        from transformers.activations import ACT2FN

        super().__init__()
        row = FAMILIES[config.model_type]
        self.kind, self.labels, self.pool = kind, labels, pool
        width, modern = config.hidden_size, config.model_type == "modernbert"
        self.dense = self.norm = None
        # A pooler that does nothing but pick the first token (MobileBERT has such) has no dense layer.
        has_dense = bool(row.dense) and getattr(config, "classifier_activation", True) is not False
        if (kind in ("classify", "regress") and has_dense) or modern:
            self.dense = nn.Linear(width, width, bias=config.classifier_bias if modern else True)
        if modern:
            self.norm = nn.LayerNorm(width, eps=config.norm_eps, bias=config.norm_bias)
        self.activation = ACT2FN[row.activation]
        self.dropout = nn.Dropout(_dropout(config, kind))
        self.out = nn.Linear(width, outputs)

    def forward(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Read the hidden states of a batch."""
        return self.score(self.pick(hidden, batch), batch)

    @property
    def outputs(self) -> int:
        """How many scores it gives."""
        return self.out.out_features

    @property
    def reads_first(self) -> bool:
        """Whether it looks at nothing but each text's first token."""
        return self.kind in ("classify", "regress") and self.pool == "first"

    def pick(self, hidden: Tensor, batch: Batch) -> Tensor:
        """All it needs of a layer's output: first tokens, or everything."""
        return batch.first(hidden) if self.reads_first else hidden

    def score(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Scores from what was picked."""
        if self.kind in ("classify", "regress") and not self.reads_first:
            hidden = POOLS[self.pool](batch, hidden)
        if self.dense is not None:
            hidden = self.activation(self.dense(hidden))
        if self.norm is not None:
            hidden = self.norm(hidden)
        return self.out(self.dropout(hidden))


def initialise(head: Head, std: float, generator: torch.Generator) -> None:
    """Draw a new head's weights the way BERT draws its own."""
    for module in (head.dense, head.out):
        if module is not None:
            nn.init.normal_(module.weight, 0.0, std, generator=generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    if head.norm is not None:
        nn.init.ones_(head.norm.weight)
        if head.norm.bias is not None:
            nn.init.zeros_(head.norm.bias)


def losses(head: Any, scores: Tensor, batch: Batch) -> Tensor:
    """The loss of each unit on its own (a sequence, a tagged token, a masked word); units without a label give 0."""
    labels, scores = batch.labels, scores.float()
    if labels is None:
        raise ValueError("a batch without labels has no loss")
    if head.kind == "regress":
        known = ~labels.isnan()
        each = (scores.squeeze(-1) - labels.nan_to_num()) ** 2 * known
    elif head.kind == "classify":
        each = _cross_entropy(scores, labels)
    elif head.kind in ("tag", "words"):
        return _cross_entropy(scores.flatten(0, -2), labels.flatten()) * batch.labelled_tokens()
    else:
        start, end = (batch.rows(scores[..., side], -1e4) for side in (0, 1))
        each = (_cross_entropy(start, labels[:, 0]) + _cross_entropy(end, labels[:, 1])) / 2
    return each if batch.present is None else each * batch.present


def _cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """Of each row, 0 where the label is none."""
    return functional.cross_entropy(
        scores, labels.masked_fill(labels < 0, IGNORE), ignore_index=IGNORE, reduction="none"
    )


def same_labels(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether two heads name the same classes in the same order; names that say nothing fit any.

    >>> same_labels(["No", "Yes"], ["no", "yes"]), same_labels(["LABEL_0", "LABEL_1"], ["no", "yes"])
    (True, True)
    """
    if len(one) != len(other):
        return False
    nothing = [f"label{number}" for number in range(len(one))]
    mine, theirs = plain_names(one), plain_names(other)
    return mine == theirs or nothing in (mine, theirs)


def plain_names(labels: Sequence[str]) -> list[str]:
    """Names of classes without case and what joins words, unless that would not tell them apart; numbers stay.

    >>> plain_names(["NOT_ENTAILMENT", "entailment"]), plain_names(["-1", "1"])
    (['notentailment', 'entailment'], ['-1', '1'])
    """
    folded = [label.strip().casefold() for label in labels]
    plain = [label if NUMBER.fullmatch(label) else re.sub(r"[\s_.'/-]+", "", label) for label in folded]
    return plain if all(plain) and len(set(plain)) == len(set(folded)) else folded


def _dropout(config: Any, kind: str) -> float:
    if kind == "answer":
        return 0.0
    for name in ("classifier_dropout", "classifier_dropout_prob", "seq_classif_dropout", "hidden_dropout_prob"):
        rate = getattr(config, name, None)
        if rate is not None:
            return float(rate)
    return 0.1
