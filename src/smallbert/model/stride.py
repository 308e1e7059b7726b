"""A shorter sequence for the layers: neighbours are joined before them and told apart again after them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from smallbert.model.batch import Batch


class Stride(nn.Module):
    """A strided convolution over every `step` tokens before the layers, and its counterpart after them.

    (texts, 9, width) -> join -> (texts, 5, width) -> layers -> split -> (texts, 9, width)

    At first a group is the mean of its tokens, and a token gets back what its group became plus what set it apart from
    the group: layers that change nothing would then give every token back as it was.
    """

    def __init__(self, step: int, width: int):
        """Shapes only; see `begin`."""
        super().__init__()
        self.step = step
        self.join = nn.Conv1d(width, width, step, stride=step)
        self.split = nn.ConvTranspose1d(width, width, step, stride=step)
        self.apart = nn.Parameter(torch.ones(width))

    @torch.no_grad()
    def begin(self) -> None:
        """Set the values of the beginning."""
        same = torch.eye(self.join.in_channels).unsqueeze(-1).expand_as(self.join.weight)
        self.join.weight.copy_(same / self.step)
        self.split.weight.copy_(same)
        nn.init.zeros_(self.join.bias)  # type: ignore[arg-type]
        nn.init.zeros_(self.split.bias)  # type: ignore[arg-type]
        nn.init.ones_(self.apart)

    def forward(self, hidden: Tensor, batch: Batch) -> tuple[Tensor, Batch, Callable[[Tensor, bool], Tensor]]:
        """The joined hidden states, the batch as the layers see it, and how to go back."""
        tokens, most = hidden.shape[1], self.step - 1  # what is over when windows are full is left out by all below
        full = functional.pad(hidden, (0, 0, 0, most))
        mask = torch.ones_like(batch.input_ids) if batch.attention_mask is None else batch.attention_mask
        there = functional.pad(mask, (0, most)).to(hidden.dtype)
        count = there.unfold(1, self.step, self.step).sum(-1)
        full = full * there.unsqueeze(-1)  # padding has no part in its group, and a group of fewer weighs as much
        scale = (self.step / count.clamp(min=1)).unsqueeze(-1)
        joined = self.join(full.transpose(1, 2)).transpose(1, 2) * scale
        apart = self.apart * (full[:, :tokens] - joined.repeat_interleave(self.step, 1)[:, :tokens])

        def spread(states: Tensor, last: bool) -> Tensor:
            """States between layers are only looked at, by mixtures; what is handed on is the last one."""
            each = (
                self.split(states.transpose(1, 2)).transpose(1, 2) if last else states.repeat_interleave(self.step, 1)
            )
            return each[:, :tokens] + apart

        short = replace(
            batch,
            input_ids=batch.input_ids[:, :: self.step],
            token_type_ids=batch.token_type_ids[:, :: self.step],
            position_ids=batch.position_ids[:, : joined.shape[1]],
            attention_mask=None if batch.attention_mask is None else (count > 0).long(),
            longest=joined.shape[1],
        )
        return joined, short, spread
