"""Peak memory of inference with a mixture of layers: plain model, mixture as layers run, mixture of stored states.

    python benchmarks/mixture_memory.py --out results/mixture_memory

Every tensor that torch makes is followed from its birth to its death, so the numbers are exact and the same on any
machine; BERT-base shape, random weights, 32 texts of 128 tokens.
"""

from __future__ import annotations

import argparse
import weakref
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import BertConfig, BertModel

from smallbert.machine.facts import machine, versions
from smallbert.machine.files import write_json
from smallbert.methods import METHODS
from smallbert.model.batch import Batch
from smallbert.model.encoder import Encoder

HEADS = {"first token": ("classify", "first"), "mean of tokens": ("classify", "mean"), "every token": ("tag", "first")}


class Following(TorchDispatchMode):
    """Counts the bytes of all tensors that are alive, and the most there ever were."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.alive, self.peak = 0, 0
        self.seen = weakref.WeakSet(one.untyped_storage() for one in encoder.parameters())
        self.held = list(self.seen)

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), settings: Any = None) -> Any:
        made = function(*arguments, **(settings or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self._follow(tensor.untyped_storage())
        return made

    def _follow(self, storage: Any) -> None:
        if storage in self.seen:
            return
        self.seen.add(storage)
        size = storage.nbytes()
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._forget, size)

    def _forget(self, size: int) -> None:
        self.alive -= size


def make_encoder(kind: str, pool: str, recipe: str | None) -> Encoder:
    """A random BERT-base with a head, and with a mixture if a norm is named."""
    encoder = Encoder(BertModel(BertConfig()))
    plan = {"kind": kind, "labels": ["a", "b"], "outputs": 2, "from_pooler": kind == "classify"}
    encoder.apply_method(METHODS["head"](pool=pool), plan)
    if recipe is not None:
        method = METHODS["mix_layers"](norm=recipe)
        encoder.apply_method(method, method.plan(encoder, None))
    return encoder.eval()


def make_batch(texts: int, length: int) -> Batch:
    """Random texts, none of them padded."""
    ids = torch.randint(5, 30000, (texts, length))
    place = torch.arange(length).expand(texts, -1)
    return Batch(ids, torch.zeros_like(ids), place, size=texts, longest=length)


def measure(encoder: Encoder, batch: Batch, stored: bool = False) -> dict[str, float]:
    """Peak megabytes of one forward pass, without and with the weights."""
    with torch.no_grad(), Following(encoder) as following:
        if stored:
            encoder.read(encoder.states(batch), batch)
        else:
            encoder(batch)
    weights = sum(one.numel() * one.element_size() for one in encoder.parameters())
    return {"activations": following.peak / 1e6, "all": (following.peak + weights) / 1e6}


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="results/mixture_memory")
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--length", type=int, default=128)
    chosen = parser.parse_args()
    batch, rows = make_batch(chosen.texts, chosen.length), []
    for reads, (kind, pool) in HEADS.items():
        plain = measure(make_encoder(kind, pool, None), batch)
        rows.append({"head reads": reads, "model": "plain", **plain})
        for norm in ("token", "feature", "layer", "none"):
            encoder = make_encoder(kind, pool, norm)
            rows.append({"head reads": reads, "model": f"mixture, norm {norm}", **measure(encoder, batch)})
        rows.append({"head reads": reads, "model": "mixture of stored states", **measure(encoder, batch, stored=True)})
    shown = []
    for row in rows:
        base = next(one for one in rows if one["head reads"] == row["head reads"])
        shown.append({name: row[name] for name in ("head reads", "model")})
        for name, title in (("all", "peak MB"), ("activations", "of it activations")):
            shown[-1] |= {title: round(row[name], 1), f"{title}, to plain": round(row[name] / base[name], 3)}
        print(*shown[-1].values(), sep="  ")
    command = f"python benchmarks/mixture_memory.py --texts {chosen.texts} --length {chosen.length}"
    facts = {"benchmark": "mixture_memory", "command": command, "rows": shown}
    write_json(Path(chosen.out) / "memory.json", {**facts, "versions": versions(), "machine": machine()})


if __name__ == "__main__":
    main()
