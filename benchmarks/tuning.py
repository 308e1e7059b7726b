"""How many pooler trials a minute `smallbert tune` makes from one store of hidden states, and what memory that takes.

    python benchmarks/tuning.py e5-small --task rte --data data --trials 200 --jobs 2 --out results/tuning

The command itself is run, without the final runs. The first trial also stores the hidden states, and is counted apart.
Processor time is that of all processes, reading the model included: where others use the same cores, it says more
than minutes do. Memory is that of the largest process, with all of the store that it has mapped.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from smallbert.machine.facts import machine, versions
from smallbert.machine.files import write_json
from smallbert.machine.sharing import cores

SPACE = "pool_layers(width={8, 16, 32}) + train(freeze='backbone', epochs={1, 2, 4}, lr=log(1e-4, 1e-2))"


def search(words: list[str], out: str) -> dict[str, Any]:
    """Run a search and say how it went."""
    begun = time.monotonic()
    subprocess.run([sys.executable, "-m", "smallbert", "tune", *words, "--search-only", "--out", out], check=True)
    minutes, used = (time.monotonic() - begun) / 60, resource.getrusage(resource.RUSAGE_CHILDREN)
    trials = [json.loads(line) for line in (Path(out) / "trials.jsonl").read_text(encoding="utf-8").splitlines()]
    first, ends = trials[0]["seconds"] / 60, Counter(one["status"] for one in trials)
    return {
        "trials": len(trials),
        "ended": ", ".join(f"{count} {status}" for status, count in ends.most_common()),
        "minutes": round(minutes, 1),
        "of them the first trial": round(first, 1),
        "trials a minute after it": round((len(trials) - 1) / (minutes - first), 1),
        "processor seconds a trial": round((used.ru_utime + used.ru_stime) / len(trials), 2),
        "largest process, GB": round(used.ru_maxrss / 1e6, 2),
        "best score": round(max(one["score"] for one in trials if one["status"] == "ok"), 2),
    }


def main() -> None:
    """Search, print and write the row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--task", default="rte")
    parser.add_argument("--data")
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--recipe", default=SPACE)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    told = ["--task", chosen.task, "--trials", str(chosen.trials), "--jobs", str(chosen.jobs)]
    data = ["--data", chosen.data] if chosen.data else []
    with tempfile.TemporaryDirectory() as folder:
        row = {"task": chosen.task, "jobs": chosen.jobs, "cores": cores()}
        row |= search([chosen.model, *told, *data, "--recipe", chosen.recipe], folder)
    row["load when it ended"] = round(os.getloadavg()[0], 1)  # more than there are cores: others used them too
    print(row, flush=True)
    if chosen.out:
        words = " ".join(["python benchmarks/tuning.py", Path(chosen.model).name, *told])
        words += "" if chosen.recipe == SPACE else f' --recipe "{chosen.recipe}"'
        record = {"benchmark": "tuning", "command": words, "rows": [row]}
        write_json(chosen.out / "tuning.json", record | {"versions": versions(), "machine": machine()})


if __name__ == "__main__":
    main()
