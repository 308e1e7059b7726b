"""Distillation of logits: the student learns the teacher's softened scores beside the labels.

A tagging teacher may split words into other pieces: first pieces are compared, word by word.
"""

from collections.abc import Callable, Collection
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from smallbert.errors import UserError
from smallbert.methods import Method
from smallbert.model.batch import Batch
from smallbert.model.encoder import HEAD, Encoder
from smallbert.model.heads import IGNORE, same_labels
from smallbert.model.words import WORDS, check_word_head, need_word_head
from smallbert.sources import folder_read
from smallbert.texts.data import STUDENT
from smallbert.training.alignment import Side, ce, kl
from smallbert.training.schedule import Schedule
from smallbert.training.teachers import NOT_SPANS, same_tokens, view_of
from smallbert.training.trusted import check_trust


class Distill(Method):
    """Learn from a teacher's scores: alpha * T^2 * KL(teacher || student) + (1 - alpha) * the task's own loss.

    teacher: who teaches: 'latest' (the last encoder trained on the task without a teacher; before one, the given model
        if it was made for the task), a name given by mark(), a model folder, or a name on the hub
    alpha: weight of the teacher's term; the labels get the rest. Of n teachers in one phase each gets its alpha / n.
    temperature: T, by which scores are divided before the softmax; higher gives more weight to the less likely classes
    metric: how scores are compared: 'kl', T^2 KL(teacher || student) of softmaxes; 'ce', the same with the teacher's
        entropy added; 'mse', mean squared difference, without T, which regressions always use
    length: most tokens of a text that the teacher reads, as --length is for the student; None: as many as the student
    schedule: alpha over time: 'constant'; 'fade_in' from 0, 'fade_out' to 0, linearly; the labels get the rest at
        every step
    share: share of the phase's steps, from its beginning, in which alpha fades in or out
    """

    trains: ClassVar[bool] = True
    teaches: ClassVar[bool] = True

    teacher: str = "latest"
    alpha: float = 0.9
    temperature: float = 2.0
    metric: Literal["kl", "ce", "mse"] = "kl"
    length: int | None = None
    schedule: Literal["constant", "fade_in", "fade_out"] = "constant"
    share: float = 1.0

    def check(self) -> None:
        """Shares and a temperature."""
        for name in ("alpha", "share"):
            if not 0 < getattr(self, name) <= 1:
                raise UserError(f"distill: {name} must be above 0 and at most 1, not {getattr(self, name)}")
        if self.temperature <= 0:
            raise UserError(f"distill: temperature must be above 0, not {self.temperature}")
        if self.schedule == "constant" and self.share != 1:
            raise UserError(f"distill: share={self.share} is for a schedule; write one, such as schedule='fade_in'")
        if self.length is not None and self.length < 8:
            raise UserError(
                f"distill: length is how many tokens of a text the teacher reads, 8 or more, not {self.length}"
            )

    def reads(self, marks: Collection[str] = ()) -> str:
        """A teacher in a folder."""
        return folder_read(self.teacher, marks)

    def fits(self, phase: Any, steps: int | None) -> None:
        """There is a teacher, who answers in the student's terms and reads the same tokens for all who learn of it."""
        phase.name_of(self)
        if self.metric == "mse" and self.temperature != type(self).temperature:
            raise UserError(
                f"distill: temperature={self.temperature:g} has no effect with metric='mse', which compares raw "
                "scores; leave it out, or take metric='kl'"
            )
        teacher, kind = phase.teachers.expect(self.teacher), phase.task and phase.task.kind
        if any(method.guesses for method in phase.methods):
            if teacher is not None:
                check_word_head(teacher, "the teacher")
        else:
            if teacher is not None and HEAD in phase.encoder.heads:
                _check_heads(teacher, phase.encoder.head, self.teacher)
            if kind == "answer" and teacher is not None and not same_tokens(teacher.tokenizer, phase.encoder.tokenizer):
                raise UserError(NOT_SPANS)
            if kind == "answer" and self.length is not None:
                raise UserError("distill: a teacher that reads more of a text can teach texts and words, not spans")
        for other in phase.methods:
            if other.name == self.name and (other.schedule, other.share) != (self.schedule, self.share):
                raise UserError("distill: teachers of one phase fade together; give all the same schedule and share")
        for other in phase.methods if self.length is not None else ():
            if other.teaches and other.teacher == self.teacher and getattr(other, "length", None) != self.length:
                raise UserError(
                    f"distill(length={self.length}) gives the teacher other tokens than the student, but "
                    f"{other.name} compares both on the same ones; put them into separate phases"
                )

    def attach(self, phase: Any) -> None:
        """Find the teacher, and see what it makes of some rows."""
        teacher = phase.teacher(self.teacher)
        if phase.head == WORDS:
            need_word_head(teacher, "the teacher")
        if self.length is not None and phase.stream is not None:
            self._add_view(phase, teacher.tokenizer)
        phase.teachers.ask(self.teacher, scores=True)
        alike = [one for one in phase.methods if one.name == self.name and one.teacher == self.teacher]
        if phase.head != WORDS and alike[0] == self:  # two terms of one teacher need only one look
            check_trust(phase, self.teacher)

    def _add_view(self, phase: Any, tokenizer: Any) -> None:
        """Let the teacher read the same texts, cut elsewhere."""
        phase.stream.views[view_of(self.teacher)] = phase.tokenise(tokenizer, length=self.length).views[STUDENT]

    def weights(self, phase: Any) -> dict[str, Any]:
        """The labels keep what the teachers leave; several teachers have an equal say."""
        all_of_us = [method for method in phase.methods if method.name == self.name]
        labels = 1 - sum(method.alpha for method in all_of_us) / len(all_of_us)
        mine = {phase.name_of(self): self._dial(0.0, self.alpha / len(all_of_us))}
        return {"task": self._dial(1.0, labels), **mine} if all_of_us[0] == self else mine

    def _dial(self, without: float, taught: float) -> float | Schedule:
        """A weight that is the one without a teacher and the one with it, or on its way between them."""
        if self.schedule == "constant":
            return taught
        ends = (without, taught) if self.schedule == "fade_in" else (taught, without)
        return Schedule(*ends, finish=self.share)

    def loss(self, step: Any) -> dict[str, Tensor]:
        """The teacher looks at the same texts, in evaluation mode, without gradients."""
        phase, scores = step.phase, step.taught(self.teacher).scores
        kind, counts, theirs = phase.encoder.heads[phase.head].kind, None, step.batch_for(self.teacher)
        if kind == "tag" and theirs is not step.batch:
            scores, counts = by_words(scores, theirs, step.batch)
        each = divergence(kind, step.scores, scores, step, self.temperature, self.metric)
        return {phase.name_of(self): step.mean(each if counts is None else each * counts.flatten())}


