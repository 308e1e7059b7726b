"""A run that learned nothing is called diverged, whatever the kind of its task; one that learned is not."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from toys import run, small, toy_task

from smallbert.errors import UserError
from smallbert.measuring import collapse
from smallbert.measuring.collapse import COLLAPSES, UNTRAINED, find_collapse

EVERYTHING = "layers+pooler+embeddings"
NOTHING = {  # predictions that say nothing, and a word of the sentence about them
    "classify": (lambda rows: np.zeros(len(rows), int), "one class"),
    "regress": (lambda rows: np.full(len(rows), 0.3), "same value"),
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
    assert outcome.diverged == "after 5 training steps (1 epoch), on a sample of train, because" and seen == [7]
    assert find_collapse(outcome.encoder, task, 0, 64) == "on a sample of train, because"


@pytest.fixture(scope="module")
def learned():
    return run("finetune(epochs=30, lr=2e-3, batch=16)", small(), toy_task("classify")).encoder


@pytest.mark.parametrize("splits", [("train", "dev"), ("dev",)])
def test_what_was_destroyed_without_training_is_called_diverged(learned, splits):
    whole = toy_task("classify")
    task = replace(whole, splits={name: whole.splits[name] for name in splits})
    assert run("quantize(8)", learned, task).diverged == ""
    assert run(f"prune(0.01, what={EVERYTHING!r})", learned, task).diverged.startswith(
        f"on a sample of {splits[0]}, "
    )  # and of no steps
    corpus = str(Path(__file__).parent / "data" / "own" / "text.txt")
    for recipe in ("head", "quantize(8)", f"pretrain({corpus!r}, steps=2, batch=2, length=16)"):
        new = run(recipe, learned if recipe == "head" else small(), task)
        assert new.diverged == "" and UNTRAINED in new.notes


def test_a_trained_head_is_not_thrown_away_without_training(learned):
    other = replace(toy_task("classify"), labels=("awful", "fine"), name="reviews")
    corpus = str(Path(__file__).parent / "data" / "own" / "text.txt")
    for recipe in ("quantize(8)", f"pretrain({corpus!r}, steps=2, batch=2, length=16)"):
        with pytest.raises(UserError, match=r"classes named .* where reviews has awful, fine, and nothing says which"):
            run(recipe, learned, other)
    with pytest.raises(UserError, match=r"its head is for classify .*; fine-tune it on the task first"):
        run("quantize(8)", learned, toy_task("regress"))
    told = run("train(epochs=0.1)", learned, other, judge=False).notes
    had = ", ".join(learned.head.labels)
    assert told[0] == f"the head for classify {had} was replaced by a new one for classify awful, fine"


def test_how_briefly_was_trained_is_said_of_all_phases_together(learned, tmp_path):
    """Two steps that taught nothing are no divergence that anyone must look into, and who reads the reason sees it."""
    for _ in range(2):  # the second time all phases are taken over
        outcome = run("train(epochs=0.2, lr=1e-9) | train(epochs=0.1, lr=1e-9)", small(), toy_task(), work=tmp_path)
        assert outcome.diverged.startswith("after 2 training steps (0.3 epochs), on a sample of train, ")
    outcome = run(f"train(epochs=1, lr=1e-9) | prune(0.01, what={EVERYTHING!r})", learned, toy_task("classify"))
    assert outcome.diverged.startswith("after 2 training steps (1 epoch), on a sample of train, ")


def test_what_was_given_without_having_learned_is_not_blamed_on_the_recipe():
    task = toy_task("classify", 200)
    new = run("head", small(), task).encoder
    outcome = run("quantize(8)", new, task)
    assert outcome.diverged == "" and "the model that was given is itself no better than guessing" in outcome.notes[-1]
