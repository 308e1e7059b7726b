"""The only file that cuts an encoder. Every function takes what to KEEP."""

from torch import nn

from smallbert.model.anatomy import anatomy, layers, replace_module
from smallbert.model.encoder import PLAIN, Encoder


def counterpart(layer: int, mine: int, theirs: int) -> int:
    """Which of `theirs` layers belongs to a layer of `mine`, counted from 1, evenly: 1, 2, 3 of 6 -> 2, 4, 6.

    A deeper model has equal shares of each: 1 to 4 of 2 -> 1, 1, 2, 2
    """
    return round(layer * theirs / mine) if mine <= theirs else -(-layer * theirs // mine)


def keep_layers(encoder: Encoder, kept: list[int]) -> None:
    """Keep the layers run at these places, in this order; what reads layers loses the same ones.

    A second head that nothing predicts with goes too, since what it read is there no more.
    """
    if kept != list(range(len(encoder.order))) and PLAIN in encoder.heads:
        del encoder.heads[PLAIN]
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


def lost_heads(before: Encoder, after: Encoder) -> list[str]:
    """What is to be said of a head that went with the layers it stood on."""
    gone = PLAIN in before.heads and PLAIN not in after.heads and len(after.order) < len(before.order)
    return ["the plain head, beside which the pooler learned, was removed with the layers below it"] if gone else []
