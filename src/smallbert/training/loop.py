"""The one training loop: every technique trains here, on one process or many, on CPU or GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor, nn

from smallbert.errors import UserError
from smallbert.features.ahead import reading_ahead
from smallbert.features.asking import keep_taught
from smallbert.features.frozen import Frozen, keep_states
from smallbert.features.store import Store
from smallbert.features.taught import Taught
from smallbert.machine.processes import processes
from smallbert.machine.sharing import doubt_part
from smallbert.model.anatomy import anatomy
from smallbert.model.batch import Batch
from smallbert.texts.batches import Layout, cut_into_batches, make_batch
from smallbert.texts.data import STUDENT, Stream
from smallbert.training.checkpoint import load_checkpoint, save_checkpoint
from smallbert.training.conditions import asked_to_stop, compiled_layers, frozen_parts, other_dropout, pays_to_compile
from smallbert.training.graphs import Graphs, brought
from smallbert.training.optimiser import make_optimiser, set_rates, trained_parameters
from smallbert.training.phase import Phase
from smallbert.training.schedule import warmup_then_linear

Say = Callable[[str, int, int, str], None]
Batches = dict[str, Batch]
CHECKPOINT_SECONDS = 120.0


def choose_layout(phase: Phase, stream: Stream) -> Layout:
    """Packed on a GPU where the family's attention allows it, else padded by buckets of like length.

    Packed attention computes in half precision, so that who wants none gets it only if it is asked for.
    """
    lengths = np.maximum.reduce([stream.views[view].lengths for view in phase.teachers.views(stream)])
    longest, cuda = int(lengths.max()), phase.device.type == "cuda"
    wanted = phase.settings.layout == "packed" or (cuda and phase.half and phase.settings.layout == "auto")
    unpackable = [model.family for model in phase.readers() if not model.packable]
    if wanted and not unpackable:
        phase.notes.append("packed batches: no padding, and no dropout on attention probabilities")
        tokens = float(lengths.mean()) * phase.settings.batch
        return Layout(True, longest, grain=256 if tokens < 4096 else 1024)  # few shapes to record, and little filler
    if wanted:
        phase.notes.append(f"{unpackable[0]} attention cannot be packed: length buckets instead")
    return Layout(False, longest, multiple=8 if cuda else 1)  # few shapes to record, and such as kernels like


def train(
    phase: Phase,
    say: Say,
    work: Path | None = None,
    key: str = "",
    pause: float = CHECKPOINT_SECONDS,
    states: Path | None = None,
    stores: dict[Path, Store] | None = None,
    said: Path | None = None,
) -> None:
    """Train a phase to its end, from its last checkpoint in `work` if there is one; leaves the encoder in eval mode.

    Hidden states of a frozen backbone and what teachers say are kept beside the checkpoint, or in `states`, for other
    runs to read them too; those of this process may share `stores` that are open. Scores that teachers give are
    found in `said`, where that is given, and kept there.
    """
    place = states or (None if work is None else work.with_suffix(".states"))
    with ready(phase, say, place, states is not None, stores, said) as plan:
        if work is not None and load_checkpoint(phase, work, key):
            phase.notes.append(f"went on from a checkpoint at step {phase.step}")
        pays = plan.states is None and pays_to_compile(phase.settings.compile, phase.total)
        # A compiled layer would not let anyone listen to its attention.
        compiled = phase.readers() if pays and phase.device.type == "cuda" and not phase.taps else []
        watch, main = _Watch(phase, say), processes().is_main_process
        phase.begin_training()
        with asked_to_stop() as stop, compiled_layers(compiled):
            _take_steps(phase, plan, watch, stop, work if main else None, key, pause)
    phase.encoder.eval()
    phase.modules.eval()
    phase.set_dials()  # every dial at its end


@contextmanager
def ready(
    phase: Phase,
    say: Say,
    place: Path | None = None,
    shared: bool = False,
    stores: dict[Path, Store] | None = None,
    said: Path | None = None,
) -> Iterator[_Plan]:
    """A phase with all that its first step needs: what is kept beforehand, a plan of its batches, an optimiser."""
    settings, stream, state = phase.settings, phase.stream, processes()
    if stream is None or len(stream) == 0:
        raise UserError("there is nothing to train on: the task has no training examples")
    phase.world, phase.total, phase.say = state.num_processes, phase.planned_steps, say
    with ExitStack() as held:
        taught = held.enter_context(keep_taught(phase, place, say, shared, said))
        phase.teachers.get_ready()
        layout = choose_layout(phase, stream)
        phase.packed = layout.packed
        plan = _Plan(stream, layout, settings.batch, phase.seed, state)
        plan.views, plan.taught = phase.teachers.views(stream), taught
        plan.states = held.enter_context(keep_states(phase, place, say, shared, stores))
        if plan.states is not None or any(one.reads for one in taught):
            plan.get = held.enter_context(reading_ahead(plan.batches, phase.total))
        held.enter_context(frozen_parts(phase.encoder, settings.freeze, phase.frozen))
        held.enter_context(other_dropout(phase.encoder, settings.dropout))
        phase.optimiser = make_optimiser(phase)
        yield plan


def _take_steps(
    phase: Phase, plan: _Plan, watch: _Watch, stop: Callable[[], bool], work: Path | None, key: str, pause: float
) -> None:
    """All steps that are left, with a checkpoint in `work` every `pause` seconds and before stopping when asked to."""
    take, saved = stepper(phase), time.monotonic()
    while phase.step < phase.total and not phase.diverged:
        watch.note(next_step(phase, plan, take))
        for method in phase.methods:
            if method.every() and phase.step % method.every() == 0:
                method.look(phase)
        if work is not None and (stop() or time.monotonic() - saved > pause):
            save_checkpoint(phase, work, key)
            saved = time.monotonic()
        if stop():
            raise KeyboardInterrupt


def next_step(phase: Phase, plan: _Plan, take: Callable[[Batches], Tensor]) -> Tensor:
    """Fetch the batch of the step at hand, turn every dial to where it belongs, and take the step."""
    batches = plan.get(phase.step)
    torch.manual_seed(_mix(phase.seed, phase.step, plan.rank))
    phase.set_dials()
    set_rates(phase, warmup_then_linear((phase.step + 1) / (phase.total + 1), phase.settings.warmup))
    loss = take(batches)
    phase.step += 1
    return loss


def take_step(phase: Phase, batches: Batches) -> Tensor:
    """One step: loss, gradients, clipping, update. Tensors in, tensors changed, nothing read back to Python."""
    assert phase.optimiser is not None
    phase.optimiser.zero_grad(set_to_none=True)
    with torch.autocast("cuda", torch.bfloat16, enabled=phase.half):
        loss = phase.loss(batches)
    loss.backward()
    parameters = trained_parameters(phase)
    if phase.world > 1:
        _sum_over_processes(parameters)
    for method in phase.methods:
        method.after_backward(phase)
    if phase.settings.clip:
        apart = [one for one in parameters if one in phase.clipped_apart]
        joint = [one for one in parameters if one not in phase.clipped_apart]
        _clip(phase.optimiser, joint, apart, phase.settings.clip)
    phase.optimiser.step()
    for method in phase.methods:
        method.after_step(phase)
    return loss.detach()


def _clip(optimiser: torch.optim.Optimizer, joint: list[nn.Parameter], apart: list[nn.Parameter], most: float) -> None:
    """Let the fused update scale gradients down to a joint norm of `most`, which spares a pass over all of them.

    The same two fields tell a fused optimiser to leave everything as it is when the norm is not a number.
    """
    norm = _norm(joint)
    scale = optimiser.grad_scale = (norm / most).clamp(min=1.0)  # type: ignore[attr-defined]
    optimiser.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
    if own := _gradients(apart):  # the update divides these by the scale of the others too
        torch._foreach_mul_(own, scale / (_norm(apart) / most).clamp(min=1.0))


def _norm(parameters: list[nn.Parameter]) -> Tensor:
    return nn.utils.get_total_norm(_gradients(parameters))


def _gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def stepper(phase: Phase) -> Callable[[Batches], Tensor]:
    """How a step is taken with batches from anywhere: as written, wrapped by the one method that may, or replayed
    from a CUDA graph."""
    wraps = [wrap for method in phase.methods if (wrap := method.around_step()) is not None]
    if len(wraps) > 1:
        raise UserError("two methods of one phase both wrap the training step; put them into separate phases")
    if wraps:
        return lambda batches: wraps[0](phase, brought(batches, phase.device), take_step)
    recordable = all(anatomy(model.backbone).recordable for model in phase.readers())
    if phase.device.type == "cuda" and phase.world == 1 and phase.settings.graphs and recordable:
        return Graphs(phase, take_step)
    return lambda batches: take_step(phase, brought(batches, phase.device))


class _Plan:
    """Which examples each step sees: a function of the seed and the step alone, so that a resumed run sees the same."""

    def __init__(self, stream: Stream, layout: Layout, batch: int, seed: int, state: PartialState):
        self.stream, self.layout, self.batch, self.seed = stream, layout, batch, seed
        self.rank, self.world = state.process_index, state.num_processes
        self.steps_per_epoch = -(-len(stream) // batch)
        self.slots = -(-min(batch, len(stream)) // self.world) if layout.packed or layout.multiple > 1 else 0
        self.epoch = lru_cache(2)(self._epoch)
        self.views = list(stream.views)
        self.states: Frozen | None = None  # where the hidden states of a frozen backbone are
        self.taught: list[Taught] = []  # where it is what teachers say
        self.get: Callable[[int], Batches] = self.batches

    def _epoch(self, number: int) -> list[np.ndarray]:
        lengths = self.stream.views[STUDENT].lengths
        return cut_into_batches(lengths, self.batch, _mix(self.seed, number, 7), bucket=not self.layout.packed)

    def batches(self, step: int, device: torch.device | str = "cpu") -> Batches:
        """The batch of a step, this process's share of it, in every view."""
        whole = self.epoch(step // self.steps_per_epoch)[step % self.steps_per_epoch]
        stream, whole = self.stream.at(whole, _mix(self.seed, step, 11))
        counts = {"count": max(1, stream.units(whole)), "texts": len(whole)}
        if stream.is_partly_labelled:
            counts["labelled"] = max(1, stream.labelled(whole))
        told = {name: torch.tensor(float(value)) for name, value in counts.items()}
        mine = whole[self.rank :: self.world]
        some, made = mine if len(mine) else whole[:1], {}
        for view in self.views:
            if self.states is None:
                batch = make_batch(stream, some, self.layout, slots=self.slots, view=view)
            else:
                batch = self.states.make_batch(some, self.layout, self.slots)
            for one in self.taught:
                batch = one.add_to(batch, some) if one.view == view else batch
            if not len(mine) and batch.present is not None:
                batch.present.zero_()  # a process without an example of its own still takes part in the step
            made[view] = batch.with_tensors(told).to(device)
        return made


class _Watch:
    """Looks at the loss now and then (each look waits for the device), tells how far it is, notices a broken run."""

    def __init__(self, phase: Phase, say: Say):
        self.phase, self.say = phase, say
        self.last = 0.0

    def note(self, loss: Tensor) -> None:
        phase = self.phase
        if phase.step % 20 and phase.step != phase.total and phase.step > 2:
            return
        value = float(loss)
        if not np.isfinite(value):
            phase.diverged = f"the loss became {value} by step {phase.step} of {phase.total}{doubt_part(phase.device)}"
        now = time.monotonic()
        if now - self.last > 0.2 or phase.step == phase.total:
            self.last = now
            self.say("training", phase.step, phase.total, f"loss {value:.3f}")


def _sum_over_processes(parameters: list[nn.Parameter]) -> None:
    """Add up gradients over processes, all in one message; a process that did not use a parameter adds nothing.

    One that no process used has no gradient afterwards either, so that the optimiser leaves it alone everywhere.
    """
    gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in parameters]
    used = gradients[0].new_tensor([float(one.grad is not None) for one in parameters])
    flat = torch.cat([*(gradient.flatten() for gradient in gradients), used])
    torch.distributed.all_reduce(flat)
    *pieces, users = flat.split([*(one.numel() for one in parameters), len(parameters)])
    unsure = any(one.grad is None for one in parameters)  # only then is it worth waiting for the answer
    counts = users.tolist() if unsure else [1.0] * len(parameters)
    for parameter, piece, count in zip(parameters, pieces, counts, strict=True):
        parameter.grad = piece.view_as(parameter) if count else None


def _mix(*numbers: int) -> int:
    """One seed from several numbers, far apart for near ones."""
    return int(np.random.SeedSequence([number & 0xFFFFFFFF for number in numbers]).generate_state(1)[0])
