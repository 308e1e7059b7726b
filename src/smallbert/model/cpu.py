"""Products and dropout on CPUs that torch's own library, MKL, is slow on: those of other makers than Intel.

There MKL multiplies without AVX-512 and torch draws each number of a dropout mask by itself. oneDNN, which comes with
torch too, multiplies twice as fast; and one draw of 64 bits does for four numbers of a mask.
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

from smallbert.machine.facts import made_by_intel

LEAST = 2**21  # multiplications from which on oneDNN is faster, though it has to be asked for each shape
LEVELS = 2**16  # in how many steps a probability is drawn
PRODUCT = getattr(torch.ops.mkldnn, "_linear_pointwise", None)  # oneDNN's, which not every build of torch has


@cache
def pays() -> bool:
    """Whether this is such a CPU, and oneDNN knows it."""
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and PRODUCT is not None
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and not made_by_intel()
    )


def faster(tensor: Tensor) -> AbstractContextManager[Any]:
    """While it lasts, modules that run where the tensor is multiply and drop out in the fastest way we know there."""
    return _Faster() if tensor.device.type == "cpu" and pays() and not torch.compiler.is_compiling() else nullcontext()


class _Faster(TorchFunctionMode):
    """Takes two of torch's functions over, and lets all others pass."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = _INSTEAD.get(function)
        return (known or function)(*args, **(kwargs or {}))


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """inputs @ weight.T + bias, like torch's."""
    real = inputs.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    if not real or inputs.dim() < 2 or inputs.numel() * weight.shape[0] < LEAST or inputs.device.type != "cpu":
        return functional.linear(inputs, weight, bias)
    learns = torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in (inputs, weight, bias))
    return _Linear.apply(inputs, weight, bias) if learns else _multiply(inputs, weight, bias)


class _Linear(torch.autograd.Function):
    """The product with its gradients, which are such products themselves and so have gradients too."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return _multiply(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        inputs, weight = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        to_inputs, to_weight, to_bias = ctx.needs_input_grad
        flat = gradient.flatten(0, -2)
        return (
            linear(gradient, weight.t()) if to_inputs else None,
            linear(flat.t(), inputs.flatten(0, -2).t()) if to_weight else None,
            flat.sum(0) if to_bias else None,
        )


def _multiply(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    assert PRODUCT is not None
    found: Tensor = PRODUCT(inputs, weight, bias, "none", [], "")
    return found


def dropout(inputs: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Zero each number with probability p, in steps of 1 / 65,536, and scale the others up, like torch's."""
    kept = round((1 - p) * LEVELS)
    if not training or inplace or not 0 < kept < LEVELS or inputs.device.type != "cpu":
        return functional.dropout(inputs, p, training, inplace)
    drawn = torch.empty(-(-inputs.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    mask = drawn.view(torch.int16)[: inputs.numel()].view(inputs.shape) < kept - LEVELS // 2
    return (inputs * mask).mul_(LEVELS / kept)


_INSTEAD: dict[Any, Callable[..., Tensor]] = {functional.linear: linear, functional.dropout: dropout}
