"""Which examples a model gets right, kept on its card, so that two cards can be compared example by example."""

import base64
import math
import zlib
from collections.abc import Sequence
from statistics import fmean

from smallbert.measuring.card import Card, number
from smallbert.measuring.groups import standard_error
from smallbert.measuring.statistics import CLEAR, mcnemar, t_tail

MANY = 10_000  # degrees of freedom, beyond which a t test is that of a normal distribution


def pack(right: Sequence[bool]) -> str:
    """One bit an example, compressed, as text for a card.

    >>> pack([True, False, True])
    'eJzjAQAAJgAm'
    """
    bits = int("1" + "".join("01"[bool(one)] for one in right), 2)  # the first one keeps zeros in front
    return base64.b64encode(zlib.compress(bits.to_bytes(len(right) // 8 + 1, "big"), 9)).decode("ascii")


def unpack(text: str) -> int:
    """The bits of the examples as one number, the last example lowest, with a one in front of them."""
    return int.from_bytes(zlib.decompress(base64.b64decode(text)), "big")


def is_clearly_better(one: Card, other: Card) -> bool:
    """Whether one row's headline score is above another's by more than chance.

    Where it is known which examples both get right, single runs are compared by McNemar's exact test, and means over
    seeds by a t test whose error is that of the examples, taken in pairs, and that of the seeds. Elsewhere a lead of
    more than one standard error is enough: on the same examples, a difference varies less than two scores apart.
    """
    gap = (number(one, "score") or 0.0) - (number(other, "score") or 0.0)
    if gap <= 0 or not are_paired(one, other):
        return gap > max(standard_error(one), standard_error(other))
    bits = [[unpack(text) for text in card["right"]] for card in (one, other)]
    if all(len(own) == 1 for own in bits):
        ((first,), (second,)) = bits
        return mcnemar((first & ~second).bit_count(), (second & ~first).bit_count()) < CLEAR
    errors = [(_example_variance(*bits), math.inf)]
    errors += [(runs["sd"] ** 2 / runs["ok"], runs["ok"] - 1) for runs in (one["runs"], other["runs"]) if runs["sd"]]
    variance = sum(error for error, _ in errors)
    if not variance:  # one always right, the other always wrong
        return True
    over_seeds = sum(error**2 / degrees for error, degrees in errors)  # Welch and Satterthwaite's degrees of freedom
    freedom = variance**2 / over_seeds if over_seeds else MANY
    return t_tail(gap / math.sqrt(variance), max(int(min(freedom, MANY)), 1)) < CLEAR


def are_paired(one: Card, other: Card) -> bool:
    """Whether it is known of two rows which of the same examples they get right."""
    same = all(one[name] == other[name] for name in ("task_fingerprint", "split", "headline"))
    return same and all(card["right"] and None not in card["right"] for card in (one, other))


def _example_variance(one: list[int], other: list[int]) -> float:
    """The squared error that a difference has because other examples might have been drawn."""
    digits = [[map(int, f"{seed:b}"[1:]) for seed in own] for own in (one, other)]  # without the one in front
    means = [[fmean(seeds) for seeds in zip(*own, strict=True)] for own in digits]
    apart = [100 * (mine - theirs) for mine, theirs in zip(*means, strict=True)]
    mean, count = fmean(apart), len(apart)
    return math.fsum((value - mean) ** 2 for value in apart) / max(count - 1, 1) / count
