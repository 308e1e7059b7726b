"""Store pruned matrices without their zeros, and multiply them sparsely where a CPU then measures faster."""

from typing import Any, ClassVar, Literal

import torch
from torch import nn

from smallbert.errors import UserError
from smallbert.methods import Method
from smallbert.model.anatomy import linears, replace_module
from smallbert.model.zeros import SparseLinear, best_width, expected_room, sparse_linears


class Sparse(Method):
    """Store the layers' matrices without their zeros; a CPU multiplies them sparsely where that measures faster.

    values: number format in which weights are stored: 'float32' as they are, 'float16' rounded, half the size
    run: how a CPU multiplies: 'measured' times both ways and takes the faster, so scores of two processes are equal
        only up to rounding; 'dense' fills the zeros in, and scores are equal bit by bit; 'sparse' leaves zeros out
    """

    stage: ClassVar[int] = 60

    values: Literal["float32", "float16"] = "float32"
    run: Literal["measured", "dense", "sparse"] = "measured"

    def plan(self, encoder: Any, task: Any) -> dict[str, Any]:
        """Every matrix of the layers that is smaller without its zeros, and how much room it needs."""
        found, every, bytes_each, unknown = [], 0, getattr(torch, self.values).itemsize, False
        for name, module in linears(encoder.backbone):
            if type(module) is not nn.Linear:
                continue
            every, unknown = every + 1, unknown or _is_unknown(module)
            count, (width, size) = _room(module)
            if size + count * bytes_each < module.weight.numel() * bytes_each:
                found.append({"name": f"backbone.{name}", "count": count, "width": width, "bytes": size})
        if found or unknown:
            return {"matrices": found}
        if stored := len(sparse_linears(encoder)):
            raise UserError(
                f"sparse: {stored} matrices of this {encoder.family} model are stored without their zeros already, and "
                "no other one would become smaller; leave this sparse out"
            )
        raise UserError(
            f"sparse: none of the {every} real-valued matrices in the layers of this {encoder.family} model has enough "
            "zeros to be smaller without them; prune first, as in magnitude(0.1) + train | sparse, and quantize "
            "afterwards, or leave sparse out"
        )

    def build(self, encoder: Any, plan: dict[str, Any]) -> None:
        """Put empty layers with room for so many numbers in their places."""
        for one in plan["matrices"]:
            room = one["count"], one["width"], one["bytes"], getattr(torch, self.values)
            new = SparseLinear(encoder.get_submodule(one["name"]), *room, self.run)
            replace_module(encoder, one["name"], new.to(encoder.device))

    def fill(self, encoder: Any, before: Any, plan: dict[str, Any], task: Any, seed: int) -> None:
        """Pack the numbers that are not zero."""
        for one in plan["matrices"]:
            encoder.get_submodule(one["name"]).fill(before.get_submodule(one["name"]).weight)


def _room(module: nn.Linear) -> tuple[int, tuple[int, int]]:
    """How many numbers are left of a matrix, and the best width of their gaps: an estimate where it has none."""
    if not module.weight.is_meta:
        return int(module.weight.count_nonzero()), best_width(module.weight.detach())
    return expected_room(module.weight.shape, getattr(module, "share_left", None) or 1.0)


def _is_unknown(module: nn.Linear) -> bool:
    """Whether an estimate, which has no weights, cannot be sure that none of them would be zeros."""
    return module.weight.is_meta and getattr(module, "share_left", None) != 1.0
