"""Probing: known features give known answers, what is computed is kept, and what cannot be probed is said."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from toys import toy_task

from smallbert.cli import main
from smallbert.errors import RunError, UserError
from smallbert.model.encoder import fingerprint
from smallbert.model.folders import save_folder
from smallbert.probing import features as reading
from smallbert.probing import mixture, run
from smallbert.probing.features import Features, read_features
from smallbert.probing.layers import chance, probe_layers, standardise
from smallbert.probing.mixture import bits, correct, describe_ladder, gravity, probe_mixture
from smallbert.probing.roles import arrange, check_rows, control_labels, labels_of, repeated
from smallbert.report.probe import render_markdown, warnings
from smallbert.tasks.task import Split, Task
from smallbert.texts.batches import Layout, make_batch
from smallbert.texts.data import tokenise
from smallbert.tiny import make_encoder

DEPTH, WIDTH, KNOWS = 5, 8, 3
ROWS = {"train": 600, "dev": 200, "test": 400}


def quiet(stage, done, total, info):
    pass


def made_task(kind="classify", classes=2, rows=ROWS, seed=0, distinct=10**9) -> Task:
    """A task whose texts mean nothing; what its labels follow from is put into features."""
    draw = np.random.default_rng(seed)
    splits, start = {}, 0
    for name, count in rows.items():
        texts = [f"text {number % distinct}" for number in range(start, start + count)]
        labels = draw.normal(size=count).tolist() if kind == "regress" else draw.integers(0, classes, count).tolist()
        splits[name] = Split(texts, None, labels, texts)
        start += count
    metrics = ("pearson",) if kind == "regress" else ("accuracy",)
    names = () if kind == "regress" else tuple(map(str, range(classes)))
    return Task("made", kind, names, metrics, 0.0, 64, "", f"made-{kind}-{seed}", splits=splits)


def made_features(task, knows=KNOWS, strength=4.0, seed=1) -> Features:
    """Noise in every layer; one layer also holds the label, in as many dimensions as there are classes."""
    draw = np.random.default_rng(seed)
    splits = {}
    for name, split in task.splits.items():
        values = draw.normal(size=(DEPTH, len(split), max(WIDTH, len(task.labels) + 1)))
        if knows is not None:
            if task.kind == "regress":
                values[knows, :, 0] += strength * np.array(split.labels)
            else:
                values[knows, np.arange(len(split)), np.array(split.labels)] += strength * 1.5
        splits[name] = values.astype(np.float16)
    return Features(splits, arrange(task), [])


@pytest.fixture(scope="module")
def found():
    """The layer probes and the mixture of a task that one layer knows."""
    task = made_task()
    features = made_features(task)
    return task, features, probe_layers(features, task, [0, 1], quiet), probe_mixture(features, task, [0, 1], quiet)


# What known features must give.


def test_the_layer_that_knows_is_best(found):
    task, features, layers, _ = found
    assert layers["best"] == KNOWS
    guess = chance(task, features.roles)
    for layer in layers["layers"]:
        value, error = layer["score"]["value"], layer["score"]["stderr"]
        if layer["layer"] == KNOWS:
            assert value > 97 and 0 < error < 2
            assert abs(layer["selectivity"]["value"] - (value - guess)) < 8
        else:
            assert abs(value - guess) < 12 and abs(layer["selectivity"]["value"]) < 12


def test_the_mixture_finds_the_layer_that_knows(found):
    _, _, layers, mixed = found
    shares = mixed["plain"]["shares"]
    assert np.argmax(shares) == KNOWS and shares[KNOWS] > 0.5 and abs(sum(shares) - 1) < 1e-9
    assert (
        len(mixed["plain"]["sd"]) == DEPTH
        and "one layer" in mixed["plain"]["says"]
        and mixed["plain"]["bits"]["mean"] > 2
    )
    assert mixed["score"]["mean"] > 95 and len(mixed["score"]["by_seed"]) == 2
    ladder = mixed["cumulative"]
    assert max(ladder["scores"][:KNOWS]) < 65 and min(ladder["scores"][KNOWS:]) > 90
    assert ladder["expected_layer"] == pytest.approx(KNOWS, abs=0.4)
    assert ladder["gains"][KNOWS - 1] > 30  # the gain of layer 1 stands first
    assert abs(mixed["score"]["mean"] - layers["layers"][KNOWS]["score"]["value"]) < 4


def test_labels_that_nothing_knows_are_not_found():
    task = made_task(seed=5)
    features = made_features(task, knows=None)
    layers = probe_layers(features, task, [0], quiet)
    assert all(abs(layer["selectivity"]["value"]) < 12 for layer in layers["layers"])
    ladder = probe_mixture(features, task, [0], quiet, steps=60)["cumulative"]
    assert ladder["expected_layer"] is None and "not clearly above the noise" in ladder["why"]


def test_regression_and_many_classes():
    task = made_task("regress")
    features = made_features(task)
    layers = probe_layers(features, task, [0], quiet)
    assert layers["best"] == KNOWS and layers["layers"][KNOWS]["score"]["value"] > 95
    assert layers["layers"][0]["score"]["value"] < 20 and layers["classifier"].startswith("Ridge")
    mixed = probe_mixture(features, task, [0], quiet, steps=200)
    assert np.argmax(mixed["plain"]["shares"]) == KNOWS and mixed["score"]["mean"] > 90
    task = made_task(classes=70)
    layers = probe_layers(made_features(task), task, [0], quiet)
    assert layers["classifier"].startswith("LinearDiscriminant") and layers["best"] == KNOWS
    assert layers["layers"][KNOWS]["score"]["value"] > 80 > 10 > layers["layers"][0]["score"]["value"]


def test_a_control_gives_each_text_one_label_everywhere():
    task = made_task(distinct=150)
    roles = arrange(task)
    labels = control_labels(task, roles, 0)
    seen = {}
    for role in ("fit", "choose", "score"):
        split, index = getattr(roles, role)
        for row, label in zip(index, labels[role], strict=True):
            assert seen.setdefault(task.split(split).texts[row], label) == label
    assert len(seen) == 150 and set(seen.values()) == {0, 1}
    assert any((control_labels(task, roles, 1)[role] != labels[role]).any() for role in labels)
    assert repeated(task, roles) == 400 and repeated(made_task(), arrange(made_task())) == 0


def test_texts_that_repeat_can_be_remembered_and_the_control_shows_it():
    task = made_task(distinct=16)
    marks = {name: [int(text.split()[1]) for text in split.texts] for name, split in task.splits.items()}
    whole = {name: np.stack([np.eye(16, dtype=np.float16)[rows] * 4] * 2) for name, rows in marks.items()}
    layers = probe_layers(Features(whole, arrange(task), []), task, [0, 1], quiet)["layers"]
    for layer in layers:  # a label of its own for each text is known from train, the task's own labels are noise
        assert layer["control"]["value"] > 80 and layer["control"]["train"] > 80
        assert layer["selectivity"]["value"] < -20


def test_without_a_test_split_a_slice_of_train_chooses():
    task = made_task(rows={"train": 200, "dev": 50})
    roles = arrange(task)
    assert (roles.fit[0], roles.choose[0], roles.score[0]) == ("train", "train", "dev")
    assert sorted([*roles.fit[1], *roles.choose[1]]) == list(range(200)) and len(roles.choose[1]) == 20
    assert (labels_of(task, roles)["choose"] == np.array(task.split("train").labels)[roles.choose[1]]).all()
    assert probe_layers(made_features(task), task, [0], quiet)["best"] == KNOWS
    with pytest.raises(UserError, match="only a train split"):
        arrange(made_task(rows={"train": 50}))


def test_a_feature_that_only_wavers_by_rounding_says_nothing():
    draw = np.random.default_rng(0)
    rows = np.stack([np.full(100, 3.0), draw.normal(size=100)], 1).astype(np.float32)
    rows[::2, 0] = np.nextafter(np.float16(3), np.float16(4))
    made = standardise({"fit": rows, "score": rows})["score"]
    assert (made[:, 0] == 0).all() and made[:, 1].std() == pytest.approx(1, abs=1e-3)


# Formulas.


def test_formulas_of_shares():
    even, sharp = np.full(4, 0.25), np.array([0.0, 0.0, 1.0, 0.0])
    assert bits(even) == 0 and bits(sharp) == 2 and bits(np.array([0.5, 0.5, 0, 0])) == pytest.approx(1)
    assert gravity(even) == 1.5 and gravity(sharp) == 2
    assert correct(even, np.array([1.0, 1, 1, 5])).tolist() == [0.125, 0.125, 0.125, 0.625]
    told = mixture.describe_shares(np.stack([even, even]), np.array([1.0, 1, 1, 5]))
    assert "nearly uniform" in told["plain"]["says"] and told["corrected"]["says"] is None
    assert told["corrected"]["gravity"]["mean"] == pytest.approx(2.25) and told["plain"]["sd"] == [0.0] * 4


def test_formulas_of_the_ladder():
    told = describe_ladder([[50, 60, 90, 90], [50, 60, 90, 90]], [1.0] * 4)
    assert told["gains"] == [10, 30, 0] and told["expected_layer"] == (10 * 1 + 30 * 2) / 40
    assert describe_ladder([[50, 52]], [1.0, 1.0])["expected_layer"] is None  # 2 points, and 2.8 of noise
    assert describe_ladder([[60, 50]], [1.0, 1.0])["why"].startswith("all layers together gain -10.0")


def test_arms_trained_together_are_the_arms_trained_alone():
    task = made_task()
    data = mixture.prepare(made_features(task), torch.device("cpu"))
    labels = labels_of(task, arrange(task))
    allowed = torch.ones(DEPTH, DEPTH, dtype=torch.bool).tril()
    strength = torch.full((DEPTH,), 0.1)
    told = []
    shares, _, guesses = mixture.train_arms(data, task, labels, mixture.Arms(allowed, strength), 0, 30, told.append)
    alone = mixture.Arms(allowed[2:3], strength[:1])
    own, _, guess = mixture.train_arms(data, task, labels, alone, 0, 30, told.append)
    assert np.allclose(shares[2], own[0], atol=1e-5) and (guesses[2] == guess[0]).mean() > 0.99
    assert (shares[~allowed.numpy()] == 0).all() and told == [*range(1, 31)] * 2


def test_norms_are_those_of_raw_vectors():
    task = made_task()
    features = made_features(task)
    features.splits["train"][2] *= 4
    data = mixture.prepare(features, torch.device("cpu"))
    raw = np.asarray(features.splits["train"], np.float64)
    assert np.allclose(data.norms, np.linalg.norm(raw, axis=2).mean(1))
    batch = data.batch("fit", np.arange(600))
    assert batch.mean(1).abs().max() < 1e-3 and batch.square().mean((0, 1)).allclose(torch.ones(WIDTH), atol=1e-3)


# Features and what is kept of them.


@pytest.mark.parametrize("pool", ["mean", "first"])
def test_features_are_the_hidden_states_of_every_family(tiny, family, pool, tmp_path):
    encoder, task = tiny(family), toy_task("pair", 24)
    found = read_features(encoder, task, tmp_path, model="m", pool=pool, length=32, say=quiet)
    stream = tokenise(encoder.tokenizer, task.split("dev"), task.kind, 32)
    for row in (0, 7):  # alone and unpadded, against in a batch of many
        with torch.no_grad():
            hidden = encoder.states(make_batch(stream, np.array([row]), Layout(False, 0))).hidden
        alone = torch.stack([(h[0, 0] if pool == "first" else h[0].mean(0)) for h in hidden]).numpy()
        kept = np.asarray(found.splits["dev"][:, row], np.float32)
        assert kept.shape == (len(encoder.order) + 1, encoder.width)
        assert np.allclose(kept, alone, atol=2e-3, rtol=2e-3)


@pytest.fixture
def counted(monkeypatch):
    """How many splits were computed."""
    seen, real = [], reading._compute
    monkeypatch.setattr(reading, "_compute", lambda *given: seen.append(given[4]) or real(*given))
    return seen


def test_features_are_computed_once(tiny, tmp_path, counted):
    encoder, task = tiny(), toy_task()
    options = {"model": fingerprint(encoder), "pool": "mean", "length": 32, "say": quiet}
    first = read_features(encoder, task, tmp_path, **options)
    assert len(counted) == 2 and isinstance(first.splits["train"], np.memmap)
    again = read_features(encoder, task, tmp_path, **options)
    assert len(counted) == 2 and (again.splits["dev"] == first.splits["dev"]).all()
    for change in ({"model": "other"}, {"pool": "first"}, {"length": 4}):
        before = len(counted)
        read_features(encoder, task, tmp_path, **{**options, **change})
        assert len(counted) == before + 2
    before = len(counted)
    read_features(encoder, toy_task(seed=3), tmp_path, **options)
    assert len(counted) == before + 2


def test_a_broken_or_missing_file_is_computed_anew(tiny, tmp_path, counted):
    options = {"model": "m", "pool": "mean", "length": 32, "say": quiet}
    first = np.array(read_features(tiny(), toy_task(), tmp_path, **options).splits["dev"])
    [path] = tmp_path.glob("features/*/dev.npy")
    path.write_bytes(path.read_bytes()[:100])
    assert (read_features(tiny(), toy_task(), tmp_path, **options).splits["dev"] == first).all() and len(counted) == 3
    path.unlink()
    read_features(tiny(), toy_task(), tmp_path, **options)
    assert counted[2:] == ["toy classify: reading dev texts"] * 2  # train was left alone


def test_an_interrupt_leaves_no_half_file(tiny, tmp_path, counted):
    options = {"model": "m", "pool": "mean", "length": 32}

    def stop(stage, done, total, info):
        if "dev" in stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read_features(tiny(), toy_task(), tmp_path, **options, say=stop)
    [folder] = tmp_path.glob("features/*")
    assert sorted(path.name for path in folder.iterdir()) == ["features.json", "train.npy"]
    read_features(tiny(), toy_task(), tmp_path, **options, say=quiet)
    assert len(counted) == 3  # only dev again


def test_values_that_are_not_numbers_are_refused(tmp_path):
    encoder = make_encoder()
    with torch.no_grad():
        encoder.backbone.encoder.layer[1].output.dense.weight[0, 0] = float("nan")
    with pytest.raises(RunError, match="hidden state 2 "):
        read_features(encoder, toy_task(), tmp_path, model="m", pool="mean", length=32, say=quiet)
    assert not list(tmp_path.glob("features/*/*.npy"))


# The verb.


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_folder(make_encoder("bert", num_hidden_layers=2), folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two of the ten probing tasks, in a folder of any name."""
    folder = tmp_path_factory.mktemp("some data")
    task = toy_task(rows=120)
    for stem in ("past_present", "subj_number"):
        lines = []
        for mark, split in (("tr", task.split("train")), ("va", task.split("dev")), ("te", task.split("dev"))):
            lines += [f"{mark}\t{'AB'[y]}\t{text}\n" for text, y in zip(split.texts, split.labels, strict=True)]
        (folder / f"{stem}.txt").write_text("".join(lines))
    return folder


