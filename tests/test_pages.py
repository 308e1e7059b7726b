"""Tables that were typed into the docs from cards: every score in them is what the cards say, rounded once."""

import json
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev

import pytest
from invented import invented_card

from smallbert.measuring.shelf import load_cards, save_card

ROOT = Path(__file__).parent.parent
POOLERS = ROOT / "results" / "poolers"
GLUE = {
    "MRPC, accuracy": "mrpc", "RTE, accuracy": "rte", "CoLA, Matthews": "cola", "STS-B, Pearson": "stsb",
    "SST-2, accuracy": "sst2", "QNLI, accuracy": "qnli", "QQP, accuracy": "qqp", "SQuAD 1.1, F1": "squad",
}  # fmt: skip
HEADS = ["own head", "adapter", "head, one more epoch", "new head", "scalar mix", "two epochs", "in parallel"]
DEPTHS = {
    "all layers": "all", "up to layer 10, the rest cut off": "up to 10", "up to layer 8": "up to 8",
    "up to layer 6": "up to 6", "up to layer 4": "up to 4", "no adapter: a new plain head on layer 8": "new head on 8",
}  # fmt: skip
FORMS = {
    "adapter, width 16": "adapter",
    "as published: padding is read, no dropout": "with padding, as published",
    "means over tokens": "means",
    "first tokens": "first tokens",
    "attention, width 64": "attention",
    "scalar mix": "scalar mix",
    "adapter in parallel, gradient stopped": "in parallel",
    "adapter in parallel, its gradient reaches the encoder": "in parallel, gradient not stopped",
    "adapter instead of the head from the start": "pooler alone from the start",
}
EIGHTH = {
    "adapter up to layer 8": "adapter up to 8",
    "head on the mean of all tokens of layer 8": "head on all tokens of 8",
    "head on its first token": "head on the first",
    "the same with ten times the learning rate": "the same, lr 1e-2",
}


def scores(*folders):
    """What the runs of every task and arm scored, and whether they learned anything."""
    found = defaultdict(list)
    for card in (card for folder in folders for card in load_cards(folder)):
        value = card["scores"][card["headline"]]["value"]
        found[card["task"], card["preset"]].append((value, card["status"] == "ok"))
    return found


def to_cell(runs):
    """A mean as the page writes it: 77.3 ± 0.9, and (2 †) where two runs learned nothing and are not in it."""
    learned = [value for value, ok in runs if ok]
    lost = f" ({len(runs) - len(learned)} †)" if len(learned) < len(runs) else ""
    spread = f" ± {stdev(learned):.1f}" if len(learned) > 1 else ""
    return (f"{mean(learned):.1f}{spread}" if learned else "guesses") + lost


def table_below(heading, number=0):
    """The rows, without their first, of a table whose first row begins so: {first cell: other cells}."""
    lines = (ROOT / "docs" / "bert_vision.md").read_text(encoding="utf-8").splitlines()
    start = [place for place, line in enumerate(lines) if line.startswith(heading)][number]
    rows = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            return rows
        name, *cells = (cell.strip().strip("*").replace("**", "") for cell in line.strip("|").split("|"))
        rows[name] = cells
    return rows


@pytest.mark.parametrize(("number", "model"), [(0, "e5-small"), (1, "all-mpnet-base-v2")])
def test_heads_of_stored_states(number, model):
    found = scores(*(POOLERS / model / part for part in ("small", "large", "answers")))
    expected = {name: [to_cell(found[task, arm]) for arm in HEADS] for name, task in GLUE.items()}
    assert table_below("| | own head | adapter |", number) == expected


@pytest.mark.parametrize(
    ("heading", "folder", "arms", "tasks"),
    [
        ("| adapter that reads |", "depth", DEPTHS, ["mrpc", "rte", "sst2"]),
        ("| | MRPC | RTE | CoLA |", "forms", FORMS, ["mrpc", "rte", "cola", "stsb"]),
        ("| on an encoder cut to 8 layers |", "eighth", EIGHTH, ["mrpc"]),
    ],
)
def test_other_poolers(heading, folder, arms, tasks):
    found = scores(POOLERS / "e5-small" / folder)
    expected = {name: [to_cell(found[task, arm]) for task in tasks] for name, arm in arms.items()}
    assert table_below(heading) == expected


@pytest.mark.parametrize(
    ("study", "tasks"),
    [
        ("students/e5-small", ["sst2", "mrpc", "snli", "qqp"]),
        ("students/all-mpnet-base-v2", ["sst2", "mrpc"]),
        ("rates/all-mpnet-base-v2", ["sst2", "snli", "qqp"]),
    ],
)
def test_students_and_their_controls(study, tasks, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from compression import to_table

    page = (ROOT / "docs" / "distillation.md").read_text(encoding="utf-8")
    assert "\n".join(to_table([ROOT / "results" / study / task for task in tasks])) in page


def test_how_fast_students_are(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from compression import read_students
    from student_speed import to_table

    record = json.loads((ROOT / "results" / "student_speed" / "cpu.json").read_text(encoding="utf-8"))
    assert all(here == pytest.approx(study, rel=0.01) for here, study in record["fewer"].values())  # the same shapes
    page = (ROOT / "docs" / "distillation.md").read_text(encoding="utf-8")
    assert "\n".join(to_table(record, read_students(ROOT / "results/students/e5-small/sst2"))) in page


@pytest.mark.parametrize("model", ["e5-small", "all-MiniLM-L6-v2"])
def test_what_few_bits_cost(model, monkeypatch):
    tasks = ["sst2", "mrpc", "qqp", "squad"]
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from bits import to_table

    page = (ROOT / "docs" / "quantisation.md").read_text(encoding="utf-8")
    assert "\n".join(to_table([ROOT / "results" / "quantisation" / model / task for task in tasks])) in page


def test_a_mixture_in_pretraining(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from reading_curves import read_curves, to_table

    page = (ROOT / "docs" / "layer_mixing.md").read_text(encoding="utf-8")
    assert "\n".join(to_table(read_curves(ROOT / "results" / "layer_mixing" / "pretraining"))) in page


def test_what_few_bits_cost_is_told_against_the_same_seed(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from bits import to_table

    arms = [("float32", "finetune", 4.0, (80, 90)), ("8 bits", "finetune | quantize", 1.0, (79, 91))]
    for name, recipe, size, scored in arms:
        for seed, score in enumerate(scored):
            status = {"status": "diverged", "why": "?"} if score == 91 else {}
            save_card(invented_card(recipe, score, size, preset=name, seed=seed, **status), tmp_path / "mrpc")
    _, _, whole, bits = to_table([tmp_path / "mrpc"])
    assert whole == "| float32 | 4.0 | 1.0x | 85.0 |" and bits == "| 8 bits | 1.0 | 4.0x | +0.0 ± 1.4 (2, 1 †) |"
