"""The page: one HTML file that needs nothing else: the answer, the plots, the table, how each model was made."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smallbert.errors import UserError
from smallbert.machine.files import write_json, write_text
from smallbert.measuring.budget import Budget, show
from smallbert.measuring.card import MACHINERY_CHECK, Card, number
from smallbert.measuring.choice import best, frontier
from smallbert.measuring.groups import score_of, short_recipes
from smallbert.report import plot
from smallbert.report.errors import page_section
from smallbert.report.figure import COLOURS, to_png
from smallbert.report.table import Row, make_rows, note_sizes, shown_columns, task_key, three_digits

PLOTS = {  # what is drawn against the score: title of the plot, title of the axis, units of a card in one of the axis
    "size": ("Smaller to the left, better to the top", "size on disk, MB", 1e6),
    "latency": ("Faster to the left, better to the top", "median time for one batch, ms", 1.0),
}


def write_report(
    cards: Sequence[Card],
    folder: Path | str,
    title: str,
    budget: Budget | None = None,
    errors: Sequence[dict[str, Any]] = (),
) -> Path:
    """Write index.html, plot.png and cards.json about the cards into a folder, and give the path of the page.

    `errors` are comparisons of two models, a section each; without cards the page is about them alone.
    """
    if not cards and not errors:
        raise UserError("there are no cards to report on; make some with `smallbert compare`, then give their folder")
    kinds = {card["kind"] for card in cards}
    if len(kinds) > 1:
        raise UserError("results and machinery checks cannot be in one report; give the cards of one kind")
    try:
        import jinja2
    except ImportError as error:
        raise UserError("a report needs jinja2; run: pip install -e '.[report]'") from error
    folder, tasks = Path(folder), list(dict.fromkeys(map(task_key, cards)))
    sections = []
    for place, task in enumerate(tasks):
        members = [card for card in cards if task_key(card) == task]
        sections.append(
            _section(members, budget, f"task{place}", folder / ("plot.png" if not place else f"plot{place}.png"))
        )
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(Path(__file__).with_name("page.html.jinja").read_text(encoding="utf-8"))
    page = template.render(
        title=title,
        sections=sections,
        runs=len(cards),
        budget=budget,
        machinery_check=kinds == {MACHINERY_CHECK},
        places=_places(cards),
        colours=COLOURS,
        errors=[page_section(found, f"errors{place}") for place, found in enumerate(errors)],
    )
    if cards:
        write_json(folder / "cards.json", list(cards))
    write_text(folder / "index.html", page + "\n")
    return folder / "index.html"


def _section(cards: list[Card], budget: Budget | None, prefix: str, picture: Path) -> dict[str, Any]:
    """All the page says about one task."""
    rows = make_rows(cards)
    rows.sort(key=lambda row: (row.card["status"] != "ok", -(number(row.card, "score") or 0.0)))
    choice = best([row.card for row in rows], budget)
    first = rows[0].card
    return {
        "id": prefix,
        "task": first["task"],
        "note": first["task_note"],
        "split": first["split"],
        "metric": first["headline"],
        "chance": first["chance"],
        "models": len(rows),
        "answer": choice.sentence,
        "facts": _facts(rows, choice.card),
        "plots": _plots(rows, choice.card, budget, prefix, picture),
        "columns": shown_columns(rows),
        "rows": [_table_row(row, row.card is choice.card) for row in rows],
        "footnotes": _footnotes(rows),
        "made": [_made(row, cards) for row in rows],
    }


def _facts(rows: list[Row], chosen: Card | None) -> list[tuple[str, str, str]]:
    """The chosen model in a few large numbers: (number, what it is, against the baseline)."""
    row = next((row for row in rows if row.card is chosen), None)
    if row is None:
        return []
    value, error = score_of(row.card)
    cells = row.cells
    versus = "" if row.is_baseline else f"{cells['versus']} points against the baseline"
    facts = [(f"{value:.1f}", f"{row.card['headline']}{'' if error is None else f' ± {error:.1f}'}", versus)]
    for key, unit, word, opposite in (("megabytes", "MB", "smaller", "larger"), ("ms", "ms", "faster", "slower")):
        if key not in row.reasons:
            ratio = float(row.order[word])
            times = f"{ratio:.1f}x {word}" if ratio >= 1 else f"{1 / ratio:.1f}x {opposite}" if ratio > 0 else ""
            facts.append((cells[key], unit, "" if row.is_baseline else times))
    if "parameters" not in row.reasons:
        facts.append((cells["parameters"], "parameters", ""))
    return facts


def _plots(
    rows: list[Row], chosen: Card | None, budget: Budget | None, prefix: str, picture: Path
) -> list[dict[str, str]]:
    """Each plot wide and narrow as SVG with a caption; the first is also written as a picture."""
    made = []
    names = _plot_names(rows)
    for kind, (title, axis, unit) in PLOTS.items():
        drawn = [row for row in rows if row.card["status"] == "ok" and number(row.card, kind) is not None]
        drawn = [row for row in drawn if score_of(row.card)[0] is not None]
        if not drawn:
            continue
        line = {id(card) for card in frontier([row.card for row in drawn], kind)}
        points = [
            plot.Point(
                names[id(row.card)],
                (number(row.card, kind) or 0.0) / unit,
                score_of(row.card)[0] or 0.0,
                score_of(row.card)[1] or 0.0,
                id(row.card) in line,
                row.card is chosen,
                row.is_baseline,
            )
            for row in drawn
        ]
        limits = [limit for limit in budget.limits if limit.name == kind and "<" in limit.sign] if budget else []
        limit = (limits[0].value / unit, f"budget {show(kind, limits[0].value)}") if limits else None
        metric = drawn[0].card["headline"]
        about = f"{metric} against {axis}, {len(points)} models"
        svgs = {}
        for shape, inches in (("wide", plot.WIDE), ("narrow", plot.NARROW)):
            figure = plot.draw(points, axis, metric, inches, limit)
            svgs[shape] = plot.to_svg(figure, points, f"{prefix}-{kind}-{shape}", about)
            if kind == "size" and shape == "wide":
                to_png(figure, picture)
        made.append({"title": title, "caption": _caption(kind, drawn, rows, points), **svgs})
    return made


def _caption(kind: str, drawn: list[Row], rows: list[Row], points: list[plot.Point]) -> str:
    over_seeds = any(row.card["runs"]["sd"] is not None for row in drawn)
    bars = "standard deviation over seeds (standard error where one seed was run)" if over_seeds else "standard error"
    said = [
        f"Bars reach one {bars} to each side.",
        "The line is the Pareto front: models that no other beats on both axes.",
    ]
    xs = [point.x for point in points]
    if max(xs) > plot.LOG_FROM * min(xs):
        said.append("The horizontal scale is logarithmic.")
    said.append("The vertical scale does not start at zero.")
    if kind == "latency":
        ways = list(dict.fromkeys(_way(row.card) for row in drawn))
        said.append(
            f"Measured with {'; '.join(ways)}." if len(ways) == 1 else f"Not all comparable: {'; '.join(ways)}."
        )
    if len(drawn) < len(rows):
        said.append(f"Not drawn: {len(rows) - len(drawn)} of {len(rows)} models, which did not end ok or lack a value.")
    if any(point.name != row.cells["model"] for point, row in zip(points, drawn, strict=True)):
        said.append("Labels leave out the first steps where the baseline has them too.")
    return " ".join(said)


def _way(card: Card) -> str:
    latency = card["latency"]
    threads = "" if latency["threads"] is None else f", {latency['threads']} thread{'s' * (latency['threads'] != 1)}"
    chip = card["machine"].get("gpu") if str(latency["device"]).startswith("cuda") else card["machine"].get("cpu")
    return f"batch {latency['batch']}, {latency['length']} tokens{threads}, {latency['device']} ({chip})"


def _plot_names(rows: list[Row]) -> dict[int, str]:
    """Names for labels: a recipe that starts as the baseline's does is called by what follows."""
    recipes = short_recipes([row.card for row in rows])
    start = next((recipe for recipe, row in zip(recipes, rows, strict=True) if row.is_baseline), "")
    return {id(row.card): row.cells["model"].removeprefix(f"{start} | ") for row in rows}


