"""Bits where they matter (Q-BERT, Shen et al. 2019): a layer along whose weights the loss is more curved gets more.

    finetune | mixed_bits(3.0)                              3 bits per weight of the layers on average
    finetune | mixed_bits(15, unit="MB") + distill + train(epochs=1)

The curvature of a layer is |mean| + spread of the top eigenvalue of its Hessian over several batches of training texts:
a layer that is flat on some texts and curved on others needs bits too. Rounding to b bits then costs about curvature
times the squared error of the weights (as in HAWQ-V2), and bits go, step by step, where a byte saves most. Measure it
on a trained model: elsewhere the Hessian says little.
"""

import math
from typing import Any, Literal

import numpy as np
from torch import nn

from smallbert.errors import UserError
from smallbert.measuring.disk import bytes_beside_weights
from smallbert.methods.quantize import Bits, Quantize, check_group, some_roundable
from smallbert.methods.quantize_aware import Aware
from smallbert.model.anatomy import anatomy, layers, linears
from smallbert.model.quantised import Activations, stored_bytes
from smallbert.model.rounding import Grid, rounded
from smallbert.training.calibrate import draw_texts
from smallbert.training.curvature import layer_curvatures

STEPS = (1, 2, 3, 4, 8)  # numbers of bits there are
HEADER = 160  # bytes that a safetensors file says about one tensor, at most
STEP = 2000  # bytes that encoder.json says about this phase, at most, but for the names of matrices
NAMINGS = 4  # how often it says each name, here and where what was trained is stored, with 15 more bytes


