"""Texts of many requests, scored together by one thread, so that the event loop never waits for the model."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import nsmallest
from typing import Any

import numpy as np

from smallbert.serving.model import Piece

ROUND = 4  # batches; from so many texts, those that are due first, those of like length are put together
LATER = 0.002  # seconds that a text is due after its request came, for each token of those before it in its request
WASTE, FEW = 1.5, 256  # tokens of a padded batch for each real one, where there are more than a few
TOKENS = 2048  # in a batch once padded; beyond that a CPU's cache is too small, and a text takes longer than alone


@dataclass(frozen=True)
class _Waiting:
    piece: Piece
    future: asyncio.Future[np.ndarray]
    since: float
    due: float


class Batcher:
    """Pieces in, scores out, in batches of up to `batch` that wait at most `wait` seconds for company.

    >>> scores = await asyncio.gather(*batcher.put(pieces))

    Each batch begins with the text that is due first, and is filled with texts of like length that are due soon, which
    wastes little on padding. A text is due when its request came, and later by what stands before it in its request:
    few texts are served in the order they came, and a request of very many lets later ones pass, but never for ever.
    `told` is called with the size of each batch.
    """

    def __init__(
        self, score: Callable[[list[Piece]], list[np.ndarray]], batch: int, wait: float, told: Callable[[int], Any]
    ):
        """Begin to work; must be called where the event loop runs."""
        self.score, self.batch, self.wait, self.told = score, batch, wait, told
        self.line: list[_Waiting] = []
        self.changed = threading.Condition()
        self.closing = False
        self.loop = asyncio.get_running_loop()
        self.thread = threading.Thread(target=self._work, name="model", daemon=True)
        self.thread.start()

    def put(self, pieces: list[Piece]) -> list[asyncio.Future[np.ndarray]]:
        """Line pieces up; one that is cancelled before its turn costs nothing."""
        now, made, before = time.monotonic(), list[_Waiting](), 0
        for piece in pieces:
            made.append(_Waiting(piece, self.loop.create_future(), now, now + LATER * before))
            before += len(piece.ids)
        with self.changed:
            self.line += made
            self.changed.notify()
        return [one.future for one in made]

    @property
    def waiting(self) -> int:
        """How many pieces nobody has begun with."""
        with self.changed:
            return len(self.line)

    def close(self, seconds: float) -> None:
        """Let the thread finish what is waiting, and end."""
        with self.changed:
            self.closing = True
            self.changed.notify()
        self.thread.join(seconds)

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            if waited_for := [one for one in taken if not one.future.done()]:
                self._run(waited_for)

    def _take(self) -> list[_Waiting] | None:
        """The next batch, once there is enough for one or the first text has waited long enough."""
        with self.changed:
            self.changed.wait_for(lambda: self.line or self.closing)
            if not self.line:
                return None
            until = min(one.since for one in self.line) + self.wait
            while len(self.line) < self.batch and not self.closing and (left := until - time.monotonic()) > 0:
                self.changed.wait(left)
            next_ones = nsmallest(self.batch * ROUND, self.line, key=lambda one: one.due)
            taken = _like_the_first(next_ones, self.batch)
            gone = {id(one) for one in taken}
            self.line = [one for one in self.line if id(one) not in gone]
            return taken

    def _run(self, some: list[_Waiting]) -> None:
        try:
            found: list[Any] = self.score([one.piece for one in some])
        except Exception as error:
            if len(some) > 1:  # one bad text must not spoil the others'
                for one in some:
                    self._run([one])
                return
            found = [error]
        try:
            self.loop.call_soon_threadsafe(self._deliver, some, found)
        except RuntimeError:  # the loop has ended without waiting, and nobody waits for this any more
            self.closing = True

    def _deliver(self, some: list[_Waiting], found: list[Any]) -> None:
        self.told(len(some))
        for one, scores in zip(some, found, strict=True):
            if one.future.done():  # given up meanwhile
                continue
            if isinstance(scores, Exception):
                one.future.set_exception(scores)
            else:
                one.future.set_result(scores)


def _like_the_first(some: Iterable[_Waiting], most: int) -> list[_Waiting]:
    """The first, and those nearest to it in length, at most `most` texts and TOKENS tokens, not too many of padding."""
    first, *others = some
    taken, longest, tokens = [first], len(first.piece.ids), len(first.piece.ids)
    for one in sorted(others, key=lambda one: abs(len(one.piece.ids) - len(first.piece.ids))):
        real, wide = tokens + len(one.piece.ids), max(longest, len(one.piece.ids))
        padded = (len(taken) + 1) * wide
        if len(taken) < most and padded <= min(TOKENS, max(FEW, WASTE * real)):
            taken, longest, tokens = [*taken, one], wide, real
    return taken
