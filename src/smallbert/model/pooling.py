"""Poolers: task heads that read hidden states of many layers instead of the last one.

A pooler takes the states one by one as the layers run and makes each of them small at once, so that in use no more than
one is ever stored; layers above the last one it reads are not run at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from smallbert.errors import UserError
from smallbert.model import heads
from smallbert.model.batch import Batch
from smallbert.model.mixing import Mixture, kept_places, renumbered

NOTHING = -1e4  # what attention sees in place of a token that is not there


class Projection(nn.Module):
    """gelu(W h + b), the same map for every token of every layer: (…, size) -> (…, width)."""

    def __init__(self, size: int, width: int, norm: str = "none", dropout: float = 0.0):
        """Make the map; norm "feature" first gives each state mean 0 and variance 1, without weights of its own."""
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(size, width), norm, nn.Dropout(dropout)

    def forward(self, state: Tensor, shift: Tensor | float = 0.0) -> Tensor:
        """Make a state small; `shift` is added before the GELU."""
        # A layer that was quantised multiplies in its own way.
        if type(self.linear) is nn.Linear and state.dtype != self.linear.bias.dtype and not state.requires_grad:
            small = _Map.apply(state, self.linear.weight, self.linear.bias, self.norm)
        else:
            small = self.linear(_ready(state, self.linear.bias.dtype, self.norm))
        return self.dropout(functional.gelu(small + shift))


def _ready(state: Tensor, kind: torch.dtype, norm: str) -> Tensor:
    """A state as the map reads it; it may be kept in more precision than the backbone, or in less."""
    state = state.to(kind)
    return functional.layer_norm(state, state.shape[-1:]) if norm == "feature" else state


class _Map(torch.autograd.Function):
    """A linear map of states that are kept in another precision, made ready twice instead of remembered.

    To remember all layers of a batch as they are read takes longer than to make them ready again one by one, which
    stays in the processor's cache.
    """

    @staticmethod
    def forward(ctx: Any, state: Tensor, weight: Tensor, bias: Tensor, norm: str) -> Tensor:
        ctx.save_for_backward(state)
        ctx.norm = norm
        return functional.linear(_ready(state, weight.dtype, norm), weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        slope = gradients[0].flatten(0, -2)
        state = _ready(ctx.saved_tensors[0], slope.dtype, ctx.norm).flatten(0, -2)
        return None, slope.t() @ state, slope.sum(0), None


class Pooler(nn.Module):
    """What all poolers share: one stands where a Head stands, and is given all hidden states in order.

    classify, regress: (sequences, outputs)    tag: (…, tokens, outputs)    answer: (…, tokens, 2)
    """

    dense: nn.Module | None = None  # these three are what others ask of any head
    pool = "layers"
    reads_first = False
    length = 0  # positions that have weights of their own, if they have
    makes_small = True  # the first thing it does to a state, in whatever precision that comes
    out: nn.Linear

    def __init__(self, kind: str, labels: list[str], reads: list[int], padded_to: int = 0):
        """Remember what is read and for what; texts are all made `padded_to` tokens long where padding is read too."""
        super().__init__()
        self.kind, self.labels, self.reads, self.padded_to = kind, labels, reads, padded_to

    @property
    def outputs(self) -> int:
        """How many scores it gives."""
        return self.out.out_features

    @property
    def positions(self) -> int:
        """How many tokens of a text it reads; 0 for all."""
        return self.padded_to or self.length

    @property
    def whole(self) -> bool:
        """Whether it judges whole texts, not tokens one by one."""
        return self.kind in ("classify", "regress")

    def forward(self, states: Iterable[Tensor], batch: Batch) -> Tensor:
        """Scores from the hidden states of a batch, the embedding output's first."""
        if self.padded_to:
            batch = replace(batch, attention_mask=None)  # padding counts as text
        return self.score(islice(states, self.reads[-1] + 1), batch)

    def score(self, states: Iterable[Tensor], batch: Batch) -> Tensor:
        """Scores from the states up to the last that is read."""
        raise NotImplementedError

    def keep(self, kept: list[int]) -> None:
        """Forget the hidden states of layers that are gone; `kept` are layer numbers, the embedding output stays."""
        raise NotImplementedError

    def _read(self, states: Iterable[Tensor]) -> Iterator[Tensor]:
        return (state for number, state in enumerate(states) if number in self.reads)


class AdapterPooler(Pooler):
    """BERT-Vision's: every state through one projection, and one linear map of all that it gives.

    tokens "positions": position, layer and width are all features, up to `length` tokens; "mean", "first": layer and
    width are, of the mean of a text's projected tokens or of the first; "each": the same, of each token by itself
    (tags, and answers as in the paper's Algorithm 1).
    """

    def __init__(
        self,
        kind: str,
        outputs: int,
        labels: list[str],
        reads: list[int],
        project: Projection,
        tokens: str = "positions",
        length: int = 0,
        padded_to: int = 0,
    ):
        """Make an empty pooler: 769 d + 13 T d C + C numbers by position for BERT-base, 769 d + 13 d C + C else."""
        super().__init__(kind, labels, reads, padded_to)
        self.tokens, self.length, self.project = tokens if self.whole else "each", length, project
        places = length if self.tokens == "positions" else 1
        self.out = nn.Linear(len(reads) * places * project.linear.out_features, outputs)

    def score(self, states: Iterable[Tensor], batch: Batch) -> Tensor:
        """The map of everything is a sum over layers, so that each state can go as soon as it was read."""
        scores = self.out.bias.float()
        for state, weight in zip(self._read(states), self._layers().unbind(1), strict=True):
            seen = GATHER[self.tokens](batch, self.project(state), self.length)
            scores = scores + functional.linear(seen, weight[:, : seen.shape[-1]]).float()
        return scores

    def keep(self, kept: list[int]) -> None:
        """Forget the weights of layers that are gone."""
        weight = self._layers().data[:, kept_places(self.reads, kept)].flatten(1)
        self.out.weight, self.out.in_features = nn.Parameter(weight.clone()), weight.shape[1]
        self.reads = renumbered(self.reads, kept)

    def _layers(self) -> Tensor:
        """The last map's weight, layer by layer: (outputs, layers, features)."""
        return self.out.weight.unflatten(1, (len(self.reads), -1))


