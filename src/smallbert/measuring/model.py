"""All that is measured of one saved model: its scores on a task and what it costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from smallbert.measuring import cost
from smallbert.measuring.evaluate import Say, evaluate
from smallbert.measuring.metrics import right_ones
from smallbert.measuring.outcomes import pack
from smallbert.measuring.pruned import note_zeros
from smallbert.model.encoder import Encoder
from smallbert.texts.data import usable_length

if TYPE_CHECKING:
    from smallbert.tasks import Task

COST_LENGTHS = {"answer": 384}  # tokens at which speed is measured; what is not named here is short texts
COST_LENGTH = 32


def measure_model(
    encoder: Encoder,
    folder: Path | str,
    task: Task,
    split: str = "dev",
    say: Say = lambda stage, done, total, info: None,
    seconds: float | None = 2.0,
) -> dict[str, Any]:
    """Scores and costs of a saved model in the fields of a card, and "notes" on how the texts were read."""
    length = usable_length(encoder, None, task)
    found = evaluate(encoder, task, split, length, say)
    say("measuring its speed" if seconds is not None else "measuring its size", 0, 0, "")
    costs = cost.measure(encoder, folder, min(length, COST_LENGTHS.get(task.kind, COST_LENGTH)), seconds=seconds)
    notes = [*(f"{split}: {note}" for note in found["notes"]), *note_zeros(costs)]
    right = right_ones(task, found["predictions"], task.split(split))
    return {"scores": found["scores"], "right": right and pack(right), **costs, "notes": notes}
