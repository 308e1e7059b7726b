"""What the tests of pruning share: a small task, settings of a few steps, and how to look at masks."""

from functools import lru_cache
from typing import Any

import torch
from toys import batch_of, run, small, toy_task

from smallbert.training.masks import Stacks

TASK = toy_task("classify", 24)
WHOLE = "train(epochs=4, batch=24, lr=0.003, warmup=0.0, dropout=0.0)"  # four steps of one batch that holds everything
SIX = "train(epochs=2, batch=8, lr=0.003)"  # six steps
CURVED = "second_order(0.3, events=3, gradients=6, block=10, examples=4, damp=1e-4)"
WORDS = "backbone.embeddings.word_embeddings.weight"


@lru_cache
def fresh_encoder() -> Any:
    """A tiny encoder with a head for the task."""
    return run("head", small(), TASK).encoder


@lru_cache
def trained_encoder() -> Any:
    """The same after nine steps."""
    return run("train(epochs=3, batch=8, lr=0.003)", fresh_encoder(), TASK, judge=False).encoder


def everything(encoder: Any) -> dict[str, Any]:
    """All training examples as one batch."""
    return {"student": batch_of(encoder, TASK, range(24), "train")}


def by_name(phase: Any, label: str, names: list[str]) -> dict[str, torch.Tensor]:
    """The scores of each weight, in its shape."""
    return Stacks(phase.encoder, names).rows([stack.detach() for stack in phase.modules[label]])


def left(encoder: Any, names: list[str]) -> dict[str, int]:
    """How many numbers of each weight are not zero."""
    return {name: int(encoder.get_parameter(name).count_nonzero()) for name in names}


def density(encoder: Any, names: list[str]) -> float:
    """The share of these weights that is not zero."""
    return sum(left(encoder, names).values()) / sum(encoder.get_parameter(name).numel() for name in names)


def largest(weight: torch.Tensor, keep: float) -> torch.Tensor:
    """A mask over the largest numbers, found by sorting."""
    order = weight.detach().abs().flatten().argsort(descending=True, stable=True)
    mask = torch.zeros(weight.numel(), dtype=torch.bool)
    mask[order[: round(keep * weight.numel())]] = True
    return mask.view_as(weight)
