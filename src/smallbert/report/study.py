"""The report of a study: all its tables, as Markdown, as JSON with every number, and pictures."""

import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from smallbert.machine.files import write_json, write_text
from smallbert.measuring.convergence import Convergence, find_convergence
from smallbert.measuring.findings import ENDS, FEW, Cell, Pair, Result, are_numbers, conclude, gather, pair_up
from smallbert.report.convergence import draw_study
from smallbert.report.differences import draw_differences
from smallbert.report.figure import to_png
from smallbert.report.rows import draw_rows
from smallbert.report.sheets import About, Sheet, pairs_sheet, seeds_sheet, tasks_sheet, varied_sheet
from smallbert.report.sizes import draw_sizes, have_sizes

LONG = 80  # letters that a title may have


class Report(NamedTuple):
    """All that a study says."""

    about: About
    cells: list[Cell]
    pairs: list[Pair]
    convergence: list[Convergence]
    sheets: list[Sheet]
    sentences: list[str]


def make_report(results: Sequence[Result], about: About) -> Report:
    """Everything there is to say about the runs of a study."""
    cells, setting = gather(results), about.setting
    values = list(dict.fromkeys(cell.value for cell in cells))
    pairs = pair_up(cells)
    sheets = [
        seeds_sheet([c for c in cells if (c.task, c.value) == (task, value)], about)
        for task in about.tasks
        for value in values
    ]
    if setting is not None:
        sheets += [varied_sheet([c for c in cells if c.task == task], setting) for task in about.tasks]
    if any(len(pair.one.runs) > 1 for pair in pairs):  # what one seed differs by can be read off its scores
        sheets.append(pairs_sheet(pairs, setting, len(about.tasks) > 1))
    if len(about.tasks) > 1:
        sheets += [tasks_sheet([c for c in cells if c.value == value], setting) for value in values]
    by_epochs = setting is not None and setting.split(".")[-1] == "epochs" and len(values) > 1 and are_numbers(values)
    convergence = find_convergence(cells) if by_epochs else []
    return Report(
        about, cells, pairs, convergence, sheets, [*(c.sentence for c in convergence), conclude(cells, setting)]
    )


def to_markdown(report: Report, pictures: Sequence[str] = ()) -> str:
    """The whole report as one page."""
    about = report.about
    names = list(dict.fromkeys(name for name, _, _ in about.arms))
    title = ", ".join(names)
    short = len(names) <= FEW and len(title) <= LONG
    parts = [f"# Study of {title if short else f'{len(names)} recipes'}", *report.sentences]
    parts.append(f"Made from {about.model}; scores on {about.split}, 0 to 100. How it was made is at the end.")
    parts += [f"![{name}]({name})" for name in pictures]
    for sheet in report.sheets:
        lines = [sheet.columns, ["---"] * len(sheet.columns), *sheet.rows]
        table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        parts += [f"## {sheet.title}", table, *("; ".join(sheet.notes),) * bool(sheet.notes)]
    whys = troubles(report)
    parts += ["## Runs that diverged, failed or are missing", "\n".join(f"- {why}" for why in whys)] if whys else []
    recipes = [
        f"- {name}{'' if value is None else f', {about.setting} = {value}'}: `{recipe}`"
        for name, value, recipe in about.arms
    ]
    parts += ["## How it was made", "\n".join(recipes)]
    parts += [f"```bash\n{about.command}\n```"] if about.command else []
    return "\n\n".join(parts) + "\n"


def troubles(report: Report) -> list[str]:
    """Every run that diverged, failed or is missing, those of one reason together."""
    by_reason: dict[tuple[str, ...], list[int]] = {}
    for run in (run for cell in report.cells for run in cell.runs if run.status != "ok"):
        at = "" if run.value is None else f" at {run.value}"
        by_reason.setdefault((run.task, f"{run.arm}{at}", run.status, run.why or ""), []).append(run.seed)
    return [
        f"{task}, {arm}, {status}{f': {why}' if why else ''} (seed {', '.join(map(str, seeds))})"
        for (task, arm, status, why), seeds in by_reason.items()
    ]


def to_json(report: Report) -> dict[str, Any]:
    """Every number of the report."""
    about = report.about
    return {
        "study": 1,
        "sentences": report.sentences,
        **{name: getattr(about, name) for name in ("model", "split", "command", "setting")},
        "tasks": {name: {"metric": metric, "kind": kind} for name, (metric, kind, _) in about.tasks.items()},
        "arms": [{"name": name, "value": value, "recipe": recipe} for name, value, recipe in about.arms],
        "runs": [run._asdict() for cell in report.cells for run in cell.runs],
        "cells": [
            {
                **{name: getattr(cell, name) for name in ("task", "arm", "value")},
                "survivors": cell.survivors._asdict(),
                "all": cell.all._asdict(),
                **{status.replace(" ", "_"): cell.count(status) for status in (*ENDS, "failed", "not run")},
                "diverged_interval": cell.interval,
            }
            for cell in report.cells
        ],
        "pairs": [
            {
                **{"task": pair.one.task, "value": pair.one.value, "one": pair.one.arm, "other": pair.other.arm},
                **{name: getattr(pair, name) for name in ("survivors", "all", "fisher", "flips", "is_beyond")},
                **{name: _with_error(getattr(pair, name)) for name in ("paired", "paired_survivors")},
            }
            for pair in report.pairs
        ],
        "convergence": [
            {
                **{name: getattr(found, name) for name in ("task", "one", "other", "factor", "sentence")},
                "plateau": _with_error(found.plateau),
                **{name: at and at._asdict() for name, at in (("one_at", found.one_at), ("other_at", found.other_at))},
            }
            for found in report.convergence
        ],
    }


def _with_error(mean: Any) -> dict[str, Any]:
    return {**mean._asdict(), "error": mean.error}


def write_study(report: Report, out: Path, more: Sequence[str] = ()) -> list[Path]:
    """Write study.md, study.json and the pictures; gives their paths. The page shows `more` pictures that lie there."""
    pictures = _draw(report, out) if find_spec("matplotlib") else []
    write_json(out / "study.json", to_json(report))
    write_text(out / "study.md", to_markdown(report, [*pictures, *more]))
    return [out / name for name in ("study.md", "study.json", *pictures)]


def _draw(report: Report, out: Path) -> list[str]:
    """One picture of all tasks where there are several and nothing was varied, else one a task; gives their names."""
    tasks, setting = report.about.tasks, report.about.setting
    if len(tasks) > 1 and setting is None and report.pairs:
        if not any(pair.paired.error is not None for pair in report.pairs):
            return []  # one seed: points without errors would look like findings
        to_png(draw_differences(report.pairs), out / "differences.png")
        return ["differences.png"]
    pictures = []
    for task, (metric, _, chance) in tasks.items():
        cells = [cell for cell in report.cells if cell.task == task]
        if sum(cell.all.n for cell in cells) > 1:
            name = re.sub(r"[^\w-]+", "_", f"{task}-{setting or 'seeds'}").strip("_") + ".png"
            in_rows = setting is None and (len(cells) > FEW or all(len(cell.runs) == 1 for cell in cells))
            figure = draw_rows(cells, metric) if in_rows else draw_study(cells, metric, setting, chance)
            to_png(figure, out / name)
            pictures.append(name)
            if setting is None and have_sizes(cells):
                pictures.append(name.replace("-seeds.png", "-sizes.png"))
                to_png(draw_sizes(cells, metric), out / pictures[-1])
    return pictures
