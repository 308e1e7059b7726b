"""Beginnings that recipes have in common: where each is kept once it was trained, and which recipes wait for it."""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smallbert.errors import UserError
from smallbert.machine.files import write_folder, write_json
from smallbert.machine.processes import processes
from smallbert.making.finished import PHASE
from smallbert.making.likeness import beginnings, same_work
from smallbert.making.make import work_key
from smallbert.making.places import Place, find_place
from smallbert.making.starting import Start
from smallbert.measuring.card import RESULT
from smallbert.measuring.pruned import note_zeros
from smallbert.measuring.shelf import load_card
from smallbert.recipes.recipe import Recipe
from smallbert.texts.data import usable_length

if TYPE_CHECKING:
    from smallbert.tasks import Task


def common_beginnings(
    recipes: Sequence[Recipe],
    start: Start,
    task: Task,
    seed: int,
    out: Path,
    kind: str = RESULT,
    split: str = "dev",
) -> dict[str, Path]:
    """Beginnings that several recipes have in common -> the folder where each is kept once it was trained."""
    counts: Counter[str] = Counter()
    wanted: set[str] = set()
    finished: dict[str, Place] = {}
    for recipe in recipes:
        texts = _beginnings(recipe, start, task)
        trained = [text for text, trains in texts.items() if trains]
        counts.update(trained)
        place = find_place(out, work_key(recipe, start, task, seed, kind, split))
        if not place.card.is_file():
            wanted.update(trained)
        elif trained and trained[-1] == list(texts)[-1]:
            finished[trained[-1]] = place
    same = same_work(start.fingerprint, task, seed, usable_length(start.encoder, None, task))
    common = {}
    for text in (text for text, count in counts.items() if count > 1):
        folder = out / "work" / f"beginning-{hashlib.sha256(f'{same} {text}'.encode()).hexdigest()[:10]}"
        common[text] = folder
        if text in finished and text in wanted and processes().is_main_process:
            _reuse(finished[text], folder, f"{same}: {text}")
    return common


def is_made(folder: Path) -> bool:
    """Whether a beginning was trained; its folder comes to its place whole, so one file of it is enough to see."""
    return (folder / PHASE).is_file()


def forget(common: Mapping[str, Path]) -> None:
    """Delete beginnings that nobody needs any more, and what is left of those that came to nothing."""
    for folder in common.values():
        for path in (folder, folder.with_suffix(".checkpoint"), folder.with_suffix(".states")):
            shutil.rmtree(path, ignore_errors=True)


def group_recipes(
    recipes: Sequence[Recipe], start: Start, task: Task, made: Collection[str] = ()
) -> list[tuple[int, ...]]:
    """Numbers of recipes that share a trained beginning not `made` yet, in the order of the first of each.

    ["finetune | quantize", "quantize", "finetune"] -> [(0, 2), (1,)], and with finetune made [(0,), (1,), (2,)]
    """
    groups: list[tuple[set[str], list[int]]] = []
    for place, recipe in enumerate(recipes):
        texts = {text for text, trains in _beginnings(recipe, start, task).items() if trains and text not in made}
        shared = [group for group in groups if group[0] & texts]
        merged = (texts.union(*(theirs for theirs, _ in shared)), [n for _, own in shared for n in own] + [place])
        groups = [group for group in groups if group not in shared] + [merged]
    return sorted(tuple(sorted(own)) for _, own in groups)


def _beginnings(recipe: Recipe, start: Start, task: Task) -> dict[str, bool]:
    try:
        return beginnings(recipe, start.encoder, task)
    except UserError:
        return {}  # its run will say what is wrong with it


def _reuse(place: Place, folder: Path, key: str) -> None:
    """Let a finished model stand for a phase of the recipes that go on from it."""
    card = load_card(place.card)
    if card["status"] != "ok" or not place.model.is_dir() or is_made(folder):
        return
    trained = card["trained"]
    about: dict[str, Any] = {"key": key, "counts": [trained[name] for name in ("steps", "epochs", "packed")]}
    measured = note_zeros(card)  # said of this model, not of what is made of it
    notes = [note for note in trained["notes"] if not note.startswith(f"{card['split']}: ") and note not in measured]
    with write_folder(folder) as aside:
        shutil.copytree(place.model, aside, dirs_exist_ok=True)
        write_json(aside / PHASE, {**about, "notes": notes, "seconds": card["seconds"]})