@pytest.fixture
def call(capsys, monkeypatch):
    monkeypatch.setattr(mixture, "STEPS", 40)

    def go(*words):
        capsys.readouterr()
        code = main([str(word) for word in words])
        return code, *capsys.readouterr()

    return go


def test_probe_from_end_to_end_and_again(call, model, data, tmp_path, monkeypatch):
    words = ["probe", model, "--tasks", "all", "--data", data, "--out", tmp_path / "out", "--seeds", "0,1"]
    code, out, error = call(*words)
    assert code == 0 and "tense" in out and "subj" in out and "selectivity" in out, error
    assert "60 of 60 texts scored on test are in train too" not in error
    result = json.loads((tmp_path / "out" / "probe.json").read_text())
    assert [entry["task"] for entry in result["tasks"]] == ["tense", "subj"] and result["layers"] == 2
    entry = result["tasks"][0]
    assert [layer["layer"] for layer in entry["layers"]["layers"]] == [0, 1, 2] and entry["scored_on"] == "test"
    best = max(layer["score"]["value"] for layer in entry["layers"]["layers"])
    assert f"{best:.1f} ±" in out and entry["layers"]["layers"][entry["layers"]["best"]]["score"]["value"] == best
    page = (tmp_path / "out" / "probe.md").read_text()
    assert "smallbert probe" in page and "![Layers against tasks](probe.png)" in page and f"{best:.1f} ±" in page
    assert (tmp_path / "out" / "probe.png").read_bytes()[:4] == b"\x89PNG"

    def never(*_, **__):
        raise AssertionError("computed again")

    for part in list(run.PARTS):
        monkeypatch.setitem(run.PARTS, part, never)
    code, again, _ = call(*words, "--json")
    kept = json.loads(again)
    assert code == 0 and kept["tasks"] == result["tasks"] and kept["command"].endswith("--json")


