"""Invented cards for tests of what reads cards; none of these numbers was measured."""

from typing import Any

from smallbert.measuring.card import Card, make_card


def invented_card(
    recipe: str = "finetune(epochs=3)",
    score: float | None = 90.0,
    megabytes: float | None = 90.0,
    ms: float | None = 8.0,
    stderr: float = 0.7,
    **fields: Any,
) -> Card:
    """A complete card of a made-up run; a number given as None is null with a reason."""
    missing = {}
    scores: Any = {"accuracy": {"value": score, "stderr": stderr, "n": 2000, "low": None, "high": None}}
    if score is None:
        scores, missing["scores"] = None, "not scored"
    else:
        scores["accuracy"] |= {"low": score - 1.4, "high": score + 1.4}
        scores["f1"] = {**scores["accuracy"], "value": score - 2}
    size: Any = None
    if megabytes is None:
        missing["bytes"] = "not saved"
    else:
        total = int(megabytes * 1e6)
        size = {"total": total, "weights": total, "embeddings": 0, "encoder": total, "head": 0, "other": 0}
    count = int((megabytes or 0) * 250_000)
    parameters = dict.fromkeys(("total", "non_embedding", "non_zero", "encoder", "encoder_non_zero"), count)
    latency = {"p50_ms": ms, "p95_ms": ms, "batch": 1, "length": 32, "threads": 2, "device": "cpu"}
    if ms is None:
        missing |= {"latency": "not asked"}
    given: dict[str, Any] = {
        "model": "all-MiniLM-L6-v2",
        "model_fingerprint": "05980f9ad46ca8eb",
        "recipe": recipe,
        "task": "rotten_tomatoes",
        "task_note": None,
        "task_fingerprint": "74cadeb67ef99078",
        "seed": 0,
        "split": "dev",
        "headline": "accuracy",
        "chance": 57.8,
        "scores": scores,
        "bytes": size,
        "parameters": parameters,
        "macs": {"value": 3.4e8, "length": 32},
        "latency": None if ms is None else latency,
        "throughput": None,
        "trained": {"steps": 96, "epochs": 1, "packed": False, "notes": []},
        "seconds": 41.5,
        "command": f"smallbert compress all-MiniLM-L6-v2 --task rotten_tomatoes --recipe '{recipe}'",
        "versions": {"python": "3.12.1", "torch": "2.13.0"},
        "machine": {"system": "Linux x86_64", "cpu": "An invented CPU", "cores": 2, "memory_gb": 8.0, "gpu": None},
        "missing": {"throughput": "no GPU", **missing},
    }
    return make_card(**given | fields)


EIGHT = (
    ("baseline", "finetune(epochs=3, lr=5e-05)", 79.6, 91.0, 7.9),
    (None, "finetune(epochs=3, lr=5e-05) | quantize(bits=8)", 79.5, 23.1, 9.4),
    (None, "finetune(epochs=3, lr=5e-05) | drop_layers(keep=3) | distill(alpha=0.5)", 77.9, 69.6, 4.0),
    (
        None,
        "finetune(epochs=3, lr=5e-05) | drop_layers(keep=3) | distill(alpha=0.5) | quantize(bits=8)",
        77.8,
        17.6,
        4.9,
    ),
    (None, "finetune(epochs=3, lr=5e-05) | drop_layers(keep=1) | distill(alpha=0.5)", 73.2, 55.4, 1.6),
    (
        None,
        "finetune(epochs=3, lr=5e-05) | magnitude(keep=0.3) + distill(alpha=0.5) + train(epochs=2)",
        78.4,
        91.0,
        7.9,
    ),
    ("bermo", "mix_layers | finetune(epochs=3, lr=5e-05)", 79.9, 91.1, 8.0),
    (None, "mix_layers | finetune(epochs=3, lr=5e-05) | quantize(bits=8)", 79.3, 23.2, 9.5),
)


def eight_cards() -> list[Card]:
    """Eight invented models of one task, some nearly on top of each other."""
    return [
        invented_card(recipe, score, megabytes, ms, stderr=0.9, preset=preset)
        for preset, recipe, score, megabytes, ms in EIGHT
    ]
