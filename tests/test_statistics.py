"""Exact tests and intervals agree with closed forms and with scipy."""

import random

import numpy as np
import pytest
from scipy import stats

from smallbert.measuring import statistics as ours


def test_closed_forms():
    assert ours.fisher_exact(8, 10, 0, 10) == pytest.approx(2 * 45 / 125970)  # C(10,8) * C(10,0) / C(20,8), both ends
    assert ours.wilson_interval(8, 10) == pytest.approx((0.4901625, 0.9433178))
    assert ours.wilson_interval(0, 10) == pytest.approx((0.0, 0.2775328)) and ours.wilson_interval(10, 10)[1] == 1.0
    assert ours.sign_flip([1.0, 2.0, 3.0]) == 0.25 and ours.sign_flip([0.5]) == 1.0 and ours.sign_flip([]) is None
    assert ours.sign_flip([0.0, 0.0, 0.0]) == 1.0
    assert ours.t_tail(0.0, 3) == 1.0 and ours.t_tail(1.0, 1) == pytest.approx(0.5)


def test_means():
    assert ours.mean_of([84.0, 86.0]) == (85.0, pytest.approx(2**0.5), 2)
    assert ours.mean_of([84.0, 86.0]).error == pytest.approx(1.0)
    assert ours.mean_of([84.0]) == (84.0, None, 1) and ours.mean_of([84.0]).error is None
    assert ours.mean_of([]) == (None, None, 0)


@pytest.mark.parametrize("of_one, of_other", [(10, 10), (5, 3), (12, 7), (1, 1)])
def test_fisher_is_scipys(of_one, of_other):
    for one in range(of_one + 1):
        for other in range(of_other + 1):
            table = [[one, of_one - one], [other, of_other - other]]
            wanted = stats.fisher_exact(table).pvalue
            assert ours.fisher_exact(one, of_one, other, of_other) == pytest.approx(wanted, rel=1e-9)
            assert wanted == pytest.approx(ours.fisher_exact(other, of_other, one, of_one))


@pytest.mark.parametrize("n", [1, 2, 10, 37])
def test_wilson_is_scipys(n):
    for count in range(n + 1):
        wanted = stats.binomtest(count, n).proportion_ci(method="wilson")
        assert ours.wilson_interval(count, n) == pytest.approx((wanted.low, wanted.high), abs=1e-9)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 9, 30, 1000, 20_000, 400_000])
def test_t_is_scipys(freedom):
    for t in (0.0, 1e-9, 0.1, 1.0, 1.5, 2.0, -2.0, 4.5, 8.0, 15.0, 38.0, 1e3):  # also far out, where 1 - p would be 1
        wanted = 2 * stats.t.sf(abs(t), freedom)
        assert ours.t_tail(t, freedom) == pytest.approx(wanted, rel=1e-8, abs=1e-300) and ours.t_tail(t, freedom) >= 0


def test_welch_is_scipys():
    draw = np.random.default_rng(0)
    for sizes, shift in (((5, 9), 0.5), ((400, 30), 0.1), ((3000, 2000), 1.0)):
        one, other = draw.normal(0, 1, sizes[0]), draw.normal(shift, 2, sizes[1])
        found, wanted = ours.welch(list(one), list(other)), stats.ttest_ind(one, other, equal_var=False).pvalue
        assert 0 < wanted <= found < 1.1 * wanted + 1e-3 * (wanted > 1e-3)  # degrees of freedom are rounded down
    assert ours.welch([1.0, 1.0], [1.0, 1.0]) is None and ours.welch([1.0], [2.0, 3.0]) is None


def test_sign_flips_are_scipys():
    for n in (2, 5, 9):
        values = np.random.default_rng(n).normal(0.5, 1.0, n)
        wanted = stats.permutation_test((values,), np.mean, permutation_type="samples", n_resamples=np.inf)
        assert ours.sign_flip(list(values)) == pytest.approx(wanted.pvalue)


def test_many_pairs_are_drawn_and_always_the_same():
    draw = random.Random(1)
    values = [draw.gauss(0.4, 1.0) for _ in range(30)]
    p = ours.sign_flip(values)
    assert p == ours.sign_flip(values)
    assert p == pytest.approx(stats.ttest_1samp(values, 0).pvalue, abs=0.02)
    assert ours.sign_flip([1.0] * 40) == pytest.approx(1 / 20001)  # never zero: what was seen is one of the ways


def test_first_reached():
    line = [(8, 85.0), (2, 80.0), (4, 84.0)]  # in any order
    assert ours.first_reached(line, 82.0) == (3.0, False) and ours.first_reached(line, 84.5) == (6.0, False)
    assert ours.first_reached(line, 80.0) == (2, True) and ours.first_reached(line, 60.0) == (2, True)
    assert ours.first_reached(line, 85.1) is None and ours.first_reached([], 1.0) is None
    assert ours.first_reached([(1, 10.0), (2, 20.0), (3, 5.0), (4, 30.0)], 15.0) == (1.5, False)  # the first time
