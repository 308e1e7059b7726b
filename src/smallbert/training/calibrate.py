"""Looking at what goes into the layers when training texts are read: padding is not looked at."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from smallbert.errors import UserError
from smallbert.model.batch import Batch
from smallbert.model.encoder import Encoder
from smallbert.progress import tell
from smallbert.texts.batches import Layout, make_batch, sort_into_batches
from smallbert.texts.data import STUDENT, tokenise, usable_length

if TYPE_CHECKING:
    from smallbert.tasks import Task

TOKENS = 2**11  # in a batch that is only read


def draw_texts(
    encoder: Encoder, task: Task | None, count: int, seed: int, method: str, batch: int | None = None
) -> list[Batch]:
    """Some training texts, drawn at random, in padded batches on the encoder's device.

    Texts of like length come together, unless batches of so many texts each are asked for.
    """
    if task is None:
        raise UserError(f"{method} reads training texts, so it needs a task: give --task")
    train = task.split("train")
    chosen = np.random.default_rng(seed).permutation(len(train))[:count]
    stream = tokenise(encoder.tokenizer, train.take(chosen.tolist()), task.kind, usable_length(encoder, None, task))
    cuts = sort_into_batches(stream.views[STUDENT].lengths, TOKENS)
    if batch is not None:
        cuts = [np.arange(start, min(start + batch, len(stream))) for start in range(0, len(stream), batch)]
    return [make_batch(stream, index, Layout(False, 0)).to(encoder.device) for index in cuts]


@torch.no_grad()
def watch_inputs(
    encoder: Encoder, names: Iterable[str], batches: list[Batch], look: Callable[[str, Tensor], None]
) -> None:
    """Let `look` see what goes into each of these layers, (tokens, features), batch after batch, without padding."""
    real: Tensor | None = None

    def hook(name: str) -> Any:
        def watch(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            seen = inputs[0]
            assert real is not None
            look(name, seen[real] if is_by_token(seen, real) else seen.flatten(0, -2))

        return encoder.get_submodule(name).register_forward_pre_hook(watch)

    training = encoder.training
    encoder.eval()
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(hook(name))
        for number, batch in enumerate(batches):
            real = batch.tokens()
            encoder(batch)
            tell("reading training texts", number + 1, len(batches))
    encoder.train(training)


def is_by_token(inputs: Tensor, real: Tensor) -> bool:
    """Whether these are features of tokens; a pooled state, or DeBERTa's relative positions, have no padding."""
    return inputs.dim() == 3 and inputs.shape[:2] == real.shape


def input_bounds(encoder: Encoder, names: Iterable[str], batches: list[Batch]) -> dict[str, Tensor]:
    """The least and the largest number of every feature that goes into each layer: {name: (2, features)}."""
    return sample_inputs(encoder, names, batches, 0, 0)[0]


def sample_inputs(
    encoder: Encoder, names: Iterable[str], batches: list[Batch], count: int, seed: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The bounds of what goes into each layer, and about so many tokens of it, drawn at random: (tokens, features)."""
    found: dict[str, Tensor] = {}
    drawn: dict[str, list[Tensor]] = defaultdict(list)
    chance, each = torch.Generator().manual_seed(seed), -(-count // max(1, len(batches)))

    def look(name: str, rows: Tensor) -> None:
        bounds = torch.stack([rows.amin(0), rows.amax(0)])
        if name in found:
            bounds = torch.stack([torch.minimum(bounds[0], found[name][0]), torch.maximum(bounds[1], found[name][1])])
        found[name] = bounds
        if each:
            drawn[name].append(rows[torch.randperm(len(rows), generator=chance)[:each].to(rows.device)])

    watch_inputs(encoder, names, batches, look)
    return found, {name: torch.cat(rows) for name, rows in drawn.items()}


def input_products(encoder: Encoder, names: Iterable[str], batches: list[Batch]) -> dict[str, Tensor]:
    """The sum over tokens of x x^T for the inputs x of each layer, in double precision: (features, features)."""
    sums: dict[str, Tensor] = {}

    def look(name: str, rows: Tensor) -> None:
        whole = rows.double()
        sums[name] = sums[name].addmm_(whole.T, whole) if name in sums else whole.T @ whole

    watch_inputs(encoder, names, batches, look)
    return sums