def test_other_settings_or_another_model_are_probed_anew(call, model, data, tmp_path, counted, monkeypatch):
    words = ["--tasks", "tense", "--data", data, "--out", tmp_path / "out", "--seeds", "0", "--parts", "layers"]
    assert call("probe", model, *words)[0] == 0 and len(counted) == 3
    assert call("probe", model, *words, "--examples", "60")[0] == 0 and len(counted) == 6
    save_folder(make_encoder("bert", seed=1, num_hidden_layers=2), tmp_path / "other")
    first = json.loads((tmp_path / "out" / "probe.json").read_text())
    assert call("probe", tmp_path / "other", *words, "--examples", "60")[0] == 0 and len(counted) == 9
    second = json.loads((tmp_path / "out" / "probe.json").read_text())
    assert first["model_fingerprint"] != second["model_fingerprint"] and first["tasks"] != second["tasks"]
    seen = []
    real = run.PARTS["layers"]
    monkeypatch.setitem(run.PARTS, "layers", lambda work: seen.append(list(work.seeds)) or real(work))
    assert call("probe", tmp_path / "other", *words[:-3], "1", *words[-2:], "--examples", "60")[0] == 0
    assert seen == [[1]] and len(counted) == 9  # other control labels, the same features


def test_own_files_and_attention(call, model, tmp_path):
    task = toy_task("regress", 60)
    rows = [
        f"{text},{label}" for text, label in zip(task.split("train").texts, task.split("train").labels, strict=True)
    ]
    (tmp_path / "mine.csv").write_text("\n".join(["words here,value", *rows]))
    words = ["probe", model, "--tasks", tmp_path / "mine.csv", "--text", "words here", "--label", "value"]
    code, out, error = call(*words, "--out", tmp_path / "out", "--seeds", "0", "--parts", "layers,heads,attention")
    assert code == 0 and "mine" in out and "Attention heads on mine" in out, error
    assert "this model has no task head; fine-tune it on the task first" in error
    entry = json.loads((tmp_path / "out" / "probe.json").read_text())["tasks"][0]
    assert entry["metric"] == "pearson" and entry["heads"]["why"] and len(entry["attention"]["to_sep"]) == 2
    assert (tmp_path / "out" / "heads-mine.png").is_file() and "mixture" not in entry


