"""Texts of many requests, scored together by one thread, so that the event loop never waits for the model."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from smallbert.serving.model import Piece

ROUND = 4  # batches; from so many texts, the oldest, those of like length are put together
TOKENS = 2048  # in a batch once padded; beyond that a CPU's cache is too small, and a text takes longer than alone


@dataclass(frozen=True)
class _Waiting:
    piece: Piece
    future: asyncio.Future[np.ndarray]
    since: float


class Batcher:
    """Pieces in, scores out, in batches of up to `batch` that wait at most `wait` seconds for company.

    >>> scores = await asyncio.gather(*batcher.put(pieces))

    The oldest texts are taken first, a few batches of them at a time; sorted by length those waste little on padding,
    and nobody is overtaken for longer than that. `told` is called with the size of each batch.
    """

    def __init__(
        self, score: Callable[[list[Piece]], list[np.ndarray]], batch: int, wait: float, told: Callable[[int], Any]
    ):
        """Begin to work; must be called where the event loop runs."""
        self.score, self.batch, self.wait, self.told = score, batch, wait, told
        self.waiting: deque[_Waiting] = deque()
        self.changed = threading.Condition()
        self.closing = False
        self.loop = asyncio.get_running_loop()
        self.thread = threading.Thread(target=self._work, name="model", daemon=True)
        self.thread.start()

    def put(self, pieces: list[Piece]) -> list[asyncio.Future[np.ndarray]]:
        """Line pieces up; one that is cancelled before its turn costs nothing."""
        now = time.monotonic()
        made = [_Waiting(piece, self.loop.create_future(), now) for piece in pieces]
        with self.changed:
            self.waiting.extend(made)
            self.changed.notify()
        return [one.future for one in made]

    def close(self, seconds: float) -> None:
        """Let the thread finish what is waiting, and end."""
        with self.changed:
            self.closing = True
            self.changed.notify()
        self.thread.join(seconds)

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            for some in _batches(taken, self.batch):
                if waited_for := [one for one in some if not one.future.done()]:
                    self._run(waited_for)

    def _take(self) -> list[_Waiting] | None:
        """The oldest texts, once there are enough of them or the first has waited long enough."""
        with self.changed:
            self.changed.wait_for(lambda: self.waiting or self.closing)
            if not self.waiting:
                return None
            until = self.waiting[0].since + self.wait
            while len(self.waiting) < self.batch and not self.closing and (left := until - time.monotonic()) > 0:
                self.changed.wait(left)
            return [self.waiting.popleft() for _ in range(min(len(self.waiting), self.batch * ROUND))]

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


def _batches(taken: list[_Waiting], most: int) -> Iterator[list[_Waiting]]:
    """Shortest first, each batch of at most `most` texts and TOKENS tokens."""
    some: list[_Waiting] = []
    for one in sorted(taken, key=lambda one: len(one.piece.ids)):
        if some and (len(some) == most or (len(some) + 1) * len(one.piece.ids) > TOKENS):
            yield some
            some = []
        some.append(one)
    yield some
