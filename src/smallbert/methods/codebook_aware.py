"""Training with GOBO's centroids: a weight may move to another centroid, the centroids do not change.

    finetune | codebook_aware(3) + distill(alpha=1.0) + train(epochs=1)
    magnitude(0.3) + codebook_aware(3) + distill + train(epochs=1)      prune, round and learn from a teacher at once
    magnitude(0.3) + train(epochs=1) | codebook_aware(3) + distill + train(epochs=1)      one after the other

Centroids and outliers are found when the phase begins, as `codebook` finds them. The forward pass then rounds each
weight to its nearest centroid, and training reduces the error, which the paper does not: gradients pass straight
through to real weights, which move to another centroid when they are near enough. Outliers are trained and stored in
full. The result is stored as `codebook` stores it.

In one phase with pruning one centroid is zero and the others are found before any weight is pruned, so those near zero
are unused in the end: where much is pruned, do that in a phase before.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from smallbert.methods.codebook import Codebook, Few, check_outliers, count_outliers, find_outliers, make_table, nearest
from smallbert.methods.quantize_aware import SeenRounded, prunes
from smallbert.model.rounding import straight
from smallbert.training.aware import ROUND_STAGE
from smallbert.training.phase import Weights


class Books(nn.Module):
    """The centroids of each matrix and where its outliers are, by the name of its module."""

    def __init__(self) -> None:
        """No matrix is known."""
        super().__init__()
        self.names: list[str] = []

    def add(self, name: str, table: Tensor, apart: Tensor) -> None:
        """Remember the centroids of a matrix, and which of its weights stand apart."""
        self.register_buffer(f"table_{len(self.names)}", table)
        self.register_buffer(f"apart_{len(self.names)}", apart)
        self.names.append(name)

    def of(self, name: str) -> tuple[Tensor, Tensor]:
        """The centroids of a matrix, and which of its weights stand apart."""
        number = self.names.index(name)
        return self.get_buffer(f"table_{number}"), self.get_buffer(f"apart_{number}")

    def seen(self, name: str, weight: Tensor) -> Tensor:
        """A matrix as it will be stored."""
        table, apart = self.of(name)
        return torch.where(apart, weight, table[nearest(weight, table).int()])


class CodebookAware(SeenRounded):
    """Train with each weight, except outliers, rounded to the nearest of a few centroids, then store it so.

    bits: bits per weight; each matrix has 2^bits centroids
    embeddings: bits per weight of the embedding tables; None takes `bits`
    outliers: distance from the mean of a matrix, in standard deviations, beyond which a weight is learned and stored in
        full; which weights these are is fixed when the phase begins
    """

    trains: ClassVar[bool] = True

    bits: Few = 3
    embeddings: Few | None = None
    outliers: float = Codebook.outliers

    def check(self) -> None:
        """A distance."""
        check_outliers(self.name, self.outliers)

    def plan(self, encoder: Any, task: Any) -> dict[str, Any]:
        """What is rounded."""
        return {"modules": list(count_outliers(encoder, self.name, self.outliers))}

    def storage(self) -> Codebook:
        """The method that stores what was learned."""
        return Codebook(self.bits, self.embeddings, self.outliers)

    def attach(self, phase: Any) -> None:
        """Find the centroids of each matrix, and let the model see it made of them once a step."""
        store, books, zero = self.storage(), Books(), prunes(phase)
        for name in self._plan_of(phase)["modules"]:
            module = phase.encoder.get_submodule(name)
            weight = module.weight.detach()
            apart = find_outliers(weight, self.outliers)
            books.add(name, make_table(weight, apart, store.bits_of(module), zero), apart)
        phase.train_module(self.name, books)
        if zero and not phase.encoder.held("zeros"):
            phase.notes.append(
                f"{self.name}: centroids are found before pruning, and those near zero may be unused in the "
                "end; to use all of them, prune in a phase before"
            )
        names = {f"{name}.weight": name for name in books.names}

        def make(weights: Weights) -> Weights:
            return {key: straight(weight, books.seen(names[key], weight.detach())) for key, weight in weights.items()}

        phase.transform(list(names), make, ROUND_STAGE)

    def settle(self, phase: Any) -> None:
        """Store what the model saw, to the bit."""
        encoder, books = phase.encoder, phase.modules[self.name]
        weights = {name: encoder.get_submodule(name).weight.detach() for name in books.names}
        encoder.apply_method(self.storage(), {"outliers": {name: int(books.of(name)[1].sum()) for name in books.names}})
        for name, weight in weights.items():
            table, apart = books.of(name)
            encoder.get_submodule(name).write(nearest(weight, table), table, apart, weight)
