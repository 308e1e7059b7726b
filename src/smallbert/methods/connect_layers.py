"""DenseFormer's connections: each layer reads a learned sum of all earlier outputs.

They start as the identity, so the first step equals the pretrained model exactly and no pre-training is needed.
"""

from typing import Any

from smallbert.errors import UserError
from smallbert.methods import Method
from smallbert.model.anatomy import check_layers
from smallbert.model.mixing import Connections


class ConnectLayers(Method):
    """Let every layer read a learned sum of all earlier layers instead of the one before it.

    dilation: of earlier states only every n-th is read, counted back from the last; 1 reads all
    period: only every n-th layer is followed by such a sum; 1 every layer
    lr: learning rate of the sums' weights
    """

    dilation: int = 1
    period: int = 1
    lr: float = 1e-3

    def check(self) -> None:
        """Whole steps."""
        if self.dilation < 1 or self.period < 1:
            raise UserError(
                f"connect_layers: dilation and period are whole numbers from 1, not {self.dilation} and {self.period}"
            )

    def plan(self, encoder: Any, task: Any) -> dict[str, Any]:
        """Nothing to decide, where there are layers."""
        check_layers(encoder, self.name)
        return {}

    def build(self, encoder: Any, plan: dict[str, Any]) -> None:
        """One scalar for each layer and each state before it, learned at a rate of their own."""
        connections = Connections(len(encoder.order), self.dilation, self.period)
        connections.own_rate = self.lr  # type: ignore[assignment]
        encoder.connections = connections.to(encoder.device)