class MixedBits(Aware):
    """Give each layer its own number of bits, by the curvature of the loss, within a size budget.

    budget: size to stay within, in `unit`
    unit: 'bits' per weight of the layers, on average and without scales; 'MB' (10^6 bytes) of the whole model folder
    fewest: least number of bits per weight that a layer is given
    most: largest number of bits per weight that a layer is given
    group: weights of a row that share a scale
    embeddings: bits per weight of the embedding tables; other matrices outside the layers have 8
    activations: how inputs of linear layers are rounded: False not at all; True to 8 bits, each token by its own
        largest value; 'static' to 8 bits, by one fixed range per layer, found on training texts
    batches: number of batches of training texts on which the curvature of each layer is measured
    examples: number of texts per batch
    rounds: largest number of power iterations per eigenvalue; they end early once it changes by no more than 1 %
    """

    budget: float = 3.0
    unit: Literal["bits", "MB"] = "bits"
    fewest: Bits = 2
    most: Bits = 8
    group: int = 64
    embeddings: Bits = 8
    activations: Activations = False
    batches: int = 8
    examples: int = 16
    rounds: int = 20

    def check(self) -> None:
        """A budget, a range of bits and counts."""
        if self.budget <= 0 or self.fewest > self.most:
            raise UserError(
                f"{self.name}: budget is above 0 and fewest not more than most, not {self.budget}, {self.fewest} and "
                f"{self.most}"
            )
        if min(self.group, self.batches, self.examples, self.rounds) < 1:
            raise UserError(f"{self.name}: group, batches, examples and rounds are 1 or more")

    def storage(self) -> Quantize:
        """Groups of 8 bits, but where the plan says otherwise."""
        return Quantize(8, self.activations, "group", self.group, embeddings=self.embeddings)

    def plan(self, encoder: Any, task: Any) -> dict[str, Any]:
        """How sharp each layer is, and how many bits it gets."""
        names, stem = some_roundable(encoder, self.name), f"backbone.{anatomy(encoder.backbone).layers}"
        check_group(self.storage(), self.name, encoder, names)
        plain = {f"backbone.{name}" for name, module in linears(encoder.backbone) if type(module) is nn.Linear}
        every = [
            [n for n in names if n in plain and n.startswith(f"{stem}.{k}.")]
            for k in range(len(layers(encoder.backbone)))
        ]
        groups = [group for group in every if group]
        if not groups:
            raise UserError(f"{self.name}: the layers of this {encoder.family} model hold no real-valued matrix")
        choices = [bits for bits in STEPS if self.fewest <= bits <= self.most]
        sizes, room = self._sizes(encoder, groups, choices), self._room(encoder, names, groups)
        texts = draw_texts(encoder, task, self.batches * self.examples, 0, self.name, self.examples)
        if not encoder.heads:
            raise UserError(f"{self.name} measures the loss of a task, and this model has no head: fine-tune it first")
        weights = [[f"{name}.weight" for name in group] for group in groups]
        found = np.array(layer_curvatures(encoder, weights, texts, self.rounds, seed=0))
        means, spreads = found.mean(1), found.std(1)
        chosen = choose_bits(np.abs(means) + spreads, self._errors(encoder, groups, choices), sizes, room)
        bits = {name: choices[pick] for group, pick in zip(groups, chosen, strict=True) for name in group}
        about = [
            {"curvature": float(f"{mean:.4g}"), "spread": float(f"{spread:.4g}"), "bits": choices[pick]}
            for mean, spread, pick in zip(means, spreads, chosen, strict=True)
        ]
        return {"modules": names, "bits": bits, "layers": about}

    def _errors(self, encoder: Any, groups: list[list[str]], choices: list[int]) -> np.ndarray:
        """The squared error of each layer at each number of bits: (layers, choices)."""
        errors = np.zeros((len(groups), len(choices)))
        for place, group in enumerate(groups):
            for column, bits in enumerate(choices):
                grid = Grid(bits, "group", self.group)
                for name in group:
                    weight = encoder.get_parameter(f"{name}.weight").detach()
                    errors[place, column] += float((rounded(weight, grid) - weight).square().sum())
        return errors

    def _sizes(self, encoder: Any, groups: list[list[str]], choices: list[int]) -> np.ndarray:
        """The bits or bytes of each layer at each number of bits: (layers, choices)."""

        def size(name: str, bits: int) -> int:
            shape = encoder.get_parameter(f"{name}.weight").shape
            return shape.numel() * bits if self.unit == "bits" else stored_bytes(shape, Grid(bits, "group", self.group))

        return np.array([[float(sum(size(name, bits) for name in group)) for bits in choices] for group in groups])

    def _room(self, encoder: Any, names: list[str], groups: list[list[str]]) -> float:
        """What the layers' matrices may take, in bits or in bytes; a budget that cannot be held is refused here.

        Only shapes are looked at, so that it is refused before anything is trained.
        """
        mine = {name for group in groups for name in group}
        least = self._sizes(encoder, groups, [self.fewest]).sum()
        if self.unit == "bits":
            if self.budget < self.fewest:
                raise UserError(
                    f"{self.name}: {self.budget:g} bits per weight are too few, since no layer gets fewer than "
                    f"{self.fewest}; give a larger budget, or fewer bits as `fewest`"
                )
            return self.budget * sum(encoder.get_parameter(f"{name}.weight").numel() for name in mine)
        beside = bytes_beside_weights(encoder) + STEP + 100 * len(groups) + NAMINGS * sum(len(n) + 15 for n in names)
        store, rest, tables = self.storage(), 0, 0
        matrices = {f"{name}.weight": name for name in names}
        for key, tensor in encoder.state_dict().items():
            name = matrices.get(key)
            if name is None:
                rest += tensor.nbytes + HEADER
                continue
            module, rest = encoder.get_submodule(name), rest + 2 * HEADER
            taken = 0 if name in mine else stored_bytes(tensor.shape, store.grid_of(module))
            tables, rest = (tables + taken, rest) if isinstance(module, nn.Embedding) else (tables, rest + taken)
        room = self.budget * 1e6 - rest - tables - beside
        if room < least:
            needed = (least + rest + tables + beside) / 1e6
            digit = 10.0 ** (math.floor(math.log10(needed)) - 2)  # the third one, and rounded up, or it would not fit
            enough = math.ceil(needed / digit) * digit
            raise UserError(
                f"{self.name}: a folder of {self.budget:g} MB cannot hold this model: embeddings take "
                f"{tables / 1e6:.3g} MB in {self.embeddings} bits, the layers {least / 1e6:.3g} MB in {self.fewest}, "
                f"other weights {rest / 1e6:.3g} MB, tokenizer and description {beside / 1e6:.3g} MB; give a larger "
                f"budget, {enough:.3g} MB and more, or fewer bits as `fewest` or `embeddings`"
            )
        return room


def choose_bits(sharpness: np.ndarray, errors: np.ndarray, sizes: np.ndarray, room: float) -> list[int]:
    """Which number of bits each layer gets, so that all fit into the room: a choice (column) for each layer (row).

    All begin with the fewest, for which there is room; the step that saves most of sharpness * error for its size is
    taken, while one fits. It may go further than to the next number of bits: two, which are -a, 0 and a, can be further
    off than one.
    """
    chosen, count = [0] * len(sharpness), errors.shape[1]
    left = room - sizes[:, 0].sum()
    while True:
        steps = []
        for place, now in enumerate(chosen):
            for next_ in range(now + 1, count):
                more = sizes[place, next_] - sizes[place, now]
                saved = sharpness[place] * (errors[place, now] - errors[place, next_])
                if more <= left and saved >= 0:
                    steps.append((saved / more, -place, -next_, more))
        if not steps:
            return chosen
        _, place, next_, more = max(steps)
        chosen[-place] = -next_
        left -= more
