"""A run that learned nothing is called diverged, whatever the kind of its task; one that learned is not."""

import numpy as np
import pytest
from toys import run, small, toy_task

from smallbert.measuring import collapse
from smallbert.measuring.collapse import COLLAPSES, find_collapse

NOTHING = {  # predictions that say nothing, and a word of the sentence about them
    "classify": (lambda rows: np.zeros(len(rows), int), "one class"),
    "regress": (lambda rows: np.full(len(rows), 0.3), "same number"),
    "tag": (lambda rows: [[0] * len(labels) for labels in rows.labels], "one class"),
    "answer": (lambda rows: ["nothing of it"] * len(rows), "F1"),
}


def truth(kind, rows):
    if kind == "answer":
        return [answers["text"][0] for answers in rows.labels]
    return rows.labels if kind == "tag" else np.array(rows.labels)


@pytest.mark.parametrize("kind", list(NOTHING))
def test_what_says_nothing_is_seen_and_the_truth_is_not(kind):
    task = toy_task(kind, 60)
    rows = task.split("train")
    empty, word = NOTHING[kind]
    assert word in COLLAPSES[kind](task, empty(rows), rows)
    assert COLLAPSES[kind](task, truth(kind, rows), rows) == ""


def test_numbers_without_relation_to_the_labels():
    task = toy_task("regress", 400)
    rows = task.split("train")
    apart = np.arange(len(rows)) // 2 % 2  # the toy's labels alternate, these change half as often
    assert "Pearson" in COLLAPSES["regress"](task, apart.astype(float), rows)


def test_words_cut_off_do_not_count():
    task = toy_task("tag", 60)
    rows = task.split("train")
    cut = [[*row[:-1], -1] for row in rows.labels]
    assert COLLAPSES["tag"](task, cut, rows) == ""


@pytest.mark.parametrize("kind", list(NOTHING))
def test_a_trained_encoder_is_judged_on_a_sample_of_its_own_examples(kind, monkeypatch):
    task = toy_task(kind, 40)
    seen = []
    monkeypatch.setitem(collapse.COLLAPSES, kind, lambda task, guess, rows: seen.append(len(rows)) or "because")
    monkeypatch.setitem(collapse.SAMPLE, kind, 7)
    outcome = run("train(epochs=1, batch=8)", small(), task)
    assert outcome.diverged == "because" and seen == [7]
    assert find_collapse(outcome.encoder, task, 0, 64) == "because"
