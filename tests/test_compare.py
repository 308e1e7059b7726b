"""Many runs: made once, begun alike trained once, failures kept as cards, stops survived, times taken in turns."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from smallbert.errors import RunError, UserError
from smallbert.machine.files import alone_in
from smallbert.making import compare as study
from smallbert.making import make, starting
from smallbert.measuring.card import MACHINERY_CHECK, card_key
from smallbert.measuring.disk import measure_bytes
from smallbert.measuring.evaluate import evaluate
from smallbert.measuring.groups import pick_baseline
from smallbert.measuring.outcomes import unpack
from smallbert.measuring.shelf import load_card, load_cards
from smallbert.model.answering import in_order_of, match_labels, order_labels
from smallbert.model.encoder import fingerprint
from smallbert.model.folders import load_folder
from smallbert.recipes.recipe import Recipe
from smallbert.report import format_rows
from smallbert.tasks.derived import cut_at, limit
from smallbert.tiny import make_encoder, make_task

FIRST = "finetune(epochs=1, lr=1e-3)"
STUDENT = f"{FIRST} | drop_layers(2) | distill + train(epochs=1, lr=1e-3)"


@pytest.fixture(scope="module")
def start():
    encoder = make_encoder("bert")
    return starting.Start(encoder, "tiny bert", fingerprint(encoder))


@pytest.fixture
def runs(monkeypatch):
    """How often training really ran, by the text of its methods."""
    from smallbert.making import run

    seen = []
    real = run.train

    def count(phase, *rest):
        seen.append(" + ".join(sorted(method.name for method in phase.methods)))
        return real(phase, *rest)

    monkeypatch.setattr(run, "train", count)
    return seen


def do(start, out, recipes, **settings):
    settings = {"kind": MACHINERY_CHECK, "seconds": 0.0, **settings}
    return study.compare(study.read_entries(None, recipes), start, make_task(), out, **settings)


def test_common_beginning_is_trained_once_and_changes_nothing(start, tmp_path, runs):
    cards = do(start, tmp_path / "many", f"{FIRST}; {STUDENT}; {FIRST} | quantize(8)")
    assert runs == ["finetune", "distill + train"]
    assert [card["status"] for card in cards] == ["ok"] * 3
    alone = make.make_one(STUDENT, start, make_task(), 0, tmp_path / "alone", kind=MACHINERY_CHECK, seconds=0.0)
    assert runs == ["finetune", "distill + train"] * 2
    assert alone["scores"] == cards[1]["scores"] and alone["trained"] == cards[1]["trained"]
    folders = [next((tmp_path / part / "models").glob("*distill*")) for part in ("many", "alone")]
    one, other = (load_folder(folder).state_dict() for folder in folders)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert cards[1]["seconds"] > cards[0]["seconds"]  # the shared part counts for each
    assert not (tmp_path / "many" / "work").exists()


def test_a_tiny_check_has_a_wider_model_for_what_asks_for_more():
    """Only for that: everything else is still checked in seconds."""
    said: list[str] = []
    entries = study.read_entries("baseline, minilm, zhao48, half, bilstm-tiny")
    (narrow, start, task), (wide, other, short) = study.tiny_groups(entries, "bert", said.append)
    assert [entry.preset for entry in narrow] == ["baseline", "half"] and start.encoder.width == 16
    assert [entry.preset for entry in wide] == ["minilm", "zhao48", "bilstm-tiny"] and other.encoder.width == 384
    assert len(short.split("train")) < len(task.split("train")) and short.name != task.name
    (line,) = said
    assert "what minilm, zhao48, bilstm-tiny would make is larger than a model 16 wide" in line
    said.clear()
    for presets, recipes in (("baseline,reweighted", None), ("half", "drop_layers(99)")):  # which no width helps
        (only,) = study.tiny_groups(study.read_entries(presets, recipes), "distilbert", said.append)
        assert len(only[0]) == 2 and only[1].encoder.width == 16 and not said
    ((_, start, _),) = study.tiny_groups(study.read_entries("minilm"), "distilbert", said.append)
    assert start.encoder.width == 384 and start.name == "random distilbert, 384 wide"


def test_two_of_them_do_not_share_a_folder_and_what_lacks_its_model_is_made_again(start, tmp_path, runs):
    with alone_in(tmp_path), pytest.raises(UserError, match="is in use by another run"):
        do(start, tmp_path, FIRST)
    (card,) = do(start, tmp_path, FIRST)
    (model,) = (tmp_path / "models").iterdir()
    for path in model.iterdir():
        if path.name != "card.json":
            path.unlink()
    (again,) = do(start, tmp_path, FIRST)
    assert runs == ["finetune"] * 2 and again["scores"] == card["scores"] and load_folder(model)


def test_a_single_run_has_its_folder_to_itself(start, tmp_path):
    with alone_in(tmp_path / ".one.work"), pytest.raises(UserError, match="is in use by another run"):
        make.make_one(FIRST, start, make_task(), 0, tmp_path / "one", kind=MACHINERY_CHECK, alone=True)
    make.make_one(FIRST, start, make_task(), 0, tmp_path / "one", kind=MACHINERY_CHECK, alone=True, seconds=0.0)
    assert {path.name for path in tmp_path.iterdir()} == {"one"}


def test_finished_work_is_never_done_again(start, tmp_path, runs):
    first = do(start, tmp_path, f"{FIRST}; {FIRST} | quantize(8)")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert do(start, tmp_path, f"{FIRST}; {FIRST} | quantize(8)") == first
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before
    more = do(start, tmp_path, f"{FIRST}; {STUDENT}")  # goes on from the finished model instead of training it again
    assert runs == ["finetune", "distill + train"]
    assert more[1]["trained"]["epochs"] == 2


def test_a_run_that_fails_is_a_card_and_the_others_go_on(start, tmp_path, monkeypatch):
    shown = []
    settings = {"show": lambda card, done, total: shown.append((card["status"], done, total))}
    cards = do(start, tmp_path, f"{FIRST} | drop_layers(9); identity; {FIRST}", **settings)
    assert [card["status"] for card in cards] == ["failed", "ok", "ok"]
    assert shown == [("failed", 1, 3), ("ok", 2, 3), ("ok", 3, 3)]
    assert "4 layers" in cards[0]["why"] and cards[0]["scores"] is None
    assert len(load_cards(tmp_path, (MACHINERY_CHECK,))) == 3

    def explode(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(make, "run_recipe", explode)
    (card,) = do(start, tmp_path, "finetune(epochs=2)")
    assert card["status"] == "failed" and "memory" in card["why"]
    monkeypatch.undo()
    (card,) = do(start, tmp_path, "finetune(epochs=2)")
    assert card["status"] == "failed"
    (card,) = do(start, tmp_path, "finetune(epochs=2)", again=True)
    assert card["status"] == "ok"


def test_a_single_run_raises_what_is_wrong(start, tmp_path):
    with pytest.raises(UserError, match="4 layers"):
        make.make_one("drop_layers(9)", start, make_task(), 0, tmp_path / "out", alone=True)
    assert not (tmp_path / "out").exists()


def test_interrupted_work_goes_on_to_the_same_end(start, tmp_path, runs):
    def stop(stage, done, total, info):
        if "2 of 2: training" in stage and done >= 2:
            raise KeyboardInterrupt

    recipes = f"{FIRST}; {STUDENT}"
    with pytest.raises(KeyboardInterrupt):
        do(start, tmp_path / "stopped", recipes, say=stop)
    (safe,) = load_cards(tmp_path / "stopped", (MACHINERY_CHECK,))
    assert safe["status"] == "ok"
    resumed, whole = do(start, tmp_path / "stopped", recipes), do(start, tmp_path / "whole", recipes)
    assert runs == ["finetune", "distill + train", "distill + train", "finetune", "distill + train"]
    assert resumed[1]["scores"] == whole[1]["scores"]
    folders = [next((tmp_path / part / "models").glob("*distill*")) for part in ("stopped", "whole")]
    one, other = (load_folder(folder).state_dict() for folder in folders)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_times_are_taken_in_turns(start, tmp_path):
    cards = do(start, tmp_path, "identity; drop_layers(1)", seconds=0.2)
    marks = {card["latency"]["together"] for card in cards}
    assert len(marks) == 1 and len({card["latency"]["repeats"] for card in cards}) == 1
    for card in cards:
        key = next(path for path in (tmp_path / "cards").iterdir() if load_card(path)["recipe"] == card["recipe"]).stem
        assert load_card(tmp_path / "models" / key / "card.json") == card  # the copy beside the model is the same
        assert f"{card['latency']['p50_ms']:.3g} ms" in (tmp_path / "models" / key / "README.md").read_text()


def test_a_full_disk_stops_and_leaves_earlier_cards(start, tmp_path, monkeypatch):
    do(start, tmp_path, "identity")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    monkeypatch.setattr(
        "smallbert.machine.files.os.fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(RunError, match="No space left"):
        do(start, tmp_path, "identity; drop_layers(1)")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_seeds_lengths_and_samples_are_different_work(start, tmp_path):
    task = make_task()
    tasks = [task, limit(task, 50), cut_at(task, 8), limit(task, 20, split="dev")]
    keys = {make.work_key(Recipe("identity"), start, each, seed) for each in tasks for seed in (0, 1)}
    assert len(keys) == 8
    cards = do(start, tmp_path, "identity", seeds=[0, 1])
    assert [card["seed"] for card in cards] == [0, 1]
    with pytest.raises(UserError, match="at most 72"):
        do(start, tmp_path, "identity", length=100)
    with pytest.raises(UserError, match="8 or more"):
        do(start, tmp_path, "identity", length=0)
    (card,) = do(start, tmp_path, "identity", length=8)
    assert "cut at 8 tokens" in card["task_note"]


def test_a_sample_is_fair_and_always_the_same():
    task = make_task()
    some = limit(task, 40)
    assert len(some.split("train")) == 40 and sum(some.split("train").labels) == 20
    assert some.split("train").texts == limit(task, 40).split("train").texts
    assert some.split("dev") is task.split("dev") and some.fingerprint != task.fingerprint
    assert "40 of 200 train examples" in some.note
    assert limit(task, 200) is task
    with pytest.raises(UserError, match="from 1 to 200"):
        limit(task, 0)
    with pytest.raises(UserError, match="two different"):
        limit(task, 1)


def test_entries_come_from_presets_recipes_and_spaces():
    entries = study.read_entries("baseline, half-int8", "finetune | drop_layers({2, 3}) | maybe(quantize(8)); finetune")
    assert [entry.preset for entry in entries] == ["baseline", "half-int8", None, None, None, None]
    with pytest.raises(UserError, match="nothing to compare"):
        study.read_entries(None, " ; ")


def test_labels_in_another_order_are_put_right(start):
    task = make_task()
    encoder = make.run_recipe(FIRST, start.encoder, task, judge=False).encoder
    turned = encoder.copy()
    with torch.no_grad():
        turned.head.out.weight.copy_(encoder.head.out.weight.flip(0))
        turned.head.out.bias.copy_(encoder.head.out.bias.flip(0))
    turned.head.labels = ["good", "bad"]
    right = match_labels(turned, task)
    assert torch.equal(right.head.out.weight, encoder.head.out.weight) and right.head.labels == ["bad", "good"]
    with pytest.raises(UserError, match="no task head"):
        match_labels(start.encoder, task)


@pytest.mark.parametrize("labels", [("good", "bad"), ("0", "1")])
def test_a_model_whose_head_can_be_scored_is_the_baseline(start, tmp_path, labels):
    """Also where its classes stand in another order, or the data's have no names."""
    task = make_task()
    trained = make.run_recipe("finetune(epochs=8, lr=5e-3)", start.encoder, task).encoder
    rows = {name: replace(split, labels=[1 - n for n in split.labels]) for name, split in task.splits.items()}
    task = replace(task, labels=labels, splits=rows if labels[0] == "good" else task.splits)
    given = starting.Start(trained, "given", fingerprint(trained))
    entries = study.read_entries(None, "quantize(8); quantize(4)")
    cards = study.compare(entries, given, task, tmp_path, kind=MACHINERY_CHECK, seconds=0.0)
    assert [card["preset"] for card in cards] == [study.AS_GIVEN, None, None]
    wanted = evaluate(trained, make_task())["scores"]["accuracy"]["value"]
    assert cards[0]["scores"]["accuracy"]["value"] == pytest.approx(wanted, abs=1e-3) and wanted > 90
    assert pick_baseline(cards) is cards[0]
    saved = load_folder(next(tmp_path.glob("models/*identity*")))
    assert saved.head.labels == (["good", "bad"] if labels[0] == "good" else ["bad", "good"])
    noted = "the head's classes bad, good are read as 0, 1" in cards[1]["trained"]["notes"]
    assert noted == (labels[0] == "0")


