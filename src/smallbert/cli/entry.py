"""One method, preset, task or family as a screen of its own."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from smallbert.recipes.settings import to_text

MANY = 12  # presets that are named where more have a method


def show_entry(kind: str, row: dict[str, Any]) -> Iterator[Any]:
    """What stands on the screen of one entry of the catalogue, part by part."""
    from rich.text import Text

    yield Text.assemble((row["name"], "bold"), f"  {row['about']}")
    yield from {"methods": _method, "presets": _preset, "tasks": _task}.get(kind, lambda row: iter(()))(row)


def _method(row: dict[str, Any]) -> Iterator[Any]:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    if row["defaults"]:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("setting", no_wrap=True)
        table.add_column("default", overflow="fold", max_width=24)
        table.add_column("means")
        for name, default in row["defaults"].items():
            said = f"{name}={to_text(default)}"
            usual = to_text(default) if said in row["settings"] else "required"
            table.add_row(name, Text(usual), Text(_meaning(row["meanings"][name], row["may_be"][name])))
        yield table
    if row["more"]:
        yield Text(f"{row['more']}\n")
    if used := row["presets"]:
        others = f" and {len(used) - MANY} more" if len(used) > MANY else ""
        yield Text(f"used in presets: {', '.join(used[:MANY])}{others}", style="dim")


def _meaning(means: str, may_be: str) -> str:
    """What a setting means, and behind it the values that it may have where that does not name them all."""
    named = all(word in means for word in re.findall(r"'\w+'|None|\d+", may_be))
    plain = not re.search(r"\bor\b|'", may_be)
    return means if means and (named or plain) else f"{means} ({may_be})".strip()


def _preset(row: dict[str, Any]) -> Iterator[Any]:
    from rich.padding import Padding
    from rich.text import Text

    yield Text("\nrecipe")
    first, *others = phases_of(row["recipe"])
    for phase in (f"  {first}", *(f"| {other}" for other in others)):
        yield Padding(Text(phase), (0, 0, 0, 2))
    yield Text(f"\nreference  {row['reference']}")
    known = row["published"]
    scores = [
        f"{task} {' / '.join(f'{metric} {value:g}' for metric, value in values.items())}"
        for task, values in known.get("scores", {}).items()
    ]
    if scores:
        yield Text(f"published  {', '.join(scores)} ({known['model']}, {known['split']}; {known['source']})")
    elif "why" in known:
        yield Text(f"published  nothing to compare with: {known['why']}")
    yield Text(f"\nsmallbert compress MODEL --task TASK --recipe {row['name']} --out small", style="bold")


def _task(row: dict[str, Any]) -> Iterator[Any]:
    from rich.text import Text

    yield Text(f"kind     {row['kind']}\nmetrics  {', '.join(row['metrics'])}")


def phases_of(recipe: str) -> list[str]:
    """The phases of a recipe as they were written.

    "a | b(x=1) + c"  ->  ["a", "b(x=1) + c"]
    """
    tree: ast.AST = ast.parse(recipe, mode="eval").body
    phases: list[str] = []
    while isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.BitOr):
        phases.append(ast.get_source_segment(recipe, tree.right) or "")
        tree = tree.left
    return [ast.get_source_segment(recipe, tree) or "", *reversed(phases)]