def _by_position(batch: Batch, features: Tensor, length: int) -> Tensor:
    """(…, tokens, width) -> (sequences, length * width), zeros where a text has no token.

    Zeros behind the longest text of a batch change nothing; where the states are at hand they would take a sixth of the
    time, and are left out.
    """
    rows = batch.rows(features, 0.0)
    return (rows if batch.hidden is not None else functional.pad(rows, (0, 0, 0, length)))[:, :length].flatten(1)


GATHER: dict[str, Callable[[Batch, Tensor, int], Tensor]] = {
    "positions": _by_position,
    "mean": lambda batch, features, length: batch.mean(features),
    "first": lambda batch, features, length: batch.first(features),
    "each": lambda batch, features, length: features,
}


class AttentionPooler(Pooler):
    """A learned query looks over all tokens of all layers of a text; for tags and answers, over each token's layers.

    f_lt = gelu(W h_lt + b + e_l), e_l learned for each layer; scores = linear(sum of softmax(q f)_lt f_lt)
    """

    def __init__(
        self, kind: str, outputs: int, labels: list[str], reads: list[int], project: Projection, padded_to: int = 0
    ):
        """Make an empty pooler; a query of zeros looks at all alike."""
        super().__init__(kind, labels, reads, padded_to)
        width = project.linear.out_features
        self.project, self.out = project, nn.Linear(width, outputs)
        self.query, self.layers = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(len(reads), width))

    def score(self, states: Iterable[Tensor], batch: Batch) -> Tensor:
        """Of each state only what was made of it is stored, `width` numbers a token."""
        seen = [self.project(state, shift) for state, shift in zip(self._read(states), self.layers, strict=True)]
        match = [one @ self.query for one in seen]
        if self.whole:  # (sequences, layers * tokens)
            values = torch.cat([batch.rows(one, 0.0) for one in seen], 1)
            shares = torch.cat([batch.rows(one, NOTHING) for one in match], 1).float().softmax(-1)
        else:  # (…, tokens, layers)
            values, shares = torch.stack(seen, 2), torch.stack(match, 2).float().softmax(-1)
        pooled = (shares.to(values.dtype).unsqueeze(-2) @ values).squeeze(-2)
        return self.out(pooled).float()

    def keep(self, kept: list[int]) -> None:
        """Forget what was learned for layers that are gone."""
        self.layers = nn.Parameter(self.layers.data[kept_places(self.reads, kept)].clone())
        self.reads = renumbered(self.reads, kept)


class MixturePooler(Pooler):
    """A softmax-weighted sum of layers, times gamma, read by a plain head of its own."""

    makes_small = False

    def __init__(self, head: heads.Head, mixture: Mixture):
        """Put a head behind a mixture."""
        super().__init__(head.kind, head.labels, mixture.reads)
        self.head, self.mixture = head, mixture

    @property
    def out(self) -> nn.Linear:  # type: ignore[override]
        """The last map of the head."""
        return self.head.out

    def score(self, states: Iterable[Tensor], batch: Batch) -> Tensor:
        """Mix what the head needs of each state."""
        mixed = self.mixture(states, batch, lambda state: self.head.pick(state, batch))
        return self.head.score(mixed.to(self.head.out.weight.dtype), batch)

    def keep(self, kept: list[int]) -> None:
        """Forget the weights of layers that are gone."""
        self.mixture.keep(kept)
        self.reads = self.mixture.reads


def initialise(pooler: Pooler, std: float, generator: torch.Generator) -> None:
    """Draw a new pooler's maps as torch draws linear ones, without biases; a plain head's as BERT draws them."""
    if isinstance(pooler, MixturePooler):
        heads.initialise(pooler.head, std, generator)
        return
    for module in pooler.modules():
        if isinstance(module, nn.Linear):
            nn.init.kaiming_uniform_(module.weight, math.sqrt(5), generator=generator)
            nn.init.zeros_(module.bias)


def pad_to(batch: Batch, length: int, pad: int) -> Batch:
    """The same texts, each padded (or cut) to one length, whatever company they came in and in whatever layout."""
    if batch.hidden is not None:
        raise UserError("pool_layers(masked=False) reads padding, which stored states do not hold; write masked=True")

    def lay(values: Tensor, empty: int) -> Tensor:
        return functional.pad(batch.rows(values, empty), (0, length), value=empty)[:, :length]

    place = torch.arange(length, device=batch.input_ids.device).expand(batch.size, -1)
    mask = (lay(torch.ones_like(batch.input_ids), 0) > 0) | (place == 0)  # an empty text must attend to something
    ids, types = lay(batch.input_ids, pad), lay(batch.token_type_ids, 0)
    plain = replace(batch, bounds=None, sequence=None, longest=length, attention_mask=mask.long(), position_ids=place)
    return replace(plain, input_ids=ids, token_type_ids=types)
