"""Telling how far a long piece of work is, from wherever it is done, to whoever runs the recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Say = Callable[[str, int, int, str], None]
_listener: ContextVar[Say | None] = ContextVar("listener", default=None)


@contextmanager
def saying(say: Say) -> Iterator[None]:
    """Let `tell` reach this listener."""
    token = _listener.set(say)
    try:
        yield
    finally:
        _listener.reset(token)


def tell(stage: str, done: int, total: int, info: str = "") -> None:
    """Say how many of how many are done; nobody need listen."""
    say = _listener.get()
    if say is not None:
        say(stage, done, total, info)
