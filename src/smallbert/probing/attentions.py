"""What attention heads look at: how much goes to [SEP], to [CLS], to near tokens, how far and how widely."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from smallbert.errors import RunError, UserError
from smallbert.model.anatomy import anatomy, layers
from smallbert.model.encoder import Encoder
from smallbert.model.replace import head_count
from smallbert.probing.heads import counting, evaluating
from smallbert.tasks.derived import limit
from smallbert.tasks.task import Split, Task
from smallbert.texts.batches import Layout, make_batch, sort_into_batches
from smallbert.texts.data import STUDENT, tokenise, usable_length

Say = Callable[[str, int, int, str], None]

SUMMARIES = {
    "to_sep": "the share that goes to separators",
    "to_cls": "the share that goes to the token of the whole text",
    "to_itself": "the share that stays on the token itself",
    "to_previous": "the share that goes to the token before, where there is one",
    "to_next": "the share that goes to the token after, where there is one",
    "distance": "mean distance of attended tokens, in tokens",
    "entropy": "entropy, in nats",
    "entropy_share": "entropy, as a share of that of uniform attention to the text",
}
MARKS = {"to_sep": "sep_token", "to_cls": "cls_token"}


def attention_summaries(
    encoder: Encoder,
    task_or_texts: Task | Sequence[str],
    split: str = "dev",
    examples: int = 500,
    say: Say | None = None,
    *,
    tokens: int | None = None,
) -> dict[str, Any]:
    """What each head attends to, as means over all tokens that attend (padding never does).

    attention_summaries(encoder, task)["to_sep"]   ->   [[0.02, 0.61, …], …], a row a layer in the order they run

    `even` is what the same numbers would be if each token attended to its whole text alike. A batch is about `tokens`
    long; no more than one layer of one batch is ever held.
    """
    rows, kind = _rows(task_or_texts, split, examples)
    task = task_or_texts if isinstance(task_or_texts, Task) else None
    stream = tokenise(encoder.tokenizer, rows, kind, usable_length(encoder, None, task))
    view, shape = stream.views[STUDENT], (len(encoder.order), head_count(encoder))
    total = {name: torch.zeros(shape, dtype=torch.float64) for name in SUMMARIES}
    even, seen, done = dict.fromkeys(SUMMARIES, 0.0), np.zeros(shape[0], int), 0
    budget = tokens or (2**14 if encoder.device.type == "cuda" else 2**11)
    with evaluating(encoder), torch.inference_mode():
        for index in sort_into_batches(view.lengths, budget):
            batch = make_batch(stream, index, Layout(False, 0)).to(encoder.device)
            real = batch.tokens()
            marked = {name: batch.input_ids == number for name, number in _marks(encoder.tokenizer).items()}

            def see(place: int, attention: Tensor, real: Tensor = real, marked: dict[str, Tensor] = marked) -> None:
                _check(place, attention, real)
                for name, value in add_up(attention, real, marked).items():
                    total[name][place] += value.cpu()
                seen[place] += len(real)

            with watched(encoder, see):
                encoder(batch)
            level = (real / real.sum(1, keepdim=True))[:, None, None, :].expand(-1, 1, real.shape[1], -1)
            for name, value in add_up(level, real, marked).items():
                even[name] += float(value)
            done += len(index)
            if say is not None:
                say("watching attention", done, len(stream), "")
    assert (seen == len(stream)).all(), "a layer's attention was not recorded"
    counts, missing = _counts(view.lengths), _missing(encoder.tokenizer, view.ids, view.lengths)
    return {
        "layers": shape[0],
        "heads": shape[1],
        "task": task.name if task else None,
        "split": split if task else None,
        "examples": len(rows),
        "tokens": int(view.lengths.sum()),
        **{name: None if name in missing else (total[name] / counts[name]).tolist() for name in SUMMARIES},
        "even": {name: None if name in missing else even[name] / counts[name] for name in SUMMARIES},
        "missing": missing,
        "notes": list(stream.notes),
    }


def add_up(attention: Tensor, real: Tensor, marked: dict[str, Tensor]) -> dict[str, Tensor]:
    """The sums over all tokens that attend, one number a head, of each summary.

    attention: (sequences, heads, tokens, tokens)    real, and where each mark is: (sequences, tokens)
    """
    place = torch.arange(real.shape[1], device=real.device)
    lengths = real.sum(1)
    entropy = torch.special.entr(attention).sum(-1)
    most = torch.where(lengths > 1, lengths, torch.e).log()  # a lone token has no choice: it counts as 0
    values = {
        **{
            name: (attention @ where[:, None, :, None].to(attention.dtype)).squeeze(-1)
            for name, where in marked.items()
        },
        "to_itself": attention.diagonal(0, -2, -1),
        "to_previous": functional.pad(attention.diagonal(-1, -2, -1), (1, 0)),
        "to_next": functional.pad(attention.diagonal(1, -2, -1), (0, 1)),
        "distance": (attention * (place[:, None] - place).abs()).sum(-1),
        "entropy": entropy,
        "entropy_share": entropy / most[:, None, None],
    }
    return {name: (value * real[:, None]).sum((0, 2), dtype=torch.float64) for name, value in values.items()}


@contextmanager
def watched(encoder: Encoder, see: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Call see(place, probabilities) for each layer that the encoder runs on a padded batch, as long as this lasts.

    The probabilities are (sequences, heads, tokens, tokens); a row is a token that attends.
    """
    path = anatomy(encoder.backbone).attended
    with ExitStack() as stack:
        turn = stack.enter_context(counting(encoder))

        def show(attention: Tensor) -> None:
            see(turn(), attention)

        def ask(module: nn.Module, inputs: Any, named: dict[str, Any]) -> Any:
            return inputs, {**named, "watch": show}  # a layer hands what it does not know on to our attention

        for layer in layers(encoder.backbone):
            if path:
                hook = attrgetter(path)(layer).register_forward_pre_hook(lambda module, inputs: show(inputs[0]))
            else:
                hook = layer.register_forward_pre_hook(ask, with_kwargs=True)
            stack.enter_context(hook)
        yield


