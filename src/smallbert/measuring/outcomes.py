"""Which examples a model gets right, kept on its card, so that two cards can be compared example by example."""

import base64
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from smallbert.measuring.card import Card, number
from smallbert.measuring.groups import standard_error
from smallbert.measuring.statistics import CLEAR, mcnemar, one_more, t_tail, welch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Rights = NDArray[np.uint8]  # seeds x examples


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
    """Whether one row's headline score is above another's by more than chance: other examples, and other seeds.

    Where it is known which examples both get right, both tests must say so. Two single runs are compared by McNemar's
    exact test on examples, which speaks of these two runs and of no other seed. Means over seeds are compared by a
    paired t test on examples and Welch's t test on seeds, where a single run is taken for one more of the other row's.
    Elsewhere more than one standard error is enough: on the same examples, a difference varies less than two scores
    apart.
    """
    gap = (number(one, "score") or 0.0) - (number(other, "score") or 0.0)
    if gap <= 0 or not are_paired(one, other):
        return gap > max(standard_error(one), standard_error(other))
    import numpy as np

    first, second = (np.stack([unpack(text) for text in card["right"]]) for card in (one, other))
    return max(_over_examples(first, second), _over_seeds(first, second)) < CLEAR


def are_paired(one: Card, other: Card) -> bool:
    """Whether it is known of two rows which of the same examples they get right."""
    same = all(one[name] == other[name] for name in ("task_fingerprint", "split", "headline"))
    return same and all(card["right"] and None not in card["right"] for card in (one, other))


def _over_examples(one: "Rights", other: "Rights") -> float:
    """The p of a difference that other examples might not show."""
    if len(one) == len(other) == 1:
        return mcnemar(int((one > other).sum()), int((one < other).sum()))
    apart = one.mean(0) - other.mean(0)
    if len(apart) < 2:
        return 1.0
    error = float(apart.std(ddof=1)) / len(apart) ** 0.5
    return t_tail(float(apart.mean()) / error, len(apart) - 1) if error else 0.0  # always right, and always wrong


def _over_seeds(one: "Rights", other: "Rights") -> float:
    """The p of a difference that other seeds might not show; 0 where none are known, or all are alike."""
    few, many = sorted((rights.mean(1).tolist() for rights in (one, other)), key=len)
    p = one_more(few[0], many) if len(few) == 1 else welch(few, many)
    return 0.0 if p is None else p
