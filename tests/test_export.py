"""ONNX files: same scores for every family and structure, few bits stay few, integers where inputs are rounded."""

import ast
import io
import json
import re
import subprocess
import sys
from contextlib import redirect_stdout

import numpy as np
import pytest
import torch
from toys import run, small, toy_task

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")
import onnx

from smallbert.errors import RunError, UserError
from smallbert.export import export_hugging_face, export_int8, export_onnx, make_int8, write_onnx
from smallbert.measuring.disk import measure_bytes
from smallbert.model.folders import load_folder, probe_batch, save_folder
from smallbert.model.quantised import stored_parts
from smallbert.model.zeros import sparse_linears
from smallbert.onnxfile import check
from smallbert.onnxfile.check import EXACT, OWN, ROUNDED, compare, must_agree, open_session, varied_batches
from smallbert.onnxfile.narrow import narrow
from smallbert.onnxfile.sentences import varied_texts
from smallbert.onnxfile.store import arithmetic
from smallbert.onnxfile.trace import Plain, named_inputs, trace
from smallbert.texts.data import longest_input

TASK = toy_task()
slow = pytest.mark.slow  # a trace takes seconds: one of each kind is enough for every day


def written(encoder, folder):
    """The graph of an encoder, and how far its scores are from the encoder's."""
    notes = write_onnx(encoder, folder / "model.onnx")
    found = compare(encoder, open_session(folder / "model.onnx"), varied_batches(encoder))
    return onnx.load(folder / "model.onnx"), found, notes


def kinds(model):
    return [node.op_type for node in model.graph.node]


def bytes_by_type(model):
    found = {}
    for one in model.graph.initializer:
        found[one.data_type] = found.get(one.data_type, 0) + len(one.raw_data)
    return found


def test_a_plain_encoder(tmp_path):
    check_family(small(layers=1), tmp_path)


@slow
def test_every_family(family, tmp_path):
    check_family(small(family), tmp_path)


def check_family(encoder, tmp_path):
    """Same scores at every size, and nothing else in the file."""
    model, found, _ = written(run("head", encoder, TASK).encoder, tmp_path)
    assert found["checked"] >= 64 and found["difference"] < 1e-5 and found["same"] == 1
    assert [size.dim_param for size in model.graph.input[0].type.tensor_type.shape.dim] == ["batch", "length"]
    assert not any(node.metadata_props or node.doc_string for node in model.graph.node)  # paths of this machine


# What each stands for in a file: the type of its codes, and how many bytes of real numbers may be left.
KEPT = {
    "quantize(8)": onnx.TensorProto.INT8,
    "quantize(8, activations='static')": onnx.TensorProto.INT8,
    "quantize(4, scope='group', group=6, symmetric=False)": onnx.TensorProto.UINT4,
    "quantize(2, scope='tensor')": onnx.TensorProto.INT4,
    "codebook(3)": onnx.TensorProto.UINT4,
}


DAILY = ("quantize(4, scope='group', group=6, symmetric=False)",)


@pytest.mark.parametrize("recipe", [one if one in DAILY else pytest.param(one, marks=slow) for one in KEPT])
def test_few_bits_stay_few(recipe, tmp_path):
    encoder = run(f"head | mix_layers | {recipe}", small(layers=1, hidden_size=24, intermediate_size=48), TASK).encoder
    model, found, notes = written(encoder, tmp_path)
    parts = stored_parts(encoder)
    numbers = sum(part.shape[0] * part.shape[1] for part in parts.values())
    sizes = bytes_by_type(model)
    assert found["difference"] < 1e-5 and f"{len(parts)} of {len(parts)} matrices" in notes[-1]
    wanted = numbers * (0.5 if KEPT[recipe] != onnx.TensorProto.INT8 else 1)
    assert wanted <= sizes[KEPT[recipe]] < 1.1 * wanted
    assert ("of 4 and 8 bits" in notes[-1]) == (recipe in ("quantize(2, scope='tensor')", "codebook(3)"))
    assert not any(len(one.dims) == 2 and min(one.dims) > 8 for one in model.graph.initializer if one.data_type == 1)
    assert ("QuantizeLinear" in kinds(model)) == ("static" in recipe)