def _rows(task_or_texts: Task | Sequence[str], split: str, examples: int) -> tuple[Split, str]:
    """The examples to read, never more than asked for, the same ones each time."""
    if isinstance(task_or_texts, Task):
        return limit(task_or_texts, examples, split=split).split(split), task_or_texts.kind
    texts = [task_or_texts] if isinstance(task_or_texts, str) else list(task_or_texts)
    if not texts or examples < 1:
        raise UserError(f"{examples} of {len(texts)} texts were asked for; give at least one text")
    chosen = sorted(random.Random(0).sample(range(len(texts)), min(examples, len(texts))))
    return Split(texts, None, [0] * len(texts), [str(number) for number in range(len(texts))]).take(chosen), "classify"


def _marks(tokenizer: Any) -> dict[str, int]:
    """The number of each mark; one that the tokenizer does not have is never found in a text."""
    return {name: -1 if (n := getattr(tokenizer, f"{kind}_id")) is None else n for name, kind in MARKS.items()}


def _missing(tokenizer: Any, ids: np.ndarray, lengths: np.ndarray) -> dict[str, str]:
    """Why a summary has no value."""
    missing = {}
    for name, number in _marks(tokenizer).items():
        if number < 0:
            missing[name] = f"the tokenizer has no {MARKS[name].replace('_', ' ')}"
        elif not (ids == number).any():
            missing[name] = f"the tokenizer puts no {getattr(tokenizer, MARKS[name])} into these texts"
    if lengths.max() < 2:
        missing |= dict.fromkeys(("to_previous", "to_next", "entropy_share"), "no text has more than one token")
    return missing


def _counts(lengths: np.ndarray) -> dict[str, int]:
    """How many tokens each mean is over: the first has none before it, the last none after, a lone one no choice."""
    pairs, several = int((lengths - 1).sum()), int(lengths[lengths > 1].sum())
    fewer = {"to_previous": pairs, "to_next": pairs, "entropy_share": several}
    return {name: fewer.get(name, int(lengths.sum())) for name in SUMMARIES}


def _check(place: int, attention: Tensor, real: Tensor) -> None:
    """Refuse probabilities that do not add up to one over real tokens, for each real token."""
    wrong = ((attention * real[:, None, None, :]).sum(-1) - 1).abs().amax(1)[real].max()
    if not float(wrong) <= 1e-3:  # said this way round, so that what is no number is refused as well
        raise RunError(
            f"attention in layer {place + 1} adds up to 1 ± {float(wrong):.2g}, not to 1; are its weights sound?"
        )
