"""What masks cost in a training step, kernel by kernel.

    python benchmarks/mask_cost.py --out results/mask_cost

Movement masks at BERT-base's and e5-small's shape, batches of 32 texts with lengths like MNLI's, on a GPU. "Mask work"
is finding thresholds, masking weights and passing gradients on; training one more number a weight (the scores' part of
the optimiser) comes on top and is in the difference to a step without masks.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from train_throughput import make_stream, time_ours
from transformers import BertConfig

from smallbert.machine.facts import machine, versions
from smallbert.machine.files import write_json
from smallbert.training import loop

WARM, LOOKED = 120, 20  # steps before, and steps that are looked at
SHAPES = {
    "BERT-base": BertConfig(num_labels=3),
    "e5-small": BertConfig(num_labels=3, hidden_size=384, intermediate_size=1536),
}
FAMILIES = {
    "thresholds": ("_begin_round", "_collect", "_end_search", "CatArrayBatchedCopy"),  # one row of all scores, too
    "masks": ("_mask", "_spread"),
    "optimiser, rounding, clipping": ("multi_tensor_apply", "lpnorm", "_foreach"),
    "products": ("nvjet", "gemm", "cublas", "cutlass"),
    "attention": ("flash",),
    "sums over tokens": ("reduce_kernel",),
}
MASK_WORK = ("thresholds", "masks")
BEHIND, ON_IT = "begin=0.0, finish=0.01", "begin=0.0, finish=1.0"  # the ramp, where thresholds move at every step
KINDS = {
    "none": "",
    "local": f"movement(keep=0.1, scope='local', {BEHIND})",
    "global": f"movement(keep=0.1, scope='global', {BEHIND})",
    "local, on the ramp": f"movement(keep=0.1, scope='local', {ON_IT})",
    "global, on the ramp": f"movement(keep=0.1, scope='global', {ON_IT})",
}


def look_at_step(config: BertConfig, batch: int, extra: str, compiles: bool) -> dict[str, Any]:
    """Milliseconds and launches of one step, by family of kernel."""
    whole, seen = loop.Graphs.__call__, 0
    watch = profile(activities=[ProfilerActivity.CUDA])
    begun = wall = 0.0

    def call(graphs: Any, batches: Any) -> Any:
        nonlocal seen, begun, wall
        if seen == WARM:
            torch.cuda.synchronize()
            watch.start()
            begun = time.perf_counter()
        loss = whole(graphs, batches)
        seen += 1
        if seen == WARM + LOOKED:
            torch.cuda.synchronize()
            wall = time.perf_counter() - begun
            watch.stop()
        return loss

    loop.Graphs.__call__ = call  # type: ignore[method-assign]
    try:
        time_ours(make_stream(4000), batch, LOOKED + 1, WARM, extra, "cuda", config, compiles)
    finally:
        loop.Graphs.__call__ = whole  # type: ignore[method-assign]
    spent: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for event in watch.events() or []:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            family = next((f for f, names in FAMILIES.items() if any(name in event.name for name in names)), "other")
            spent[family] += event.device_time
            launches[family] += 1
    found = {f: {"ms": round(spent[f] / LOOKED / 1e3, 3), "launches": launches[f] / LOOKED} for f in spent}
    busy = sum(spent.values()) / LOOKED / 1e3
    work = sum(spent[family] for family in MASK_WORK) / LOOKED / 1e3
    return {
        "wall_ms": round(wall / LOOKED * 1e3, 3),
        "busy_ms": round(busy, 3),
        "launches": sum(launches.values()) / LOOKED,
        "mask_work": round(work / busy, 4),
        "families": found,
    }


def main() -> None:
    """Look at every kind of step, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--compiled", action="store_true", help="look at compiled layers too, which takes a while")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    chosen, rows = parser.parse_args(), list[dict[str, Any]]()
    for shape in chosen.shapes:
        for compiles in (False, True) if chosen.compiled else (False,):
            for kind, extra in KINDS.items():
                found = look_at_step(SHAPES[shape], chosen.batch, extra, compiles)
                rows.append({"shape": shape, "masks": kind, "compiled": compiles, **found})
                facts = f"{found['busy_ms']:7.2f} ms busy {found['launches']:6.0f} launches"
                work = f"mask work {found['mask_work']:.1%}"
                print(f"{shape:10s} masks {kind:19s} compiled {compiles!s:6s}{facts} {work}", flush=True)
                print(f"    {found['families']}", flush=True)
    if chosen.out:
        command = f"python benchmarks/mask_cost.py --batch {chosen.batch} --shapes {' '.join(chosen.shapes)}"
        command += " --compiled" * chosen.compiled
        record = {"benchmark": "mask_cost", "command": command, "rows": rows}
        write_json(chosen.out / "gpu.json", record | {"versions": versions(), "machine": machine()})


if __name__ == "__main__":
    main()
