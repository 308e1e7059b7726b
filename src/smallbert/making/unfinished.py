"""What an interrupted run has left beside the folder that it was to fill: other work is not put over it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from smallbert.errors import UserError
from smallbert.making.finished import MAY_BE_GONE, PHASE, is_same
from smallbert.making.likeness import same_work, texts_of
from smallbert.recipes.recipe import Recipe
from smallbert.texts.data import usable_length
from smallbert.training.checkpoint import STATE, read_about

if TYPE_CHECKING:
    from smallbert.making.starting import Start
    from smallbert.tasks import Task

# Where words stand in the key of a piece of work (see same_work), and what is another one where they differ.
DIFFERENCES = {0: "another model", 1: "other data", 3: "another seed", 5: "another length"}


def check_unfinished(work: Path, recipe: Recipe, start: Start, task: Task, seed: int) -> None:
    """Refuse a folder in which training was interrupted that is not taken over by this work: it would be lost."""
    files = [*work.glob(f"phase-*/{PHASE}"), *work.glob(f"phase-*/{STATE}")]
    found = {file.parent: about for file in files if (about := read_about(file)) is not None}
    if not found:
        return
    same = same_work(start.fingerprint, task, seed, usable_length(start.encoder, None, task))
    ours = [f"{same}: {text}" for text in texts_of(recipe, start.encoder, task)]
    others = {path: about for path, about in found.items() if not _is_taken_over(path, about["key"], ours)}
    if not others:
        return
    last, about = max(others.items(), key=lambda item: len(item[1]["key"]))
    setting, _, text = about["key"].partition(": ")
    pairs = list(zip(setting.split(), same.split(), strict=False))
    unlike = [name for place, name in DIFFERENCES.items() if pairs[place:] and pairs[place][0] != pairs[place][1]]
    if _without_reads(about["key"]) in map(_without_reads, ours):
        unlike.append("marks at other places" if about["key"] in ours else "other files that it reads")
    elif not unlike and _today(text) in [_without_reads(own.partition(": ")[2]) for own in ours]:
        unlike.append("another version of smallbert")
    step = f", at step {about['step']:,} of {about['total']:,}" if "step" in about else ""
    raise UserError(
        f"{last if len(others) == 1 else work} holds training of other work that was interrupted: "
        f"{' and '.join([*unlike, repr(_brief(text))])}{step}; repeat its command to finish it, or give another --out, "
        "or delete what is there"
    )


def _is_taken_over(path: Path, key: str, ours: Sequence[str]) -> bool:
    """Whether a phase is the same as ours of its number, which is where a run looks for it."""
    number = int(path.name.removeprefix("phase-").partition(".")[0])
    return number < len(ours) and is_same(key, ours[number])


def _without_reads(text: str) -> str:
    return re.sub(rf"(?<=\)){MAY_BE_GONE}", "", text)


def _today(text: str) -> str:
    """A recipe as this version writes it, with settings that came later."""
    try:
        return Recipe(_without_reads(text)).key()
    except UserError:  # nothing that this version knows
        return text


def _brief(text: str) -> str:
    """A recipe as its user might have written it."""
    try:
        return Recipe(_without_reads(text)).brief().removeprefix("head | ")  # which is put in front of any
    except UserError:
        return text
