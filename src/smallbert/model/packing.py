"""Small whole numbers in as many bits as they need: b bits take b bits on disk, three too."""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor
from torch.nn import functional


def pack(codes: Tensor, bits: int) -> Tensor:
    """Whole numbers below 2**bits, along the last axis, as bytes; the first number stands in the lowest bits.

    >>> pack(torch.tensor([[1, 2, 3, 7], [0, 0, 0, 1]]), 3)  # 7 * 512 + 3 * 64 + 2 * 8 + 1, and 512
    tensor([[209,  14],
            [  0,   2]], dtype=torch.uint8)
    """
    many, size, dtype = _word(bits)
    numbers = functional.pad(codes.to(dtype), (0, -codes.shape[-1] % many)).unflatten(-1, (-1, many))
    words = (numbers << _shifts(bits, codes.device)).sum(-1, keepdim=True, dtype=dtype)
    return words.view(torch.uint8)[..., :size].flatten(-2)[..., : packed_size(codes.shape[-1], bits)].contiguous()


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` numbers of each row of bytes.

    >>> unpack(torch.tensor([[209, 14], [0, 2]], dtype=torch.uint8), 3, 4)
    tensor([[1, 2, 3, 7],
            [0, 0, 0, 1]], dtype=torch.uint8)
    """
    if bits == 8:
        return packed[..., :count]
    _, size, dtype = _word(bits)
    words = functional.pad(packed, (0, -packed.shape[-1] % size)).unflatten(-1, (-1, size))
    words = functional.pad(words, (0, dtype.itemsize - size)).contiguous().view(dtype)
    return (words >> _shifts(bits, packed.device) & (2**bits - 1)).to(torch.uint8).flatten(-2)[..., :count]


def packed_size(count: int, bits: int) -> int:
    """How many bytes so many numbers take: a row ends with a whole byte.

    >>> packed_size(768, 3), packed_size(3, 3)
    (288, 2)
    """
    return -(-count * bits // 8)


def _word(bits: int) -> tuple[int, int, torch.dtype]:
    """How many numbers end with a whole byte, in how many bytes, and the integers that hold as many."""
    many, size = 8 // gcd(bits, 8), bits // gcd(bits, 8)
    return many, size, torch.uint8 if size == 1 else torch.int32 if size <= 3 else torch.int64


def _shifts(bits: int, device: torch.device) -> Tensor:
    many, _, dtype = _word(bits)
    return torch.arange(0, many * bits, bits, dtype=dtype, device=device)
