"""How much sooner a model answers that `cut_to_mixture` has cut: all layers against few, in turns on one CPU thread.

    python benchmarks/cut_speed.py e5-small --out results/cut_speed

What is timed is the shape: a mixture over all layers with a head on first tokens, and the same cut to its first layers.
Dense products take as long whatever their weights are, so nothing is trained. A ratio is the median over turns.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from smallbert.machine.facts import machine, versions
from smallbert.machine.files import write_json
from smallbert.making.starting import start_from
from smallbert.measuring.cost import count_macs, measure_latencies
from smallbert.methods import METHODS
from smallbert.model.encoder import Encoder
from smallbert.model.surgery import keep_layers

LAYERS = (5, 4, 3)  # what cuts have left in results/layer_mixing/pruning
LENGTHS = (32, 128)


def put_head(model: str) -> Encoder:
    """The encoder with a plain head for two classes."""
    encoder = start_from(model, lambda text: None).encoder.copy()
    head = {"kind": "classify", "labels": ["a", "b"], "outputs": 2, "from_pooler": encoder.pooler is not None}
    encoder.apply_method(METHODS["head"](), head)
    return encoder.eval()


def read_options(about: str | None) -> argparse.Namespace:
    """The model, where the record goes, and how many turns are timed."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=60)
    return parser.parse_args()


def write_record(name: str, options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """The rows with the command that makes them, if they are to be kept."""
    if options.out:
        command = f"python benchmarks/{name}.py {Path(options.model).name} --rounds {options.rounds}"
        record = {"benchmark": name, "command": command, "rows": rows}
        write_json(options.out / "cpu.json", record | {"versions": versions(), "machine": machine()})


def main() -> None:
    """Time all lengths, print and write the table."""
    chosen, rows = read_options(__doc__), list[dict[str, Any]]()
    whole = put_head(chosen.model)
    whole.apply_method(METHODS["mix_layers"](), METHODS["mix_layers"]().plan(whole, None))
    whole.eval()
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
    write_record("cut_speed", chosen, rows)


if __name__ == "__main__":
    main()
