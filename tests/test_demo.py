"""The demo's own way through, with a tiny model and toy sentences in the place of the real ones."""

import pytest

from smallbert.cli import demo, main
from smallbert.errors import UserError
from smallbert.making import starting
from smallbert.measuring.budget import Budget
from smallbert.model.encoder import fingerprint
from smallbert.tiny import make_encoder, make_task

TRAIN = "train(epochs=5, lr=5e-3, batch=16)"
TINY = demo.Scale(120, 40, 0.0, 1, "finetune(epochs=5, lr=5e-3, batch=16)", TRAIN)


@pytest.fixture
def small(monkeypatch):
    encoder = make_encoder("bert", num_hidden_layers=6)
    start = starting.Start(encoder, demo.MODEL, fingerprint(encoder))
    monkeypatch.setattr(demo, "start_from", lambda name, line: start)
    monkeypatch.setattr(demo, "task_from", lambda name, line: make_task())
    monkeypatch.setattr(demo, "QUICK", TINY)


def test_demo(small, tmp_path, capsys, monkeypatch):
    out = tmp_path / "demo"
    assert main(["demo", "--quick", "--out", str(out), "--budget", "size<=10MB"]) == 0
    shown = capsys.readouterr().out
    count = len(demo.WAYS) + 1
    assert count >= 7 and "is the best within size ≤ 10 MB" in shown
    made, table = shown.split("All of them, timed in turns:")
    lines = [line for line in made.splitlines() if f" of {count}: " in line]  # one a model, in the order they are made
    names = ["baseline", *(name for name, *_ in demo.WAYS)]
    assert all(
        line.startswith(f"{n} of {count}: {name}: ") for n, (line, name) in enumerate(zip(lines, names, strict=True), 1)
    )
    assert all(" MB" in line and " ms" not in line for line in lines)
    assert "parameters" not in made.split(lines[0])[1] and table.count("parameters") == 1  # and one table, at the end
    assert all(f"{name}  " in made and meaning in made for name, _, meaning in demo.WAYS)
    page = (out / "report" / "index.html").read_text()
    assert "<svg" in page and (out / "report" / "plot.png").is_file()
    assert len(list((out / "models").iterdir())) == count and not (out / "work").exists()

    monkeypatch.setattr("smallbert.making.run.train", None)  # a second run has nothing left to train
    assert main(["demo", "--quick", "--out", str(out), "--budget", "size<=10MB"]) == 0
    assert capsys.readouterr().out.split("All of them")[1] == shown.split("All of them")[1]


@pytest.mark.parametrize("scale", [demo.FULL, demo.QUICK], ids=["full", "quick"])
def test_all_recipes_begin_with_the_one_baseline(scale):
    from smallbert.making.likeness import beginnings

    entries, words = demo.demo_entries(scale)
    assert len(entries) == len(words) >= 7 and entries[0].preset == "baseline"
    encoder, task = make_encoder("bert", num_hidden_layers=6), make_task()
    baseline = list(beginnings(entries[0].recipe, encoder, task))[-1]
    assert all(baseline in beginnings(entry.recipe, encoder, task) for entry in entries)
    used = {method.name for entry in entries for phase in entry.recipe.phases() for method in phase}
    assert {"quantize", "drop_layers", "distill", "mix_layers", "magnitude"} <= used


def test_what_the_page_needs_is_asked_for_first(small, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install"):
        demo.run_demo(tmp_path / "demo", budget=Budget.parse("size<=1MB"))
    assert not list(tmp_path.iterdir())
