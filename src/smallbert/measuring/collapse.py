"""When a run must be called diverged though its loss is a number: it knows nothing of its own training examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from smallbert.measuring.evaluate import Say, predict
from smallbert.measuring.metrics import score
from smallbert.model.answering import answers_as_it_is
from smallbert.tasks import Split, Task
from smallbert.texts.data import tokenise

if TYPE_CHECKING:
    from smallbert.model.encoder import Encoder

# Of a correlation: it explains a twenty-fifth of what the labels vary, as two points of 50 are in accuracy.
HARDLY = 0.2
UNTRAINED = "its head is new and nothing has trained it, so its scores say nothing"
SAMPLE = {"answer": 100}  # training examples on which a run is judged; a question takes as long as many sentences


def judge_result(
    made: Encoder, given: Encoder | None, task: Task, seed: int, length: int, say: Say | None = None
) -> tuple[str, str]:
    """Why a result must be called collapsed, and what is worth a note; `given` is what it was made of without training.

    What was no better before is only noted.
    """
    if given is not None:
        new_head = any("labels" in entry["plan"] for entry in made.history[len(given.history) :])
        if new_head or not answers_as_it_is(given, task):
            return "", UNTRAINED
    why = find_collapse(made, task, seed, length, say)
    if why and given is not None and find_collapse(given.copy().to(made.device), task, seed, length, say):
        return "", f"the model that was given is itself no better than guessing: {why}"
    return why, ""


def find_collapse(encoder: Encoder, task: Task, seed: int, length: int, say: Say | None = None) -> str:
    """Why an encoder must be called collapsed, judged on a sample of its training examples; "" if not.

    A task without training examples, which is enough for recipes that do not train, has others.
    """
    name = next(name for name in ("train", "dev", "test") if name in task.splits)
    rows = task.split(name)
    sample = rows.take(np.random.default_rng(seed).permutation(len(rows))[: SAMPLE.get(task.kind, 500)])
    guess = predict(encoder, tokenise(encoder.tokenizer, sample, task.kind, length), task, sample, say)
    why = COLLAPSES[task.kind](task, guess, sample)
    return f"on a sample of {name}, {why}" if why else ""


def _collapse_of_classes(task: Task, guess: np.ndarray, sample: Split) -> str:
    gold = np.array(sample.labels)
    right, largest = 100 * (guess == gold).mean(), 100 * np.bincount(gold).max() / len(gold)
    one = 100 * np.bincount(guess).max() / len(guess)
    signs = {
        f"{one:.1f} % of all predictions are one class": one >= 99 > largest,
        f"accuracy is {right:.1f}, not clearly better than always guessing the largest class ({largest:.1f})": (
            right <= min(largest + 2, (largest + 100) / 2)  # where one class is nearly all, two points cannot be asked
        ),
    }
    return "; ".join(sign for sign, seen in signs.items() if seen)


def _collapse_of_tags(task: Task, guess: list[list[int]], sample: Split) -> str:
    """Words one by one; those cut off by the length limit are nobody's guess."""
    pairs = [pair for row in zip(guess, sample.labels, strict=True) for pair in zip(*row, strict=True) if pair[0] >= 0]
    made = np.array(pairs).reshape(-1, 2)
    whole = Split([""] * len(made), None, made[:, 1].tolist(), [""] * len(made))
    return _collapse_of_classes(task, made[:, 0], whole) if len(made) else ""


def _collapse_of_numbers(task: Task, guess: np.ndarray, sample: Split) -> str:
    gold = np.array(sample.labels, dtype=float)
    if not np.ptp(gold):
        return ""
    if not np.ptp(guess):
        return "it predicts the same value for every text"
    pearson = float(np.corrcoef(guess, gold)[0, 1])
    if pearson >= HARDLY:
        return ""
    return f"predictions are hardly correlated with the labels (Pearson {pearson:.2f})"


def _collapse_of_answers(task: Task, guess: Any, sample: Split) -> str:
    found = score(task, guess, sample)["f1"]["value"]
    return f"F1 is {found:.1f}, which is less than 15" if found < 15 else ""


COLLAPSES: dict[str, Callable[..., str]] = {
    "classify": _collapse_of_classes,
    "tag": _collapse_of_tags,
    "regress": _collapse_of_numbers,
    "answer": _collapse_of_answers,
}
