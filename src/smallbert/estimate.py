"""What a recipe would make of a model, told before anything is trained: `build` steps on weights that are not there."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import nn

from smallbert.errors import UserError
from smallbert.measuring.cost import weights_of
from smallbert.methods import Method
from smallbert.model.anatomy import linears
from smallbert.model.encoder import Encoder
from smallbert.recipe import Recipe
from smallbert.training.masks import What, maskable, stack_up

if TYPE_CHECKING:
    from smallbert.tasks import Task

WHOLE = 0.99  # of a matrix with so many numbers other than zero nothing is saved without its zeros


def estimate(encoder: Encoder, recipe: Recipe | str) -> dict[str, Any]:
    """What shape a recipe would give, without data or training; null where only weights or data could tell.

    {"fits": True, "why": None, "layers": 3, "parameters": 17387522, "weight_bytes": 69550088}
    """
    unknown: dict[str, Any] = {"layers": None, "parameters": None, "weight_bytes": None}
    try:
        made = foresee(encoder, Recipe(recipe).phases())
    except UserError as error:
        return {"fits": False, "why": str(error), **unknown}
    if made is None:
        return {"fits": True, "why": None, **unknown}
    return {
        "fits": True,
        "why": None,
        "layers": len(made.order),
        "parameters": sum(tensor.numel() for tensor in weights_of(made).values()),
        "weight_bytes": sum(tensor.numel() * tensor.element_size() for tensor in made.state_dict().values()),
    }


def foresee(encoder: Encoder, phases: Iterable[Iterable[Method]], task: Task | None = None) -> Encoder | None:
    """The encoder that phases would make, without weights; None where that depends on what the weights will be.

    What running would refuse for the model's sake is refused here, in the same sentence, and nothing else is.
    """
    empty = without_weights(encoder)
    for methods in phases:
        methods = sorted(methods, key=lambda method: method.stage)
        for method in methods:
            try:
                if method.name != "head" or task is not None:
                    empty.apply_method(method, method.plan(empty, task))
            except UserError:
                raise
            except Exception:  # it looked at weights; whatever else is wrong, running will say
                return None
            if not method.trains:
                _prune(empty, method)
        for method in methods:
            if method.trains:  # what prunes while it trains looks when all is built
                _prune(empty, method)
    return empty


def without_weights(encoder: Encoder) -> Encoder:
    """A copy that has shapes only, made without copying a weight; its plain matrices know whether they were whole."""
    memo: dict[int, Any] = {id(encoder.tokenizer): encoder.tokenizer}
    for tensor in (*encoder.parameters(), *encoder.buffers(), *encoder.spare.values()):
        shape = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = (
            nn.Parameter(shape, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else shape.detach()
        )
    empty = copy.deepcopy(encoder, memo)
    for name, module in linears(encoder.backbone):
        if type(module) is nn.Linear and not module.weight.is_meta:
            whole = int(module.weight.count_nonzero()) > WHOLE * module.weight.numel()
            empty.backbone.get_submodule(name).share_left = 1.0 if whole else None
    return empty


def _prune(empty: Encoder, method: Method) -> None:
    """Refuse where there is nothing to prune; note for `sparse`, which finds no weights here, what would be left."""
    what: Any = getattr(method, "what", None)
    if what not in get_args(What):
        return
    names, keep = maskable(empty, what), getattr(method, "keep", None)
    stack_up(empty, names)
    for name in names:
        module: Any = empty.get_submodule(name.removesuffix(".weight"))
        before = getattr(module, "share_left", None)
        module.share_left = keep if keep is None or before is None else min(keep, before)
