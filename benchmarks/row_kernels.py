"""What attention and relations cost a step on a GPU, compared by our kernels and by plain products.

    python benchmarks/row_kernels.py --out results/row_kernels

Six layers of random weights at e5-small's shape learn from twelve, 128 texts of SNLI's lengths a step, by this
package's own loop and recorded steps. Ways are measured in turns; a ratio is the median over rounds of a round's time
to that of the same student without the term. The teacher looks at every step in all of them. With `--count`, which
needs no GPU: how many operations each term adds to a step by plain products, views not counted, and nothing else.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from shared_gpu import Kind, training
from torch.utils._python_dispatch import TorchDispatchMode

from smallbert.machine.facts import machine, versions
from smallbert.machine.files import write_json
from smallbert.training import alignment

TERMS = {
    "scores of texts alone": "",
    "attention of the last layer, kl": "align('attention', layers={-1: -1}, metric='kl', teacher='t') + ",
    "scores of six layers, mse": "align('scores', teacher='t') + ",
    "relations in 12 parts, kl": "align('relations', layers={-1: -1}, metric='kl', teacher='t') + ",
    "relations in 48 parts, kl": "align('relations', heads=48, layers={-1: -1}, metric='kl', teacher='t') + ",
}
WARM, STEPS = 150, 100


class Operations(TorchDispatchMode):
    """Counts what torch is asked to do, but for views."""

    def __init__(self) -> None:
        """Nothing yet."""
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operation."""
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def count_operations(term: str) -> int:
    """Of one step with this term."""
    with training(Kind(methods=f"{term}distill(teacher='t') + ", layout="packed"), "SNLI") as run:
        run(1)  # the optimiser begins
        with Operations() as seen:
            run(1)
    return seen.count


def time_ways(rounds: int) -> list[dict[str, Any]]:
    """Milliseconds a step of every term, both ways, and the ratio to none."""
    ways = {(name, True): term for name, term in TERMS.items()}
    ways |= {(name, False): term for name, term in TERMS.items() if term}
    with ExitStack() as held:
        steppers = {}
        for (name, kernels), term in ways.items():
            kind = Kind(methods=f"{term}distill(teacher='t') + ")
            steppers[name, kernels] = held.enter_context(training(kind, "SNLI"))
            with patch.object(alignment, "KERNELS", kernels):  # recorded so, and so replayed
                steppers[name, kernels](WARM)
        took: dict[tuple[str, bool], list[float]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way, run in steppers.items():
                with patch.object(alignment, "KERNELS", way[1]):
                    begun = time.perf_counter()
                    run(STEPS)
                    took[way].append((time.perf_counter() - begun) / STEPS * 1e3)
    plain = took["scores of texts alone", True]
    rows = []
    for (name, kernels), times in took.items():
        ratios = [mine / none for mine, none in zip(times, plain, strict=True)]
        rows.append({"term": name, "kernels": kernels, "ms_a_step": round(median(times), 2)})
        rows[-1] |= {"ratio": round(median(ratios), 3), "spread": [round(min(ratios), 3), round(max(ratios), 3)]}
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--count", action="store_true", help="count operations and measure nothing")
    chosen = parser.parse_args()
    if chosen.count:
        alone = count_operations("")
        for name, term in TERMS.items():
            if term:
                print(f"{name}: {count_operations(term) - alone} operations more", flush=True)
        return
    if not torch.cuda.is_available():
        parser.error("this measures a GPU, and there is none")
    rows = time_ways(chosen.rounds)
    if chosen.out:
        command = f"python benchmarks/row_kernels.py --rounds {chosen.rounds}"
        record = {"benchmark": "row_kernels", "command": command, "rows": rows}
        write_json(chosen.out / "cuda.json", record | {"versions": versions(), "machine": machine()})


if __name__ == "__main__":
    main()
