"""Mixtures of hidden states, read by the head in place of the last one.

While training a mixture stacks the states it reads. Elsewhere it takes them one by one as the layers run and keeps
running sums, so that no more than one state is ever stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from smallbert.errors import UserError
from smallbert.model.anatomy import check_layers
from smallbert.model.batch import Batch

Pick = Callable[[Tensor], Tensor]
TINY = 1e-6
AXES: dict[str, tuple[int, ...]] = {  # over what of (states, …, features) a stack is normalised
    "token": (0, -1),
    "feature": (-1,),
    "layer": (0,),
    "none": (),
}


def normalise(stack: Tensor, norm: str) -> Tensor:
    """A stack (states, …, features) with mean 0 and variance 1 over the axes of a norm."""
    stack, axes = stack.float(), AXES[norm]
    if not axes:
        return stack
    mean = stack.mean(axes, keepdim=True)
    return (stack - mean) * (stack.var(axes, correction=0, keepdim=True) + TINY).rsqrt()


class _Running:
    """The weighted sum of a normalised stack, of which only one state at a time is there."""

    def __init__(self, norm: str):
        self.norm, self.count = norm, 0
        self.total: Any = 0.0  # sum of weight * (state - mean), for the mean so far
        self.weight: Any = 0.0
        self.mean: Any = 0.0
        self.spread: Any = 0.0  # sum of squared distances from the mean

    def add(self, weight: Tensor, state: Tensor) -> None:
        """Take in the next state; mean and spread follow Welford's way, which loses no digits to large means."""
        state = normalise(state[None], "feature")[0] if self.norm == "feature" else state.float()
        self.count += 1
        if self.norm in ("layer", "token"):  # a mean of each feature over states, or of each token over features too
            wide = self.norm == "token"
            middle = state.mean(-1, keepdim=True) if wide else state
            distance = middle - self.mean
            moved = distance / self.count
            self.mean = self.mean + moved
            self.total = self.total - self.weight * moved
            self.spread = self.spread + distance * (middle - self.mean)
            if wide:
                self.spread = self.spread + state.var(-1, correction=0, keepdim=True)
        self.total = self.total + weight * (state - self.mean)
        self.weight = self.weight + weight

    def finish(self) -> Tensor:
        """The sum, divided by the deviation of the whole stack, which is known only now."""
        if self.norm in ("none", "feature"):
            return self.total
        return self.total * (self.spread / self.count + TINY).rsqrt()


