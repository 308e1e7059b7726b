"""How fast a BERT of base shape runs on a CPU, each way against torch float32 and against what others offer as int8.

    python benchmarks/inference.py --out results/inference

Random weights and a head for two classes; one text of 128 tokens, one thread. "torch float32" is Hugging Face's own
model. All take turns in one process, with one untimed call before each timed one; a row's ratio is the median over
turns of the time of the reference in the same turn by its own, and beside it stands its spread, from the 10th to the
90th percentile of turns. Peers are made as their makers say: torch.ao's quantize_dynamic, and onnxruntime's
quantize_dynamic and quantize_static by channel on the file that torch writes of Hugging Face's own model (eager
attention, the faster of the two). "Scaled" is the most that smooth="search" can cost: every layer multiplies its inputs
by factors.

A file has types of 4 and of 8 bits, and what has fewer is written in the next one: 3 and 2 bits, centroids, ternary and
binary weights all take 4, mixed bits 4 or 8. Inputs that are not rounded are multiplied by real numbers, which are made
of these on loading: such files are smaller, not faster (and binary weights that were split are two products). Weights
are random, so that the layers of "mixed bits" have 2, 3 and 4 bits by turns, 3 on average as by default; its tables
have 8.

Ours narrow the last layer to the first token, which alone is read (see onnxfile/narrow.py). Rows with "all tokens" do
not: against them one sees what the narrowing does, and against the peers what is left without it.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # some machines promise AMX and do not have it

import numpy as np
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from smallbert.bench.run import random_texts
from smallbert.export import export_int8, export_onnx, fix_ranges, make_int8, write_onnx
from smallbert.machine.facts import machine, versions
from smallbert.machine.files import write_json
from smallbert.making.run import run_recipe
from smallbert.measuring.cost import WARM, take_turns
from smallbert.methods import METHODS
from smallbert.model.encoder import Encoder
from smallbert.model.folders import load_folder, save_folder
from smallbert.model.quantised import WholeLinear, stored_parts
from smallbert.onnxfile.check import open_session

TARGETS = {
    "ours: onnx-int8, fixed ranges": ("onnxruntime int8 (peer)", 1.15),
    "ours: onnx-int8, fixed ranges, scaled": ("onnxruntime int8 (peer)", 1.15),
    "ours: half the layers, onnx-int8": ("torch float32", 7),
}
FEW_BITS = {
    "8 bits": "quantize(8)",
    "4 bits": "quantize(4, scope='group')",
    "3 bits": "quantize(3, scope='group')",
    "2 bits": "quantize(2, scope='group')",
    "codebook(3)": "codebook(3)",
    "ternary": "ternary",
    "binary": "binary",
    "binary, split": "binary(split=True)",
}
MIXED = (2, 3, 4)  # bits of one layer after the other
SHARES = (10, 90)  # percentiles of turns between which a spread lies
Call = Callable[[], object]


def write_peer(model: Any, path: Path) -> None:
    """Hugging Face's model as torch writes it."""
    from torch.export import Dim

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any) -> Any:
            given = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
            return self.model(**given).logits

    ids = torch.randint(5, 1000, (2, 9))
    free = {0: Dim("batch"), 1: Dim("length", min=1, max=512)}
    names = ["input_ids", "attention_mask", "token_type_ids"]
    settings: dict[str, Any] = {"dynamo": True, "verbose": False, "opset_version": 18, "output_names": ["scores"]}
    shapes = {name: free for name in names}
    inputs = (ids, torch.ones_like(ids), torch.zeros_like(ids))
    program = torch.onnx.export(Scores(), inputs, input_names=names, dynamic_shapes=shapes, **settings)
    program.save(path)  # type: ignore[union-attr]


def quantise_peer(path: Path, inputs: dict[str, np.ndarray]) -> tuple[Path, Path]:
    """The file in int8, as onnxruntime does it, dynamic and static; shapes that it trips over are taken out first."""
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_dynamic, quantize_static

    class Texts(CalibrationDataReader):
        def __init__(self) -> None:
            self.left = [inputs]

        def get_next(self) -> dict[str, np.ndarray] | None:
            return self.left.pop() if self.left else None

    model = onnx.load(path)
    del model.graph.value_info[:]
    plain, dynamic, static = (path.with_name(f"{name}.onnx") for name in ("plain", "peer8", "peer8-static"))
    onnx.save(model, plain)
    quantize_dynamic(plain, dynamic, weight_type=QuantType.QInt8, per_channel=True)
    kinds = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
    quantize_static(plain, static, Texts(), per_channel=True, op_types_to_quantize=["MatMul", "Gemm"], **kinds)
    return dynamic, static


