"""Error feedback (GPTQ, Frantar et al. 2022): round column by column, and let the columns to come make up for it.

For a layer with inputs x the Hessian of the squared error of its outputs is H = sum of x x^T. Rounding column i by an
error e then asks the later columns j to move by -e * U_ij / U_ii, with U^T U = H^-1 and U upper triangular. Columns
whose inputs are largest come first, while there are most others left to make up for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from smallbert.model.rounding import Grid, Scales, spread_both, to_codes, to_steps

BLOCK = 128  # columns whose corrections are applied together
DAMP = 0.01  # of the mean diagonal, added to the Hessian


class Coding(NamedTuple):
    """How numbers of a matrix become codes and come back; both are told which columns they are in.

    `free` numbers (rows, columns) are stored as they are beside the codes, so that they take corrections whole.
    """

    encode: Callable[[Tensor, Any], Tensor]
    decode: Callable[[Tensor, Any], Tensor]
    free: Tensor | None = None

    def make(self, values: Tensor, columns: Any, fixed: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The codes of some columns, and the numbers they stand for; where `fixed` has a code, that one is taken."""
        codes = self.encode(values, columns)
        codes = codes if fixed is None else torch.where(fixed >= 0, fixed, codes.long()).to(codes.dtype)
        made = self.decode(codes, columns)
        return codes, made if self.free is None else torch.where(self.free[:, columns], values, made)


def code_on(grid: Grid, scales: Scales, shape: torch.Size) -> Coding:
    """Codes on a grid, given the scales of its groups."""
    scale, zero = spread_both(scales, shape, grid)
    wide = scale.double().expand(shape)
    centre = None if zero is None else zero.double().expand(shape)

    def middle(columns: Any) -> Tensor | None:
        return None if centre is None else centre[:, columns]

    return Coding(
        lambda values, columns: to_codes(values, wide[:, columns], middle(columns), grid),
        lambda codes, columns: to_steps(codes, middle(columns), grid, wide.dtype) * wide[:, columns],
    )


def round_with_feedback(weight: Tensor, products: Tensor, coding: Coding) -> tuple[Tensor, Tensor]:
    """Codes of a matrix (rows, columns), and what they stand for, given the products x x^T of its inputs.

    A row that is nearer without feedback is rounded plainly, so that no row is worse for it on the inputs seen.
    """
    real = weight.detach().double()
    plain, plain_made = coding.make(real, slice(None))
    order = products.diagonal().argsort(descending=True, stable=True)
    upper = _upper(products[order][:, order])
    moved, codes, made = real[:, order], torch.empty_like(plain), torch.empty_like(real)
    pruned = torch.where(real == 0, plain.long(), -1)  # what is pruned stays so
    columns = order.tolist()
    for start in range(0, len(columns), BLOCK):
        stop = min(start + BLOCK, len(columns))
        errors = torch.zeros(len(real), stop - start, dtype=real.dtype, device=real.device)
        for place in range(start, stop):
            column = columns[place]
            codes[:, column], made[:, column] = coding.make(moved[:, place], column, pruned[:, column])
            error = (moved[:, place] - made[:, column]) / upper[place, place]
            moved[:, place + 1 : stop] -= error[:, None] * upper[place, None, place + 1 : stop]
            errors[:, place - start] = error
        moved[:, stop:] -= errors @ upper[start:stop, stop:]
    better = (output_error(real, made, products) < output_error(real, plain_made, products))[:, None]
    return torch.where(better, codes, plain), torch.where(better, made, plain_made)


def output_error(weight: Tensor, made: Tensor, products: Tensor) -> Tensor:
    """How far the outputs of each row are off on the inputs seen, squared and summed: (rows,)."""
    error = made.double() - weight.double()
    return (error @ products * error).sum(1)


def _upper(products: Tensor) -> Tensor:
    """U with U^T U = H^-1; an input that was never seen neither gets nor gives corrections."""
    hessian, diagonal = products.clone(), products.diagonal()
    dead = diagonal == 0
    hessian.diagonal().add_(DAMP * diagonal.mean().clamp(min=1e-12) + dead.double())
    return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(hessian)), upper=True)
