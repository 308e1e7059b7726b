"""Timing models in turns at several settings, and choosing one of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from smallbert.bench.variants import Variant, predict_variant
from smallbert.errors import UserError
from smallbert.machine.facts import machine, versions
from smallbert.measuring.cost import WARM, take_turns
from smallbert.measuring.metrics import paired_error, score
from smallbert.model.answering import check_head
from smallbert.model.batch import Batch

if TYPE_CHECKING:
    from smallbert.tasks import Task

FACTS = ("runs", "precision", "exact", "bytes")  # of a variant, in the record


def bench(
    variants: list[Variant],
    batches: list[int] = [1],  # noqa: B006
    lengths: list[int] = [32],  # noqa: B006
    threads: list[int] = [1],  # noqa: B006
    seconds: float = 2.0,
    task: Task | None = None,
    split: str = "dev",
    max_drop: float | None = None,
    say: Any = None,
) -> dict[str, Any]:
    """Time variants against each other, at every setting; `seconds` is for each variant at each.

    {"rows": [{"name": "base", "batch": 1, "length": 32, "threads": 1, "p50_ms": 7.9, "p95_ms": …, "p99_ms": …,
    "texts_per_second": …, "faster": 1.0, …}, …], "variants": {"base": {"bytes": …, "scores": …, "drop_stderr": 0.0}},
    "choice": …}

    "faster" is against the first: the median over turns, so that what disturbs one turn disturbs both alike.
    """
    say = say or (lambda *_: None)
    check_variants(variants, lengths, task)
    about: dict[str, dict[str, Any]] = {
        one.name: {**{fact: getattr(one, fact) for fact in FACTS}, "scores": None} for one in variants
    }
    if task is not None:
        rows_of, said = task.split(split), [predict_variant(one, task, split, say) for one in variants]
        for one, each in zip(variants, said, strict=True):
            about[one.name]["scores"] = score(task, each, rows_of)
            about[one.name]["drop_stderr"] = paired_error(task, task.metrics[0], said[0], each, rows_of)
    settings, rows = list(product(threads, lengths, batches)), list[dict[str, Any]]()
    for number, (count, length, batch) in enumerate(settings):
        say("timing", number, len(settings), f"batch {batch}, {length} tokens, {_threads(count)}")
        rows += _time(variants, batch, length, count, seconds)
    say("timing", len(settings), len(settings))
    record: dict[str, Any] = {
        "kind": "bench",
        "rows": rows,
        "variants": about,
        "task": task and task.name,
        "split": split,
    }
    record["headline"] = task.metrics[0] if task is not None else None
    record |= {"choice": None, "machine": machine(), "versions": versions()}
    if task is not None:
        record["choice"] = choose(record, max_drop)
    return record


def check_variants(variants: list[Variant], lengths: list[int], task: Task | None, exports: Sequence[str] = ()) -> None:
    """Refuse what cannot be timed or scored; `exports` are names of those that will be made of the first."""
    names = [*(variant.name for variant in variants), *exports]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"two models are called {twice!r}; rename one folder, or leave one out")
    if (most := min(variant.length for variant in variants)) < max(lengths):
        raise UserError(f"--length was given {max(lengths)}; one of these models can take at most {most} tokens")
    if task is not None:
        for one in variants:
            check_head(one, task, one.name)


def _time(variants: list[Variant], batch: int, length: int, threads: int, seconds: float) -> list[dict[str, Any]]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        texts = random_texts(min(one.words for one in variants), length, batch)
        calls = {one.name: partial(one.open(threads), texts) for one in variants}
        with torch.inference_mode():
            taken = take_turns(calls, seconds * len(calls), None, WARM)
    finally:
        torch.set_num_threads(before)
    first = taken[variants[0].name]
    return [
        {
            "name": name,
            "batch": batch,
            "length": length,
            "threads": threads,
            **{f"p{share}_ms": float(np.percentile(each, share)) * 1e3 for share in (50, 95, 99)},
            "texts_per_second": batch / float(np.median(each)),
            "faster": float(np.median(first / each)),
            "repeats": len(each),
        }
        for name, each in taken.items()
    ]


def random_texts(words: int, length: int, batch: int) -> Batch:
    """Texts of one length, nothing of them padding."""
    ids = torch.randint(5, words, (batch, length), generator=torch.Generator().manual_seed(0))
    return Batch(ids, torch.zeros_like(ids), torch.arange(length).expand(batch, -1), size=batch, longest=length)


def choose(record: dict[str, Any], max_drop: float | None) -> dict[str, Any] | None:
    """The fastest variant whose score is at most `max_drop` points below the first's; speed is the mean over settings.

    {"name": "onnx-int8", "sentence": "onnx-int8 is the fastest that holds …"}
    """
    if max_drop is None:
        return None
    metric, names = record["headline"], list(record["variants"])
    value = {name: one["scores"][metric]["value"] for name, one in record["variants"].items()}
    speed = {name: _mean_speed(record["rows"], name) for name in names}
    first = names[0]
    held = [name for name in names if value[name] >= value[first] - max_drop]
    best = max(held, key=lambda name: speed[name])
    lost = [name for name in names if name not in held]
    sentence = (
        f"keep {first}: none of the others is faster and within {max_drop:g} points of its {metric} of "
        f"{value[first]:.1f}"
        if best == first
        else f"{best} is the fastest that keeps {metric} within {max_drop:g} points of {first}: "
        f"{value[best]:.1f} against {value[first]:.1f}, {speed[best]:.2f} times as fast"
    )
    sentence += f" ({', '.join(lost)} lost more)" if lost else ""
    # Where the first stays, what it hangs on is what the fastest of the others lost.
    quicker = [name for name in (lost if best == first else [best]) if speed[name] > 1]
    doubt = _doubt(record, max(quicker, key=lambda name: speed[name]), max_drop) if quicker else ""
    return {"name": best, "max_drop": max_drop, "speed": speed, "sentence": f"{sentence}.{doubt}"}


def _doubt(record: dict[str, Any], name: str, max_drop: float) -> str:
    """A sentence where the examples are too few to see whether this variant loses so many points."""
    error = _error_of(record["variants"][name], record["headline"])
    if error <= max_drop:
        return ""
    count = record["variants"][name]["scores"][record["headline"]]["n"]
    return (
        f" {count:,} examples are too few to judge {max_drop:g} points: the loss of {name} is known to ± {error:.1f}; "
        "score on more."
    )


def _error_of(variant: dict[str, Any], metric: str) -> float:
    """How well is known what a variant loses: the paired error, where there is one, else that of its own score.

    Where all examples agree, one more might not.
    """
    found, paired = variant["scores"][metric], variant.get("drop_stderr")
    return float(found["stderr"] if paired is None else max(paired, 100 / found["n"]))


def _mean_speed(rows: list[dict[str, Any]], name: str) -> float:
    """The geometric mean of how many times faster than the first it was."""
    return float(np.exp(np.mean([np.log(row["faster"]) for row in rows if row["name"] == name])))


def _threads(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)}"