def spread_of(encoder):
    """How far scores of different texts are apart, which a difference is to be small against."""
    scores = torch.cat([Plain(encoder)(**named_inputs(encoder, batch)) for batch in varied_batches(encoder)])
    return float(scores.detach().std(0).max())


def test_rounded_inputs_multiply_integers(tmp_path):
    encoder = run("head | quantize(8, activations=True)", small(layers=1), TASK).encoder
    model, found, _ = written(encoder, tmp_path)
    assert kinds(model).count("MatMulInteger") == 7  # six a layer, one in the head
    assert kinds(model).count("QuantizeLinear") < 7  # q, k and v share one
    assert found["difference"] < 1e-6 < 0.05 * spread_of(encoder) and found["same"] == 1


@pytest.mark.parametrize("centre", [True, pytest.param(False, marks=slow)])
def test_every_layer_with_fixed_ranges_runs_in_whole_numbers(centre, tmp_path):
    import onnxruntime

    recipe = f"head | quantize(8, 'static', symmetric={centre}, smooth='search', texts=16)"
    encoder = run(recipe, small(layers=1), TASK).encoder
    _, found, _ = written(encoder, tmp_path)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    onnxruntime.InferenceSession(next(tmp_path.glob("model*.onnx")), options)
    run_as = kinds(onnx.load(tmp_path / "optimised.onnx"))
    assert run_as.count("MatMulIntegerToFloat") == 7 and "FusedGemm" not in run_as
    assert run_as.count("Gemm") == 1  # what gives the scores stays real
    assert found["difference"] < 1e-5


@pytest.mark.parametrize(("inputs", "bits"), [("True", 8), pytest.param("'static'", 4, marks=slow)])
def test_weights_off_centre_multiply_integers(inputs, bits, tmp_path):
    encoder = run(f"head | quantize({bits}, {inputs}, symmetric=False)", small(layers=1), TASK).encoder
    model, found, notes = written(encoder, tmp_path)
    assert found["difference"] < 1e-5 and found["same"] == 1 and not any("not rounded" in note for note in notes)
    assert arithmetic(encoder).startswith("int8")
    assert kinds(model).count("MatMulInteger") == (7 if inputs == "True" else 0)
    weights = [one for one in model.graph.initializer if one.data_type == onnx.TensorProto.UINT8 and len(one.dims) == 2]
    assert len(weights) == 7


@pytest.mark.parametrize("inputs", ["'static'", pytest.param("True", marks=slow)])
def test_factors_of_inputs_go_along(inputs, tmp_path):
    recipe = f"head | quantize(8, {inputs}, smooth='search', texts=16)"
    encoder = run(recipe, small(layers=1), TASK).encoder
    parts = [part for part in stored_parts(encoder).values() if getattr(part, "input_factor", None) is not None]
    assert len(parts) == 6 and all((part.input_factor != 1).any() for part in parts)
    model, found, _ = written(encoder, tmp_path)
    assert found["difference"] < 1e-5 and found["same"] == 1
    factors = [one.name for one in model.graph.initializer if one.name.endswith("input factor")]
    assert len(factors) == 5  # q, which at the end reads first tokens only; k and v; up; down; the head


def test_int8_keeps_ranges_that_were_learned(tmp_path):
    recipe = "head | quantize_aware(4, activations='static', scope='group', group=4) + train(epochs=1, batch=8)"
    encoder = run(recipe, small(layers=1), TASK).encoder
    eight = make_int8(encoder)
    learned = {name: part.input_range for name, part in stored_parts(encoder).items() if hasattr(part, "input_range")}
    assert learned and arithmetic(eight) == "int8"
    for name, found in learned.items():
        assert torch.equal(eight.get_submodule(name).input_range, found)
        torch.testing.assert_close(
            eight.get_submodule(name).real(), encoder.get_submodule(name).real(), atol=0.02, rtol=0
        )
    smoothed = run("head | quantize(4, 'static', 'group', group=4, smooth='search')", small(layers=1), TASK).encoder
    save_folder(smoothed, tmp_path / "model")
    with pytest.raises(UserError, match="fixed ranges of its inputs already"):
        export_int8(tmp_path / "model", tmp_path / "out", calibrate=TASK)
    eight = make_int8(run("head", smoothed, TASK).encoder)  # a new head has none, and stays real
    assert "int8 and float32" in arithmetic(eight) and type(eight.head.dense) is torch.nn.Linear
    eight = make_int8(smoothed)
    name = "heads.task.dense"
    assert torch.equal(eight.get_submodule(name).input_factor, smoothed.get_submodule(name).input_factor)
    assert eight.get_submodule(name).is_whole