def test_a_model_as_given_weighs_what_its_own_files_do(start, tmp_path):
    """Also in half precision, where our copy of it and all that is trained from it are larger."""
    given = tmp_path / "given"
    make.make_one("head", start, make_task(), 0, given, kind=MACHINERY_CHECK, alone=True)
    for name in ("encoder.json", "card.json"):
        (given / name).unlink()
    weights = load_file(given / "model.safetensors")
    save_file({name: tensor.half() for name, tensor in weights.items()}, given / "model.safetensors", {"format": "pt"})
    size = measure_bytes(given)["total"]
    cards = do(starting.start_from(str(given)), tmp_path / "out", f"quantize(8); {FIRST}")
    assert [card["preset"] for card in cards] == [study.AS_GIVEN, None, None]
    assert [card["model_bytes"] for card in cards] == [size] * 3
    assert cards[0]["bytes"]["total"] == size < cards[2]["bytes"]["total"]
    assert any(note.startswith("the files given take ") for note in cards[0]["trained"]["notes"])
    about = [(tmp_path / "out" / "models" / card_key(**card) / "README.md").read_text() for card in cards]
    assert "| size of the files given | " in about[0] and all("| size of its files | " in text for text in about[1:])
    for card in cards:
        score = card["scores"]["accuracy"]
        assert unpack(card["right"]).sum() == round(score["value"] * score["n"] / 100)
    row = format_rows(cards)[1]
    assert row["smaller"] == f"{size / cards[1]['bytes']['total']:.1f}x"


