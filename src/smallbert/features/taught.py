"""What teachers say of each text, asked once and kept on disk: batches bring it along, as they bring labels."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from smallbert.data import STUDENT
from smallbert.errors import UserError
from smallbert.features.building import Say, free_room
from smallbert.features.cache import Cache, What
from smallbert.features.plan import OF_TEXTS
from smallbert.features.store import Store
from smallbert.model.batch import TAUGHT, Batch
from smallbert.model.encoder import fingerprint
from smallbert.processes import from_main

if TYPE_CHECKING:
    from smallbert.training.phase import Phase
    from smallbert.training.teachers import Teacher

ROOM = 0.5  # of what is free on the disk, the most that is taken unasked


@dataclass
class Taught:
    """What one teacher said of every text of a phase."""

    name: str
    what: What
    stores: list[Store]
    store_of: np.ndarray  # of each text, which store holds it
    row_of: np.ndarray  # and where in it
    lengths: np.ndarray
    view: str  # in which batch it comes

    @cached_property
    def table(self) -> Tensor:
        """The scores of whole texts: in memory, since they are hardly more than labels."""
        made = torch.zeros(len(self.row_of), self.stores[0].about["scores"]["classes"])
        return self._read(np.arange(len(self.row_of)), made)

    @property
    def reads(self) -> bool:
        """Whether every batch is read from disk."""
        return bool(self.what.layers) or self.what.scores == "tokens"

    def add_to(self, batch: Batch, index: np.ndarray) -> Batch:
        """The batch of some texts with what the teacher said of them; zeros where no text is."""
        made: dict[str, Tensor] = {}
        places = torch.from_numpy(np.flatnonzero(batch.tokens().numpy())) if self.what.tokens == "all" else None
        shape, width = tuple(batch.input_ids.shape), self.stores[0].about["width"]
        kind = getattr(torch, self.what.dtype)
        if self.what.scores == "texts":
            made["scores"] = torch.zeros(batch.size, self.table.shape[1])
            made["scores"][: len(index)] = self.table[torch.from_numpy(index)]
        elif self.what.scores:
            found = torch.zeros(batch.input_ids.numel(), self.stores[0].about["scores"]["classes"])
            made["scores"] = self._read(index, found, places).unflatten(0, shape)
        if self.what.hidden:
            found = torch.zeros(len(self.what.hidden), batch.input_ids.numel(), width, dtype=kind)
            made["hidden"] = self._read(index, found, places, self.what.hidden).unflatten(1, shape)
        if self.what.first:
            found = torch.zeros(len(self.what.first), batch.size, width, dtype=kind)
            made["first"] = self._read(index, found, None, self.what.first)
        return batch.with_tensors({f"{TAUGHT}{self.name} {what}": values for what, values in made.items()})

    def _read(
        self, index: np.ndarray, out: Tensor, places: Tensor | None = None, layers: tuple[int, ...] = ()
    ) -> Tensor:
        """Put scores of some texts, or states of layers, into `out`: at the places of all tokens, or one a text."""
        store_of, rows = self.store_of[index], self.row_of[index]
        owner = store_of if places is None else np.repeat(store_of, self.lengths[index])
        for number in np.unique(store_of):
            some, columns = rows[store_of == number], torch.from_numpy(np.flatnonzero(owner == number))
            columns = columns if places is None else places[columns]
            if layers:
                self.stores[number].read(some, list(layers), places is None, out, columns)
            else:
                self.stores[number].read_scores(some, out, columns)
        return out


@contextmanager
def keep_taught(phase: Phase, place: Path | None, say: Say, shared: bool = False) -> Iterator[list[Taught]]:
    """Ask every teacher of a phase about all texts beforehand, where that pays; the rest look at every step.

    It is kept in the folder that the user named, or in `place`; without either in one that is gone when the phase ends.
    """
    asked, teachers = phase.settings.cache, phase.teachers
    given = None if asked in ("auto", "none") else Path(asked).expanduser()
    with tempfile.TemporaryDirectory(prefix="smallbert-") as aside:
        folder = given or place or Path(aside)
        for name, teacher in teachers.items():
            if asked == "none" or not (teacher.scores or teacher.wanted):
                continue
            why = why_not(phase, teacher) or ("" if given else _does_not_pay(phase, teacher, shared))
            if not why:
                teacher.kept, why = _keep(phase, name, teacher, folder, given is None, say)
            if why:
                phase.notes.append(f"the teacher {name!r} looked at every step: {why}")
        try:
            yield [teacher.kept for teacher in teachers.values() if teacher.kept is not None]
        finally:
            for teacher in teachers.values():
                teacher.kept = None


def why_not(phase: Phase, teacher: Teacher) -> str:
    """Why a teacher must look at every step; nothing where it need not."""
    shown = ", ".join(sorted(set(teacher.wanted) - {"hidden", "first"}))
    heads = [*phase.encoder.heads.values(), *teacher.encoder.heads.values()]
    reasons = {
        "what it reads is drawn anew": phase.stream is None or phase.stream.draw is not None,
        f"it shows more than is kept ({shown})": bool(shown),
        "a head reads padding": any(getattr(head, "padded_to", 0) for head in heads),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _does_not_pay(phase: Phase, teacher: Teacher, shared: bool) -> str:
    if not shared and phase.planned_steps <= phase.steps_an_epoch:
        return "each text is read once"
    if phase.device.type == "cuda" and "hidden" in teacher.wanted:
        return (
            "a GPU computes hidden states of all tokens as fast as it is sent them (cache='folder' keeps them anyway)"
        )
    return ""


def _check_folder(folder: Path) -> None:
    """Make the folder that a user named for what teachers say and see that it can be written, or say why not."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"what teachers say cannot be kept in {folder}: {error.strerror}; write another cache='folder', or "
            "cache='none' to let them look at every step"
        ) from None


