"""Two saved models on the same examples: brought to the task's classes, read one after the other, compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from smallbert.errors import UserError
from smallbert.making.starting import Start, at_length, check_device, quiet
from smallbert.measuring.errors import compare_answers, positive_class
from smallbert.measuring.evaluate import note_unread
from smallbert.measuring.groups import short_recipes
from smallbert.measuring.judged import Answers, read_answers
from smallbert.measuring.shelf import card_beside
from smallbert.model.answering import match_labels
from smallbert.model.heads import plain_names, same_labels
from smallbert.tasks import Task
from smallbert.tasks.derived import CUT
from smallbert.texts.data import tokenizer_key

Say = Callable[[str, int, int, str], None]
SIDES = ("A", "B")


def find_errors(
    one: Start,
    other: Start,
    task: Task,
    split: str = "dev",
    *,
    positive: str | None = None,
    examples: int = 10,
    length: int | None = None,
    device: str | None = None,
    command: str = "",
    say: Say = quiet,
) -> dict[str, Any]:
    """Where two models differ on a split of a task, as plain JSON: see measuring.errors.

    >>> find_errors(start_from("base"), start_from("small"), load_task("rte"))["test"]["sentence"]
    'A is right on 12 examples where B is wrong, B on 5 where A is wrong, p = 0.14: no difference can be told apart …'
    """
    starts = (one, other)
    on = check_device(device) or ("cuda" if torch.cuda.is_available() else "cpu")
    positive_class(task.labels, positive)
    task.split(split)
    encoders = []
    for side, start in zip(SIDES, starts, strict=True):  # both, before either is run: what is refused is refused soon
        with _naming(side, start):
            task = at_length(start, task, length)
            encoders.append(match_labels(start.encoder, task))
    answers: list[Answers] = []
    for side, start, encoder in zip(SIDES, starts, encoders, strict=True):
        with _naming(side, start):
            answers.append(read_answers(encoder.to(on), task, split, _tell(say, side)))
        encoder.to("cpu")
    say("comparing", 0, 0, "")
    found = compare_answers(answers[0], answers[1], task, split, positive, examples)
    found["models"] = [about | facts for about, facts in zip(_about(starts), found["models"], strict=True)]
    return found | {"notes": _notes(starts, answers, task), "command": command}


def _about(starts: tuple[Start, Start]) -> list[dict[str, Any]]:
    """What each model is called and how it was made, with the settings that tell the two apart."""
    names = [start.name for start in starts]
    folders = [start.folder.resolve() if start.folder else None for start in starts]
    if names[0] == names[1] and folders[0] != folders[1]:
        names = [
            f"{folder.parent.name}/{name}" if folder else name for folder, name in zip(folders, names, strict=True)
        ]
    steps = [" | ".join(entry["step"] for entry in start.encoder.history) for start in starts]
    whole = [(_card(start) or {}).get("recipe") or own for start, own in zip(starts, steps, strict=True)]
    short = short_recipes([{"recipe": recipe} for recipe in whole])
    rows = zip(names, starts, short, whole, strict=True)
    return [
        {"name": name, "fingerprint": start.fingerprint, "recipe": brief or None, "whole_recipe": recipe or None}
        for name, start, brief, recipe in rows
    ]


def _notes(starts: tuple[Start, Start], answers: list[Answers], task: Task) -> list[str]:
    """What must be known to trust the comparison."""
    notes = []
    for side, start, own in zip(SIDES, starts, answers, strict=True):
        card, labels = _card(start), start.encoder.head.labels
        if card and card["task"] != task.name:
            notes.append(f"{side} was made for {card['task']}, not for {task.name}")
        elif card and (made := _cut(card["task_note"])) != (here := _cut(task.note)):
            notes.append(f"{side} was made with {made}, and is run here with {here}")
        notes += [f"{side}: {note}" for note in note_unread(start.encoder.head, own.tokens)]
        if card and card["status"] != "ok":
            notes.append(f"the training of {side} {card['status']}: {card['why']}")
        if task.labels and sorted(plain_names(labels)) != sorted(plain_names(task.labels)):
            if not same_labels(labels, task.labels):
                notes.append(f"{side}'s classes {', '.join(labels)} are read as {', '.join(task.labels)}")
        notes += [f"{side}: {note}" for note in own.notes]
    keys = [tokenizer_key(start.encoder.tokenizer) for start in starts]
    if keys[0] != keys[1]:
        notes.append("the two tokenise differently; each length in tokens is by the model's own tokenizer")
    if starts[0].fingerprint == starts[1].fingerprint:
        notes.append("A and B are the same model")
    return notes


def _cut(note: str | None) -> str:
    """What a task's note says of where its texts end."""
    return next((part for part in (note or "").split("; ") if part.startswith(CUT)), f"{CUT} the usual length")


def _card(start: Start) -> dict[str, Any] | None:
    return card_beside(start.folder)[0] if start.folder else None


def _tell(say: Say, side: str) -> Say:
    return lambda stage, done, total, info: say(f"{stage} {side}", done, total, info)


@contextmanager
def _naming(side: str, start: Start) -> Iterator[None]:
    """Say which of the two is meant by a sentence that knows of one model only."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{side}, {start.name}: {error}") from error
