"""What teachers say of each text, asked once and kept on disk: batches bring it along, as they bring labels."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from smallbert.data import STUDENT
from smallbert.errors import UserError
from smallbert.features.building import Say, free_room
from smallbert.features.cache import Cache, What
from smallbert.features.plan import OF_TEXTS
from smallbert.features.store import Store, row_places
from smallbert.model.batch import TAUGHT, Batch
from smallbert.model.encoder import fingerprint
from smallbert.processes import from_main

if TYPE_CHECKING:
    from smallbert.training.phase import Phase
    from smallbert.training.teachers import Teacher

ROOM = 0.5  # of what is free on the disk, the most that is taken unasked
SETTLED = 0.125  # of what is free on a GPU, the most that is taken
PIECE = 2**12  # texts that are brought there at a time
SETTLING = "bringing what the teacher said"


class Kind(NamedTuple):
    """One of the things that a teacher says: hidden states of these layers, or scores; of tokens or of texts."""

    layers: tuple[int, ...]
    by_token: bool


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
    settled: dict[str, Tensor] = field(default_factory=dict, repr=False)  # all of it on a GPU that has room, by kind

    def __post_init__(self) -> None:
        """Name the kinds of things it has, and find where the tokens of each text begin among those of all."""
        scores, hidden, first = self.what.scores, self.what.hidden, self.what.first
        kinds = {"scores": Kind((), scores == "tokens"), "hidden": Kind(hidden, True), "first": Kind(first, False)}
        self.kinds = {name: kind for name, kind in kinds.items() if kind.layers or (name == "scores" and scores)}
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.counts = {True: int(self.lengths.sum()), False: len(self.row_of)}  # of tokens, of texts

    @cached_property
    def table(self) -> Tensor:
        """The scores of whole texts: in memory, since they are hardly more than labels."""
        return self._read(np.arange(len(self.row_of)), self._blank(self.kinds["scores"], len(self.row_of)))

    @property
    def reads(self) -> bool:
        """Whether every batch is read from disk."""
        return not self.settled and any(kind.layers or kind.by_token for kind in self.kinds.values())

    @property
    def bytes(self) -> int:
        """How much memory all of it takes."""
        return sum(self._blank(kind, 1).nbytes * self.counts[kind.by_token] for kind in self.kinds.values())

    def settle(self, device: torch.device, say: Say) -> None:
        """Bring all of it onto a device, so that batches need bring no more than numbers of texts and tokens."""
        texts = np.arange(len(self.row_of))
        for name, kind in self.kinds.items():
            whole = self._blank(kind, self.counts[kind.by_token] + 1, device)  # the last one is for where no text is
            done = 0
            for start in range(0, len(texts), PIECE):
                some = texts[start : start + PIECE]
                count = int(self.lengths[some].sum()) if kind.by_token else len(some)
                places = torch.arange(count) if kind.by_token else None
                whole[..., done : done + count, :] = self._read(some, self._blank(kind, count), places, kind.layers)
                done += count
                say(SETTLING, start + len(some), len(texts), "")
            self.settled[name] = whole

    def add_to(self, batch: Batch, index: np.ndarray) -> Batch:
        """The batch of some texts with what the teacher said of them, or where that is; zeros where no text is."""
        by_token = any(kind.by_token for kind in self.kinds.values())
        places = torch.from_numpy(np.flatnonzero(batch.tokens().numpy())) if by_token else None
        made = (self._find if self.settled else self._fetch)(batch, index, places)
        return batch.with_tensors({f"{TAUGHT}{self.name} {what}": values for what, values in made.items()})

    def _find(self, batch: Batch, index: np.ndarray, places: Tensor | None) -> dict[str, Tensor]:
        """The lines of some texts, and of their tokens, among those of all."""
        texts = torch.full((batch.size,), self.counts[False])
        texts[: len(index)] = torch.from_numpy(index)
        if places is None:
            return {"texts": texts}
        tokens = torch.full((batch.input_ids.numel(),), self.counts[True])
        rows = row_places(self.starts[index], self.lengths[index], np.zeros(1, np.int64))[0]
        tokens[places] = torch.from_numpy(rows)
        return {"texts": texts, "tokens": tokens}

    def _fetch(self, batch: Batch, index: np.ndarray, places: Tensor | None) -> dict[str, Tensor]:
        """Everything that was said of some texts, each kind in the shape of the batch."""
        made = {}
        for name, kind in self.kinds.items():
            found = self._blank(kind, batch.input_ids.numel() if kind.by_token else batch.size)
            if kind.layers or kind.by_token:
                self._read(index, found, places if kind.by_token else None, kind.layers)
            else:
                found[: len(index)] = self.table[torch.from_numpy(index)]
            made[name] = found.unflatten(-2, batch.input_ids.shape) if kind.by_token else found
        return made

    def came_with(self, batch: Batch) -> bool:
        """Whether it was added to a batch: methods may make some of their own."""
        return f"{self.name} {'texts' if self.settled else next(iter(self.kinds))}" in batch.taught

    def said_of(self, batch: Batch) -> dict[str, Tensor]:
        """What the teacher said of a batch to which it was added: "scores", "hidden" and "first", those there are."""
        if not self.settled:
            return {name: batch.taught[f"{self.name} {name}"] for name in self.kinds}
        made = {}
        for name, kind in self.kinds.items():
            rows = batch.taught[f"{self.name} {'tokens' if kind.by_token else 'texts'}"]
            found = self.settled[name].index_select(-2, rows)
            made[name] = found.unflatten(-2, batch.input_ids.shape) if kind.by_token else found
        return made

    def _blank(self, kind: Kind, count: int, device: torch.device | str = "cpu") -> Tensor:
        """Zeros for so many tokens or texts: (layers, count, width) of states, (count, classes) of scores."""
        about = self.stores[0].about
        if not kind.layers:
            return torch.zeros(count, about["scores"]["classes"], device=device)
        dtype = getattr(torch, self.what.dtype)
        return torch.zeros(len(kind.layers), count, about["width"], dtype=dtype, device=device)

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
            if teacher.kept is not None and teacher.kept.bytes <= SETTLED * free_memory(phase.device):
                teacher.kept.settle(phase.device, say)
            if why:
                phase.notes.append(f"the teacher {name!r} looked at every step: {why}")
        try:
            yield [teacher.kept for teacher in teachers.values() if teacher.kept is not None]
        finally:
            for teacher in teachers.values():
                teacher.kept = None


def free_memory(device: torch.device) -> int:
    """How many bytes are free on a GPU; of a machine's own memory none is counted, since data sets outgrow it."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


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