def test_another_part_is_put_beside_what_is_there_and_a_failed_one_spoils_nothing(call, model, data, tmp_path):
    words = ["probe", model, "--tasks", "tense", "--data", data, "--out", tmp_path / "out", "--seeds", "0"]
    assert call(*words, "--parts", "layers")[0] == 0
    page = (tmp_path / "out" / "probe.md").read_text()
    code, out, error = call(*words, "--parts", "heads")  # needs a task head, which this model has not
    assert code == 1 and "no task head" in error and "Written" not in out
    assert (tmp_path / "out" / "probe.md").read_text() == page
    assert call(*words, "--parts", "mixture")[0] == 0
    entry = json.loads((tmp_path / "out" / "probe.json").read_text())["tasks"][0]
    assert entry["layers"]["layers"] and entry["mixture"]["score"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tasks", "tnse"], "did you mean 'tense'"),
        (["--tasks", ","], "--tasks is empty"),
        (["--tasks", "tense", "--examples", "3"], "task tense has 3 rows to train a probe on; give 20 or more"),
        (["--tasks", "tense", "--pool", "max"], "--pool was given 'max'; write mean or first"),
        (["--tasks", "tense", "--parts", "layer"], "did you mean 'layers'"),
        (["--tasks", "tense", "--seeds", "a"], "--seeds was given 'a'"),
        (["--tasks", "depth"], "no files of task depth found"),
        (["--tasks", "squad"], "squad"),
    ],
)
def test_what_cannot_be_probed_is_said(call, model, data, tmp_path, words, said):
    code, out, error = call("probe", model, "--data", data, "--out", tmp_path / "out", *words)
    assert (code, out) == (2, "") and error.startswith("error: ") and error.count("\n") == 1
    assert said.lower() in error.lower() and not (tmp_path / "out").exists()