def _keep(
    phase: Phase, name: str, teacher: Teacher, folder: Path, unasked: bool, say: Say
) -> tuple[Taught | None, str]:
    """What a teacher says of all texts, or why there is no room for it."""
    from smallbert.training.teachers import view_of

    assert phase.stream is not None
    stream, encoder = phase.stream, teacher.encoder
    own = view_of(name) if view_of(name) in stream.views else STUDENT
    tokens = stream.views[own]
    of = ("texts" if encoder.head.kind in OF_TEXTS else "tokens") if teacher.scores else ""
    hidden, first = (tuple(sorted(teacher.wanted.get(role, ()))) for role in ("hidden", "first"))
    # Unasked, training must go as it does when the teacher looks; a folder that stays is better half as large.
    what = What(fingerprint(encoder), of, hidden, first, "float32" if unasked else "float16")
    cache = Cache(encoder, tokens, what, folder / what.teacher)
    need, (free, there) = cache.bytes_left, free_room(folder)
    if from_main(lambda: unasked and need > free * ROOM):
        return None, f"keeping it would take {need / 1e6:,.1f} MB, more than half of what is free in {there}"
    if from_main(lambda: need > free):
        raise UserError(
            f"what the teacher {name!r} says takes {need / 1e6:,.1f} MB more, but {there} has {free / 1e6:,.1f} MB "
            "free; write another cache='folder', or cache='none' to let it look at every step"
        )
    if need and not unasked:
        _check_folder(folder)
    view = own if what.tokens == "all" else STUDENT
    found = Taught(name, what, *cache.fill(say), tokens.lengths, view)
    kept = [f"hidden states {', '.join(map(str, hidden))} of all tokens"] if hidden else []
    kept += [f"hidden states {', '.join(map(str, first))} of first tokens"] if first else []
    said = " and ".join([*kept, *(["scores"] if of else [])])
    looked = "looked once at each text" if need else "had looked at each text before"
    phase.notes.append(
        f"the teacher {name!r} {looked}: {said} were kept"
        f"{f' (states in {what.dtype})' if kept else ''} and read at every step"
    )
    others = [] if unasked else [one for one in folder.iterdir() if one.name != what.teacher and one.is_dir()]
    if others:
        phase.notes.append(f"{folder} also holds what {len(others)} other teachers said, which was left alone")
    return found, ""
