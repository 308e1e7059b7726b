"""Packed attention: what the fast kernel is given, whatever the size of a head."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import varlen

from smallbert.model import attention


@pytest.mark.parametrize("size", [4, 8, 12])
def test_heads_of_any_size_fit_the_kernel(monkeypatch, size):
    """A stand-in as particular as the kernel gets heads it can take, and gives what the reference gives."""

    def stand_in(q, k, v, bounds, _, longest, __, scale, window_size=(-1, -1)):
        assert q.shape[-1] % 8 == 0
        return attention._attend_segments(q, k, v, bounds, longest, scale, window_size[0])

    monkeypatch.setattr(varlen, "varlen_attn", stand_in)
    q, k, v = torch.randn(3, 11, 2, size, dtype=torch.float64)
    bounds = torch.tensor([0, 4, 11])
    for window in (-1, 2):
        expected = attention._attend_segments(q, k, v, bounds, 7, 0.3, window)
        found = attention._attend_long(q, k, v, bounds, 7, 0.3, window)
        assert found.shape == (11, 2, size)
        torch.testing.assert_close(found, expected)
