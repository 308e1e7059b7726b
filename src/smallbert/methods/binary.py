"""Binary weights (BinaryConnect, XNOR-Net; the last stage of BinaryBERT): each is -a or a, a the mean size.

    finetune | binary(embeddings=8) + distill + train(epochs=3)

Signs have no zero: to prune as well, use ternary.
"""

from typing import Any, Literal

from smallbert.errors import UserError
from smallbert.methods.quantize import Bits, Quantize
from smallbert.methods.quantize_aware import _Aware
from smallbert.model.quantised import Activations
from smallbert.training.masks import MASK_STAGE


class Binary(_Aware):
    """Let each weight be -a or a, while training if there is any, and store it in one bit."""

    scope: Literal["row", "tensor"] = "row"
    embeddings: Bits | None = None  # None: binary too
    activations: Activations = False

    def attach(self, phase: Any) -> None:
        """Refuse what was pruned, or will be."""
        if phase.encoder.held("zeros") or any(method.stage == MASK_STAGE for method in phase.methods):
            raise UserError(f"{self.name}: a sign has no zero, so that pruned weights would come back; use ternary")
        super().attach(phase)

    def storage(self) -> Quantize:
        """One bit holds a sign."""
        return Quantize(1, self.activations, self.scope, embeddings=self.embeddings)