class Mixture(nn.Module):
    """gamma * sum of softmax(weights)_l * h_l over the embedding output (number 0) and every layer's output.

    With `plain` it is last + gamma * (mixture - last) and gamma starts at 0: exactly the plain model at first.
    """

    streams = True  # the states can come one by one, and each token is mixed on its own

    def __init__(
        self,
        reads: list[int],
        norm: str = "token",
        dropout: float = 0.1,
        plain: bool = False,
        layer_dropout: float = 0.0,
    ):
        """Make a uniform mixture of the hidden states with these numbers."""
        super().__init__()
        self.reads, self.norm, self.plain, self.layer_dropout = reads, norm, plain, layer_dropout
        self.weights = nn.Parameter(torch.zeros(len(reads)))
        self.gamma = nn.Parameter(torch.zeros(()) if plain else torch.ones(()))
        affine = norm == "layer"
        self.gain = nn.Parameter(torch.ones(len(reads))) if affine else None
        self.shift = nn.Parameter(torch.zeros(len(reads))) if affine else None
        self.dropout = nn.Dropout(dropout)
        self.blend: Tensor | None = None  # a dial, while the mixture is let in step by step

    def shares(self) -> Tensor:
        """How much of each state it reads goes in; they add up to one."""
        weights: Tensor = self.weights
        if self.training and self.layer_dropout:  # its mass goes to the layers that stay; if none does, to all
            weights = weights.masked_fill(torch.rand_like(weights) < self.layer_dropout, -1e20)
        return weights.softmax(0)

    def profile(self, count: int) -> list[float]:
        """The share of each of `count` hidden states in what the head reads, the last one's own included.

        [0.02, 0.05, …, 0.61]
        """
        shares = torch.zeros(count)
        shares[self.reads] = self.weights.detach().softmax(0).float().cpu()  # whatever layer dropout does just now
        if self.plain:
            gamma = float(self.gamma.detach())
            shares = gamma * shares
            shares[-1] += 1 - gamma
        shares = shares.abs()
        return (shares / shares.sum()).tolist()

    def forward(self, states: Iterable[Tensor], batch: Batch | None = None, pick: Pick = lambda state: state) -> Tensor:
        """Mix hidden states, all of them in order, into one; `pick` says what of each is wanted."""
        return self.stack(states, pick) if self.training else self.stream(states, pick)

    def stack(self, states: Iterable[Tensor], pick: Pick = lambda state: state) -> Tensor:
        """Mix with every state at hand, and with dropout while training."""
        picked = {number: pick(state) for number, state in enumerate(states)}
        last, wanted = picked[len(picked) - 1], torch.stack([picked[number] for number in self.reads])
        made, wide = normalise(wanted, self.norm), (-1,) + (1,) * last.dim()
        if self.gain is not None and self.shift is not None:
            made = made * self.gain.view(wide) + self.shift.view(wide)
        return self._finish((self.dropout(made) * self.shares().view(wide)).sum(0), last)

    def stream(self, states: Iterable[Tensor], pick: Pick = lambda state: state) -> Tensor:
        """Mix states as they come, with running sums."""
        running, places = _Running(self.norm), {number: place for place, number in enumerate(self.reads)}
        shares = self.shares().float()
        weights = shares if self.gain is None else shares * self.gain
        for number, state in enumerate(states):
            last = pick(state)
            if number in places:
                running.add(weights[places[number]], last)
        mixed = running.finish()
        return self._finish(mixed if self.shift is None else mixed + (shares * self.shift).sum(), last)

    def _finish(self, mixed: Tensor, last: Tensor) -> Tensor:
        made = last + self.gamma * (mixed - last) if self.plain else self.gamma * mixed
        if self.blend is not None:
            made = last + self.blend.to(made.dtype) * (made - last)
        return made.to(last.dtype)

    def keep(self, kept: list[int]) -> None:
        """Forget the hidden states of layers that are gone; `kept` are layer numbers, the embedding output stays."""
        places = kept_places(self.reads, kept)
        self.reads = renumbered(self.reads, kept)
        index = torch.tensor(places, device=self.weights.device)
        for name in ("weights", "gain", "shift"):
            values = getattr(self, name)
            if values is not None:
                setattr(self, name, nn.Parameter(values.data[index].clone()))


class Gates(nn.Module):
    """A mixture whose shares depend on the text: each state is squeezed to one number, two small maps weigh them.

    squeeze: (states, sequences) -> gates e = sigmoid(gelu(z A + a) B + b), divided by their sum. The output is
    last + gamma * (mixture - last), gamma 0 at first.
    """

    streams = False  # the gates are known only when the last layer has run

    def __init__(self, count: int, hidden: int, squeeze: str, width: int):
        """Make maps of `count` states to `hidden` numbers and back, all zero."""
        super().__init__()
        self.squeeze = squeeze
        self.inward = nn.Parameter(torch.zeros(count, hidden))
        self.inward_bias = nn.Parameter(torch.zeros(hidden))
        self.outward = nn.Parameter(torch.zeros(hidden, count))
        self.outward_bias = nn.Parameter(torch.zeros(count))
        self.gamma = nn.Parameter(torch.zeros(()))
        self.look = nn.Parameter(torch.zeros(width)) if squeeze == "first" else None

    def shares(self, states: list[Tensor], batch: Batch) -> Tensor:
        """How much of each state goes in, for each text: (sequences, states)."""
        squeezed = torch.stack([self._squeeze(state, batch) for state in states], -1)
        # What varies from text to text is small beside what all texts share, so each text's own mean is taken off.
        squeezed = squeezed - squeezed.mean(-1, keepdim=True)
        inner = nn.functional.gelu(squeezed @ self.inward + self.inward_bias)
        gates = torch.sigmoid(inner @ self.outward + self.outward_bias)
        return gates / gates.sum(-1, keepdim=True)

    def forward(self, states: Iterable[Tensor], batch: Batch, pick: Pick = lambda state: state) -> Tensor:
        """Mix all hidden states of a batch, each text by shares of its own."""
        stored = list(states)
        shares, last = batch.spread(self.shares(stored, batch)), stored[-1]
        mixed = sum(shares[..., number, None] * state.float() for number, state in enumerate(stored))
        return pick((last + self.gamma * (mixed - last)).to(last.dtype))

    def keep(self, kept: list[int]) -> None:
        """Forget the gates of layers that are gone."""
        index = torch.tensor([0] + [number + 1 for number in kept], device=self.gamma.device)
        self.inward = nn.Parameter(self.inward.data[index].clone())
        self.outward = nn.Parameter(self.outward.data[:, index].clone())
        self.outward_bias = nn.Parameter(self.outward_bias.data[index].clone())

    def _squeeze(self, state: Tensor, batch: Batch) -> Tensor:
        """One number a text: its first token seen along one direction, or how large its tokens' features are."""
        if self.look is not None:
            return batch.first(state).float() @ self.look
        return batch.mean(state.float().square().mean(-1, keepdim=True)).squeeze(-1)


