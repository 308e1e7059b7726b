"""What zeros are worth on a CPU: bytes, loading and time of a pruned BERT-base stored by `sparse`, against dense torch.

    python benchmarks/sparse_inference.py --out results/sparse_inference
    python benchmarks/sparse_inference.py --out results/sparse_inference --threads 2
    python benchmarks/sparse_inference.py --model e5-small --densities 0.1 0.03 --out results/sparse_inference/e5-small

Random weights with random masks over the matrices of the layers, or a model's own weights, the largest of all layers
kept, which leaves more in some matrices than in others; float32 everywhere. All ways take turns, and a time is
the median of its ratios to the dense encoder's in the same turn. "measured" multiplies each matrix as was faster when
it was tried, "always sparse" every one sparsely. At density 1 nothing can be stored, and the dense encoder runs against
a copy of itself: what differs there is noise.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertModel

from smallbert.machine.facts import machine, versions
from smallbert.machine.files import write_json
from smallbert.making.starting import start_from
from smallbert.measuring.cost import measure_latencies
from smallbert.methods import METHODS
from smallbert.model.anatomy import linears
from smallbert.model.encoder import Encoder
from smallbert.model.folders import load_folder, probe_batch, save_folder
from smallbert.model.zeros import sparse_linears
from smallbert.report.figure import COLOURS, new_figure, strip_frame, to_png
from smallbert.training.masks import maskable, prune_once

DENSITIES = (1.0, 0.3, 0.2, 0.1, 0.05, 0.03, 0.01)
TARGETS = {0.1: 1.5, 0.03: 3.0}  # times faster
SHOWN = ("density", "bytes", "load_s", "dense_ms", "ms", "faster", "always_sparse", "ran_sparse", "linears", "rest")


def make_dense(density: float, layers: int, model: str | None) -> Encoder:
    """A random BERT of base shape whose layers keep a random share of their weights, or a model with its largest."""
    if model:
        encoder = start_from(model, lambda text: None).encoder.copy()
        prune_once(encoder, maskable(encoder, "layers"), density, "global")
        return encoder.eval()
    torch.manual_seed(0)
    encoder = Encoder(BertModel(BertConfig(num_hidden_layers=layers))).eval()
    with torch.no_grad():
        for name, _ in linears(encoder.backbone):
            weight = encoder.backbone.get_submodule(name).weight
            weight.mul_(torch.rand_like(weight) < density)
    return encoder.eval()


def make_sparse(dense: Encoder, run: str) -> Encoder:
    """The same encoder stored without zeros."""
    method, encoder = METHODS["sparse"](run=run), dense.copy()
    plan = method.plan(dense, None)
    encoder.apply_method(method, plan)
    method.fill(encoder, dense, plan, None, 0)
    return encoder.eval()


def save_and_load(encoder: Encoder) -> tuple[int, float, float]:
    """Bytes of all weights on disk, seconds to load them from files in the cache, and until the first scores."""
    with tempfile.TemporaryDirectory() as folder:
        save_folder(encoder, Path(folder) / "model")
        size = (Path(folder) / "model" / "model.safetensors").stat().st_size
        begun = time.perf_counter()
        loaded = load_folder(Path(folder) / "model")
        took = time.perf_counter() - begun
        with torch.inference_mode():
            loaded(probe_batch(loaded, (128,)))
        return size, took, time.perf_counter() - begun


def matrix_bytes(encoder: Encoder) -> int:
    """Bytes of the matrices of the layers as they are stored."""
    names = {
        f"backbone.{name}.{kind}" for name, _ in linears(encoder.backbone) for kind in ("weight", "gaps", "values")
    }
    return sum(tensor.nbytes for name, tensor in encoder.state_dict().items() if name in names)


def share_of_linears(encoder: Encoder, length: int, batch: int, threads: int, rounds: int = 5) -> float:
    """The share of a forward's time that the matrices of the layers take."""
    inside, whole, begun = 0.0, 0.0, 0.0

    def start(*_: Any) -> None:
        nonlocal begun
        begun = time.perf_counter()

    def stop(*_: Any) -> None:
        nonlocal inside
        inside += time.perf_counter() - begun

    modules = [module for _, module in linears(encoder.backbone)]
    hooks = [module.register_forward_pre_hook(start) for module in modules]
    hooks += [module.register_forward_hook(stop) for module in modules]
    texts, before = probe_batch(encoder, (length,) * batch), torch.get_num_threads()
    torch.set_num_threads(threads)
    with torch.inference_mode():
        for _ in range(rounds):
            started = time.perf_counter()
            encoder(texts)
            whole += time.perf_counter() - started
    torch.set_num_threads(before)
    for hook in hooks:
        hook.remove()
    return inside / whole


