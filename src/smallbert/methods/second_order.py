"""Second-order pruning (oBERT, Kurtic et al. 2022): prune what raises the loss least, and correct the rest for it.

The Hessian is taken as the empirical Fisher matrix in blocks along each flattened weight, F = damp I + mean of g g^T
over gradients of small batches; its inverse is found by rank-one updates. Removing w_i costs w_i^2 / (2 [F^-1]_ii), and
the others of its block then move by -F^-1 e_i w_i / [F^-1]_ii. That is done in a few events on the ramp; masks hold in
between.
"""

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from smallbert.errors import UserError
from smallbert.machine.processes import agree
from smallbert.methods.pruning import Gradual
from smallbert.texts.batches import Layout, make_batch
from smallbert.training.masks import (
    Stacks,
    carried,
    carry_stacks,
    check_trained,
    mask_by_scores,
    maskable,
    stack_up,
)
from smallbert.training.memory import free_memory
from smallbert.training.phase import Weights
from smallbert.training.ranking import keep_top

CHUNK = 2**16  # blocks whose equations are solved together


class SecondOrder(Gradual):
    """Prune in a few events the weights whose removal costs the loss least, and correct the others for it.

    scope: 'global' compares the costs of all matrices, as the paper does; 'local' keeps the same share of every matrix
    first: share kept after the first event; not used with events=1 or shape='constant'
    events: number of times weights are pruned, evenly spaced from `begin` to `finish`; a single event is at `finish`
    block: number of neighbouring weights of a flattened matrix that share a block of the Fisher matrix; memory grows in
        proportion
    gradients: number of gradients from which the Fisher matrix is estimated at each event
    examples: number of training examples whose mean loss gives one gradient
    damp: constant added to the diagonal of the Fisher matrix, so that it can be inverted
    update: how the weights left in a block are corrected: 'each' adds up the correction for each single removal, as the
        paper's code does; 'joint' solves for all removals at once; 'none' leaves them as they are
    """

    scope: Literal["local", "global"] = "global"
    first: float = 0.3
    events: int = 7
    block: int = 50
    gradients: int = 1024
    examples: int = 16
    damp: float = 1e-7
    update: Literal["each", "joint", "none"] = "each"

    def check(self) -> None:
        """Shares, a ramp inside the phase, and counts."""
        super().check()
        if min(self.events, self.block, self.gradients, self.examples) < 1 or self.damp <= 0:
            raise UserError("second_order: events, block, gradients and examples are 1 or more, and damp is above 0")

    def fits(self, phase: Any, steps: int | None) -> None:
        """Weights that are trained."""
        check_trained(phase, self.name, self.what)

    def attach(self, phase: Any) -> None:
        """A mask that changes at events only."""
        names = maskable(phase.encoder, self.what)
        stacks = stack_up(phase.encoder, names)
        self._check_memory(phase, stacks)
        carry_stacks(phase, self.name, {"mask": stacks.filled(1.0, phase.device)})
        masks = {group[0]: mask for group, mask in zip(stacks.groups, carried(phase, self.name, "mask"), strict=True)}
        half = torch.tensor(0.5, device=phase.device)
        mask_by_scores(
            phase,
            names,
            lambda group, weights: masks[group[0]],
            lambda scores: [half.expand(len(one)) for one in scores],
        )

    def _check_memory(self, phase: Any, stacks: Stacks) -> None:
        """Say how much the inverse Fisher takes, and refuse what cannot fit beside gradients and Adam's moments."""
        sizes = [shape.numel() for shape in stacks.shapes.values()]
        free = max(0, free_memory(phase.device) - 12 * sum(one.numel() for one in phase.encoder.parameters()))
        if (need := self._memory(sizes, self.block)) > free:
            fits = next((block for block in range(self.block - 1, 0, -1) if self._memory(sizes, block) <= free), 0)
            smaller = (
                f"give it smaller blocks, such as block={fits}"
                if fits
                else "smaller blocks do not fit either: use magnitude"
            )
            raise UserError(
                f"second_order: with block={self.block} the inverse Fisher takes {need / 2**30:,.2f} GB of memory, and "
                f"{free / 2**30:,.2f} GB are free beside training on {phase.device.type}; {smaller}"
            )
        phase.notes.append(
            f"second_order: the inverse Fisher takes {4 * fisher_numbers(sizes, self.block) / 2**20:,.1f} MB at "
            f"{self._fitting(phase.planned_steps)} ({self.gradients} gradients, blocks of {self.block})"
        )

    def _memory(self, sizes: list[int], block: int) -> int:
        """Bytes of the inverses of all weights, and of what is worked out from some of them at a time."""
        copies = 3 if self.update == "joint" else 1
        return 4 * (fisher_numbers(sizes, block) + copies * block**2 * min(CHUNK, -(-max(sizes) // block)))

    def every(self) -> int:
        """Each step, to notice an event."""
        return 1

    def look(self, phase: Any) -> None:
        """At an event: estimate, score, prune, correct."""
        keep = self._due(phase.step, phase.total)
        if keep is None:
            return
        names = maskable(phase.encoder, self.what)
        inverses = self._inverses(phase, names)
        with torch.no_grad():
            prune_by_curvature(phase, names, inverses, keep, self)
            # Each process has found these gradients on its own, and a GPU may round differently from time to time.
            agree([*carried(phase, self.name, "mask"), *(phase.encoder.get_parameter(name) for name in names)])

    def _due(self, step: int, total: int) -> float | None:
        """The share to keep at the event that this step ends with, if there is one."""
        due = [moment for moment, end in self._moments(total) if end == step]
        return self.schedule().at(max(due)) if due else None

    def _moments(self, total: int) -> list[tuple[float, int]]:
        """When events are, as shares of a phase and as the steps that end with them; several may fall on one."""
        span, last = self.finish - self.begin, max(1, self.events - 1)
        moments = [self.begin + span * number / last for number in range(self.events)]
        return [(moment, max(1, round(moment * total))) for moment in (moments if self.events > 1 else [self.finish])]

    def _fitting(self, total: int) -> str:
        """How many events a phase has room for."""
        count = len({end for _, end in self._moments(total)})
        if count == self.events:
            return "one event" if count == 1 else f"each of {count} events"
        return f"{count} of {self.events} events, since the phase has {total} step{'s' if total > 1 else ''}"

    def _inverses(self, phase: Any, names: list[str]) -> Weights:
        """F^-1 of every weight, (blocks, block, block), from gradients of the phase's whole loss, without dropout."""
        weights = [phase.encoder.get_parameter(name) for name in names]
        inverses = [start_inverse(weight.numel(), self.block, self.damp, phase.device) for weight in weights]
        phase.encoder.eval()
        draw = np.random.default_rng([phase.seed, phase.step])
        for number in range(self.gradients):
            chosen = draw.choice(len(phase.stream), min(self.examples, len(phase.stream)), replace=False)
            batches = {
                view: make_batch(phase.stream, chosen, Layout(False, 0), view=view).to(phase.device)
                for view in phase.stream.views
            }
            with (
                torch.enable_grad(),
                torch.compiler.set_stance("force_eager"),
                torch.autocast("cuda", torch.bfloat16, enabled=phase.half),
            ):
                slopes = torch.autograd.grad(phase.loss(batches), weights, allow_unused=True)
            for inverse, slope in zip(inverses, slopes, strict=True):
                if slope is not None:
                    add_gradient(inverse, in_blocks(slope, self.block), self.gradients)
            if number % 16 == 15:
                phase.say("second_order: curvature", number + 1, self.gradients, f"step {phase.step}")
        phase.begin_training()
        return dict(zip(names, inverses, strict=True))


def in_blocks(values: Tensor, block: int) -> Tensor:
    """A flat view of numbers in rows of `block`, the last filled up with zeros: (blocks, block)."""
    flat = values.detach().flatten()
    return functional.pad(flat, (0, -len(flat) % block)).view(-1, block)


def fisher_numbers(sizes: list[int], block: int) -> int:
    """How many numbers the blocks of weights with so many numbers hold."""
    return sum(-(-size // block) for size in sizes) * block**2


def start_inverse(numbers: int, block: int, damp: float, device: Any = None) -> Tensor:
    """The inverse of damp * I, in blocks."""
    return (torch.eye(block, device=device) / damp).repeat(-(-numbers // block), 1, 1)


def add_gradient(inverse: Tensor, slope: Tensor, count: int) -> None:
    """Make F^-1 that of F + g g^T / count, in place (Sherman and Morrison)."""
    moved = torch.einsum("bij,bj->bi", inverse, slope)
    scale = (count + (slope * moved).sum(1)).rsqrt()
    scaled = moved * scale[:, None]
    inverse.baddbmm_(scaled[:, :, None], scaled[:, None, :], alpha=-1)


def spreads(inverse: Tensor) -> Tensor:
    """[F^-1]_ii of every number, (blocks, block); above 0, whatever rounding did."""
    return inverse.diagonal(dim1=1, dim2=2).clamp(min=1e-12)


def correction(inverse: Tensor, weight: Tensor, gone: Tensor, update: str) -> Tensor:
    """How the numbers of each block move when those of `gone` are removed; all are (blocks, block).

    "each" adds up what each removal would ask for alone; "joint" is the least costly move that brings all to zero.
    """
    if update == "none":
        return torch.zeros_like(weight)
    if update == "each":
        forces = weight * gone / spreads(inverse)
    else:
        both, eye = gone[:, :, None] & gone[:, None, :], torch.eye(weight.shape[1], device=weight.device).bool()
        among = torch.where(both, inverse, (eye & ~both).to(inverse.dtype))
        forces = torch.linalg.solve(among, weight * gone)
    return -torch.einsum("bij,bj->bi", inverse, forces)


def prune_by_curvature(phase: Any, names: list[str], inverses: Weights, keep: float, method: SecondOrder) -> None:
    """Prune to the share `keep` by cost, and write corrected weights and new masks."""
    stacks = Stacks(phase.encoder, names)
    kept = carried(phase, method.name, "mask")
    masks, costs = stacks.rows(kept), [torch.empty_like(mask) for mask in kept]
    for name, cost in stacks.rows(costs).items():
        weight = phase.encoder.get_parameter(name)
        spread = spreads(inverses[name]).flatten()[: weight.numel()].view_as(weight)
        cost.copy_(torch.where(masks[name] > 0, weight.square() / (2 * spread), float("-inf")))
    for old, cost, stays in zip(kept, costs, keep_top(costs, keep, method.scope), strict=True):
        cost.copy_(old * stays)  # from here on: 1 where a weight stays
    for name, stays in stacks.rows(costs).items():
        weight = phase.encoder.get_parameter(name)
        gone = in_blocks(masks[name] > stays, method.block)
        values = in_blocks(weight, method.block)
        parts = zip(inverses[name].split(CHUNK), values.split(CHUNK), gone.split(CHUNK), strict=True)
        moves = torch.cat([correction(*part, method.update) for part in parts]).flatten()
        weight.add_(moves[: weight.numel()].view_as(weight)).mul_(stays)
        masks[name].copy_(stays)
