"""One batch as the encoder saw it, with what its teachers say of it: what the losses of a phase are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from smallbert.model.batch import Batch
from smallbert.model.encoder import Seen
from smallbert.model.walk import States
from smallbert.texts.data import STUDENT
from smallbert.training.teachers import view_of

if TYPE_CHECKING:
    from smallbert.training.phase import Phase


class Step:
    """One batch as the encoder saw it: what a method's `loss` reads."""

    def __init__(self, phase: Phase, batches: dict[str, Batch], states: States, scores: Tensor | None):
        """Keep what was seen."""
        self.phase, self.batches, self.states, self._scores = phase, batches, states, scores
        self._taught: dict[str, Seen] = {}

    @property
    def batch(self) -> Batch:
        """The batch as the student reads it."""
        return self.batches[STUDENT]

    @property
    def scores(self) -> Tensor:
        """What the head makes of it; there are none at a step whose losses read but a part of the layers."""
        assert self._scores is not None
        return self._scores

    def batch_for(self, teacher: str) -> Batch:
        """The same texts as a teacher reads them."""
        return self.batches.get(view_of(teacher), self.batch)

    def taught(self, teacher: str) -> Seen:
        """What a teacher says of them, as was asked for: one look a step or one reading, for all terms."""
        if teacher not in self._taught:
            self._taught[teacher] = self.phase.teachers.look(teacher, self.batch_for(teacher))
        return self._taught[teacher]

    def mean(self, each: Tensor, count: Tensor | None = None) -> Tensor:
        """The mean of one loss a sequence (or a token), over the batches of all processes together.

        Of losses that rows without a label do not have, the mean is over `batch.labelled` of them.
        """
        count = self.batch.count if count is None else count
        if count is None:
            count = each.new_tensor(float(each.shape[0])) if self.batch.present is None else self.batch.present.sum()
        return each.float().sum() / count

    def mean_of_texts(self, each: Tensor, shares: Tensor) -> Tensor:
        """The mean over all texts of each text's own mean, in which each token has its share (see Batch.shares).

        Dimensions before those of the shares stay: (layers, rows, tokens), (rows, tokens) -> (layers,)
        """
        count = self.batch.texts
        if count is None:
            count = each.new_tensor(float(self.batch.size)) if self.batch.present is None else self.batch.present.sum()
        return each.float().flatten(-shares.dim()) @ (shares / count).flatten()

    def penalty(self, value: Tensor) -> Tensor:
        """A term that depends on no example, counted once however many processes there are."""
        return value / self.phase.world
