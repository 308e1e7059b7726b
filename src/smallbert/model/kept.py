"""What a module makes of its stored numbers for use, made once and kept beside them, never saved or copied."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any, Self

import torch
from torch import nn


class Keeping(nn.Module):
    """A module that stores its numbers in one form and uses them in another."""

    def __init__(self) -> None:
        """Nothing is kept yet."""
        super().__init__()
        _leave_uncompiled()
        self._kept: dict[str, tuple[Hashable, Any]] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As in `__init__`, where it was read in another process."""
        super().__setstate__(state)
        _leave_uncompiled()

    def _keep(self, kind: str, dtype: torch.dtype, make: Callable[[], Any]) -> Any:
        """Made once, and again only when what is stored has changed or moved."""
        stored = [*self.buffers(), *self.parameters()]
        versions = [(0 if one.is_inference() else one._version, one.dtype) for one in stored]
        key = (stored[0].device, dtype, *versions)
        found = self._kept.get(kind)
        if found is None or found[0] != key:
            with torch.inference_mode(False), torch.no_grad():  # what is kept must serve later calls of either mode
                found = self._kept[kind] = (key, make())
        return found[1]  # not looked up again: another thread may have let go of it

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        new.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items() if k != "_kept"})
        new._kept = {}
        return new


@cache
def _leave_uncompiled() -> None:
    """Keep the compiler away from `_keep`, which looks at versions: nothing can be compiled of these.

    Said with the first module and not where the class is, since it imports the compiler, which takes a second.
    """
    Keeping._keep = torch.compiler.disable(Keeping._keep)  # type: ignore[method-assign]
