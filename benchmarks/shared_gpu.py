"""How long a step of a small student takes on a GPU, where its time goes, and what several processes at once gain.

    python benchmarks/shared_gpu.py --out results/shared_gpu

Random weights at e5-small's shape (or MPNet's), 128 texts of SST-2's lengths a step or what `--lengths` says, by this
package's own loop. Alone: milliseconds a step, and seconds until the first 150 steps are over, compiling and recording
included. Together: so many processes of one kind at once, under MPS where there is one; steps a second are those of
all, counted from when all are warm. With `--parts 100,50,25` only that, with so many per cent of the GPU for each
process, on texts of SNLI's lengths. With `--profile KIND` the kernels of one kind, most costly first, how long a step
of it takes, and nothing else.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import BertConfig, BertModel, MPNetConfig, MPNetModel

from smallbert.machine.facts import GPU_PART, machine, versions
from smallbert.machine.files import write_json
from smallbert.machine.sharing import shared_gpu
from smallbert.methods import METHODS
from smallbert.model.encoder import Encoder
from smallbert.recipes.recipe import Recipe
from smallbert.texts.data import STUDENT, Stream, Tokens
from smallbert.training import loop
from smallbert.training.conditions import compiled_layers
from smallbert.training.phase import Phase

WARM, STEPS, SECONDS, PATIENCE = 150, 300, 4.0, 120.0
LENGTHS = {  # of texts: mean, spread of their logarithm, longest; and how many a step
    "SST-2": (13, 0.6, 66, 128),
    "SNLI": (26, 0.35, 96, 128),
    "QQP": (30, 0.36, 128, 256),
}
TAUGHT = "align('hidden', layers='uniform', weight=10.0, teacher='t') + distill(teacher='t') + "


class Kind(NamedTuple):
    """What is trained: layers, word pieces, and what it learns beside its labels."""

    layers: int = 6
    pieces: int = 30522
    methods: str = ""
    compiled: bool = False
    layout: str = "auto"
    family: str = "bert"


KINDS = {
    "six layers": Kind(),
    "six layers, compiled": Kind(compiled=True),
    "six layers, taught": Kind(methods=TAUGHT),
    "twelve layers": Kind(layers=12),
    "pruned and taught": Kind(12, 7000, "smooth_movement(0.1, begin=0.0, finish=0.5) + " + TAUGHT),
    "six layers of MPNet": Kind(family="mpnet"),
}


def make_encoder(kind: Kind, layers: int) -> Encoder:
    """A random model of e5-small's width, or of MPNet's, with two classes."""
    if kind.family == "mpnet":
        backbone = MPNetModel(MPNetConfig(num_hidden_layers=layers, vocab_size=kind.pieces), add_pooling_layer=False)
    else:
        shape = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": layers}
        backbone = BertModel(BertConfig(vocab_size=kind.pieces, **shape))
    encoder = Encoder(backbone).to("cuda" if torch.cuda.is_available() else "cpu")
    head = {"kind": "classify", "labels": ["a", "b"], "outputs": 2, "from_pooler": kind.family == "bert"}
    encoder.apply_method(METHODS["head"](), head)
    return encoder


def make_stream(task: str, count: int = 20_000) -> Stream:
    """Random texts with log-normal lengths like a task's."""
    random, (mean, spread, longest, _) = np.random.default_rng(1), LENGTHS[task]
    drawn = random.lognormal(np.log(mean) - spread**2 / 2, spread, count).round()
    lengths = np.clip(drawn, 4, longest).astype(np.int64)
    ids = random.integers(1000, 7000, lengths.sum()).astype(np.int32)
    tokens = Tokens(ids, np.zeros(len(ids), np.uint8), np.concatenate([[0], np.cumsum(lengths)]))
    return Stream({STUDENT: tokens}, random.integers(0, 2, count), "classify")


@contextmanager
def training(kind: Kind, task: str = "SST-2") -> Iterator[Callable[[int], float]]:
    """A function that takes so many steps, waits until the GPU has done them, and gives the last loss."""
    torch.manual_seed(0)
    marks = {"t": make_encoder(kind, 12).eval()} if "'t'" in kind.methods else {}
    settings = f"epochs=1000, batch={LENGTHS[task][3]}, lr=1e-5, cache='none', layout={kind.layout!r}"
    (methods,) = Recipe(f"{kind.methods}train({settings})")
    phase = Phase(make_encoder(kind, kind.layers), tuple(methods), None, 0, marks)
    phase.stream = make_stream(task)
    for method in phase.methods:
        method.attach(phase)
    phase.add_term_weights()
    with ExitStack() as held:
        plan = held.enter_context(loop.ready(phase, lambda *_: None))
        held.enter_context(compiled_layers(phase.readers() if kind.compiled else []))
        take = loop.stepper(phase)
        phase.begin_training()

        def run(steps: int) -> float:
            for _ in range(steps):
                loss = loop.next_step(phase, plan, take)
            return float(loss)

        yield run


