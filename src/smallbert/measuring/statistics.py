"""What few runs can tell: means, intervals and exact tests, in plain Python."""

import math
import random
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import NormalDist, fmean, stdev, variance
from typing import NamedTuple

Z = NormalDist().inv_cdf(0.975)  # a 95 % interval reaches so many standard errors to each side
CLEAR = 0.05  # a smaller p is called a difference
EXACT = 14  # up to so many pairs every way to flip their signs is tried
MANY = 10_000  # degrees of freedom, beyond which a t test is that of a normal distribution
FLIPS = 20_000  # with more pairs, so many ways are drawn


class Mean(NamedTuple):
    """A mean, the standard deviation over what it was taken of (None for fewer than two), and how many those were."""

    value: float | None
    sd: float | None
    n: int

    @property
    def error(self) -> float | None:
        """The standard error of the mean."""
        return None if self.sd is None else self.sd / math.sqrt(self.n)


def mean_of(values: Iterable[float]) -> Mean:
    """The mean of some numbers, which may be none.

    >>> mean_of([84.0, 86.0])
    Mean(value=85.0, sd=1.4142135623730951, n=2)
    """
    values = list(values)
    return Mean(fmean(values) if values else None, stdev(values) if len(values) > 1 else None, len(values))


def wilson_interval(count: float, n: int, z: float = Z) -> tuple[float, float]:
    """The 95 % interval of a share, which stays inside 0 to 1 and is never empty.

    >>> wilson_interval(8, 10)
    (0.490..., 0.943...)
    """
    share, squared = count / n, z * z / n
    middle = (share + squared / 2) / (1 + squared)
    half = z / (1 + squared) * math.sqrt(share * (1 - share) / n + squared / (4 * n))
    return max(min(middle - half, share), 0.0), min(max(middle + half, share), 1.0)  # rounding may pass the ends


def fisher_exact(one: int, of_one: int, other: int, of_other: int) -> float:
    """Two-sided p of Fisher's exact test: are `one` of `of_one` and `other` of `of_other` draws of the same share?

    >>> fisher_exact(8, 10, 0, 10)
    0.000714...
    """
    both, whole = one + other, of_one + of_other

    def ways(count: int) -> int:
        return math.comb(of_one, count) * math.comb(of_other, both - count)

    counts = range(max(0, both - of_other), min(both, of_one) + 1)
    return sum(ways(count) for count in counts if ways(count) <= ways(one)) / math.comb(whole, both)


def mcnemar(only_one: int, only_other: int) -> float:
    """Two-sided p of McNemar's exact test: of the examples that only one of two models gets right, is half each one's?

    >>> mcnemar(12, 5)
    0.143...
    """
    n, fewer = only_one + only_other, min(only_one, only_other)
    ways = total = 1
    for count in range(fewer):
        ways = ways * (n - count) // (count + 1)
        total += ways
    return min(1.0, 2 * total / 2**n)


def sign_flip(differences: Sequence[float]) -> float | None:
    """Two-sided p that paired differences are zero in the middle: how often do random signs give as large a sum?

    Exact up to 14 pairs; the smallest p that n pairs can give is 2 / 2**n, 0.0625 for five.

    >>> sign_flip([1.0, 2.0, 3.0])
    0.25
    """
    n = len(differences)
    if not n:
        return None
    least = abs(sum(differences)) * (1 - 1e-9)  # sums of the same numbers in another order differ in the last digit
    if n > EXACT:
        draw = random.Random(0)
        hits = sum(_flipped(differences, draw.getrandbits(n)) >= least for _ in range(FLIPS))
        return (hits + 1) / (FLIPS + 1)
    return sum(_flipped(differences, signs) >= least for signs in range(2**n)) / 2**n


def _flipped(differences: Sequence[float], signs: int) -> float:
    return abs(sum(-value if signs >> place & 1 else value for place, value in enumerate(differences)))


def t_tail(t: float, freedom: int) -> float:
    """How probable it is that Student's t is farther from zero than this, to either side.

    >>> t_tail(2.0, 4)
    0.116...
    """
    return min(1.0, _beta_share(freedom / (freedom + t * t), t * t / (freedom + t * t), freedom / 2, 0.5))


def _beta_share(x: float, rest: float, a: float, b: float) -> float:
    """The regularised incomplete beta function, the share of a beta distribution below x; `rest` is 1 - x.

    A continued fraction, which never takes a small number from a large one where x is below the mean of the
    distribution; above it, the share of what lies beyond x is the small one.
    """
    if x <= 0 or rest <= 0:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta_share(rest, x, b, a)
    value = 1.0
    for step in range(100 + 10 * int(math.sqrt(a + b)), 0, -1):  # from the inside out
        half = step // 2
        part = -(a + half) * (a + b + half) if step % 2 else half * (b - half)
        value = 1 + part * x / ((a + step - 1) * (a + step)) / value
    scale = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(rest)
    return math.exp(scale) / (a * value)


def welch(one: Sequence[float], other: Sequence[float], beside: float = 0.0) -> float | None:
    """Two-sided p of Welch's t test that two groups have the same mean; None where there is no spread to go by.

    The degrees of freedom are rounded down to a whole number, which makes p a little larger. `beside` is the square of
    an error that the difference has besides, and that is known well.

    >>> welch([1.0, 2.0, 3.0], [4.0, 6.0, 8.0])
    0.090...
    """
    if min(len(one), len(other)) < 2:
        return None
    errors = [variance(group) / len(group) for group in (one, other)]
    whole = sum(errors) + beside
    if not whole:
        return None
    unsure = sum(error**2 / (len(group) - 1) for error, group in zip(errors, (one, other), strict=True))
    freedom = min(whole**2 / unsure, MANY) if unsure else MANY
    return t_tail((fmean(one) - fmean(other)) / math.sqrt(whole), max(int(freedom), 1))


def one_more(value: float, group: Sequence[float]) -> float | None:
    """Two-sided p of the t test that a value is drawn from where a group was; None where there is no spread to go by.

    >>> one_more(5.0, [1.0, 2.0, 3.0])
    0.121...
    """
    if len(group) < 2 or not variance(group):
        return None
    return t_tail((value - fmean(group)) / (stdev(group) * math.sqrt(1 + 1 / len(group))), len(group) - 1)


class Crossing(NamedTuple):
    """Where a line first reaches a height; `at_most` where it was there at its first point already."""

    x: float
    at_most: bool


def first_reached(points: Sequence[tuple[float, float]], height: float) -> Crossing | None:
    """The smallest x at which straight lines through the points reach a height; None if they never do.

    >>> first_reached([(2, 80.0), (4, 84.0), (8, 85.0)], 82.0)
    Crossing(x=3.0, at_most=False)
    """
    points = sorted(points)
    if points and points[0][1] >= height:
        return Crossing(points[0][0], True)
    for (x, y), (next_x, next_y) in pairwise(points):
        if next_y >= height:
            return Crossing(x + (next_x - x) * (height - y) / (next_y - y), False)
    return None
