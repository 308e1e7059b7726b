"""Metrics agree with scikit-learn and scipy, follow SQuAD's rules, and are never NaN."""

import math
import time
from typing import Any

import numpy as np
import pytest

from smallbert.errors import UserError
from smallbert.measuring.metrics import entities, normalise, paired_error, right_ones, score, wilson
from smallbert.tasks import Split, Task

GENERATOR = np.random.default_rng(7)


def toy(
    kind: str, metrics: tuple[str, ...], labels: list[Any], classes: tuple[str, ...] = (), **more: Any
) -> tuple[Task, Split]:
    task = Task("toy", kind, classes, metrics, 0.0, 128, "", "", **more)
    return task, Split([""] * len(labels), None, labels, [""] * len(labels))


@pytest.mark.parametrize("classes", [2, 4])
def test_classification_agrees_with_sklearn(classes: int) -> None:
    reference = pytest.importorskip("sklearn.metrics")
    gold = GENERATOR.integers(0, classes, 500)
    guess = np.where(GENERATOR.random(500) < 0.3, GENERATOR.integers(0, classes, 500), gold)
    metrics = ("accuracy", "mcc", "f1") if classes == 2 else ("accuracy", "mcc")
    task, split = toy("classify", metrics, list(gold), tuple("abcd"[:classes]))
    got = score(task, guess, split)
    assert got["accuracy"]["value"] == pytest.approx(100 * reference.accuracy_score(gold, guess))
    assert got["mcc"]["value"] == pytest.approx(100 * reference.matthews_corrcoef(gold, guess))
    if classes == 2:
        assert got["f1"]["value"] == pytest.approx(100 * reference.f1_score(gold, guess))


def test_paired_error_is_that_of_drawing_the_same_examples_for_both() -> None:
    gold = GENERATOR.integers(0, 2, 400)
    one = np.where(GENERATOR.random(400) < 0.2, 1 - gold, gold)
    other = np.where(GENERATOR.random(400) < 0.05, 1 - one, one)  # mostly the same
    task, split = toy("classify", ("accuracy", "mcc"), list(gold), ("a", "b"))
    draws = np.random.default_rng(1).integers(0, 400, (4000, 400))
    drops = ((other == gold)[draws].mean(1) - (one == gold)[draws].mean(1)) * 100
    found = paired_error(task, "accuracy", one, other, split)
    assert found is not None and found == pytest.approx(drops.std(), rel=0.05)
    assert found < 0.75 * score(task, one, split)["accuracy"]["stderr"]
    assert paired_error(task, "accuracy", one, one, split) == 0 and paired_error(task, "mcc", one, other, split) is None
    gold = [{"text": [word], "answer_start": [0]} for word in ("red house", "1820", "Rome", "tea")]
    task, split = toy("answer", ("f1", "em"), gold)
    said = ["red house", "1820", "Rome", "tea"], ["house", "1820", "Rome", "coffee"]
    missed = np.array([1 / 3, 0, 0, 1])
    assert paired_error(task, "f1", *said, split) == pytest.approx(100 * missed.std(ddof=1) / 2)
    assert paired_error(task, "em", *said, split) == pytest.approx(100 * np.array([1, 0, 0, 1]).std(ddof=1) / 2)


def test_correlations_agree_with_scipy_with_ties() -> None:
    reference = pytest.importorskip("scipy.stats")
    gold = GENERATOR.integers(0, 6, 300).astype(float)
    guess = (gold + GENERATOR.normal(0, 1.5, 300)).round(1)
    task, split = toy("regress", ("pearson", "spearman"), list(gold))
    got = score(task, guess, split)
    assert got["pearson"]["value"] == pytest.approx(100 * reference.pearsonr(gold, guess).statistic)
    assert got["spearman"]["value"] == pytest.approx(100 * reference.spearmanr(gold, guess).statistic)


