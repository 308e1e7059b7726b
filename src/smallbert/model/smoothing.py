"""Moving outliers from inputs into weights (SmoothQuant, Xiao et al. 2023), where nothing else reads those inputs.

What goes into a layer is divided by s, feature by feature, and the layer's columns are multiplied by it; what comes
directly before takes the division over. In a post-norm layer the norm's output also feeds the sum with the next
part, so that there only v (through attention, which mixes tokens and not features) can do so for `out`, and `up` for
`down` where the function between them is ReLU. Norms that feed one layer only can too: those of ModernBERT, and the
one before a projection of narrow embeddings; and the half of ModernBERT's `up` that multiplies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from smallbert.model.anatomy import anatomy, layers, part

if TYPE_CHECKING:
    from smallbert.model.encoder import Encoder

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


@torch.no_grad()
def smooth(encoder: Encoder, pairs: list[dict[str, Any]], bounds: dict[str, Tensor], strength: float) -> None:
    """Divide and multiply by s = peak of the inputs^strength / peak of the columns^(1 - strength), in place.

    In exact arithmetic the encoder computes what it did before.
    """
    for pair in pairs:
        before, layer = encoder.get_submodule(pair["before"]), encoder.get_submodule(pair["layer"])
        peaks = bounds[pair["layer"]].abs().amax(0).clamp(min=1e-5)
        columns = layer.weight.abs().amax(0).clamp(min=1e-5)  # type: ignore[operator]
        scale = (peaks**strength / columns ** (1 - strength)).clamp(min=1e-5)
        layer.weight.mul_(scale)  # type: ignore[operator]
        rows = slice(*pair["rows"])
        for one in (before.weight, before.bias):
            if one is not None:
                one[rows].div_(scale.view(-1, *[1] * (one.dim() - 1)))  # type: ignore[index, operator]
