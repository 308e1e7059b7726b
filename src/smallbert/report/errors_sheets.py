"""The tables of two models side by side: their numbers, classes and what they are taken for, and who is right where."""

from typing import Any

from smallbert.measuring.findings import p_value
from smallbert.report.sheets import NONE, Sheet

Facts = dict[str, Any]
SIDES = ("A", "B")
WIDE = 6  # classes; a larger confusion matrix is told by its commonest mistakes
SOME = 12  # rows of a table of classes, or of mistakes
HALVES = {"regress": ("nearer", "farther")}  # what stands for right and wrong where there is only distance


def sheets(found: Facts) -> list[Sheet]:
    """Every table: the numbers of both, classes and what they are taken for, and where the two are right."""
    made = [_facts_sheet(found)]
    if found["labels"] and found["positive"] is None:
        made.append(_classes_sheet(found))
    made += _confusion_sheets(found)
    overlap = found["overlap"]
    if "both" in overlap:
        cells = (("both", "only_a"), ("only_b", "neither"))
        rows = [
            [f"A {word}", *(f"{overlap[key]:,} ({100 * overlap[key] / found['examples']:.1f} %)" for key in keys)]
            for word, keys in zip(("right", "wrong"), cells, strict=True)
        ]
        made.append(Sheet(f"Who is right, of {found['examples']:,}", ["", "B right", "B wrong"], rows, []))
    return made


def _facts_sheet(found: Facts) -> Sheet:
    """One row a number, A beside B."""
    kind, models = found["kind"], found["models"]
    right, wrong = HALVES.get(kind, ("right", "wrong"))
    rows = [[metric, *(_plus_minus(model["scores"][metric]) for model in models)] for metric in models[0]["scores"]]
    notes = ["after ± the standard error", "p of lengths is Welch's t test"]

    def add(title: str, *path: Any, form: str = ".1f") -> None:
        rows.append([title, *(_number(_follow(model, path), form) for model in models)])

    if kind == "tag":
        rows.append(["whole sentences right, %", *(f"{100 * m['right'] / found['examples']:.1f}" for m in models)])
    if found["positive"] is not None:
        label = found["labels"].index(found["positive"])
        others = [name for name in found["labels"] if name != found["positive"]]
        add(
            f"predicted {found['positive']}, % ({models[0]['classes'][label]['share_true']:.1f} are)",
            "classes",
            label,
            "share_said",
        )
        add("recall, %", "classes", label, "recall")
        add("precision, %", "classes", label, "precision")
        if label != 1 or "f1" not in models[0]["scores"]:  # else it stands above, with its error
            add("F1", "classes", label, "f1")
        add(
            f"right on {others[0]}, %" if len(others) == 1 else "right on the others, %",
            "classes",
            label,
            "right_on_others",
        )
    if kind == "regress":
        rows.append(["mean absolute error", *map(_distance, models)])
        add("mean of predicted - true", "bias", form="+.3f")
        notes.append("nearer and farther: the halves of a model's own predictions")
    if kind == "answer" and models[0]["unanswerable"]:
        add(f"predicted no answer, % ({models[0]['unanswerable']:.1f} have no answer)", "silent")
        add("exact match where there is an answer, %", "right_on", "answerable")
        add("right where there is none, %", "right_on", "unanswerable")
    if kind == "classify":
        add("mean confidence, %", "sure")
        add("calibration error, points", "calibration_error")
        notes.append("calibration error: distance of confidence from accuracy, mean over ten bins (ECE)")
    for name in models[0]["lengths"]:
        rows.append([f"{name}, {right} and {wrong} ones (p)", *(_length(model["lengths"][name]) for model in models)])
    return Sheet(f"{found['task']}, {found['split']}, {found['examples']:,} examples", ["", *SIDES], rows, notes)


def _classes_sheet(found: Facts) -> Sheet:
    """One row a class; of many classes those of which the two models find most unlike shares."""
    pairs = list(zip(*(model["classes"] for model in found["models"]), strict=True))
    notes = []
    if len(pairs) > SOME:
        notes = [f"{SOME} of {len(pairs)} classes, those of most unlike recall first"]
        pairs = sorted(pairs, key=lambda pair: -abs((pair[0]["recall"] or 0) - (pair[1]["recall"] or 0)))[:SOME]
    columns = {"predicted, %": "share_said", "recall": "recall", "precision": "precision", "F1": "f1"}
    rows = []
    for pair in pairs:
        numbers = [_number(each[key], ".1f") for key in columns.values() for each in pair]
        rows.append([pair[0]["label"], _number(pair[0]["share_true"], ".1f"), *numbers])
    titles = [f"{side} {word}" for word in columns for side in SIDES]
    return Sheet("Class by class", ["class", "true, %", *titles], rows, notes)


def _confusion_sheets(found: Facts) -> list[Sheet]:
    """What each class was taken for, a table a model; of many classes only the commonest mistakes."""
    labels, models = found["labels"], found["models"]
    if not labels:
        return []
    if len(labels) <= WIDE:
        columns = ["true", *(f"predicted {label}" for label in labels)]
        rows = [[[label, *map(str, row)] for label, row in zip(labels, m["confusion"], strict=True)] for m in models]
        return [Sheet(f"{side}: confusion matrix", columns, own, []) for side, own in zip(SIDES, rows, strict=True)]
    counts = [{(true, said): count for true, said, count in model["confused"]} for model in models]
    every = sorted(dict.fromkeys([*counts[0], *counts[1]]), key=lambda pair: -sum(each.get(pair, 0) for each in counts))
    listed = [[*pair, *(str(each.get(pair, NONE)) for each in counts)] for pair in every[:SOME]]
    return [Sheet("The most frequent mistakes", ["true", "predicted", *SIDES], listed, [])] if listed else []


def _follow(facts: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        facts = facts[step]
    return facts


def _plus_minus(score: Facts) -> str:
    return f"{score['value']:.1f} ± {score['stderr']:.1f}"


def _distance(model: Facts) -> str:
    error = model["absolute_error_stderr"]
    return f"{model['absolute_error']:.3f}" + ("" if error is None else f" ± {error:.3f}")


def _length(facts: Facts) -> str:
    p = "" if facts["p"] is None else f" ({p_value(facts['p'])})"
    return f"{_number(facts['right'], '.1f')}, {_number(facts['wrong'], '.1f')}{p}"


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form)
