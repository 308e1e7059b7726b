"""How good a guide are movement pruning's scores when the ramp begins? Masks by them against masks by chance and size.

    python benchmarks/movement_scores.py e5-small --data data --out results/movement_scores

Trains SST-2 with every weight seen, as movement pruning does before its ramp, and at some steps takes out the lowest
shares of each matrix by (a) the learned scores, (b) the same turned round, (c) chance, (d) chance among weights of the
sizes that (a) takes, (e) size, and scores what is left on dev, without training. Beside each score stands which share
of what was taken out lies in the one per cent of inputs that lose most: 0.01 and a little by chance, more where a
criterion takes out whole inputs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from smallbert.machine.facts import machine, versions
from smallbert.machine.files import write_json
from smallbert.making.run import run_recipe
from smallbert.making.starting import start_from, task_from
from smallbert.measuring.evaluate import evaluate
from smallbert.methods import METHODS, Method
from smallbert.training.masks import Stacks, maskable

BINS = 256
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3)
Scores = dict[str, Tensor]
ROWS: list[dict[str, Any]] = []


class _Enough(Exception):
    pass


def learned(phase: Any, weights: Scores) -> Scores:
    """The scores that movement pruning has learned so far."""
    stacks, found = Stacks(phase.encoder, list(weights)), {}
    for group, rows in zip(stacks.groups, phase.modules["movement"], strict=True):
        found |= {name: row.detach().view_as(weights[name]) for name, row in zip(group, rows, strict=True)}
    return found


def turned(phase: Any, weights: Scores) -> Scores:
    """The learned scores turned round: what training moves away from zero goes first."""
    return {name: -scores for name, scores in learned(phase, weights).items()}


def chance(phase: Any, weights: Scores) -> Scores:
    """No scores at all."""
    torch.manual_seed(0)
    return {name: torch.rand_like(weight) for name, weight in weights.items()}


def same_sizes(phase: Any, weights: Scores) -> Scores:
    """The learned scores, dealt out anew among weights of about the same size."""
    torch.manual_seed(0)
    found = {}
    for name, scores in learned(phase, weights).items():
        order = weights[name].abs().flatten().argsort()
        order = order[: order.numel() // BINS * BINS].view(BINS, -1)
        dealt = scores.flatten().clone()
        dealt[order] = dealt[order].gather(1, torch.rand(order.shape, device=order.device).argsort(1))
        found[name] = dealt.view_as(scores)
    return found


def size(phase: Any, weights: Scores) -> Scores:
    """How large each weight is."""
    return {name: weight.abs() for name, weight in weights.items()}


WAYS: dict[str, Callable[[Any, Scores], Scores]] = {
    "learned scores": learned,
    "turned round": turned,
    "chance": chance,
    "chance, same sizes": same_sizes,
    "size": size,
}


def score_without(phase: Any, task: Any, weights: Scores, scores: Scores, share: float) -> list[float]:
    """Accuracy when the lowest share of every matrix is taken out, and how crowded that is; weights are put back."""
    before, crowds = {name: weight.clone() for name, weight in weights.items()}, [0.0]
    for name, weight in weights.items():
        count = int(share * weight.numel())
        if count:
            gone = scores[name] <= scores[name].flatten().kthvalue(count).values
            weight.mul_(~gone)
            most = gone.sum(0).sort(descending=True).values[: max(1, weight.shape[1] // 100)]
            crowds.append(float(most.sum() / gone.sum()))
    phase.encoder.eval()
    found = evaluate(phase.encoder, task)["scores"]["accuracy"]["value"]
    phase.begin_training()
    for name, weight in weights.items():
        weight.copy_(before[name])
    return [round(found, 1), round(sum(crowds) / max(1, len(crowds) - 1), 3)]


def main() -> None:
    """Train, look, write down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--data", default=None)
    parser.add_argument("--out", default="results/movement_scores")
    parser.add_argument("--seed", type=int, default=9)
    parser.add_argument("--looks", type=int, nargs="+", default=[500, 1000, 2100], help="steps at which to look")
    chosen = parser.parse_args()
    task, start = task_from("sst2", chosen.data), start_from(chosen.model)

    class Look(Method):
        """Take out the lowest shares by each kind of score."""

        trains: ClassVar[bool] = True

        def every(self) -> int:
            """Often enough to meet every step asked for."""
            return 100

        @torch.no_grad()
        def look(self, phase: Any) -> None:
            """Score what is left."""
            if phase.step in chosen.looks:
                stored = dict(phase.encoder.named_parameters())
                weights = {name: stored[name].data for name in maskable(phase.encoder)}
                kinds = {name: make(phase, weights) for name, make in WAYS.items()}
                for share in (0.0, *SHARES):
                    row: dict[str, Any] = {"step": phase.step, "taken out": share}
                    row |= {name: score_without(phase, task, weights, scores, share) for name, scores in kinds.items()}
                    ROWS.append(row)
                    print(row, flush=True)
            if phase.step >= max(chosen.looks):
                raise _Enough

    assert "look" in METHODS
    loop = "train(epochs=8, lr=3e-5, warmup=0.125, weight_decay=0.0, freeze='embeddings')"
    try:
        run_recipe(f"movement(keep=0.1, begin=0.125, finish=0.875) + look + {loop}", start.encoder, task, chosen.seed)
    except _Enough:
        pass
    looks = " ".join(map(str, chosen.looks))
    command = f"python benchmarks/movement_scores.py e5-small --data data --seed {chosen.seed} --looks {looks}"
    facts = {"benchmark": "movement_scores", "command": command, "rows": ROWS}
    write_json(Path(chosen.out) / f"seed-{chosen.seed}.json", {**facts, "versions": versions(), "machine": machine()})


if __name__ == "__main__":
    main()
