"""Attention within packed sequences, forward and backward: torch's kernels against ours with small tiles.

    python benchmarks/packed_attention.py --out results/packed_attention         (GPU)

About 2,048 tokens in sequences of log-normal lengths, in half precision; each way is recorded as a CUDA graph and
replayed, as in training, so that what is timed is the GPU's work. Up to which usual length ours are used is `SHORT` of
model/attention.py. A few very long sequences among many short ones are not measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smallbert.machine.facts import machine, versions
from smallbert.machine.files import write_json
from smallbert.model.attention import _attend_long

TOKENS, LONGEST, REPEATS = 2048, 512, 200


def make_bounds(usual: int) -> Tensor:
    """Sequences of this mean length, about `TOKENS` tokens together."""
    random, spread = np.random.default_rng(0), 0.6
    count = max(1, TOKENS // usual)
    lengths = np.clip(random.lognormal(np.log(usual) - spread**2 / 2, spread, count).round(), 2, LONGEST)
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])).int().cuda()


def microseconds(call: Callable[[], Any]) -> float:
    """How long one replay of a recorded call takes, on average."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(10):
            call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(REPEATS // 10):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1000 * start.elapsed_time(end) / REPEATS


def measure(usual: int, size: int) -> dict[str, Any]:
    """Both ways at one usual length and one size of heads, twelve of them."""
    from smallbert.model.short_kernels import attend_short

    bounds = make_bounds(usual)
    longest = int(bounds.diff().max())
    three = [torch.randn(int(bounds[-1]), 12, size, device="cuda").bfloat16().requires_grad_() for _ in range(3)]
    slopes = torch.randn_like(three[0])

    def both(attend: Callable[..., Tensor], *more: int) -> float:
        return microseconds(
            lambda: torch.autograd.grad(attend(*three, bounds, longest, size**-0.5, *more), three, slopes)
        )

    row = {"usual": usual, "longest": longest, "sequences": len(bounds) - 1, "size": size}
    torchs, ours = both(_attend_long, -1), both(attend_short)
    return row | {"torch_us": round(torchs, 1), "ours_us": round(ours, 1), "times": round(torchs / ours, 2)}


def main() -> None:
    """Print the table, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the record")
    chosen, rows = parser.parse_args(), []
    if not torch.cuda.is_available():
        parser.error("this measures a GPU, and there is none")
    for size in (32, 64):
        for usual in (8, 13, 20, 26, 40, 53, 64, 90, 128):
            rows.append(measure(usual, size))
            print(rows[-1], flush=True)
    if chosen.out:
        record = {"benchmark": "packed_attention", "command": "python benchmarks/packed_attention.py", "rows": rows}
        write_json(chosen.out / "cuda.json", record | {"versions": versions(), "machine": machine()})


if __name__ == "__main__":
    main()
