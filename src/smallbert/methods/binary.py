"""Binary weights (BinaryConnect, XNOR-Net; the last stage of BinaryBERT): each is -a or a, a the mean size.

    finetune | binary(embeddings=8) + distill + train(epochs=3)

Signs have no zero: to prune as well, use ternary.
"""

from typing import Literal

from smallbert.methods.quantize import Bits, Quantize
from smallbert.methods.quantize_aware import Aware
from smallbert.model.quantised import Activations


class Binary(Aware):
    """Let each weight be -a or a, while training if there is any, and store it in one bit."""

    scope: Literal["row", "tensor"] = "row"
    embeddings: Bits | None = None  # None: binary too
    activations: Activations = False

    def storage(self) -> Quantize:
        """One bit holds a sign."""
        return Quantize(1, self.activations, self.scope, embeddings=self.embeddings)
