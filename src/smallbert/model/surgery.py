"""The only file that cuts an encoder. Every function takes what to KEEP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from smallbert.errors import UserError
from smallbert.model.anatomy import anatomy, layers, replace_module

if TYPE_CHECKING:
    from smallbert.model.encoder import Encoder


def check_layers(encoder: Encoder, name: str) -> None:
    """Refuse a model without layers to whatever works on layers."""
    if not encoder.order:
        raise UserError(f"{name} works on layers, and a model of type {encoder.family!r} has none")


def keep_layers(encoder: Encoder, kept: list[int]) -> None:
    """Keep the layers run at these places, in this order; what reads layers loses the same ones."""
    backbone, row = encoder.backbone, anatomy(encoder.backbone)
    if row.shared:
        encoder.order = [encoder.order[place] for place in kept]
    else:
        stack = layers(backbone)
        replace_module(backbone, row.layers, nn.ModuleList(stack[encoder.order[place]] for place in kept))
        encoder.order = list(range(len(kept)))
    config = backbone.config
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        config.layer_types = [kinds[place] for place in kept]
    setattr(config, row.count, len(kept))
    poolers: list[Any] = [head for head in encoder.heads.values() if hasattr(head, "reads")]
    for reader in (encoder.mixture, encoder.connections, *poolers):
        if reader is not None:
            reader.keep(kept)
