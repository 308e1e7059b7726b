"""How sharply the loss bends along the weights of each layer: the top eigenvalue of the Hessian, by power iteration."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from smallbert.model.batch import Batch
from smallbert.model.encoder import Encoder
from smallbert.model.heads import losses
from smallbert.progress import tell

ENOUGH = 1e-2  # an eigenvalue that moves by less than this share of itself has been found


def top_eigenvalue(slopes: Sequence[Tensor], weights: Sequence[Tensor], rounds: int, draw: torch.Generator) -> float:
    """The eigenvalue of largest size of the Hessian over some weights, given the slopes of a loss, with their graph."""
    way = [torch.randn(one.shape, generator=draw).to(one.device) for one in weights]
    way, found = _unit(way)[0], float("inf")
    for _ in range(rounds):
        bent = torch.autograd.grad(slopes, weights, way, retain_graph=True)
        value = float(torch.stack([(a * b).sum() for a, b in zip(way, bent, strict=True)]).sum())
        if abs(value - found) <= ENOUGH * abs(value):
            return value
        (way, size), found = _unit(bent), value
        if size == 0:
            break
    return found


def _unit(vector: Sequence[Tensor]) -> tuple[list[Tensor], float]:
    size = float(torch.stack([one.square().sum() for one in vector]).sum().sqrt())
    return [one / max(size, 1e-30) for one in vector], size


def layer_curvatures(
    encoder: Encoder, groups: list[list[str]], batches: list[Batch], rounds: int, seed: int
) -> list[list[float]]:
    """For each group of weights, the top eigenvalue on each batch: [[0.8, 1.1], [0.2, 0.3], …]."""
    encoder, draw = encoder.copy().eval(), torch.Generator().manual_seed(seed)
    weights: list[list[nn.Parameter]] = [[encoder.get_parameter(name) for name in group] for group in groups]
    found: list[list[float]] = [[] for _ in groups]
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # the fused kernels can be derived once only
        for number, batch in enumerate(batches):
            loss = losses(encoder.head, encoder(batch), batch).mean()
            flat = [one for group in weights for one in group]
            slopes = iter(torch.autograd.grad(loss, flat, create_graph=True))
            for place, group in enumerate(weights):
                mine = [next(slopes) for _ in group]
                found[place].append(top_eigenvalue(mine, group, rounds, draw))
                tell("curvature", number * len(groups) + place + 1, len(batches) * len(groups))
    return found
