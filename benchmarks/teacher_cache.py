"""What a teacher costs a step: not at all, looked up in its cache, looking itself; with bytes, read speed and memory.

    python benchmarks/teacher_cache.py e5-small --task sst2 --data data --out results/teacher_cache
    python benchmarks/teacher_cache.py e5-small --task sst2 --data data --cuda --examples 20000 --steps 200

All arms train the same small student on the same batches, some steps each in turns; a ratio is the median over rounds
of a round's time to fine-tuning's. Heads are new and not trained, which costs the same. Memory is what a process holds
for itself (RssAnon): pages of mapped files belong to the system, which takes them back when it needs them. What the C
library keeps of freed memory would blur that, so it is told to give all back.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from smallbert.features.asking import keep_taught
from smallbert.features.taught import Taught
from smallbert.machine.facts import machine, versions
from smallbert.machine.files import write_json
from smallbert.making.run import run_recipe
from smallbert.making.starting import start_from, task_from
from smallbert.model.encoder import Encoder
from smallbert.model.folders import save_folder
from smallbert.tasks import Task
from smallbert.tasks.derived import limit
from smallbert.texts.batches import Layout, make_batch
from smallbert.training.loop import next_step, ready, stepper
from smallbert.training.phase import Phase

TERMS = {
    "scores": "distill(teacher={0!r})",
    "first tokens": "align('first', transform='l2', teacher={0!r}) + distill(teacher={0!r})",
    "all tokens": "align('hidden', teacher={0!r}) + distill(teacher={0!r})",
    "relations": "align('relations', layers={{-1: -1}}, teacher={0!r}) + distill(teacher={0!r})",
    "attention": "align('attention', layers='last', teacher={0!r}) + distill(teacher={0!r})",
}
TIDY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}


class _Caught(Exception):
    """Carries a phase out of the run that was about to train it."""


def phase_of(recipe: str, student: Encoder, task: Task, device: str) -> Phase:
    """The training phase of a recipe, before its first step."""

    def catch(phase: Phase, *_: Any) -> None:
        raise _Caught(phase)

    with patch("smallbert.making.run.train", catch):
        try:
            run_recipe(recipe, student, task, device=device)
        except _Caught as caught:
            return caught.args[0]
    raise ValueError(f"{recipe} does not train")


def time_steps(
    student: Encoder, teacher: str, task: Task, folder: Path, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Milliseconds a step of every arm, in turns, and its ratio to fine-tuning."""
    device = "cuda" if options.cuda else "cpu"
    epochs = 2 * (options.warm + options.rounds * options.steps) / -(-len(task.split("train")) // options.batch) + 2
    settings = f"train(epochs={epochs:.0f}, batch={options.batch}, lr=1e-5, cache={{!r}})"
    arms = {"fine-tuning": settings.format("none")}
    for name, terms in TERMS.items():
        for place in (str(folder), "none"):
            said = f"distilling {name}, {'looking' if place == 'none' else 'from the cache'}"
            arms[said] = f"{terms.format(teacher)} + {settings.format(place)}"
    with ExitStack() as stack:
        ways = {}
        for name, recipe in arms.items():
            phase = phase_of(recipe, student, task, device)
            plan = stack.enter_context(ready(phase, lambda *_: None))
            phase.begin_training()
            ways[name] = (phase, plan, stepper(phase))
        took: dict[str, list[float]] = {name: [] for name in arms}
        for turn in range(-1, options.rounds):  # the first one is to warm up
            for name, way in ways.items():
                wait(device)
                begun = time.perf_counter()
                for _ in range(options.warm if turn < 0 else options.steps):
                    next_step(*way)
                wait(device)
                took[name].append((time.perf_counter() - begun) / options.steps * 1e3)
    rows = []
    for name, times in took.items():
        ratios = [mine / plain for mine, plain in zip(times[1:], took["fine-tuning"][1:], strict=True)]
        rows.append({"arm": name, "ms a step": round(median(times[1:]), 2), "to fine-tuning": round(median(ratios), 3)})
        rows[-1]["rounds"] = [round(ratio, 3) for ratio in ratios]
        print({key: value for key, value in rows[-1].items() if key != "rounds"}, flush=True)
    return rows


def wait(device: str) -> None:
    """Until a GPU is done."""
    if device == "cuda":
        torch.cuda.synchronize()


def held() -> float:
    """Megabytes that this process holds for itself."""
    line = next(line for line in Path("/proc/self/status").read_text().split("\n") if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024


def forget(found: Taught) -> None:
    """Ask the system to drop the files of a cache from memory, and drop our own maps of them."""
    for store in found.stores:
        store._shards.clear()
        store.verify = False
        for file in store.path.glob("*.safetensors"):
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_speed(found: Taught, phase: Phase, batches: int) -> dict[str, float]:
    """Stored megabytes a second, brought into random batches: the system asked to drop the files before, and not."""
    assert phase.stream is not None
    order = np.random.default_rng(0).permutation(found.texts)[: batches * 32]
    some = [order[start : start + 32] for start in range(0, len(order), 32)]
    bare = [make_batch(phase.stream, index, Layout(False, 128)) for index in some]
    each = sum(store.bytes for store in found.stores) / found.texts
    made = {}
    forget(found)
    begun, total = time.perf_counter(), 0
    for file in (file for store in found.stores for file in sorted(store.path.glob("0*.safetensors"))):
        with file.open("rb", buffering=0) as opened:
            while piece := opened.read(2**22):
                total += len(piece)
    made["plain reads from end to end, MB/s"] = round(total / 1e6 / (time.perf_counter() - begun), 1)
    found.add_to(bare[0], some[0])  # the scores of all texts are in memory from here on
    for name in ("cold", "warm"):
        if name == "cold":
            forget(found)
        begun = time.perf_counter()
        for batch, index in zip(bare, some, strict=True):
            found.add_to(batch, index)
        made[f"{name} random reads, MB/s"] = round(each * len(order) / 1e6 / (time.perf_counter() - begun), 1)
    return made


def measure_cache(student: Encoder, teacher: str, task: Task, folder: Path, device: str) -> None:
    """Fill a cache and read from it; bytes, speed, and memory above what the phase held before. Printed as JSON."""
    phase = phase_of(f"{TERMS['all tokens'].format(teacher)} + train(cache={str(folder)!r})", student, task, device)
    before, seen, begun = held(), [0.0], time.perf_counter()
    with keep_taught(phase, None, lambda *_: seen.append(held() - before)) as (found,):
        took, filling = time.perf_counter() - begun, max(seen)
        texts, size = found.texts, sum(store.bytes for store in found.stores)
        row = {"texts": texts, "MB": round(size / 1e6, 1), "kB a text": round(size / texts / 1e3, 2)}
        row |= {"texts a second, filling": round(texts / took, 1), **read_speed(found, phase, 200)}
        row |= {"held before, MB": round(before), "more while filling, MB": round(filling)}
        row |= {"more after reading, MB": round(held() - before)}
    print(json.dumps(row), flush=True)


def main() -> None:
    """Measure and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--task", default="sst2")
    parser.add_argument("--data")
    parser.add_argument("--layers", type=int, default=3, help="of the student")
    parser.add_argument("--examples", type=int, default=1000)
    parser.add_argument("--sizes", default="1000,4000", help="of data sets whose memory is compared; nothing for none")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--warm", type=int, default=3, help="steps before any are timed (60 or more on a GPU)")
    parser.add_argument("--steps", type=int, default=4, help="of one arm in a round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--out", default="results/teacher_cache")
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # a folder: fill a cache there and print what it took
    options = parser.parse_args()
    device = "cuda" if options.cuda else "cpu"
    if not options.cuda:
        torch.set_num_threads(1)
    start, whole = start_from(options.model), task_from(options.task, options.data)
    task = limit(whole, options.examples)
    with tempfile.TemporaryDirectory() as aside:  # TMPDIR says on which disk
        made, teacher = Path(options.measure or aside), f"{options.measure or aside}/teacher"
        encoder = run_recipe("head", start.encoder, task, device="cpu").encoder
        student = run_recipe(f"drop_layers({options.layers})", encoder, task, device="cpu").encoder
        if options.measure:
            measure_cache(student, teacher, task, made / f"cache-{options.examples}", device)
            return
        save_folder(encoder, teacher)
        given = ("task", "layers", "examples", "sizes", "batch", "warm", "steps", "rounds")
        words = [
            f"python benchmarks/teacher_cache.py {Path(options.model).name} --data data" + " --cuda" * options.cuda
        ]
        command = " ".join([*words, *(f"--{name} {getattr(options, name)}" for name in given)])
        facts: dict[str, Any] = {"benchmark": "teacher_cache", "command": command, "caches": []}
        for size in filter(None, options.sizes.split(",")):
            command = [sys.executable, __file__, *sys.argv[1:], "--examples", size, "--measure", aside]
            rows = []
            for more in (TIDY, {}):  # first filled and its memory taken, then read at full speed
                done = subprocess.run(command, env=os.environ | more, stdout=subprocess.PIPE, text=True, check=True)
                rows.append(json.loads(done.stdout.strip().split("\n")[-1]))
            facts["caches"].append(rows[0] | {name: value for name, value in rows[1].items() if "reads" in name})
            print(facts["caches"][-1], flush=True)
        facts["rows"] = time_steps(student, teacher, task, made / "cache", options)
        write_json(Path(options.out) / f"{device}.json", {**facts, "versions": versions(), "machine": machine()})


if __name__ == "__main__":
    main()
