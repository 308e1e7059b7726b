"""Memory for one batch after the other: fresh pages from the system take longer to come than to be filled."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from math import prod

import numpy as np
import torch
from torch import Tensor

MOST = 3  # the batch that is learned from, the one that is read ahead, and one that is about to go


@dataclass
class Room:
    """Some pieces of memory, each lent again as soon as no tensor made in it is left."""

    _pieces: list[tuple[np.ndarray, weakref.ref[np.ndarray]]] = field(default_factory=list)

    def take(self, shape: tuple[int, ...], kind: torch.dtype) -> Tensor:
        """A tensor on the CPU with whatever values there are."""
        need, lent_out = prod(shape) * kind.itemsize, [one for one in self._pieces if one[1]() is not None]
        free = [one for one in self._pieces if one[1]() is None and len(one[0]) >= need]  # smaller ones may go
        piece = free.pop()[0] if free else np.empty(need, np.uint8)
        self._pieces = lent_out + free
        lent = piece[:need].view(str(kind).removeprefix("torch.")).reshape(shape)  # the tensor holds this, and it that
        if len(self._pieces) < MOST:
            self._pieces.append((piece, weakref.ref(lent)))
        return torch.from_numpy(lent)
