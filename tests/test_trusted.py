"""A teacher's answers are compared with the labels before it teaches: nameless classes may stand in another order."""

import numpy as np
import pytest
import torch
from toys import accuracy, phase_of, run, small, toy_task

from smallbert.errors import UserError
from smallbert.model.folders import save_folder
from smallbert.training.trusted import _best_order, trust

TASK = toy_task("classify")
LONG = "finetune(epochs=30, lr=2e-3, batch=16)"


@pytest.fixture(scope="module")
def teacher():
    """One that has learned the task."""
    return run(LONG, small(), TASK).encoder


def turned(teacher, labels):
    """The same with its classes the other way round, and with these names."""
    other = named(teacher, labels)
    with torch.no_grad():
        for values in (other.head.out.weight, other.head.out.bias):
            values.copy_(values.flip(0))
    return other


def named(teacher, labels):
    other = teacher.copy()
    (made,) = [entry for entry in other.history if "labels" in entry["plan"]]
    other.head.labels = made["plan"]["labels"] = labels
    return other


def saved(encoder, folder):
    save_folder(encoder, folder / "teacher")
    return str(folder / "teacher")


def test_a_teacher_without_names_must_have_its_classes_in_order(teacher, tmp_path):
    distill = "distill(teacher={!r}) + train(epochs=1)"
    backwards = saved(turned(teacher, ["LABEL_0", "LABEL_1"]), tmp_path / "a")
    with pytest.raises(UserError, match="in the order LABEL_1, LABEL_0 fit bad, good much better") as refusal:
        run(distill.format(backwards), small(seed=1), TASK)
    assert "\n" not in str(refusal.value)
    plain = named(teacher, ["LABEL_0", "LABEL_1"])
    notes = run(distill.format(saved(plain, tmp_path / "b")), small(seed=1), TASK, judge=False).notes
    assert any("are right for" in note and note.endswith("of 48 training labels") for note in notes)
    again = str(tmp_path / "b" / "teacher")
    twice = f"distill(teacher={again!r}) + distill(teacher={again!r}, metric='mse') + train(epochs=1)"
    notes = run(twice, small(seed=1), TASK, judge=False).notes
    assert sum("are right for" in note for note in notes) == 1
    with torch.no_grad():
        plain.head.out.bias.copy_(torch.tensor([1e3, 0.0]))  # who always says the same
    notes = run(distill.format(saved(plain, tmp_path / "d")), small(seed=1), TASK, judge=False).notes
    assert any(note.endswith("no more than always predicting the most frequent one") for note in notes)
    wrong = run(distill.format(saved(turned(teacher, ["bad", "good"]), tmp_path / "c")), small(), TASK, judge=False)
    assert any("may have its classes in another order" in note for note in wrong.notes)


@pytest.mark.parametrize("length", ["", ", length=16"])
@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_a_teacher_is_as_good_through_its_students_data_as_alone(family, length, tmp_path):
    """Whatever its tokenizer, and though texts go through the student's stream."""
    teacher = run("finetune(epochs=6, lr=2e-3, batch=16)", small(family), TASK, judge=False).encoder
    folder = saved(teacher, tmp_path)
    phase = phase_of(f"distill(teacher={folder!r}{length}) + train(epochs=1)", small(seed=1), TASK)
    found = trust(phase, folder)
    assert found is not None and found.labels == 48
    assert 100 * found.right == pytest.approx(accuracy(teacher, TASK))


def test_one_who_always_says_the_same_fits_no_order_better():
    assert _best_order(np.array([[0.0, 10.0], [0.0, 90.0]]))[1] == pytest.approx(0.0)
    order, gain = _best_order(np.array([[1.0, 9.0, 0.0], [8.0, 2.0, 0.0], [0.0, 0.0, 5.0]]))
    assert order == [1, 0, 2] and gain == pytest.approx((0.8 + 0.6) / 3)
