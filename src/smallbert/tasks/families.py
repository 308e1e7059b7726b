"""Rows that share text: what must leave train together, so that what is held out was never seen, not even in pieces.

A row's family is every row that says one of its texts again; where rows have one text only, also every row that is a
run of words inside it, since some tasks (SST-2) have a sentence and its phrases as rows. Words are compared without
case and punctuation.
"""

import random
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_OPENING = 3  # texts are found by so many of their first words


def hold_out_families(
    texts: Sequence[Any], pairs: Sequence[str] | None, share: float, most: int
) -> tuple[list[int], set[int]]:
    """Which rows to score, and which rows (these among them) not to train on; the same ones each time.

    Scored are `share` of the whole rows (those inside no other row), at most so many, drawn by chance, each with its
    family held out; one that would bring what train loses above twice that share is passed over.

    >>> hold_out_families(["a fine film", "fine film", "so dull", "dull", "no plot", "plot"], None, 0.3, 10)
    ([2], {2, 3})
    """
    columns = [[_words(text) for text in column] for column in (texts, pairs) if column is not None]
    whole = (
        _inside(columns[0]) if pairs is None else {row: set(own) for row, own in enumerate(zip(*columns, strict=True))}
    )
    rows_of = defaultdict(list)
    for column in columns:
        for row, text in enumerate(column):
            rows_of[text].append(row)
    goal, limit = min(max(round(share * len(whole)), 1), most), 2 * share * len(texts)
    held: set[int] = set()
    scored: list[int] = []
    for row in random.Random(0).sample(sorted(whole), min(10 * goal, len(whole))):
        family = {row}.union(*(rows_of[text] for text in whole[row] if text))
        if len(scored) < goal and len(held) + len(family - held) <= limit:
            held |= family
            scored.append(row)
    return sorted(scored), held


def _words(text: Any) -> str:
    """The words of a text with single spaces between: "It's  fine." gives "it s fine"."""
    return " ".join(re.findall(r"\w+", (text if isinstance(text, str) else " ".join(text)).casefold()))


def _inside(texts: Sequence[str]) -> dict[int, set[str]]:
    """The rows that are inside no other one, each with the texts that are inside it, its own among them."""
    known: dict[str, list[str]] = defaultdict(list)
    for text in dict.fromkeys(texts):
        known[_opening(text)].append(text)
    inner: set[str] = set()
    found: dict[str, set[str]] = {}
    for text in sorted(set(texts), key=lambda text: (-len(text), text)):
        if text not in inner:  # what is inside an inner text is inside the outer one too
            found[text] = {text, *_runs(text, known)}
            inner |= found[text] - {text}
    return {row: found[text] for row, text in enumerate(texts) if text in found}


def _opening(text: str) -> str:
    return " ".join(text.split(" ", _OPENING)[:_OPENING])


def _runs(text: str, known: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """The known texts that are a run of words of this one."""
    words, closed, start = text.split(" "), text + " ", 0
    for place, word in enumerate(words):
        for count in range(1, min(_OPENING, len(words) - place) + 1):
            for other in known.get(" ".join(words[place : place + count]), ()):
                if closed.startswith(other + " ", start):
                    yield other
        start += len(word) + 1