def test_bootstrap_of_ranks_is_that_of_ranking_anew() -> None:
    reference = pytest.importorskip("scipy.stats")
    gold = GENERATOR.integers(0, 9, 80).astype(float)
    guess = gold + GENERATOR.normal(0, 3, 80)
    task, split = toy("regress", ("spearman",), list(gold))
    draws = np.random.default_rng(0)
    rows = [draws.integers(0, 80, 80) for _ in range(1000)]
    expected = np.std([reference.spearmanr(gold[row], guess[row]).statistic for row in rows], ddof=1)
    assert score(task, guess, split)["spearman"]["stderr"] == pytest.approx(100 * expected)


def test_counts_resampled_are_rows_resampled() -> None:
    """The error bar of mcc from cell counts is that of resampling rows, up to the noise of 1000 draws."""
    reference = pytest.importorskip("sklearn.metrics")
    gold = GENERATOR.integers(0, 2, 200)
    guess = np.where(GENERATOR.random(200) < 0.25, 1 - gold, gold)
    task, split = toy("classify", ("mcc",), list(gold), ("a", "b"))
    rows = [GENERATOR.integers(0, 200, 200) for _ in range(1000)]
    expected = 100 * np.std([reference.matthews_corrcoef(gold[row], guess[row]) for row in rows])
    assert score(task, guess, split)["mcc"]["stderr"] == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(
    ("kind", "metrics", "labels", "guess"),
    [
        ("classify", ("accuracy", "mcc", "f1"), [0, 1, 1, 0], [0, 0, 0, 0]),
        ("classify", ("accuracy", "mcc", "f1"), [0, 0, 0], [0, 0, 0]),
        ("classify", ("accuracy", "mcc", "f1"), [1], [1]),
        ("regress", ("pearson", "spearman"), [0.1, 0.2, 0.7], [0.1, 0.1, 0.1]),
        ("regress", ("pearson", "spearman"), [0.1, 0.1, 0.1], [0.1, 0.2, 0.7]),  # whose mean is not exactly 0.1
        ("regress", ("pearson", "spearman"), [1.0, 2.0, 3.0], [math.nan, 0.2, 0.3]),
        ("regress", ("pearson", "spearman"), [1.0], [1.0]),
        ("tag", ("f1", "accuracy"), [[2, 2], []], [[2, 2], []]),
    ],
)
def test_degenerate_predictions_are_numbers(kind: str, metrics: tuple, labels: list, guess: list) -> None:
    task, split = toy(kind, metrics, labels, ("B-x", "I-x", "O") if kind == "tag" else ("a", "b"))
    for name, got in score(task, guess, split).items():
        assert all(math.isfinite(value) for value in got.values())
        if name != "accuracy" and not (name == "f1" and labels == [1]):
            assert got["value"] == 0, f"{name} of something constant is 0"


def test_wilson_against_the_formula_solved_by_hand() -> None:
    got = wilson(8, 10)  # known interval of 8 of 10: 0.4902 to 0.9433
    assert got["low"] == pytest.approx(49.02, abs=0.01) and got["high"] == pytest.approx(94.33, abs=0.01)
    assert got["stderr"] == pytest.approx((94.33 - 49.02) / 2 / 1.96, abs=0.01) and got["n"] == 10
    assert wilson(10, 10)["high"] == 100 and wilson(0, 10)["low"] == 0


def test_error_bars_shrink_and_cover_and_repeat() -> None:
    gold = GENERATOR.normal(size=4000)
    guess = gold + GENERATOR.normal(size=4000)
    few, many = (score(*_with(gold[:count], guess[:count]))["pearson"] for count in (250, 4000))
    assert few["stderr"] / many["stderr"] == pytest.approx(4, rel=0.3)
    assert many["low"] < 100 / math.sqrt(2) < many["high"]
    assert score(*_with(gold, guess))["pearson"] == many


def _with(gold: np.ndarray, guess: np.ndarray) -> tuple[Task, np.ndarray, Split]:
    task, split = toy("regress", ("pearson",), list(gold))
    return task, guess, split


def test_squad_rules() -> None:
    assert normalise("The  Cat's, a hat!") == "cats hat" and normalise("theatre an") == "theatre"
    gold = [{"text": ["the red house", "house"], "answer_start": [0, 8]}, {"text": ["1820"], "answer_start": [0]}]
    task, split = toy("answer", ("f1", "em"), gold)
    got = score(task, ["A House.", "in 1820"], split)
    assert got["em"]["value"] == 50, "the nearest of several answers counts"
    assert got["f1"]["value"] == pytest.approx(100 * (1 + 2 / 3) / 2)
    assert score(task, [None, ""], split)["f1"]["value"] == 0, "a missing prediction is wrong"


