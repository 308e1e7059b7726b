"""Hidden states kept in float32, float16 and int8: bytes a text, speed of writing and reading, and what heads learn.

    python benchmarks/feature_store.py e5-small --task sst2 --data data --examples 4000 --out results/feature_store

A sample of the task is stored in each way; the same head is trained on each store, and once with the backbone run at
every step. The size of the whole training set is predicted from its real lengths, for this model and for BERT-base,
and compared with 13 states x 128 places x 768 float32 numbers a text, as BERT-Vision wrote them.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from smallbert.features.building import build_store
from smallbert.features.plan import plan_store
from smallbert.features.store import KINDS, Store, open_store
from smallbert.machine.facts import machine, versions
from smallbert.machine.files import write_json
from smallbert.making.run import run_recipe
from smallbert.making.starting import start_from, task_from
from smallbert.measuring.evaluate import evaluate
from smallbert.model.encoder import Encoder
from smallbert.tasks import Task
from smallbert.tasks.derived import limit
from smallbert.texts.data import Stream, tokenise, usable_length

ORIGINAL = 13 * 128 * 768 * 4  # bytes a text


def predict(encoder: Encoder, stream: Stream) -> list[dict[str, Any]]:
    """The bytes of a whole training set in each precision, all layers and tokens."""
    rows = []
    for dtype in KINDS["dtype"]:
        mine = plan_store(encoder, stream, dtype=dtype)
        base = replace(mine, about={**mine.about, "layers": list(range(13)), "width": 768})
        rows.append({"dtype": dtype, "texts": len(stream), "bytes": mine.total, "bytes as 12 x 768": base.total})
        rows[-1]["times smaller than the original"] = round(ORIGINAL * len(stream) / base.total, 1)
        print("whole set:", rows[-1], flush=True)
    return rows


def read_speed(store: Store, batch: int = 32, seconds: float = 5.0) -> float:
    """Stored megabytes a second, batches of texts drawn at random."""
    draw, read, begun = np.random.default_rng(0), 0, time.monotonic()
    each = store.bytes / store.counts.sum()
    while time.monotonic() - begun < seconds:
        index = draw.choice(len(store), batch)
        store.read(index)
        read += int(store.counts[index].sum())
    return float(read * each / 1e6 / (time.monotonic() - begun))


def learn(encoder: Encoder, task: Task, settings: str, store: str, seed: int) -> tuple[float, float]:
    """The score of a head on dev and the seconds it took to train."""
    begun = time.monotonic()
    made = run_recipe(f"train({settings}, freeze='backbone', store={store!r})", encoder, task, seed, judge=False)
    took = time.monotonic() - begun
    found = evaluate(made.encoder, task, "dev", usable_length(encoder, None, task))
    return next(iter(found["scores"].values()))["value"], took


def main() -> None:
    """Measure and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--task", default="sst2")
    parser.add_argument("--data")
    parser.add_argument("--examples", type=int, default=4000)
    parser.add_argument("--dev", type=int, help="score on a sample of so many dev examples")
    parser.add_argument("--recipe", default="pool_layers", help="what is put on the model and then trained")
    parser.add_argument("--settings", default="epochs=5, lr=1e-3")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", default="results/feature_store")
    chosen = parser.parse_args()
    start, whole = start_from(chosen.model), task_from(chosen.task, chosen.data)
    encoder = start.encoder.to("cuda" if torch.cuda.is_available() else "cpu")
    length = usable_length(encoder, None, whole)
    predicted = predict(encoder, tokenise(encoder.tokenizer, whole.split("train"), whole.kind, length))
    task = limit(whole, chosen.examples)
    task = task if chosen.dev is None else limit(task, chosen.dev, split="dev")
    stream = tokenise(encoder.tokenizer, task.split("train"), task.kind, length)
    seeds, rows = [int(seed) for seed in chosen.seeds.split(",")], []
    heads = {seed: run_recipe(f"head | {chosen.recipe}", encoder, task, seed).encoder for seed in seeds}
    with tempfile.TemporaryDirectory() as folder:  # TMPDIR says on which disk
        for dtype in (*KINDS["dtype"], "none"):
            row: dict[str, Any] = {"store": dtype}
            path = "none"
            if dtype != "none":
                path, begun = f"{folder}/{dtype}", time.monotonic()
                store = build_store(encoder, stream, path, dtype=dtype)
                row |= {"bytes a text": round(store.bytes / len(store))}
                row |= {"build MB/s": round(store.bytes / 1e6 / (time.monotonic() - begun), 1)}
                row |= {"read MB/s, unchecked, from memory": round(read_speed(open_store(path, verify=False)), 1)}
            found = [learn(heads[seed], task, chosen.settings, path, seed) for seed in seeds]
            row |= {"scores": [round(score, 2) for score, _ in found]}
            row |= {"mean": round(float(np.mean([score for score, _ in found])), 3)}
            row |= {"seconds a head": round(float(np.mean([took for _, took in found])), 1)}
            rows.append(row)
            print(row, flush=True)
    words = [f"python benchmarks/feature_store.py {Path(chosen.model).name} --data data --task {chosen.task}"]
    words += [f"--examples {chosen.examples}", *([f"--dev {chosen.dev}"] if chosen.dev else [])]
    words += [f'--recipe "{chosen.recipe}" --settings "{chosen.settings}" --seeds {chosen.seeds}']
    facts = {"benchmark": "feature_store", "command": " ".join(words), "whole set": predicted, "rows": rows}
    write_json(Path(chosen.out) / "feature_store.json", {**facts, "versions": versions(), "machine": machine()})


if __name__ == "__main__":
    main()
