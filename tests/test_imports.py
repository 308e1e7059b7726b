"""What an answer waits for: no verb imports what it does not need, each looked at in a fresh process."""

import subprocess
import sys

import pytest
from invented import invented_card

from smallbert.making.run import run_recipe
from smallbert.measuring.shelf import save_card
from smallbert.model.folders import save_folder
from smallbert.tiny import make_encoder, make_task

COMPILER = {"torch._dynamo", "torch._inductor", "sympy"}
MODELS = COMPILER | {"transformers", "sklearn", "pandas", "scipy", "onnx", "onnxruntime"}
ALL = MODELS | {"torch", "numpy", "matplotlib", "huggingface_hub"}


@pytest.fixture
def folder(tmp_path):
    """A folder with cards."""
    for seed in (1, 2):
        save_card({**invented_card("drop_layers(3) | finetune"), "seed": seed}, tmp_path / "cards")
    return tmp_path


def test_an_encoder_that_another_process_wrote_runs(tmp_path):
    """Attention and what the compiler is kept from are told to torch and transformers once in each process."""
    path = tmp_path / "encoder.pt"
    make = "from smallbert.tiny import make_encoder, make_task; from smallbert import run_recipe; import torch; "
    make += f"torch.save(run_recipe('head | quantize(8)', make_encoder(), make_task(8, 4)).encoder, {str(path)!r})"
    use = f"import torch; encoder = torch.load({str(path)!r}, weights_only=False); "
    use += "from smallbert.model.folders import probe_batch; print(tuple(encoder(probe_batch(encoder)).shape)); "
    use += "from smallbert.model.kept import Keeping; print(Keeping._keep._torchdynamo_disable)"
    subprocess.run([sys.executable, "-c", make], check=True, capture_output=True)
    done = subprocess.run([sys.executable, "-c", use], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["(3, 2)", "True"]


def test_students_of_other_families_are_read_by_a_process_that_made_none(tmp_path):
    recipes = {"lstm": "head | lstm(8, inner=8)", "bottleneck": "head | bottleneck(embed=8)"}
    for name, recipe in recipes.items():
        save_folder(run_recipe(recipe, make_encoder(), make_task(8, 4)).encoder, tmp_path / name)
    code = f"from smallbert import load; print(*(load({str(tmp_path)!r} + '/' + n).family for n in {[*recipes]!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "bilstm mobilebert\n"


def run(code):
    """What a fresh process imports, and what it prints."""
    code += "; import sys; print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stderr.rsplit("\n", 2)[-2].split()), done.stdout


def call(*words):
    """The same of command lines, one after another."""
    lines = [str(line).split() for line in words]
    return run(f"from smallbert.cli import main; print([main(line) for line in {lines!r}])")


def test_what_needs_no_method_waits_for_nothing():
    modules, out = call("list presets", "list tasks", "list families", "list tinybert4", "list cola", "--version")
    assert out.endswith("[0, 0, 0, 0, 0, 0]\n") and "half-int8" in out and "deberta-v2" in out and "squad2" in out
    assert ALL & modules == set()


def test_the_package_waits_for_nothing_and_its_names_for_no_transformers():
    assert ALL & run("import smallbert")[0] == set()
    modules, _ = run("from smallbert import METHODS, Recipe, distill, evaluate, load, run_recipe, save_folder")
    assert "torch" in modules and MODELS & modules == set()


def test_methods_wait_for_torch_alone():
    modules, out = call("list", "list align", "list align --json")
    assert out.endswith("[0, 0, 0]\n") and "quantize_aware" in out and "teacher" in out
    assert "torch" in modules and (MODELS | {"matplotlib"}) & modules == set()


def test_a_mistake_is_said_before_anything_heavy_is_imported():
    refused = "--task sst2 --out nowhere"
    modules, out = call(
        f"compress nowhere --recipe drop_layer(2) {refused}",
        f"compare x --recipes quantise(8) {refused}",
        "finetune nowhere --task nowhere.csv --out nowhere",
    )
    assert out == "[2, 2, 2]\n" and (MODELS | {"matplotlib"}) & modules == set()


def test_a_report_reads_cards_and_no_models(folder):
    modules, out = call(f"report {folder}")
    assert out.endswith("[0]\n") and "matplotlib" in modules
    assert MODELS & modules == set()
    modules, out = call(f"report {folder} --markdown")
    assert out.endswith("[0]\n") and (MODELS | {"matplotlib"}) & modules == set()
