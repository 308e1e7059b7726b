"""The only file that cuts an encoder. Every function takes what to KEEP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from smallbert.model.anatomy import anatomy, layers, replace_module

if TYPE_CHECKING:
    from smallbert.model.encoder import Encoder


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
    for reader in (encoder.mixture, encoder.connections, *encoder.heads.values()):
        if (keep := getattr(reader, "keep", None)) is not None:  # a plain head reads the last layer, whichever it is
            keep(kept)
