"""Whether processes that share a GPU compute what they should: in parts of it, and after others were killed there.

    python benchmarks/interrupted_gpu.py --parts 25,28,100 --out results/shared_gpu

For each part a new MPS server, and on it three crowds one after the other: one that trains to its end, one that is
killed while it trains, and one more that trains to its end. Each process is a model of random weights that learns
random labels, where every loss should be finite.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from shared_gpu import KINDS, training

from smallbert.machine.facts import GPU_PART, machine, versions
from smallbert.machine.files import write_json
from smallbert.machine.sharing import shared_gpu

STEPS, PATIENCE = 300, 120.0


def be_one_of_many(kind: str, steps: int) -> None:
    """Train, and print how many losses were not finite; without a number of steps, train until somebody ends it."""
    with training(KINDS[kind], "SNLI") as run:
        while not steps:
            run(20)
            print("trained", flush=True)
        print(sum(not math.isfinite(run(1)) for _ in range(steps)))


def start_crowd(kind: str, count: int, environment: dict[str, str], steps: int) -> list[subprocess.Popen[str]]:
    """So many processes that train for so many steps."""
    command = [sys.executable, __file__, "--member", str(steps), "--kind", kind]
    how: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True, "env": {**os.environ, **environment}}
    return [subprocess.Popen(command, **how) for _ in range(count)]


def watch_crowd(kind: str, count: int, environment: dict[str, str]) -> int:
    """How many of a crowd's losses were not finite."""
    running = start_crowd(kind, count, environment, STEPS)
    try:
        told = [one.communicate(timeout=PATIENCE)[0].split() for one in running]
    finally:
        for one in running:
            one.kill()
    if late := sum(not words for words in told):
        raise SystemExit(f"{late} of {count} processes ended before they had taken a step; see above why")
    return sum(int(words[0]) for words in told)


def kill_crowd(kind: str, count: int, environment: dict[str, str], how: signal.Signals) -> None:
    """Let a crowd train until each has taken some steps, and end it with work under way."""
    running = start_crowd(kind, count, environment, 0)
    for one in running:
        one.stdout.readline()  # type: ignore[union-attr]
    for one in running:
        one.send_signal(how)
    for one in running:
        one.communicate(timeout=PATIENCE)


def main() -> None:
    """Every part in turn, a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--processes", type=int, default=7)
    parser.add_argument("--parts", default="25,28,100", help="per cent of the GPU for each process")
    parser.add_argument("--kind", choices=KINDS, default="six layers, compiled", help="what is trained")
    parser.add_argument("--kill", choices=("KILL", "TERM", "INT"), default="KILL")
    parser.add_argument("--member", type=int, help=argparse.SUPPRESS)
    chosen, rows = parser.parse_args(), []
    if not torch.cuda.is_available():
        parser.error("this looks at a GPU, and there is none")
    if chosen.member is not None:
        be_one_of_many(chosen.kind, chosen.member)
        return
    crowd = (chosen.kind, chosen.processes)
    for part in map(int, chosen.parts.split(",")):
        with shared_gpu() as served:
            if not served:
                parser.error("this asks about an MPS server, and none could be started")
            environment = served | {GPU_PART: str(part)}
            before = watch_crowd(*crowd, environment)
            kill_crowd(*crowd, environment, signal.Signals[f"SIG{chosen.kill}"])
            after = watch_crowd(*crowd, environment)
        losses = {"losses": chosen.processes * STEPS, "broken_before": before, "broken_after_a_kill": after}
        rows.append({"per_cent_each": part} | losses)
        print(rows[-1], flush=True)
    if chosen.out:
        command = f"python benchmarks/interrupted_gpu.py --processes {chosen.processes} --parts {chosen.parts}"
        record = {
            "benchmark": "interrupted_gpu",
            "command": f"{command} --kind {chosen.kind!r} --kill {chosen.kill}",
            "rows": rows,
        }
        write_json(chosen.out / "interrupted.json", record | {"versions": versions(), "machine": machine()})


if __name__ == "__main__":
    main()
