"""WaLDORf's idea: the layers read a shorter sequence, which a strided convolution makes and a second one undoes."""

from typing import Any

from smallbert.errors import UserError
from smallbert.methods import Method
from smallbert.model.anatomy import check_layers
from smallbert.model.stride import Stride as Strided


class Stride(Method):
    """Join every few tokens into one before the layers, and spread its output over them after the layers.

    step: how many tokens are joined into one, 2 or more
    """

    step: int = 2

    def check(self) -> None:
        """At least two tokens make a group."""
        if self.step < 2:
            raise UserError(f"stride: step is how many tokens are joined, 2 or more, not {self.step}")

    def plan(self, encoder: Any, task: Any) -> dict[str, Any]:
        """Nothing to decide, where there are layers and no stride yet."""
        check_layers(encoder, self.name)
        if encoder.stride is not None:
            raise UserError("stride: this encoder has a stride already; write one stride of the whole size")
        return {}

    def build(self, encoder: Any, plan: dict[str, Any]) -> None:
        """Two convolutions around the layers; groups would cross from text to text in a packed batch."""
        encoder.stride, encoder.packable = Strided(self.step, encoder.width).to(encoder.device), False

    def fill(self, encoder: Any, before: Any, plan: dict[str, Any], task: Any, seed: int) -> None:
        """As near to the model before as joined tokens allow."""
        encoder.stride.begin()