def test_zeros_that_are_not_stored_are_rounded_too(tmp_path):
    recipe = "head | prune(0.1) | sparse | quantize(8, activations=True)"
    encoder = run(recipe, small(layers=1), TASK).encoder
    assert sparse_linears(encoder) and "float32" in arithmetic(encoder)
    save_folder(encoder, tmp_path / "model")
    found = export_int8(tmp_path / "model", tmp_path / "out", max_difference=1.0)
    assert found["precision"] == "int8"
    assert kinds(onnx.load(tmp_path / "out" / "model.onnx")).count("MatMulInteger") == 7


@slow
def test_rounded_inputs_know_no_company(tmp_path):
    encoder = run("head | quantize(8, activations=True)", small(layers=2), TASK).encoder
    write_onnx(encoder, tmp_path / "model.onnx")
    answer = open_session(tmp_path / "model.onnx")
    inputs = {name: one.numpy() for name, one in named_inputs(encoder, probe_batch(encoder, (9, 4, 9, 6))).items()}
    together = answer(inputs)
    for row, mask in enumerate(inputs["attention_mask"]):
        alone = answer({name: one[row : row + 1, : mask.sum()] for name, one in inputs.items()})
        assert np.abs(together[row] - alone[0]).max() < 1e-6


@slow
def test_equal_matrices_keep_their_own_ranges(tmp_path):
    encoder = small(layers=2).copy()
    first, second = encoder.backbone.encoder.layer
    second.load_state_dict(first.state_dict())
    encoder = run("head | quantize(8, activations='static')", encoder, TASK).encoder
    parts = stored_parts(encoder)
    ranges = dict.fromkeys(part.input_range for part in parts.values() if hasattr(part, "input_range"))
    with torch.no_grad():
        for number, one in enumerate(ranges):
            one.mul_(0.2 + 0.1 * number)  # far apart
    _, found, notes = written(encoder, tmp_path)
    assert found["difference"] < 1e-5 and f"{len(parts)} of {len(parts)} matrices" in notes[-1]


BOTTLENECK = "bottleneck(layers=2, width=16, inner=8, heads=2, ffns=2, ffn=16, embed=8)"
RARE = ("stride(3)", BOTTLENECK, "pool_layers", "gate_layers", "connect_layers | drop_layers(1)")


@pytest.mark.parametrize("recipe", ["sparse", "stride", *(pytest.param(one, marks=slow) for one in RARE)])
def test_structures(recipe, tmp_path):
    encoder = small(layers=1 if recipe == "sparse" else 2)
    if recipe == "sparse":
        encoder = encoder.copy()
        with torch.no_grad():
            for layer in encoder.backbone.encoder.layer:
                layer.output.dense.weight.mul_(torch.rand_like(layer.output.dense.weight) < 0.1)
    _, found, notes = written(run(f"head | {recipe}", encoder, TASK).encoder, tmp_path)
    assert found["difference"] < 1e-5 and bool(notes) == (recipe == "sparse")


@pytest.mark.parametrize("kind", ["pair", pytest.param("classify", marks=slow), pytest.param("tag", marks=slow)])
def test_an_lstm_at_any_size(kind, tmp_path):
    encoder = run("head | lstm(width=6, layers=2, inner=8)", small(layers=1), toy_task(kind)).encoder
    model, found, _ = written(encoder, tmp_path)
    assert kinds(model).count("LSTM") == 4 and found["checked"] >= 64 and found["difference"] < 1e-6
    assert [size.dim_param for size in model.graph.input[0].type.tensor_type.shape.dim] == ["batch", "length"]


