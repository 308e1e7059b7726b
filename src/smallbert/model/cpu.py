"""What CPUs do faster than in torch's own way: products in float32, and draws for dropout.

torch multiplies by MKL, which is not at its best on CPUs that Intel did not make; oneDNN comes with torch too. And it
draws each number of a mask by itself there, where one draw of 64 bits does for four.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from smallbert.machine.facts import cpu_maker

WIDE = 26  # the family of AMD's CPUs (Zen 5) from which on 512 bits are computed at once, and not half after half
LEAST = 2**21  # multiplications from which on it pays to ask oneDNN, which looks each shape up
LEVELS = 2**16  # in how many steps a probability is drawn
PRODUCT = getattr(torch.ops.mkldnn, "_linear_pointwise", None)  # oneDNN's, which not every build of torch has


def faster(tensor: Tensor) -> AbstractContextManager[Any]:
    """While it lasts, modules that run where the tensor is multiply and drop out in the fastest way we know there."""
    if torch.compiler.is_compiling() or tensor.device.type != "cpu" or not (instead := _instead()):
        return nullcontext()
    return _Faster(instead)


def draws(tensor: Tensor) -> bool:
    """Whether dropout masks are drawn in our way where the tensor is."""
    return not torch.compiler.is_compiling() and tensor.device.type == "cpu" and functional.dropout in _instead()


@cache
def _instead() -> dict[Any, Callable[..., Tensor]]:
    """Functions of torch, and what does the same sooner on this CPU."""
    (maker, family), mkl = cpu_maker(), torch.backends.mkl.is_available()
    wide = family >= WIDE and torch.backends.cpu.get_cpu_capability() == "AVX512"
    found: dict[Any, Callable[..., Tensor]] = {}
    if mkl and "Intel" not in maker:
        found[functional.dropout] = dropout
    if mkl and "AMD" in maker and wide and torch.backends.mkldnn.is_available() and PRODUCT is not None:
        found[functional.linear] = linear
    return found


class _Faster(TorchFunctionMode):
    """Takes some of torch's functions over, and lets all others pass."""

    def __init__(self, instead: dict[Any, Callable[..., Tensor]]):
        super().__init__()
        self.instead = instead

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.instead.get(function, function)(*args, **(kwargs or {}))


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """input @ weight.T + bias, as torch gives it, its arguments named alike."""
    small = input.dim() < 2 or weight.dim() != 2 or input.numel() * weight.shape[0] < LEAST
    if small or torch.is_autocast_enabled("cpu") or not all(_is_real(one) for one in (input, weight, bias)):
        return functional.linear(input, weight, bias)
    rows = input.flatten(0, -2)
    learns = torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in (rows, weight, bias))
    product = _Linear.apply(rows, weight, bias) if learns else _multiply(rows, weight, bias)
    return product.view(*input.shape[:-1], weight.shape[0])


def _is_real(tensor: Tensor | None) -> bool:
    return tensor is None or (tensor.dtype == torch.float32 and tensor.device.type == "cpu")


class _Linear(torch.autograd.Function):
    """The product with its gradients, which are such products themselves and so have gradients too."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        to_rows, to_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(rows if to_weight else None, weight if to_rows else None)
        return _multiply(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        gradient = gradients[0].contiguous()  # oneDNN is slow with numbers that lie in neither order
        return (
            None if weight is None else linear(gradient, weight.t()),
            None if rows is None else linear(gradient.t(), rows.contiguous().t()),
            gradient.sum(0) if ctx.needs_input_grad[2] else None,
        )


def _multiply(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    assert PRODUCT is not None
    found: Tensor = PRODUCT(rows, weight, bias, "none", [], "")
    return found


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Zero each number with probability p, in steps of 1 / 65,536, and scale the others up; in place torch does it."""
    kept = round((1 - p) * LEVELS)
    if not training or inplace or not 0 < kept < LEVELS or input.device.type != "cpu":
        return functional.dropout(input, p, training, inplace)
    drawn = torch.empty(-(-input.numel() // 4), dtype=torch.int64, device="cpu").random_(-(2**63), None)
    mask = drawn.view(torch.int16)[: input.numel()].view(input.shape) < kept - LEVELS // 2
    return (input * mask).mul_(LEVELS / kept)
