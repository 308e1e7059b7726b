"""Error feedback (GPTQ, Frantar et al. 2022): round column by column, and let the columns to come make up for it.

For a layer with inputs x the Hessian of the squared error of its outputs is H = sum of x x^T. Rounding column i by an
error e then asks the later columns j to move by -e * U_ij / U_ii, with U^T U = H^-1 and U upper triangular.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smallbert.model.rounding import Grid, Scales, spread_both, to_codes, to_steps

BLOCK = 128  # columns whose corrections are applied together
DAMP = 0.01  # of the mean diagonal, added to the Hessian


def round_with_feedback(weight: Tensor, products: Tensor, scales: Scales, grid: Grid) -> Tensor:
    """The codes of a matrix (rows, columns), given the products x x^T of its inputs and the scales of its groups.

    A row that is nearer without feedback is rounded plainly, so that no row is worse for it on the inputs seen.
    """
    real = weight.detach().double()
    scale, zero = spread_both(scales, weight.shape, grid)
    wide = scale.double().expand(weight.shape)
    centre = None if zero is None else zero.double().expand(weight.shape)
    plain = to_codes(real, wide, centre, grid)
    moved, codes, upper = real.clone(), torch.empty_like(plain), _upper(products)
    for start in range(0, real.shape[1], BLOCK):
        stop = min(start + BLOCK, real.shape[1])
        errors = torch.zeros(len(real), stop - start, dtype=real.dtype, device=real.device)
        for place in range(start, stop):
            mine = None if centre is None else centre[:, place]
            code = to_codes(moved[:, place], wide[:, place], mine, grid)
            codes[:, place] = torch.where(real[:, place] == 0, plain[:, place], code)  # what is pruned stays so
            made = to_steps(codes[:, place], mine, grid, real.dtype) * wide[:, place]
            error = (moved[:, place] - made) / upper[place, place]
            moved[:, place + 1 : stop] -= error[:, None] * upper[place, None, place + 1 : stop]
            errors[:, place - start] = error
        moved[:, stop:] -= errors @ upper[start:stop, stop:]
    costs = [output_error(real, to_steps(some, centre, grid, real.dtype) * wide, products) for some in (codes, plain)]
    return torch.where((costs[0] < costs[1])[:, None], codes, plain)


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
