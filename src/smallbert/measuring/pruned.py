"""How much of a pruned model is left, by both denominators, and what its zeros do; all of it from its card."""

import re
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any, NamedTuple

WORTH_A_NOTE = 0.05  # the share of zeros from which they are spoken of
ABOUT = "weights that are not zero, of the layers' matrices / of the whole model; zeros make dense products no faster"


LEFT_BY_TRAINING = re.compile(r"[\d.]+% of the [\d,]+ layer weights are left, [\d.]+% of all [\d,]+ parameters")
LEFT_WHEN_MEASURED = "of the weights in the layers' matrices are left"


class Left(NamedTuple):
    """The share of weights that are not zero: of the layers' matrices, and of the whole model, embeddings included."""

    layers: float
    whole: float

    @property
    def is_pruned(self) -> bool:
        """Whether there are more zeros than any model has."""
        return min(self) <= 1 - WORTH_A_NOTE

    def __str__(self) -> str:
        """In percent, as "10.0 / 37.4"."""
        return " / ".join(f"{100 * share:.1f}" for share in self)


def weights_left(card: Mapping[str, Any]) -> Left | None:
    """Both shares from a card (or from costs); None where nothing was counted.

    >>> str(weights_left({"parameters": {"total": 30, "non_zero": 12, "encoder": 20, "encoder_non_zero": 2}}))
    '10.0 / 40.0'
    """
    counts = card["parameters"]
    if not counts or not counts.get("encoder"):
        return None
    return Left(counts["encoder_non_zero"] / counts["encoder"], counts["non_zero"] / counts["total"])


def mean_left(shares: Iterable[Left | None]) -> Left | None:
    """The mean of those that are known."""
    known = [share for share in shares if share is not None]
    return Left(*(fmean(column) for column in zip(*known, strict=True))) if known else None


def told_once(notes: list[str], measured: list[str]) -> list[str]:
    """All notes on a run, without its last word on how many weights are left where measuring has said the same."""
    said = [number for number, note in enumerate(notes) if LEFT_BY_TRAINING.fullmatch(note)]
    again = said[-1:] if any(LEFT_WHEN_MEASURED in note for note in measured) else []
    return [*(note for number, note in enumerate(notes) if number not in again), *measured]


def note_zeros(card: Mapping[str, Any]) -> list[str]:
    """What is to be said of a pruned model: zeros alone are no speed, and how it ran when it was timed."""
    left, latency = weights_left(card), card["latency"]
    if left is None or not left.is_pruned:
        return []
    stored, ran = ((latency or {}).get(key) for key in ("sparse_matrices", "sparse_products"))
    how = f"{ran} of {stored} pruned matrices ran as sparse products" if stored else "all products were dense"
    how = "nothing was timed" if latency is None else f"in the time measured {how}"
    return [
        f"{left.layers:.1%} {LEFT_WHEN_MEASURED}, {left.whole:.1%} of the whole model; "
        f"zeros make dense products no faster; {how}"
    ]
