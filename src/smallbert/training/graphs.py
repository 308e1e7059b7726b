"""The same training step, recorded once a batch shape as a CUDA graph and replayed: no time lost launching kernels.

Loss terms that weigh nothing may be left out of a step, so that what is recorded is forgotten when others are off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from smallbert.model.batch import Batch
from smallbert.training.phase import Phase

Batches = dict[str, Batch]
WARM = 2  # steps of a shape that are taken as written before it is recorded


class Graphs:
    """Call it with batches: the first few of a shape run as written, later ones replay the recorded step."""

    def __init__(self, phase: Phase, step: Callable[[Phase, Batches], Tensor]):
        """Record steps of this phase; nothing is recorded yet."""
        self.phase, self.step = phase, step
        self.off = phase.off
        self.seen: Counter[Hashable] = Counter()
        self.recorded: dict[Hashable, tuple[torch.cuda.CUDAGraph, Batches, Tensor]] = {}
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()

    def __call__(self, batches: Batches) -> Tensor:
        """Take one step."""
        if self.off != self.phase.off:
            self._forget()
        key = _shape(batches)
        self.seen[key] += 1
        if self.seen[key] <= WARM:
            return self._as_written(brought(batches, self.phase.device))
        if key not in self.recorded:
            self.recorded[key] = self._record(brought(batches, self.phase.device))
        graph, fixed, loss = self.recorded[key]
        for view, batch in batches.items():
            mine = fixed[view].tensors()
            for name, tensor in batch.tensors().items():
                mine[name].copy_(tensor, non_blocking=True)  # from where it is, in one go
        graph.replay()
        return loss

    def _forget(self) -> None:
        torch.cuda.synchronize()  # the last one may still be running
        self.off = self.phase.off
        self.seen.clear()
        self.recorded.clear()
        self.pool = torch.cuda.graph_pool_handle()  # the old one still holds gradients, but no graph to join

    def _as_written(self, batches: Batches) -> Tensor:
        """On the stream that will record, so that memory and library handles are where recording wants them."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            loss = self.step(self.phase, batches)
        torch.cuda.current_stream().wait_stream(self.stream)
        return loss

    def _record(self, batches: Batches) -> tuple[torch.cuda.CUDAGraph, Batches, Tensor]:
        fixed = {
            view: batch.with_tensors({name: tensor.clone() for name, tensor in batch.tensors().items()})
            for view, batch in batches.items()
        }
        assert self.phase.optimiser is not None
        self.phase.optimiser.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            loss = self.step(self.phase, fixed)
        return graph, fixed, loss


def brought(batches: Batches, device: torch.device) -> Batches:
    """The same batches on a device."""
    return {view: batch.to(device) for view, batch in batches.items()}


def _shape(batches: Batches) -> Hashable:
    return tuple(
        (view, batch.size, batch.longest, *((name, tensor.shape) for name, tensor in batch.tensors().items()))
        for view, batch in sorted(batches.items())
    )
