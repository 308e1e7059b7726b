"""What an ONNX export says about itself in its export.json; read without torch, since servers have none."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from smallbert.errors import UserError

FILE = "export.json"
INPUTS = ("input_ids", "attention_mask", "token_type_ids")
AGAIN = "export the model again"


@dataclass(frozen=True)
class Exported:
    """The facts of an export that others rely on."""

    inputs: list[str]
    kind: str | None  # of its head
    labels: list[str]
    length: int | None  # the most tokens it takes
    model: str | None  # the fingerprint of what was exported
    precision: str | None  # what it multiplies
    calibrated: str | None  # the fingerprint of the task whose texts its ranges were found on
    pairs: bool | None  # whether it learned from pairs of texts; None where nobody knows

    @property
    def outputs(self) -> int:
        """How many scores it promises."""
        return {"regress": 1, "answer": 2}.get(self.kind or "", len(self.labels))


def read_exported(folder: Path) -> Exported:
    """Read and check export.json, so that a damaged one is said in a sentence."""
    path = folder / FILE
    found = read_object(path)
    if lost := [name for name in ("inputs", "kind", "labels", "length") if name not in found]:
        raise UserError(f'{path} has no "{lost[0]}"; {AGAIN}')
    right = {
        "inputs": _are_words(found["inputs"]) and bool(found["inputs"]) and set(found["inputs"]) <= {*INPUTS},
        "kind": found["kind"] is None or isinstance(found["kind"], str),
        "labels": _are_words(found["labels"]),
        "length": found["length"] is None or (type(found["length"]) is int and found["length"] > 0),
        "model": isinstance(found.get("model"), str | None),
        "precision": isinstance(found.get("precision"), str | None),
        "calibrated": isinstance(found.get("calibrated"), str | None),
        "pairs": isinstance(found.get("pairs"), bool | None),
    }
    if wrong := [name for name, is_right in right.items() if not is_right]:
        raise UserError(f'{path} has an impossible value for "{wrong[0]}": {str(found[wrong[0]])[:60]!r}; {AGAIN}')
    facts: dict[str, Any] = {name: found.get(name) for name in right}
    return Exported(**facts)


def check_scores(folder: Path, about: Exported, scores: Sequence[np.ndarray]) -> None:
    """Refuse an export that gives other scores than its export.json promises; one without a head promises none."""
    count = scores[0].shape[-1]
    fits = about.kind is None or count == about.outputs
    if not fits or not all(np.isfinite(one).all() for one in scores):
        found = "scores that are not finite" if fits else f"{count} scores"
        raise UserError(f"{folder} gives {found} where its {FILE} promises {about.outputs}; {AGAIN}")


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of an export."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {_first_line(error)}; {AGAIN}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} holds a {type(found).__name__} where a JSON object should be; {AGAIN}")
    return found


@contextmanager
def told_of(path: Path, fault: str) -> Iterator[None]:
    """Say whatever goes wrong inside as a fault of a file: onnxruntime and tokenizers have no common errors."""
    try:
        yield
    except Exception as error:
        raise UserError(f"{path} {fault}: {_first_line(error)}; {AGAIN}") from None


def _are_words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