def test_which_are_right_is_known_where_the_first_metric_is_their_share() -> None:
    labels = [0, 1, 1, 0]
    task, split = toy("classify", ("accuracy", "f1"), labels, ("a", "b"))
    assert right_ones(task, [0, 1, 0, 0], split) == [True, True, False, True]
    assert right_ones(toy("classify", ("mcc", "accuracy"), labels, ("a", "b"))[0], [0, 1, 0, 0], split) is None
    gold = [{"text": ["the red house"], "answer_start": [0]}, {"text": ["1820"], "answer_start": [0]}]
    task, split = toy("answer", ("em", "f1"), gold)
    assert right_ones(task, ["red house", "in 1820"], split) == [True, False]  # the second is right in part
    assert right_ones(toy("answer", ("f1", "em"), gold)[0], ["red house", "in 1820"], split) is None


def test_unanswerable_rules() -> None:
    gold: list[Any] = [{"text": [], "answer_start": []}] * 3 + [{"text": ["Rome"], "answer_start": [0]}]
    task, split = toy("answer", ("f1", "em"), gold, unanswerable=True)
    got = score(task, ["", "Rome", None, ""], split)
    assert got["em"]["value"] == got["f1"]["value"] == 25, "only the first is right; None was never predicted"


def test_entities_and_their_f1() -> None:
    assert entities(["B-a", "B-a", "I-a", "I-b", "O", "I-a"]) == {(0, 1, "a"), (1, 3, "a"), (3, 4, "b"), (5, 6, "a")}
    assert entities([]) == set() and entities(["O", "O"]) == set()
    classes = ("B-a", "I-a", "O")
    task, split = toy("tag", ("f1", "accuracy"), [[0, 1, 2], [2, 0]], classes)
    got = score(task, [[0, 1, 2], [0]], split)  # one of two found, one wrong, and the last word was cut off
    assert got["f1"]["value"] == 50 and got["accuracy"]["value"] == 60 and got["f1"]["n"] == 2
    perfect = score(task, [[0, 1, 2], [2, 0]], split)
    assert perfect["f1"]["value"] == perfect["f1"]["low"] == 100


def test_tag_error_bars_resample_sentences_not_words() -> None:
    """Words of a sentence are right or wrong together here, so the error is that of 50 sentences, not of 1000 words."""
    labels = [[0] * 20] * 50
    guess = [[row % 2] * 20 for row in range(50)]
    task, split = toy("tag", ("accuracy",), labels, ("x", "y"))
    assert score(task, guess, split)["accuracy"]["stderr"] == pytest.approx(100 * math.sqrt(0.25 / 50), rel=0.1)


def test_wrong_predictions_are_refused() -> None:
    task, split = toy("classify", ("accuracy",), [0, 1], ("a", "b"))
    for guess, message in (
        ([0], "1 predictions for 2"),
        ([0.2, 0.8], "class ids"),
        ([0, 2], "class ids"),
        ([0, -1], "class ids"),
    ):
        with pytest.raises(UserError, match=message):
            score(task, guess, split)
    with pytest.raises(UserError, match="metric 'pearson' does not fit kind classify"):
        score(*(lambda task, split: (task, [0, 1], split))(*toy("classify", ("pearson",), [0, 1], ("a", "b"))))
    with pytest.raises(UserError, match="sentence 1 of toy has 1 words and 2"):
        score(*(lambda task, split: (task, [[0, 1]], split))(*toy("tag", ("accuracy",), [[0]], ("a", "b"))))


def test_fast_on_forty_thousand_rows() -> None:
    gold = GENERATOR.normal(size=40_000)
    task, split = toy("regress", ("pearson", "spearman"), list(gold))
    begin = time.process_time()
    score(task, gold + GENERATOR.normal(size=40_000), split)
    assert time.process_time() - begin < 6, "about 1.5 s of one core; waiting for others does not count"