def test_why_there_is_no_row_of_the_model_as_given_is_said(start, tmp_path):
    make.make_one("head", start, make_task(), 0, tmp_path / "given", kind=MACHINERY_CHECK, alone=True)
    given, said = starting.start_from(str(tmp_path / "given")), []
    task = replace(make_task(), labels=("awful", "fine"))
    cards = study.compare(
        study.read_entries(None, FIRST),
        given,
        task,
        tmp_path / "out",
        kind=MACHINERY_CHECK,
        seconds=0.0,
        line=said.append,
    )
    assert len(cards) == 1 and any(line.startswith("there is no row 'as given': ") for line in said)


def test_classes_of_other_names_are_not_scored_by_place():
    task = replace(make_task(), labels=("entailment", "not_entailment"))
    assert order_labels(["ENTAILMENT", "Not-Entailment"], task) is None
    assert order_labels(["NOT ENTAILMENT", "Entailment"], task) == [1, 0]
    for nameless in (["LABEL_0", "LABEL_1"], ["label 0", "label 1"], ["0", "1"], ["-1", "1.0"]):
        assert order_labels(nameless, task) is None
        assert order_labels(["gloom", "cheer"], replace(task, labels=tuple(nameless))) is None
    assert order_labels(["1", "0"], replace(task, labels=("0", "1"))) == [1, 0]
    assert order_labels(["LABEL_1", "LABEL_0"], replace(task, labels=("0", "1"))) == [1, 0]
    assert order_labels(["True", "False"], replace(task, labels=("0", "1"))) == [1, 0]
    assert order_labels(["0", "1"], replace(task, labels=("-1", "0"))) is None  # rising, a sign is no dash
    with pytest.raises(UserError, match="nothing says which is which"):
        order_labels(["C", "D"], replace(task, labels=("C#", "D")))
    assert order_labels([], replace(task, labels=())) is None
    with pytest.raises(UserError, match="nothing says which is which"):
        order_labels(["LABEL_1", "LABEL_0"], task)
    with pytest.raises(
        UserError, match=r"small has classes named cheer, gloom where .* has entailment, not_entailment"
    ):
        order_labels(["cheer", "gloom"], task, "small")
    many, others = ([f"{mark}{letter}" for letter in "abcdefgh"] for mark in "xy")
    with pytest.raises(UserError, match=r"classes named xa, xb, xc, xd, xe, xf, … where .* has ya, yb, yc, yd, ye, yf"):
        order_labels(["same", *many], replace(task, labels=("same", *others)))


