"""SesameBERT's squeeze-and-excitation over layers: how much of each layer the head reads depends on the text.

The published code returned the last layer times its own gate, squeezed padding too, and squeezed by the mean of
features that a layer norm had made nearly zero. Here gates weigh all hidden states, padding is left out, a state is
squeezed by its first token or by the size of its features, and GELU replaces ReLU, whose four units may all die.
"""

from typing import Any, Literal

import torch
from torch import nn

from smallbert.errors import UserError
from smallbert.methods import Method
from smallbert.model.mixing import Gates, check_free, check_no_pooler


class GateLayers(Method):
    """Let the head read a mixture of all layers whose weights depend on each text.

    squeeze: how a layer's state becomes one value: 'first', the first token projected on a learned vector; 'square',
        the mean square of all features of all tokens
    ratio: how many times fewer hidden units the gate has than there are hidden states
    lr: learning rate of the gates
    """

    squeeze: Literal["first", "square"] = "first"
    ratio: int = 3
    lr: float = 1e-3

    def check(self) -> None:
        """At least one number in between."""
        if self.ratio < 1:
            raise UserError(f"gate_layers: ratio is a whole number from 1, not {self.ratio}")

    def plan(self, encoder: Any, task: Any) -> dict[str, Any]:
        """One mixture to an encoder."""
        check_free(encoder, self.name)
        check_no_pooler(encoder, self.name)
        return {}

    def build(self, encoder: Any, plan: dict[str, Any]) -> None:
        """Two small maps and one scalar, learned at a rate of their own."""
        count = len(encoder.order) + 1
        gates = Gates(count, max(1, count // self.ratio), self.squeeze, encoder.width)
        gates.own_rate = self.lr  # type: ignore[assignment]
        encoder.mixture = gates.to(encoder.device)

    def fill(self, encoder: Any, before: Any, plan: dict[str, Any], task: Any, seed: int) -> None:
        """He's way for the maps, as in the paper, and its biases of 0.8: gates begin open and nearly alike."""
        generator, gates = torch.Generator().manual_seed(seed), encoder.mixture
        with torch.no_grad():
            for matrix in (gates.inward, gates.outward):
                matrix.copy_(nn.init.kaiming_normal_(torch.empty_like(matrix.T, device="cpu"), generator=generator).T)
            gates.inward_bias.fill_(0.8)
            gates.outward_bias.fill_(0.8)
            if gates.look is not None:
                draw = torch.randn(len(gates.look), generator=generator)
                gates.look.copy_(draw / len(gates.look) ** 0.5)
