"""Two models on the same examples: what each tends to say, where each is right, and whether that may be chance.

All shares are on the scale of scores, 0 to 100; probabilities and p are from 0 to 1.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from smallbert.errors import UserError
from smallbert.measuring.judged import Answers
from smallbert.measuring.statistics import CLEAR, EXACT, FLIPS, mcnemar, sign_flip, welch
from smallbert.recipes.registry import did_you_mean

if TYPE_CHECKING:
    from smallbert.tasks import Split, Task

Facts = dict[str, Any]
FORMAT = 1
BINS = 10  # of confidence, equally wide
MANY = 30  # classes, beyond which their confusion is a list of the commonest pairs, not a matrix


def compare_answers(
    one: Answers, other: Answers, task: Task, split: str = "dev", positive: str | None = None, examples: int = 10
) -> Facts:
    """All that two models' answers to the same examples say side by side, as plain JSON; the models are "a" and "b".

    >>> compare_answers(one, other, task)["overlap"]
    {'both': 152, 'only_a': 25, 'only_b': 31, 'neither': 69, 'both_right': 54.9, 'agree': 79.8}
    """
    rows = task.split(split)
    chosen = positive_class(task.labels, positive)
    found: Facts = {"errors": FORMAT, "task": task.name, "note": task.note or None, "fingerprint": task.fingerprint}
    found |= {"kind": task.kind, "split": split, "examples": len(rows), "metric": task.metrics[0]}
    found |= {"labels": list(task.labels), "positive": None if chosen is None else task.labels[chosen]}
    found["models"] = [_facts_of(answers, task, rows) for answers in (one, other)]
    found["overlap"] = overlap(one.right, other.right) if task.kind != "regress" else nearer(one.good, other.good)
    found["overlap"]["agree"] = agreement(one.said, other.said)
    found["test"] = _test(one, other, task.kind)
    found["most_different"] = [
        _example(row, one, other, task, rows)
        for row in farthest(one.good, other.good, examples, [a != b for a, b in zip(one.said, other.said, strict=True)])
    ]
    found["predictions"] = [_prediction(row, one, other, rows) for row in range(len(rows))]
    return found


def positive_class(labels: Sequence[str], asked: str | None = None) -> int | None:
    """The class that counts as positive: the one asked for, else of two the second, unless it denies the first.

    >>> positive_class(["bad", "good"]), positive_class(["entailment", "not_entailment"]), positive_class(list("abc"))
    (1, 0, None)
    """
    names = [label.casefold() for label in labels]
    if asked is not None:
        if asked.casefold() not in names:
            hint = did_you_mean(asked, labels)
            known = f"its classes are: {', '.join(labels[:12])}" if labels else "it has none"
            raise UserError(f"--positive was given {asked!r}, which is not a class of this task;{hint} {known}")
        return names.index(asked.casefold())
    if len(names) != 2:
        return None
    return 0 if re.fullmatch(rf"(not|non|no|un)[ _-]?{re.escape(names[0])}", names[1]) else 1


def confusion(gold: Sequence[int], said: Sequence[int], classes: int) -> list[list[int]]:
    """How often each class was called what: a row for each true class, a column for each that was said.

    >>> confusion([0, 0, 1], [0, 1, 1], 2)
    [[1, 1], [0, 1]]
    """
    true, guess = np.asarray(gold), np.asarray(said)
    there = guess >= 0  # a word that was cut off was called nothing
    cells = np.bincount(true[there] * classes + guess[there], minlength=classes * classes)
    return [list(map(int, row)) for row in cells.reshape(classes, classes)]


def class_facts(gold: Sequence[int], said: Sequence[int], labels: Sequence[str]) -> list[Facts]:
    """Each class: how often it is true and said, recall, precision, F1, and how often the other ones are not called it.

    A share of nothing is None.

    >>> class_facts([0, 0, 1], [0, 1, 1], ["no", "yes"])[1]
    {'label': 'yes', 'true': 1, 'said': 2, 'share_true': 33.3, 'share_said': 66.7, 'recall': 100.0, 'precision': 50.0,
     'f1': 66.7, 'right_on_others': 50.0}
    """
    true, guess = np.asarray(gold), np.asarray(said)
    found = []
    for number, label in enumerate(labels):
        is_it, called = true == number, guess == number
        count, times, hits = int(is_it.sum()), int(called.sum()), int((is_it & called).sum())
        row = {"label": label, "true": count, "said": times}
        row |= {"share_true": _share(count, len(true)), "share_said": _share(times, len(true))}
        row |= {"recall": _share(hits, count), "precision": _share(hits, times), "f1": _share(2 * hits, count + times)}
        found.append(row | {"right_on_others": _share(len(true) - count - times + hits, len(true) - count)})
    return found


def overlap(one: np.ndarray, other: np.ndarray) -> Facts:
    """On how many examples both models are right, only one is, or neither; and the share that both get right.

    >>> overlap(np.array([True, True, False]), np.array([True, False, False]))
    {'both': 1, 'only_a': 1, 'only_b': 0, 'neither': 1, 'both_right': 33.3...}
    """
    one, other = np.asarray(one, bool), np.asarray(other, bool)
    sides = {"both": one & other, "only_a": one & ~other, "only_b": ~one & other, "neither": ~(one | other)}
    counts = {name: int(where.sum()) for name, where in sides.items()}
    return counts | {"both_right": _share(counts["both"], len(one))}


def nearer(one: np.ndarray, other: np.ndarray) -> Facts:
    """On how many examples each of two models is nearer to the truth.

    >>> nearer(np.array([-0.1, -0.5]), np.array([-0.2, -0.5]))
    {'a_nearer': 1, 'b_nearer': 0, 'equal': 1}
    """
    return {
        "a_nearer": int((one > other).sum()),
        "b_nearer": int((one < other).sum()),
        "equal": int((one == other).sum()),
    }


def agreement(one: Sequence[Any], other: Sequence[Any]) -> float | None:
    """The share of answers that are the same, whether right or not; of tags, word by word; of numbers there is none.

    >>> agreement([1, 0, 1], [1, 1, 1])
    66.6...
    """
    if one and isinstance(one[0], list):
        one, other = ([tag for sentence in side for tag in sentence] for side in (one, other))
    if one and isinstance(one[0], float):
        return None
    return _share(sum(mine == theirs for mine, theirs in zip(one, other, strict=True)), len(one))


def calibration_error(sure: np.ndarray, right: np.ndarray, bins: int = BINS) -> float:
    """How far confidence is from being right, in points: the mean of |right - sure| over bins of confidence (ECE).

    >>> calibration_error(np.array([0.9, 0.9, 0.6, 0.6]), np.array([1, 1, 1, 0]))
    10.0
    """
    places = np.minimum((np.asarray(sure) * bins).astype(int), bins - 1)
    gaps = np.bincount(places, np.asarray(right, float) - sure, minlength=bins)
    return float(100 * np.abs(gaps).sum() / len(places))


def length_facts(lengths: np.ndarray, right: np.ndarray) -> Facts:
    """Mean length of all, of right and of wrong examples, and p of Welch's t test that the last two are the same.

    >>> length_facts(np.array([4, 6, 10, 14]), np.array([True, True, False, False]))
    {'all': 8.5, 'right': 5.0, 'wrong': 12.0, 'p': 0.204...}
    """
    groups = {"all": lengths, "right": lengths[right], "wrong": lengths[~right]}
    means = {name: float(group.mean()) if len(group) else None for name, group in groups.items()}
    return means | {"p": welch(*(groups[name].astype(float).tolist() for name in ("right", "wrong")))}


def flip_test(differences: np.ndarray) -> float:
    """Two-sided p of the paired permutation test: sign_flip, in numpy where there are many pairs.

    >>> flip_test(np.array([1.0, 2.0, 3.0]))
    0.25
    """
    if len(differences) <= EXACT:
        return sign_flip(differences.tolist()) or 1.0
    least, hits, generator = abs(differences.sum()) * (1 - 1e-9), 0, np.random.default_rng(0)
    for _ in range(FLIPS // 200):
        signs = generator.integers(0, 2, (200, len(differences)), dtype=np.int8) * 2 - 1
        hits += int((np.abs(np.einsum("ij,j", signs, differences)) >= least).sum())
    return (hits + 1) / (FLIPS + 1)


def farthest(one: np.ndarray, other: np.ndarray, count: int, apart: Sequence[bool]) -> list[int]:
    """The places where two models' goodness differs, those where they answer differently first, then by how much.

    >>> farthest(np.array([0.9, 0.5, 0.2]), np.array([0.7, 0.5, 0.3]), 10, [False, False, True])
    [2, 0]
    """
    gaps = np.abs(one - other)
    return [int(row) for row in np.lexsort((-gaps, ~np.array(apart, bool))) if gaps[row] > 0][:count]


def _facts_of(answers: Answers, task: Task, rows: Split) -> Facts:
    """What is said of one model on its own."""
    found: Facts = {"scores": answers.scores, "right": int(answers.right.sum())}
    if task.kind in ("classify", "tag"):
        gold, said = (_flat(column) for column in (rows.labels, answers.said))
        found["classes"] = class_facts(gold, said, task.labels)
        matrix = np.array(confusion(gold, said, len(task.labels)))
        found["confusion"] = matrix.tolist() if len(task.labels) <= MANY else None
        wrong = np.argwhere((matrix > 0) & ~np.eye(len(matrix), dtype=bool)).tolist()
        wrong.sort(key=lambda pair: -matrix[pair[0], pair[1]])
        found["confused"] = [[*(task.labels[each] for each in pair), int(matrix[*pair])] for pair in wrong[:MANY]]
    if answers.probabilities is not None:
        sure = answers.probabilities.max(1)
        found |= {"sure": float(100 * sure.mean()), "calibration_error": calibration_error(sure, answers.right)}
    if task.kind == "regress":
        off = np.asarray(answers.said) - np.asarray(rows.labels)
        found |= {"absolute_error": float(np.abs(off).mean()), "bias": float(off.mean())}
        found["absolute_error_stderr"] = float(np.abs(off).std(ddof=1) / np.sqrt(len(off))) if len(off) > 1 else None
    if task.kind == "answer":
        has, silent = (
            np.array([bool(each["text"]) for each in rows.labels]),
            np.array([not said for said in answers.said]),
        )
        found |= {"silent": _share(silent.sum(), len(silent)), "unanswerable": _share((~has).sum(), len(has))}
        found["right_on"] = {"answerable": _mean(answers.right[has]), "unanswerable": _mean(answers.right[~has])}
    lengths = {"tokens": answers.tokens, "words of the text": _count_words(rows.texts)}
    if rows.pairs is not None:
        lengths["words of the second text"] = _count_words(rows.pairs)
    return found | {"lengths": {name: length_facts(counts, answers.right) for name, counts in lengths.items()}}


def _test(one: Answers, other: Answers, kind: str) -> Facts:
    """Whether the two differ by more than chance, with a sentence that says it."""
    if kind == "regress":
        gap, p = float((one.good - other.good).mean()), flip_test(one.good - other.good)
        better = "A" if gap > 0 else "B"
        told = f"A is off by {-one.good.mean():.3f} on average, B by {-other.good.mean():.3f}"
        return {"name": "paired permutation test", "p": p, "sentence": f"{told}, {_verdict(p, better)}"}
    found = overlap(one.right, other.right)
    first, second = found["only_a"], found["only_b"]
    p, unit = mcnemar(first, second), {"tag": "sentence", "answer": "question"}.get(kind, "example")
    if not first + second:
        told = f"A and B are right on the same {unit}s, and wrong on the same"
    else:
        told = f"A is right on {first:,} {unit}{'s' * (first != 1)} where B is wrong, B on {second:,} where A is wrong"
    sentence = f"{told}, {_verdict(p, 'A' if first > second else 'B')}"
    return {"name": "McNemar's exact test", "p": p, "sentence": sentence}


def _verdict(p: float, better: str) -> str:
    said = f"p {'= ' + format(p, '.2g') if p >= 0.0001 else '< 0.0001'}"
    return f"{said}: {better} is better by more than chance" if p < CLEAR else f"{said}: no difference beyond chance"


def _example(row: int, one: Answers, other: Answers, task: Task, rows: Split) -> Facts:
    """One example with its texts, and what both models said to it."""

    def named(label: Any) -> Any:
        if isinstance(label, list):
            return [named(each) for each in label]
        if isinstance(label, dict):
            return list(dict.fromkeys(label["text"]))
        return label if task.kind in ("regress", "answer") else task.labels[label] if label >= 0 else None

    text = {"row": row, "id": rows.ids[row], "text": rows.texts[row], "pair": rows.pairs[row] if rows.pairs else None}
    sides = {
        side: {"said": named(each.said[row]), "good": _round(each.good[row]), "right": bool(each.right[row])}
        for side, each in (("a", one), ("b", other))
    }
    return text | {"true": named(rows.labels[row]), **sides}


def _prediction(row: int, one: Answers, other: Answers, rows: Split) -> Facts:
    found: Facts = {"row": row, "id": rows.ids[row]}
    if not isinstance(rows.labels[row], dict):
        found["true"] = rows.labels[row]
    for side, each in (("a", one), ("b", other)):
        found |= {side: each.said[row], f"{side}_good": _round(each.good[row]), f"{side}_right": bool(each.right[row])}
        found[f"{side}_tokens"] = int(each.tokens[row])
    return found


def _count_words(texts: Sequence[Any]) -> np.ndarray:
    return np.array([len(text.split()) if isinstance(text, str) else len(text) for text in texts])


def _flat(labels: Sequence[Any]) -> list[int]:
    nested = bool(labels) and isinstance(labels[0], list)
    return [label for sentence in labels for label in sentence] if nested else list(labels)


def _share(part: float, whole: float) -> float | None:
    return 100 * float(part) / float(whole) if whole else None


def _mean(right: np.ndarray) -> float | None:
    return float(100 * right.mean()) if len(right) else None


def _round(value: float) -> float:
    return round(float(value), 6)
