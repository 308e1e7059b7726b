"""What other products and dropout gain on a CPU on which torch's own library is slow: training steps and single texts.

    python benchmarks/cpu_products.py all-MiniLM-L6-v2 e5-small --task sst2 --data data --out results/cpu_products

Each model takes the same training steps, other ones in each turn, and reads the same texts, by torch's own products and
dropout and by what model/cpu.py has for this CPU, in turns; a ratio is the median over turns.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from teacher_cache import phase_of

from smallbert import load, load_task
from smallbert.machine.facts import machine, versions
from smallbert.machine.files import write_json
from smallbert.measuring.cost import take_turns
from smallbert.model import cpu
from smallbert.model.encoder import Encoder
from smallbert.model.folders import probe_batch
from smallbert.tasks import Task
from smallbert.training.loop import next_step, ready, stepper

READS = (32, 1, 1), (128, 1, 1), (32, 64, 2)  # tokens, texts, threads


def compare(run: Callable[[], Any], turns: int) -> dict[str, float]:
    """Milliseconds by torch's own way and by ours, and how many times as fast ours is."""

    def by(ours: bool) -> None:
        with nullcontext() if ours else patch.object(cpu, "_instead", dict):
            run()

    took = take_turns({"torch": partial(by, False), "ours": partial(by, True)}, 0.0, turns, 1)
    ratios = took["torch"] / took["ours"]
    return {
        "ms, torch's own": round(float(np.median(took["torch"])) * 1e3, 1),
        "ms": round(float(np.median(took["ours"])) * 1e3, 1),
        "times as fast": round(float(np.median(ratios)), 2),
        "from": round(float(ratios.min()), 2),
        "to": round(float(ratios.max()), 2),
    }


def train_some(encoder: Encoder, task: Task, batch: int, steps: int, stack: ExitStack) -> Callable[[], None]:
    """A call that takes the next few steps of a training, each way the same."""
    phase = phase_of(f"train(epochs=1, batch={batch}, lr=1e-9)", encoder, task, "cpu")
    plan = stack.enter_context(ready(phase, lambda *_: None))
    phase.begin_training()
    take, taken = stepper(phase), Counter[int]()

    def run() -> None:
        way = len(cpu._instead())
        phase.step = taken[way]
        for _ in range(steps):
            next_step(phase, plan, take)
        taken[way] = phase.step

    return run


def read_some(encoder: Encoder, length: int, batch: int) -> Callable[[], None]:
    """A call that reads some texts of one length."""
    texts = replace(probe_batch(encoder, (length,) * batch), attention_mask=None)

    def run() -> None:
        with torch.inference_mode():
            encoder.eval()(texts)

    return run


def main() -> None:
    """Time each model, print a table, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--task", default="sst2")
    parser.add_argument("--data", help="where the files of known tasks are")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10, help="training steps a turn")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--out", type=Path, help="folder for the record")
    options = parser.parse_args()
    task, rows = load_task(options.task, options.data), []
    print("other than torch's own here:", [function.__name__ for function in cpu._instead()])

    def show(model: str, what: str, run: Callable[[], None], threads: int) -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        rows.append({"model": Path(model).name, "what": what, "threads": threads, **compare(run, options.turns)})
        torch.set_num_threads(before)
        print(rows[-1], flush=True)

    for model in options.models:
        encoder = load(model)
        with ExitStack() as stack:
            steps = train_some(encoder, task, options.batch, options.steps, stack)
            show(model, f"{options.steps} training steps of {options.batch} texts", steps, torch.get_num_threads())
        for length, batch, threads in READS:
            show(model, f"{batch} texts of {length} tokens", read_some(encoder, length, batch), threads)
    if options.out is not None:
        given = " ".join(f"--{name} {getattr(options, name)}" for name in ("task", "data", "batch", "steps", "turns"))
        command = f"python benchmarks/cpu_products.py {' '.join(options.models)} {given}"
        record = {"benchmark": "cpu_products", "command": command, "rows": rows}
        write_json(options.out / "cpu.json", {**record, "versions": versions(), "machine": machine()})


if __name__ == "__main__":
    main()