def test_numbered_classes_in_another_order_are_put_in_the_tasks(start):
    task = make_task()
    trained = make.run_recipe("finetune(epochs=1)", start.encoder, task).encoder
    trained.head.labels = ["LABEL_1", "LABEL_0"]
    numbered = replace(task, labels=("0", "1"))
    turned = in_order_of(trained, numbered)
    assert turned.head.labels == ["0", "1"] and torch.equal(turned.head.out.bias, trained.head.out.bias.flip(0))
    assert in_order_of(trained, task) is trained  # bad and good: nothing says which is which
    assert in_order_of(start.encoder, task) is start.encoder and in_order_of(trained, None) is trained


def test_the_readme_of_a_model_runs(start, tmp_path):
    make.make_one("finetune(epochs=1)", start, make_task(), 0, tmp_path / "model", alone=True, kind=MACHINERY_CHECK)
    text = (tmp_path / "model" / "README.md").read_text()
    blocks = [block.split("```")[0] for block in text.split("```python\n")[1:]]
    assert len(blocks) == 2 and "MACHINERY" in text.upper()
    seen: dict = {}
    for block in blocks:
        exec(block.replace("FOLDER", str(tmp_path / "model")), seen)
    tokens = seen["tokenizer"](seen["texts"][0], return_tensors="pt")
    theirs = seen["model"](**tokens).logits[0].detach().numpy()
    shares = np.exp(theirs) / np.exp(theirs).sum()
    assert list(seen["predictions"][0]["probabilities"].values()) == pytest.approx(shares, abs=1e-4)
    assert json.loads((tmp_path / "model" / "card.json").read_text())["recipe"].startswith("finetune(epochs=1.0")
