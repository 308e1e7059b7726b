"""How far 8-bit inputs and 3-bit weights move what a fine-tuned model says, and which layer has the outliers.

    smallbert finetune e5-small --task mrpc --data DATA --epochs 3 --lr 5e-5 --batch 32 --seed 0 --out tuned
    python benchmarks/input_ranges.py tuned --task mrpc --data DATA --out results/input_ranges

(all-MiniLM-L6-v2: 4 epochs, lr 1e-4.)

Of training texts that no range was found on: the mean change of a class's probability against the model in float32, and
the share of predictions that are others.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smallbert.machine.facts import machine, versions
from smallbert.machine.files import write_json
from smallbert.making.run import run_recipe
from smallbert.making.starting import task_from
from smallbert.methods.quantize import TEXTS
from smallbert.model.anatomy import linears
from smallbert.model.batch import Batch
from smallbert.model.encoder import Encoder
from smallbert.model.folders import load_folder
from smallbert.training.calibrate import draw_texts, input_bounds

RECIPES = (
    "quantize(8)",
    "quantize(8, activations=True)",
    "quantize(8, activations=True, smooth='search')",
    "quantize(8, activations='static')",
    "quantize(8, activations='static', smooth=0.5)",
    "quantize(8, activations='static', smooth='search')",
    "codebook(3)",
    "codebook(3, feedback=True)",
    "codebook(3, embeddings=4, feedback=True)",
    "codebook(3, outliers=2.8, feedback=True)",
    "codebook(3, outliers=2.48, feedback=True)",
    "codebook(4, feedback=True)",
)


@torch.no_grad()
def probabilities(encoder: Encoder, batches: list[Batch]) -> Tensor:
    """What the model says of each text."""
    return torch.cat([encoder(batch).softmax(-1) for batch in batches])


def find_loudest(encoder: Encoder, batches: list[Batch]) -> dict[str, Any]:
    """The layer whose loudest feature stands furthest out of the others."""
    names = [f"backbone.{name}" for name, _ in linears(encoder.backbone)]
    peaks = {name: bounds.abs().amax(0) for name, bounds in input_bounds(encoder, names, batches).items()}
    name = max(peaks, key=lambda name: float(peaks[name].max() / peaks[name].median()))
    first, second = peaks[name].topk(2).values.tolist()
    rounded = {"peak": first, "next": second, "median": float(peaks[name].median())}
    return {"layer": name, **{key: round(value, 2) for key, value in rounded.items()}}


def main() -> None:
    """Round in every way, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder that finetune made")
    parser.add_argument("--task", default="mrpc")
    parser.add_argument("--data")
    parser.add_argument("--name", default="e5-small", help="of what was fine-tuned")
    parser.add_argument("--out", default="results/input_ranges")
    chosen = parser.parse_args()
    encoder, task = load_folder(chosen.model).eval(), task_from(chosen.task, chosen.data)
    # Ranges are found on the first texts of the same drawing, so that none of these is among them.
    held_out = draw_texts(encoder, task, 3 * TEXTS, 0, "input_ranges", batch=32)[TEXTS // 32 :]
    wanted, rows = probabilities(encoder, held_out), []
    for recipe in RECIPES:
        found = probabilities(run_recipe(recipe, encoder, task, device="cpu").encoder.eval(), held_out)
        change, other = (found - wanted).abs().mean(), (found.argmax(-1) != wanted.argmax(-1)).float().mean()
        rows.append(
            {
                "recipe": recipe,
                "probability_change": round(float(change), 4),
                "predicts_another": round(float(other), 4),
            }
        )
        print(f"{recipe:55s} {float(change):.4f}, {float(other):.1%} predict another class", flush=True)
    loudest = find_loudest(encoder, held_out)
    print("{layer}: one input reaches {peak}, the next {next}, half of them {median}".format(**loudest))
    command = f"python benchmarks/input_ranges.py TUNED --task {chosen.task} --name {chosen.name}"
    about = {"benchmark": "input_ranges", "command": command, "texts": len(wanted), "loudest": loudest, "rows": rows}
    write_json(
        Path(chosen.out) / f"{chosen.name}_{chosen.task}.json", about | {"machine": machine(), "versions": versions()}
    )


if __name__ == "__main__":
    main()
