"""Whether an encoder's head answers a task, and in which order of classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from smallbert.errors import UserError
from smallbert.model.encoder import HEAD, PLAIN, Encoder
from smallbert.model.heads import same_labels

if TYPE_CHECKING:
    from smallbert.tasks import Task


def has_head_for(encoder: Encoder, task: Task) -> bool:
    """Whether the encoder's answers have the shape that this task wants."""
    if HEAD not in encoder.heads:
        return False
    head = encoder.head
    outputs = {"regress": 1, "answer": 2}.get(task.kind, len(task.labels))
    return head.kind == task.kind and head.out.out_features == outputs


def is_made_for(encoder: Encoder, task: Task) -> bool:
    """Whether the encoder's head has the very classes of this task, so that it can learn on, or teach, as it is."""
    return has_head_for(encoder, task) and same_labels(encoder.head.labels, task.labels)


def match_labels(encoder: Encoder, task: Task) -> Encoder:
    """The encoder with its head's classes in the order of the task's; refuses a head made for something else."""
    if not has_head_for(encoder, task):
        has = "it has no task head"
        if HEAD in encoder.heads:
            has = f"its head is for {' '.join([encoder.head.kind, ', '.join(encoder.head.labels[:6])]).strip()}"
        raise UserError(
            f"this model cannot be scored on {task.name} ({task.kind}): {has}; fine-tune it on the task first"
        )
    theirs, ours = [label.casefold() for label in encoder.head.labels], [label.casefold() for label in task.labels]
    if theirs == ours or sorted(theirs) != sorted(ours):
        return encoder  # classes without names, or with other ones, are taken to be in the task's order
    order, sorted_head = [theirs.index(label) for label in ours], encoder.copy()
    out = sorted_head.head.out
    with torch.no_grad():
        out.weight.copy_(out.weight[order])
        out.bias.copy_(out.bias[order])
    sorted_head.head.labels = list(task.labels)
    return sorted_head


def with_plain_head(encoder: Encoder) -> Encoder:
    """The encoder with the plain head, beside which its pooler learned, in the pooler's place."""
    plain = encoder.copy()
    plain.heads[HEAD] = plain.heads[PLAIN]
    return plain
