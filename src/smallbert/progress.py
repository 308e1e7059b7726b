"""Telling how far a long piece of work is and what is odd, from wherever it is done, to whoever runs the recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Say = Callable[[str, int, int, str], None]
_listener: ContextVar[Say | None] = ContextVar("listener", default=None)
_notes: ContextVar[list[str] | None] = ContextVar("notes", default=None)


@contextmanager
def saying(say: Say) -> Iterator[None]:
    """Let `tell` reach this listener."""
    token = _listener.set(say)
    try:
        yield
    finally:
        _listener.reset(token)


@contextmanager
def noting(notes: list[str]) -> Iterator[None]:
    """Let `note` write into this list."""
    token = _notes.set(notes)
    try:
        yield
    finally:
        _notes.reset(token)


def note(text: str) -> None:
    """Have something written on the card, once however often it is said; nobody need listen."""
    notes = _notes.get()
    if notes is not None and text not in notes:
        notes.append(text)


def tell(stage: str, done: int, total: int, info: str = "") -> None:
    """Say how many of how many are done; nobody need listen."""
    say = _listener.get()
    if say is not None:
        say(stage, done, total, info)
