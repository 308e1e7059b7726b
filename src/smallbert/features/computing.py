"""The hidden states of the texts of one shard, and a head's scores of them, as they are stored."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from smallbert.errors import RunError
from smallbert.features.parts import Name, taps_for, vector
from smallbert.features.plan import Plan
from smallbert.features.store import row_places
from smallbert.model.batch import Batch
from smallbert.model.encoder import HEAD, Encoder
from smallbert.texts.batches import Layout, make_batch, sort_into_batches
from smallbert.texts.data import STUDENT, Stream

LARGEST = float(torch.finfo(torch.float16).max)
TOP = 127
PICKS: dict[str, Callable[[Batch, Tensor], Tensor]] = {
    "all": lambda batch, hidden: hidden[batch.tokens()],
    "first": Batch.first,
    "mean": Batch.mean,
}


@torch.inference_mode()
def compute_shard(
    encoder: Encoder, stream: Stream, plan: Plan, number: int, tell: Callable[[int], None]
) -> tuple[dict[str, Tensor], int]:
    """The arrays of one shard, and how many values were too large for float16."""
    (start, stop), layers = plan.ranges[number], plan.about["layers"]
    arrays = {
        name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (dtype, shape) in plan.shapes(number).items()
    }
    counts, pick = plan.counts[start:stop], PICKS[plan.about["tokens"]]
    begin, places, scores = np.cumsum(counts) - counts, np.arange(len(layers)), plan.about.get("scores")
    done, clipped = 0, 0
    for some in sort_into_batches(
        stream.views[STUDENT].lengths[start:stop], 2**15 if encoder.device.type == "cuda" else 2**11
    ):
        batch = make_batch(stream, some + start, Layout(False, 0)).to(encoder.device)
        # Layers above the last one that is kept do not run, unless a head reads them.
        seen = encoder.look(batch, taps_for(layers), scores is not None, HEAD if scores is None else scores["head"])
        if layers:
            made = torch.stack([pick(batch, vector(seen.taps, layer).float()) for layer in layers])
            _check_finite(made, layers)
            rows = torch.from_numpy(row_places(begin[some] * len(layers), counts[some], places)).flatten()
            kept, cut = QUANTISE[plan.about["dtype"]](made.flatten(0, 1))
            clipped += cut
            for name, values in kept.items():
                arrays[name][rows] = values.cpu()
        if scores is not None and seen.scores is not None:
            found, row = seen.scores.float(), some
            if scores["of"] == "tokens":
                found, row = found[batch.tokens()], row_places(begin[some], counts[some], np.zeros(1, np.int64))[0]
            if not torch.isfinite(found).all():
                raise RunError("the scores of this model are not all finite; they cannot be stored")
            arrays["scores"][torch.from_numpy(row)] = found.cpu()
        done += len(some)
        tell(done)
    return arrays, clipped


def _check_finite(made: Tensor, layers: list[Name]) -> None:
    if not torch.isfinite(made).all():
        layer = layers[int((~torch.isfinite(made)).flatten(1).any(1).nonzero()[0])]
        what = f"hidden state {layer}" if isinstance(layer, int) else f"{layer!r}"
        raise RunError(f"{what} of this model has values that are not finite; it cannot be stored")


def _single(values: Tensor) -> tuple[dict[str, Tensor], int]:
    return {"values": values}, 0


def _half(values: Tensor) -> tuple[dict[str, Tensor], int]:
    return {"values": values.clamp(-LARGEST, LARGEST).half()}, int((values.abs() > LARGEST).sum())


def _whole(values: Tensor) -> tuple[dict[str, Tensor], int]:
    """Whole numbers from -127 to 127, each row with a scale of its own."""
    scales = (values.abs().amax(-1) / TOP).clamp(max=LARGEST).half()
    used = scales.float().clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)
    whole = (values / used).round().clamp(-TOP, TOP) * (scales > 0).unsqueeze(-1)
    return {"scales": scales, "values": whole.to(torch.int8)}, int((values.abs() > LARGEST * TOP).sum())


QUANTISE = {"float32": _single, "float16": _half, "int8": _whole}
