"""What a pooler costs when it answers, and what it saves to cut off layers it does not read: in turns on one thread.

    python benchmarks/pooler_cost.py e5-small --out results/pooler_cost

What is timed is the shape: the encoder with its own head, with an AdapterPooler (width 16, texts of up to 128 tokens)
over all layers, and with one over the lower layers alone, the others cut off. Dense products take as long whatever
their weights are, so nothing is trained. A ratio is the median over turns.
"""

from __future__ import annotations

from typing import Any

from cut_speed import LENGTHS, put_head, read_options, write_record

from smallbert.measuring.cost import count_macs, count_parameters, measure_latencies
from smallbert.methods import METHODS
from smallbert.model.encoder import Encoder
from smallbert.model.surgery import keep_layers

DEPTHS = (10, 8, 6, 4)  # as in `benchmarks/poolers.sh depth`


def put_pooler(encoder: Encoder, depth: int) -> Encoder:
    """A copy with a pooler over the embeddings and so many layers, and no others."""
    encoder, pooler = encoder.copy(), METHODS["pool_layers"](layers=list(range(depth + 1)), length=max(LENGTHS))
    encoder.apply_method(pooler, pooler.plan(encoder, None))
    if depth < len(encoder.order):
        keep_layers(encoder, list(range(depth)))
    return encoder.eval()


def main() -> None:
    """Time all lengths, print and write the table."""
    chosen, rows = read_options(__doc__), list[dict[str, Any]]()
    own = put_head(chosen.model)
    timed = {"own head": own, "adapter": put_pooler(own, len(own.order))}
    timed |= {f"adapter up to {depth}": put_pooler(own, depth) for depth in DEPTHS}
    for length in LENGTHS:
        found = measure_latencies(timed, length=length, threads=1, repeats=chosen.rounds)
        for name, encoder in timed.items():
            counted, macs = count_parameters(encoder), count_macs(encoder, length)
            row = {"what": name, "length": length, "layers": len(encoder.order), "head": counted["head"]}
            row |= {"running": counted["running"], "macs": macs, "times_as_fast": round(1 / found[name]["ratio"], 2)}
            rows.append(row)
            print(row, flush=True)
    write_record("pooler_cost", chosen, rows)


if __name__ == "__main__":
    main()