def test_the_last_layer_sees_first_tokens_only():
    encoder = run("head", small(layers=2), TASK).encoder
    model = trace(encoder)
    wide = [node.output[0] for node in model.graph.node if node.op_type == "Gelu"]
    assert narrow(model) >= 12
    model.graph.output.extend(onnx.helper.make_tensor_value_info(name, 1, None) for name in wide)
    import onnxruntime

    session = onnxruntime.InferenceSession(model.SerializeToString())
    batch = varied_batches(encoder)[6]
    inputs = {name: one.numpy() for name, one in named_inputs(encoder, batch).items()}
    scores, first, last = session.run(None, inputs)
    assert first.shape[1] == batch.longest and last.shape[1] == 1
    with torch.no_grad():
        assert np.allclose(scores, encoder(batch).numpy(), atol=1e-6)


@slow
def test_tags_need_every_token():
    tagging = run("head", small(layers=1), toy_task("tag")).encoder
    assert narrow(trace(tagging)) == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A trained toy model."""
    place = tmp_path_factory.mktemp("export") / "toy"
    save_folder(run("finetune(epochs=12, lr=5e-3, batch=8)", small(layers=1), TASK).encoder, place)
    return place


@pytest.mark.parametrize("ranges", ["by token", pytest.param("fixed", marks=slow)])
def test_int8(ranges, folder, tmp_path):
    found = export_int8(folder, tmp_path / "out", TASK, calibrate=TASK if ranges == "fixed" else None)
    assert found["precision"] == "int8" and found["same"] > 0.8 and found["sway"] <= 0.5
    every = kinds(onnx.load(tmp_path / "out" / "model.onnx"))
    assert ("MatMulInteger" in every) == ("ReduceMin" in every) == (ranges == "by token")
    assert ("DequantizeLinear" in every) == (ranges == "fixed")


@slow
def test_what_rounds_by_token_can_be_calibrated(tmp_path):
    save_folder(run("head | quantize(8, activations=True)", small(layers=1), TASK).encoder, tmp_path / "model")
    found = export_int8(tmp_path / "model", tmp_path / "out", calibrate=TASK)
    every = kinds(onnx.load(tmp_path / "out" / "model.onnx"))
    assert found["precision"] == "int8" and "DequantizeLinear" in every and "MatMulInteger" not in every
    save_folder(run("head | quantize(8, activations='static')", small(layers=1), TASK).encoder, tmp_path / "fixed")
    with pytest.raises(UserError, match="fixed ranges of its inputs already"):
        export_int8(tmp_path / "fixed", tmp_path / "other", calibrate=TASK)


@pytest.mark.parametrize(
    ("recipe", "said"),
    {
        "mark('a')": "float32",
        "quantize(8)": "float32 products of 8-bit weights",
        "quantize(8, activations=True)": "int8",
        "quantize(8, activations='static')": "int8",
        "quantize(4, scope='group', group=4, activations=True)": "float32 products of 4-bit weights",
        "quantize(4, scope='group', activations='static')": "float32 products of 4-bit weights and 8-bit inputs",
        "quantize(4, activations=True)": "int8 products of 4- to 8-bit weights",
        "ternary(embeddings=8)": "float32 products of 4- to 8-bit weights",
        "codebook(3)": "float32 products of 4-bit weights",
    }.items(),
)
def test_what_is_multiplied_is_said(recipe, said):
    assert arithmetic(run(f"head | {recipe}", small(layers=1), TASK).encoder) == said


@pytest.mark.parametrize(
    ("recipe", "int8", "wanted"),
    [
        ("quantize(8)", False, EXACT),
        pytest.param("quantize(8, activations='static')", False, OWN, marks=slow),
        pytest.param("quantize(8, activations=True)", True, OWN, marks=slow),
        pytest.param("mark('a')", True, ROUNDED, marks=slow),
    ],
)
def test_a_file_that_rounds_is_not_asked_for_every_digit(recipe, int8, wanted, tmp_path, monkeypatch):
    """Float noise moves inputs by a step, in scores that are larger than a toy's."""
    bounds = []
    monkeypatch.setattr(check, "must_agree", lambda found, bound, asked: bounds.append(bound))
    save_folder(run(f"head | {recipe}", small(layers=1), TASK).encoder, tmp_path / "model")
    (export_int8 if int8 else export_onnx)(tmp_path / "model", tmp_path / "out")
    assert bounds == [wanted]


