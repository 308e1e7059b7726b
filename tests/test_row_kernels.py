"""How two models' tokens stand to each other, compared in triton's interpreter where triton is there."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch

pytest.importorskip("triton")
METRICS = ("kl", "chances", "scores")


def one_at_a_time(ours, theirs, lengths, metric):
    """The same, sequence by sequence, in torch's own words."""
    far = []
    for four in zip(*(x.split(lengths) for x in (*ours[:2], *theirs[:2])), strict=True):
        mine, its = (torch.einsum("ihd,jhd->hij", *two) for two in (four[:2], four[2:]))
        mine, its = mine * ours[2], its * theirs[2]
        if metric == "kl":
            each = (its.softmax(-1) * (its.log_softmax(-1) - mine.log_softmax(-1))).sum(-1)
        else:
            apart = mine.softmax(-1) - its.softmax(-1) if metric == "chances" else mine - its
            each = apart.square().sum(-1) / max(1, apart.shape[-1])
        far.append(each)
    return torch.cat(far, 1)


def compare_both_ways(heads, size, their_size, lengths, longest, dtype, strength):
    """By metric: distances and gradients of the kernels and of the reference; then of queries that are the keys.

    The reference is given the same numbers in float32.
    """
    from smallbert.training.row_kernels import Rows, compare_rows

    torch.manual_seed(0)
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    count = sum(lengths)
    drawn = (strength * torch.randn(heads, count, size).to(dtype).float() for _ in range(2))
    query, key = (one.transpose(0, 1).requires_grad_() for one in drawn)
    its = [strength * torch.randn(count, heads, their_size).to(dtype).float() for _ in range(2)]
    slopes, found = torch.randn(heads, count), []
    given, theirs = query.to(dtype), Rows(*(one.to(dtype) for one in its), 0.4)
    keys = key.contiguous().to(dtype)  # which lie otherwise than queries
    for metric in METRICS:
        for wanted, mine in (((query, key), Rows(given, keys, 0.3)), ((query,), Rows(given, given, 0.3))):
            far = compare_rows(mine, theirs, bounds, longest, metric)
            expected = one_at_a_time(Rows(query, wanted[-1], 0.3), Rows(*its, 0.4), lengths, metric)
            both = [[one.detach(), *torch.autograd.grad(one, wanted, slopes, True)] for one in (far, expected)]
            found.append(both)
        none = compare_rows(Rows(given, keys, 0.3), Rows(given.detach(), keys.detach(), 0.3), bounds, longest, metric)
        found.append([[none.detach()], [torch.zeros(heads, count)]])
    return found


@pytest.mark.parametrize(
    ("dtype", "strength", "near"),
    [(torch.float32, 1.0, 1e-4), (torch.float32, 6.0, 1e-3), (torch.float16, 1.0, 1e-2)],
)
@pytest.mark.parametrize(
    ("heads", "size", "their_size", "lengths", "longest"),
    [(2, 26, 16, [3, 1, 0, 17, 40, 5, 0], 40), (3, 8, 32, [70, 90, 60], 96), (2, 16, 16, [30, 40, 33, 1], 64)],
)
def test_kernels_compare_like_the_reference(
    monkeypatch, heads, size, their_size, lengths, longest, dtype, strength, near
):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        compared = pool.submit(compare_both_ways, heads, size, their_size, lengths, longest, dtype, strength).result()
    assert len(compared) == 3 * len(METRICS)
    for found, expected in compared:
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=near / 10, rtol=near)
    assert all(not found[0].any() for found, _ in compared[2::3])  # exactly nothing, not next to it
