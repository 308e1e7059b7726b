"""Toy tasks of every kind that a tiny encoder can learn, and the few questions that many tests ask of an encoder."""

import random
from functools import lru_cache
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from smallbert.errors import UserError
from smallbert.making.run import run_recipe
from smallbert.model.encoder import fingerprint
from smallbert.tasks.task import Split, Task
from smallbert.texts.batches import Layout, make_batch
from smallbert.texts.data import tokenise
from smallbert.tiny import make_encoder

GOOD = "great good lovely warm clever bright fine sweet moving sharp".split()
BAD = "bad dull weak cold silly grey poor slow clumsy flat".split()
PLAIN = "the film story plot music scene ending cast idea book was is seems and with very".split()
LABELS = {"classify": ("bad", "good"), "pair": ("bad", "good", "none"), "tag": ("O", "GOOD", "BAD")}
METRICS = {"regress": ("pearson",), "answer": ("em", "f1")}


@lru_cache
def toy_task(kind: str = "classify", rows: int = 48, seed: int = 0) -> Task:
    """A task of a kind ("pair" is classify with two texts) with texts of unequal length; dev has half as many rows."""
    splits = {"train": _split(kind, rows, seed), "dev": _split(kind, rows // 2, seed + 1)}
    labels, metrics = LABELS.get(kind, ()), METRICS.get(kind, ("accuracy",))
    name = "classify" if kind == "pair" else kind
    return Task(f"toy {kind}", name, labels, metrics, 0.0, 64, "", f"{kind}-{rows}-{seed}", splits=splits)


def _split(kind: str, rows: int, seed: int) -> Split:
    """Texts of plain words with good and bad ones strewn in; what the label is follows from those."""
    draw = random.Random(f"{kind} {seed}")
    texts, pairs, labels = [], [], []
    for row in range(rows):
        words = draw.choices(PLAIN, k=draw.randint(2, 9))
        place = draw.randrange(len(words))
        if kind == "classify":
            words[place] = draw.choice((BAD, GOOD)[row % 2])
            labels.append(row % 2)
        elif kind == "pair":  # the second text decides; the first one is noise of the same kind
            words[place] = draw.choice(GOOD + BAD)
            second = [*draw.choices(PLAIN, k=draw.randint(1, 6)), draw.choice((BAD, GOOD, PLAIN)[row % 3])]
            pairs.append(" ".join(second))
            labels.append(row % 3)
        elif kind == "regress":
            words[place] = draw.choice((BAD, GOOD)[row % 2])
            labels.append(2.0 * (row % 2) - 1 + draw.uniform(-0.1, 0.1))
        elif kind == "tag":
            words = [draw.choice(draw.choice((PLAIN, GOOD, BAD))) for _ in words]
            labels.append([1 if word in GOOD else 2 if word in BAD else 0 for word in words])
        else:
            words[place] = draw.choice(GOOD)
            pairs.append(" ".join(words))
            labels.append({"text": [words[place]], "answer_start": [len(" ".join([*words[:place], ""]))]})
            words = ["this", "was"]
        texts.append(words if kind == "tag" else " ".join(words))
    return Split(texts, pairs or None, labels, [str(row) for row in range(rows)])


def small(family: str = "bert", layers: int = 2, seed: int = 0, **shape):
    """A tiny encoder with fewer layers than usual, for tests that train."""
    count = "n_layers" if family == "distilbert" else "num_hidden_layers"
    return make_encoder(family, seed, **{count: layers, **shape})


def run(recipe, encoder, task=None, seed: int = 0, **options):
    """Run a recipe on the CPU."""
    return run_recipe(recipe, encoder, task, seed, device="cpu", **options)


def check_refused(recipe, encoder, task, match: str) -> None:
    """A recipe is refused in one sentence, and where it cannot be read, with its text and carets under the place."""
    with pytest.raises(UserError, match=match) as refusal:
        run(recipe, encoder, task)
    assert str(refusal.value).count("\n") in (0, 2)


def stream_of(encoder, task, split: str = "dev"):
    return tokenise(encoder.tokenizer, task.split(split), task.kind, 64)


def batch_of(encoder, task, index=(0, 1, 2, 3, 4), split: str = "dev", packed: bool = False, **options):
    """Some examples of a task as a batch."""
    layout = Layout(packed, 64, grain=32) if packed else Layout(False, 64)
    return make_batch(stream_of(encoder, task, split), np.asarray(index), layout, **options)


@torch.no_grad()
def scores_of(encoder, task, **options):
    """The scores of the encoder, in evaluation mode, on a few examples of a task."""
    return encoder.eval()(batch_of(encoder, task, **options))


def state_of(encoder) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in encoder.state_dict().items()}


def is_same_state(one, other) -> bool:
    """Whether two encoders have the same weights to the last bit."""
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def snapshot(encoder):
    """All that must not change about an encoder that was only given to look at."""
    return (
        fingerprint(encoder),
        encoder.training,
        [module.training for module in encoder.modules()],
        {name: parameter.requires_grad for name, parameter in encoder.named_parameters()},
        [id(parameter) for parameter in encoder.parameters()],
        list(encoder.order),
        {name: sorted(getattr(module, "held_facts", ())) for name, module in encoder.named_modules()},
    )


def accuracy(encoder, task, split: str = "train") -> float:
    """The share of right answers, in percent (for regress: the correlation)."""
    from smallbert.measuring.evaluate import evaluate

    return next(iter(evaluate(encoder, task, split, 64)["scores"].values()))["value"]


class _Caught(Exception):
    """Carries a phase out of the run that was about to train it."""


def phase_of(recipe, encoder, task, seed: int = 0, **options):
    """The first training phase of a recipe, with everything attached and its optimiser made, before its first step."""
    from smallbert.training.optimiser import make_optimiser

    def catch(phase, *_):
        raise _Caught(phase)

    with patch("smallbert.making.run.train", catch):
        try:
            run(recipe, encoder, task, seed, **options)
        except _Caught as caught:
            phase = caught.args[0]
            phase.optimiser, phase.total = make_optimiser(phase), 10
            return phase
    raise AssertionError(f"{recipe} does not train")


def trajectory(recipe, encoder, task, **options):
    """The loss at every step that the run tells of, and what the run gave."""
    seen = []

    def say(stage, done, total, info):
        if stage == "training":
            seen.append(float(info.removeprefix("loss ")))

    return seen, run(recipe, encoder, task, say=say, **options)


def pairs(rows, columns, every: int, also=lambda row, column: False):
    """All pairs, for pytest: on every so-manieth diagonal, and `also` some, they are quick, elsewhere slow.

    Each row is then quick with every so-manieth column, and each column with every so-manieth row.
    """
    return [
        pytest.param(row, column, marks=() if (x + y) % every == 0 or also(row, column) else pytest.mark.slow)
        for x, row in enumerate(rows)
        for y, column in enumerate(columns)
    ]


def daily(cases, every: int):
    """A list, for pytest: every so-manieth case, from the first on, is quick, the others slow."""
    return [pytest.param(one, marks=() if n % every == 0 else pytest.mark.slow) for n, one in enumerate(cases)]


def held() -> float:
    """Megabytes that this process holds for itself: pages of mapped files are not among them."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024
