"""Verbs that look and hand over: list, inspect, report, export."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from smallbert.cli.options import Data, Json, Kind, Label, Model, Out, Pair, Text, print_json, progress
from smallbert.errors import UserError


def list_(
    what: Annotated[
        str | None,
        typer.Argument(help="methods, presets, tasks or families, or the name of one of them; all if left out."),
    ] = None,
    json: Json = False,
) -> None:
    """Show what there is: methods, presets, tasks and families; or all about one of them."""
    with progress() as say:
        say("starting")
        from smallbert.cli import catalog

        if what is not None and what not in catalog.KINDS:
            from smallbert.cli.entry import show_entry

            kind, row = catalog.find_entry(what)
            return print_json({kind: [row]}) if json else say.show(*show_entry(kind, row))
        kinds = [what] if what else list(catalog.KINDS)
        found = {kind: catalog.KINDS[kind]() for kind in kinds}
        if json:
            return print_json(found)
        for kind, rows in found.items():
            say.show(_table(kind, rows, _COLUMNS[kind]))
        if "tasks" in kinds:
            say.show(catalog.OWN_DATA)
        if what is None or what in ("methods", "presets"):
            say.show("More about one of them: smallbert list NAME")


def inspect(model: Model, json: Json = False) -> None:
    """Show what a model is made of, what was done to it, and what each preset would make of it."""
    with progress() as say:
        say("starting")
        from smallbert.cli import catalog
        from smallbert.sources import find_model

        found = {"model": model, **catalog.inspect_folder(find_model(model, say.line))}
        if json:
            return print_json(found)
        for trouble in found["damage"]:
            say.line(trouble)
        say.show(_facts(found))
        say.show(_table("what presets would make of it (an estimate)", found["presets"], _ESTIMATES))
        if found["card"]:
            from smallbert.report.table import render_table

            say.show(render_table([found["card"]]))


def report(
    folder: Annotated[str, typer.Argument(help="A folder with cards in it, such as the --out of compare.")],
    out: Annotated[str | None, typer.Option("--out", help="Where the page goes (FOLDER/report).")] = None,
    budget: Annotated[
        str | None, typer.Option("--budget", help="Limits for the best model (those the comparison was given, if any).")
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Write FOLDER/README.md instead, an overview of topic folders.")
    ] = False,
    json: Json = False,
) -> None:
    """Write a page with tables and plots of all cards in a folder."""
    with progress() as say:
        say("writing the page")
        if markdown:
            from smallbert.report.markdown import write_overview

            written = write_overview(folder)
            return print_json({"page": str(written)}) if json else say.show(f"The overview is in {written}")
        from smallbert.measuring.budget import Budget
        from smallbert.measuring.card import MACHINERY_CHECK
        from smallbert.measuring.shelf import kept_budget, load_cards
        from smallbert.report import write_report
        from smallbert.report.errors import load_errors

        limits = kept_budget(folder) if budget is None else Budget.parse(budget)
        cards = load_cards(folder) or load_cards(folder, (MACHINERY_CHECK,))
        errors = load_errors(folder)
        models = ", ".join(dict.fromkeys(card["model"] for card in cards))
        title = f"{models}, made small" if cards else "Two models side by side"
        page = write_report(cards, out or str(Path(folder) / "report"), title, limits, errors)
        if json:
            counts = {"cards": len(cards), "errors": len(errors)}
            return print_json({"page": str(page), **counts, "budget": str(limits) if limits else None})
        count, what, of = (len(cards), "run", "") if cards else (len(errors), "comparison", " of two models")
        told = f"{count} {what}{'s' * (count != 1)}{of}"
        within = f", the best within {limits.in_words()}" if limits and cards else ""
        say.show(f"Report on {told}{within}: {page}")


def export(
    folder: Model,
    to: Annotated[str, typer.Option("--to", help="hf (a plain Hugging Face folder), onnx or onnx-int8.")],
    out: Out,
    task: Annotated[
        str | None, typer.Option("--task", help="Check on texts of this task too, not only on built-in sentences.")
    ] = None,
    calibrate: Annotated[
        str | None,
        typer.Option("--calibrate", help="onnx-int8: fix input ranges, found on training texts of this task."),
    ] = None,
    max_difference: Annotated[
        float | None,
        typer.Option(
            "--max-difference", help="Largest difference of scores (onnx, 0.001) or probabilities (int8, 0.5)."
        ),
    ] = None,
    data: Data = None,
    text: Text = None,
    pair: Pair = None,
    label: Label = None,
    kind: Kind = None,
    json: Json = False,
) -> None:
    """Write a model for other programs, and check that it gives the same scores there."""
    with progress() as say:
        say("exporting")
        if to not in ("hf", "onnx", "onnx-int8"):
            raise UserError(f"--to was given {to!r}; write hf or onnx or onnx-int8")
        if calibrate is not None and to != "onnx-int8":
            raise UserError(f"--calibrate fixes input ranges for int8; write --to onnx-int8, not {to}")
        if max_difference is not None and not 0 < max_difference < math.inf:
            raise UserError(f"--max-difference was given {max_difference:g}; write a number above 0, such as 0.1")
        from smallbert import export as writing
        from smallbert.making import starting
        from smallbert.sources import find_model

        found_at = find_model(folder, say.line)
        columns = {"text": text, "pair": pair, "label": label, "kind": kind}
        names = dict.fromkeys(name for name in (task, calibrate) if name)
        tasks = {name: starting.task_from(name, data, None, say.line, **columns) for name in names}
        settings: dict[str, Any] = {
            "task": tasks.get(task or calibrate or ""),
            "max_difference": max_difference,
            "say": say,
        }
        if to == "onnx-int8":
            found = writing.export_int8(found_at, out, **settings, calibrate=tasks.get(calibrate or ""))
        else:
            write = writing.export_onnx if to == "onnx" else writing.export_hugging_face
            found = write(found_at, out, **settings)
        if json:
            return print_json(found)
        say.show(f"The model is in {out}")
        say.show(_agreement(found), *found["notes"])


def _agreement(found: dict[str, Any]) -> str:
    if not found["checked"]:
        return "not checked: onnxruntime is not installed"
    same = "" if found["same"] is None else f", {found['same']:.1%} of predictions the same, "
    sway = f"; sway {found['sway']:.1e}" if found["same"] is None else f"probabilities within {found['sway']:.1e}"
    checked = f"largest difference {found['difference']:.1e} over {found['checked']} texts"
    return f"{found['bytes'] / 1e6:,.1f} MB, {found['precision']}; {checked}{same}{sway}"


_COLUMNS = {
    "methods": {"name": "method", "about": "what it does", "settings": "settings"},
    "presets": {"name": "preset", "about": "what it is", "recipe": "recipe"},
    "tasks": {"name": "task", "about": "question", "kind": "kind", "metrics": "metrics"},
    "families": {"name": "family", "about": "what it has"},
}
_ESTIMATES = {
    "preset": "preset",
    "layers": "layers",
    "parameters": "parameters",
    "weight_bytes": "bytes of weights",
    "why": "why not",
}


def _table(title: str, rows: list[dict[str, Any]], columns: dict[str, str]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for key, heading in columns.items():
        table.add_column(heading, overflow="fold", no_wrap=key in ("name", "preset"))
    for row in rows:
        table.add_row(*(_cell(row[key]) for key in columns))
    return table


def _cell(value: Any) -> Any:
    from rich.text import Text

    if isinstance(value, list):
        value = " ".join(value)
    return Text(f"{value:,}" if isinstance(value, int) else str(value or ""))


def _facts(found: dict[str, Any]) -> Any:
    from rich.table import Table

    from smallbert.measuring.pruned import weights_left

    table = Table(box=None, show_header=False, pad_edge=False)
    head = found["head"]
    size = found["bytes"]
    left = weights_left(found)
    shown = {
        "model": found["model"],
        "family": found["family"],
        "shape": f"{found['layers']} layers, width {found['width']}, {found['heads']} heads",
        "vocabulary": found["vocabulary"],
        "parameters": ", ".join(f"{part} {count:,}" for part, count in found["parameters"].items()),
        **(
            {"weights left": f"{left} %, of the layers' matrices / of the whole model"}
            if left and left.is_pruned
            else {}
        ),
        "bytes": ", ".join(f"{part} {count:,}" for part, count in size.items()),
        "head": f"{head['kind']}, {', '.join(head['labels'])}" if head else "none yet",
        "loads with": "transformers and smallbert" if found["layout"] == "huggingface" else "smallbert",
        "done": ", then ".join(found["steps"]) or "nothing: the model is unchanged",
        **({"last recipe": found["recipe"]} if found["recipe"] else {}),
    }
    for name, value in shown.items():
        table.add_row(name, _cell(value))
    return table
