"""How much each attention head matters to a task: the gradient of a gate on it, example by example.

After Michel, Levy and Neubig (2019): each head's output is multiplied by a gate of 1 before it is projected, and a
head is important where the loss of single examples would move if its gate did.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from smallbert.errors import UserError
from smallbert.measuring.evaluate import predict
from smallbert.measuring.metrics import score
from smallbert.model.anatomy import anatomy, layers, part
from smallbert.model.answering import has_head_for, is_made_for, match_labels
from smallbert.model.batch import Batch
from smallbert.model.encoder import HEAD, Encoder
from smallbert.model.heads import IGNORE, losses
from smallbert.model.replace import head_count
from smallbert.tasks.derived import limit
from smallbert.texts.batches import Layout, make_batch, sort_into_batches
from smallbert.texts.data import STUDENT, Stream, tokenise, usable_length

if TYPE_CHECKING:
    from smallbert.tasks import Split, Task

Say = Callable[[str, int, int, str], None]


def head_importance(
    encoder: Encoder,
    task: Task,
    split: str = "dev",
    examples: int = 500,
    say: Say | None = None,
    *,
    ablate: bool = False,
    tokens: int | None = None,
) -> dict[str, Any]:
    """The mean over examples of |d loss / d gate| of each head; `ablate` also scores the task without each head.

    head_importance(encoder, task)["importance"]   ->   [[0.02, 0.31, …], …], a row a layer in the order they run

    `slope` is the mean without the bars (below 0: the head lowers the loss), `error` the standard error of the
    importance, `normalised` the importance divided by its length (l2) within the layer. A batch is about `tokens` long.
    """
    encoder = _made_for(encoder, task)
    rows = limit(task, examples, split=split).split(split)
    stream = tokenise(encoder.tokenizer, rows, task.kind, usable_length(encoder, None, task))
    shape = len(encoder.order), head_count(encoder)
    total, square, slope = (torch.zeros(shape, dtype=torch.float64) for _ in range(3))
    loss, done = 0.0, 0
    with evaluating(encoder):
        for index in sort_into_batches(stream.views[STUDENT].lengths, tokens or _budget(encoder)):
            batch = make_batch(stream, index, Layout(False, 0)).to(encoder.device)
            each, slopes = (tensor.double().cpu() for tensor in gate_slopes(encoder, batch))
            if not (each.isfinite().all() and slopes.isfinite().all()):
                raise UserError(
                    "this model's losses are not finite, so heads cannot be measured; did its training diverge?"
                )
            total, square, slope = total + slopes.abs().sum(0), square + slopes.square().sum(0), slope + slopes.sum(0)
            loss, done = loss + float(each.sum()), done + len(index)
            if say is not None:
                say("weighing heads", done, len(stream), "")
        ablated = _ablate(encoder, task, stream, rows, say) if ablate else None
    importance = total / done
    spread = (square / done - importance.square()).clamp(min=0).sqrt()
    return {
        "layers": shape[0],
        "heads": shape[1],
        "task": task.name,
        "split": split,
        "examples": done,
        "loss": loss / done,
        "importance": importance.tolist(),
        "error": (spread / (done - 1) ** 0.5).tolist() if done > 1 else None,
        "slope": (slope / done).tolist(),
        "normalised": normalise(importance).tolist(),
        "ablated": ablated,
        "notes": _notes(encoder, task, stream, rows),
    }


def normalise(importance: Tensor) -> Tensor:
    """Each layer divided by its length; a layer of zeros stays one.

    >>> normalise(torch.tensor([[3.0, 4.0], [0.0, 0.0]])).tolist()
    [[0.6, 0.8], [0.0, 0.0]]
    """
    length = importance.norm(dim=-1, keepdim=True)
    return importance / torch.where(length > 0, length, 1.0)


@contextmanager
def gated(encoder: Encoder, gates: Tensor) -> Iterator[None]:
    """Multiply what each head hands to its layer's output projection by a gate, as long as this lasts.

    gates: (layers in the order they run, sequences or 1, heads). A module that runs twice has a gate for each time.
    """
    with ExitStack() as stack:
        turn = stack.enter_context(counting(encoder))

        def gate(module: nn.Module, inputs: Any) -> Any:
            context, now = inputs[0], gates[turn()][:, None, :, None]
            split = context.unflatten(-1, (gates.shape[-1], -1)) * now.to(context.dtype)
            return split.flatten(-2), *inputs[1:]

        for layer in layers(encoder.backbone):
            stack.enter_context(part(encoder.backbone, layer, "out").module.register_forward_pre_hook(gate))
        yield


@contextmanager
def counting(encoder: Encoder) -> Iterator[Callable[[], int]]:
    """Give a function that counts 0, 1, 2, …, and from 0 again whenever the encoder is called.

    A hook that asks once a layer so knows the layer's place in the run, also where one module is several layers.
    """
    turn = count()

    def start(module: nn.Module, inputs: Any) -> None:
        nonlocal turn
        turn = count()

    with encoder.register_forward_pre_hook(start):
        yield lambda: next(turn)


@contextmanager
def evaluating(encoder: Encoder) -> Iterator[None]:
    """Evaluation mode, and afterwards each module in the mode that it was in."""
    modes = [(module, module.training) for module in encoder.modules()]
    encoder.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def gate_slopes(encoder: Encoder, batch: Batch) -> tuple[Tensor, Tensor]:
    """The loss of each example of a batch, and how it moves with each gate: (examples,), (examples, layers, heads).

    Every example has gates of its own, so one pass back through the sum of the losses keeps examples apart.
    """
    with torch.enable_grad():
        shape = len(encoder.order), batch.size, head_count(encoder)
        gates = torch.ones(shape, device=encoder.device, requires_grad=True)
        with gated(encoder, gates):
            each = example_losses(encoder, batch)
        # Asked for by name rather than with backward(): no gradient is left on any weight, none is added to another.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # kernels of whole numbers have no gradients; we say so ourselves
            slopes = torch.autograd.grad(each.sum(), gates, allow_unused=True)[0] if each.requires_grad else None
    if slopes is None:
        raise UserError(
            "this model computes in integers, which give no gradients for head importance; "
            "probe the model it was made from"
        )
    return each.detach(), slopes.transpose(0, 1)


def example_losses(encoder: Encoder, batch: Batch) -> Tensor:
    """The loss of each sequence: (sequences,); where tokens are tagged, the mean over its tagged ones."""
    each = losses(encoder.head, encoder(batch), batch)
    if encoder.head.kind != "tag":
        return each
    assert batch.labels is not None
    return each.view(batch.labels.shape).sum(1) / (batch.labels != IGNORE).sum(1).clamp(min=1)


def _ablate(encoder: Encoder, task: Task, stream: Stream, rows: Split, say: Say | None) -> dict[str, Any]:
    """The task's score with each head in turn left out, and the score with all of them."""
    metric, places, heads = task.metrics[0], len(encoder.order), head_count(encoder)

    def read(place: int | None = None, head: int | None = None) -> dict[str, float]:
        gates = torch.ones(places, 1, heads, device=encoder.device)
        if place is not None and head is not None:
            gates[place, :, head] = 0.0
        with gated(encoder, gates):
            return score(task, predict(encoder, stream, task, rows), rows)[metric]

    whole = read()
    without: list[list[float]] = []
    for place in range(places):
        without.append([])
        for head in range(heads):
            without[-1].append(read(place, head)["value"])
            if say is not None:
                say("leaving heads out", place * heads + head + 1, places * heads, f"layer {place + 1}")
    return {"metric": metric, "score": whole["value"], "stderr": whole["stderr"], "without": without}


def _made_for(encoder: Encoder, task: Task) -> Encoder:
    """The encoder with its classes in the task's order; one without a head trained for this task is refused."""
    has = "has no task head" if HEAD not in encoder.heads else f"has a head for {_about(encoder)}"
    made = match_labels(encoder, task) if has_head_for(encoder, task) else encoder
    if not is_made_for(made, task):
        raise UserError(
            f"head importance is the gradient of the loss on {task.name}, and this model {has}; "
            "fine-tune it on the task first, then probe the result"
        )
    return made


def _about(encoder: Encoder) -> str:
    named = ", ".join(encoder.head.labels[:6])
    return f"{encoder.head.kind} ({named})" if named else encoder.head.kind


def _notes(encoder: Encoder, task: Task, stream: Stream, rows: Split) -> list[str]:
    notes = list(stream.notes)
    if len(stream) != len(rows):
        notes.append(f"{len(rows):,} questions were read in {len(stream):,} windows; each window counts as an example")
    if anatomy(encoder.backbone).shared:
        notes.append("all layers share one set of weights; a head is measured in each layer where it runs")
    return notes


def _budget(encoder: Encoder) -> int:
    return 2**15 if encoder.device.type == "cuda" else 2**11
