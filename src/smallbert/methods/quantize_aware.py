"""Quantisation-aware training (Q8BERT, Zafrir et al. 2019): train with the rounding of the final model.

    quantize_aware(8) + train(epochs=1)
    magnitude(0.3) + quantize_aware(8) + distill + train(epochs=1)      prune, round and learn from a teacher at once
    quantize_aware(8, smooth="search") + distill(alpha=1.0) + train(epochs=1)

The result is stored as `quantize` stores it.
"""

from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from smallbert.errors import UserError
from smallbert.methods import Method
from smallbert.methods.quantize import (
    TEXTS,
    TOKENS,
    Bits,
    Quantize,
    check_grid,
    check_group,
    check_signs,
    set_factors,
    set_ranges,
    some_roundable,
)
from smallbert.model.quantised import Activations
from smallbert.model.rounding import Grid, Scope, encode
from smallbert.model.smoothing import Reader, search_factors, whole_range
from smallbert.training.aware import Ranges, Rule, round_inputs_seen, round_weights_seen, to_best, to_nearest
from smallbert.training.calibrate import draw_texts, input_bounds, sample_inputs
from smallbert.training.masks import MASK_STAGE

DECAY = 0.9999


class SeenRounded(Method, shared=True):
    """What every method has that lets the model see rounded weights while it trains: it is alone in that."""

    stage: ClassVar[int] = 55  # after what cuts layers, so that it plans for those that stay

    def _plan_of(self, phase: Any) -> dict[str, Any]:
        return next(entry["plan"] for entry in reversed(phase.encoder.history) if entry["step"] == str(self))

    def fits(self, phase: Any, steps: int | None) -> None:
        """Nobody else rounds."""
        if [method for method in phase.methods if isinstance(method, SeenRounded)] != [self]:
            raise UserError(f"{self.name}: another method of this phase rounds the same weights; keep one of them")


def prunes(phase: Any) -> bool:
    """Whether there are zeros in a phase that must stay zeros, or will be."""
    return any(method.stage == MASK_STAGE for method in phase.methods) or bool(phase.encoder.held("zeros"))


class Aware(SeenRounded, shared=True):
    """What every method has that lets the model see weights on a grid while it trains, and then stores them so."""

    rule: ClassVar[Rule] = staticmethod(to_nearest)

    def plan(self, encoder: Any, task: Any) -> dict[str, Any]:
        """What is rounded."""
        names = some_roundable(encoder, self.name)
        check_group(self.storage(), self.name, encoder, names)
        return {"modules": names}

    def storage(self) -> Quantize:
        """The method that stores what was learned."""
        raise NotImplementedError

    def rule_of(self, module: nn.Module, trains: bool) -> Rule:
        """How a module's matrix is rounded; a table with bits of its own goes to the nearest number."""
        own = isinstance(module, nn.Embedding) and self.storage().embeddings
        rule = to_nearest if own else type(self).rule
        return to_best if rule is to_nearest and not trains else rule

    def fits(self, phase: Any, steps: int | None) -> None:
        """Nobody else rounds, and a sign is not asked to be zero."""
        super().fits(phase, steps)
        check_signs(self.name, getattr(self, "fewest", self.storage().bits), prunes(phase))

    def attach(self, phase: Any) -> None:
        """Round weights once a step, and inputs where they come in."""
        plan, store = self._plan_of(phase), self.storage()
        parts = {name: phase.encoder.get_submodule(name) for name in plan["modules"]}
        grids = {name: store.grid_of(part, plan.get("bits", {}).get(name)) for name, part in parts.items()}
        layers = [name for name, part in parts.items() if isinstance(part, nn.Linear)]
        ranges = phase.train_module(self.name, Ranges(len(layers), getattr(self, "decay", DECAY)))
        if store.smooth:
            ranges.scale_inputs(self._factors(phase, layers, grids))
        rules = {name: self.rule_of(part, phase.settings is not None) for name, part in parts.items()}
        round_weights_seen(phase, ranges, grids, rules)
        if store.activations:
            ranges.hooks = round_inputs_seen(phase, ranges, layers, store.activations == "static")

    def _factors(self, phase: Any, layers: list[str], grids: dict[str, Grid]) -> dict[str, Tensor]:
        """What each layer multiplies its inputs by, for the model as the phase finds it."""
        encoder, texts = phase.encoder, draw_texts(phase.encoder, phase.task, TEXTS, phase.seed, self.name)
        bounds, rows = sample_inputs(encoder, layers, texts, TOKENS, phase.seed)
        readers = {name: Reader(encoder.get_submodule(name).weight.detach(), grids[name]) for name in layers}
        return search_factors(readers, bounds, rows, self.storage().activations == "static")

    def settle(self, phase: Any) -> None:
        """Store what the model saw, to the bit."""
        encoder, ranges, plan, store = phase.encoder, phase.modules[self.name], self._plan_of(phase), self.storage()
        for hook in getattr(ranges, "hooks", ()):
            hook.remove()
        weights = {name: encoder.get_submodule(name).weight.detach() for name in plan["modules"]}
        layers = [name for name in plan["modules"] if isinstance(encoder.get_submodule(name), nn.Linear)]
        found = dict(zip(layers, ranges.bounds, strict=True))
        unseen = [name for name, steps in zip(layers, ranges.steps, strict=True) if not steps]
        if store.activations == "static" and unseen:  # nothing was trained, or not this head
            last = [phase.batch] if phase.task is None and phase.batch is not None else None
            batches = last or draw_texts(encoder, phase.task, TEXTS, phase.seed, self.name)
            for name, bounds in input_bounds(encoder, unseen, batches).items():
                found[name] = whole_range(bounds * ranges.factors.get(name, 1.0))
        stored = {key: plan[key] for key in ("modules", "bits") if key in plan}
        encoder.apply_method(store, stored | ({"scaled": list(ranges.factors)} if ranges.factors else {}))
        for name, weight in weights.items():
            module, scales = encoder.get_submodule(name), ranges.scales[name]
            module.write(encode(weight / ranges.factors.get(name, 1.0), scales, module.grid), *scales)
        set_factors(encoder, ranges.factors)
        if store.activations == "static":
            set_ranges(encoder, found)


