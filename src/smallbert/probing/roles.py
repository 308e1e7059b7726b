"""Which rows of a task train a probe, choose its settings and score it; and a control task of random labels."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from smallbert.errors import UserError
from smallbert.tasks.derived import hold_out
from smallbert.tasks.task import Split, Task

HELD_OUT, SEED = 0.1, 0  # the slice of train that settings are chosen on where there is no split for that
LEAST = 20  # rows
ROLES = ("fit", "choose", "score")

Labels = dict[str, np.ndarray]


class Roles(NamedTuple):
    """Which rows train a probe, which choose its settings, and which score it; each a split and rows of it."""

    fit: tuple[str, np.ndarray]
    choose: tuple[str, np.ndarray]
    score: tuple[str, np.ndarray]
    note: str


def arrange(task: Task) -> Roles:
    """Who plays which role: train trains, dev chooses, test scores; without a test a slice of train chooses."""
    train = task.split("train")
    every = {name: np.arange(len(split)) for name, split in task.splits.items()}
    if "dev" in every and "test" in every:
        return Roles(("train", every["train"]), ("dev", every["dev"]), ("test", every["test"]), "chosen on dev")
    score = next((name for name in ("dev", "test") if name in every), None)
    if score is None:
        raise UserError(f"task {task.name} has only a train split here; probing needs dev or test rows to score on")
    numbered = replace(train, ids=[str(row) for row in range(len(train))])
    fit, held = (np.array([int(row) for row in part.ids]) for part in hold_out(numbered, HELD_OUT, SEED, task.kind))
    note = "chosen on rows held out of train"
    return Roles(("train", fit), ("train", held), (score, every[score]), note)


def repeated(task: Task, roles: Roles) -> int:
    """How many of the texts that are scored stand in train too."""
    known = set(texts_of(task.split("train")))
    return sum(text in known for text in texts_of(task.split(roles.score[0])))


def texts_of(split: Split) -> list[Any]:
    """What makes two examples the same to a probe: the text, or both texts of a pair."""
    return split.texts if split.pairs is None else list(zip(split.texts, split.pairs, strict=True))


def labels_of(task: Task, roles: Roles) -> Labels:
    """The labels of each role's rows."""
    return _by_role(roles, {name: split.labels for name, split in task.splits.items()}, task.kind)


def control_labels(task: Task, roles: Roles, seed: int) -> Labels:
    """A control task: each distinct text gets one random label, drawn from the labels of train, in every split."""
    draw, pool = random.Random(seed), task.split("train").labels
    drawn: dict[Any, Any] = {}
    labels = {}
    for name, split in task.splits.items():
        texts = texts_of(split)
        for text in texts:
            if text not in drawn:
                drawn[text] = draw.choice(pool)
        labels[name] = [drawn[text] for text in texts]
    return _by_role(roles, labels, task.kind)


def _by_role(roles: Roles, labels: dict[str, list[Any]], kind: str) -> Labels:
    numbers = np.float64 if kind == "regress" else np.int64
    chosen = {role: getattr(roles, role) for role in ROLES}
    return {role: np.asarray(labels[split], numbers)[index] for role, (split, index) in chosen.items()}


def check_rows(task: Task, labels: np.ndarray) -> None:
    """Refuse what is too little to train a probe on."""
    least = max(LEAST, 2 * len(task.labels))
    if len(labels) < least:
        raise UserError(
            f"task {task.name} has {len(labels)} rows to train a probe on; give {least} or more, at least two per label"
        )
