"""Cards: everything measured of one model on one task, as one small JSON file that is never made twice."""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from smallbert.errors import RunError
from smallbert.machine.facts import machine, versions

Card = dict[str, Any]

FORMAT = 1
RESULT, MACHINERY_CHECK = "result", "machinery check"
KINDS = (RESULT, MACHINERY_CHECK)
STATUSES = ("ok", "diverged", "failed")


class Field(NamedTuple):
    """One field of a card: what it says, what it may be, its parts, and whether `null` there needs a reason."""

    about: str
    types: tuple[type, ...]
    parts: tuple[str, ...] = ()
    measured: bool = False


_NOTHING = type(None)
FIELDS: dict[str, Field] = {
    "card": Field("version of this schema", (int,)),
    "kind": Field("result, or machinery check (tiny random model; its numbers mean nothing)", (str,)),
    "model": Field("name or folder of the model started from", (str,)),
    "model_fingerprint": Field("short sha256 of its weights and config", (str,)),
    "model_bytes": Field("size on disk of that model's files as they were given", (int, _NOTHING)),
    "recipe": Field("what was done, every setting written out", (str,)),
    "reads": Field("fingerprints of the models and texts it names, if any", (str, _NOTHING)),
    "preset": Field("name of the recipe, where it has one", (str, _NOTHING)),
    "task": Field("name of the task", (str,)),
    "task_note": Field("what must be known to compare scores on it (unofficial split, subset, ...)", (str, _NOTHING)),
    "task_fingerprint": Field("short sha256 of its examples", (str,)),
    "seed": Field("seed of the run", (int,)),
    "split": Field("which examples the scores are on", (str,)),
    "status": Field("ok, diverged or failed", (str,)),
    "why": Field("why it diverged or failed", (str, _NOTHING)),
    "headline": Field("the score that ranks", (str,)),
    "chance": Field("headline score of guessing, 0-100", (int, float, _NOTHING)),
    "scores": Field("metrics, 0-100, with their errors", (dict, _NOTHING), (), True),
    "right": Field("which examples the headline counts as right, packed, where it is a share of them", (str, _NOTHING)),
    "bytes": Field(
        "size on disk of the real files",
        (dict, _NOTHING),
        ("total", "weights", "embeddings", "encoder", "head", "other"),
        True,
    ),
    "parameters": Field(
        "parameters in the model",
        (dict, _NOTHING),
        ("total", "non_embedding", "non_zero", "encoder", "encoder_non_zero"),
        True,
    ),
    "macs": Field("multiplications for one text of `length` tokens", (dict, _NOTHING), ("value", "length"), True),
    "latency": Field(
        "measured time of one batch",
        (dict, _NOTHING),
        ("p50_ms", "p95_ms", "batch", "length", "threads", "device"),
        True,
    ),
    "throughput": Field("examples per second where measured", (int, float, dict, _NOTHING), (), True),
    "missing": Field("why a number is null: {field or field.part: reason}", (dict,)),
    "trained": Field("how it was trained", (dict, _NOTHING), ("steps", "epochs", "packed", "notes")),
    "seconds": Field("wall time of the whole run", (int, float, _NOTHING)),
    "command": Field("the command that makes it again", (str,)),
    "versions": Field("versions of what it ran on", (dict,)),
    "machine": Field("the machine it ran on", (dict,)),
}
SCORE_PARTS = ("value", "stderr", "n", "low", "high")


def make_card(**fields: Any) -> Card:
    """Make a checked card; what is not given is null, and NaN becomes null with a reason.

    >>> make_card(model="all-MiniLM-L6-v2", recipe="finetune(epochs=3)", task="sst2", …, missing={"macs": "not asked"})
    """
    unknown = sorted(set(fields) - set(FIELDS))
    if unknown:
        raise RunError(f"a card has no field {', '.join(unknown)}; its fields are: {', '.join(FIELDS)}")
    card: Card = {name: None for name in FIELDS}
    card |= {"card": FORMAT, "kind": RESULT, "status": "ok", "versions": versions(), "machine": machine()}
    missing = dict(fields.pop("missing", None) or {})
    card |= {name: _finite(value, name, missing) for name, value in fields.items()}
    card["missing"] = missing
    check_card(card)
    return ordered(card)


def check_card(card: Mapping[str, Any]) -> None:
    """Raise a RunError that says all a card lacks: fields, parts of fields, reasons for its nulls."""
    wrong = [f"{name} is not there" for name in FIELDS if name not in card]
    for name, field in FIELDS.items():
        if name in card and (not isinstance(card[name], field.types) or isinstance(card[name], bool)):
            wrong.append(f"{name} is {card[name]!r} ({field.about})")
        if name in card and isinstance(card[name], dict):
            wrong += [f"{name}.{part} is not there" for part in field.parts if part not in card[name]]
    if wrong:
        raise RunError(f"the card is not complete: {'; '.join(wrong)}")
    wrong += [
        f"{name} is {card[name]!r}"
        for name, known in (("kind", KINDS), ("status", STATUSES))
        if card[name] not in known
    ]
    wrong += [f"scores.{metric}.{part} is not there" for metric, part in _score_gaps(card["scores"] or {})]
    if card["status"] == "ok" and card["headline"] not in (card["scores"] or {}):
        wrong.append(f"the headline {card['headline']!r} is not among the scores")
    if card["status"] != "ok" and not card["why"]:
        wrong.append(f"status is {card['status']}, but why gives no reason")
    if card["status"] == "ok":  # what a failed run lacks is explained by `why`
        wrong += [f"{path} is null without a reason in missing" for path in _nulls(card) if not reason(card, path)]
    wrong += [f"{path} is not a finite number" for path in _not_finite(card)]
    if wrong:
        raise RunError(f"the card is not complete: {'; '.join(wrong)}")


