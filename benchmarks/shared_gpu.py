"""What several trainings on one GPU gain over one, with layers as written and compiled.

    python benchmarks/shared_gpu.py --out results/shared_gpu

Movement pruning at e5-small's shape, 32 texts of MNLI's lengths a step, in one process and in several at once (under
MPS where there is one). Steps a second are those of all processes together after a beginning that is not counted; the
beginning, in seconds, has start, compilation and recording in it. Compiled ones come twice: the second finds the first
one's kernels on the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from smallbert.files import write_json
from smallbert.sharing import shared_gpu

WARM = 150


def run_one(compiles: bool, steps: int) -> dict[str, float]:
    """One process's share: how long it took to begin, and steps a second from then on."""
    begun = time.perf_counter()
    from train_throughput import make_stream, time_ours
    from transformers import BertConfig

    config = BertConfig(num_labels=3, hidden_size=384, intermediate_size=1536)
    extra = "movement(keep=0.1, begin=0.0, finish=0.01)"
    rate = time_ours(make_stream(4000), 32, steps, WARM, extra, "cuda", config, compiles) / 32
    return {"rate": rate, "began": time.perf_counter() - begun - steps / rate}


def run_many(count: int, compiles: bool, steps: int, environment: dict[str, str]) -> dict[str, Any]:
    """Several processes at once: their rates together, and the longest beginning."""
    command = [sys.executable, __file__, "--alone", "--steps", str(steps), *(["--compiled"] if compiles else [])]
    made = {"stdout": subprocess.PIPE, "text": True, "env": {**os.environ, **environment}}
    running = [subprocess.Popen(command, **made) for _ in range(count)]  # type: ignore[call-overload]
    found = [json.loads(one.communicate()[0].strip().splitlines()[-1]) for one in running]
    row = {"processes": count, "compiled": compiles, "steps_per_second": round(sum(one["rate"] for one in found), 1)}
    return row | {"began_seconds": round(max(one["began"] for one in found), 1)}


def main() -> None:
    """Run every row in turn, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--alone", action="store_true", help="be one of the processes")
    parser.add_argument("--compiled", action="store_true", help="with --alone: compile layers")
    chosen = parser.parse_args()
    if chosen.alone:
        print(json.dumps(run_one(chosen.compiled, chosen.steps)))
        return
    rows = []
    with shared_gpu() as environment:
        for count, compiles in ((1, False), (chosen.processes, False), (1, True), (1, True), (chosen.processes, True)):
            rows.append(run_many(count, compiles, chosen.steps, environment))
            print(rows[-1], flush=True)
    if chosen.out:
        from smallbert.measuring.card import machine, versions

        command = f"python benchmarks/shared_gpu.py --steps {chosen.steps} --processes {chosen.processes}"
        record = {"benchmark": "shared_gpu", "command": command, "rows": rows}
        write_json(chosen.out / "gpu.json", record | {"versions": versions(), "machine": machine()})


if __name__ == "__main__":
    main()
