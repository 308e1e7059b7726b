"""Weights in few bits, embeddings included, without training; int8 arithmetic on CPU if asked for.

quantize(8)                                     a quarter of the bytes
quantize(8, activations=True)                   inputs rounded token by token: int8 products on a CPU
quantize(8, activations="static", smooth=0.5)   by ranges found on training texts, outliers moved into weights
quantize(3, scope="group", search=True, feedback=True)      GPTQ: later columns make up for the rounding of earlier ones
"""

from typing import Any, ClassVar, Literal

import torch
from torch import nn

from smallbert.errors import UserError
from smallbert.methods import Method
from smallbert.model.anatomy import replace_module
from smallbert.model.feedback import code_on, round_with_feedback
from smallbert.model.quantised import Activations, WholeEmbedding, WholeLinear, roundable
from smallbert.model.rounding import Grid, Scope, encode, fit
from smallbert.model.smoothing import smooth, smoothable
from smallbert.progress import tell
from smallbert.training.calibrate import draw_texts, input_bounds, input_products, whole_range

Bits = Literal[8, 4, 3, 2, 1]
TEXTS = 512  # that ranges of inputs and feedback are found on


class Quantize(Method):
    """Store weights, embeddings included, as whole numbers of 8, 4, 3, 2 or 1 bits."""

    stage: ClassVar[int] = 50

    bits: Bits = 8
    activations: Activations = False  # round inputs to 8 bits too: True token by token, "static" by ranges of train
    scope: Scope = "row"  # what shares a scale
    group: int = 64
    symmetric: bool = True
    embeddings: Bits | None = None  # None: as many bits as the layers
    search: bool = False  # for each scale, of which rounding is nearest, instead of that which holds the largest number
    feedback: bool = False
    smooth: float = 0.0
    texts: int = TEXTS  # of train, that ranges and feedback are found on

    def check(self) -> None:
        """Settings that fit each other."""
        check_grid(self)
        if not 0 <= self.smooth < 1 or (self.smooth and not self.activations):
            raise UserError(
                f"{self.name}: smooth is a strength from 0 to below 1, and helps to round inputs, so that it needs "
                f"activations=True or activations='static'; {self.smooth} and {self.activations!r} were given"
            )
        if self.texts < 1:
            raise UserError(f"{self.name}: texts is how many texts are looked at, 1 or more, not {self.texts}")

    def plan(self, encoder: Any, task: Any) -> dict[str, Any]:
        """What is stored small, and which layers can be smoothed."""
        plan: dict[str, Any] = {"modules": some_roundable(encoder, self.name)}
        check_signs(self.name, self.bits, bool(encoder.held("zeros")))
        if self.smooth:
            plan["smoothed"] = [pair for pair in smoothable(encoder) if pair["layer"] in plan["modules"]]
        return plan

    def build(self, encoder: Any, plan: dict[str, Any]) -> None:
        """Put empty modules of few bits in their places."""
        for name in plan["modules"]:
            old = encoder.get_submodule(name)
            grid = self.grid_of(old, plan.get("bits", {}).get(name))
            table = isinstance(old, nn.Embedding)
            new = WholeEmbedding(old, grid) if table else WholeLinear(old, self.activations, grid)
            replace_module(encoder, name, new.to(encoder.device))

    def grid_of(self, module: nn.Module, bits: int | None = None) -> Grid:
        """How a module's matrix is rounded, to its own number of bits where it has one."""
        mine = (isinstance(module, nn.Embedding) and self.embeddings) or self.bits
        return Grid(bits or mine, self.scope, self.group, self.symmetric)

    def fill(self, encoder: Any, before: Any, plan: dict[str, Any], task: Any, seed: int) -> None:
        """Smooth, look at inputs and round, as far as each is asked for."""
        layers = [name for name in plan["modules"] if isinstance(encoder.get_submodule(name), WholeLinear)]
        looks = self.feedback or self.activations == "static" or plan.get("smoothed")
        batches = draw_texts(before, task, self.texts, seed, self.name) if looks else []
        if plan.get("smoothed"):
            before = before.copy()
            bounds = input_bounds(before, [pair["layer"] for pair in plan["smoothed"]], batches)
            smooth(before, plan["smoothed"], bounds, self.smooth)
            with torch.no_grad():
                for name, parameter in encoder.named_parameters():
                    parameter.copy_(before.get_parameter(name))
        if self.activations == "static":
            set_ranges(encoder, {n: whole_range(b) for n, b in input_bounds(before, layers, batches).items()})
        products = input_products(before, layers, batches) if self.feedback else {}
        for number, name in enumerate(plan["modules"]):
            module, weight = encoder.get_submodule(name), before.get_submodule(name).weight.detach()
            scales = fit(weight, module.grid, self.search)
            if name in products:
                codes, _ = round_with_feedback(weight, products[name], code_on(module.grid, scales, weight.shape))
            else:
                codes = encode(weight, scales, module.grid)
            module.write(codes, *scales)
            tell("rounding", number + 1, len(plan["modules"]))


def check_grid(method: Any) -> None:
    """Refuse a grid that cannot be."""
    if method.group < 1:
        raise UserError(f"{method.name}: group is how many numbers of a row share a scale, not {method.group}")
    few = 1 in (method.bits, method.embeddings)
    if few and not method.symmetric:
        raise UserError(f"{method.name}: one bit is a sign, so that it is symmetric; leave symmetric=False out")


def check_signs(name: str, bits: int, is_pruned: bool) -> None:
    """Refuse one bit for what was pruned."""
    if bits == 1 and is_pruned:
        raise UserError(f"{name}: a sign has no zero, so that pruned weights would come back; use ternary")


def some_roundable(encoder: Any, method: str) -> list[str]:
    """The modules whose matrices can be rounded; where there are none, a sentence that says so."""
    if names := roundable(encoder):
        return names
    raise UserError(
        f"{method}: this {encoder.family} model has no real-valued matrix left to round; it is stored in few bits "
        "already, so start from the model before that"
    )


def set_ranges(encoder: Any, ranges: dict[str, torch.Tensor]) -> None:
    """Write the range of inputs into each layer."""
    with torch.no_grad():
        for name, found in ranges.items():
            encoder.get_submodule(name).input_range.copy_(found)
