"""Asking teachers about all texts beforehand: whether that pays, where it is kept, whether a GPU has room for it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from smallbert.errors import UserError
from smallbert.features.building import Say, free_room
from smallbert.features.cache import Cache, What
from smallbert.features.parts import look_at_one, names_of, say_names, turns, why_not_kept
from smallbert.features.plan import OF_TEXTS, tokens_fingerprint
from smallbert.features.store import many
from smallbert.features.taught import Taught
from smallbert.machine.processes import from_main
from smallbert.model.encoder import fingerprint_of_outputs
from smallbert.texts.data import STUDENT
from smallbert.training.memory import free_memory

if TYPE_CHECKING:
    from smallbert.training.phase import Phase
    from smallbert.training.teachers import Teacher

ROOM = 0.5  # of what is free on the disk, the most that is taken unasked
MUCH = 1e6  # bytes, from which on their number is told, while whoever minds can still stop it
LITTLE = 2**26  # bytes of scores, the most that stays for other runs unasked
RESIDENT = 0.125  # of what is free on a GPU, the most that is taken


@contextmanager
def keep_taught(
    phase: Phase, place: Path | None, say: Say, shared: bool = False, said: Path | None = None
) -> Iterator[list[Taught]]:
    """Ask every teacher of a phase about all texts beforehand, where that pays; the rest look at every step.

    It is kept in the folder that the user named, or in `place`; without either in one that is gone when the phase ends.
    Scores of texts, which are little, are kept in `said`, if there is one, where other runs find them.
    """
    asked, teachers = phase.settings.cache, phase.teachers
    given = None if asked in ("auto", "none") else Path(asked).expanduser()
    with tempfile.TemporaryDirectory(prefix="smallbert-") as aside:
        own = place or Path(aside)
        try:
            for name, teacher in teachers.items():
                if asked == "none" or not (teacher.scores or teacher.wanted):
                    continue
                why = why_not(phase, teacher) or ("" if given else _does_not_pay(phase, teacher, shared))
                if not why:
                    folder = given or _folder_unasked(phase, name, teacher, own, said)
                    teacher.kept, why = _keep(phase, name, teacher, folder, given is None, say)
                if why:
                    phase.notes.append(f"the teacher {name!r} ran at every step: {why}")
            yield [teacher.kept for teacher in teachers.values() if teacher.kept is not None]
        finally:
            for teacher in teachers.values():
                teacher.kept = None


def room_on(device: torch.device) -> float:
    """How many bytes of what teachers say may lie on a device: none on a CPU, whose memory data sets outgrow."""
    return RESIDENT * free_memory(device) if device.type == "cuda" else 0.0


def _bring(kept: Taught, device: torch.device, say: Say) -> bool:
    """Bring what a teacher said to a GPU that has room; one that turns out to have none lets batches bring it."""
    if kept.bytes > room_on(device):
        return False
    try:
        kept.bring_to(device, say)
    except torch.OutOfMemoryError:  # others on the same GPU have counted on the same room
        kept.resident.clear()
    return bool(kept.resident)


def why_not(phase: Phase, teacher: Teacher) -> str:
    """Why a teacher must look at every step; nothing where it need not."""
    heads = [*phase.encoder.heads.values(), *teacher.encoder.heads.values()]
    reasons = {
        "its texts are drawn anew": phase.stream is None or phase.stream.draw is not None,
        "a head reads padding": any(getattr(head, "padded_to", 0) for head in heads),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _does_not_pay(phase: Phase, teacher: Teacher, shared: bool) -> str:
    if not shared and phase.planned_steps <= phase.steps_an_epoch:
        return "each text is read once"
    if phase.device.type == "cuda" and teacher.wanted.keys() - {"first"}:
        return (
            "a GPU computes vectors of all tokens sooner than they are written and read "
            "(cache='folder' keeps them anyway)"
        )
    return ""


def _view_read(phase: Phase, name: str) -> str:
    """In which view a teacher reads the texts."""
    from smallbert.training.teachers import view_of

    assert phase.stream is not None
    return view_of(name) if view_of(name) in phase.stream.views else STUDENT


def _folder_unasked(phase: Phase, name: str, teacher: Teacher, place: Path, said: Path | None) -> Path:
    """Where what a teacher says is kept if nobody has said where: scores of texts alone in `said`, the rest in `place`.

    Such scores are kept apart from all else and for each set of texts, so that no rounding depends on who came first.
    """
    assert phase.stream is not None
    if teacher.wanted:  # of a teacher that needs no head
        return place
    tokens, head = phase.stream.views[_view_read(phase, name)], teacher.encoder.head
    if head.kind not in OF_TEXTS or 4 * head.outputs * len(tokens) > LITTLE:
        return place
    return (said or place) / f"scores-{tokens_fingerprint(tokens)}"


def _check_folder(folder: Path) -> None:
    """Make the folder that a user named for what teachers say and see that it can be written, or say why not."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"the teachers' outputs cannot be kept in {folder}: {error.strerror}; write another cache='folder', or "
            "cache='none' to run them at every step"
        ) from None


