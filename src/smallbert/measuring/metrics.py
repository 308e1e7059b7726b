"""Scores with error bars on a 0-100 scale, in plain numpy: never NaN, the same numbers for the same predictions."""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from smallbert.errors import UserError
from smallbert.measuring.statistics import wilson_interval
from smallbert.tasks.task import Split, Task

Score = dict[str, Any]
RESAMPLES, SEED, Z = 1000, 0, 1.96
PUNCTUATION = str.maketrans("", "", string.punctuation)


def score(task: Task, predictions: Sequence[Any], split: Split) -> dict[str, Score]:
    """Every metric of the task as {"value", "stderr", "n", "low", "high"}, low to high being the 95 % interval.

    Predictions are class ids (classify), numbers (regress), one list of class ids a sentence (tag), texts (answer).
    accuracy, em   Wilson interval; stderr is its half width / 1.96
    all others     1000 bootstrap resamples of the examples, always the same ones; tag resamples whole sentences
    f1             of class 1 (classify), of whole entities (tag), of words in common with the nearest answer (answer)

    >>> score(task, [1, 0, 1, 1], split)["accuracy"]["value"]
    75.0
    """
    if len(predictions) != len(split) or not len(split):
        raise UserError(
            f"{len(predictions)} predictions for {len(split)} examples of {task.name}; one for each is needed"
        )
    known = _KINDS[task.kind](task, predictions, split)
    for metric in task.metrics:
        if metric not in known:
            raise UserError(f"metric '{metric}' does not fit kind {task.kind}; known: {', '.join(known)}")
    return {metric: known[metric]() for metric in task.metrics}


def paired_error(task: Task, metric: str, one: Sequence[Any], other: Sequence[Any], split: Split) -> float | None:
    """The standard error of the difference of two scores on the same examples; None of what is no mean of examples.

    It is far less than that of either score where two models mostly say the same.

    >>> paired_error(task, "accuracy", [1, 0, 1, 1], [1, 0, 1, 0], split)
    25.0
    """
    if task.kind == "classify" and metric == "accuracy":
        values = [np.asarray(said) == np.asarray(split.labels) for said in (one, other)]
    elif task.kind == "answer":
        values = [answer_values(task, said, split)[:, int(metric == "f1")] for said in (one, other)]
    else:
        return None
    apart = values[1].astype(float) - values[0].astype(float)
    return float(100 * apart.std(ddof=1) / len(apart) ** 0.5) if len(apart) > 1 else None


def right_ones(task: Task, predictions: Sequence[Any], split: Split) -> list[bool] | None:
    """Whether each prediction is right, where the task's first metric is the share of those that are; else None.

    >>> right_ones(task, [1, 0, 1, 1], split)
    [True, False, True, True]
    """
    if task.kind == "classify" and task.metrics[0] == "accuracy":
        return (np.asarray(predictions) == np.asarray(split.labels)).tolist()
    if task.kind == "answer" and task.metrics[0] == "em":
        return (answer_values(task, predictions, split)[:, 0] == 1).tolist()
    return None


def wilson(right: float, count: int) -> Score:
    """A share with its Wilson interval, which stays inside 0-100 and is never empty.

    >>> wilson(10, 10)["value"], round(wilson(10, 10)["low"], 1)
    (100.0, 72.2)
    """
    low, high = wilson_interval(right, count, Z)
    return _score(right / count, (high - low) / 2 / Z, count, low, high)


def normalise(answer: str) -> str:
    """An answer as SQuAD compares it: lower case, no punctuation, no articles, single spaces.

    >>> normalise("The  Cat's hat!")
    'cats hat'
    """
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", answer.lower().translate(PUNCTUATION)).split())


