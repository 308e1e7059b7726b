"""Which parts of a GPU compute a training step wrongly, and which of its operations that is.

    python benchmarks/gpu_parts.py --parts 10,20,25,28,33,40,50,66,100 --out results/shared_gpu

Under one MPS server a process for each part, some at a time, trains a model of random weights on random labels, where
every loss should be finite. Of the first part where all are, and of the first where one is not, a few steps are taken
once more, and each operation that torch tells of is done on the CPU as well, with what it was given; those that differ
are named, the first first. What cannot be done on a CPU, kernels of our own among it, is counted, and looked at for nan
alone.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from shared_gpu import KINDS, training
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from smallbert.machine.facts import GPU_PART, machine, versions
from smallbert.machine.files import write_json
from smallbert.machine.sharing import shared_gpu
from smallbert.training import graphs

STEPS, LOOKED_AT, AT_ONCE, PATIENCE = 60, 5, 8, 300.0
RANDOM = ("dropout", "bernoulli", "rand", "normal", "uniform", "empty", "exponential")
NEAR = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}  # of the largest number there


class Watch(TorchDispatchMode):
    """Does every operation on the CPU as well and remembers those that come out otherwise."""

    def __init__(self) -> None:
        """Nothing seen yet."""
        super().__init__()
        self.found: list[dict[str, Any]] = []
        self.unchecked: Counter[str] = Counter()
        self.checked = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operation; what it changes in place is compared too."""
        given = (args, kwargs or {})
        name, tensors = str(func), _floating(given)
        broken_before = any(_is_broken(one) for one in tensors)
        same = tree_map_only(Tensor, lambda one: one.detach().to("cpu", copy=True), given)
        same = tree_map_only(torch.device, lambda _: torch.device("cpu"), same)  # a copy to the GPU is one to here
        made = func(*args, **(kwargs or {}))
        if not tensors or any(word in name for word in RANDOM):
            return made
        try:
            wanted = func(*same[0], **same[1])
        except Exception:  # whatever a kernel says of tensors that are not on its GPU
            self.unchecked[name] += 1
            if not broken_before and any(_is_broken(one) for one in _floating(made)):
                self._note(name, tensors, "made nan")
            return made
        self.checked += 1
        if broken_before:
            self._note(name, tensors, "was given nan")
        elif any(map(_differ, _floating((made, given)), _floating((wanted, same)))):
            self._note(name, tensors, "differs from the CPU")
        return made

    def _note(self, name: str, tensors: list[Tensor], why: str) -> None:
        if len(self.found) < 20:
            self.found.append({"operation": name, "why": why, "shapes": [list(one.shape) for one in tensors[:4]]})


def _floating(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _is_broken(one: Tensor) -> bool:
    return bool(one.isnan().any())  # masks have infinities


def _differ(one: Tensor, other: Tensor) -> bool:
    mine, wanted = one.detach().cpu().float(), other.detach().cpu().float()
    if mine.shape != wanted.shape or not mine.numel():
        return mine.shape != wanted.shape
    if one.dtype != other.dtype:  # what a layer norm keeps for its way back, which a CPU rounds
        return bool(mine.isfinite().all() != wanted.isfinite().all())
    apart = torch.where(mine == wanted, 0.0, mine - wanted).abs().max()  # infinities may be equal
    largest = wanted.abs().where(wanted.isfinite(), 0.0).max()
    return not bool(apart <= NEAR.get(one.dtype, 1e-3) * largest + 1e-6)


def train(kind: str, look: bool) -> dict[str, Any]:
    """In a process of its own: how many losses were not finite, or what single operations did."""
    if not look:
        with training(KINDS[kind], "SNLI") as run:
            return {"broken_losses": sum(not math.isfinite(run(1)) for _ in range(STEPS)), "steps": STEPS}
    graphs.WARM = sys.maxsize  # steps as they are written: nothing can be compared while they are recorded
    with training(KINDS[kind], "SNLI") as run, Watch() as watch:
        losses = [run(1) for _ in range(LOOKED_AT)]
    seen = {"operations": watch.checked, "unchecked": dict(watch.unchecked), "wrong": watch.found}
    return {"losses": [repr(loss) for loss in losses]} | seen


def ask(kind: str, look: bool, environment: dict[str, str]) -> dict[str, Any]:
    """The same, from a process that has this environment."""
    command = [sys.executable, __file__, "--kind", kind, "--member", "look" if look else "train"]
    how: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True, "env": {**os.environ, **environment}}
    try:
        done = subprocess.run(command, **how, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {PATIENCE:.0f} s"}
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"failed": f"code {done.returncode}"}


def main() -> None:
    """All parts, a line each; then a closer look at the first that is sound and the first that is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--parts", default="10,20,25,28,33,40,50,66,100", help="per cent of the GPU for a process")
    parser.add_argument("--kind", choices=KINDS, default="six layers", help="what is trained")
    parser.add_argument("--look", action="store_true", help="at operations, on the device there is, and no more")
    parser.add_argument("--member", choices=("train", "look"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.member or chosen.look:
        print(json.dumps(train(chosen.kind, chosen.look or chosen.member == "look")))
        return
    if not torch.cuda.is_available():
        parser.error("this looks at a GPU, and there is none")
    with shared_gpu() as served, ThreadPoolExecutor(AT_ONCE) as several:
        if not served:
            parser.error("this asks about an MPS server, and none could be started")
        parts = chosen.parts.split(",")
        asked = [several.submit(ask, chosen.kind, False, served | {GPU_PART: part}) for part in parts]
        rows = []
        for part, answer in zip(parts, asked, strict=True):
            rows.append({"per_cent": int(part)} | answer.result())
            print(rows[-1], flush=True)
        looks = {}
        for broken in (False, True):
            row = next((row for row in rows if "failed" not in row and bool(row["broken_losses"]) == broken), None)
            if row is not None:
                part = str(row["per_cent"])
                looks[part] = ask(chosen.kind, True, served | {GPU_PART: part})
                print(part, json.dumps(looks[part]), flush=True)
    if chosen.out:
        command = f"python benchmarks/gpu_parts.py --parts {chosen.parts} --kind {chosen.kind!r}"
        record = {"benchmark": "gpu_parts", "command": command, "rows": rows, "looks": looks}
        write_json(chosen.out / "gpu_parts.json", record | {"versions": versions(), "machine": machine()})


if __name__ == "__main__":
    main()
