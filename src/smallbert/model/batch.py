"""A batch of token sequences, padded or packed, with the few questions a head may ask of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor
from torch.nn import functional

TAUGHT = "taught "  # how the names of those tensors begin


@dataclass(frozen=True)
class Batch:
    """Some sequences as tensors, in one of two layouts that mean the same.

    padded, three sequences of 2, 4 and 3 tokens:  input_ids (3, 4), attention_mask (3, 4)
    packed, the same sequences:                    input_ids (1, 9), bounds [0, 2, 6, 9]

    A packed batch may end in filler: tokens of no sequence, so that its shape can stay the same from step to step.
    """

    input_ids: Tensor
    token_type_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor | None = None  # padded only; None there too when nothing is padding
    bounds: Tensor | None = None  # packed only: where each segment starts and ends, int32, filler segments last
    sequence: Tensor | None = None  # packed only: which sequence each token belongs to; filler has the number `size`
    size: int = 0  # how many sequences
    longest: int = 0  # no sequence is longer than this
    present: Tensor | None = None  # (size,) 1.0 for a real sequence, 0.0 for one that only fills the shape
    labels: Tensor | None = None
    words: Tensor | None = None  # the number of the word that begins at each token, -1 where none does
    places: Tensor | None = None  # for words to be guessed: which tokens they are, counted through all rows
    count: Tensor | None = None  # how many losses the whole batch gives, over all processes
    labelled: Tensor | None = None  # how many of them have a label, where some have none
    texts: Tensor | None = None  # how many sequences the whole batch has, over all processes
    hidden: Tensor | None = None  # (states, *input_ids.shape, width) where a frozen backbone has read it before
    numbers: tuple[int, ...] | None = None  # which hidden states those are, where not all were kept
    taught: Mapping[str, Tensor] = field(default_factory=dict)  # what teachers said of it, or where: "latest scores", …

    @property
    def packed(self) -> bool:
        """Whether the sequences stand one behind the other without padding."""
        return self.bounds is not None

    def first(self, values: Tensor) -> Tensor:
        """The value at each sequence's first token, of one layer or of several: (…, sequences, features)."""
        if self.bounds is None:
            return values[..., 0, :]
        # An empty slot behind the last token has no first token; what it reads instead is not counted anywhere.
        return values.squeeze(-3).index_select(-2, self.bounds[: self.size].long().clamp(max=values.shape[-2] - 1))

    def mean(self, values: Tensor) -> Tensor:
        """The mean over each sequence's own tokens: (sequences, features)."""
        if self.sequence is None:
            if self.attention_mask is None:
                return values.mean(1)
            mask = self.attention_mask.unsqueeze(-1).to(values.dtype)
            return (values * mask).sum(1) / mask.sum(1)
        total = values.new_zeros(self.size + 1, values.shape[-1]).index_add(0, self.sequence, values[0])
        count = values.new_zeros(self.size + 1).index_add(0, self.sequence, values.new_ones(values.shape[1]))
        return total[: self.size] / count[: self.size].clamp(min=1).unsqueeze(-1)

    def spread(self, values: Tensor) -> Tensor:
        """What each sequence has, at each of its tokens: (sequences, …) -> (rows, tokens, …); filler reads the last."""
        if self.sequence is None:
            return values.unsqueeze(1).expand(-1, self.input_ids.shape[1], *values.shape[1:])
        return values.index_select(0, self.sequence.clamp(max=self.size - 1)).unsqueeze(0)

    def rows(self, values: Tensor, empty: float) -> Tensor:
        """Token values laid out one sequence a row, `empty` where a row has no token: (sequences, longest, …)."""
        if self.sequence is None:
            if self.attention_mask is None:
                return values
            padding = (self.attention_mask == 0).view(*values.shape[:2], *(1,) * (values.dim() - 2))
            return values.masked_fill(padding, empty)
        grid = values.new_full(((self.size + 1) * self.longest, *values.shape[2:]), empty)
        cell = self.sequence * self.longest + self.position_ids[0]
        return grid.index_put((cell,), values[0]).unflatten(0, (self.size + 1, self.longest))[: self.size]

    def from_rows(self, values: Tensor) -> Tensor:
        """What `rows` has laid out, as it stood before: (sequences, longest, …) -> (rows, tokens, …)."""
        if self.sequence is None:
            return values
        cell = self.sequence.clamp(max=self.size - 1) * self.longest + self.position_ids[0]  # filler reads anything
        return values.flatten(0, 1).index_select(0, cell).unsqueeze(0)

    def shares(self, chosen: Tensor | None = None) -> Tensor:
        """What share of its sequence's chosen tokens (or of all) each one is; those of a sequence add up to one.

        padded, of three tokens each: [[1, 1, 0], [1, 0, 0]]  ->  [[0.5, 0.5, 0], [1, 0, 0]]
        """
        if chosen is None and self.bounds is not None and self.sequence is not None:
            each = 1 / self.bounds[: self.size + 1].diff().clamp(min=1)  # which spares counting
            each = each if self.present is None else each * self.present
            return functional.pad(each, (0, 1)).index_select(0, self.sequence).unsqueeze(0)
        marks = (self.tokens() if chosen is None else chosen).float()
        if self.sequence is None:
            return marks / marks.sum(1, keepdim=True).clamp(min=1)
        count = marks.new_zeros(self.size + 1).index_add(0, self.sequence, marks[0])
        return marks / count.clamp(min=1)[self.sequence]

    def tokens(self) -> Tensor:
        """Which places hold a real token, as a mask of the shape of `input_ids`."""
        if self.sequence is not None:
            real = self.sequence < self.size
            if self.present is not None:
                present = torch.cat([self.present, self.present.new_zeros(1)])
                real = real & (present[self.sequence] > 0)
            return real.unsqueeze(0)
        mask = torch.ones_like(self.input_ids) if self.attention_mask is None else self.attention_mask
        return mask > 0 if self.present is None else (mask > 0) & (self.present > 0).unsqueeze(1)

    def labelled_tokens(self) -> Tensor:
        """Whether the token of each label is a real one, in the order of the labels laid flat."""
        real = self.tokens().flatten()
        return real if self.places is None else real.index_select(0, self.places)

    def guessed(self) -> Tensor | None:
        """Which places hold a word to be guessed whose label is known, as a mask of the shape of `input_ids`."""
        if self.places is None or self.labels is None:
            return None
        count = torch.zeros_like(self.input_ids).flatten()  # places that only fill the shape have no label, and add 0
        return (count.index_add(0, self.places, (self.labels >= 0).to(count.dtype)) > 0).view_as(self.input_ids)

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        return self.with_tensors({name: value.to(device, non_blocking=True) for name, value in self.tensors().items()})

    def with_tensors(self, tensors: dict[str, Tensor]) -> Batch:
        """The same batch with some of its tensors exchanged."""
        own = {name: value for name, value in tensors.items() if not name.startswith(TAUGHT)}
        taught = {name.removeprefix(TAUGHT): value for name, value in tensors.items() if name not in own}
        return replace(self, taught={**self.taught, **taught}, **own)  # type: ignore[arg-type]

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, those that are there."""
        own = {f.name: v for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)}
        return own | {f"{TAUGHT}{name}": value for name, value in self.taught.items()}
