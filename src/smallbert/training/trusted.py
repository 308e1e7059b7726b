"""Whether what a teacher answers fits the labels, asked of some training rows before the first step."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from smallbert.errors import UserError
from smallbert.texts.batches import Layout, make_batch, sort_into_batches
from smallbert.texts.data import STUDENT
from smallbert.training.teachers import view_of

if TYPE_CHECKING:
    from smallbert.training.phase import Phase

ROWS, FEW = 256, 32  # as many are asked about; fewer tell nothing
MUCH = 0.2  # by how much more of each class another order must be right to be called the better one
TOKENS = 2**12  # in a batch


class Trust(NamedTuple):
    """How many labels were asked about, the share that is right, and the order of classes that fits best."""

    labels: int
    right: float
    order: list[int]  # which of the teacher's scores would have to stand for each class
    gain: float  # how much more of each class, in the mean, is right in that order
    commonest: float  # the share of the commonest label


def trust(phase: Phase, name: str) -> Trust | None:
    """How a teacher does on training rows, read as it will read them; None where no labels are there to compare."""
    stream = phase.stream
    view = view_of(name) if stream is not None and view_of(name) in stream.views else STUDENT
    if (
        stream is None
        or stream.labels is None
        or stream.kind not in (("classify", "tag") if view == STUDENT else ("classify",))
    ):
        return None
    rows = np.arange(len(stream)) if stream.kind == "tag" else np.flatnonzero(stream.labels >= 0)
    rows = rows[np.unique(np.linspace(0, len(rows) - 1, min(ROWS, len(rows))).astype(np.int64))] if len(rows) else rows
    labels, answers = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for some in sort_into_batches(stream.views[view].lengths[rows], TOKENS):
        batch = make_batch(stream, rows[some], Layout(False, 0), view=view).to(phase.device)
        found = phase.teachers.look(name, batch).scores
        assert found is not None and batch.labels is not None
        known = (batch.labels >= 0).cpu().numpy()
        labels.append(batch.labels.cpu().numpy()[known])
        answers.append(found.argmax(-1).cpu().numpy()[known])
    classes = len(phase.teacher(name).head.labels)
    counts = np.zeros((classes, classes))
    np.add.at(counts, (np.concatenate(labels), np.concatenate(answers)), 1)
    total = int(counts.sum())
    if total < FEW:
        return None
    return Trust(total, float(np.trace(counts) / total), *_best_order(counts), float(counts.sum(1).max() / total))


def check_trust(phase: Phase, name: str) -> None:
    """Write down how a teacher does, and refuse one whose nameless classes are plainly in another order."""
    if (found := trust(phase, name)) is None:
        return
    theirs, ours = phase.teacher(name).head.labels, (phase.task.labels if phase.task else ())
    guess = "" if found.right > found.commonest else ", no more than always predicting the most frequent one"
    phase.notes.append(
        f"predictions of {name!r} are right for {found.right:.1%} of {found.labels:,} training labels{guess}"
    )
    if found.gain < MUCH:
        return
    order = ", ".join(theirs[place] for place in found.order)
    said = f"its classes in the order {order} fit {', '.join(ours)} much better"
    if [label.casefold() for label in theirs] == [f"label_{number}" for number in range(len(theirs))]:
        raise UserError(
            f"the teacher {name!r} is right for {found.right:.0%} of {found.labels} training labels, and {said}; give "
            "its classes their names, as id2label in its config.json or labels in its encoder.json"
        )
    phase.notes.append(f"{name!r} may have its classes in another order: {said}")


def _best_order(counts: np.ndarray) -> tuple[list[int], float]:
    """Classes paired with answers, the surest first, and what that gains over pairing each with its own number.

    Rows are weighed alike, so that one who always says the same gains by no order. [[1, 9], [8, 2]] -> [1, 0], 0.7
    """
    shares = counts / counts.sum(1, keepdims=True).clip(min=1)
    left, order = shares.copy(), list(range(len(counts)))
    for _ in order[:]:
        label, answer = np.unravel_index(int(left.argmax()), left.shape)
        order[int(label)] = int(answer)
        left[label], left[:, answer] = -1, -1
    seen = max(1, int((counts.sum(1) > 0).sum()))
    return order, float(sum(shares[n, place] - shares[n, n] for n, place in enumerate(order)) / seen)