class Connections(nn.Module):
    """After layer i, the next one reads sum over j <= i of A_ij h_j instead of h_i; A starts as the identity.

    Only every `dilation`-th state back is read, and only after every `period`-th layer.
    """

    def __init__(self, count: int, dilation: int = 1, period: int = 1):
        """Make the connections of `count` layers; row i has i + 2 numbers, the embedding output's first."""
        super().__init__()
        self.dilation, self.period = dilation, period
        self.rows = nn.ParameterList(_identity_row(place + 2) for place in range(count))

    def forward(self, place: int, states: list[Tensor]) -> Tensor:
        """What the layer behind a place reads, given the embedding output and what the layers so far made of theirs."""
        last, row = states[-1], self.rows[place]
        if (place + 1) % self.period:
            return last
        made = row[-1] * last.float()
        for back in range(self.dilation, len(states), self.dilation):
            made = made + row[-1 - back] * states[-1 - back].float()
        return made.to(last.dtype)

    def keep(self, kept: list[int]) -> None:
        """Forget the connections from and to layers that are gone."""
        columns = [0] + [number + 1 for number in kept]
        rows = [self.rows[number].data[[c for c in columns if c <= number + 1]] for number in kept]
        self.rows = nn.ParameterList(nn.Parameter(row.clone()) for row in rows)


def check_free(encoder: Any, name: str) -> None:
    """Refuse to put a mixture in place of another, which would forget what that has learned, or where none can be."""
    check_layers(encoder, name)
    if encoder.mixture is not None:
        raise UserError(f"{name}: this encoder's head already reads a mixture of layers, and there can be only one")


def check_no_pooler(encoder: Any, name: str) -> None:
    """Refuse a mixture that no head would read."""
    if any(hasattr(head, "reads") for head in encoder.heads.values()):
        raise UserError(
            f"{name}: this encoder's head is a pooler, or becomes one in this phase, which reads all layers itself; "
            "put a plain head on it, or leave one of the two out"
        )


def chosen_states(encoder: Any, layers: list[int] | None, name: str) -> list[int]:
    """The numbers of the hidden states to read, in order: 0 the embedding output, -1 the last layer, None all.

    [0, -1, 3] of six layers  ->  [0, 3, 6]
    """
    count = len(encoder.order) + 1
    wanted = range(count) if layers is None else layers
    for number in wanted:
        if not -count <= number < count:
            raise UserError(
                f"{name}: there is no hidden state {number}; 0 is the embedding output, 1 to {count - 1} the layers, "
                "and -1 the last of them"
            )
    if not wanted:
        raise UserError(f"{name}: layers is empty; name at least one, or leave it out to read all")
    return sorted({number % count for number in wanted})


def _identity_row(length: int) -> nn.Parameter:
    row = torch.zeros(length)
    row[-1] = 1.0
    return nn.Parameter(row)


def kept_places(reads: list[int], kept: list[int]) -> list[int]:
    """Which of the states that are read stay when only these layers do, by their place in `reads`."""
    stay = {0, *(number + 1 for number in kept)}
    places = [place for place, number in enumerate(reads) if number in stay]
    if not places:
        raise UserError(
            f"the head reads only the hidden states {reads}, and none of them would be left; keep one of them"
        )
    return places


def renumbered(reads: list[int], kept: list[int]) -> list[int]:
    """The states that are read as they are numbered when only these layers are left."""
    now = {0: 0, **{number + 1: place + 1 for place, number in enumerate(kept)}}
    return [now[number] for number in reads if number in now]