def test_other_folders_and_kinds_are_refused(call, model, data, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    code, _, error = call("probe", model, "--tasks", "tense", "--data", data, "--out", tmp_path / "full")
    assert code == 2 and "holds something other" in error
    code, _, error = call("probe", model, "--tasks", "all", "--data", tmp_path, "--out", tmp_path / "out")
    assert code == 2 and "sentence_length.txt" in error
    start = run.Start(make_encoder(), "tiny", "x")
    with pytest.raises(UserError, match="of kind tag"):
        run.probe(start, [toy_task("tag")], tmp_path / "out", say=quiet)
    with pytest.raises(UserError, match="two of the tasks are called past_present"):
        for name in "ab":
            (tmp_path / name).mkdir()
            (tmp_path / name / "past_present.csv").write_text("text,label\n" + "a,0\nb,1\n" * 20)
        run.read_tasks(f"{tmp_path}/a/past_present.csv,{tmp_path}/b/past_present.csv", None, None, print)


def test_without_a_tokenizer_or_scikit_learn(call, model, data, tmp_path, monkeypatch):
    bare = tmp_path / "bare"
    shutil.copytree(model, bare)
    for path in bare.glob("tokenizer*"):
        path.unlink()
    words = ["--tasks", "tense", "--data", data, "--out", tmp_path / "out"]
    code, _, error = call("probe", bare, *words)
    assert code == 2 and "tokenizer" in error
    monkeypatch.setattr("smallbert.probing.layers.find_spec", lambda name: None)
    code, _, error = call("probe", model, *words)
    assert code == 2 and "needs scikit-learn; run: pip install" in error and not (tmp_path / "out").exists()


def test_too_few_rows_for_many_labels_are_refused():
    with pytest.raises(UserError, match="give 140 or more"):
        check_rows(made_task(classes=70), np.arange(70))
    check_rows(made_task(), np.array([0, 1] * 10))


# The report.


def test_the_page_says_what_the_numbers_do_not(found):
    _, _, layers, mixed = found
    even = mixture.describe_shares(np.full((2, DEPTH), 1 / DEPTH), np.ones(DEPTH))
    entry = {"task": "a|b", "kind": "classify", "metric": "accuracy", "note": "a note", "chance": 50.0, "repeated": 7}
    entry |= {"rows": dict.fromkeys(("fit", "choose", "score"), 10), "scored_on": "test", "chosen": "chosen on dev"}
    entry |= {"layers": layers, "mixture": {**mixed, **even}}
    result = {"model": "m", "layers": DEPTH - 1, "pool": "mean", "seeds": [0, 1], "parts": ["layers", "mixture"]}
    result |= {"tasks": [entry], "command": "smallbert probe m"}
    said = warnings(result)
    assert said[0] == "a|b: 7 of 10 texts scored on test are in train too" and "nearly uniform" in said[1]
    page = render_markdown(result)
    assert all(warning in page for warning in said) and "a\\|b" in page and "(2.0 ± 0.0)" in page
    widths = {len(re.findall(r"(?<!\\)\|", line)) for line in page.splitlines() if line.startswith("| ")}
    assert widths == {12, DEPTH + 2}
    assert "probe.png" not in render_markdown(result, drawn=False)
    unsure = {**entry, "mixture": {**entry["mixture"], "cumulative": describe_ladder([[50, 51]], [2, 2])}}
    assert "above the noise" in warnings({**result, "tasks": [unsure]})[-1]
    stuck = {**entry, "mixture": {**entry["mixture"], "score": {"mean": 40.0, "sd": None}}}
    assert "scores below the best layer" in "".join(warnings({**result, "tasks": [stuck]}))


def test_the_picture_marks_the_best_layer_and_the_centre(found):
    from smallbert.report.probe_plot import draw

    _, _, layers, mixed = found
    entry = {"task": "made", "chance": 50.0, "layers": layers, "mixture": mixed}
    result = {"model": "m", "layers": DEPTH - 1, "pool": "first", "parts": ["layers", "mixture"], "tasks": [entry]}
    scores, shares = draw(result).axes
    [box] = scores.patches
    assert box.get_x() + box.get_width() / 2 == pytest.approx(KNOWS)
    written = [text.get_text() for text in scores.texts]
    assert all(f"{layer['score']['value']:.0f}" in written for layer in layers["layers"])
    assert shares.lines[0].get_xdata()[0] == pytest.approx(mixed["plain"]["gravity"]["mean"])
    assert len(draw({**result, "parts": ["layers"]}).axes) == 1


@pytest.mark.parametrize("tasks", [1, 2, 10])
@pytest.mark.parametrize("parts", [["layers"], ["layers", "mixture"]], ids=["layers", "both"])
def test_words_in_the_picture_neither_overlap_nor_leave_it(found, tasks, parts):
    from smallbert.report.probe_plot import draw

    _, _, layers, mixed = found  # of three layers, so that words are wider than the cells
    stuck = {**mixed, "plain": {**mixed["plain"], "says": "uniform"}}  # its heading is longer
    entries = [
        {"task": f"sentence MWMW {place}", "chance": 50.0, "layers": layers, "mixture": stuck} for place in range(tasks)
    ]
    figure = draw({"model": "m" * 30, "layers": DEPTH - 1, "pool": "first", "parts": parts, "tasks": entries})
    figure.set_dpi(200)
    figure.draw_without_rendering()
    texts = [*figure.texts]
    for axes in figure.axes:
        texts += [*axes.texts, *axes.get_xticklabels(), *axes.get_yticklabels()]
    boxes = [text.get_window_extent() for text in texts]
    assert all(box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1 for box in boxes)
    meeting = [
        (one.get_text(), other.get_text())
        for place, one in enumerate(texts)
        for number, other in enumerate(texts[:place])
        if boxes[place].overlaps(boxes[number])
    ]
    assert meeting == []
