"""Whether what two models make of the same tokens can be compared; if not, a sentence says what to write instead."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from smallbert.errors import UserError
from smallbert.model.anatomy import layers, part
from smallbert.model.encoder import Encoder
from smallbert.model.replace import head_count
from smallbert.training.pairs import Pairs
from smallbert.training.teachers import same_tokens


def check_has_layers(model: Encoder) -> None:
    """Refuse a model that is no stack of layers."""
    if not model.order:
        raise UserError(
            f"align: a model of type {model.family!r} has no layers to compare; write align('hidden', "
            "layers={-1: -1}, transform='linear') to compare the last hidden states of both models"
        )


def check_inside(model: Encoder, what: str, roles: str) -> None:
    """Refuse layers without these parts, and layers that see other tokens than the batch has."""
    if model.stride is not None:
        raise UserError(f"align: layers with a stride read joined tokens, so {what!r} cannot be compared, 'hidden' can")
    for role in roles:
        part(model.backbone, layers(model.backbone)[0], role)


def check_tokens(student: Encoder, teacher: Encoder) -> None:
    """Refuse two models that cut texts into other tokens."""
    if not same_tokens(teacher.tokenizer, student.tokenizer):
        raise UserError(
            "align compares token by token, but the teacher tokenises differently from the student; "
            "take a teacher with the student's tokenizer, or use distill; trim_vocabulary belongs before the "
            "teacher's training, or at the end"
        )


def check_widths(student: Encoder, teacher: Encoder) -> None:
    """Refuse vectors of other lengths."""
    if student.width != teacher.width:
        raise UserError(
            f"align: the student's hidden states are {student.width} wide and the teacher's {teacher.width}; write "
            "transform='linear', or compare what='relations'"
        )


def check_heads(student: Encoder, teacher: Encoder) -> None:
    """Refuse attention of other numbers of heads."""
    if (mine := head_count(student)) != (theirs := head_count(teacher)):
        raise UserError(
            f"align: the student attends with {mine} heads and the teacher with {theirs}; compare "
            "what='relations', which splits both alike"
        )


def check_parts(models: Iterable[Encoder], roles: str, heads: int) -> None:
    """Refuse queries, keys and values that do not fall into so many equal parts."""
    for model in models:
        for role in roles:
            found = part(model.backbone, layers(model.backbone)[0], role)
            width = getattr(found.module, "out_features", 0) // found.blocks
            if width % heads:
                raise UserError(
                    f"align: relations in {heads} parts need widths that {heads} divides, and one is {width}"
                )


def check_windows(student: Encoder, teacher: Encoder, pairs: Pairs, longest: int, metric: str) -> None:
    """Of what the student cannot look at it can never say how much the teacher does."""
    for mine, its in pairs:
        near, far = _window(student, mine) or longest, _window(teacher, its) or longest
        if near < min(far, longest):
            raise UserError(
                f"align: the teacher's layer {its} attends further than the {near - 1} tokens that the student's layer "
                f"{mine} sees, so {metric} is infinite; pair layers with the same reach, or write metric='mse'"
            )


def _window(model: Encoder, layer: int) -> int | None:
    """A token sees others less than this far away in a layer; None: all."""
    modules: Any = layers(model.backbone)[model.order[layer - 1]].modules()
    return next(filter(None, (getattr(one, "sliding_window", None) for one in modules)), None)
