"""ELMo's and BERMo's mixture: the head reads a learned, softmax-weighted sum of hidden states."""

from typing import Any, Literal

import torch
from torch import nn

from smallbert.errors import UserError
from smallbert.methods import Method
from smallbert.model.mixing import Mixture, check_free, check_no_pooler, chosen_states
from smallbert.training.schedule import Schedule


class MixLayers(Method):
    """Let the head read a learned mixture of all layers instead of the last one.

    init: how the mixture starts: 'xavier' with small random weights, 'zeros' with equal ones, 'plain' as the model
        without a mixture, bit by bit
    norm: what is brought to mean 0 and variance 1 before states are summed: 'token' each token, over all layers and
        features; 'feature' each token of each layer, over its features; 'layer' each feature of a token, over layers
    dropout: rate of dropout on the states that are summed
    layers: indices of the hidden states to read; 0 is the embedding output, -1 the last layer, None all
    layer_dropout: probability that a whole layer is left out of a step; the others share its weight
    gradual: share of the phase in which the mixture takes over from the last layer; 0 from the first step
    lr: learning rate of the mixture's weights
    """

    init: Literal["xavier", "zeros", "plain"] = "xavier"
    norm: Literal["token", "feature", "layer", "none"] = "token"
    dropout: float = 0.1
    layers: list[int] | None = None
    layer_dropout: float = 0.0
    gradual: float = 0.0
    lr: float = 1e-2

    def check(self) -> None:
        """Shares."""
        for name in ("dropout", "layer_dropout", "gradual"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"mix_layers: {name} is a share from 0 to below 1, not {getattr(self, name)}")

    def plan(self, encoder: Any, task: Any) -> dict[str, Any]:
        """Which hidden states it reads, counted from the embedding output, number 0."""
        check_free(encoder, self.name)
        check_no_pooler(encoder, self.name)
        return {"reads": chosen_states(encoder, self.layers, self.name)}

    def build(self, encoder: Any, plan: dict[str, Any]) -> None:
        """One scalar a hidden state and one for the whole, learned at a rate of their own."""
        reads = plan.get("reads", list(range(len(encoder.order) + 1)))  # folders of 0.1 say nothing
        mixture = Mixture(reads, self.norm, self.dropout, self.init == "plain", self.layer_dropout)
        mixture.own_rate = self.lr  # type: ignore[assignment]
        encoder.mixture = mixture.to(encoder.device)

    def fill(self, encoder: Any, before: Any, plan: dict[str, Any], task: Any, seed: int) -> None:
        """Xavier's bound for a row of n scalars is sqrt(6 / (n + 1)); it breaks the tie between layers at random."""
        if self.init == "xavier":
            row = torch.empty(1, len(encoder.mixture.weights))
            nn.init.xavier_uniform_(row, generator=torch.Generator().manual_seed(seed))
            with torch.no_grad():
                encoder.mixture.weights.copy_(row[0])

    def fits(self, phase: Any, steps: int | None) -> None:
        """What comes in step by step needs training steps beside it."""
        if self.gradual and steps == 0:
            raise UserError(
                "mix_layers(gradual=…) brings the mixture in during training, so write it in the same phase: "
                "mix_layers(gradual=0.3) + finetune"
            )

    def attach(self, phase: Any) -> None:
        """Let the mixture in step by step."""
        if self.gradual:
            phase.encoder.mixture.blend = phase.dial("blend", Schedule(0.0, 1.0, 0.0, self.gradual))

    def settle(self, phase: Any) -> None:
        """The mixture is in, whole."""
        phase.encoder.mixture.blend = None
