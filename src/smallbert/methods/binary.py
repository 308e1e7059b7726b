"""Binary weights (BinaryConnect, XNOR-Net, BinaryBERT): each is -a or a, a the mean size.

    finetune | binary(embeddings=8) + distill + train(epochs=3)
    finetune | ternary(embeddings=8) + distill + train(epochs=3) | binary(split=True) + distill + train(epochs=1)

Signs are hard to learn from the start. BinaryBERT (Bai et al. 2021) learns a ternary model first and splits each matrix
into two binary ones that add up to it (ternary weight splitting), so training continues from the ternary model.
Two signs a weight are as many as a binary model of twice the width has; for the published size, halve the model before.
A model stored as ternary is split as it is stored; a model with real weights is first made ternary.

One bit has no zero: to prune as well, use ternary.
"""

from typing import Any, Literal

import torch
from torch import nn

from smallbert.errors import UserError
from smallbert.methods.quantize import Bits, Quantize
from smallbert.methods.quantize_aware import Aware
from smallbert.model.anatomy import replace_module
from smallbert.model.quantised import Activations, Whole, WholeLinear, roundable, stored_parts
from smallbert.model.rounding import Grid
from smallbert.model.twins import Twins, split
from smallbert.training.aware import to_ternary

HALVES = ("first", "second")


class Binary(Aware):
    """Round each weight to -a or a, during training if there is any, and store it in one bit.

    scope: which weights share one a: 'row' each row of a matrix, 'tensor' the whole matrix
    embeddings: bits per weight of the embedding tables; None makes them binary too
    activations: how inputs of linear layers are rounded: False not at all; True to 8 bits, each token by its own
        largest value; 'static' to 8 bits, by one fixed range per layer, found on training texts
    split: whether each linear layer becomes two binary ones that sum to its ternary weights, with two bits per weight
        in all; needs scope='row'
    """

    scope: Literal["row", "tensor"] = "row"
    embeddings: Bits | None = None
    activations: Activations = False
    split: bool = False

    def check(self) -> None:
        """Halves know one scale a row."""
        if self.split and self.scope != "row":
            raise UserError(f"{self.name}: split=True finds two halves row by row; leave scope={self.scope!r} out")

    def plan(self, encoder: Any, task: Any) -> dict[str, Any]:
        """What is rounded: of what is split, both halves."""
        if not self.split:
            return super().plan(encoder, task)
        plain = {name: encoder.get_submodule(name) for name in roundable(encoder)}
        found = {name: part for name, part in plain.items() if isinstance(part, nn.Linear)} | {
            name: part
            for name, part in stored_parts(encoder).items()
            if isinstance(part, WholeLinear) and _is_ternary(part)
        }
        if not found:
            raise UserError(f"{self.name}: this {encoder.family} model has no ternary or real-valued matrix to split")
        shapes = {name: [part.in_features, part.out_features, part.bias is not None] for name, part in found.items()}
        tables = [name for name in plain if name not in found]
        return {"modules": [*tables, *(f"{name}.{half}" for name in found for half in HALVES)], "split": shapes}

    def build(self, encoder: Any, plan: dict[str, Any]) -> None:
        """Put two empty layers in the place of each that is split."""
        for name, (inputs, outputs, bias) in plan.get("split", {}).items():
            replace_module(encoder, name, Twins(inputs, outputs, bias, encoder.device))

    @torch.no_grad()
    def fill(self, encoder: Any, before: Any, plan: dict[str, Any], task: Any, seed: int) -> None:
        """Split each matrix, so that the signs of its halves add up to its ternary values."""
        for name in plan.get("split", {}):
            old, twins = before.get_submodule(name), encoder.get_submodule(name)
            real = old.real() if isinstance(old, Whole) else old.weight
            ternary = real if isinstance(old, Whole) else to_ternary(real, Grid(2, "row"))[0]
            for half, weight in zip(HALVES, split(real, ternary), strict=True):
                getattr(twins, half).weight.copy_(weight)
            if old.bias is not None:
                twins.first.bias.copy_(old.bias)

    def storage(self) -> Quantize:
        """One bit holds a sign."""
        return Quantize(1, self.activations, self.scope, embeddings=self.embeddings)


def _is_ternary(part: WholeLinear) -> bool:
    """Whether each row holds -a, 0 and a alone."""
    grid = part.grid
    return grid.bits == 2 and grid.symmetric and grid.scope != "group" and part.input_factor is None