def test_how_far_a_file_may_be():
    found = {"difference": 0.02, "sway": 0.008, "same": 1.0, "upheld": 1.0}
    must_agree(found, OWN, None)
    must_agree(found, EXACT, 0.05)
    with pytest.raises(RunError, match=r"other scores .* has --max-difference"):
        must_agree(found, EXACT, None)
    with pytest.raises(RunError, match="other probabilities"):
        must_agree(found | {"sway": 0.2}, OWN, None)
    with pytest.raises(RunError, match="only 90%"):
        must_agree(found | {"same": 0.9}, OWN, None)
    must_agree(found | {"same": 0.85}, ROUNDED, None)  # where others were nearly tied
    with pytest.raises(RunError, match="only 90% are the encoder's or were nearly tied"):
        must_agree(found | {"same": 0.85, "upheld": 0.9}, ROUNDED, None)
    with pytest.raises(RunError, match="only 20%"):  # who allows less than usual still wants the same predictions
        must_agree(found | {"sway": 0.4, "same": 0.2, "upheld": 0.3}, ROUNDED, 0.45)
    must_agree(found | {"sway": 0.4, "same": 0.2, "upheld": 0.3}, ROUNDED, 0.5)


@slow
def test_int8_that_says_something_else_is_not_kept(folder, tmp_path):
    with pytest.raises(RunError, match="other probabilities"):
        export_int8(folder, tmp_path / "int8", max_difference=1e-9)
    assert not list(tmp_path.iterdir())


def test_what_a_file_is_tried_on():
    """Sixty-four different real texts and more, from an empty one to one that is cut."""
    texts = varied_texts(64)
    assert len(set(texts)) >= 64
    encoder = small(layers=1)
    for task in (None, TASK):
        rows = [
            ids[mask > 0]
            for batch in varied_batches(encoder, task)
            for ids, mask in zip(batch.input_ids, batch.tokens(), strict=True)
        ]
        ends = {(int(row[0]), int(row[-1])) for row in rows}
        assert ends == {(encoder.tokenizer.cls_token_id, encoder.tokenizer.sep_token_id)}  # nothing drawn at random
        assert len(rows) >= 64 + (24 if task else 0) and len({len(row) for row in rows}) > 20
        types = torch.cat([batch.token_type_ids.flatten() for batch in varied_batches(encoder, task)])
        assert set(types.tolist()) == {0, 1}  # pairs among them
        assert min(map(len, rows)) == 2 and max(map(len, rows)) == longest_input(encoder)


def test_what_was_sure_is_not_upheld_when_it_turns(folder):
    encoder = load_folder(folder)
    plain = Plain(encoder)

    def turn(inputs):
        with torch.inference_mode():
            return plain(**{name: torch.from_numpy(one) for name, one in inputs.items()}).flip(-1).numpy()

    found = compare(encoder, turn, varied_batches(encoder))
    with torch.inference_mode():
        seen = torch.cat([plain(**named_inputs(encoder, batch)) for batch in varied_batches(encoder)]).softmax(-1)
    assert found["upheld"] == pytest.approx(float(((seen[:, 0] - seen[:, 1]).abs() <= 0.1).float().mean()))
    assert found["same"] == 0 and found["upheld"] < 0.9


def test_what_a_check_refuses():
    encoder = run("head", small(layers=1), TASK).encoder
    batches = varied_batches(encoder)[:3]

    def answers(change):
        plain = Plain(encoder.eval())

        def answer(inputs):
            with torch.no_grad():
                return change(plain(**{name: torch.from_numpy(one) for name, one in inputs.items()})).numpy()

        return compare(encoder, answer, batches)

    must_agree(answers(lambda scores: scores + 1e-5), EXACT, None)
    with pytest.raises(RunError, match="the export gives scores that are not finite"):
        answers(lambda scores: scores * float("nan"))
    flipped = answers(lambda scores: scores.flip(-1))
    assert flipped["sway"] < 0.5 and flipped["same"] == 0
    assert flipped["upheld"] == 1  # nothing was trained, so that all are nearly tied
    with pytest.raises(RunError, match="only 0% are the encoder's"):
        must_agree(flipped, ROUNDED, None)
    with torch.no_grad():
        encoder.head.out.bias.fill_(float("nan"))
    with pytest.raises(RunError, match="the model gives scores that are not finite"):
        answers(lambda scores: scores)


