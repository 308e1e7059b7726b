"""The verb that looks inside a frozen model: probe."""

from __future__ import annotations

from typing import Annotated

import typer

from smallbert.cli.options import (
    COMMAND,
    Data,
    Device,
    Examples,
    Json,
    Kind,
    Label,
    Length,
    Model,
    Pair,
    Text,
    print_json,
    progress,
    read_seeds,
)


def probe(
    model: Model,
    tasks: Annotated[
        str, typer.Option("--tasks", help="Tasks or your own files, with commas; all: the probing tasks in --data.")
    ],
    data: Data = None,
    pool: Annotated[
        str, typer.Option("--pool", help="A text's vector: mean of its tokens, or first, its first token.")
    ] = "mean",
    parts: Annotated[
        str, typer.Option("--parts", help="Some of layers,mixture,heads,attention; heads needs a fine-tuned model.")
    ] = "layers,mixture",
    seeds: Annotated[str, typer.Option("--seeds", help="Seeds of control labels and mixtures.")] = "0,1,2",
    out: Annotated[str, typer.Option("--out", help="Where features, results and the picture go.")] = "smallbert-probe",
    text: Text = None,
    pair: Pair = None,
    label: Label = None,
    kind: Kind = None,
    examples: Examples = None,
    length: Length = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """Show which layers of a frozen model know what, by linear probes on each layer and on a mixture of all."""
    numbers = read_seeds(seeds)
    with progress() as say:
        say("starting")
        from smallbert.making.starting import start_from
        from smallbert.probing import run
        from smallbert.report import heads
        from smallbert.report.probe import head_findings, render_table, warnings, write_probe

        chosen = run.read_parts(parts)
        columns = {"text": text, "pair": pair, "label": label, "kind": kind}
        read = run.read_tasks(tasks, data, examples, say.line, **columns)
        start = start_from(model, say.line)
        options = {"length": length, "device": device, "command": COMMAND.get()}
        result = run.probe(start, read, out, parts=chosen, pool=pool, seeds=numbers, say=say, **options)  # type: ignore[arg-type]
        nothing = all(entry[part].get("why") for entry in result["tasks"] for part in chosen)
        if not nothing:
            say("drawing")
            written = write_probe(result, out)
        if json:
            print_json(result)
            raise typer.Exit(int(nothing))
        if set(run.FROZEN) & set(chosen) and not nothing:
            say.show(render_table(result))
        for entry in result["tasks"]:
            if found := head_findings(entry):
                say.show(f"Attention heads on {entry['task']}", heads.head_table(found) or "", heads.layer_table(found))
        for warning in warnings(result):
            say.line(warning)
        if not nothing:
            say.show(f"Written: {', '.join(map(str, written))}")
    if nothing:
        raise typer.Exit(1)
