"""The benchmark of inference has a row for every way to store few bits, and says how sure its ratios are."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from toys import run, small, toy_task

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

from smallbert.export import write_onnx  # noqa: E402
from smallbert.model.quantised import stored_parts  # noqa: E402
from smallbert.onnxfile.check import compare, open_session, varied_batches  # noqa: E402

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def inference(monkeypatch):
    """The benchmark as a module."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # which it would set itself, and leave behind
    import inference

    return inference


def test_ratios_have_a_spread(inference):
    taken = {"torch float32": np.full(11, 2.0), "onnxruntime int8 (peer)": np.full(11, 1.0)}
    taken["mine"] = 1 / np.arange(1.0, 12.0)
    row = inference.make_rows(taken, {"mine": 7})[-1]
    assert row["bytes"] == 7 and row["to_peer_int8"] == 6 and row["to_torch"] == 12
    assert row["to_peer_int8_spread"] == [2, 10] and row["to_torch_spread"] == [4, 20]


def test_layers_of_mixed_bits_have_their_own(inference):
    parts = stored_parts(inference.mix_bits(run("head", small(layers=4), toy_task()).encoder))
    for number, bits in enumerate((2, 3, 4, 2)):
        own = [part.grid.bits for name, part in parts.items() if f".layer.{number}." in name]
        assert own == [bits] * 6
    assert all(part.grid.bits == 8 for name, part in parts.items() if "embeddings" in name)


@pytest.mark.slow
def test_the_last_layer_may_compute_all_tokens(tmp_path):
    encoder = run("head", small(layers=1), toy_task()).encoder
    write_onnx(encoder, tmp_path / "whole.onnx", first_only=False)
    nodes = onnx.load(tmp_path / "whole.onnx").graph.node
    assert not any(".first" in name for node in nodes for name in node.output)
    assert compare(encoder, open_session(tmp_path / "whole.onnx"), varied_batches(encoder))["difference"] < 1e-5


@pytest.mark.slow
def test_every_way_has_a_row(tmp_path):
    shape = "--turns 2 --layers 2 --width 128 --length 16".split()
    subprocess.run([sys.executable, BENCHMARKS / "inference.py", *shape, "--out", tmp_path], check=True)
    rows = json.loads(next(tmp_path.glob("*.json")).read_text())["rows"]
    sizes = {row["way"].removeprefix("ours: "): row["bytes"] for row in rows}
    few = ("4 bits", "3 bits", "2 bits", "codebook(3)", "ternary", "binary")
    assert all(0 < sizes[f"onnx, {name}"] < 0.2 * sizes["onnx"] for name in few)
    assert sizes["onnx, binary"] < sizes["onnx, binary, split"] < sizes["onnx, 8 bits"] < 0.3 * sizes["onnx"]
    assert sizes["onnx, 4 bits"] < sizes["onnx, mixed bits"] < sizes["onnx, 8 bits"]  # its tables have 8
    for name in ("onnx", "onnx-int8", "onnx-int8, fixed ranges"):
        assert sizes[f"{name}, all tokens"] == pytest.approx(sizes[name], rel=0.01)
