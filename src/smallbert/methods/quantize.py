"""Weights in few bits, embeddings included, without training; int8 arithmetic on CPU if chosen.

quantize(8)                                     a quarter of the bytes
quantize(8, activations=True)                   inputs rounded token by token: int8 products on a CPU
quantize(8, activations="static", smooth="search")          by ranges of training texts, outliers moved into weights
quantize(3, scope="group", search=True, feedback=True)      GPTQ: later columns correct the rounding of earlier ones
"""

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from smallbert.errors import UserError
from smallbert.methods import Method
from smallbert.model.anatomy import replace_module
from smallbert.model.feedback import code_on, round_with_feedback
from smallbert.model.quantised import Activations, WholeEmbedding, WholeLinear, roundable
from smallbert.model.rounding import Grid, Scope, encode, fit
from smallbert.model.smoothing import (
    Reader,
    factor_of,
    peaks_of,
    search_factor,
    search_factors,
    smooth,
    smoothable,
    whole_range,
)
from smallbert.progress import tell
from smallbert.training.calibrate import draw_texts, input_products, sample_inputs

Bits = Literal[8, 4, 3, 2, 1]
TEXTS = 512  # that ranges of inputs and feedback are found on
TOKENS = 512  # of these texts, that a search for factors of inputs looks at
GROUP = 64


