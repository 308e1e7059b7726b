"""What a task is: columns of examples, the classes, the metrics, and what guessing would score."""

import hashlib
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from smallbert.errors import UserError
from smallbert.tasks.families import hold_out_families
from smallbert.tasks.reading import fingerprint_of

KINDS = ("classify", "regress", "tag", "answer")
CHOOSE = "choose"  # a split held out of train, by which settings may be chosen
CUT = "texts cut at"  # how a note begins that says where texts end


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
        return _chance(Row(self.kind, self.metrics, ""), self.split(name))


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
    _check_varied(name, row.kind, labels, splits)
    return Task(
        name=name,
        kind=row.kind,
        labels=labels,
        metrics=row.metrics,
        chance=_chance(row, next(splits[key] for key in ("dev", "test", "train") if key in splits)),
        length=384 if row.kind == "answer" else 128,
        note="; ".join(note for note in [*notes, *_empty_texts(splits)] if note),
        fingerprint=fingerprint_of(paths),
        unanswerable=unanswerable,
        splits=dict(splits),
    )


def hold_out(split: Split, share: float, seed: int, kind: str) -> tuple[Split, Split]:
    """Cut a split in two, (the rest, the held-out share), the same way for the same seed.

    Classes keep their shares on both sides; questions about one context stay on one side, so that it cannot leak.

    >>> rest, held = hold_out(Split(list("abcdefgh"), None, [0, 1] * 4, list("12345678")), 0.25, 0, "classify")
    >>> len(rest), sorted(held.labels)
    (6, [0, 1])
    """
    if not 0 < share < 1 or len(split) < 2:
        raise UserError(f"cannot hold out a share of {share} of {len(split)} rows; give at least 2 rows, 0 < share < 1")
    count = min(max(round(share * len(split)), 1), len(split) - 1)
    shuffled = random.Random(seed).sample(range(len(split)), len(split))
    groups = _grouped(shuffled, {"classify": split.labels, "answer": split.pairs}.get(kind))
    if kind == "answer" and len(groups) > 1:
        held: set[int] = set()
        for group in groups[:-1]:
            if len(held) < count:
                held.update(group)
    else:
        held = set(_fair_sample(shuffled, groups, count))
    rows = range(len(split))
    return split.take(row for row in rows if row not in held), split.take(row for row in rows if row in held)


def limit(task: Task, examples: int, seed: int = 0, split: str = "train") -> Task:
    """The task with only so many examples of a split, the same ones each time, every class in its share; it says so.

    >>> limit(task, 1000).note
    '1,000 of 67,349 train examples, drawn by seed 0'
    """
    rows = task.split(split)
    if examples < 1:
        raise UserError(f"a sample of {examples} {split} examples was asked for; write a number from 1 to {len(rows)}")
    if examples >= len(rows):
        return task
    shuffled = random.Random(seed).sample(range(len(rows)), len(rows))
    groups = _grouped(shuffled, rows.labels if task.kind == "classify" else None)
    splits = {**task.splits, split: rows.take(sorted(_fair_sample(shuffled, groups, examples)))}
    _check_varied(f"{task.name}, {examples} examples", task.kind, task.labels, splits)
    note = f"{examples:,} of {len(rows):,} {split} examples, drawn by seed {seed}"
    limited = _told_apart(task, note, splits=splits)
    if split != "dev":
        return limited
    return replace(limited, chance=_chance(Row(task.kind, task.metrics, ""), splits["dev"]))


def with_choice(task: Task, share: float = 0.1, most: int = 1000) -> Task:
    """The task with a part of train held out as the split "choose", to choose by without looking at dev; it says so.

    Held out are whole families of rows that share text (see `families.py`), so that nothing scored was trained on, not
    even a phrase of it; scored are whole rows only, which look like dev's.

    >>> with_choice(task).note
    'choose is 871 whole rows of train; they and what shares text with them, 9,892 of 67,349 rows, are not trained on'
    """
    rows = task.split("train")
    # The same question may be asked of many texts; what must not be seen twice is the text it is asked of.
    texts = [""] * len(rows) if task.kind == "answer" else rows.texts
    scored, held = hold_out_families(texts, rows.pairs, share, most)
    if not scored:
        raise UserError(
            f"task {task.name} has no rows to choose by: to hold any out, more than {200 * share:.0f} % of train would "
            "go, so many rows share their texts; score on dev instead"
        )
    note = (
        f"{CHOOSE} is {len(scored):,} whole rows of train; they and what shares text with them, "
        f"{len(held):,} of {len(rows):,} rows, are not trained on"
    )
    rest = rows.take(row for row in range(len(rows)) if row not in held)
    splits = {**task.splits, "train": rest, CHOOSE: rows.take(scored)}
    _check_varied(f"{task.name} without what is held out", task.kind, task.labels, splits)
    changed = _told_apart(task, note, splits=splits)
    return replace(changed, chance=_chance(Row(task.kind, task.metrics, ""), splits[CHOOSE]))


def without_dev(task: Task, share: float = 0.1, most: int = 1000) -> Task:
    """The same, with what is held out in place of dev, and nothing else: dev cannot be looked at by mistake."""
    chosen = with_choice(task, share, most)
    return replace(chosen, splits={"train": chosen.split("train"), "dev": chosen.split(CHOOSE)})


def cut_at(task: Task, length: int) -> Task:
    """The task with its texts cut at another number of tokens than is usual for it; it says so."""
    return task if length == task.length else _told_apart(task, f"{CUT} {length} tokens", length=length)


def _told_apart(task: Task, note: str, **changes: Any) -> Task:
    """A changed task, with the change in its note, and another fingerprint, so that no card is taken for another's."""
    digest = hashlib.sha256(f"{task.fingerprint} {note}".encode()).hexdigest()[:16]
    return replace(task, note="; ".join(filter(None, [task.note, note])), fingerprint=digest, **changes)


def _grouped(rows: Sequence[int], keys: Sequence[Any] | None) -> list[list[int]]:
    """The rows in their order, those of one key together."""
    groups: dict[Any, list[int]] = defaultdict(list)
    for row in rows:
        groups[keys[row] if keys else None].append(row)
    return list(groups.values())


def _fair_sample(rows: Sequence[int], groups: list[list[int]], count: int) -> list[int]:
    """So many rows, of each group its share: each row sits at its rank inside its group, from 0 to 1."""
    place = {row: (rank + 0.5) / len(group) for group in groups for rank, row in enumerate(group)}
    return sorted(rows, key=place.__getitem__)[:count]


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


def _check_varied(name: str, kind: str, labels: tuple[str, ...], splits: Mapping[str, Split]) -> None:
    if kind == "answer" or "train" not in splits:
        return
    seen = set(flat(splits["train"]))
    if len(seen) < 2:
        only = labels[next(iter(seen))] if labels and seen else next(iter(seen), "none")
        raise UserError(
            f"task {name}: every row of train has the label '{only}'; at least two different ones are needed"
        )


def _chance(row: Row, split: Split) -> float:
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
        notes.append(f"{empty:,} empty texts in {name}" if empty else "")
    return notes
