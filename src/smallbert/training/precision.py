"""Half precision while training: each weight is rounded once a step, all of them together, and computed with as it is.

Autocast would round each weight and each hidden state wherever one is used, a kernel each time; for small models those
kernels are a third of a step. The weights that the optimiser keeps, and their gradients there, are in full precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from smallbert.model.encoder import Encoder
from smallbert.model.quantised import StoredEmbedding

HALF = torch.bfloat16


class _Rounded(torch.autograd.Function):
    """Many tensors as bfloat16 in a few launches; their gradients come back in the precision of the originals."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(_copy(tensors, HALF))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        there = [gradient for gradient in gradients if gradient is not None]
        whole = iter(_copy(there, torch.float32))
        return tuple(None if gradient is None else next(whole) for gradient in gradients)


def _copy(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    made = [torch.empty_like(tensor, dtype=dtype, memory_format=torch.contiguous_format) for tensor in tensors]
    if made:
        torch._foreach_copy_(made, list(tensors))
    return made


def round_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights that are in single precision as bfloat16, by the same names; the others as they are."""
    made = dict(weights)
    for trained in (True, False):  # apart, or what is frozen would be given a gradient too
        names = [n for n, w in weights.items() if w.dtype == torch.float32 and w.requires_grad == trained]
        if names:
            made.update(zip(names, _Rounded.apply(*(weights[name] for name in names)), strict=True))
    return made


def exact_parameters(encoder: Encoder) -> set[nn.Parameter]:
    """What is never rounded: what learns at a rate of its own (a mixture's few scalars) is worth its full precision."""
    return {one for module in encoder.modules() if hasattr(module, "own_rate") for one in module.parameters()}


def tables(encoder: Encoder) -> list[StoredEmbedding]:
    """Word tables in few bits, which are told in which precision to give their rows."""
    return [module for module in encoder.modules() if isinstance(module, StoredEmbedding)]


def rounded_copy(encoder: Encoder) -> Encoder:
    """A copy that is never trained, with weights that need not be rounded again at every look."""
    made = encoder.copy()
    exact = exact_parameters(made)
    for parameter in made.parameters():
        if parameter.dtype == torch.float32 and parameter not in exact:
            parameter.data = parameter.data.to(HALF)
    for table in tables(made):
        table.seen_as = HALF
    return made