def _check_heads(teacher: Encoder, ours: Any, name: str) -> None:
    """Refuse a teacher that answers something else."""
    if HEAD not in teacher.heads:
        raise UserError(f"the teacher {name!r} has no head for a task; take one that was trained on this task")
    theirs = teacher.head
    if theirs.kind != ours.kind or theirs.outputs != ours.outputs:
        said = [f"{one.kind}{f' with {one.outputs} classes' if one.labels else ''}" for one in (theirs, ours)]
        raise UserError(
            f"the teacher's head is for {said[0]}, the student's for {said[1]}; take a teacher trained on this task"
        )
    if not same_labels(theirs.labels, ours.labels):
        raise UserError(
            f"the teacher's classes ({', '.join(theirs.labels)}) are not the student's ({', '.join(ours.labels)}), "
            "name by name and in that order; take a teacher that was trained on this task"
        )


def divergence(
    kind: str, student: Tensor, teacher: Tensor, step: Any, temperature: float, metric: str = "kl"
) -> Tensor:
    """How far each sequence's (or token's) scores are from the teacher's; zero when they are equal (but for "ce")."""
    student, teacher, batch, measure = student.float(), teacher.float(), step.batch, METRICS[metric]
    if kind == "regress":
        each = (student - teacher).squeeze(-1) ** 2
    elif kind == "classify":
        each = measure(student, teacher, temperature)
    elif kind in ("tag", "words"):
        each = measure(student.flatten(0, -2), teacher.flatten(0, -2), temperature)
        return each * (batch.labels.flatten() != IGNORE) * batch.labelled_tokens()
    elif metric == "mse":  # over the places that a text has
        squares = batch.rows(((student - teacher) ** 2).mean(-1), 0.0).sum(-1)
        each = squares / batch.rows(batch.tokens().float(), 0.0).sum(-1).clamp(min=1)
    else:
        ours, theirs = ([batch.rows(scores[..., side], -1e4) for side in (0, 1)] for scores in (student, teacher))
        each = (measure(ours[0], theirs[0], temperature) + measure(ours[1], theirs[1], temperature)) / 2
    return each if batch.present is None else each * batch.present


def by_words(scores: Tensor, theirs: Batch, ours: Batch) -> tuple[Tensor, Tensor]:
    """A teacher's scores where the student has the first piece of the same word, and where there are such.

    (…, their tokens, classes)  ->  (…, our tokens, classes), (…, our tokens) 1.0 where both have the word
    """
    reach = max(theirs.longest, ours.longest) + 1  # the last place of a row takes what begins no word
    size, cells = max(theirs.size, ours.size) + 1, [_cells(batch, reach) for batch in (theirs, ours)]
    known = torch.cat([scores.float(), torch.ones_like(scores[..., :1], dtype=torch.float32)], -1).flatten(0, 1)
    grid = known.new_zeros(size * reach, known.shape[-1]).index_put((cells[0].flatten(),), known)
    found = grid[cells[1]] * (cells[1] % reach < reach - 1).unsqueeze(-1)
    return found[..., :-1], found[..., -1]


def _cells(batch: Batch, reach: int) -> Tensor:
    """For each token the number of its sequence and word in one: (…, tokens)."""
    assert batch.words is not None
    row = torch.arange(len(batch.input_ids), device=batch.words.device)[:, None]
    word = torch.where((batch.words >= 0) & (batch.words < reach), batch.words, reach - 1)
    return (row if batch.sequence is None else batch.sequence[None]) * reach + word


def _softened(measure: Callable[[Side, Side], Tensor]) -> Callable[[Tensor, Tensor, float], Tensor]:
    """T^2 times a distance of scores that are divided by T."""

    def far(student: Tensor, teacher: Tensor, heat: float) -> Tensor:
        if heat == 1:
            return measure(Side(student), Side(teacher))
        return measure(Side(student / heat), Side(teacher / heat)) * heat**2

    return far


METRICS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "kl": _softened(kl),
    "ce": _softened(ce),
    "mse": lambda student, teacher, heat: ((student - teacher) ** 2).mean(-1),
}
