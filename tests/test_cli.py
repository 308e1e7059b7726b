"""The command line: fast help, clean streams, one clear sentence and the right exit code for all that is wrong."""

import ast
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from smallbert import __version__, cli
from smallbert.cli import main
from smallbert.cli.entry import phases_of
from smallbert.cli.progress import Progress
from smallbert.measuring.shelf import load_card
from smallbert.methods import METHODS
from smallbert.model.folders import load_folder, save_folder
from smallbert.presets import PRESETS
from smallbert.recipes.recipe import Recipe
from smallbert.recipes.settings import meanings_of
from smallbert.tiny import make_encoder, make_task


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_folder(make_encoder("bert"), folder)
    return str(folder)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "reviews"
    folder.mkdir()
    task = make_task()
    for name in ("train", "dev"):
        rows = task.split(name)
        lines = [f"{text},{task.labels[label]}" for text, label in zip(rows.texts, rows.labels, strict=True)]
        (folder / f"{name}.csv").write_text("\n".join(["text,label", *lines]) + "\n")
    return str(folder)


@pytest.fixture
def call(capsys):
    """Run a command line here: the exit code, stdout, stderr."""

    def run(*words):
        capsys.readouterr()
        code = main([str(word) for word in words])
        return code, *capsys.readouterr()

    return run


def without_guess(error):
    """What is said on stderr, but for how a user's own data were read."""
    return re.sub(r"^\S+: guessed by name: .*\n", "", error, count=1)


@pytest.fixture
def refused(call):
    """What a command line that must be refused says; nothing else is allowed to happen."""

    def run(*words, code=2, lines=1):
        got, out, error = call(*words)
        error = without_guess(error)
        assert (got, out) == (code, ""), error
        assert error.startswith("error: ") and error.count("\n") == lines and "Traceback" not in error
        return error

    return run


# Help and listings.


def test_help_is_fast_and_light():
    code = (
        "import sys, time; begun = time.process_time(); from smallbert.cli import main; main(['--help']); "
        "heavy = {'torch', 'numpy', 'transformers', 'matplotlib', 'pandas', 'huggingface_hub'} & set(sys.modules); "
        "print(time.process_time() - begun, sorted(heavy), file=sys.stderr)"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(2)]
    assert all(
        verb in runs[0].stdout
        for verb in "list inspect finetune compress eval compare study report export bench demo".split()
    )
    assert runs[0].stderr.split(maxsplit=1)[1] == "[]\n"
    assert min(float(run.stderr.split()[0]) for run in runs) < 0.5  # processor time: other programs do not count


def test_version_and_module(call):
    assert call("--version") == (0, f"{__version__}\n", "")
    done = subprocess.run([sys.executable, "-m", "smallbert", "lst"], capture_output=True, text=True)
    assert done.returncode == 2 and "Did you mean 'list'?" in done.stderr


@pytest.mark.parametrize("verb", "list inspect finetune compress eval compare study report export bench demo".split())
def test_every_verb_has_help_and_json(call, verb):
    code, out, _ = call(verb, "--help")
    assert code == 0 and "--json" in out