@slow
def test_what_was_rounded_by_fixed_ranges_is_the_same_there(tmp_path):
    recipe = "head | quantize(8, activations='static', symmetric=False)"
    save_folder(run(recipe, small(layers=1), TASK).encoder, tmp_path / "model")
    assert export_onnx(tmp_path / "model", tmp_path / "out")["difference"] < 1e-4


def test_a_folder_that_holds_something_is_left_alone(folder, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="already holds"):
        export_onnx(folder, tmp_path / "full")


def test_the_snippet_runs_without_torch(folder, tmp_path):
    export_onnx(folder, tmp_path / "out")
    snippet = re.search(r"```python\n(.*?)```", (tmp_path / "out" / "README.md").read_text(), re.DOTALL)[1]
    assert len(snippet.strip().splitlines()) <= 15
    blocked = "import sys\nfor name in ('torch', 'transformers', 'smallbert'):\n    sys.modules[name] = None\n"
    ran = subprocess.run(
        [sys.executable, "-c", blocked + snippet], cwd=tmp_path / "out", capture_output=True, text=True
    )
    encoder = load_folder(folder)
    encoded = encoder.tokenizer(["a lovely film", "a dull one, but short"], padding=True, return_tensors="pt")
    with torch.no_grad():
        rows = Plain(encoder)(encoded["input_ids"], encoded["attention_mask"]).argmax(-1)
    assert ran.stdout.strip() == str([encoder.head.labels[row] for row in rows]), ran.stderr
    about = json.loads((tmp_path / "out" / "export.json").read_text())
    needed = [file for file in (tmp_path / "out").iterdir() if file.name != "README.md"]
    assert about["bytes"] == sum(file.stat().st_size for file in needed)  # as cards count them
    assert about["checked"] >= 64 and about["kind"] == "classify" and about["labels"] == ["bad", "good"]


def test_a_plain_folder_is_compared_by_transformers_own_forward(tmp_path, monkeypatch):
    save_folder(run("head", small(layers=1), TASK).encoder, tmp_path / "model")
    found = export_hugging_face(tmp_path / "model", tmp_path / "plain", task=TASK)
    assert found["checked"] >= 64 + 24 and found["difference"] < 1e-5 and found["same"] == 1
    assert "config.json" in found["files"] and "encoder.json" not in found["files"]
    assert found["bytes"] == measure_bytes(tmp_path / "plain")["total"]
    page = (tmp_path / "plain" / "README.md").read_text(encoding="utf-8")
    assert f"on {found['checked']} texts" in page
    monkeypatch.chdir(tmp_path / "plain")
    said = io.StringIO()
    with redirect_stdout(said):
        exec(page.split("```python\n")[1].split("```")[0], {})
    assert set(ast.literal_eval(said.getvalue())) <= {"bad", "good"}
    opened = check.open_hugging_face
    monkeypatch.setattr(check, "open_hugging_face", lambda *of: lambda inputs: opened(*of)(inputs) + 0.01)
    with pytest.raises(RunError, match="other scores"):
        export_hugging_face(tmp_path / "model", tmp_path / "other")
    assert not (tmp_path / "other").exists()
    export_hugging_face(tmp_path / "model", tmp_path / "other", max_difference=0.1)


@pytest.mark.parametrize(
    ("recipe", "part"),
    {
        "quantize(8)": "weights in few bits",
        "mix_layers": "a mixture of layers",
        "mix_layers | quantize(8)": "weights in few bits and a mixture of layers",
        "connect_layers": "connections between layers",
        "stride": "joined tokens",
        "lstm(width=6, layers=1, inner=8)": "an LSTM instead of layers",
        "pool_layers": "a head that reads all layers",
        "head(pool='mean')": "a head that reads the mean of all tokens",
    }.items(),
)
def test_what_transformers_does_not_know_is_named(recipe, part, tmp_path):
    save_folder(run(f"head | {recipe}", small(layers=1), TASK).encoder, tmp_path / "model")
    with pytest.raises(UserError, match=f"model has {part}, which transformers does not support, so it cannot"):
        export_hugging_face(tmp_path / "model", tmp_path / "plain")
    assert not (tmp_path / "plain").exists()
