"""A learned mixture of all hidden states, read by the head in place of the last one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce

import torch
from torch import Tensor, nn

Stack = list[Tensor]


def _normalise_token(stack: Stack) -> Stack:
    """Over features and layers together, token by token."""
    count = len(stack)
    mean = _sum(x.float().mean(-1, keepdim=True) for x in stack) / count
    square = _sum(x.float().square().mean(-1, keepdim=True) for x in stack) / count
    scale = (square - mean.square() + 1e-6).rsqrt()
    return [((x - mean) * scale).to(x.dtype) for x in stack]


def _normalise_feature(stack: Stack) -> Stack:
    """Each layer's output on its own."""
    return [nn.functional.layer_norm(x, x.shape[-1:]) for x in stack]


def _normalise_layer(stack: Stack) -> Stack:
    """Over layers only: what all layers share is removed, so a uniform mixture would be zero."""
    mean = _sum(stack) / len(stack)
    variance = _sum((x - mean).square() for x in stack) / len(stack)
    return [(x - mean) * (variance + 1e-6).rsqrt() for x in stack]


def _sum(parts: Iterable[Tensor]) -> Tensor:
    return reduce(torch.add, parts)


NORMS: dict[str, Callable[[Stack], Stack]] = {
    "token": _normalise_token,
    "feature": _normalise_feature,
    "layer": _normalise_layer,
    "none": lambda stack: stack,
}


class Mixture(nn.Module):
    """gamma * sum of softmax(weights)_l * h_l over the embedding output and every layer.

    With `plain` it is last + gamma * (mixture - last) and gamma starts at 0: exactly the plain model at first.
    """

    def __init__(self, count: int, norm: str = "token", dropout: float = 0.1, plain: bool = False):
        """Make a uniform mixture of `count` hidden states."""
        super().__init__()
        self.norm, self.plain = norm, plain
        self.weights = nn.Parameter(torch.zeros(count))
        self.gamma = nn.Parameter(torch.zeros(()) if plain else torch.ones(()))
        affine = norm == "layer"
        self.gain = nn.Parameter(torch.ones(count)) if affine else None
        self.shift = nn.Parameter(torch.zeros(count)) if affine else None
        self.dropout = nn.Dropout(dropout)

    def shares(self) -> Tensor:
        """How much of each hidden state goes in; they add up to one."""
        return self.weights.softmax(0)

    def forward(self, hidden: Stack) -> Tensor:
        """Mix hidden states, each (…, features), into one of the same shape."""
        shares, stack = self.shares(), NORMS[self.norm](hidden)
        if self.gain is not None and self.shift is not None:
            stack = [g * x + b for g, x, b in zip(self.gain, stack, self.shift, strict=True)]
        mixed = _sum(share * self.dropout(x) for share, x in zip(shares, stack, strict=True))
        last = hidden[-1]
        return (
            (last + self.gamma * (mixed - last)).to(last.dtype) if self.plain else (self.gamma * mixed).to(last.dtype)
        )

    def keep(self, kept: list[int]) -> None:
        """Forget the hidden states of layers that are gone; `kept` are layer numbers, the embedding output stays."""
        index = torch.tensor([0] + [number + 1 for number in kept], device=self.weights.device)
        for name in ("weights", "gain", "shift"):
            values = getattr(self, name)
            if values is not None:
                setattr(self, name, nn.Parameter(values.data[index].clone()))
