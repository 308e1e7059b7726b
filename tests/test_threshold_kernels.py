"""Kernels of thresholds without a GPU, in triton's interpreter: exact whatever the hint, which seldom misses."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch

pytest.importorskip("triton")

NUMBERS, SAMPLE = 12_000, 4096  # rows that need a round, of a size that the interpreter gets through
LEAST, MOST = -(2**31), 2**31 - 1


@pytest.fixture
def interpreted(monkeypatch):
    """Call a function in a process of its own, where kernels are interpreted."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


def kernels():
    from smallbert.training import threshold_kernels

    threshold_kernels.SAMPLE = SAMPLE
    threshold_kernels.DEEP = threshold_kernels.tl.constexpr(64)  # few large blocks: what is slow here is their number
    return threshold_kernels


def sorted_out(rows, counts):
    found = rows.sort(descending=True).values.gather(1, (counts - 1).clamp(min=0)[:, None])[:, 0]
    return torch.where(counts < 1, float("inf"), found)


def make_rows():
    rows = torch.randn(7, NUMBERS, generator=torch.Generator().manual_seed(0))
    rows[1] = rows[1].round() * 1e-6  # many ties
    rows[2] = 0.0
    rows[3, rows[3] < 0.5] = torch.finfo(torch.float32).min  # pruned before
    rows[4, ::7] = 50.0  # a sample that misleads
    rows[5, ::3], rows[5, 1::3] = float("inf"), float("-inf")
    rows[6] = -rows[6].abs()
    return rows


def hints_for(rows, counts):
    """Hints of every kind: none, right, of other numbers, upside down, of all floats, of nonsense."""
    find = kernels()
    nothing = find.make_hint(rows)
    right, stale = nothing.clone(), nothing.clone()
    for _ in range(2):
        find.find_kth(rows, counts, right)
    find.find_kth(rows + 0.3, counts, stale)
    turned, whole = nothing.clone(), nothing.clone()
    turned[:, :2], whole[:, :2] = torch.tensor([MOST, LEAST]), torch.tensor([LEAST, MOST])
    upright = torch.stack([right[:, 1], right[:, 0], *right[:, 2:].unbind(1)], 1).contiguous()
    nonsense = torch.randint(LEAST, MOST, right.shape, dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    return [None, nothing, right, stale, turned, whole, upright, nonsense]


def find_with_every_hint(share):
    find, rows = kernels(), make_rows()
    counts = torch.full((len(rows),), round(share * NUMBERS))
    counts[6] = 0
    return [find.find_kth(rows, counts, hint) for hint in hints_for(rows, counts)], sorted_out(rows, counts)


@pytest.mark.parametrize("share", [1 / NUMBERS, 0.6, 1.0])
def test_no_hint_changes_what_is_found(interpreted, share):
    found, right = interpreted(find_with_every_hint, share)
    for thresholds in found:
        assert torch.equal(thresholds, right)


def follow(steps):
    """Numbers that move as trained scores do while ever fewer are kept: what is found, and how often a hint misses."""
    find, draw = kernels(), torch.Generator().manual_seed(0)
    rows, speed = torch.randn(3, NUMBERS, generator=draw), torch.zeros(3, NUMBERS)
    hint, agrees = find.make_hint(rows), []
    for step in range(steps):
        speed = 0.9 * speed + 0.01 * torch.randn(3, NUMBERS, generator=draw)
        rows = rows * 1.01 + speed
        counts = torch.tensor([round(0.1 * NUMBERS), round((0.9 - 0.005 * step) * NUMBERS), NUMBERS])
        agrees.append(torch.equal(find.find_kth(rows, counts, hint), sorted_out(rows, counts)))
    return agrees, hint[:, find.MISSED.value].tolist()


def test_hints_follow_numbers_that_drift(interpreted):
    agrees, missed = interpreted(follow, 16)
    assert all(agrees)
    assert max(missed) <= 3  # the first step knows nothing, the second not how fast it goes