def time_alone(name: str, task: str) -> dict[str, Any]:
    """Milliseconds a step, and how long it takes to begin."""
    begun = time.perf_counter()
    with training(KINDS[name], task) as run:
        run(WARM)
        warm = time.perf_counter()
        run(STEPS)
        step = 1000 * (time.perf_counter() - warm) / STEPS
    return {"kind": name, "processes": 1, "ms_a_step": round(step, 2), "began_seconds": round(warm - begun, 1)}


def be_one_of_many(name: str, task: str, folder: Path) -> None:
    """Warm up, wait for the others, and print how many steps a second were taken."""
    with training(KINDS[name], task) as run:
        run(WARM)
        (folder / str(os.getpid())).touch()
        while not (folder / "go").exists():
            time.sleep(0.01)
        begun, steps = time.perf_counter(), 0
        while time.perf_counter() - begun < SECONDS:
            run(20)
            steps += 20
        print(steps / (time.perf_counter() - begun))


def time_together(name: str, count: int, environment: dict[str, str], task: str = "SST-2") -> dict[str, Any]:
    """Steps a second of several processes together."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--member", folder, "--kind", name, "--lengths", task]
        how: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True, "env": {**os.environ, **environment}}
        running, begun = [subprocess.Popen(command, **how) for _ in range(count)], time.monotonic()
        while len(list(Path(folder).iterdir())) < count and all(one.poll() is None for one in running):
            if time.monotonic() - begun > PATIENCE:
                raise SystemExit(f"{count} processes were not warm after {PATIENCE:.0f} s")
            time.sleep(0.02)
        (Path(folder) / "go").touch()
        told = [one.communicate()[0].split() for one in running]
    if late := sum(not words for words in told):
        raise SystemExit(f"{late} of {count} processes ended before they had taken a step; see above why")
    rates = [float(words[-1]) for words in told]
    part = int(environment.get(GPU_PART, 100))
    return {"kind": name, "processes": count, "per_cent_each": part, "steps_per_second": round(sum(rates), 1)}


def show_kernels(name: str, task: str) -> None:
    """Print what a step's kernels are and how long they take, and a step as a whole."""
    from torch.profiler import ProfilerActivity, profile

    with training(KINDS[name], task) as run:
        run(WARM)
        begun = time.perf_counter()
        run(100)
        step = (time.perf_counter() - begun) * 10
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            run(20)
    events = sorted((one for one in seen.key_averages() if one.device_time_total), key=lambda e: -e.device_time_total)
    busy = sum(one.device_time_total for one in events) / 20e3
    count = sum(one.count for one in events) / 20
    print(f"{name}, {task}: {step:.2f} ms a step, {count:.0f} kernels that take {busy:.2f} ms")
    for one in events[:30]:
        each = one.device_time_total / one.count
        print(f"{one.device_time_total / 20:8.1f} us, {one.count / 20:6.1f} times {each:6.1f}: {one.key[:100]}")


def main() -> None:
    """Run every row in turn, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--processes", default="1,8", help="how many at once, separated by commas")
    parser.add_argument("--parts", help="per cent of the GPU for each process, separated by commas")
    parser.add_argument("--profile", choices=KINDS, help="show the kernels of one kind, measure nothing else")
    parser.add_argument("--member", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kind", choices=KINDS, default="six layers", help=argparse.SUPPRESS)
    parser.add_argument("--lengths", choices=LENGTHS, default="SST-2", help="of texts: like those of this task")
    chosen, rows = parser.parse_args(), []
    if not torch.cuda.is_available():
        parser.error("this measures a GPU, and there is none")
    if chosen.profile:
        show_kernels(chosen.profile, chosen.lengths)
    elif chosen.member:
        be_one_of_many(chosen.kind, chosen.lengths, chosen.member)
    elif chosen.parts:
        for count, part in product(chosen.processes.split(","), chosen.parts.split(",")):
            with shared_gpu() as environment:
                rows.append(time_together("six layers", int(count), environment | {GPU_PART: part}, "SNLI"))
            print(rows[-1], flush=True)
    else:
        with training(KINDS["six layers, taught"]) as run:  # whoever comes first would begin a cold GPU for all
            run(WARM)
        for name in KINDS:
            rows.append(time_alone(name, chosen.lengths))
            print(rows[-1], flush=True)
        for count in map(int, chosen.processes.split(",")):
            with shared_gpu() as environment:
                rows.append(time_together("six layers", count, environment, chosen.lengths))
            print(rows[-1], flush=True)
    if rows and chosen.out:
        command = f"python benchmarks/shared_gpu.py --lengths {chosen.lengths} --processes {chosen.processes}"
        command += f" --parts {chosen.parts}" if chosen.parts else ""
        record = {"benchmark": "shared_gpu", "command": command, "rows": rows}
        name = "parts.json" if chosen.parts else f"cuda-{chosen.lengths}.json"
        write_json(chosen.out / name, record | {"versions": versions(), "machine": machine()})


if __name__ == "__main__":
    main()
