"""What an answer waits for: no verb imports what it does not need, each looked at in a fresh process."""

import subprocess
import sys

import pytest
from invented import invented_card

from smallbert.measuring.shelf import save_card

COMPILER = {"torch._dynamo", "torch._inductor", "sympy"}
MODELS = COMPILER | {"transformers", "sklearn", "pandas", "scipy", "onnx", "onnxruntime"}
ALL = MODELS | {"torch", "numpy", "matplotlib", "huggingface_hub"}


@pytest.fixture
def folder(tmp_path):
    """A folder with cards."""
    for seed in (1, 2):
        save_card({**invented_card("drop_layers(3) | finetune"), "seed": seed}, tmp_path / "cards")
    return tmp_path


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
