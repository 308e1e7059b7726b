"""Training throughput: the reference way of movement pruning against ours, in one run.

    python benchmarks/train_throughput.py --out results/train_throughput         (GPU: BERT-base, batches 32 and 256)
    python benchmarks/train_throughput.py --cpu --out results/train_throughput   (length buckets against padding)

The reference way is what the original movement-pruning script does: every text padded to 128 tokens, float32, and in
every forward pass a full sort of every score matrix to find its mask. Ours is this package's own training loop. Weights
are random (BERT-base shape), lengths are log-normal with mean 40 and at most 128 tokens, like MNLI's.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, BertModel

from smallbert.machine.facts import machine, versions
from smallbert.machine.files import write_json
from smallbert.methods import METHODS
from smallbert.model.encoder import Encoder
from smallbert.recipes.recipe import Recipe
from smallbert.texts.data import STUDENT, Stream, Tokens
from smallbert.training import loop
from smallbert.training.phase import Phase

LONGEST = 128


def make_stream(count: int) -> Stream:
    """Random texts in three classes, with log-normal lengths of mean 40, from 4 to 128 tokens."""
    random, spread = np.random.default_rng(1), 0.6
    lengths = np.clip(random.lognormal(np.log(40) - spread**2 / 2, spread, count).round(), 4, LONGEST).astype(np.int64)
    ids = random.integers(1000, 30000, lengths.sum()).astype(np.int32)
    tokens = Tokens(ids, np.zeros(len(ids), np.uint8), np.concatenate([[0], np.cumsum(lengths)]))
    return Stream({STUDENT: tokens}, random.integers(0, 3, count), "classify")


class _SortedMask(torch.autograd.Function):
    """The original's mask: sort every score, keep the first tenth."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, keep: float) -> torch.Tensor:
        mask = scores.clone().flatten()
        _, order = mask.sort(descending=True)
        count = int(keep * scores.numel())
        mask[order[count:]] = 0
        mask[order[:count]] = 1
        return mask.view_as(scores)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class _SortingLinear(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(inputs, self.weight * _SortedMask.apply(self.scores, 0.1), self.bias)


def time_reference(
    stream: Stream, batch: int, steps: int, warm: int, masks: bool, device: str, config: BertConfig
) -> float:
    """Examples a second of the reference way."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model = BertForSequenceClassification(config).to(device).train()
    for module in list(model.bert.encoder.modules()) if masks else []:
        if type(module) is nn.Linear:
            module.__class__ = _SortingLinear
            module.scores = nn.Parameter(torch.zeros_like(module.weight))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-5)
    tokens, order = stream.views[STUDENT], np.random.default_rng(2).permutation(len(stream))
    begun = 0.0
    for step in range(warm + steps):
        if step == warm:
            _wait(device)
            begun = time.perf_counter()
        index = order[step * batch : (step + 1) * batch]
        ids, mask = torch.zeros(2, batch, LONGEST, dtype=torch.long)
        for row, number in enumerate(index):
            text = tokens.ids[tokens.offsets[number] : tokens.offsets[number + 1]]
            ids[row, : len(text)], mask[row, : len(text)] = torch.from_numpy(text).long(), 1
        labels = torch.from_numpy(stream.labels[index])
        model(ids.to(device), attention_mask=mask.to(device), labels=labels.to(device)).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
    _wait(device)
    return batch * steps / (time.perf_counter() - begun)


def time_ours(
    stream: Stream,
    batch: int,
    steps: int,
    warm: int,
    extra: str,
    device: str,
    config: BertConfig,
    compiles: bool = False,
) -> float:
    """Examples a second of this package's own loop, with a method such as "movement(0.1)" attached or none."""
    encoder = Encoder(BertModel(config)).to(device)
    head = {"kind": "classify", "labels": ["a", "b", "c"], "outputs": 3, "from_pooler": True}
    encoder.apply_method(METHODS["head"](), head)
    epochs = (warm + steps) / -(-len(stream) // batch)
    compiled = "compile=True, " if compiles else ""
    (methods,) = Recipe(f"{extra + ' + ' if extra else ''}train({compiled}epochs={epochs}, batch={batch}, lr=1e-5)")
    phase = Phase(encoder, tuple(methods), None, 0, {})
    phase.stream = stream
    for method in phase.methods:
        method.attach(phase)
    begun = 0.0
    whole = loop.set_rates  # the loop calls it once a step, before the step: a place to read the clock from

    def clock(*arguments: Any) -> None:
        nonlocal begun
        if phase.step == warm:
            _wait(device)
            begun = time.perf_counter()
        whole(*arguments)

    loop.set_rates = clock
    try:
        loop.train(phase, lambda *_: None)
    finally:
        loop.set_rates = whole
    _wait(device)
    return batch * (phase.total - warm) / (time.perf_counter() - begun)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Run both ways, print the table, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="on the CPU: length buckets alone, no masks")
    parser.add_argument("--out", type=Path, help="folder for the record")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3, help="on the CPU: how often the two ways take turns")
    options = parser.parse_args()
    config = BertConfig(num_labels=3, num_hidden_layers=options.layers)
    device = "cpu" if options.cpu or not torch.cuda.is_available() else "cuda"
    stream, rows = make_stream(60_000), list[dict[str, Any]]()

    def show(name: str, batch: int, speed: float) -> None:
        first = rows[0]["examples_per_second"] if rows else speed
        rows.append(
            {"way": name, "batch": batch, "examples_per_second": round(speed, 2), "times": round(speed / first, 2)}
        )
        print(f"{name:50s} batch {batch:4d} {speed:10.1f} examples/s {speed / first:7.2f} x", flush=True)

    if device == "cpu":  # in turns, so that noise hits both alike; both go once over the same examples
        torch.set_num_threads(2)
        rounds = []
        for _ in range(options.rounds):
            few = make_stream(32 * (options.steps or 8))  # few batches would make poor buckets
            steps = len(few) // 32
            padded = time_reference(few, 32, steps, 0, False, device, config)
            rounds.append((padded, time_ours(few, 32, steps, 0, "", device, config)))
        show("reference: padded to 128, float32", 32, float(np.median([padded for padded, _ in rounds])))
        show("ours: length buckets, float32", 32, float(np.median([bucketed for _, bucketed in rounds])))
        rows[-1]["times"] = round(float(np.median([bucketed / padded for padded, bucketed in rounds])), 2)
        rows[-1]["times_by_round"] = str([round(bucketed / padded, 2) for padded, bucketed in rounds])
    else:
        steps = options.steps or 100
        name = "reference: padded to 128, float32, full sorts"
        show(name, 32, time_reference(stream, 32, steps // 4, 5, True, device, config))
        for batch in (32, 256):
            show("ours: no masks", batch, time_ours(stream, batch, steps, 60, "", device, config))
            for scope in ("local", "global"):
                text = f"movement(keep=0.1, scope='{scope}', begin=0.0, finish=0.01)"
                show(f"ours: movement masks, {scope}", batch, time_ours(stream, batch, steps, 60, text, device, config))
                speed = time_ours(stream, batch, steps, 60, text, device, config, compiles=True)
                show(f"ours: movement masks, {scope}, compiled layers", batch, speed)
    if options.out:
        given = [
            f"--{name} {value}"
            for name, value in vars(options).items()
            if name in ("layers", "steps", "rounds") and value
        ]
        command = " ".join(["python benchmarks/train_throughput.py", *(["--cpu"] if device == "cpu" else []), *given])
        record = {"benchmark": "train_throughput", "command": command, "rows": rows}
        write_json(options.out / f"{device}.json", record | {"versions": versions(), "machine": machine()})


if __name__ == "__main__":
    main()
