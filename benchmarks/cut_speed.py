"""How much sooner a model answers that `cut_to_mixture` has cut: all layers against few, in turns on one CPU thread.

    python benchmarks/cut_speed.py e5-small --out results/cut_speed

What is timed is the shape: a mixture over all layers with a head on first tokens, and the same cut to its first layers.
Dense products take as long whatever their weights are, so nothing is trained. A ratio is the median over turns.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from smallbert.files import write_json
from smallbert.make import start_from
from smallbert.measuring.card import machine, versions
from smallbert.measuring.cost import count_macs, measure_latencies
from smallbert.methods import METHODS
from smallbert.model.encoder import Encoder
from smallbert.model.surgery import keep_layers

LAYERS = (5, 4, 3)  # what cuts have left in results/layer_mixing/pruning
LENGTHS = (32, 128)


def make_mixture(model: str) -> Encoder:
    """The encoder with a mixture of all layers and a head for two classes."""
    encoder = start_from(model, lambda text: None).encoder.copy()
    head = {"kind": "classify", "labels": ["a", "b"], "outputs": 2, "from_pooler": encoder.pooler is not None}
    encoder.apply_method(METHODS["head"](), head)
    encoder.apply_method(METHODS["mix_layers"](), METHODS["mix_layers"]().plan(encoder, None))
    return encoder.eval()


def main() -> None:
    """Time all lengths, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=60)
    chosen, rows = parser.parse_args(), list[dict[str, Any]]()
    whole = make_mixture(chosen.model)
    cuts = {layers: whole.copy() for layers in LAYERS}
    for layers, cut in cuts.items():
        keep_layers(cut, list(range(layers)))
    for length in LENGTHS:
        timed = {"whole": whole} | {str(layers): cut for layers, cut in cuts.items()}
        found = measure_latencies(timed, length=length, threads=1, repeats=chosen.rounds)
        for layers in cuts:
            faster = round(1 / found[str(layers)]["ratio"], 2)
            fewer = round(count_macs(whole, length) / count_macs(cuts[layers], length), 2)
            row = {"length": length, "layers": layers, "of": len(whole.order), "faster": faster, "fewer_macs": fewer}
            rows.append(row)
            print(row, flush=True)
    if chosen.out:
        command = f"python benchmarks/cut_speed.py {Path(chosen.model).name} --rounds {chosen.rounds}"
        record = {"benchmark": "cut_speed", "command": command, "rows": rows}
        write_json(chosen.out / "cpu.json", record | {"versions": versions(), "machine": machine()})


if __name__ == "__main__":
    main()
