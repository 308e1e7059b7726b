"""ELMo's and BERMo's mixture: the head reads a learned, softmax-weighted sum of every hidden state."""

from typing import Any, Literal

import torch
from torch import nn

from smallbert.methods import Method
from smallbert.model.mixing import Mixture


class MixLayers(Method):
    """Let the head read a learned mixture of all layers instead of the last one."""

    init: Literal["xavier", "zeros", "plain"] = "xavier"
    norm: Literal["token", "feature", "layer", "none"] = "token"
    dropout: float = 0.1
    lr: float = 1e-2

    def build(self, encoder: Any, plan: dict[str, Any]) -> None:
        """One scalar a hidden state and one for the whole, learned at a rate of their own."""
        mixture = Mixture(len(encoder.order) + 1, self.norm, self.dropout, plain=self.init == "plain")
        mixture.own_rate = self.lr  # type: ignore[assignment]
        encoder.mixture = mixture.to(encoder.device)

    def fill(self, encoder: Any, before: Any, plan: dict[str, Any], task: Any, seed: int) -> None:
        """Xavier's bound for a row of n scalars is sqrt(6 / (n + 1)); it breaks the tie between layers at random."""
        if self.init == "xavier":
            row = torch.empty(1, len(encoder.mixture.weights))
            nn.init.xavier_uniform_(row, generator=torch.Generator().manual_seed(seed))
            with torch.no_grad():
                encoder.mixture.weights.copy_(row[0])
