"""Attention within short sequences, in triton's interpreter, where triton is there: equal to one at a time."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch

pytest.importorskip("triton")


def attend_both_ways(heads, size, lengths, longest):
    """Output and gradients of the kernels and of the reference."""
    from smallbert.model.attention import _attend_segments
    from smallbert.model.short_kernels import attend_short

    torch.manual_seed(0)
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    three = [torch.randn(sum(lengths), heads, size).requires_grad_() for _ in range(3)]
    slopes = torch.randn(sum(lengths), heads, size)
    found = attend_short(*three, bounds, longest, 0.3)
    expected = _attend_segments(*three, bounds, longest, 0.3, -1)
    return [[one.detach(), *torch.autograd.grad(one, three, slopes)] for one in (found, expected)]


@pytest.mark.parametrize(
    ("heads", "size", "lengths", "longest"),
    [(2, 26, [3, 1, 0, 17, 40, 5, 0], 40), (3, 16, [70, 90, 60], 96), (2, 32, [30, 40, 33, 1], 64)],
)
def test_kernels_attend_like_the_reference(monkeypatch, heads, size, lengths, longest):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        found, expected = pool.submit(attend_both_ways, heads, size, lengths, longest).result()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
