"""Folders: Hugging Face reads what is called one of its own, broken ones are refused, saving loses nothing."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from toys import batch_of, is_same_state, pairs, run, scores_of, small, toy_task

from smallbert.errors import RunError, UserError
from smallbert.machine import files
from smallbert.model import folders, modelfiles
from smallbert.model.anatomy import FAMILIES
from smallbert.model.folders import AUTO, load_folder, save_folder
from smallbert.model.heads import KINDS
from smallbert.tiny import SHAPES, make_tokenizer

TASK = toy_task("pair", 24)


@pytest.fixture(scope="module")
def encoder():
    return run("head", small(), TASK).encoder


@torch.no_grad()
def their_scores(folder, task, kind):
    """What Hugging Face alone makes of the first texts of a task: its tokenizer, its model, its padding."""
    rows = task.split("dev").take(range(5))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = getattr(transformers, AUTO[kind]).from_pretrained(folder).eval()
    options = {"padding": True, "return_tensors": "pt", "is_split_into_words": kind == "tag"}
    inputs = tokenizer(rows.texts, rows.pairs, **options)
    if not FAMILIES[model.config.model_type].token_types:
        inputs.pop("token_type_ids", None)
    found = model(**inputs)
    scores = torch.stack([found.start_logits, found.end_logits], -1) if kind == "answer" else found.logits
    return scores, inputs["attention_mask"].bool(), model


@pytest.mark.parametrize(("kind", "family"), pairs(KINDS, SHAPES, every=3))
def test_hugging_face_reads_the_folder_by_itself(kind, family, tmp_path):
    task = TASK if kind == "classify" else toy_task(kind, 24)
    encoder = run("head", small(family), task).encoder
    assert save_folder(encoder, tmp_path / "model") == "huggingface"
    theirs, real, model = their_scores(tmp_path / "model", task, kind)
    ours = scores_of(encoder, task)
    if kind in ("tag", "answer"):
        ours, theirs = ours[real], theirs[real]
    torch.testing.assert_close(theirs, ours, atol=2e-5, rtol=1e-4)
    if task.labels:
        assert [model.config.id2label[number] for number in range(len(task.labels))] == list(task.labels)
        assert model.config.label2id == {label: number for number, label in enumerate(task.labels)}
    assert kind != "regress" or (model.config.num_labels == 1 and model.config.problem_type == "regression")
    assert "smallbert" not in (tmp_path / "model" / "config.json").read_text()  # needs nothing of ours elsewhere
    # And ours reads it as a plain Hugging Face folder too, without the history.
    (tmp_path / "model" / "encoder.json").unlink()
    assert torch.equal(scores_of(load_folder(tmp_path / "model"), task), scores_of(encoder, task))


def test_hugging_face_reads_an_encoder_without_a_head(tiny, family, tmp_path):
    encoder = tiny(family)
    assert save_folder(encoder, tmp_path / "model") == "huggingface"
    model = transformers.AutoModel.from_pretrained(tmp_path / "model").eval()
    batch = batch_of(encoder, TASK)
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    if FAMILIES[family].token_types:
        inputs["token_type_ids"] = batch.token_type_ids
    with torch.no_grad():
        found, ours = model(**inputs), encoder(batch)
    torch.testing.assert_close(found.last_hidden_state[batch.tokens()], ours[batch.tokens()], atol=2e-5, rtol=1e-4)
    loaded = load_folder(tmp_path / "model")
    assert is_same_state(loaded, encoder) and (loaded.pooler is None) == (encoder.pooler is None)


PLAIN_SHAPE = ["drop_layers(1)", "magnitude(0.5) + train(epochs=1, batch=24)", "head", "mark('x')"]
OWN_FORWARD = ["mix_layers", "mix_layers(init='plain')", "head(pool='mean')", "quantize", "quantize(activations=True)"]


@pytest.mark.parametrize("recipe", PLAIN_SHAPE)
def test_what_hugging_face_can_say_is_called_so(recipe, encoder, tmp_path):
    result = run(recipe, encoder, TASK).encoder
    assert save_folder(result, tmp_path / "model") == "huggingface"
    theirs, _, _ = their_scores(tmp_path / "model", TASK, "classify")
    torch.testing.assert_close(theirs, scores_of(result, TASK), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("recipe", OWN_FORWARD)
@pytest.mark.parametrize("kin", ["bert", "roberta", "modernbert"])
def test_what_hugging_face_would_read_wrongly_is_not_called_so(recipe, kin, tmp_path):
    result = run(recipe, run("head", small(kin), TASK).encoder, TASK).encoder
    modern_mean = kin == "modernbert" and "pool" in recipe  # its own classification model can pool by the mean
    assert save_folder(result, tmp_path / "model") == ("huggingface" if modern_mean else "smallbert")
    assert (tmp_path / "model" / "config.json").exists() == modern_mean
    assert json.loads((tmp_path / "model" / "encoder.json").read_text())["layout"] != "huggingface" or modern_mean
    if modern_mean:
        theirs, _, model = their_scores(tmp_path / "model", TASK, "classify")
        torch.testing.assert_close(theirs, scores_of(result, TASK), atol=2e-5, rtol=1e-4)
        assert model.config.classifier_pooling == "mean"
    else:
        with pytest.raises((OSError, ValueError)):
            transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")


def test_a_forward_that_differs_is_noticed(encoder, tmp_path, monkeypatch):
    """The same names and shapes with another forward: only running it can tell."""
    other = encoder.copy()
    other.head.activation = torch.nn.ReLU()
    assert save_folder(other, tmp_path / "model") == "smallbert"
    assert not (tmp_path / "model" / "config.json").exists()


# Models that Hugging Face wrote.


def hugging_face_model(family, kind, folder, labels=None, **options):
    """A folder as fine-tuning with Hugging Face leaves it."""
    settings = {**SHAPES[family], **({"id2label": dict(enumerate(labels))} if labels else {}), **options}
    if labels:
        settings["label2id"] = {label: number for number, label in enumerate(labels)}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **settings)
    model = getattr(transformers, AUTO[kind]).from_config(config).eval()
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    rewrite(folder / "tokenizer_config.json", model_input_names=["input_ids", "token_type_ids", "attention_mask"])
    return model


@pytest.mark.parametrize(("kind", "family"), pairs(["classify", "tag", "answer"], SHAPES, every=3))
def test_a_fine_tuned_model_keeps_its_head_and_labels(kind, family, tmp_path):
    labels = {"classify": list(TASK.labels), "tag": ["O", "GOOD", "BAD"], "answer": None}[kind]
    hugging_face_model(family, kind, tmp_path / "theirs", labels)
    task = TASK if kind == "classify" else toy_task(kind, 24)
    loaded = load_folder(tmp_path / "theirs")
    assert loaded.head.kind == kind and loaded.head.labels == (labels or [])
    theirs, real, _ = their_scores(tmp_path / "theirs", task, kind)
    ours = scores_of(loaded, task)
    if kind != "classify":
        ours, theirs = ours[real], theirs[real]
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)
    # It can go on as it is: no new head for this task, and our folder gives the same again.
    result = run("mark('x')", loaded, task).encoder
    assert len(result.history) == 2 and torch.equal(scores_of(result, task), scores_of(loaded, task))
    assert save_folder(result, tmp_path / "ours") == "huggingface"
    assert is_same_state(load_folder(tmp_path / "ours"), loaded)


@pytest.mark.parametrize("problem", ["regression", None])
def test_a_single_output_is_a_regression(problem, tmp_path):
    hugging_face_model("bert", "regress", tmp_path / "model", num_labels=1, problem_type=problem)
    loaded = load_folder(tmp_path / "model")
    assert loaded.head.kind == "regress" and loaded.head.labels == []
    task = toy_task("regress", 24)
    theirs, _, _ = their_scores(tmp_path / "model", task, "regress")
    torch.testing.assert_close(scores_of(loaded, task), theirs, atol=2e-5, rtol=1e-4)


def test_weights_are_those_of_the_file(tmp_path):
    """Hugging Face draws missing weights at random without an error: nothing may be missing, however it is saved."""
    model = hugging_face_model("bert", "classify", tmp_path / "whole", ["a", "b"])
    model.save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    one, other = load_folder(tmp_path / "whole"), load_folder(tmp_path / "shards")
    assert is_same_state(one, other) and other.tokenizer is None
    written = load_file(tmp_path / "whole" / "model.safetensors")
    assert torch.equal(one.get_parameter("heads.task.dense.weight"), written["bert.pooler.dense.weight"])
    assert torch.equal(one.head.out.weight, written["classifier.weight"])
    model.half().save_pretrained(tmp_path / "half")
    half = load_folder(tmp_path / "half")
    assert {tensor.dtype for tensor in half.state_dict().values() if tensor.is_floating_point()} == {torch.float32}


def test_a_language_model_is_loaded_without_a_head(tmp_path):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("bert", **SHAPES["bert"])
    model = transformers.AutoModelForMaskedLM.from_config(config)
    model.save_pretrained(tmp_path / "model")
    loaded = load_folder(tmp_path / "model")
    assert not loaded.heads and loaded.pooler is None  # it has none, and none is made up
    assert torch.equal(loaded.backbone.embeddings.word_embeddings.weight, model.bert.embeddings.word_embeddings.weight)


# Folders that cannot be used.


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def lose(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def rewrite(file: Path, **values) -> None:
    about = json.loads(file.read_text())
    file.write_text(json.dumps({name: value for name, value in (about | values).items() if value is not None}))


DAMAGE = {
    "cut weights": lambda folder: cut(folder / "model.safetensors"),
    "empty weights": lambda folder: (folder / "model.safetensors").write_bytes(b""),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "a weight less": lambda folder: lose(folder, lambda t: t.pop(sorted(t)[3])),
    "a weight of another shape": lambda folder: lose(folder, lambda t: t.update({sorted(t)[3]: torch.zeros(3)})),
    "text for weights": lambda folder: (folder / "model.safetensors").write_text("version https://git-lfs.github.com"),
}
OURS = {
    **DAMAGE,
    "a weight more": lambda folder: lose(folder, lambda t: t.update({"more": torch.zeros(3)})),
    "newer": lambda folder: rewrite(folder / "encoder.json", format=99),
    "cut JSON": lambda folder: cut(folder / "encoder.json"),
    "empty JSON": lambda folder: (folder / "encoder.json").write_text("{}"),
    "a list": lambda folder: (folder / "encoder.json").write_text("[]"),
    "no config": lambda folder: rewrite(folder / "encoder.json", config=None),
    "unknown step": lambda folder: rewrite(folder / "encoder.json", history=[{"step": "shrink_rays", "plan": {}}]),
    "nothing": lambda folder: [file.unlink() for file in folder.iterdir()],
    "a word for the format": lambda folder: rewrite(folder / "encoder.json", format="x"),
    "a config of another kind": lambda folder: rewrite(folder / "encoder.json", config=[]),
    "a number for the history": lambda folder: rewrite(folder / "encoder.json", history=5),
    "a history of words": lambda folder: rewrite(folder / "encoder.json", history=["head"]),
    "a plan that says nothing": lambda folder: rewrite(
        folder / "encoder.json", history=[{"step": "sparse", "plan": {}}]
    ),
    "a plan for what is not there": lambda folder: rewrite(
        folder / "encoder.json", history=[{"step": "quantize", "plan": {"modules": ["backbone.nowhere"]}}]
    ),
}
THEIRS = {
    **DAMAGE,
    "cut JSON": lambda folder: cut(folder / "config.json"),
    "unknown family": lambda folder: rewrite(folder / "config.json", model_type="t5", architectures=["T5Model"]),
    "no family": lambda folder: rewrite(folder / "config.json", model_type="warpdrive"),
}


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as error:
        load_folder(folder)
    sentence = str(error.value)
    assert "\n" not in sentence and len(sentence) > 20
    return sentence


@pytest.mark.parametrize("layout", ["huggingface", "smallbert"])
@pytest.mark.parametrize("damage", list(OURS))
def test_a_broken_folder_of_ours_is_refused_in_one_sentence(damage, layout, encoder, tmp_path):
    result = encoder if layout == "huggingface" else run("quantize", encoder, TASK).encoder
    assert save_folder(result, tmp_path / "model") == layout
    OURS[damage](tmp_path / "model")
    sentence = refused(tmp_path / "model")
    assert "model" in sentence or "shrink_rays" in sentence


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer_that_cannot_be_read_is_not_called_missing(file, encoder, tmp_path):
    save_folder(encoder, tmp_path / "model")
    (tmp_path / "model" / file).write_text("{ broken")
    with pytest.raises(UserError, match=r"^the tokenizer in .* cannot be read .*; put tokenizer\.json and"):
        load_folder(tmp_path / "model")


def test_what_a_damaged_history_led_to_stays_behind_the_sentence(encoder, tmp_path):
    save_folder(encoder, tmp_path / "model")
    rewrite(tmp_path / "model" / "encoder.json", history=[{"step": "quantize", "plan": {}}])
    with pytest.raises(UserError, match=r"model/encoder.json describes .* \(KeyError: 'modules'\); save or") as said:
        load_folder(tmp_path / "model")
    assert isinstance(said.value.__cause__, KeyError)


@pytest.mark.parametrize("damage", list(THEIRS))
def test_a_broken_folder_of_theirs_is_refused_in_one_sentence(damage, tmp_path):
    hugging_face_model("bert", "classify", tmp_path / "model", ["a", "b"])
    THEIRS[damage](tmp_path / "model")
    assert str(tmp_path / "model") in refused(tmp_path / "model") or "family" in damage


def test_folders_that_hold_no_model(tmp_path):
    (tmp_path / "empty").mkdir()
    assert "holds no model" in refused(tmp_path / "empty")
    assert "holds no model" in refused(tmp_path / "missing")


# A full disk.


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def full_for_safetensors(*_, **__):
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def full_for_tokenizers(*_, **__):
    raise Exception("No space left on device (os error 28)")  # what the tokenizers library raises


BREAKS = {
    "weights": (modelfiles, "save_file", full_for_safetensors),
    "weights as a file": (modelfiles, "save_file", full),
    "json": (folders, "write_json", full),
    "sync": (files, "_sync", full),
    "config": (transformers.PretrainedConfig, "save_pretrained", full),
    "tokenizer": (transformers.PreTrainedTokenizerFast, "save_pretrained", full_for_tokenizers),
}


@pytest.mark.parametrize("where", list(BREAKS))
def test_a_full_disk_leaves_the_old_folder_whole(where, encoder, tmp_path, monkeypatch):
    save_folder(encoder, tmp_path / "model")
    before = {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()}
    other = run("drop_layers(1)", encoder, TASK).encoder
    with monkeypatch.context() as patch:
        patch.setattr(*BREAKS[where])
        with pytest.raises(RunError, match=r"cannot write .*No space left on device") as error:
            save_folder(other, tmp_path / "model")
    assert "\n" not in str(error.value)
    assert {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]  # and nothing half-written beside it
    save_folder(other, tmp_path / "model")
    assert is_same_state(load_folder(tmp_path / "model"), other)


def test_saving_over_a_folder_leaves_nothing_of_it(encoder, tmp_path):
    save_folder(encoder, tmp_path / "model")
    (tmp_path / "model" / "old.txt").write_text("old")
    assert save_folder(run("quantize", encoder, TASK).encoder, tmp_path / "model") == "smallbert"
    names = {file.name for file in (tmp_path / "model").iterdir()}
    assert {"old.txt", "config.json"}.isdisjoint(names) and {"model.safetensors", "encoder.json"} <= names
    shutil.copytree(tmp_path / "model", tmp_path / "copy")
    assert is_same_state(load_folder(tmp_path / "copy"), load_folder(tmp_path / "model"))


def test_a_model_of_one_token_type_takes_a_tokenizer_of_two(tmp_path):
    encoder = run("train(epochs=1)", small("roberta", type_vocab_size=1), TASK, judge=False).encoder
    assert batch_of(encoder, TASK).token_type_ids.max() == 1 and torch.isfinite(scores_of(encoder, TASK)).all()
    assert save_folder(encoder, tmp_path / "model") == "huggingface"
    theirs, _, _ = their_scores(tmp_path / "model", TASK, "classify")
    torch.testing.assert_close(theirs, scores_of(encoder, TASK), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_all_files_of_a_folder_can_be_read_by_the_same_people(tmp_path, mask):
    before = os.umask(mask)
    try:
        save_folder(small(layers=1), tmp_path / "model")
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "model").iterdir()}
    assert "model.safetensors" in modes and set(modes.values()) == {0o666 & ~mask}
