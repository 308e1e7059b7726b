"""How much each weight matters to a task: |weight * gradient|, what a loss would lose without it to first order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from smallbert.machine.processes import agree
from smallbert.model.encoder import Encoder
from smallbert.model.heads import losses
from smallbert.texts.batches import Layout, make_batch
from smallbert.texts.data import STUDENT, tokenise, usable_length

if TYPE_CHECKING:
    from smallbert.tasks import Task

BATCH = 32


def weigh_by_loss(encoder: Encoder, task: Task, examples: int, seed: int) -> dict[nn.Parameter, Tensor]:
    """|weight * gradient| of every weight of a backbone, summed over batches of some training examples.

    The encoder is left as it was, and computes as in use, without dropout.
    """
    rows = task.split("train")
    order = np.random.default_rng(seed).permutation(len(rows))[:examples]
    stream = tokenise(encoder.tokenizer, rows.take(order.tolist()), task.kind, usable_length(encoder, None, task))
    layout = Layout(False, int(max(stream.views[STUDENT].lengths)))
    seen = encoder.copy().eval().requires_grad_(True)
    pairs = list(zip(encoder.backbone.parameters(), seen.backbone.parameters(), strict=True))
    total = {mine: torch.zeros_like(mine) for mine, _ in pairs}
    for start in range(0, len(stream), BATCH):
        batch = make_batch(stream, np.arange(start, min(start + BATCH, len(stream))), layout).to(encoder.device)
        seen.zero_grad()
        losses(seen.head, seen(batch), batch).sum().backward()
        for mine, copy in pairs:
            if copy.grad is not None:
                total[mine] += (copy.detach() * copy.grad).abs()
    agree(total.values())  # sums differ in the last bit from device to device
    return total
