"""Timing models in turns, and choosing the fastest that holds the score."""

import json
import re
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
from rich.console import Console
from toys import run, small, toy_task

from smallbert import export
from smallbert.bench import variants
from smallbert.bench.run import bench, choose
from smallbert.bench.variants import predict_variant, read_variant
from smallbert.cli import main, progress
from smallbert.errors import UserError
from smallbert.measuring.disk import measure_bytes
from smallbert.measuring.evaluate import evaluate
from smallbert.measuring.metrics import score
from smallbert.model.encoder import fingerprint
from smallbert.model.folders import load_folder, save_folder
from smallbert.onnxfile.exactness import INEXACT
from smallbert.report.benching import bench_table

TASK = toy_task()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model of two layers, trained, and one of one layer, which is not."""
    place = tmp_path_factory.mktemp("bench")
    save_folder(run("finetune(epochs=12, lr=5e-3, batch=8)", small(layers=3), TASK).encoder, place / "deep")
    save_folder(run("head", small(layers=1), TASK).encoder, place / "flat")
    return place


def test_rows_and_ratios(folders):
    both = [read_variant(folders / name) for name in ("deep", "flat")]
    record = bench(both, batches=[1, 2], lengths=[8], threads=[1], seconds=0)
    assert [(row["name"], row["batch"]) for row in record["rows"]] == [
        ("deep", 1),
        ("flat", 1),
        ("deep", 2),
        ("flat", 2),
    ]
    for row in record["rows"]:
        assert 0 < row["p50_ms"] <= row["p95_ms"] <= row["p99_ms"] and row["repeats"] >= 20
        assert row["texts_per_second"] == pytest.approx(row["batch"] / row["p50_ms"] * 1e3)
        assert (row["faster"] == 1) == (row["name"] == "deep")
    assert record["rows"][1]["faster"] > 1  # a third of the layers
    assert record["choice"] is None and record["variants"]["flat"]["scores"] is None


def test_the_table_says_what_is_multiplied(folders):
    plain = read_variant(folders / "flat")
    said = "float32 products of 4-bit weights"
    record = bench([plain, replace(plain, name="few", runs="onnxruntime", precision=said)], lengths=[8], seconds=0)
    table, calls = bench_table(record), record["rows"][0]["repeats"]
    assert list(table.columns[1].cells) == ["torch", f"onnxruntime, {said}"]
    below = ["All lines: batch 1, 8 tokens, 1 thread.", f"Percentiles are of {calls} timed calls per line."]
    assert table.caption.splitlines() == below
    record["variants"]["few"]["exact"] = False
    assert bench_table(record).caption.splitlines() == [*below, INEXACT]
    assert ("onnxruntime" in record["versions"]) == (find_spec("onnxruntime") is not None)


@pytest.mark.parametrize("width", [80, 120])
def test_names_and_numbers_stay_whole_in_a_table(width, capsys, monkeypatch):
    names = ["e5-small-sst2", "onnx", "onnx-int8-calibrated"]
    scores, precision = {"accuracy": {"value": 91.25}}, "float32 products of 4-bit weights"
    about = {"runs": "onnxruntime", "precision": precision, "bytes": 133.4e6, "exact": True, "scores": scores}
    times = {"p50_ms": 12.34, "p95_ms": 123.45, "p99_ms": 133.56, "texts_per_second": 1234, "faster": 12.3}
    setting = {"length": 128, "threads": 1, "repeats": 200}
    rows = [{"name": name, "batch": batch, **setting, **times} for name in names for batch in (1, 8)]
    record = {"headline": "accuracy", "rows": rows, "variants": dict.fromkeys(names, about)}
    monkeypatch.setattr(progress, "make_console", lambda: Console(file=sys.stdout, width=width))
    progress.Progress().show(bench_table(record))
    shown = capsys.readouterr().out
    lines = [line.split() for line in shown.splitlines()]
    assert [line[0] for line in lines if line and line[-1] == "12.30x"] == [name for name in names for _ in range(2)]
    assert max(map(len, shown.splitlines())) <= width and "…" not in shown and "All lines: 128 tokens" in shown
    assert all({"133.4", "12.34", "133.56"} <= set(line) for line in lines if line and line[-1] == "12.30x")


def test_scores_are_those_of_eval(folders):
    wanted = evaluate(load_folder(folders / "deep"), TASK)["scores"]
    found = predict_variant(read_variant(folders / "deep"), TASK, "dev")
    assert score(TASK, found, TASK.split("dev")) == wanted
    with pytest.raises(UserError, match=r"deep cannot be scored on .* \(tag\): its head is for classify"):
        predict_variant(read_variant(folders / "deep"), toy_task("tag"), "dev")
    more = replace(TASK, labels=(*TASK.labels, "neither"))
    with pytest.raises(UserError, match=f"its head is for classify {', '.join(TASK.labels)}; fine-tune"):
        bench([read_variant(folders / "deep")], task=more)


def test_classes_in_another_order_are_put_in_the_tasks(folders):
    deep = read_variant(folders / "deep")
    turned = replace(
        deep, labels=deep.labels[::-1], open=lambda threads: lambda batch: deep.open(threads)(batch).flip(-1)
    )
    assert (predict_variant(turned, TASK, "dev") == predict_variant(deep, TASK, "dev")).all()
    with pytest.raises(UserError, match=r"deep has classes named bad, good where .* has gloom, cheer"):
        bench([deep], task=replace(TASK, labels=("gloom", "cheer")))


def test_what_cannot_be_timed_is_said(folders):
    one = read_variant(folders / "deep")
    with pytest.raises(UserError, match="two models are called 'deep'"):
        bench([one, one])
    with pytest.raises(UserError, match="at most 72"):
        bench([one], lengths=[73])


def made_up(**found):
    """A record of models with a score and a speed each."""
    rows = [{"name": name, "faster": speed} for name, (_, speed) in found.items()]
    variants = {
        name: {"scores": {"accuracy": {"value": score, "stderr": 0.1, "n": 5000}}} for name, (score, _) in found.items()
    }
    return {"rows": rows, "variants": variants, "headline": "accuracy"}


def test_the_choice():
    record = made_up(base=(90.0, 1.0), quick=(89.6, 3.0), quickest=(80.0, 9.0), slow=(91.0, 0.5))
    found = choose(record, 0.5)
    assert (
        found["name"] == "quick" and "89.6 against 90.0, 3.00 times as fast (quickest lost more)" in found["sentence"]
    )
    assert choose(record, 20)["name"] == "quickest"
    assert choose(record, 0.0)["name"] == "base" and "keep base" in choose(record, 0.0)["sentence"]
    assert choose(record, None) is None


def test_what_is_doubted_is_the_choice():
    record = made_up(base=(90.0, 1.0), quick=(89.6, 3.0), noisy=(89.9, 2.0), quickest=(80.0, 9.0))
    for name, error in {"base": 0.0, "quick": 0.7, "noisy": 2.0, "quickest": 3.0}.items():
        record["variants"][name]["drop_stderr"] = error
    doubt = "5,000 examples are too few to judge 0.5 points: the loss of quick is known to ± 0.7; score on more."
    assert choose(record, 0.5)["sentence"].endswith(doubt)
    record["variants"]["quick"]["drop_stderr"] = 0.4
    assert "cannot tell" not in choose(record, 0.5)["sentence"]
    stays = choose(record, 0.0)  # since the fastest lost more, which may be chance
    assert stays["name"] == "base" and "the loss of quickest is known to ± 3.0" in stays["sentence"]
    slow = made_up(base=(90.0, 1.0), slow=(80.0, 0.5))
    assert "cannot tell" not in choose(slow, 0.01)["sentence"]  # nothing hangs on what it lost


def test_too_few_examples_are_said():
    record = made_up(base=(90.0, 1.0), quick=(90.0, 3.0))
    for one, error in zip(record["variants"].values(), (0.0, 2.3), strict=True):
        one["drop_stderr"], one["scores"]["accuracy"]["n"] = error, 100
    doubt = "100 examples are too few to judge 0.5 points: the loss of quick is known to ± 2.3; score on more."
    assert choose(record, 0.5)["sentence"].endswith(doubt) and "cannot tell" not in choose(record, 4.0)["sentence"]
    record["variants"]["quick"]["drop_stderr"] = 0.0  # all agree, the next might not
    assert "known to ± 1.0" in choose(record, 0.5)["sentence"]
    record["variants"]["quick"]["drop_stderr"] = None  # no mean of examples
    record["variants"]["quick"]["scores"]["accuracy"]["stderr"] = 6.0
    assert "known to ± 6.0" in choose(record, 0.5)["sentence"]


def write_facts(folder, **changes):
    folder.mkdir(exist_ok=True)
    facts = {"inputs": ["input_ids"], "kind": "classify", "labels": ["bad", "good"], "length": 64, **changes}
    (folder / "export.json").write_text(json.dumps(facts))


def test_exports_are_taken_over_of_the_same_model_only(folders, tmp_path, monkeypatch):
    made = []

    def write(model, out, say):
        made.append(model.name)
        out.mkdir(parents=True)
        write_facts(out, model=fingerprint(load_folder(model)))

    monkeypatch.setattr(export, "export_onnx", write)
    monkeypatch.setattr(variants, "read_variant", lambda path, name: name)
    for _ in range(2):
        assert variants.make_variants(folders / "deep", ["onnx"], tmp_path) == ["onnx"]
    write_facts(tmp_path / "onnx-int8-calibrated", model=fingerprint(load_folder(folders / "deep")), calibrated="other")
    with pytest.raises(UserError, match=r"calibrated holds an export .* or with ranges of other texts"):
        variants.make_variants(folders / "deep", ["onnx-int8-calibrated"], tmp_path, task=TASK)
    (tmp_path / "onnx" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"onnx holds an export of another model.*remove that folder, or give another"):
        variants.make_variants(folders / "flat", ["onnx"], tmp_path)
    assert made == ["deep"] and (tmp_path / "onnx" / "notes.txt").read_text() == "mine"
    assert variants.read_names("onnx-int8, onnx") == ["onnx-int8", "onnx"]


def test_damaged_exports_are_said(tmp_path):
    texts = {
        "": "export.json cannot be read: .*; export the model again",
        "[]": "export.json holds a list where a JSON object should be",
        "{}": 'export.json has no "inputs"',
    }
    for text, sentence in texts.items():
        (tmp_path / "export.json").write_text(text)
        with pytest.raises(UserError, match=sentence):
            read_variant(tmp_path)
    for name, value in {"length": "64", "kind": 3, "labels": "good", "inputs": ["pixels"], "model": [1]}.items():
        write_facts(tmp_path, **{name: value})
        with pytest.raises(UserError, match=f'export.json has an impossible value for "{name}"'):
            read_variant(tmp_path)
    write_facts(tmp_path)
    with pytest.raises(UserError, match="not a complete ONNX export"):
        read_variant(tmp_path)
    pytest.importorskip("onnxruntime")
    (tmp_path / "model.onnx").write_bytes(b"\x08\x0a truncated")
    with pytest.raises(UserError, match=r"model.onnx cannot be loaded: .*; export the model again"):
        read_variant(tmp_path).open(1)


def test_what_is_asked_wrongly_is_said_before_any_work(folders, tmp_path, capsys, monkeypatch):
    def never(*_, **__):
        raise AssertionError

    monkeypatch.setattr(export, "export_onnx", never)
    monkeypatch.setattr("smallbert.bench.run._time", never)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "onnx").symlink_to(folders / "flat")
    deep, out = str(folders / "deep"), ("--out", str(tmp_path / "new"))
    wrong = {
        "is a file; give another folder": (deep, "--out", str(tmp_path / "file")),
        "two models are called 'onnx'": (deep, str(tmp_path / "onnx"), "--variants", "onnx", *out),
        "at most 72 tokens": (deep, "--length", "73", "--variants", "onnx", *out),
        "given 'tflite'; write one or more of: onnx, onnx-int8": (deep, "--variants", "tflite"),
        "finds its ranges on training texts: give --task": (deep, "--variants", "onnx,onnx-int8-calibrated"),
        "--threads was given 100000; at most": (deep, "--threads", "1,100000"),
    }
    for sentence, words in wrong.items():
        assert main(["bench", *words]) == 2
        assert sentence in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("option", ["--batch", "--length", "--threads"])
def test_an_example_of_numbers_is_taken(option, folders, capsys, monkeypatch):
    monkeypatch.setattr("smallbert.bench.run._time", lambda variants, batch, length, threads, seconds: [])
    assert main(["bench", str(folders / "deep"), option, "x"]) == 2
    example = re.search(r"such as (\S+)", capsys.readouterr().err)[1]
    assert main(["bench", str(folders / "deep"), option, example, "--json"]) == 0


def test_sizes_are_those_of_cards(folders, tmp_path):
    wanted = measure_bytes(folders / "deep")
    assert read_variant(folders / "deep").bytes == wanted["total"] > wanted["weights"]
    load_folder(folders / "deep").tokenizer.save_pretrained(tmp_path)
    write_facts(tmp_path)
    for name in ("model.onnx", "model.onnx.data", "README.md"):
        (tmp_path / name).write_bytes(b"x" * 1000)
    every = sum(file.stat().st_size for file in tmp_path.iterdir() if file.name != "README.md")
    assert read_variant(tmp_path).bytes == every


def test_ranges_are_found_on_the_task(folders, tmp_path, monkeypatch):
    made = {}

    def write(model, out, say, calibrate=None):
        made[out.name] = calibrate
        write_facts(out, model=fingerprint(load_folder(model)), calibrated=calibrate and calibrate.fingerprint)

    monkeypatch.setattr(export, "export_int8", write)
    monkeypatch.setattr(variants, "read_variant", lambda path, name: name)
    names = ["onnx-int8", "onnx-int8-calibrated"]
    for _ in range(2):  # the second time they are there
        assert variants.make_variants(folders / "deep", names, tmp_path, task=TASK) == names
    assert made == {"onnx-int8": None, "onnx-int8-calibrated": TASK}


@pytest.mark.slow  # writes real graphs
def test_the_verb(folders, tmp_path, capsys):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    pytest.importorskip("matplotlib")
    data = tmp_path / "data.jsonl"
    rows = [
        json.dumps({"text": text, "label": label})
        for text, label in zip(TASK.split("train").texts, ["bad", "good"] * 24, strict=True)
    ]
    data.write_text("\n".join(rows))
    words = [
        "bench",
        str(folders / "deep"),
        "--variants",
        "onnx,onnx-int8-calibrated",
        "--length",
        "8",
        "--seconds",
        "0",
        "--task",
        str(data),
    ]
    words += ["--split", "train", "--max-drop", "0.5", "--out", str(tmp_path / "out")]
    assert main([*words, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record == json.loads((tmp_path / "out" / "bench.json").read_text())
    scores = [one["scores"]["accuracy"]["value"] for one in record["variants"].values()]
    assert scores[0] == scores[1] and record["choice"]["name"].startswith("onnx")
    assert record["variants"]["onnx"]["runs"] != "torch"
    about = json.loads((tmp_path / "out" / "onnx-int8-calibrated" / "export.json").read_text())
    assert about["calibrated"] and about["precision"] == "int8"
    assert about["bytes"] == record["variants"]["onnx-int8-calibrated"]["bytes"]
    assert (tmp_path / "out" / "bench.png").stat().st_size > 5000
    assert main(words[:-2]) == 0  # another temporary export
    out = capsys.readouterr().out
    assert "p99 ms" in out and "is the fastest that keeps accuracy" in out
    assert main(["bench", str(folders / "deep"), "--max-drop", "1"]) == 2
    assert "give --task" in capsys.readouterr().err