def scale_inputs(encoder: Encoder) -> Encoder:
    """The same encoder, whose layers all multiply their inputs by factors first; what they give stays the same."""
    for part in stored_parts(encoder).values():
        if isinstance(part, WholeLinear):
            part.input_factor = torch.full((part.in_features,), 0.5)
            part.scale.mul_(2)
    return encoder


def mix_bits(base: Encoder) -> Encoder:
    """A copy stored as mixed_bits stores, each layer with its own number of bits."""
    store, small = METHODS["mixed_bits"]().storage(), base.copy()
    plan = store.plan(small, None)
    layers = {name: re.search(r"\.layer\.(\d+)\.", name) for name in plan["modules"]}
    plan["bits"] = {name: MIXED[int(found[1]) % len(MIXED)] for name, found in layers.items() if found}
    small.apply_method(store, plan)
    store.fill(small, base, plan, None, 0)
    return small.eval()


def write_few_bits(base: Encoder, folder: Path) -> dict[str, Path]:
    """A file of each way to store few bits."""
    found = {}
    for name, recipe in FEW_BITS.items():
        found[f"ours: onnx, {name}"] = path = folder / f"few{len(found)}.onnx"
        write_onnx(run_recipe(recipe, base, device="cpu").encoder.eval(), path)
    write_onnx(mix_bits(base), folder / "mixed.onnx")
    return {**found, "ours: onnx, mixed bits": folder / "mixed.onnx"}


def write_files(base: Encoder, theirs: Any, texts: Any, inputs: Any, folder: Path) -> dict[str, Path]:
    """The ONNX files that are timed, by name."""
    write_peer(theirs, folder / "peer.onnx")
    dynamic, static = quantise_peer(folder / "peer.onnx", inputs)
    for source in ("base", "half"):
        export_onnx(folder / source, folder / f"{source}-onnx")
        export_int8(folder / source, folder / f"{source}-int8")
    fixed = fix_ranges(make_int8(base), [texts])
    write_onnx(fixed, folder / "fixed.onnx")
    write_onnx(fix_ranges(scale_inputs(make_int8(base)), [texts]), folder / "scaled.onnx")
    for name, encoder in (("whole", base), ("whole8", make_int8(base)), ("whole8-fixed", fixed)):
        write_onnx(encoder, folder / f"{name}.onnx", first_only=False)
    return {
        "onnxruntime float32 (peer)": folder / "peer.onnx",
        "ours: onnx": folder / "base-onnx" / "model.onnx",
        "ours: onnx, all tokens": folder / "whole.onnx",
        **write_few_bits(base, folder),
        "onnxruntime int8 (peer)": dynamic,
        "onnxruntime int8, static (peer)": static,
        "ours: onnx-int8": folder / "base-int8" / "model.onnx",
        "ours: onnx-int8, all tokens": folder / "whole8.onnx",
        "ours: onnx-int8, fixed ranges": folder / "fixed.onnx",
        "ours: onnx-int8, fixed ranges, all tokens": folder / "whole8-fixed.onnx",
        "ours: onnx-int8, fixed ranges, scaled": folder / "scaled.onnx",
        "ours: half the layers, onnx": folder / "half-onnx" / "model.onnx",
        "ours: half the layers, onnx-int8": folder / "half-int8" / "model.onnx",
    }


