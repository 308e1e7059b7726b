"""What an interrupted run has left beside the folder that it was to fill: other work is not put over it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from smallbert.errors import UserError
from smallbert.making.estimate import phases_of
from smallbert.making.finished import MAY_BE_GONE, PHASE, is_same
from smallbert.making.likeness import WORK, same_work, texts_so_far
from smallbert.measuring.groups import short_recipes
from smallbert.model.answering import in_order_of
from smallbert.recipes.recipe import Recipe
from smallbert.texts.data import usable_length
from smallbert.training.checkpoint import STATE, read_about

if TYPE_CHECKING:
    from smallbert.making.starting import Start
    from smallbert.tasks import Task

PARTS = {"model": "another model", "data": "other data", "seed": "another seed", "length": "another length"}
VERSION = "another version of smallbert"


def check_unfinished(work: Path, recipe: Recipe, start: Start, task: Task, seed: int) -> None:
    """Refuse a folder in which training was interrupted that is not taken over by this work: it would be lost."""
    files = [*work.glob(f"phase-*/{PHASE}"), *work.glob(f"phase-*/{STATE}")]
    found = {file.parent: about for file in files if (about := read_about(file)) is not None}
    if not found:
        return
    same = same_work(start.fingerprint, task, seed, usable_length(start.encoder, None, task))
    texts = texts_so_far(phases_of(recipe, in_order_of(start.encoder, task), task))
    ours = [f"{same}: {text}" for text in texts]
    others = {path: about for path, about in found.items() if not _is_taken_over(path, about["key"], ours)}
    if not others:
        return
    last, about = max(others.items(), key=lambda item: len(item[1]["key"]))
    unlike = _differences(about["key"], ours)
    step = f", at step {about['step']:,} of {about['total']:,}" if "step" in about else ""
    finish = "finish it with that version" if VERSION in unlike else "repeat its command to finish it"
    raise UserError(
        f"{last if len(others) == 1 else work} holds training of other work that was interrupted: "
        f"{' and '.join([*unlike, repr(_brief(about['key']))])}{step}; {finish}, or give another --out, "
        "or delete what is there"
    )


def _is_taken_over(path: Path, key: str, ours: Sequence[str]) -> bool:
    """Whether a phase is the same as ours of its number, which is where a run looks for it."""
    number = int(path.name.removeprefix("phase-").partition(".")[0])
    return number < len(ours) and is_same(key, ours[number])


def _differences(key: str, ours: Sequence[str]) -> list[str]:
    """In what kept training differs from this work, beside the recipe itself: ["another seed"]."""
    kept, own = WORK.fullmatch(key), WORK.fullmatch(ours[-1])
    if kept is None or own is None:
        return [VERSION]
    unlike = [said for part, said in PARTS.items() if kept[part] != own[part]]
    if _without_reads(key) in map(_without_reads, ours):
        return [*unlike, "marks at other places" if key in ours else "other files that it reads"]
    written = _as_written_today(kept["recipe"])
    if not unlike and (written is None or any(written == _as_written_today(_recipe_of(text)) for text in ours)):
        return [VERSION]
    return unlike


def _brief(key: str) -> str:
    """A recipe as its user might have written it."""
    text = _without_reads(_recipe_of(key))
    try:
        return Recipe(text).brief().removeprefix("head | ")  # which is put in front of any
    except UserError:
        return short_recipes([{"recipe": text}])[0]


def _as_written_today(text: str) -> str | None:
    """A recipe with settings that came later; None if it has any that this version does not know."""
    try:
        return Recipe(_without_reads(text)).key()
    except UserError:
        return None


def _recipe_of(key: str) -> str:
    return key.partition(": ")[2]


def _without_reads(text: str) -> str:
    return re.sub(rf"(?<=\)){MAY_BE_GONE}", "", text)
