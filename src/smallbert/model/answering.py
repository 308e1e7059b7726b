"""Whether an encoder's head answers a task, and in which order of classes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from smallbert.errors import UserError
from smallbert.model.encoder import HEAD, PLAIN, Encoder
from smallbert.model.heads import plain_names, same_labels

if TYPE_CHECKING:
    from smallbert.tasks import Task

NAMED = 6  # as many classes are named in a sentence
TRUTH = {"false": "0", "true": "1"}


def has_head_for(encoder: Encoder, task: Task) -> bool:
    """Whether the encoder's answers have the shape that this task wants."""
    return HEAD in encoder.heads and _answers(encoder.head, task)


def _answers(head: Any, task: Task) -> bool:
    outputs = {"regress": 1, "answer": 2}.get(task.kind, len(task.labels))
    return head.kind == task.kind and head.outputs == outputs


def check_head(head: Any, task: Task, name: str = "this model") -> None:
    """Refuse no head, or one that was made for something else; any thing with a kind, outputs and labels will do."""
    if head is not None and _answers(head, task):
        return
    has = "it has no task head"
    if head is not None and head.kind is not None:
        has = f"its head is for {in_words(head)}"
    raise UserError(f"{name} cannot be scored on {task.name} ({task.kind}): {has}; fine-tune it on the task first")


def in_words(head: Any) -> str:
    """What a head answers: classify bad, good."""
    return f"{head.kind} {', '.join(head.labels[:NAMED])}".strip()


def order_labels(labels: Sequence[str], task: Task, name: str = "this model") -> list[int] | None:
    """Where each class of the task stands in a head; None where they are in the task's order.

    Classes without names, on either side, are taken to be in that order; names of other classes are refused.
    """
    theirs, ours = plain_names(labels), plain_names(task.labels)
    if sorted(theirs) == sorted(ours):
        return None if theirs == ours else [theirs.index(label) for label in ours]
    numbers = [_numbers(names) for names in (labels, task.labels)]
    if sorted(numbers[0]) == sorted(numbers[1]) != []:
        return [numbers[0].index(number) for number in numbers[1]] if numbers[0] != numbers[1] else None
    if any(found and found == sorted(found) for found in numbers):
        return None
    raise UserError(
        f"{name} has classes named {_only_in(labels, task.labels)} where {task.name} has "
        f"{_only_in(task.labels, labels)}, and nothing says which is which; give them the same names in the data, or "
        "correct id2label in the model's config.json (labels in its encoder.json), or fine-tune it on the task"
    )


def _numbers(labels: Sequence[str]) -> list[float]:
    """What names say that are nothing but numbers, as LABEL_0 and LABEL_1, or 1 and 2; [] of others.

    False and True are 0 and 1.
    """
    plain = [TRUTH.get(label.strip().casefold(), label.strip().casefold()) for label in labels]
    found = [re.fullmatch(r"(?:label[\W_]*)?(-?\d+(?:\.0*)?)", label) for label in plain]
    return [float(each[1]) for each in found if each] if all(found) else []


def _only_in(labels: Sequence[str], others: Sequence[str]) -> str:
    """The first few of the names that others have not."""
    known = plain_names(others)
    own = [label for label, plain in zip(labels, plain_names(labels), strict=True) if plain not in known] or labels
    return ", ".join(own[:NAMED]) + (", …" if len(own) > NAMED else "")


def is_made_for(encoder: Encoder, task: Task) -> bool:
    """Whether the encoder's head has the very classes of this task, so that it can learn on, or teach, as it is."""
    return has_head_for(encoder, task) and same_labels(encoder.head.labels, task.labels)


def answers_as_it_is(encoder: Encoder, task: Task) -> bool:
    """Whether the encoder can be scored on the task without a new head, its classes' order being the task's."""
    try:
        return has_head_for(encoder, task) and order_labels(encoder.head.labels, task) is None
    except UserError:
        return False


def in_order_of(encoder: Encoder, task: Task | None) -> Encoder:
    """The encoder with its head's classes in the order of the task's, where they are the same; else as it is."""
    try:
        return encoder if task is None else match_labels(encoder, task)
    except UserError:  # it has no head for the task, or one for other classes
        return encoder


def match_labels(encoder: Encoder, task: Task) -> Encoder:
    """The encoder with its head's classes in the order of the task's; refuses a head made for something else."""
    check_head(encoder.head if HEAD in encoder.heads else None, task)
    order = order_labels(encoder.head.labels, task)
    if order is None:
        return encoder
    sorted_head = encoder.copy()
    out = sorted_head.head.out
    with torch.no_grad():
        out.weight.copy_(out.weight[order])
        out.bias.copy_(out.bias[order])
    sorted_head.head.labels = list(task.labels)
    plans = [entry["plan"] for entry in sorted_head.history if "labels" in entry["plan"]]
    if plans:  # a folder's head is made again by what its plan says
        plans[-1]["labels"] = list(task.labels)
    return sorted_head


def note_pairs(encoder: Encoder, task: Task) -> None:
    """Write into the history that the head has just learned from pairs of texts, or from texts alone.

    It is no part of a plan, since it changes nothing of what the encoder says.
    """
    encoder.history[-1]["pairs"] = task.split("train").pairs is not None


def learned_pairs(encoder: Encoder) -> bool | None:
    """Whether the head learned from pairs of texts when it last learned something; None where nobody knows."""
    for entry in reversed(encoder.history):
        if "pairs" in entry:
            return bool(entry["pairs"])
        if "labels" in entry["plan"]:  # a new head
            return None
    return None


def note_names(labels: Sequence[str], task: Task) -> list[str]:
    """A note where classes are matched by their places alone, though they have names."""
    if same_labels(labels, task.labels):
        return []
    return [f"the head's classes {', '.join(labels)} are read as {', '.join(task.labels)}"]


def with_plain_head(encoder: Encoder) -> Encoder:
    """The encoder with the plain head, beside which its pooler learned, in the pooler's place."""
    plain = encoder.copy()
    plain.heads[HEAD] = plain.heads[PLAIN]
    return plain