def _table_row(row: Row, is_best: bool) -> dict[str, Any]:
    return {
        "cells": row.cells,
        "order": row.order,
        "is_best": is_best,
        "is_baseline": row.is_baseline,
        "ok": row.card["status"] == "ok",
        "reasons": row.reasons,
    }


def _footnotes(rows: list[Row]) -> list[str]:
    """Why a number is not there and why a run did not go well, one sentence each."""
    notes = [f"{row.cells['model']}: {row.card['why']}." for row in rows if row.card["why"]]
    missing: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.card["status"] == "ok":
            for key, why in row.reasons.items():
                missing.setdefault((key, why), []).append(row.cells["model"])
    notes += [f"{note}." for note in note_sizes(rows)]
    return notes + [f"No {key} for {', '.join(names)}: {why}." for (key, why), names in missing.items()]


def _made(row: Row, cards: list[Card]) -> dict[str, Any]:
    """How one row was made: its recipe in full, the commands of its runs, and what the training noted."""
    runs = [card for card in cards if (card["recipe"], card["model_fingerprint"]) == _identity(row.card)]
    trained = [card["trained"] for card in runs if card["trained"]]
    steps = [f"{one['steps']:,} steps" for one in trained[:1] if one["steps"] is not None]
    steps += ["packed batches" for one in trained[:1] if one["packed"]]
    seconds = [card["seconds"] for card in runs if card["seconds"] is not None]
    took = [f"{three_digits(seconds[0])} s"] if len(seconds) == 1 else []
    took = [f"{three_digits(min(seconds))} to {three_digits(max(seconds))} s"] if len(seconds) > 1 else took
    seeds = f"seed{'s' if len(runs) > 1 else ''} {', '.join(str(card['seed']) for card in runs)}"
    return {
        "name": row.cells["model"],
        "model": row.card["model"],
        "recipe": row.card["recipe"],
        "commands": list(dict.fromkeys(card["command"] for card in runs)),
        "facts": ", ".join([seeds, *steps, *took]),
        "notes": list(dict.fromkeys(note for one in trained for note in one["notes"] or [])),
    }


def _identity(card: Card) -> tuple[str, str]:
    return card["recipe"], card["model_fingerprint"]


def _places(cards: Sequence[Card]) -> list[str]:
    """Every machine and set of versions the numbers were made on, in words."""
    places = []
    for card in cards:
        machine = card["machine"]
        parts = [
            machine.get("cpu"),
            f"{machine.get('cores')} cores",
            f"{machine.get('memory_gb')} GB memory",
            machine.get("gpu"),
        ]
        parts += [machine.get("system"), *(f"{name} {version}" for name, version in card["versions"].items())]
        places.append(", ".join(str(part) for part in parts if part))
    return list(dict.fromkeys(places))
