"""Zhao et al. 2019: the student's weights should be the teacher's, projected by matrices that all layers share."""

from collections.abc import Collection, Iterator
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from smallbert.errors import UserError
from smallbert.methods import Method
from smallbert.model.anatomy import ROLES, check_layers, layers, part, words
from smallbert.model.surgery import counterpart
from smallbert.model.vocabulary import same_pieces
from smallbert.sources import folder_read


class ShareProjections(Method):
    """Pull each matrix W_S of a layer towards U W_T V, one pair U, V for all layers' matrices of a kind.

    weight: weight of this term in the phase's loss
    way: what the loss is the mean square of: 'down', U W_T V - W_S; 'up', W_T - U W_S V
    lr: learning rate of U and V, which are removed when the phase ends
    teacher: who teaches: 'latest' (the last encoder trained on the task without a teacher; before one, the given model
        if it was made for the task), a name given by mark(), a model folder, or a name on the hub
    words: whether word embeddings are pulled too, by V alone: rows of the same piece are compared, whatever their
        indices

    The loss is the mean over kinds and layers. A layer learns from the one it would be copied from. It aligns weights,
    not what they compute.
    """

    trains: ClassVar[bool] = True

    weight: float = 1.0
    way: Literal["down", "up"] = "down"
    lr: float = 1e-3
    teacher: str = "latest"
    words: bool = False

    def check(self) -> None:
        """A weight."""
        if self.weight <= 0:
            raise UserError(f"share_projections: weight is above 0, not {self.weight}; leave it out to pull nothing")

    def reads(self, marks: Collection[str] = ()) -> str:
        """A teacher in a folder."""
        return folder_read(self.teacher, marks)

    def fits(self, phase: Any, steps: int | None) -> None:
        """There is a teacher, and both have layers."""
        if len([method for method in phase.methods if method.name == self.name]) > 1:
            raise UserError("share_projections is in one phase twice; put them into separate phases")
        for encoder in (phase.teachers.expect(self.teacher) or phase.encoder, phase.encoder):
            check_layers(encoder, self.name)

    def attach(self, phase: Any) -> None:
        """A pair of matrices a kind, trained beside the encoder and gone when the phase ends."""
        teacher = phase.teacher(self.teacher)
        check_layers(teacher, self.name)
        pairs, generator = nn.ModuleDict(), torch.Generator().manual_seed(phase.seed)
        for role, theirs, ours in _matrices(teacher, phase.encoder):
            if role not in pairs:
                source, goal = (theirs, ours) if self.way == "down" else (ours, theirs)
                pairs[role] = _Pair(source.shape, goal.shape, generator)
        if self.words:
            pairs["words"] = rows = _Rows(phase.encoder, teacher, self.way == "down", generator)
            phase.notes.append(f"share_projections: {len(rows.ours):,} word pieces have rows in teacher and student")
        phase.train_module(self.name, pairs, self.lr)

    def weights(self, phase: Any) -> dict[str, Any]:
        """The term's own weight."""
        return {self.name: self.weight}

    def loss(self, step: Any) -> dict[str, Tensor]:
        """No example is looked at."""
        teacher, student = step.phase.teacher(self.teacher), step.phase.encoder
        pairs, found = step.phase.modules[self.name], []
        compared = [(pairs[role], theirs, ours) for role, theirs, ours in _matrices(teacher, student)]
        if self.words:
            rows = pairs["words"]
            theirs, ours = _table(teacher).index_select(0, rows.theirs), _table(student).index_select(0, rows.ours)
            compared.append((rows, theirs, ours))
        for project, theirs, ours in compared:
            source, goal = (theirs, ours) if self.way == "down" else (ours, theirs)
            found.append((project(source) - goal).square().mean())
        return {self.name: step.penalty(torch.stack(found).mean())}


class _Pair(nn.Module):
    """U (goal rows x source rows) and V (source columns x goal columns); the identity, cut or widened, plus noise."""

    def __init__(self, source: torch.Size, goal: torch.Size, generator: torch.Generator):
        super().__init__()
        self.left = _drawn(goal[0], source[0], generator)
        self.right = _drawn(source[1], goal[1], generator)

    def forward(self, weight: Tensor) -> Tensor:
        return self.left @ weight @ self.right


class _Rows(nn.Module):
    """V alone, for rows that stand for the same pieces."""

    ours: Tensor
    theirs: Tensor

    def __init__(self, student: Any, teacher: Any, down: bool, generator: torch.Generator):
        super().__init__()
        pairs = same_pieces(student, teacher)
        if not pairs:
            raise UserError("share_projections: teacher and student have no word piece in common; write words=False")
        for name, numbers in zip(("ours", "theirs"), zip(*pairs, strict=True), strict=True):
            self.register_buffer(name, torch.tensor(numbers), persistent=False)
        source, goal = (_table(one).shape[1] for one in ((teacher, student) if down else (student, teacher)))
        self.right = _drawn(source, goal, generator)

    def forward(self, weight: Tensor) -> Tensor:
        return weight @ self.right


def _drawn(rows: int, columns: int, generator: torch.Generator) -> nn.Parameter:
    return nn.Parameter(torch.eye(rows, columns) + torch.randn((rows, columns), generator=generator) * 0.02)


def _matrices(teacher: Any, student: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Each matrix of the student's layers beside the teacher's, by the role it has."""
    deep, shallow = len(teacher.order), len(student.order)
    for place, number in enumerate(student.order):
        other = teacher.order[counterpart(place + 1, shallow, deep) - 1]
        for role in ROLES:
            yield role, _weight(teacher, other, role), _weight(student, number, role)


def _weight(encoder: Any, number: int, role: str) -> Tensor:
    found = part(encoder.backbone, layers(encoder.backbone)[number], role)
    return _plain(found.module).chunk(found.blocks)[found.block]


def _table(encoder: Any) -> Tensor:
    return _plain(words(encoder.backbone))


def _plain(module: nn.Module) -> Tensor:
    weight: Any = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter):
        raise UserError("share_projections: some weights are stored in another form; put quantize and sparse after it")
    return weight
