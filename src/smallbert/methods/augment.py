"""Data augmentation: more training texts made of the task's own, for a teacher to label."""

import hashlib
import json
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from smallbert.errors import UserError
from smallbert.machine.files import grow_file
from smallbert.machine.processes import processes
from smallbert.methods import Method
from smallbert.methods.unlabelled import check_taught, joined
from smallbert.model.encoder import Encoder, fingerprint, load
from smallbert.model.words import check_word_head, need_word_head
from smallbert.sources import find_model, folder_read
from smallbert.tasks.task import Split
from smallbert.texts.augmenting import WAYS, Guesser, changes, copies_of, may_change, taken_apart

FINDER = "the model that finds words for augment"
CHUNK = 64  # rows worked on at a time, and the least that a kill loses


class Augment(Method):
    """Add changed copies of the task's own training texts, which a teacher labels.

    copies: most copies of each text; all differ, so a short text has fewer. Of two texts half of the copies
        change the first and half the second; of a question and its context all change the question.
    ways: how copies are changed: 'masked' replaces words by one of a masked LM's 15 best (words of several pieces as
        'nearest' does), 'nearest' by one of the 15 with the nearest embeddings, 'mask' by the mask token; 'delete'
        leaves words out; 'grams' keeps only one to five words in a row. Several are applied to each copy in this
        order, with one share, ['mask', 'grams'], or each with its own, {'mask': 0.1, 'grams': 0.25}.
    share: probability that a word changes, if it is all letters and no English stop word; for 'grams', that a copy
        does; not used where `ways` has its own shares
    labels: labels of the copies: 'teacher', none, so that only a teacher's predictions are learned; 'kept', those of
        the texts they are made of
    model: the model that finds words for 'masked' and 'nearest': a name given by mark(), a model folder, or a name on
        the hub; '' is the encoder that the phase trains
    seed: random seed of the changes; they do not depend on the seed of the run
    folder: folder in which copies are kept, for other runs too; '' deletes them when the run ends
    """

    stage: ClassVar[int] = 6
    trains: ClassVar[bool] = True
    places: ClassVar[tuple[str, ...]] = ("folder",)

    copies: int = 10
    ways: str | list[str] | dict[str, float] = "masked"
    share: float = 0.4
    labels: Literal["teacher", "kept"] = "teacher"
    model: str = ""
    seed: int = 0
    folder: str = ""

    def check(self) -> None:
        """Known ways, and shares."""
        for way, share in self._ways().items():
            if way not in WAYS:
                raise UserError(f"augment: there is no way {way!r}; ways are: {', '.join(WAYS)}")
            if not 0 < share <= 1:
                raise UserError(f"augment: a share of words is above 0 and at most 1, not {share}")
        if isinstance(self.ways, dict) and self.share != type(self).share:
            raise UserError(f"augment: ways={self.ways} has a share for each way, so leave out share={self.share}")
        if self.model and not {"masked", "nearest"} & self._ways().keys():
            raise UserError(f"augment: ways={self.ways!r} replaces no words, so leave out model={self.model!r}")
        if {"masked", "nearest"} <= self._ways().keys():
            raise UserError("augment: 'masked' and 'nearest' are two ways to replace words; take one of them")
        if self.copies < 1 or not self._ways():
            raise UserError(f"augment: at least one copy in one way is needed, not {self.copies} in {self.ways!r}")

    def _ways(self) -> dict[str, float]:
        if isinstance(self.ways, dict):
            return self.ways
        return dict.fromkeys([self.ways] if isinstance(self.ways, str) else self.ways, self.share)

    def reads(self, marks: Collection[str] = ()) -> str:
        """Who finds words, if in a folder."""
        return folder_read(self.model, marks)

    def fits(self, phase: Any, steps: int | None) -> None:
        """Labels for the copies, from where they are wanted, and somebody who finds words."""
        if self.labels == "teacher":
            check_taught(phase, self.name)
        elif phase.task and phase.task.kind == "tag" and {"delete", "grams"} & set(self._ways()):
            raise UserError(
                "augment: labels='kept' does not fit words that are left out; use other ways, or labels='teacher'"
            )
        if self.model and self.model not in phase.marks:
            find_model(self.model)
        finder = phase.marks.get(self.model) if self.model else phase.encoder
        if finder is not None and "masked" in self._ways():
            check_word_head(finder, FINDER, "; or take words that are near, ways='nearest'")

    def rows(self, phase: Any, rows: Any) -> Any:
        """The rows so far, and behind them the copies."""
        if rows is None:
            raise UserError("augment changes the texts of a task, and none was given: give --task")
        self.fits(phase, None)
        texts: list[Any] = []
        pairs: list[Any] = []
        labels: list[Any] = []
        ids: list[str] = []
        for row, made in enumerate(self._made(phase, rows)):
            for number, (side, text) in enumerate(made):
                texts.append(rows.texts[row] if side else text)
                pairs.append(text if side else rows.pairs and rows.pairs[row])
                labels.append(rows.labels[row] if self.labels == "kept" else None)
                ids.append(f"{rows.ids[row]} copy {number}")
        phase.notes.append(f"augment made {len(texts):,} texts of {len(rows):,}")
        return joined(rows, Split(texts, pairs if rows.pairs else None, labels, ids))

    def _made(self, phase: Any, rows: Split) -> Iterator[list[list[Any]]]:
        """The copies of each row: found in the file where an earlier run has left them, or made and left there."""
        model, folder = self._model(phase), Path(self.folder).expanduser() if self.folder else phase.work
        if folder is None:
            yield from map(json.loads, self._copies(phase, rows, model, 0))
            return
        path = folder / f"augmented-{self._key(rows, model, phase.task.kind)}.jsonl"
        if not path.exists() and processes().is_main_process:
            grow_file(path, partial(self._copies, phase, rows, model), CHUNK)
        processes().wait_for_everyone()
        with path.open(encoding="utf-8") as file:
            yield from map(json.loads, file)

    def _copies(self, phase: Any, rows: Split, model: Encoder, start: int) -> Iterator[str]:
        """The copies of each row from `start` on, a line each: [[0, "a changed text"], [1, "a changed second one"]]."""
        how, guesser = changes(self._ways(), model.tokenizer), Guesser(model) if self._needs_model() else None
        # Of a question and its context only the question changes: an answer must stay in its context.
        sides = [rows.texts] if rows.pairs is None or phase.task.kind == "answer" else [rows.texts, rows.pairs]
        counts = [self.copies - self.copies // 2, self.copies // 2] if len(sides) == 2 else [self.copies]
        for first in range(start, len(rows), CHUNK):
            some = [side[first : first + CHUNK] for side in sides]
            near = [self._near(guesser, texts) for texts in some]
            for place in range(len(some[0])):
                draw = np.random.default_rng([self.seed, first + place])
                yield json.dumps(
                    [
                        [side, text]
                        for side, texts in enumerate(some)
                        for text in copies_of(texts[place], near[side][place], how, counts[side], draw)
                    ],
                    ensure_ascii=False,
                )
            phase.say("augmenting", min(first + CHUNK, len(rows)), len(rows), "")

    def _near(self, guesser: Guesser | None, texts: list[Any]) -> list[list[list[str]]]:
        """What could stand in place of each word that may change, text by text."""
        if guesser is None:
            return [[] for _ in texts]
        if "masked" in self._ways():
            return guesser.guesses(texts)
        spots = [[parts[place] for place in may_change(parts)] for parts in map(taken_apart, texts)]
        near = guesser.nearest(word for row in spots for word in row)
        return [[near[word] for word in row] for row in spots]

    def _model(self, phase: Any) -> Encoder:
        """A copy of the model that finds words."""
        if not self.model:
            found = phase.encoder.copy()
        else:
            found = phase.marks[self.model].copy() if self.model in phase.marks else load(self.model)
        found = found.to(phase.device).eval().requires_grad_(False)
        if "masked" in self._ways():
            need_word_head(found, FINDER)
        return found

    def _needs_model(self) -> bool:
        return bool({"masked", "nearest"} & self._ways().keys())

    def _key(self, rows: Split, model: Encoder, kind: str) -> str:
        """A short hash of all that the copies depend on."""
        who = fingerprint(model) if self._needs_model() else str(getattr(model.tokenizer, "mask_token", ""))
        digest = hashlib.sha256(json.dumps([kind, self.copies, self._ways(), self.seed, who]).encode())
        for text in [*rows.texts, *(rows.pairs or [])]:
            digest.update(json.dumps(text).encode())
        return digest.hexdigest()[:16]