class QuantizeAware(Aware):
    """Train with weights and inputs rounded as they will be in use, then store them so.

    bits: bits per weight; 1 stores the sign, with the mean size of the weights that share a scale as that scale
    activations: how inputs of linear layers are rounded: False not at all; True to 8 bits, each token by its own
        largest value; 'static' to 8 bits, by one fixed range per layer, tracked while training
    scope: which weights share a scale: 'row' each row of a matrix, 'group' every `group` weights of a row, 'tensor' the
        whole matrix
    group: weights of a row that share a scale, with scope='group'
    symmetric: whether the range is centred on zero. False lets it reach from the smallest to the largest weight (and to
        zero) and stores a zero point with each scale; one bit is always symmetric
    embeddings: bits per weight of the embedding tables; None takes `bits`
    decay: share of the old range that is kept at each step, with activations='static'. In the first 1 / (1 - decay)
        steps a range is the mean over all steps so far; the paper's keeps that of the first batch in a short run
    smooth: 'search' lets each layer scale its inputs by factors that are found on training texts before the first step,
        so that a neuron many times larger than all others leaves them enough levels of a range. None scales no inputs
    """

    trains: ClassVar[bool] = True

    bits: Bits = 8
    activations: Activations = "static"
    scope: Scope = "row"
    group: int = 64
    symmetric: bool = True
    embeddings: Bits | None = None
    decay: float = DECAY
    smooth: Literal["search"] | None = None

    def check(self) -> None:
        """A grid, a decay, and inputs to scale."""
        check_grid(self)
        if self.smooth and not self.activations:
            raise UserError(
                f"{self.name}: smooth={self.smooth!r} helps to round inputs, which activations=False does not round; "
                "leave one of them out"
            )
        if not 0 <= self.decay < 1:
            raise UserError(f"{self.name}: decay is a share from 0 to below 1, not {self.decay}")
        if self.decay != DECAY and self.activations != "static":
            raise UserError(f"{self.name}: decay={self.decay} moves the ranges of activations='static'; leave it out")

    def storage(self) -> Quantize:
        """The same grid."""
        grid = (self.scope, self.group, self.symmetric, self.embeddings)
        return Quantize(self.bits, self.activations, *grid, smooth=self.smooth or 0.0)
