"""Ternary weights (TernaryBERT, Zhang et al. 2020): each is -a, 0 or a.

    finetune | ternary + distill + train(epochs=3)

Alone it needs no training and costs much of the score; with a teacher of the same size it is a method of its own.
"""

from typing import ClassVar, Literal

from smallbert.methods.quantize import Bits, Quantize
from smallbert.methods.quantize_aware import Aware
from smallbert.model.quantised import Activations
from smallbert.training.aware import Rule, to_ternary


class Ternary(Aware):
    """Round each weight to -a, 0 or a, during training if there is any, and store it in two bits.

    scope: which weights share one a: 'row' each row of a matrix, 'tensor' the whole matrix
    embeddings: bits per weight of the embedding tables; None makes them ternary too
    activations: how inputs of linear layers are rounded: False not at all; True to 8 bits, each token by its own
        largest value; 'static' to 8 bits, by one fixed range per layer, found on training texts
    """

    rule: ClassVar[Rule] = staticmethod(to_ternary)

    scope: Literal["row", "tensor"] = "row"
    embeddings: Bits | None = None
    activations: Activations = False

    def storage(self) -> Quantize:
        """Two bits hold -1, 0 and 1."""
        return Quantize(2, self.activations, self.scope, embeddings=self.embeddings)
