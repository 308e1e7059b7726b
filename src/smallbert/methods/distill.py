"""Distillation of logits: the student learns the teacher's softened scores beside the labels."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from smallbert.data import STUDENT, longest_input
from smallbert.errors import UserError
from smallbert.methods import Method
from smallbert.model.encoder import HEAD
from smallbert.model.heads import IGNORE, same_labels
from smallbert.model.words import need_word_head

TEACHER = "teacher"


class Distill(Method):
    """Learn from a teacher's scores: alpha * T^2 * KL(teacher || student) + (1 - alpha) * the task's own loss."""

    trains: ClassVar[bool] = True

    teacher: str = "latest"
    alpha: float = 0.9
    temperature: float = 2.0

    def check(self) -> None:
        """A share and a temperature."""
        if not 0 <= self.alpha <= 1 or self.temperature <= 0:
            raise UserError(
                f"distill: alpha is between 0 and 1 and temperature above 0, not {self.alpha} and {self.temperature}"
            )

    def attach(self, phase: Any) -> None:
        """Find the teacher; if it reads other tokens, let it have its own view of the texts."""
        teacher = phase.teacher(self.teacher)
        ours = phase.encoder.heads[phase.head]
        theirs = teacher.head if phase.head == HEAD else need_word_head(teacher, "the teacher")
        if theirs.kind != ours.kind or theirs.outputs != ours.outputs:
            raise UserError(f"the teacher's head ({theirs.kind}) does not fit the student's ({ours.kind})")
        if not same_labels(theirs.labels, ours.labels):
            raise UserError(
                f"the teacher's classes ({', '.join(theirs.labels)}) are not the student's ({', '.join(ours.labels)}), "
                "name by name and in that order; take a teacher that was trained on this task"
            )
        phase.add_view(TEACHER, teacher.tokenizer)
        reads, longest = (
            longest_input(teacher),
            max(phase.stream.views.get(TEACHER, phase.stream.views[STUDENT]).lengths),
        )
        if longest > reads:
            raise UserError(
                f"the teacher reads at most {reads} tokens, but a text of the task has {longest}; give --length {reads}"
            )

    def weights(self, phase: Any) -> dict[str, Any]:
        """The labels keep what the teacher leaves."""
        return {"task": 1 - self.alpha, "distill": self.alpha}

    def loss(self, step: Any) -> dict[str, Tensor]:
        """The teacher looks at the same texts, in evaluation mode, without gradients."""
        teacher, batch = step.phase.teacher(self.teacher), step.batch_for(TEACHER)
        with torch.no_grad():
            scores = teacher(batch, step.phase.head)
        kind = teacher.heads[step.phase.head].kind
        return {"distill": step.mean(divergence(kind, step.scores, scores, step, self.temperature))}


def divergence(kind: str, student: Tensor, teacher: Tensor, step: Any, temperature: float) -> Tensor:
    """How far each sequence's (or token's) scores are from the teacher's; zero when they are equal."""
    student, teacher, batch = student.float(), teacher.float(), step.batch
    if kind == "regress":
        each = (student - teacher).squeeze(-1) ** 2
    elif kind == "classify":
        each = _kl(student, teacher, temperature)
    elif kind in ("tag", "words"):
        each = _kl(student.flatten(0, -2), teacher.flatten(0, -2), temperature)
        return each * (batch.labels.flatten() != IGNORE) * batch.labelled_tokens()
    else:
        ours, theirs = ([batch.rows(scores[..., side], -1e4) for side in (0, 1)] for scores in (student, teacher))
        each = (_kl(ours[0], theirs[0], temperature) + _kl(ours[1], theirs[1], temperature)) / 2
    return each if batch.present is None else each * batch.present


def _kl(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    ours, theirs = (functional.log_softmax(scores / temperature, -1) for scores in (student, teacher))
    return (theirs.exp() * (theirs - ours)).sum(-1) * temperature**2