class Quantize(Method):
    """Store weights, embeddings included, as integers of 8, 4, 3, 2 or 1 bits.

    bits: bits per weight; 1 stores the sign, with the mean size of the weights that share a scale as that scale
    activations: how inputs of linear layers are rounded: False not at all; True to 8 bits, each token by its own
        largest value; 'static' to 8 bits, by one fixed range per layer, found on training texts
    scope: which weights share a scale: 'row' each row of a matrix, 'group' every `group` weights of a row, 'tensor' the
        whole matrix
    group: weights of a row that share a scale, with scope='group'
    symmetric: whether the range is centred on zero. False lets it reach from the smallest to the largest weight (and to
        zero) and stores a zero point with each scale; one bit is always symmetric
    embeddings: bits per weight of the embedding tables; None takes `bits`
    search: whether the range of each scale is narrowed where that lowers the squared error of its weights. False lets
        every range hold its largest weight
    feedback: whether linear layers are rounded column by column, later columns correcting the errors of earlier ones
        on training texts (GPTQ)
    smooth: how strongly outliers of rounded inputs are moved into the weights (SmoothQuant), from 0 (not at all) to
        below 1, for layers whose inputs nothing else reads. 'search' finds the strength of least error layer by
        layer, and the other layers scale their inputs themselves
    texts: number of training texts, drawn at random, that feedback, smooth and activations='static' use
    """

    stage: ClassVar[int] = 50

    bits: Bits = 8
    activations: Activations = False
    scope: Scope = "row"
    group: int = GROUP
    symmetric: bool = True
    embeddings: Bits | None = None
    search: bool = False
    feedback: bool = False
    smooth: float | Literal["search"] = 0.0
    texts: int = TEXTS

    def check(self) -> None:
        """Settings that fit each other."""
        check_grid(self)
        known = self.smooth == "search" or (isinstance(self.smooth, int | float) and 0 <= self.smooth < 1)
        if not known or (self.smooth and not self.activations):
            raise UserError(
                f"{self.name}: smooth is a strength from 0 to below 1, or 'search', and helps to round inputs, so it "
                f"needs activations=True or activations='static', not {self.smooth!r} and {self.activations!r}"
            )
        if self.texts < 1:
            raise UserError(f"{self.name}: texts is the number of texts to use, 1 or more, not {self.texts}")

    def plan(self, encoder: Any, task: Any) -> dict[str, Any]:
        """What is stored small, which layers are smoothed by what is before them, and which scale inputs themselves."""
        plan: dict[str, Any] = {"modules": some_roundable(encoder, self.name)}
        check_group(self, self.name, encoder, plan["modules"])
        if self.texts != TEXTS and not (self.feedback or self.smooth or self.activations == "static"):
            raise UserError(
                f"{self.name}: texts={self.texts} has no effect, since no text is read; leave it out, or add "
                "feedback=True, activations='static' or smooth='search'"
            )
        check_signs(self.name, self.bits, bool(encoder.held("zeros")))
        if self.smooth:
            plan["smoothed"] = [pair for pair in smoothable(encoder) if pair["layer"] in plan["modules"]]
        if self.smooth == "search":
            done = {pair["layer"] for pair in plan["smoothed"]}
            linear = [name for name in plan["modules"] if isinstance(encoder.get_submodule(name), nn.Linear)]
            plan["scaled"] = [name for name in linear if name not in done]
        return plan

    def build(self, encoder: Any, plan: dict[str, Any]) -> None:
        """Put empty modules of few bits in their places."""
        for name in plan["modules"]:
            old = encoder.get_submodule(name)
            grid = self.grid_of(old, plan.get("bits", {}).get(name))
            table = isinstance(old, nn.Embedding)
            scales = name in plan.get("scaled", ())
            new = WholeEmbedding(old, grid) if table else WholeLinear(old, self.activations, grid, scales)
            replace_module(encoder, name, new.to(encoder.device))

    def grid_of(self, module: nn.Module, bits: int | None = None) -> Grid:
        """How a module's matrix is rounded, to its own number of bits where it has one."""
        mine = (isinstance(module, nn.Embedding) and self.embeddings) or self.bits
        return Grid(bits or mine, self.scope, self.group, self.symmetric)

    def fill(self, encoder: Any, before: Any, plan: dict[str, Any], task: Any, seed: int) -> None:
        """Look at inputs, smooth and round, as far as each is asked for."""
        layers = [name for name in plan["modules"] if isinstance(encoder.get_submodule(name), WholeLinear)]
        looks = self.feedback or self.activations == "static" or self.smooth
        batches = draw_texts(before, task, self.texts, seed, self.name) if looks else []
        products = input_products(before, layers, batches) if self.feedback else {}
        if self.smooth or self.activations == "static":
            count = TOKENS if self.smooth == "search" else 0
            bounds, rows = sample_inputs(before, layers, batches, count, seed)
            if self.smooth:
                before = before.copy()
                factors = self._smooth(encoder, before, plan, bounds, rows)
                for name, factor in factors.items():
                    bounds[name] = bounds[name] * factor
                    if name in products:
                        products[name] *= torch.outer(factor, factor)
            if self.activations == "static":
                set_ranges(encoder, {name: whole_range(found) for name, found in bounds.items()})
        self.write(encoder, before, plan["modules"], products)

    def _smooth(
        self, encoder: Any, before: Any, plan: dict[str, Any], bounds: dict[str, Tensor], rows: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Find the factors of each layer's inputs, and give them to the layer or to what is before it."""
        fixed, found = self.activations == "static", dict[str, Tensor]()

        def reader(name: str) -> Reader:
            return Reader(before.get_submodule(name).weight.detach(), encoder.get_submodule(name).grid)

        for pair in plan["smoothed"]:
            if (layer := pair["layer"]) in bounds:
                if self.smooth == "search":
                    found[layer] = search_factor([reader(layer)], bounds[layer], rows[layer], fixed)
                else:
                    found[layer] = factor_of([reader(layer).weight], peaks_of(bounds[layer]), float(self.smooth))
                smooth(before, pair, found[layer])
        found |= search_factors({name: reader(name) for name in plan.get("scaled", ())}, bounds, rows, fixed)
        with torch.no_grad():
            for name, parameter in encoder.named_parameters():
                parameter.copy_(before.get_parameter(name))
        set_factors(encoder, {name: found[name] for name in plan.get("scaled", ()) if name in found})
        return found

    def write(self, encoder: Any, before: Any, names: list[str], products: dict[str, Tensor] | None = None) -> None:
        """Store the matrices of these modules, with feedback for those whose inputs are known by their products."""
        for number, name in enumerate(names):
            module, weight = encoder.get_submodule(name), before.get_submodule(name).weight.detach()
            if getattr(module, "input_factor", None) is not None:
                weight = weight / module.input_factor
            scales = fit(weight, module.grid, self.search)
            if products and name in products:
                codes, _ = round_with_feedback(weight, products[name], code_on(module.grid, scales, weight.shape))
            else:
                codes = encode(weight, scales, module.grid)
            module.write(codes, *scales)
            tell("rounding", number + 1, len(names))


def check_grid(method: Any) -> None:
    """Refuse a grid that cannot be."""
    if method.group < 1:
        raise UserError(f"{method.name}: group is how many weights of a row share a scale, not {method.group}")
    few = 1 in (method.bits, method.embeddings)
    if few and not method.symmetric:
        raise UserError(f"{method.name}: one bit is a sign, which is symmetric; leave symmetric=False out")


def check_group(store: Quantize, method: str, encoder: Any, names: list[str]) -> None:
    """Refuse groups that no row of a model fills, or that have no effect; not on loading, where they do no harm."""
    if store.group != GROUP and store.scope != "group":
        raise UserError(
            f"{method}: group={store.group} has no effect with scope={store.scope!r}; add scope='group', or "
            "leave group out"
        )
    widest = max(encoder.get_submodule(name).weight.shape[1] for name in names)
    if store.scope == "group" and store.group > max(widest, GROUP):  # a small model may be given the usual one
        raise UserError(
            f"{method}: a group of {store.group} is longer than any row of this model, of which the longest has "
            f"{widest} weights; give a smaller group, or scope='row'"
        )


def check_signs(name: str, bits: int, is_pruned: bool) -> None:
    """Refuse one bit for what was pruned."""
    if bits == 1 and is_pruned:
        raise UserError(f"{name}: one bit has no zero, so pruned weights would come back; use ternary")


def some_roundable(encoder: Any, method: str) -> list[str]:
    """The modules whose matrices can be rounded; none, or what is no number, is refused."""
    if names := roundable(encoder):
        if broken := [name for name in names if not is_finite(encoder.get_submodule(name).weight)]:
            raise UserError(
                f"{method}: the weights of {broken[0]} hold NaN or infinite values, which cannot be rounded; this "
                "model is broken, so train it again or load another"
            )
        return names
    raise UserError(
        f"{method}: this {encoder.family} model has no real-valued matrix left to round; it is stored in few bits "
        "already, so start from the model before it was quantised"
    )


def is_finite(weight: torch.Tensor) -> bool:
    """Whether all are numbers, as far as they are known."""
    return weight.is_meta or bool(weight.isfinite().all())


def set_factors(encoder: Any, factors: dict[str, torch.Tensor]) -> None:
    """Write what inputs are multiplied by into each layer that scales them."""
    with torch.no_grad():
        for name, found in factors.items():
            encoder.get_submodule(name).input_factor.copy_(found)


def set_ranges(encoder: Any, ranges: dict[str, torch.Tensor]) -> None:
    """Write the range of inputs into each layer."""
    with torch.no_grad():
        for name, found in ranges.items():
            encoder.get_submodule(name).input_range.copy_(found)