def card_key(
    model_fingerprint: str,
    recipe: str,
    task: str,
    task_fingerprint: str,
    seed: int,
    kind: str = RESULT,
    reads: str | None = None,
    **_: Any,
) -> str:
    """A readable name for one piece of work, equal for equal work; a whole card can be given.

    >>> card_key(**card)
    'sst2-finetune-drop_layers-distill-s0-5f0c2a9d1b'
    """
    more = [*([] if kind == RESULT else [kind]), *([f"reads {reads}"] if reads else [])]
    work = json.dumps([model_fingerprint, recipe, task, task_fingerprint, seed, *more])
    steps = re.findall(r"(?:^|[|+(,])\s*([A-Za-z]\w*)(?=\s*(?:[(|+),]|$))", recipe)
    readable = re.sub(r"[^\w-]+", "_", "-".join([Path(task).stem, *steps]))[:60].strip("-_")
    return f"{readable}-s{seed}-{hashlib.sha256(work.encode()).hexdigest()[:10]}"


def number(card: Mapping[str, Any], name: str) -> float | None:
    """One number of a card as budgets call it: size, latency, parameters, macs, throughput, score or a metric."""
    if name in _NUMBERS:
        field, part = _NUMBERS[name]
        value = (card[field] or {}).get(part)
    elif name == "throughput":
        rate = card["throughput"]
        value = next(iter(rate.values()), None) if isinstance(rate, dict) else rate
    else:
        metric = card["headline"] if name == "score" else name
        value = ((card["scores"] or {}).get(metric) or {}).get("value")
    return None if value is None else float(value)


_NUMBERS = {
    "size": ("bytes", "total"),
    "latency": ("latency", "p50_ms"),
    "parameters": ("parameters", "total"),
    "macs": ("macs", "value"),
}


def reason(card: Mapping[str, Any], path: str) -> str | None:
    """Why a number of a card is null: the reason of the part, else of the whole field, else of the run."""
    missing = card["missing"]
    return missing.get(path) or missing.get(path.split(".")[0]) or (card["why"] if card["status"] != "ok" else None)


def _score_gaps(scores: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(metric, part) for metric, score in scores.items() for part in SCORE_PARTS if part not in (score or {})]


def _nulls(card: Mapping[str, Any]) -> list[str]:
    """Paths of every measured number that is null, as 'latency' or 'latency.p95_ms'."""
    paths = []
    for name in (name for name, field in FIELDS.items() if field.measured):
        value = card[name]
        if value is None:
            paths.append(name)
        elif isinstance(value, dict):
            paths += [f"{name}.{part}" for part, inner in value.items() if inner is None]
    for metric, score in (card["scores"] or {}).items():
        paths += [f"scores.{metric}.{part}" for part, inner in (score or {}).items() if inner is None]
    return paths


def _finite(value: Any, path: str, missing: dict[str, str]) -> Any:
    """The value with six significant digits (steady files, small diffs), NaN and infinity as null with a reason."""
    if isinstance(value, Mapping):
        return {str(key): _finite(inner, f"{path}.{key}", missing) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner, f"{path}.{place}", missing) for place, inner in enumerate(value)]
    if hasattr(value, "item"):  # a numpy or torch scalar
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        missing.setdefault(path, f"it came out as {value}")
        return None
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _not_finite(value: Any, path: str = "") -> list[str]:
    if isinstance(value, Mapping):
        return [found for key, inner in value.items() for found in _not_finite(inner, f"{path}.{key}".lstrip("."))]
    if isinstance(value, list | tuple):
        return [found for inner in value for found in _not_finite(inner, path)]
    return [path] if isinstance(value, float) and not math.isfinite(value) else []


def ordered(card: Mapping[str, Any]) -> Card:
    """The same card with its keys in the order of the schema, so that two files differ only where the facts do."""
    ordered = {name: card[name] for name in (*FIELDS, *sorted(set(card) - set(FIELDS)))}
    for name, field in FIELDS.items():
        if isinstance(card[name], dict):
            rest = [part for part in card[name] if part not in field.parts]
            ordered[name] = {part: card[name][part] for part in (*field.parts, *rest)}
    if ordered["scores"]:
        ordered["scores"] = {
            metric: {part: score[part] for part in (*SCORE_PARTS, *sorted(set(score) - set(SCORE_PARTS)))}
            for metric, score in ordered["scores"].items()
        }
    return ordered
