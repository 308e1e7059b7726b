"""What rounding the matrices of a model to few bits leaves of their outputs, with and without feedback.

    python benchmarks/rounding_error.py all-MiniLM-L6-v2 --task mrpc --data DATA --out results/rounding_error

Of every matrix of the layers: the squared error of its outputs on held-out texts, as a share of the squared outputs,
once it is rounded. Feedback and scales see other texts. Printed are means over matrices.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from smallbert.machine.facts import machine, versions
from smallbert.machine.files import write_json
from smallbert.making.starting import start_from, task_from
from smallbert.methods.codebook import code_by, find_centroids, find_outliers
from smallbert.model.anatomy import linears
from smallbert.model.feedback import Coding, code_on, output_error, round_with_feedback
from smallbert.model.rounding import Grid, fit
from smallbert.training.calibrate import draw_texts, input_products

OUTLIERS = 3.55  # deviations, as in codebook


def codings(weight: Tensor, bits: int) -> dict[str, Coding]:
    """The ways to round a matrix to so many bits."""
    grid, apart = Grid(bits, "group", 64), find_outliers(weight, OUTLIERS)
    return {
        "groups of 64": code_on(grid, fit(weight, grid, search=True), weight.shape),
        "centroids": code_by(find_centroids(weight[~apart], 2**bits), apart),
    }


def errors_of(weight: Tensor, seen: Tensor, held_out: Tensor) -> dict[str, float]:
    """The error that each way leaves, plainly and with feedback."""
    found, whole = {}, float(output_error(weight, torch.zeros_like(weight), held_out).sum())
    for bits in (4, 3, 2):
        for way, coding in codings(weight, bits).items():
            plain, fed = coding.make(weight.double(), slice(None))[1], round_with_feedback(weight, seen, coding)[1]
            for said, made in (("", plain), (", feedback", fed)):
                found[f"{bits} bits, {way}{said}"] = float(output_error(weight, made, held_out).sum()) / whole
    return found


def main() -> None:
    """Round every matrix in every way and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--task", default="mrpc")
    parser.add_argument("--data")
    parser.add_argument("--texts", type=int, default=512, help="of train, that feedback sees")
    parser.add_argument("--out", default="results/rounding_error")
    chosen = parser.parse_args()
    encoder, task = start_from(chosen.model).encoder, task_from(chosen.task, chosen.data)
    names = [f"backbone.{name}" for name, _ in linears(encoder.backbone)]
    # One drawing, so that no text is in both.
    batches = draw_texts(encoder, task, 2 * chosen.texts, 0, "rounding_error", batch=chosen.texts)
    seen, held_out = (input_products(encoder, names, [batch]) for batch in batches)
    every: list[dict[str, float]] = []
    for name in names:
        every.append(errors_of(encoder.get_submodule(name).weight.detach(), seen[name], held_out[name]))
        print(f"{len(every)} of {len(names)}: {name}", flush=True)
    rows: list[dict[str, Any]] = [
        {"way": way, "error": float(f"{mean(one[way] for one in every):.4g}")} for way in every[0]
    ]
    for row in rows:
        print(f"{row['way']:60s} {row['error']:.2%}")
    command = f"python benchmarks/rounding_error.py {Path(chosen.model).name} --task {chosen.task}"
    about = {"benchmark": "rounding_error", "command": command, "texts": chosen.texts, "matrices": len(names)}
    record = about | {"rows": rows, "machine": machine(), "versions": versions()}
    write_json(Path(chosen.out) / f"{Path(chosen.model).name}.json", record)


if __name__ == "__main__":
    main()
