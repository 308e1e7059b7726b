"""The rows held out of train, by which trials are chosen; behind a backbone that stays frozen, its stored states."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from smallbert.features.frozen import Frozen, keep_states
from smallbert.features.store import Store
from smallbert.machine.files import shared_folder
from smallbert.making.likeness import beginnings
from smallbert.making.starting import Say, Start, quiet
from smallbert.measuring.evaluate import decide, read_scores
from smallbert.measuring.metrics import score
from smallbert.methods import METHODS
from smallbert.model.encoder import Encoder
from smallbert.recipes.recipe import Recipe
from smallbert.tasks import Task
from smallbert.tasks.derived import without_dev
from smallbert.texts.batches import Layout, sort_into_batches
from smallbert.texts.data import STUDENT, Stream, tokenise, usable_length
from smallbert.training.phase import Phase
from smallbert.tuning.space import Space

SHARE, MOST = 0.1, 5000  # of train is held out
KEPT = 16  # beginnings that trials may have in common
TOKENS = 2**11  # of stored states that are read at once


def search_task(task: Task) -> Task:
    """The task as trials see it: no dev, no test, a part of train to choose by, and only the metric that is chosen by.

    Chosen by are a tenth of train's whole rows (at most 5,000), always the same ones; see `tasks/families.py`.
    """
    return replace(without_dev(task, SHARE, MOST), metrics=task.metrics[:1])


def common_texts(space: Space, start: Start, task: Task) -> dict[str, bool]:
    """Beginnings that trials may have in common, and whether the last phase of each trains; "" is the bare model."""
    found = {"": False}
    for recipe in (Recipe(), *space.beginnings(KEPT)):
        found |= beginnings(recipe, start.encoder, task)
    return found


@dataclass
class Held:
    """The rows as tokens, made once, and the states that backbones made of them, each once."""

    task: Task
    states: Path
    stream: Stream | None = None
    stores: dict[Path, Store] = field(default_factory=dict)  # of these rows and of the rest, for all trials
    _last: tuple[Any, int, Frozen | None] | None = None  # of what encoder, and how often changed, states were read
    _open: ExitStack = field(default_factory=ExitStack)

    def score(self, encoder: Encoder, say: Say = quiet, common: bool = False) -> tuple[float, float]:
        """The headline score of an encoder and its standard error; `common`, other trials have the same backbone."""
        rows = self.task.split("dev")
        if self.stream is None:
            length = usable_length(encoder, None, self.task)
            self.stream = tokenise(encoder.tokenizer, rows, self.task.kind, length)
        with _in_use(encoder):
            stored = self._states(encoder, say) if common else None
            scores = read_scores(encoder, self.stream, say) if stored is None else self._read(encoder, stored)
        found = score(self.task, decide(scores, self.stream, self.task, rows), rows)[self.task.metrics[0]]
        return found["value"], found["stderr"]

    def use_with_others(self, folder: Path) -> None:
        """Hold a folder, until this is closed, so that no process takes it away when it is done."""
        self._open.enter_context(shared_folder(folder))

    def close(self) -> None:
        """Let go of stored states."""
        self._last = None
        self.stores.clear()
        self._open.close()

    def _states(self, encoder: Encoder, say: Say) -> Frozen | None:
        changes = sum(one._version for one in encoder.backbone.parameters())
        # To tell by all weights whose states are wanted takes a while, and a trial is looked at several times.
        if self._last is None or self._last[0]() is not encoder or self._last[1] != changes:
            phase = self._phase(encoder)
            phase.stream = self.stream
            with keep_states(phase, self.states, say, True, self.stores) as stored:
                self._last = weakref.ref(encoder), changes, stored
        return self._last[2]

    def _phase(self, encoder: Encoder) -> Phase:
        return Phase(encoder, (METHODS["train"](freeze="backbone", half=False),), self.task, 0, {})

    @torch.no_grad()
    def _read(self, encoder: Encoder, stored: Frozen) -> list[np.ndarray]:
        """The head's scores for every row, from stored states; in full precision, as in evaluation."""
        assert self.stream is not None
        lengths, phase = self.stream.views[STUDENT].lengths, self._phase(encoder)
        found: list[Any] = [None] * len(lengths)
        for index in sort_into_batches(np.ones_like(lengths) if stored.single else lengths, TOKENS):
            batch = stored.make_batch(index, Layout(False, 0), 0).to(encoder.device)
            scores = phase.look_at({STUDENT: batch}).scores.float().cpu().numpy()
            for row, number in enumerate(index):
                found[number] = scores[row] if scores.ndim == 2 else scores[row, : lengths[number]]
        return found


@contextmanager
def _in_use(encoder: Encoder) -> Iterator[None]:
    """Without dropout for a while."""
    training = encoder.training
    encoder.eval()
    try:
        yield
    finally:
        encoder.train(training)