def entities(tags: Sequence[str]) -> set[tuple[int, int, str]]:
    """The entities of one sentence as (first word, word after the last, kind); an I- with nothing before it begins one.

    >>> sorted(entities(["B-city", "I-city", "O", "I-name"]))
    [(0, 2, 'city'), (3, 4, 'name')]
    """
    found = set()
    begin = 0
    for place, tag in enumerate([*tags, "O"]):
        before = tags[place - 1] if place else "O"
        if before != "O" and tag != f"I-{before[2:]}":
            found.add((begin, place, before[2:]))
        if tag != "O" and (before == "O" or tag != f"I-{before[2:]}"):
            begin = place
    return found


def _classify(task: Task, predictions: Sequence[Any], split: Split) -> dict[str, Callable[[], Score]]:
    gold, guess = np.asarray(split.labels), np.asarray(predictions)
    classes = max(len(task.labels), 2)
    if guess.ndim != 1 or guess.dtype.kind not in "iu" or guess.min() < 0 or guess.max() >= classes:
        raise UserError(f"predictions of {task.name} must be class ids from 0 to {classes - 1}, not scores or names")
    # f1 and mcc only need how often each (gold, guess) occurs, so resampling those few counts is resampling the rows.
    cells, counts = np.unique(gold.astype(np.int64) * classes + guess, return_counts=True)
    golds, guesses = np.eye(classes)[cells // classes], np.eye(classes)[cells % classes]

    def resampled(statistic: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]) -> Score:
        drawn = np.random.default_rng(SEED).multinomial(len(gold), counts / len(gold), RESAMPLES)
        both = np.vstack([counts, drawn]).astype(np.float64)
        values = statistic(both @ (golds * guesses), both @ golds, both @ guesses)
        return _from_samples(values[0], values[1:], len(gold))

    return {
        "accuracy": lambda: wilson(int((gold == guess).sum()), len(gold)),
        "f1": lambda: resampled(lambda hit, gold, guess: _divide(2 * hit[:, 1], gold[:, 1] + guess[:, 1])),
        "mcc": lambda: resampled(_mcc),
    }


def _regress(task: Task, predictions: Sequence[Any], split: Split) -> dict[str, Callable[[], Score]]:
    gold, guess = (
        np.asarray(split.labels, dtype=np.float64),
        np.asarray(predictions, dtype=np.float64).reshape(len(split)),
    )
    if not np.isfinite(guess).all():  # a diverged model has learned nothing: it scores as one that always says the same
        guess = np.zeros_like(guess)
    ranks = [np.unique(column, return_inverse=True)[1] for column in (gold, guess)]
    return {
        "pearson": lambda: _bootstrap(lambda rows: _correlation(gold[rows], guess[rows]), len(gold)),
        "spearman": lambda: _bootstrap(lambda rows: _correlation(*(_ranks(each[rows]) for each in ranks)), len(gold)),
    }


def _tag(task: Task, predictions: Sequence[Any], split: Split) -> dict[str, Callable[[], Score]]:
    def words() -> np.ndarray:
        pairs = zip(split.labels, predictions, strict=True)
        return np.array([(sum(map(int.__eq__, gold, map(int, guess))), len(gold)) for gold, guess in pairs])

    def found() -> np.ndarray:
        rows = []
        for gold, guess in zip(split.labels, predictions, strict=True):
            true, said = (entities([task.labels[tag] for tag in tags]) for tags in (gold, guess))
            rows.append((2 * len(true & said), len(true) + len(said)))
        return np.array(rows)

    for row, (gold, guess) in enumerate(zip(split.labels, predictions, strict=True), 1):
        if len(guess) > len(gold):  # fewer is a sentence cut at the model's length: the rest counts as wrong
            raise UserError(f"sentence {row} of {task.name} has {len(gold)} words and {len(guess)} predicted tags")
    return {"accuracy": lambda: _bootstrap_ratio(words()), "f1": lambda: _bootstrap_ratio(found())}


