"""The verb that lays two models side by side: errors."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from smallbert.cli.options import (
    COMMAND,
    Data,
    Device,
    Json,
    Kind,
    Label,
    Length,
    Pair,
    Split,
    TaskName,
    Text,
    print_json,
    progress,
)
from smallbert.errors import UserError
from smallbert.machine.files import check_folder


def errors(
    a: Annotated[str, typer.Argument(help="A model fine-tuned on the task: a folder or a hub name.", metavar="A")],
    b: Annotated[str, typer.Argument(help="Another one.", metavar="B")],
    task: TaskName,
    split: Split = "dev",
    out: Annotated[
        str | None, typer.Option("--out", help="A folder for errors.json, errors.md and errors.png.")
    ] = None,
    examples: Annotated[
        int, typer.Option("--examples", help="How many examples to show of those on which they differ most.")
    ] = 10,
    positive: Annotated[
        str | None,
        typer.Option("--positive", help="The positive class (of two, the second, or the one that the other negates)."),
    ] = None,
    data: Data = None,
    text: Text = None,
    pair: Pair = None,
    label: Label = None,
    kind: Kind = None,
    length: Length = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """Show where two models differ: what each tends to predict, which is right where, and if that may be chance."""
    if examples < 0:
        raise UserError(f"--examples was given {examples}; write how many to show, 0 or more")
    if out:
        check_folder(out)
    with progress() as say:
        say("starting")
        from smallbert.making.sidebyside import find_errors
        from smallbert.making.starting import start_from, task_from
        from smallbert.report.errors import render, write_errors

        read = task_from(task, data, None, say.line, text=text, pair=pair, label=label, kind=kind)
        one, other = start_from(a, say.line), start_from(b, say.line)
        options: dict[str, Any] = {"positive": positive, "examples": examples, "length": length, "device": device}
        found = find_errors(one, other, read, split, **options, command=COMMAND.get(), say=say)
        say("writing")
        written = write_errors(found, out) if out else []
        if json:
            return print_json(found)
        say.show(*render(found))
        if written:
            say.show(f"Written: {', '.join(map(str, written))}")
