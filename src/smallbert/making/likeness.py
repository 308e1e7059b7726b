"""What makes pieces of work alike: recipes that begin with the same training."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from smallbert.making.estimate import phases_of, reads_of
from smallbert.methods import Method
from smallbert.model.answering import in_order_of
from smallbert.model.encoder import Encoder
from smallbert.recipes.recipe import Recipe

if TYPE_CHECKING:
    from smallbert.tasks import Task


# A key of finished or interrupted training: what `same_work` says, and the recipe so far.
WORK = re.compile(r"(?P<model>\S*) (?P<data>\S+) seed (?P<seed>\d+) length (?P<length>\d+): (?P<recipe>.*)", re.DOTALL)


def same_work(key: str, task: Task | None, seed: int, length: int) -> str:
    """What two runs have in common if equal beginnings of their recipes give equal weights."""
    return f"{key} {task and task.fingerprint} seed {seed} length {length}"


def beginnings(recipe: Recipe, encoder: Encoder, task: Task | None) -> dict[str, bool]:
    """The recipe written out up to and with each phase, and whether that phase trains; equal texts are equal work.

    {"head(…)": False, "head(…) | finetune(…)": True, "head(…) | finetune(…) | quantize(…)": False}
    """
    phases, found = phases_of(recipe, in_order_of(encoder, task), task), dict[str, bool]()
    for text, phase in zip(texts_so_far(phases), phases, strict=True):
        found[text] = found.get(text, False) or any(method.trains for method in phase)
    return found


def texts_so_far(phases: list[tuple[Method, ...]]) -> list[str]:
    """For each phase the text of the recipe up to and with it, and of what files it reads.

    A mark that nothing has named so far changes nothing so far: "mark('a') | finetune" is the text "finetune".
    """
    both = [zip(phase, reads, strict=True) for phase, reads in zip(phases, reads_of(phases), strict=True)]
    texts = [" + ".join(f"{method.key()}{read}" for method, read in one) for one in both]
    marks = [phase if all(method.name == "mark" for method in phase) else () for phase in phases]
    labels = [[repr(mark.settings()["label"]) for mark in some] for some in marks]
    return [" | ".join(_without_unused_marks(texts[:end], labels[:end])) for end in range(1, len(texts) + 1)]


def history_after(
    own: list[dict[str, Any]], taken: list[dict[str, Any]], phase: tuple[Method, ...]
) -> list[dict[str, Any]]:
    """One's own history and that of a finished phase, without marks that the run which made it had set on its way."""
    marks = [number for number, entry in enumerate(taken) if entry["step"].startswith("mark(")]
    kept = marks[len(marks) - sum(method.name == "mark" for method in phase) :]  # those of the phase itself come last
    others = [entry for number, entry in enumerate(taken) if number not in marks or number in kept]
    return [*own, *others[sum(not entry["step"].startswith("mark(") for entry in own) :]]


def _without_unused_marks(texts: list[str], labels: list[list[str]]) -> list[str]:
    """The texts of phases, those out that are marks by these labels of which no other text knows."""
    others = " ".join(text for text, own in zip(texts, labels, strict=True) if not own)
    return [text for text, own in zip(texts, labels, strict=True) if not own or any(label in others for label in own)]