def answer_values(task: Task, predictions: Sequence[Any], split: Split) -> np.ndarray:
    """Exact match (0 or 1) and F1 (0 to 1) of every answer against the nearest true one: (examples, 2).

    >>> answer_values(task, ["the Cat's hat"], split)   # where "cats hat on a mat" is true
    array([[0. , 0.666...]])
    """
    values = np.zeros((len(split), 2))
    for row, (said, answers) in enumerate(zip(predictions, split.labels, strict=True)):
        if said is None:  # no prediction is a wrong one; the official script would leave it out
            continue
        guess = normalise(said)
        golds = [normalise(text) for text in answers["text"]]
        if task.unanswerable:
            golds = [gold for gold in golds if gold] or [""]
        values[row, 0] = max((guess == gold for gold in golds), default=0)
        values[row, 1] = max((_common_words(guess, gold, task.unanswerable) for gold in golds), default=0)
    return values


def _answer(task: Task, predictions: Sequence[Any], split: Split) -> dict[str, Callable[[], Score]]:
    values = answer_values(task, predictions, split)
    return {
        "em": lambda: wilson(values[:, 0].sum(), len(split)),
        "f1": lambda: _bootstrap(lambda rows: float(values[rows, 1].mean()), len(split)),
    }


def _common_words(guess: str, gold: str, unanswerable: bool) -> float:
    if unanswerable and not (guess and gold):
        return float(guess == gold)
    guessed, wanted = guess.split(), gold.split()
    common = sum((Counter(guessed) & Counter(wanted)).values())
    return 2 * common / (len(guessed) + len(wanted)) if common else 0.0


def _mcc(hit: np.ndarray, gold: np.ndarray, guess: np.ndarray) -> np.ndarray:
    """Matthews correlation of any number of classes; 0 where either side is constant."""
    count = gold.sum(1)
    spread = (count**2 - (gold**2).sum(1)) * (count**2 - (guess**2).sum(1))
    return _divide(hit.sum(1) * count - (gold * guess).sum(1), np.sqrt(spread))


def _correlation(first: np.ndarray, second: np.ndarray) -> float:
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return 0.0
    first, second = first - first.mean(), second - second.mean()
    # einsum, not @: threads of the matrix library wait for each other on a busy machine, measured 20 times slower.
    both, one, two = (np.einsum("i,i", *pair) for pair in ((first, second), (first, first), (second, second)))
    return float(np.clip(both / np.sqrt(one * two), -1, 1)) if one * two > 0 else 0.0


def _ranks(order: np.ndarray) -> np.ndarray:
    """Ranks of values given as places in the sorted list, ties sharing their mean rank: counted, not sorted."""
    counts = np.bincount(order)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[order])


def _divide(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    return np.asarray(np.divide(above, below, out=np.zeros(above.shape), where=below > 0))


def _bootstrap(statistic: Callable[[np.ndarray], float], count: int) -> Score:
    generator = np.random.default_rng(SEED)
    samples = [statistic(generator.integers(0, count, count)) for _ in range(RESAMPLES)]
    return _from_samples(statistic(np.arange(count)), np.array(samples), count)


def _bootstrap_ratio(parts: np.ndarray) -> Score:
    """Sum of the first column over the sum of the second, one row a sentence."""

    def ratio(rows: np.ndarray) -> float:
        above, below = parts[rows].sum(0)
        return float(above / below) if below else 0.0

    return _bootstrap(ratio, len(parts))


def _from_samples(value: float, samples: np.ndarray, count: int) -> Score:
    return _score(value, samples.std(ddof=1), count, *np.percentile(samples, [2.5, 97.5]))


def _score(value: float, stderr: float, count: int, low: float, high: float) -> Score:
    shares = {"value": value, "stderr": stderr, "low": low, "high": high}
    return {name: 100 * float(share) for name, share in shares.items()} | {"n": count}


_KINDS: dict[str, Callable[[Task, Sequence[Any], Split], dict[str, Callable[[], Score]]]] = {
    "classify": _classify,
    "regress": _regress,
    "tag": _tag,
    "answer": _answer,
}