def measure(density: float, options: argparse.Namespace) -> dict[str, Any]:
    """One row of the table."""
    setting = {"length": options.length, "batch": options.batch, "threads": options.threads}
    dense = make_dense(density, options.layers, options.model)
    encoders = {"dense": dense}
    if density < 1:
        encoders |= {run: make_sparse(dense, run) for run in ("measured", "sparse")}
    else:
        encoders |= {"measured": dense.copy()}
    ours = encoders["measured"]
    size, load, ready = save_and_load(ours)
    found = measure_latencies(encoders, **setting, seconds=options.seconds)
    share = share_of_linears(ours, **setting)
    return {
        "density": density,
        "bytes": round(matrix_bytes(ours) / matrix_bytes(dense), 4),
        "file_mb": [round(save_and_load(dense)[0] / 1e6, 1), round(size / 1e6, 1)],
        "load_s": round(load, 2),
        "load_and_first_run_s": round(ready, 2),
        "dense_ms": round(found["dense"]["p50_ms"], 1),
        "ms": round(found["measured"]["p50_ms"], 1),
        "faster": round(1 / found["measured"]["ratio"], 2),
        "always_sparse": round(1 / found["sparse" if density < 1 else "measured"]["ratio"], 2),
        "ran_sparse": f"{found['measured'].get('sparse_products', 0)} of {len(list(linears(ours.backbone)))}",
        "linears": round(share, 2),
        "rest": round(1 - share, 2),
        "stored": len(sparse_linears(ours)),
    }


def draw(folder: Path) -> None:
    """Speed against density, a line for each record in the folder."""
    figure = new_figure((7.2, 3.8))
    axes = figure.add_axes((0.07, 0.14, 0.9, 0.75))
    colours = (COLOURS["accent"], COLOURS["ink"], COLOURS["muted"], "#2f6690", "#5b8c5a")
    for path, colour in zip(sorted(folder.glob("*.json")), colours, strict=False):
        record = json.loads(path.read_text(encoding="utf-8"))
        rows = [row for row in record["rows"] if row["density"] < 1]
        xs = [row["density"] for row in rows]
        axes.plot(xs, [row["faster"] for row in rows], color=colour, marker="o", markersize=4, label=record["setting"])
        axes.plot(xs, [row["always_sparse"] for row in rows], color=colour, linewidth=0.9, linestyle=(0, (2, 2)))
    for density, wanted in TARGETS.items():
        axes.plot(density, wanted, marker="_", markersize=22, markeredgewidth=2, color=COLOURS["muted"])
        axes.annotate("target", (density, wanted), (0, -11), textcoords="offset points", ha="center", fontsize=8)
    axes.axhline(1, color=COLOURS["muted"], linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xticks([density for density in DENSITIES if density < 1])
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
    axes.minorticks_off()
    axes.invert_xaxis()
    strip_frame(axes, "y", "times faster than dense torch float32, BERT-base, whole encoder")
    axes.set_xlabel("weights of the layers that are left; dotted: every matrix as a sparse product", fontsize=9)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    to_png(figure, folder / "speed.png")


def main() -> None:
    """Measure, print the table, write the record and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the record and the picture")
    for name, value in {"length": 128, "batch": 1, "threads": 1, "layers": 12}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--seconds", type=float, default=8.0, help="for each of the three ways, at each density")
    parser.add_argument("--model", help="a folder; a random BERT-base if not given")
    parser.add_argument("--densities", type=float, nargs="+", default=list(DENSITIES))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(*(f"{name:>13}" for name in SHOWN), flush=True)
    rows = []
    for density in options.densities:
        rows.append(measure(density, options))
        print(*(f"{rows[-1][name]!s:>13}" for name in SHOWN), flush=True)
    if options.out:
        setting = {name: getattr(options, name) for name in ("batch", "length", "threads")}
        shape: dict[str, Any] = {"model": Path(options.model).name} if options.model else {"layers": options.layers}
        if options.densities != list(DENSITIES):
            shape["densities"] = " ".join(map(str, options.densities))
        given = [f"--{name} {value}" for name, value in (setting | shape).items()]
        facts = {
            "benchmark": "sparse_inference",
            "command": " ".join(["python benchmarks/sparse_inference.py", *given]),
        }
        title = f"batch {options.batch}, {options.length} tokens, {options.threads} thread{'s' * (options.threads > 1)}"
        record = {**facts, "setting": title, "rows": rows, "versions": versions(), "machine": machine()}
        write_json(options.out / f"{'_'.join(f'{name}{value}' for name, value in setting.items())}.json", record)
        if not options.model:
            draw(options.out)


if __name__ == "__main__":
    main()