def _keep(
    phase: Phase, name: str, teacher: Teacher, folder: Path, unasked: bool, say: Say
) -> tuple[Taught | None, str]:
    """What a teacher says of all texts, or why it cannot be kept."""
    assert phase.stream is not None
    encoder, own = teacher.encoder, _view_read(phase, name)
    tokens = phase.stream.views[own]
    of = ("texts" if encoder.head.kind in OF_TEXTS else "tokens") if teacher.scores else ""
    wanted, first = dict(teacher.wanted), tuple(sorted(teacher.wanted.get("first", ())))
    wanted.pop("first", None)
    like = look_at_one(encoder, tokens, wanted)
    if why := why_not_kept(encoder, like):
        return None, why
    # Unasked, training must go as it does when the teacher looks; a folder that stays is better half as large.
    dtype, names = "float32" if unasked else "float16", names_of(wanted, turns(encoder))
    what = What(fingerprint_of_outputs(encoder), of, names, first, dtype)
    cache = Cache(encoder, tokens, what, folder / what.teacher)
    need, (free, there) = cache.bytes_left, free_room(folder)
    if from_main(lambda: unasked and need > free * ROOM):
        return None, f"keeping it would take {need / 1e6:,.1f} MB, more than half of what is free in {there}"
    if from_main(lambda: need > free):
        raise UserError(
            f"the outputs of the teacher {name!r} take {need / 1e6:,.1f} MB more, but {there} has {free / 1e6:,.1f} MB "
            "free; write another cache='folder', or cache='none' to run it at every step"
        )
    if need and not unasked:
        _check_folder(folder)
    view = own if what.tokens == "all" else STUDENT
    some = cache.holds_some

    def tell(stage: str, done: int, total: int, info: str) -> None:
        say(stage, done, total, f"{need / 1e6:,.1f} MB to write" if need >= MUCH else info)

    found = Taught(name, what, *cache.fill(tell), tokens.lengths, view, like)
    kept = [f"{say_names(wanted)} of all tokens"] if wanted else []
    kept += [f"{say_names({'hidden': first})} of {found.tokens_of_first} tokens"] if first else []
    said = " and ".join([*kept, *(["scores"] if of else [])])
    looked = "had run on each text before"
    if need:
        looked = f"ran once on each text{' for which the cache lacked something' if some else ''}"
    size = f"{sum(store.bytes for store in found.stores) / 1e6:,.1f} MB{f', vectors in {what.dtype}' if kept else ''}"
    read = "brought to the GPU as a whole" if _bring(found, phase.device, say) else "read at every step"
    phase.notes.append(f"the teacher {name!r} {looked}: {said} were kept ({size}) and {read}")
    others = [] if unasked else [one for one in folder.iterdir() if one.name != what.teacher and one.is_dir()]
    if others:
        phase.notes.append(
            f"{folder} also holds what {many(len(others), 'other teacher')} put out, which was left alone"
        )
    return found, ""