def make_ways(folder: Path, options: argparse.Namespace) -> tuple[dict[str, Call], dict[str, int]]:
    """What is timed, by name, and the bytes of the files that are."""
    torch.manual_seed(0)
    width = {"hidden_size": options.width, "intermediate_size": 4 * options.width}
    shape = {"num_hidden_layers": options.layers, "num_attention_heads": options.width // 64, **width}
    config = BertConfig(**shape, attn_implementation="eager")
    theirs = BertForSequenceClassification(config).eval()
    theirs.save_pretrained(folder / "hf")
    base = load_folder(folder / "hf")
    save_folder(base, folder / "base")
    drop = METHODS["drop_layers"](options.layers // 2)
    small = base.copy()
    small.apply_method(drop, drop.plan(small, None))
    save_folder(small.eval(), folder / "half")
    texts = random_texts(config.vocab_size, options.length, options.batch)
    inputs = {
        "input_ids": texts.input_ids.numpy(),
        "attention_mask": np.ones(texts.input_ids.shape, np.int64),
        "token_type_ids": texts.token_type_ids.numpy(),
    }
    print("writing files", flush=True)
    files = write_files(base, theirs, texts, inputs, folder)
    plain = BertForSequenceClassification.from_pretrained(folder / "hf", attn_implementation="sdpa").eval()
    dynamic = torch.ao.quantization.quantize_dynamic(plain, {nn.Linear}, torch.qint8)
    ways: dict[str, Call] = {
        "torch float32": partial(plain, texts.input_ids),
        "ours: float32 in torch": partial(base, texts),
        "torch.ao int8 (peer)": partial(dynamic, texts.input_ids),
        "ours: int8 in torch": partial(make_int8(base), texts),
        "ours: int8 in torch, fixed ranges": partial(fix_ranges(make_int8(base), [texts]), texts),
    }
    ways |= {name: partial(open_session(path, options.threads), inputs) for name, path in files.items()}
    files["torch float32"] = folder / "hf" / "model.safetensors"
    files["ours: float32 in torch"] = folder / "base" / "model.safetensors"
    sizes = {name: sum(one.stat().st_size for one in path.parent.glob(f"{path.name}*")) for name, path in files.items()}
    return ways, sizes


def compare(reference: np.ndarray, each: np.ndarray) -> tuple[float, list[float]]:
    """How many times as fast as a reference: the median over turns, and its spread."""
    ratios = reference / each
    return round(float(np.median(ratios)), 2), np.percentile(ratios, SHARES).round(2).tolist()


def make_rows(taken: dict[str, np.ndarray], sizes: dict[str, int]) -> list[dict[str, Any]]:
    """What was measured, one row a way."""
    rows = []
    for name, each in taken.items():
        row: dict[str, Any] = {"way": name, "bytes": sizes.get(name), "p50_ms": round(float(np.median(each)) * 1e3, 2)}
        row["least_ms"] = round(float(each.min()) * 1e3, 2)
        row["to_torch"], row["to_torch_spread"] = compare(taken["torch float32"], each)
        row["to_peer_int8"], row["to_peer_int8_spread"] = compare(taken["onnxruntime int8 (peer)"], each)
        rows.append(row)
    return rows


def print_row(row: dict[str, Any]) -> None:
    """One line."""
    size = f"{row['bytes'] / 1e6:7.1f}" if row["bytes"] else "      -"
    ratios = [
        f"{row[key]:6.2f}x {whose} ({row[f'{key}_spread'][0]:.2f} to {row[f'{key}_spread'][1]:.2f})"
        for key, whose in (("to_torch", "torch"), ("to_peer_int8", "peer's int8"))
    ]
    print(f"{row['way']:41} {size} MB {row['p50_ms']:8.1f} ms (least {row['least_ms']:.1f})", *ratios, flush=True)


def main() -> None:
    """Measure, print the table, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the record")
    parser.add_argument("--note", help="what must be known of the machine, such as that others used it")
    for name, value in {"length": 128, "batch": 1, "threads": 1, "layers": 12, "width": 768, "turns": 25}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        ways, sizes = make_ways(Path(folder), options)
        print("timing", flush=True)
        with torch.inference_mode():
            taken = take_turns(ways, 0.0, options.turns, WARM)
    rows = make_rows(taken, sizes)
    for row in rows:
        print_row(row)
    for name, (reference, wanted) in TARGETS.items():
        found, (low, high) = compare(taken[reference], taken[name])
        print(f"{name}: {found:.2f} ({low:.2f} to {high:.2f}) times as fast as {reference}, {wanted} was wanted")
    if options.out:
        setting = {name: getattr(options, name) for name in ("batch", "length", "threads", "layers", "width", "turns")}
        command = " ".join(["python benchmarks/inference.py", *(f"--{key} {value}" for key, value in setting.items())])
        record = {"benchmark": "inference", "command": command, "note": options.note, "rows": rows}
        name = "_".join(f"{key}{setting[key]}" for key in ("batch", "length", "threads"))
        write_json(options.out / f"{name}.json", {**record, "versions": versions(), "machine": machine()})


if __name__ == "__main__":
    main()
