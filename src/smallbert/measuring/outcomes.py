"""Which examples a model gets right, kept on its card, so that two cards can be compared example by example."""

import base64
import math
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from smallbert.measuring.card import Card, number
from smallbert.measuring.groups import standard_error
from smallbert.measuring.statistics import CLEAR, mcnemar, t_tail

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MANY = 10_000  # degrees of freedom, beyond which a t test is that of a normal distribution


def pack(right: Sequence[bool]) -> str:
    """One bit an example, compressed, as text for a card.

    >>> pack([True, False, True])
    'eJzjAQAAJgAm'
    """
    bits = int("1" + "".join("01"[bool(one)] for one in right), 2)  # the first one keeps zeros in front
    return base64.b64encode(zlib.compress(bits.to_bytes(len(right) // 8 + 1, "big"), 9)).decode("ascii")


@lru_cache(maxsize=1024)
def unpack(text: str) -> "NDArray[np.uint8]":
    """A one for each example that was right."""
    import numpy as np

    bits = np.unpackbits(np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8))
    return bits[bits.argmax() + 1 :]


def is_clearly_better(one: Card, other: Card) -> bool:
    """Whether one row's headline score is above another's by more than chance.

    Where it is known which examples both get right, two single runs are compared by McNemar's exact test, which speaks
    of these two models and of no other seed. Means over seeds are compared by a t test whose error is that of the
    examples, taken in pairs, and that of the seeds; a single run beside them is taken to vary as they do. Elsewhere
    more than one standard error is enough: on the same examples, a difference varies less than two scores apart.
    """
    gap = (number(one, "score") or 0.0) - (number(other, "score") or 0.0)
    if gap <= 0 or not are_paired(one, other):
        return gap > max(standard_error(one), standard_error(other))
    import numpy as np

    first, second = (np.stack([unpack(text) for text in card["right"]]) for card in (one, other))
    if len(first) == len(second) == 1:
        return mcnemar(int((first > second).sum()), int((first < second).sum())) < CLEAR
    apart = 100 * (first.mean(0) - second.mean(0))
    errors = [(float(apart.var(ddof=1)) / len(apart), math.inf), *_seed_variances(one["runs"], other["runs"])]
    variance = sum(error for error, _ in errors)
    if not variance:  # one always right, the other always wrong
        return True
    over_seeds = sum(error**2 / degrees for error, degrees in errors)  # Welch and Satterthwaite's degrees of freedom
    freedom = variance**2 / over_seeds if over_seeds else MANY
    return t_tail(gap / math.sqrt(variance), max(int(min(freedom, MANY)), 1)) < CLEAR


def _seed_variances(*rows: dict[str, Any]) -> list[tuple[float, float]]:
    """For each row the squared error of its mean over seeds and its degrees of freedom; a lone seed has the other's."""
    spread, known = max((runs["sd"], runs["ok"] - 1) for runs in rows if runs["sd"] is not None)
    both = [(spread, known) if runs["sd"] is None else (runs["sd"], runs["ok"] - 1) for runs in rows]
    return [(sd**2 / runs["ok"], degrees) for runs, (sd, degrees) in zip(rows, both, strict=True)]


def are_paired(one: Card, other: Card) -> bool:
    """Whether it is known of two rows which of the same examples they get right."""
    same = all(one[name] == other[name] for name in ("task_fingerprint", "split", "headline"))
    return same and all(card["right"] and None not in card["right"] for card in (one, other))