def test_options_that_verbs_share_are_written_once():
    """In cli/options.py, so that help and names cannot drift apart."""
    found = Counter(
        ast.unparse(node)
        for file in Path(cli.__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("typer.Option", "typer.Argument")
    )
    assert [option for option, count in found.items() if count > 1] == []


def test_list(call):
    code, out, _ = call("list", "--json")
    found = json.loads(out)
    assert code == 0 and list(found) == ["methods", "presets", "tasks", "families"]
    assert [row["name"] for row in found["methods"]] == list(METHODS) and all(row["about"] for row in found["methods"])
    assert {row["name"] for row in found["presets"]} == {preset.name for preset in PRESETS.values()}
    assert next(row for row in found["methods"] if row["name"] == "quantize")["defaults"]["bits"] == 8
    assert {"sst2", "squad2", "coord", "rotten_tomatoes"} <= {row["name"] for row in found["tasks"]}
    assert "deberta-v2" in {row["name"] for row in found["families"]}
    code, out, _ = call("list", "presets")
    assert code == 0 and "half-int8" in out and "deberta" not in out


def test_list_of_one_method_says_what_each_setting_means(call):
    code, out, _ = call("list", "cut_to_mixture", "--json")
    row = json.loads(out)["methods"][0]
    assert code == 0 and row["defaults"] == {"mass": 0.95, "weigh": "shares"}
    assert "mixture" in row["meanings"]["mass"] and row["may_be"]["weigh"] == "'shares' or 'variation'"
    _, out, _ = call("list", "cut-to-mixture")
    assert "0.95" in out and "share of the mixture" in out and "used in presets" not in out
    _, out, _ = call("list", "mark")
    assert "required" in out and "waldorf and" in out and "bilstm" not in out


def test_list_of_one_preset_shows_its_phases_its_reference_and_what_was_published(call):
    code, out, _ = call("list", "tinybert4")
    assert code == 0 and "  | mark('teacher')" in out and "arXiv:1909.10351" in out and "sst2 accuracy 92.6" in out
    assert "--recipe tinybert4" in out
    _, out, _ = call("list", "trimmed20")
    assert "nothing to compare with" in out
    for preset in PRESETS.values():
        assert Recipe(" | ".join(phases_of(preset.recipe))) == Recipe(preset.recipe)


def test_a_meaning_is_that_of_the_nearest_class_and_names_values_that_it_leaves_out(call):
    own, inherited = meanings_of(METHODS["pretrain"]), meanings_of(METHODS["train"])
    assert own["epochs"] != inherited["epochs"] and own["clip"] == inherited["clip"] and "blocks" in own["batch"]
    out = " ".join(call("list", "quantize")[1].split())
    assert "(8, 4, 3, 2 or 1)" in out and "whether the range is centred on zero" in out and "(bool" not in out


def test_an_empty_recipe_is_refused(call):
    code, _, err = call("compress", "nowhere", "--task", "sst2", "--recipe", " ", "--out", "nowhere")
    assert code == 2 and "--recipe is empty" in err


def test_list_of_one_task_and_family(call):
    assert "mcc, accuracy" in call("list", "cola")[1]
    assert "relative positions" in call("list", "deberta_v2")[1]


@pytest.mark.parametrize("name", METHODS)
def test_every_setting_of_every_method_is_explained(name):
    assert [setting for setting, meaning in meanings_of(METHODS[name]).items() if not meaning] == []


def test_inspect(call, model):
    _, out, _ = call("inspect", model, "--json")
    found = json.loads(out)
    assert (found["family"], found["layers"], found["width"], found["heads"]) == ("bert", 4, 16, 4)
    parts = found["parameters"]
    assert parts["embeddings"] + parts["layers"] + parts["head"] + parts["pooler"] == parts["total"]
    presets = {row["preset"]: row for row in found["presets"]}
    assert presets["half"]["layers"] == 2 and presets["half"]["parameters"] < presets["baseline"]["parameters"]
    assert presets["int8"]["weight_bytes"] < presets["baseline"]["weight_bytes"] / 2
    assert not presets["truncate6"]["fits"] and "4 layers" in presets["truncate6"]["why"]
    code, out, _ = call("inspect", model)
    assert code == 0 and "4 layers, width 16" in out


# The main way through.


def test_finetune_compress_eval_report_export(call, model, data, tmp_path):
    base, small, cards = tmp_path / "base", tmp_path / "small", tmp_path / "cards"
    words = ["finetune", model, "--task", data, "--epochs", "8", "--lr", "5e-3", "--batch", "16", "--out", base]
    code, out, _ = call(*words)
    assert code == 0 and "100.0" in out and str(base) in out
    card = load_card(base / "card.json")
    assert card["status"] == "ok" and card["scores"]["accuracy"]["value"] == 100.0
    assert card["command"].startswith("smallbert finetune") and card["recipe"].startswith(
        "finetune(epochs=8.0, lr=0.005"
    )
    assert "guessed by name" in card["task_note"] and card["model"] == "tiny"

    recipe = "drop_layers(2) | distill + train(epochs=4, lr=5e-3) | quantize(8)"
    words = ["compress", base, "--recipe", recipe, "--task", data, "--out", small, "--examples", "100"]
    code, out, error = call(*words, "--json")
    made = json.loads(out)
    assert code == 0 and made["folder"] == str(small) and made["card"]["recipe"] == str(Recipe(recipe))
    assert "100 of 200 train examples" in made["card"]["task_note"] and len(load_folder(small).order) == 2
    assert not list(tmp_path.glob(".small*"))
    assert json.loads(call(*words, "--json")[1]) == made  # made once

    _, out, _ = call("eval", small, "--task", data, "--out", cards, "--json")
    again = json.loads(out)
    assert len(again["trained"]["notes"]) == len(set(again["trained"]["notes"]))
    assert again["scores"] == made["card"]["scores"] and again["recipe"] == made["card"]["recipe"]
    code, out, _ = call("eval", small, "--task", data, "--split", "train", "--out", cards)
    assert code == 0 and "accuracy on train (200 examples): " in out
    assert len(list(cards.iterdir())) == 2  # other examples, another card
    rows = (Path(data) / "dev.csv").read_text().replace("good\n", "1\n").replace("bad\n", "0\n")
    (tmp_path / "numbers.csv").write_text(rows)
    code, _, error = call("eval", small, "--task", tmp_path / "numbers.csv", "--split", "train")
    assert code == 0 and "guessed by name" in error and "classes bad, good are read as 0, 1" in error

    code, out, _ = call("report", cards, "--budget", "size<=1MB", "--json")
    assert code == 0 and "<svg" in (cards / "report" / "index.html").read_text()
    assert json.loads(out)["page"] == str(cards / "report" / "index.html")

    code, out, _ = call("export", base, "--to", "hf", "--out", tmp_path / "hf", "--json")
    assert code == 0 and "encoder.json" not in json.loads(out)["files"]
    import transformers

    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf")
    assert theirs.config.id2label == {0: "bad", 1: "good"}
    code, _, error = call("export", small, "--to", "hf", "--out", tmp_path / "no")
    assert code == 2 and "small has weights in few bits, which transformers" in error and not (tmp_path / "no").exists()


@pytest.mark.slow  # test_export.py has graphs for every day
def test_export_onnx(call, tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    from smallbert.making.run import run_recipe

    encoder = run_recipe("head | mix_layers | quantize(8)", make_encoder("bert"), make_task()).encoder
    save_folder(encoder, tmp_path / "model")
    code, out, _ = call("export", tmp_path / "model", "--to", "onnx", "--out", tmp_path / "onnx", "--json")
    found = json.loads(out)
    assert code == 0 and found["checked"] >= 64 and found["difference"] < 1e-5
    session = runtime.InferenceSession(tmp_path / "onnx" / "model.onnx")
    assert [one.name for one in session.get_inputs()] == ["input_ids", "attention_mask", "token_type_ids"]
    assert (tmp_path / "onnx" / "tokenizer.json").is_file()
    assert json.loads((tmp_path / "onnx" / "export.json").read_text())["labels"] == ["bad", "good"]


def test_an_onnx_file_that_disagrees_is_not_kept(refused, model, tmp_path, monkeypatch):
    pytest.importorskip("onnxscript")
    from smallbert import export

    monkeypatch.setattr(export, "write_onnx", lambda encoder, path: [path.write_bytes(b"0")])
    wrong = lambda inputs: np.repeat(inputs["input_ids"][..., None] * 1.0, 16, -1)  # noqa: E731
    monkeypatch.setattr(export, "_session", lambda path: wrong)
    assert "other scores" in refused("export", model, "--to", "onnx", "--out", tmp_path / "onnx", code=1)
    assert not list(tmp_path.iterdir())


def test_compare_tiny(call, tmp_path):
    words = ["compare", "--tiny", "--presets", "baseline,int8,truncate6", "--out", tmp_path / "out"]
    code, out, error = call(*words)
    assert code == 0 and out.count("MACHINERY CHECK") == 1 and out.count("smaller") == 1  # one table, at the end
    lines = out.splitlines()
    assert [line.split(": ")[:2] for line in lines[:3]] == [
        [f"{place} of 3", name] for place, name in enumerate(("baseline", "int8", "truncate6"), 1)
    ]
    assert "MACHINERY" not in error
    code, out, _ = call(*words, "--json")
    found = json.loads(out)
    assert found["kind"] == "machinery check" and found["best"] is None and len(found["cards"]) == 3
    assert call("report", tmp_path / "out")[0] == 0
    assert "achinery check" in (tmp_path / "out" / "report" / "index.html").read_text()
    code, out, error = call("compare", "all-MiniLM-L6-v2", *words[1:])  # what it stands in for may be named
    assert code == 0 and "replaces all-MiniLM-L6-v2" in error


@pytest.mark.slow
def test_compare_tiny_of_presets_that_ask_for_more(call, tmp_path):
    words = ["compare", "--tiny", "--presets", "minibert,truncate6", "--out", tmp_path / "out"]
    code, out, error = call(*words)
    assert code == 0 and "1 of 2: truncate6" in out and "2 of 2: minibert" in out and "failed" not in out
    assert "random one 384 wide" in error
    found = json.loads(call(*words, "--json")[1])
    assert [card["preset"] for card in found["cards"]] == ["truncate6", "minibert"]
    assert [card["status"] for card in found["cards"]] == ["ok", "ok"]
    assert call("report", tmp_path / "out")[0] == 0


def test_compare_names_the_best_and_says_what_failed(call, model, data, tmp_path):
    recipes = "finetune(epochs=8, lr=5e-3, batch=16); drop_layers({2, 9}) | finetune(epochs=8, lr=5e-3, batch=16)"
    words = ["--task", data, "--out", tmp_path, "--budget", "size<=1MB", "--seeds", "0,1"]
    code, out, error = call("compare", model, "--recipes", recipes, *words)
    assert "1 of 6: finetune(8.0, lr=0.005, batch=16), seed 0: accuracy " in out
    assert "of 6: drop_layers(9) | finetune(8.0, lr=0.005, batch=16), seed 1: failed" in out
    assert code == 0 and "is the best within size ≤ 1 MB" in out and "failed: drop_layers(9) | finetune: " in error
    assert "--budget" not in out.splitlines()[-1]  # the folder knows
    code, out, _ = call("report", tmp_path)
    page = (tmp_path / "report" / "index.html").read_text()
    assert code == 0 and "size ≤ 1 MB" in out and "is the best within size ≤ 1 MB" in page
    assert "budget: size&lt;=1MB" in page
    code, out, _ = call("report", tmp_path, "--budget", "size<=2MB", "--json")
    assert json.loads(out)["budget"] == "size<=2MB"
    code, _, _ = call("compare", model, "--recipes", "drop_layers(9)", "--task", data, "--out", tmp_path)
    assert code == 1  # nothing went well
    assert json.loads(call("report", tmp_path, "--json")[1])["budget"] is None  # nor was this comparison given one


# Everything that can be wrong.


def write(path, text):
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


ROWS = "text,label\nthe film is great,good\nthe plot is dull,bad\n" * 1
BAD_DATA = {
    "empty": ("", "is empty"),
    "only a header": ("text,label\n", "no rows"),
    "wrong columns": ("a,b,c\n1,2,3\n4,5,6\n", "its columns are a, b, c"),
    "one class": ("text,label\na,good\nb,good\nc,good\n", "every row of train has the label 'good'"),
    "NaN label": ("text,label\na,good\nb,nan\nc,bad\n", "row 2"),
    "no label": ("text,label\na,good\nb,\nc,bad\n", "row 2"),
    "not UTF-8": (b"text,label\nna\xefve,good\nb,bad\n", "not UTF-8"),
    "ragged": ("text,label\na,good\nb,bad,c\n", "line 3"),
}


@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data(refused, model, tmp_path, case):
    text, phrase = BAD_DATA[case]
    file = write(tmp_path / "data.csv", text)
    assert phrase in refused("finetune", model, "--task", file, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_bad_data_options(refused, model, data, tmp_path):
    def said(*words):
        return refused("finetune", model, "--out", tmp_path / "out", *words)

    assert "does not exist" in said("--task", tmp_path / "none.csv")
    assert "no column 'txt'" in said("--task", data, "--text", "txt")
    assert "did you mean 'sst2'" in said("--task", "sst-2")
    assert "set SMALLBERT_DATA" in said("--task", "sst2")
    assert "SST-2" in said("--task", "sst2", "--data", tmp_path)
    assert "from 1 to 200" in said("--task", data, "--examples", "0")
    assert "at most 72" in said("--task", data, "--length", "500")
    assert "epochs must be more than 0" in refused(
        "finetune", model, "--task", data, "--out", tmp_path, "--epochs", "0", lines=3
    )
    assert "no device" in said("--task", data, "--device", "tpu")
    folder = tmp_path / "unseen"
    shutil.copytree(data, folder)
    with (folder / "dev.csv").open("a") as file:
        file.write("this film is odd,neither\n")
    assert "'neither' is not one of the known ones: bad, good" in said("--task", folder)


def test_bad_models(refused, model, data, tmp_path):
    def said(name):
        return refused("finetune", name, "--task", data, "--out", tmp_path / "out")

    assert "no model folder" in said(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert "not a model folder" in said(tmp_path / "empty")
    shutil.copytree(model, tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    assert "not a whole safetensors file" in said(tmp_path / "cut")
    weights.unlink()
    assert "no *.safetensors" in said(tmp_path / "cut")
    assert "HF_HUB_OFFLINE" in said("bert-base-uncased")
    assert "Did you mean 'all-MiniLM-L6-v2'?" in said("all-MiniLM-L6-v3")
    assert "no task head" in refused("eval", model, "--task", data)


@pytest.mark.parametrize(
    ("recipe", "phrase"),
    [
        ("drop_layer(2)", "Did you mean 'drop_layers'?"),
        ("drop_layers(kep=2)", "Did you mean 'keep'?"),
        ("finetune |", "cannot read this recipe"),
        ("drop_layers({1, 2})", "smallbert compare"),
    ],
)
def test_bad_recipes(refused, recipe, phrase, tmp_path):
    # Nothing else is looked at before the recipe: neither model nor data exist here.
    assert phrase in refused("compress", "x", "--recipe", recipe, "--task", "y", "--out", tmp_path / "out", lines=3)


def test_what_was_given_is_not_suggested(refused, tmp_path):
    told = refused("compress", "x", "--recipe", "quantize('8')", "--task", "y", "--out", tmp_path / "out", lines=3)
    assert "'8' (str) was given." in told and "Did you mean" not in told


def test_recipes_that_do_not_fit_the_model(refused, model, data, tmp_path):
    words = ["--task", data, "--out", tmp_path / "out"]
    assert "the model has 4 layers" in refused("compress", model, "--recipe", "drop_layers(9)", *words)
    assert "nothing was trained yet" in refused("compress", model, "--recipe", "distill", *words)
    assert not list(tmp_path.iterdir())


def test_eval_says_what_became_of_the_run_that_made_a_model(call, model, data, tmp_path):
    out = tmp_path / "small"
    assert call("compress", model, "--task", data, "--recipe", "drop_layers(1) | train(epochs=0.1)", "--out", out)[
        0
    ] in (0, 1)
    card = json.loads((out / "card.json").read_text()) | {"status": "diverged", "why": "it says one class"}
    (out / "card.json").write_text(json.dumps(card))
    code, _, error = call("eval", out, "--task", data)
    assert code == 0 and "was made by a run that its card calls diverged: it says one class" in error


def test_bad_options(refused, model, data, tmp_path):
    assert "Did you mean 'half'?" in refused("compare", model, "--presets", "hal", "--task", data)
    assert "cannot read 'small'" in refused("compare", model, "--presets", "half", "--task", data, "--budget", "small")
    assert "no unit" in refused("compare", model, "--presets", "half", "--task", data, "--budget", "size<=25")
    assert "budget is empty" in refused("demo", "--budget", "")
    assert "'0,x'" in refused("compare", model, "--presets", "half", "--task", data, "--seeds", "0,x")
    for verb in (["study", "--recipes"], ["compare", "--recipes"], ["tune", "--recipe"]):
        words = (verb[0], model, "--task", data, "--out", tmp_path / "out", verb[1], "half", "--seeds")
        assert "1 twice would be the same run" in refused(*words, "1,0,1")
        for wrong in ("0,-1", f"{2**32}"):
            assert "a seed is 0 or more" in refused(*words, wrong)
    for option, wrong in (("--lr", "nan"), ("--epochs", "inf")):
        words = ("finetune", model, "--task", data, "--out", tmp_path / "out", option, wrong)
        assert f"{option} was given {wrong}; write a number above 0" in refused(*words)
    words = ("finetune", model, "--task", data, "--out", tmp_path / "out", "--seed")
    assert "a seed is 0 or more and less than 2**32" in refused(*words, "9" * 20)
    assert "nothing to compare" in refused("compare", model, "--task", data)
    assert "--tiny" in refused("compare", "--presets", "half")
    assert "missing option '--out'" in refused("finetune", model, "--task", data).lower()
    assert "--recipe" in refused("compress", model, "--recip", "x", "--task", data, "--out", "x")
    assert "write hf or onnx" in refused("export", model, "--to", "tflite", "--out", tmp_path / "out")
    for wrong in ("nan", "inf", "0"):
        words = ("--to", "onnx", "--out", tmp_path / "out", "--max-difference", wrong)
        assert f"given {wrong}; write a number above 0" in refused("export", model, *words)
    assert "Did you mean 'presets'?" in refused("list", "preset")
    assert "no folder of cards" in refused("report", tmp_path / "none")
    assert "no cards" in refused("report", tmp_path)
    assert "no split 'test'" in refused("eval", model, "--task", data, "--split", "test")


def test_a_folder_with_something_else_is_not_written_over(refused, model, data, tmp_path, monkeypatch):
    write(tmp_path / "precious.txt", "mine")
    for words in (["finetune", model, "--task", data], ["export", model, "--to", "hf"]):
        assert "already holds something else" in refused(*words, "--out", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]
    monkeypatch.chdir(tmp_path)
    assert "already holds something else" in refused("finetune", model, "--task", data, "--out", ".")


def test_full_disk(refused, call, model, data, tmp_path, monkeypatch):
    words = ["compare", model, "--task", data, "--out", tmp_path, "--recipes"]
    recipe = "finetune(epochs=8, lr=5e-3, batch=16)"
    assert call(*words, recipe)[0] == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def full(handle):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    assert "No space left on device" in refused("finetune", model, "--task", data, "--out", tmp_path / "new", code=1)
    code, _, error = call(*words, f"{recipe}; {recipe} | drop_layers(1)")
    assert code == 1 and "No space left on device" in error and "Traceback" not in error
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_errors_of_other_kinds(call, model, data, tmp_path, monkeypatch):
    def fail_with(error):
        def fail(*_, **__):
            raise error

        monkeypatch.setattr("smallbert.making.make.run_recipe", fail)
        code, out, said = call("finetune", model, "--task", data, "--out", tmp_path / "out")
        assert "kind 'classify' guessed from the labels" in said  # before anything was run
        return code, out, without_guess(said)

    code, _, error = fail_with(ZeroDivisionError("oh"))
    assert (code, error) == (1, "error: ZeroDivisionError: oh; add --debug to see where it comes from\n")
    code, _, error = fail_with(RuntimeError("I/O error: No space left on device (os error 28)"))
    assert (code, error) == (1, "error: the disk is full; what was there before is untouched\n")
    code, _, error = fail_with(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"))
    assert code == 1 and "out of memory" in error and "a smaller batch" in error
    code, _, error = fail_with(KeyboardInterrupt())
    assert code == 130 and "repeat the same command to continue" in error
    fail_with(ZeroDivisionError("oh"))
    with pytest.raises(ZeroDivisionError):
        main(["finetune", model, "--debug", "--task", data, "--out", str(tmp_path / "out")])


# Progress.


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_without_a_terminal_is_a_line_for_each_long_stage(capsys):
    now, stream = [0.0], io.StringIO()
    with Progress(stream, clock=lambda: now[0]) as say:
        say("loading")
        now[0] = 1.0
        say("training", 1, 10, "loss 2.0")
        now[0] = 41.0
        say("training", 10, 10, "loss 0.5")
        say("evaluating", 3, 1000)
        now[0] = 47.0
        say.show("a result")
        say.line("a word")
    assert stream.getvalue() == "training: 10 of 10, loss 0.5 (40 s)\na word\nevaluating: 3 of 1,000 (6 s)\n"
    assert capsys.readouterr().out == "a result\n"


def test_progress_without_a_terminal_says_more_rarely_how_far_a_long_stage_is():
    now, stream = [0.0], io.StringIO()
    with Progress(stream, clock=lambda: now[0]) as say:
        for second in range(0, 200, 5):
            now[0] = float(second)
            say("training", second, 200, "loss 0.5")
        now[0] = 1000.0
        for second in (0, 40):
            now[0] += second
            say("going on", 9000 + 10 * second, 10000)
        say("waiting")
        now[0] += 40.0
        say("waiting")
    assert stream.getvalue().split("\n") == [
        "training: 30 of 200, loss 0.5 (30 s, about 170 s left)",
        "training: 60 of 200, loss 0.5 (60 s, about 140 s left)",
        "training: 120 of 200, loss 0.5 (120 s, about 80 s left)",
        "training: 195 of 200, loss 0.5 (1000 s)",
        "going on: 9,400 of 10,000 (40 s, about 60 s left)",
        "going on: 9,400 of 10,000 (40 s)",
        "waiting: (40 s)",
        "waiting: (40 s)",
        "",
    ]


def test_progress_on_a_terminal_is_a_bar_that_leaves_stdout_alone(capsys):
    stream = Terminal()
    with Progress(stream) as say:
        say("training", 4, 10, "loss 0.5")
        say.show("a result")
        say("training", 5, 10, "loss 0.4")
    shown = stream.getvalue()
    assert "training" in shown and "4 of 10, loss 0.5" in shown and "5 of 10" in shown and "a result" not in shown
    assert capsys.readouterr().out == "a result\n"


def test_a_muted_progress_says_nothing():
    stream = Terminal()
    with Progress(stream, mute=True) as say:
        say("training", 4, 10)
        say.line("a word")
    assert stream.getvalue() == ""
