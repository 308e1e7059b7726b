"""Tasks made of other tasks: fewer examples, a part held out to choose by, texts cut shorter; each says so."""

import hashlib
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from smallbert.errors import UserError
from smallbert.tasks.families import hold_out_families
from smallbert.tasks.task import Row, Split, Task, chance_of, check_varied

CHOOSE = "choose"  # a split held out of train, by which settings may be chosen
CUT = "texts cut at"  # how a note begins that says where texts end


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
    check_varied(f"{task.name}, {examples} examples", task.kind, task.labels, splits)
    note = f"{examples:,} of {len(rows):,} {split} examples, drawn by seed {seed}"
    limited = _told_apart(task, note, splits=splits)
    if split != "dev":
        return limited
    return replace(limited, chance=chance_of(Row(task.kind, task.metrics, ""), splits["dev"]))


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
            f"go, since there are {len(rows):,} rows and those that share text go together; give more rows"
        )
    note = (
        f"{CHOOSE} is {len(scored):,} whole rows of train; they and what shares text with them, "
        f"{len(held):,} of {len(rows):,} rows, are not trained on"
    )
    rest = rows.take(row for row in range(len(rows)) if row not in held)
    splits = {**task.splits, "train": rest, CHOOSE: rows.take(scored)}
    check_varied(f"{task.name} without what is held out", task.kind, task.labels, splits)
    changed = _told_apart(task, note, splits=splits)
    return replace(changed, chance=chance_of(Row(task.kind, task.metrics, ""), splits[CHOOSE]))


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
