"""Masks over weight matrices, kept by score: the one parametrisation that every unstructured pruning method shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from smallbert.errors import UserError
from smallbert.model.anatomy import linears
from smallbert.model.encoder import Encoder
from smallbert.training.phase import Phase, Weights
from smallbert.training.thresholds import kth_largest

MASK_STAGE = 30


def maskable(encoder: Encoder) -> list[str]:
    """The weights that pruning may touch: the matrices of the layers; not biases, norms, embeddings or heads."""
    return [f"backbone.{name}.weight" for name, module in linears(encoder.backbone) if _is_plain(module)]


def _is_plain(module: nn.Module) -> bool:
    return isinstance(getattr(module, "weight", None), nn.Parameter)


class _Masked(torch.autograd.Function):
    """weight * (score >= threshold) for a stack of matrices, each one pass over memory each way on a GPU.

    The straight-through gradient of the scores is weight * G, G the gradient of the masked weight. All scores of a
    stack are one tensor, and their gradients are written side by side, never gathered.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, thresholds: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(scores, thresholds, *weights)
        if scores.is_cuda:
            from smallbert.training.kernels import mask_stack

            dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else weights[0].dtype
            made = mask_stack([weight.detach() for weight in weights], scores, thresholds, dtype)
            return tuple(row.view_as(weight) for row, weight in zip(made, weights, strict=True))
        rows = [row.view_as(weight) for row, weight in zip(scores, weights, strict=True)]
        return tuple(w * (row >= cut) for w, row, cut in zip(weights, rows, thresholds, strict=True))

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        scores, thresholds, *weights = ctx.saved_tensors
        scored = ctx.needs_input_grad[0]
        if scores.is_cuda:
            from smallbert.training.kernels import spread_stack

            rows, to_scores = spread_stack([one.contiguous() for one in slopes], weights, scores, thresholds, scored)
            to_weights = [row.view_as(weight) for row, weight in zip(rows, weights, strict=True)]
            return to_scores, None, *to_weights
        both = list(zip(slopes, weights, scores, thresholds, strict=True))
        to_weights = [slope * (row.view_as(weight) >= cut) for slope, weight, row, cut in both]
        to_scores = torch.stack([(slope * weight).flatten() for slope, weight, _, _ in both]) if scored else None
        return to_scores, None, *to_weights


class Stacks:
    """Matrices of like size side by side, so that all their thresholds are found at once.

    24 matrices of 3072 x 768 and 48 of 768 x 768  ->  two groups of names
    """

    def __init__(self, encoder: Encoder, names: list[str]):
        """Group weights by how many numbers they hold."""
        stored = dict(encoder.named_parameters())
        self.shapes = {name: stored[name].shape for name in names}
        groups: dict[int, list[str]] = {}
        for name in names:
            groups.setdefault(stored[name].numel(), []).append(name)
        self.groups = list(groups.values())

    def thresholds(self, scores: list[Tensor], keep: Tensor, scope: str) -> list[Tensor]:
        """Where to cut, for each group of stacked scores (matrices, numbers), so that a share `keep` stays.

        scope "local" keeps the share in every matrix, "global" over all of them together.
        """
        if scope == "global":
            flat = torch.cat([stack.flatten() for stack in scores])[None]
            cut = kth_largest(flat, _count(flat, keep))
            return [cut.expand(len(stack)) for stack in scores]
        return [kth_largest(stack, _count(stack, keep)) for stack in scores]


def _count(stack: Tensor, keep: Tensor) -> Tensor:
    """How many of each row stay: the share, rounded to a whole number, in double precision."""
    return (keep.double() * stack.shape[1]).round().long().expand(len(stack))


def mask_by_scores(
    phase: Phase, names: list[str], keep: Tensor, scope: str, score: Callable[[list[str], Weights], Tensor]
) -> None:
    """Let the model see only the weights with the highest scores; score(names, weights) stacks a group's scores."""
    if not names:
        raise UserError(
            f"there is no weight to prune: the layers of this {phase.encoder.family} model hold no real-valued matrix "
            "that pruning knows; prune before quantize, and a family that has such matrices"
        )
    stacks = Stacks(phase.encoder, names)

    def make(weights: Weights) -> Weights:
        scores = [score(group, weights) for group in stacks.groups]
        with torch.no_grad():
            cuts = stacks.thresholds([stack.detach() for stack in scores], keep, scope)
        masked: Weights = {}
        for group, stack, cut in zip(stacks.groups, scores, cuts, strict=True):
            seen = _Masked.apply(stack, cut.contiguous(), *(weights[name] for name in group))
            masked.update(zip(group, seen, strict=True))
        return masked

    phase.transform(names, make, MASK_STAGE)


def magnitudes(names: list[str], weights: Weights) -> Tensor:
    """The size of every weight, one matrix a row."""
    return torch.stack([weights[name].detach().abs().flatten() for name in names])


def settle_masks(phase: Phase, names: list[str]) -> None:
    """Hold the zeros that are now in the weights, and say how many weights are left, by both denominators."""
    phase.encoder.hold("zeros", [name.removesuffix(".weight") for name in names])
    stored = dict(phase.encoder.named_parameters())
    masked = sum(stored[name].numel() for name in names)
    left = sum(int(stored[name].count_nonzero()) for name in names)
    whole = sum(parameter.numel() for parameter in stored.values())
    phase.notes.append(
        f"{left / masked:.2%} of the {masked:,} layer weights are left, "
        f"{(whole - masked + left) / whole:.2%} of all {whole:,} parameters"
    )
