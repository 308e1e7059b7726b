"""Products of whole numbers: inputs rounded to 8 bits, each token by its own largest number or all by one range."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from smallbert.model.rounding import LEAST, input_steps, straight

TOP = 127  # the largest code of a token's inputs; the smallest is as far from zero
MIDDLE = 128  # what is taken from codes of 0 to 255, so that they are 8 bits with a sign


class Inputs(NamedTuple):
    """What a layer reads in whole numbers: (codes - zero) * step.

    codes (rows, tokens, features), step (rows, tokens, 1) or (), zero () or None for 0
    """

    codes: Tensor
    step: Tensor
    zero: Tensor | None = None

    def real(self) -> Tensor:
        """The numbers that the codes stand for."""
        return (self.codes if self.zero is None else self.codes - self.zero) * self.step


class Matrix(NamedTuple):
    """What whole inputs are multiplied with: 8-bit codes (outputs, inputs), and of each row its scale, the code of zero
    where that is not 0, and the sum of its codes less that.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    sums: Tensor


def code_tokens(inputs: Tensor) -> Inputs:
    """Each token's inputs by 127 steps on either side of zero, as long as its largest number needs.

    >>> code_tokens(torch.tensor([[0.5, -1.0, 0.0], [0.0, 8.0, 4.0]])).codes
    tensor([[  64., -127.,    0.],
            [   0.,  127.,   64.]])
    """
    # Few operations, and what is new is changed in place: of short texts these take as long as the product.
    high, low = inputs.amax(-1, keepdim=True), inputs.amin(-1, keepdim=True)
    step = torch.maximum(high, low.neg_()).clamp_(min=LEAST).mul_(1 / TOP)
    return Inputs((inputs / step).round_(), step)


def code_range(inputs: Tensor, low: Tensor, high: Tensor) -> Inputs:
    """All inputs by 256 steps between two bounds, zero among them; what lies beyond is moved to the bounds."""
    step, zero = input_steps(low, high)
    codes = ((inputs / step).round() + zero).clamp(0, 255)
    return Inputs(codes - MIDDLE, step, zero - MIDDLE)


def round_tokens(inputs: Tensor) -> Tensor:
    """What rounding each token's inputs to 8 bits leaves of them; gradients pass straight through."""
    with torch.no_grad():
        made = code_tokens(inputs.float()).real().to(inputs.dtype)
    return straight(inputs, made)


def round_range(inputs: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """What rounding all inputs by one range leaves of them; gradients pass straight through."""
    with torch.no_grad():
        made = code_range(inputs.float(), low, high).real().to(inputs.dtype)
    return straight(inputs, made)


def multiply(inputs: Inputs, matrix: Matrix, bias: Tensor | None) -> Tensor:
    """The product of whole numbers, made real at the end."""
    codes = inputs.codes.to(torch.int8).flatten(0, -2)
    product = torch._int_mm(codes, matrix.codes.t())
    if matrix.zero is not None:
        product -= codes.sum(-1, keepdim=True, dtype=torch.int32) * matrix.zero
    if inputs.zero is not None:
        product -= inputs.zero.int() * matrix.sums
    real = product.view(*inputs.codes.shape[:-1], -1) * matrix.scale
    return real.mul_(inputs.step) if bias is None else torch.addcmul(bias, real, inputs.step)


@cache
def are_exact() -> bool:
    """Whether this CPU multiplies 8-bit numbers without losing any; those without VNNI add up pairs in 16 bits."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch, "_int_mm"):
        return False  # without them the products exist, many times slower than real ones
    most = torch.full((64, 256), TOP, dtype=torch.int8)
    return all(bool((torch._int_mm(sign * most, most.t()) == sign * 256 * TOP**2).all()) for sign in (1, -1))
