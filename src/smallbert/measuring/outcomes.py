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

    Where it is known which examples both get right, two single runs are compared by McNemar's exact test on examples,
    which speaks of these two runs and of no other seed. Means over seeds are compared by Welch's t test with the errors
    of seeds and of examples, taken in pairs. A single run beside several must be ahead on examples, by a paired t test,
    and further than one more seed of the other row would be. Elsewhere more than one standard error is enough: on the
    same examples, a difference varies less than two scores apart.
    """
    gap = (number(one, "score") or 0.0) - (number(other, "score") or 0.0)
    if gap <= 0 or not are_paired(one, other):
        return gap > max(standard_error(one), standard_error(other))
    import numpy as np

    few, many = sorted((np.stack([unpack(text) for text in card["right"]]) for card in (one, other)), key=len)
    if len(many) == 1:
        return mcnemar(int((few > many).sum()), int((few < many).sum())) < CLEAR
    seeds, apart = [rights.mean(1).tolist() for rights in (few, many)], few.mean(0) - many.mean(0)
    error = float(apart.var(ddof=1)) / len(apart) if len(apart) > 1 else 0.0
    if len(few) > 1:
        p = welch(seeds[0], seeds[1], error)  # None where nothing varies: one always right, the other always wrong
        return p is None or p < CLEAR
    on_examples = t_tail(float(apart.mean()) / error**0.5, len(apart) - 1) if error else 0.0
    return max(on_examples, one_more(seeds[0][0], seeds[1]) or 0.0) < CLEAR


def are_paired(one: Card, other: Card) -> bool:
    """Whether it is known of two rows which of the same examples they get right."""
    same = all(one[name] == other[name] for name in ("task_fingerprint", "split", "headline"))
    return same and all(card["right"] and None not in card["right"] for card in (one, other))
