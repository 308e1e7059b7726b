"""Moving outliers from inputs into weights (SmoothQuant, Xiao et al. 2023).

What goes into a layer is multiplied by a factor, feature by feature, and the layer's columns are divided by it. Where
nothing else reads those inputs, what comes directly before takes the product over. In a post-norm layer the norm's
output also feeds the sum with the next part, so that there only v (through attention, which mixes tokens and not
features) can do so for `out`, and `up` for `down` where the function between them is ReLU. Norms that feed one layer
only can too: those of ModernBERT, and the one before a projection of narrow embeddings; and the half of ModernBERT's
`up` that multiplies. Elsewhere the layer itself multiplies: behind GELU a single neuron may be many times as large as
any other, and take the steps of a range from them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from smallbert.model.anatomy import anatomy, layers, part
from smallbert.model.products import code_range, code_tokens
from smallbert.model.rounding import Grid, rounded
from smallbert.progress import tell

if TYPE_CHECKING:
    from smallbert.model.encoder import Encoder

STRENGTHS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # that a search tries, besides none
PROJECTIONS = {"electra": "embeddings_project", "albert": "encoder.embedding_hidden_mapping_in"}


def smoothable(encoder: Encoder) -> list[dict[str, Any]]:
    """Which layer can be smoothed, and what before it takes the division over, in which of its rows.

    [{"layer": "backbone.….output.dense", "before": "backbone.….value", "rows": [0, 384]}, …]
    """
    modules, found = dict(encoder.named_modules()), []
    for before, layer, half in _neighbours(encoder):
        first, second = modules.get(before), modules.get(layer)
        if type(second) is not nn.Linear or getattr(first, "weight", None) is None:
            continue
        assert first is not None
        count = len(first.weight)
        rows = [count * half[0] // half[1], count * (half[0] + 1) // half[1]]
        if type(first) in (nn.Linear, nn.LayerNorm) and rows[1] - rows[0] == second.in_features:
            found.append({"layer": layer, "before": before, "rows": rows})
    return found


def _neighbours(encoder: Encoder) -> Iterator[tuple[str, str, tuple[int, int]]]:
    """What stands directly before a layer, the layer, and which of how many equal parts of the first it reads."""
    backbone, row = encoder.backbone, anatomy(encoder.backbone)
    for number, layer in enumerate(layers(backbone)):
        stem = f"backbone.{row.layers}.{number}"
        value, out = part(backbone, layer, "v"), part(backbone, layer, "out")
        yield f"{stem}.{value.path}", f"{stem}.{out.path}", (value.block, value.blocks)
        if encoder.family == "modernbert":
            yield f"{stem}.attn_norm", f"{stem}.{value.path}", (0, 1)
            yield f"{stem}.mlp_norm", f"{stem}.{row.up}", (0, 1)
            yield f"{stem}.{row.up}", f"{stem}.{row.down}", (1, 2)
        elif _activation(backbone.config) == "relu":
            yield f"{stem}.{row.up}", f"{stem}.{row.down}", (0, 1)
    if encoder.family in PROJECTIONS:
        yield "backbone.embeddings.LayerNorm", f"backbone.{PROJECTIONS[encoder.family]}", (0, 1)


def _activation(config: Any) -> Any:
    return getattr(config, "hidden_act", getattr(config, "activation", None))


def factor_of(weights: list[Tensor], peaks: Tensor, strength: float) -> Tensor:
    """What inputs are multiplied by: peak of the columns^(1 - strength) / peak of the inputs^strength, by feature.

    weights (outputs, features), of all layers that read these inputs; peaks (features)
    """
    columns = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0).clamp(min=1e-5)
    return columns ** (1 - strength) / peaks.clamp(min=1e-5) ** strength


def peaks_of(bounds: Tensor, usual: bool = False) -> Tensor:
    """How large each feature gets, from (2, features); one that said nothing is given what is usual.

    It may speak in other texts, where it must not leave the range. `usual`: so is each that is quieter than that.
    """
    peaks = bounds.abs().amax(0)
    middle = peaks[peaks > 0].median() if bool((peaks > 0).any()) else peaks.new_ones(())
    return peaks.clamp(min=float(middle)) if usual else torch.where(peaks > 0, peaks, middle)


@torch.no_grad()
def smooth(encoder: Encoder, pair: dict[str, Any], factor: Tensor) -> None:
    """Let what is before a layer multiply by a factor, and the layer divide by it, in place.

    In exact arithmetic the encoder computes what it did before.
    """
    before, layer = encoder.get_submodule(pair["before"]), encoder.get_submodule(pair["layer"])
    layer.weight.div_(factor)  # type: ignore[operator]
    rows = slice(*pair["rows"])
    for one in (before.weight, before.bias):
        if one is not None:
            one[rows].mul_(factor.view(-1, *[1] * (one.dim() - 1)))  # type: ignore[index, operator]


class Reader(NamedTuple):
    """A layer that reads inputs in whole numbers: its matrix, and how that is rounded."""

    weight: Tensor
    grid: Grid


@torch.no_grad()
def search_factor(readers: list[Reader], bounds: Tensor, rows: Tensor, fixed: bool) -> Tensor:
    """The factor of that strength which leaves the least error in what the layers give for these inputs.

    bounds (2, features) of all inputs, rows (tokens, features) of some; fixed: inputs are rounded by one range, not
    each token by its own.
    """
    weights, peaks = [reader.weight for reader in readers], peaks_of(bounds, usual=True)
    tried = [torch.ones_like(peaks), *(factor_of(weights, peaks, strength) for strength in STRENGTHS)]
    return min(tried, key=lambda factor: _error(readers, bounds, rows, fixed, factor))


def search_factors(
    readers: Mapping[str, Reader], bounds: dict[str, Tensor], rows: dict[str, Tensor], fixed: bool
) -> dict[str, Tensor]:
    """The factor of each of these layers that has inputs; those that read the same have the same."""
    same: dict[bytes, list[str]] = defaultdict(list)  # which read the same is told by their bounds
    for name in readers:
        if name in bounds:
            same[bounds[name].cpu().numpy().tobytes()].append(name)
    found: dict[str, Tensor] = {}
    for number, names in enumerate(same.values()):
        factor = search_factor([readers[name] for name in names], bounds[names[0]], rows[names[0]], fixed)
        found |= dict.fromkeys(names, factor)
        tell("searching input scales", number + 1, len(same))
    return found


def _error(readers: list[Reader], bounds: Tensor, rows: Tensor, fixed: bool, factor: Tensor) -> float:
    """The squared error of the outputs, as a share of the squared outputs, of all layers together."""
    given = rows * factor
    coded = code_range(given, *whole_range(bounds * factor)) if fixed else code_tokens(given)
    total, seen = 0.0, coded.real()
    for weight, grid in readers:
        wanted = rows @ weight.T
        missed = seen @ rounded(weight / factor, grid).T - wanted
        total += float(missed.square().sum() / wanted.square().sum().clamp(min=1e-12))
    return total


def whole_range(bounds: Tensor) -> Tensor:
    """The range of all features of a layer's inputs: (2, features) -> (2,)."""
    return torch.stack([bounds[0].min(), bounds[1].max()])
