"""What a preset is: a named recipe with its reference, published numbers and what to know."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Preset:
    """One row: a name, a recipe text, its reference, published numbers with their source, and what to know.

    `published` holds `scores` (task, metric, value on the 0-100 scale), `model`, `split` and `source`; where no
    number could be checked, `scores` is empty and `why` says so.
    """

    name: str
    recipe: str
    reference: str
    about: str
    published: dict[str, Any] = field(default_factory=dict)


def published(
    source: str, *, model: str = "bert-base-uncased", split: str = "dev", **scores: dict[str, float]
) -> dict[str, Any]:
    """Numbers of a paper or its code, by task and metric."""
    return {"scores": scores, "model": model, "split": split, "source": source}


def unpublished(why: str) -> dict[str, Any]:
    """No number that could be checked."""
    return {"scores": {}, "why": why}
