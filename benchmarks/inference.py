"""How fast a BERT of base shape runs on a CPU, each way against torch float32 and against what others offer as int8.

    python benchmarks/inference.py --out results/inference

Random weights and a head for two classes; one text of 128 tokens, one thread. All take turns in one process, with one
untimed call before each timed one; a row's ratio is the median over turns of the time of the reference in the same
turn by its own. Peers are made as their makers say: torch.ao's quantize_dynamic, and onnxruntime's quantize_dynamic and
quantize_static by channel on the file that torch writes of Hugging Face's own model (eager attention, the faster of the
two). "Scaled" is the most that smooth="search" can cost: every layer multiplies its inputs by factors.
"""

from __future__ import annotations

import argparse
import os
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
from smallbert.files import write_json
from smallbert.measuring.card import machine, versions
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


def make_ways(folder: Path, options: argparse.Namespace) -> tuple[dict[str, Call], dict[str, int]]:
    """What is timed, by name, and the bytes of the files that are."""
    torch.manual_seed(0)
    config = BertConfig(num_hidden_layers=options.layers, attn_implementation="eager")
    theirs = BertForSequenceClassification(config).eval()
    theirs.save_pretrained(folder / "hf")
    base, half = load_folder(folder / "hf"), folder / "half"
    save_folder(base, folder / "base")
    drop = METHODS["drop_layers"](options.layers // 2)
    small = base.copy()
    small.apply_method(drop, drop.plan(small, None))
    save_folder(small.eval(), half)
    texts = random_texts(config.vocab_size, options.length, options.batch)
    inputs = {
        "input_ids": texts.input_ids.numpy(),
        "attention_mask": np.ones(texts.input_ids.shape, np.int64),
        "token_type_ids": texts.token_type_ids.numpy(),
    }

    def onnx(path: Path) -> Call:
        return partial(open_session(path, options.threads), inputs)

    print("writing files", flush=True)
    write_peer(theirs, folder / "peer.onnx")
    dynamic_peer, static_peer = quantise_peer(folder / "peer.onnx", inputs)
    for source in ("base", "half"):
        export_onnx(folder / source, folder / f"{source}-onnx")
        export_int8(folder / source, folder / f"{source}-int8")
    fixed = fix_ranges(make_int8(base), [texts])
    write_onnx(fixed, folder / "fixed.onnx")
    write_onnx(fix_ranges(scale_inputs(make_int8(base)), [texts]), folder / "scaled.onnx")
    few, store = base.copy(), METHODS["quantize"](4, scope="group")
    few.apply_method(store, plan := store.plan(few, None))
    store.fill(few, base, plan, None, 0)
    write_onnx(few.eval(), folder / "four.onnx")
    plain = BertForSequenceClassification.from_pretrained(folder / "hf", attn_implementation="sdpa").eval()
    dynamic = torch.ao.quantization.quantize_dynamic(plain, {nn.Linear}, torch.qint8)
    ways = {
        "torch float32": partial(base, texts),
        "torch.ao int8 (peer)": partial(dynamic, texts.input_ids),
        "ours: int8 in torch": partial(make_int8(base), texts),
        "ours: int8 in torch, fixed ranges": partial(fixed, texts),
        "onnxruntime float32 (peer)": onnx(folder / "peer.onnx"),
        "ours: onnx": onnx(folder / "base-onnx" / "model.onnx"),
        "ours: onnx, 4 bits": onnx(folder / "four.onnx"),
        "onnxruntime int8 (peer)": onnx(dynamic_peer),
        "onnxruntime int8, static (peer)": onnx(static_peer),
        "ours: onnx-int8": onnx(folder / "base-int8" / "model.onnx"),
        "ours: onnx-int8, fixed ranges": onnx(folder / "fixed.onnx"),
        "ours: onnx-int8, fixed ranges, scaled": onnx(folder / "scaled.onnx"),
        "ours: half the layers, onnx": onnx(folder / "half-onnx" / "model.onnx"),
        "ours: half the layers, onnx-int8": onnx(folder / "half-int8" / "model.onnx"),
    }
    files = {"onnxruntime float32 (peer)": "peer.onnx*", "onnxruntime int8 (peer)": "peer8.onnx*"}
    files |= {"torch float32": "base/model.safetensors", "ours: onnx": "base-onnx/model.onnx"}
    files |= {"ours: onnx-int8": "base-int8/model.onnx", "ours: half the layers, onnx": "half-onnx/model.onnx"}
    files |= {"ours: half the layers, onnx-int8": "half-int8/model.onnx"}
    files |= {"ours: onnx-int8, fixed ranges": "fixed.onnx", "ours: onnx-int8, fixed ranges, scaled": "scaled.onnx"}
    files |= {"ours: onnx, 4 bits": "four.onnx", "onnxruntime int8, static (peer)": "peer8-static.onnx*"}
    return ways, {name: sum(one.stat().st_size for one in folder.glob(each)) for name, each in files.items()}


def main() -> None:
    """Measure, print the table, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the record")
    parser.add_argument("--note", help="what must be known of the machine, such as that others used it")
    for name, value in {"length": 128, "batch": 1, "threads": 1, "layers": 12, "turns": 25}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        ways, sizes = make_ways(Path(folder), options)
        print("timing", flush=True)
        with torch.inference_mode():
            taken = take_turns(ways, 0.0, options.turns, WARM)
    rows = []
    for name, each in taken.items():
        row: dict[str, Any] = {"way": name, "bytes": sizes.get(name), "p50_ms": round(float(np.median(each)) * 1e3, 2)}
        row["least_ms"] = round(float(each.min()) * 1e3, 2)
        row["to_torch"] = round(float(np.median(taken["torch float32"] / each)), 2)
        row["to_peer_int8"] = round(float(np.median(taken["onnxruntime int8 (peer)"] / each)), 2)
        rows.append(row)
        size = f"{row['bytes'] / 1e6:7.1f}" if row["bytes"] else "      -"
        ratios = f"{row['to_torch']:6.2f}x torch {row['to_peer_int8']:6.2f}x peer's int8"
        print(f"{name:38} {size} MB {row['p50_ms']:8.1f} ms (least {row['least_ms']:.1f}) {ratios}", flush=True)
    for name, (reference, wanted) in TARGETS.items():
        found = float(np.median(taken[reference] / taken[name]))
        print(f"{name}: {found:.2f} times as fast as {reference}, {wanted} was wanted")
    if options.out:
        setting = {name: getattr(options, name) for name in ("batch", "length", "threads", "layers", "turns")}
        command = " ".join(["python benchmarks/inference.py", *(f"--{key} {value}" for key, value in setting.items())])
        record = {"benchmark": "inference", "command": command, "note": options.note, "rows": rows}
        name = "_".join(f"{key}{setting[key]}" for key in ("batch", "length", "threads"))
        write_json(options.out / f"{name}.json", {**record, "versions": versions(), "machine": machine()})


if __name__ == "__main__":
    main()
