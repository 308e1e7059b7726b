"""What a task is: columns of examples, the classes, the metrics, and what guessing would score."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smallbert.errors import UserError
from smallbert.tasks.reading import fingerprint_of

KINDS = ("classify", "regress", "tag", "answer")


@dataclass(frozen=True)
class Row:
    """One line of the list of known tasks, readable without any data."""

    kind: str
    metrics: tuple[str, ...]
    about: str


@dataclass(frozen=True)
class Split:
    """Examples as columns of the same length; what is in them depends on the task's kind.

    classify, regress  texts: sentences, pairs: second sentences or None, labels: class ids or numbers
    tag                texts: lists of words, labels: one class id per word
    answer             texts: questions, pairs: contexts, labels: {"text": [...], "answer_start": [...]}, empty if none

    >>> Split(["good", "bad"], None, [1, 0], ["0", "1"]).take([1]).texts
    ['bad']
    """

    texts: list[Any]
    pairs: list[str] | None
    labels: list[Any]
    ids: list[str]

    def __post_init__(self) -> None:
        """Refuse columns of different lengths."""
        lengths = {len(column) for column in (self.texts, self.pairs, self.labels, self.ids) if column is not None}
        if len(lengths) != 1:
            raise ValueError(f"the columns of a split have different lengths: {sorted(lengths)}")

    def __len__(self) -> int:
        """How many examples."""
        return len(self.texts)

    def take(self, indices: Iterable[int]) -> "Split":
        """The examples at these positions, in this order."""
        chosen = [int(index) for index in indices]

        def pick(column: list[Any]) -> list[Any]:
            return [column[index] for index in chosen]

        pairs = None if self.pairs is None else pick(self.pairs)
        return Split(pick(self.texts), pairs, pick(self.labels), pick(self.ids))


@dataclass(frozen=True)
class Task:
    """A task with its data read: `split("dev")` gives the examples.

    `chance` is what guessing scores on the headline metric (0-100), counted on dev (on test or train where there is no
    dev): the share of the most frequent class for accuracy, of unanswerable questions for squad2, 0 for other metrics.
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    chance: float
    length: int
    note: str
    fingerprint: str
    unanswerable: bool = False
    splits: Mapping[str, Split] = field(default_factory=dict, repr=False)

    def split(self, name: str) -> Split:
        """The examples of "train", "dev" or "test"."""
        if name not in self.splits:
            raise UserError(f"task {self.name} has no split '{name}' here; it has: {', '.join(self.splits)}")
        return self.splits[name]

    def chance_on(self, name: str) -> float:
        """What guessing scores on a split."""
        return chance_of(Row(self.kind, self.metrics, ""), self.split(name))


def make_task(
    name: str,
    row: Row,
    labels: tuple[str, ...],
    splits: Mapping[str, Split],
    paths: Iterable[Path],
    notes: Iterable[str],
    *,
    unanswerable: bool = False,
) -> Task:
    """Check what was read and put it together; the length limit is 384 tokens for questions on a text, else 128."""
    for split_name, split in splits.items():
        if not len(split):
            raise UserError(
                f"task {name} has no rows in {split_name}; give a file with at least one row under its header"
            )
    check_varied(name, row.kind, labels, splits)
    return Task(
        name=name,
        kind=row.kind,
        labels=labels,
        metrics=row.metrics,
        chance=chance_of(row, next(splits[key] for key in ("dev", "test", "train") if key in splits)),
        length=384 if row.kind == "answer" else 128,
        note="; ".join(note for note in [*notes, *_empty_texts(splits)] if note),
        fingerprint=fingerprint_of(paths),
        unanswerable=unanswerable,
        splits=dict(splits),
    )


def label_ids(values: Sequence[str], classes: Sequence[str], where: str) -> list[int]:
    """Class names as ids; a name that is not known is an error that says its row (counted from 1).

    >>> label_ids(["b", "a"], ["a", "b"], "dev.tsv")
    [1, 0]
    """
    known = {name: index for index, name in enumerate(classes)}
    try:
        return [known[value] for value in values]
    except KeyError:
        row, value = next((row, value) for row, value in enumerate(values, 1) if value not in known)
        some = ", ".join(classes[:8]) + (", …" if len(classes) > 8 else "")
        raise UserError(f"{where}, row {row}: the label '{value}' is not one of the known ones: {some}") from None


def numbers(values: Sequence[Any], where: str) -> list[float]:
    """Labels as finite numbers; anything else is an error that says its row (counted from 1)."""
    found = []
    for row, value in enumerate(values, 1):
        try:
            found.append(float(value))
        except (TypeError, ValueError):
            raise UserError(f"{where}, row {row}: the label '{value}' is not a number, which regress needs") from None
        if not math.isfinite(found[-1]):
            raise UserError(f"{where}, row {row}: the label is {value}; give a finite number or leave the row out")
    return found


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Class names sorted, as numbers where all are numbers.

    >>> in_order({"10", "9"})
    ('9', '10')
    """
    distinct = sorted(set(names))
    try:
        return tuple(sorted(distinct, key=float))
    except ValueError:
        return tuple(distinct)


def flat(split: Split) -> list[Any]:
    """All labels of a split in one list, words of all sentences together."""
    if split.labels and isinstance(split.labels[0], list):
        return [label for sentence in split.labels for label in sentence]
    return split.labels


def is_bio(labels: Sequence[str]) -> bool:
    """Whether these classes mark entities: O outside, B-x the first word of an x, I-x the next ones.

    >>> is_bio(("B-city", "I-city", "O")), is_bio(("NOUN", "VERB"))
    (True, False)
    """
    return any(label[:2] == "B-" for label in labels) and all(
        label == "O" or label[:2] in ("B-", "I-") for label in labels
    )


def check_varied(name: str, kind: str, labels: tuple[str, ...], splits: Mapping[str, Split]) -> None:
    """Refuse a train split from which nothing can be learned."""
    if kind == "answer" or "train" not in splits:
        return
    seen = set(flat(splits["train"]))
    if len(seen) < 2:
        only = labels[next(iter(seen))] if labels and seen else next(iter(seen), "none")
        raise UserError(
            f"task {name}: every row of train has the label '{only}'; at least two different ones are needed"
        )


def chance_of(row: Row, split: Split) -> float:
    """What guessing scores on examples."""
    if row.kind == "answer":
        return 100 * sum(not answers["text"] for answers in split.labels) / len(split)
    if row.metrics[0] != "accuracy":
        return 0.0
    labels = flat(split)
    return 100 * Counter(labels).most_common(1)[0][1] / len(labels) if labels else 0.0


def _empty_texts(splits: Mapping[str, Split]) -> list[str]:
    notes = []
    for name, split in splits.items():
        texts = [*split.texts, *(split.pairs or [])]
        empty = sum(not (text.strip() if isinstance(text, str) else text) for text in texts)
        notes.append(f"{empty:,} empty text{'s' * (empty != 1)} in {name}" if empty else "")
    return notes
